"""Which moves of weights a token of held weights tells apart, and what stays pinned."""

import contextlib
import ctypes
import gc
import itertools
import weakref
from unittest import mock

import comfy.hooks
import comfy.memory_management
import comfy.model_management
import comfy.model_patcher
import comfy.ops
import comfy.pinned_memory
import comfy.sample
import comfy.sd
import comfy_aimdo.torch
import narrow_transformer as narrow
import pytest
import torch
from comfy_aimdo import model_vbar
from comfyui_boot import MODE, folder

from qwen_l40s.caches import forget
from qwen_l40s.families.registry import blocks_of
from qwen_l40s.hosts.comfyui.load.transformer import load_model
from qwen_l40s.hosts.comfyui.sample import held
from qwen_l40s.hosts.comfyui.sample.layers import ComfyLayers
from qwen_l40s.hosts.comfyui.sample.optimize import OptimizeSettings, optimize
from qwen_l40s.optimizations.blocks.block_form import head_norms, token_layers

FOLDER = folder("held")
WEIGHTS = narrow.weights()
PATH = narrow.write(FOLDER / "bf16.safetensors", WEIGHTS)
CPU = torch.device("cpu")
LATENTS = torch.Size((1, 16, 1, 8, 8))
KEY = "diffusion_model.transformer_blocks.1.attn.to_k.weight"


def loaded(form="bf16"):
    """A MODEL and an optimized clone of it that is loaded and samples."""
    gc.collect()
    stock = load_model(PATH, form)[0]
    if form == "bf16":
        stock.model.manual_cast_dtype = None  # on a processor ComfyUI computes it in fp32
    model = optimize(stock, OptimizeSettings(attention="comfyui"))
    comfy.model_management.load_models_gpu([model])
    model.pre_run()
    return stock, model


class Passes:
    """The passes of one run; a token that comes again has to find the same tensors."""

    def __init__(self, model):
        self.model, self.blocks = model.model, blocks_of(model.model.diffusion_model)
        self.like = torch.empty(0, dtype=self.model.get_dtype_inference())
        self.known = {}
        self.run = {}

    def __call__(self, during=lambda: None):
        """The token, or the reason why there is none."""
        layers = ComfyLayers(self.model, LATENTS, self.run)
        with layers.hold(self.blocks) as token:
            during()
            if token is None:
                return layers.moving.fact
            assert layers.moving is None
            found = self.places(layers)
            assert self.known.setdefault(token, found) == found
            return token

    def start_run(self):
        for weights in self.run.values():
            weights.start_run()

    def places(self, layers):
        norms = (norm for block in self.blocks for norm in head_norms(block))
        found = [layers.norm_weight(norm, self.like).data_ptr() for norm in norms]
        for layer in self.layers:
            with layers.tensors(layer, self.like) as tensors:
                found += [part if part is None else part.data_ptr() for part in tensors]
        return found

    @property
    def layers(self):
        return list(itertools.chain.from_iterable(map(token_layers, self.blocks)))


# ------------------------------------------------------------------------ without dynamic VRAM


@pytest.mark.parametrize("form", ["bf16", "fp8", "int8"])
def test_a_model_that_stays_is_held_and_looked_at_once(form):
    passes = Passes(loaded(form)[1])
    token = passes()
    assert isinstance(token, int), token
    passes.start_run()
    with mock.patch.object(held, "_look", None):
        assert passes() == token
    passes.run = {}
    assert passes() == token
    layer = passes.layers[-1]  # another extension exchanges one
    layer.weight = torch.nn.Parameter(layer.weight.detach().clone(), requires_grad=False)
    passes.start_run()
    assert passes() not in (token, None)
    gone = weakref.ref(layer.weight)
    layer.weight = None
    assert gone() is None, "nothing keeps weights between two runs"


def other_bias(layer, norm):
    layer.bias = torch.nn.Parameter(layer.bias.detach().clone(), requires_grad=False)


def other_norm(layer, norm):
    norm.weight = torch.nn.Parameter(norm.weight.detach().clone(), requires_grad=False)


def other_memory(layer, norm):
    layer.weight.data = layer.weight.data.clone()


@pytest.mark.parametrize("change", [other_bias, other_norm, other_memory])
def test_what_another_extension_exchanges_between_two_runs_is_seen(change):
    """CUDA graphs read addresses, and outlive a run."""
    _, model = loaded()
    passes = Passes(model)
    token = passes()
    change(passes.layers[-1], head_norms(passes.blocks[-1])[-1])
    passes.start_run()
    found = passes()
    assert isinstance(found, int) and found != token
    assert passes() == found


@contextlib.contextmanager
def copying(model):
    """As between a card and host memory: `Module.to` copies, except what is looked at cheaply."""
    spared = {id(block.attn.to_q.weight) for block in blocks_of(model.model.diffusion_model)}

    def to(module, *_):
        for parameter in module.parameters():
            if id(parameter) not in spared:
                parameter.data = parameter.data.clone()
        return module

    with mock.patch.object(torch.nn.Module, "to", to):
        yield


def partly(stock, model):
    assert model.partially_unload(CPU, 1) > 0


def back_by_another_clone(stock, model):
    model.partially_unload(CPU, 1)
    stock.clone().partially_load(CPU, 1e32)


def out_and_in_by_another_clone(stock, model):
    other = stock.clone()
    other.detach()
    other.partially_load(CPU, 1e32)


def out(stock, model):
    model.detach()


def with_a_lora(stock, model):
    patched = stock.clone()
    patched.add_patches({KEY: ("diff", (torch.ones_like(WEIGHTS[KEY.partition(".")[2]]),))})
    comfy.model_management.load_models_gpu([patched])


def by_another_extension(stock, model):
    weight = blocks_of(model.model.diffusion_model)[1].attn.to_q.weight
    weight.data = weight.data.clone()


MOVES = (
    *(partly, back_by_another_clone, out_and_in_by_another_clone, out, with_a_lora),
    by_another_extension,
)


@pytest.mark.parametrize("move", MOVES, ids=lambda move: move.__name__)
def test_every_move_between_two_passes_is_seen(move):
    stock, model = loaded()
    passes = Passes(model)
    token = passes()
    with copying(model):
        move(stock, model)
        found = passes()
        assert found != token
        assert isinstance(found, int) == (move is not partly), found
        assert passes() == found
        comfy.model_management.load_models_gpu([model])
        model.partially_load(CPU, 1e32)
    assert passes() in passes.known


def test_weights_that_no_token_can_stand_for():
    """Hooks, functions on the way, casts: each with its reason. A layer that runs itself is another
    token's.
    """
    _, model = loaded()
    passes = Passes(model)
    layer = passes.layers[-1]
    model.hook_patches = {"hook": {}}
    assert passes() == held.HOOKS.fact
    model.hook_patches = {}
    layer.weight_function = [lambda weight: weight]
    passes.run = {}
    assert passes() == held.ON_THE_WAY.fact
    layer.weight_function = []
    passes.run = {}
    with mock.patch.object(type(model.model), "get_dtype_inference", lambda _: torch.float32):
        assert passes() == held.CAST.fact
    passes.run = {}
    alone = passes()
    passes.run = {}
    removed = layer.register_forward_hook(lambda *_: None)
    assert isinstance(passes(), int) and passes() != alone
    removed.remove()
    model.cleanup()  # no sampler runs the model: every pass looks at every layer
    passes.run = None
    token = passes()
    weight = passes.layers[3].weight
    weight.data = weight.data.clone()
    assert isinstance(token, int) and passes() not in (token, None)


def test_a_held_model_goes_with_its_last_patcher():
    stock, model = loaded()
    Passes(model)()
    model.cleanup()
    gone = weakref.ref(model.model)
    comfy.model_management.unload_all_models()
    del stock, model
    assert gone() is None


def test_one_scale_for_all_rows_keeps_its_place():
    tensors = narrow.quantized(WEIGHTS, narrow.fp8_of_one_scale, {"format": "float8_e4m3fn"})
    with mock.patch(
        "comfy.model_detection.detect_unet_config", lambda *_, **__: dict(narrow.CONFIG)
    ):
        stock = comfy.sd.load_diffusion_model_state_dict(tensors)
    model = optimize(stock, OptimizeSettings(attention="comfyui"))
    comfy.model_management.load_models_gpu([model])
    model.pre_run()
    passes = Passes(model)
    for layer in passes.layers:
        layer._full_precision_mm = False  # as on a card
    one = passes.layers[0].weight._params.scale
    for value in (float(one), 0.5):
        one.fill_(value)
        passes.run = {}
        token = passes()
        assert isinstance(token, int), token
        layers = ComfyLayers(model.model, LATENTS, passes.run)
        with layers.hold(passes.blocks), layers.tensors(passes.layers[0], passes.like) as tensors:
            scale = tensors.scale
        assert scale.shape == (narrow.SHAPE.dim, 1) and set(scale.flatten().tolist()) == {value}
    assert list(passes.known) == [token]


# --------------------------------------------------------------------------- under dynamic VRAM


class Pages:
    """Stands in for `ModelVBAR`, in memory of the processor; counts pins as aimdo does."""

    base_addr = 1 << 40

    def __init__(self, count):
        self.serials, self.pins, self.resident = [0] * count, [0] * count, [False] * count
        self.watermark = count
        self.memory = {}

    def _numbers(self, address, size):
        start = address - self.base_addr
        return range(start // held.PAGE, -(-(start + size) // held.PAGE))

    def fault(self, address, size):
        numbers = self._numbers(address, size)
        if numbers.stop > self.watermark:
            return None
        for number in numbers:
            self.serials[number] += not self.resident[number]
            self.resident[number] = True
            self.pins[number] += 1
        signature = (ctypes.c_uint32 * (size // held.PAGE + 2))()
        signature[: len(numbers)] = [self.serials[number] for number in numbers]
        return signature

    def unpin(self, address, size):
        for number in self._numbers(address, size):
            assert self.pins[number] > 0
            self.pins[number] -= 1
            self._leave(number, number >= self.watermark)

    def free(self, pages):
        """Pages are taken from the top down; pinned ones are passed over."""
        while pages and self.watermark:
            self.watermark -= 1
            pages -= self._leave(self.watermark, True)

    def _leave(self, number, wanted):
        leaves = wanted and self.resident[number] and not self.pins[number]
        self.resident[number] &= not leaves
        return leaves

    def get_residency(self):
        return [here | 2 * (pins > 0) for here, pins in zip(self.resident, self.pins, strict=True)]

    def get_watermark(self):
        return self.watermark

    def prioritize(self):
        self.watermark = len(self.pins)

    def tensor(self, alloc, device):
        return self.memory[alloc[1]]


class Dynamic:
    """A model whose token layers lie in pages, with those of other layers between."""

    SIZE, GAP = 12 << 20, 100 << 20

    def __init__(self, monkeypatch, form="bf16", biases=True):
        self.model = loaded(form)[1]
        self.model.is_dynamic = lambda: True
        self.passes = Passes(self.model)
        self.pages = Pages(40)
        self.model.model.dynamic_vbars = {CPU: self.pages}
        address = self.pages.base_addr
        for index, layer in enumerate(self.passes.layers):
            address += self.GAP * (index == 10)
            if not biases:  # as comfy.ops makes it under dynamic VRAM: the None is no parameter
                del layer.bias
                layer.bias = None
            layer._v, layer._v_signature = (self.pages, address, self.SIZE), None
            stored = [layer.weight, layer.bias]
            bytes_ = comfy.memory_management.vram_aligned_size(stored)
            self.pages.memory[address] = torch.zeros(bytes_, dtype=torch.uint8)
            address += self.SIZE
        self.used = [*range(4), *range(6, 13)]
        self.free = 0
        real = comfy.model_management.get_free_memory
        monkeypatch.setattr(
            comfy.model_management,
            "get_free_memory",
            lambda dev=None, torch_free_too=False: real(dev, True) if torch_free_too else self.free,
        )
        monkeypatch.setattr(comfy_aimdo.torch, "aimdo_to_tensor", self.pages.tensor)
        monkeypatch.setattr(comfy.pinned_memory, "get_pin", lambda *_, **__: None)
        monkeypatch.setattr(comfy.pinned_memory, "pin_memory", lambda *_, **__: None)

    def read(self, layer):
        """A layer's tensors as ComfyUI's own cast gives them on a card."""
        dtype = self.passes.like.dtype
        layer._pin_state = {"fast_disk": False}
        comfy.ops.cast_modules_with_vbar([layer], dtype, CPU, dtype, False)
        tensors = comfy.ops.resolve_cast_module_with_vbar(layer, dtype, CPU, dtype, dtype, True)
        if layer._prefetch["signature"] is not None:
            model_vbar.vbar_unpin(layer._v)
        del layer._prefetch
        return tensors

    def __call__(self, during=lambda: None):
        """A pass; without a token its layers are read one by one."""
        pinned = []
        found = self.passes(lambda: (pinned.append(any(self.pages.pins)), during()))
        assert pinned == [isinstance(found, int)] and not any(self.pages.pins)
        if not isinstance(found, int):
            for layer in self.passes.layers:
                self.read(layer)
        return found

    def held(self):
        """The token of a new run's second pass, where memory is short."""
        self.passes.run = {}
        assert self() == held.ROOM.fact
        token = self()
        assert isinstance(token, int), token
        return token


@pytest.mark.parametrize("form", ["bf16", "fp8", "int8"])
def test_pages_that_are_all_there_are_pinned_for_a_pass(monkeypatch, form):
    dynamic = Dynamic(monkeypatch, form)
    layer = dynamic.passes.layers[-1]
    if form != "bf16":  # a LoRA that is merged as its layer is read
        change = torch.ones_like(layer.weight.dequantize())
        patches = {KEY: [(1.0, ("diff", (change,)), 1.0, None, None)]}
        layer.weight_lowvram_function = comfy.model_patcher.LowVramPatch(KEY, patches)
        layer.seed_key = KEY
    token = dynamic.held()
    pages = dynamic.pages
    assert [number for number, here in enumerate(pages.resident) if here] == dynamic.used
    pinned = lambda: [number for number, pins in enumerate(pages.pins) if pins]  # noqa: E731
    with mock.patch.object(held, "_look", None):  # once in a run
        assert dynamic(lambda: pinned() == dynamic.used or pytest.fail()) == token
    assert dynamic.held() == token
    for layer in dynamic.passes.layers:
        assert dynamic.read(layer)[0] is layer._v_weight


def test_pages_that_are_taken_away_between_two_passes(monkeypatch):
    dynamic = Dynamic(monkeypatch)
    token, pages = dynamic.held(), dynamic.pages
    pages._leave(2, True)
    assert dynamic() == held.PARTIAL.fact
    assert dynamic() == token, "the pass before has read it again"
    pages.free(30)  # nothing is read into the uppermost again
    assert [dynamic(), dynamic()] == [held.PARTIAL.fact] * 2
    pages.prioritize()
    assert [dynamic(), dynamic()] == [held.PARTIAL.fact, token]
    # Pages that are there, with another's contents.
    pages._leave(7, True)
    other = pages, pages.base_addr + 7 * held.PAGE, 1
    assert model_vbar.vbar_fault(other)
    model_vbar.vbar_unpin(other)
    assert [dynamic(), dynamic()] == [held.PARTIAL.fact, token]


def test_a_pass_that_fails_leaves_no_pins(monkeypatch):
    dynamic = Dynamic(monkeypatch)
    token, pages = dynamic.held(), dynamic.pages

    def fail(error):
        assert any(pages.pins)
        raise error

    with pytest.raises(KeyboardInterrupt):
        dynamic(lambda: fail(KeyboardInterrupt))
    assert not any(pages.pins) and dynamic() == token
    with pytest.raises(torch.OutOfMemoryError):
        dynamic(lambda: fail(torch.OutOfMemoryError))
    assert not any(pages.pins)
    assert [dynamic(), dynamic()] == [held.TIGHT.fact] * 2
    assert dynamic.held() == token


def test_memory_that_is_short_during_a_pass_costs_as_many_pages_as_it_needs(monkeypatch):
    dynamic = Dynamic(monkeypatch)
    token, pages = dynamic.held(), dynamic.pages
    assert dynamic(lambda: pages.free(1)) == token
    assert dynamic() == token, "the watermark went to the bottom with all pages"


def test_where_a_pass_has_room_the_first_one_holds_the_weights_too(monkeypatch):
    dynamic = Dynamic(monkeypatch)
    token = dynamic.held()
    for gib, found in ((1, held.ROOM.fact), (2, token)):
        dynamic.free, dynamic.passes.run = gib << 30, {}
        assert [dynamic(), dynamic()] == [found, token]
    dynamic.model.cleanup()  # nor does it take a sampler for pages to be pinned
    assert dynamic() == token
    dynamic.model.pre_run()
    for layer in dynamic.passes.layers:  # as `load` does with another LoRA
        layer.weight_function, layer._v_signature = [], None
    assert [dynamic(), dynamic()] == [held.PARTIAL.fact, token]


def test_a_new_load_is_read_by_a_pass_first(monkeypatch):
    """A LoRA that is merged into the same pages changes no signature."""
    dynamic = Dynamic(monkeypatch)
    token = dynamic.held()
    for layer in dynamic.passes.layers:  # as `load` does
        layer.weight_function, layer._v_signature = [], None
    assert [dynamic(), dynamic()] == [held.ROOM.fact, token]
    dynamic.passes.start_run()
    other = dynamic.passes.layers[3]  # as one that is cast again
    other._v_weight = other._v_weight.clone()
    assert dynamic() == held.ROOM.fact and dynamic() not in (token, held.PARTIAL.fact)
    dynamic.passes.run = {}
    norm = dynamic.passes.blocks[0].attn.norm_q
    norm.weight = torch.nn.Parameter(norm.weight.clone(), requires_grad=False)
    assert dynamic() == held.ROOM.fact
    assert isinstance(dynamic(), int) and dynamic() != token


def sample(model):
    noise, text = torch.ones(LATENTS), torch.ones(1, 9, narrow.SHAPE.joint_dim)
    prompts = [[text, {}]], [[text[:, :5], {}]]
    return narrow.sample(model, *prompts, steps=3, cfg=2.0, noise=noise)


@pytest.fixture
def found(monkeypatch):
    """What each pass finds."""
    results, inner = [], held.HeldWeights._hold

    def noted(*given):
        results.append(inner(*given))
        return results[-1]

    monkeypatch.setattr(held.HeldWeights, "_hold", noted)
    return results


def test_a_run_with_held_pages_gives_the_same_bits(monkeypatch, found):
    dynamic = Dynamic(monkeypatch)
    known = sample(dynamic.model)
    assert found[:2] == [held.ROOM, held.PARTIAL] and set(map(type, found[2:])) == {int}
    dynamic.free = 2 << 30
    assert torch.equal(sample(dynamic.model), known)
    assert set(found[6:]) == {found[2]}
    assert not any(dynamic.pages.pins)


@pytest.mark.parametrize(
    ("form", "biases"), [("bf16", True), ("bf16", False), ("fp8", True), ("int8", True)]
)
def test_weights_that_wait_come_as_comfyui_brings_them(monkeypatch, form, biases):
    ours, host = (Dynamic(monkeypatch, form, biases) for _ in range(2))
    monkeypatch.setattr(comfy_aimdo.torch, "aimdo_to_tensor", lambda at, _: at[0].memory[at[1]])
    ComfyLayers.stream(ours.passes.blocks, CPU)
    assert not any(ours.pages.pins)
    for layer, other in zip(ours.passes.layers, host.passes.layers, strict=True):
        host.read(other)
        assert torch.equal(
            *(each.pages.memory[it._v[1]] for each, it in ((ours, layer), (host, other)))
        )
        held_tensors, known = (each.read(it) for each, it in ((ours, layer), (host, other)))
        for one, two in list(zip(held_tensors, known, strict=True))[: 1 + biases]:
            assert type(one) is type(two) and one.dtype == two.dtype
            assert torch.equal(
                *(getattr(it, "dequantize", lambda it=it: it)() for it in (one, two))
            )
        assert model_vbar.vbar_signature_compare(layer._v_signature, other._v_signature)
        assert (held.stored(layer)[1] is None) != biases


def test_weights_that_change_or_are_pinned_are_left_to_comfyui(monkeypatch):
    dynamic = Dynamic(monkeypatch)
    lora, wrapped, pinned, cast, *others = dynamic.passes.layers
    change = torch.ones_like(lora.weight)
    patches = {KEY: [(1.0, ("diff", (change,)), 1.0, None, None)]}
    lora.weight_lowvram_function = comfy.model_patcher.LowVramPatch(KEY, patches)
    wrapped.weight_function = [lambda weight: weight + 1]
    pinned._pins = {"weights-loaded": {"pin": torch.zeros(1)}}
    cast.weight._model_dtype = torch.float16
    dynamic.pages.watermark = 9  # of 13 pages that are used
    ComfyLayers.stream(dynamic.passes.blocks, CPU)
    there = [layer._v_signature is not None for layer in (lora, wrapped, pinned, cast)]
    assert there == [False] * 4 and not any(dynamic.pages.pins)
    brought = [layer._v_signature is not None for layer in others]
    assert 0 < sum(brought) < len(brought) and brought == sorted(brought, reverse=True)
    before = [layer._v_signature for layer in others]
    ComfyLayers.stream(dynamic.passes.blocks, CPU)
    assert [layer._v_signature for layer in others] == before, "what is there is not brought again"


@pytest.mark.cuda
@pytest.mark.skipif(MODE != "dynamic", reason="needs pages of comfy_aimdo: --mode dynamic")
def test_on_a_card(found):
    """comfy_aimdo's own pages."""
    stock = load_model(PATH, "bf16")[0]
    model = optimize(stock, OptimizeSettings(attention="comfyui"))
    known = sample(model)
    assert isinstance(found[-1], int), found
    found.clear()
    assert torch.equal(sample(model), known) and set(map(type, found)) == {int}, found
    vbar = model.model.dynamic_vbars[model.load_device]
    for layer in itertools.chain.from_iterable(
        map(token_layers, blocks_of(model.model.diffusion_model))
    ):
        assert hasattr(layer, "_v") and model_vbar.vbar_fault(layer._v)
        model_vbar.vbar_unpin(layer._v)
    assert not any(page & 2 for page in vbar.get_residency())
    assert vbar.free_memory(1 << 40) > 0
    assert not any(page & 1 for page in vbar.get_residency()), "a page was left pinned"
    found.clear()
    assert torch.equal(sample(model), known)
    assert found[0] is held.PARTIAL and isinstance(found[-1], int), found


def test_an_unknown_comfy_aimdo_is_left_alone(monkeypatch):
    dynamic = Dynamic(monkeypatch)
    forget()
    monkeypatch.delattr(model_vbar.ModelVBAR, "get_watermark")
    assert [dynamic(), dynamic()] == [held.UNKNOWN.fact] * 2
    monkeypatch.undo()
    forget()
