"""An optimized MODEL against ComfyUI's own code."""

import gc
import re
from dataclasses import replace
from unittest import mock

import comfy.hooks
import comfy.model_base
import comfy.model_management
import comfy.model_patcher
import comfy.ops
import comfy.patcher_extension
import comfy.sample
import comfy.samplers
import comfy.sd
import narrow_transformer as narrow
import published_attention
import pytest
import torch
from block_kernel_cases import with_kernels
from comfy.ldm.qwen_image.model import Attention, QwenImageTransformerBlock
from comfy.patcher_extension import CallbacksMP, WrappersMP
from comfy_api.torch_helpers import set_torch_compile_wrapper
from comfyui_boot import MODE, folder
from gguf_files import gguf_of
from narrow_transformer import difference, random
from safetensors.torch import save_file

from qwen_l40s.caches import forget
from qwen_l40s.errors import CheckpointError, SettingError, UnavailableError
from qwen_l40s.hosts.comfyui.estimate import sizes as true_sizes
from qwen_l40s.hosts.comfyui.load import plan as load_plan
from qwen_l40s.hosts.comfyui.load.transformer import load_model
from qwen_l40s.hosts.comfyui.lora.apply import apply_lora
from qwen_l40s.hosts.comfyui.lora.bypass import sampling_patcher
from qwen_l40s.hosts.comfyui.sample.attention import SLOT, SlotAttention
from qwen_l40s.hosts.comfyui.sample.modulation import ModelModulation
from qwen_l40s.hosts.comfyui.sample.optimize import OptimizeSettings, optimize, report_of, restore
from qwen_l40s.hosts.comfyui.sample.run import OPTIMIZATION_KEY
from qwen_l40s.loaders.gguf import read_gguf
from qwen_l40s.loaders.gguf_blocks import BlockRows, map_gguf
from qwen_l40s.loaders.quantize import quantize_rows
from qwen_l40s.machine.store import AttentionTimings
from qwen_l40s.nodes.optimize import QwenL40SOptimize
from qwen_l40s.optimizations import fused
from qwen_l40s.optimizations.attention import BACKENDS, chosen
from qwen_l40s.optimizations.attention import Attention as ChosenBackend

pytestmark = pytest.mark.each_device
FOLDER = folder("optimize")
DEVICE = comfy.model_management.get_torch_device()
WEIGHTS = narrow.weights()
PATH = narrow.write(FOLDER / "bf16.safetensors", WEIGHTS)
# ComfyUI computes this model in fp32 on a processor and in bf16 on a card.
SAME = 2e-6 if MODE == "cpu" else 1e-2
HOST_ATTENTION = OptimizeSettings(attention="comfyui")


def stock(form: str = "bf16") -> comfy.model_patcher.ModelPatcher:
    gc.collect()  # ComfyUI fails where a model disappears while it makes room for another one
    return load_model(PATH, form)[0]


def forward(model, batch=1, text=7, control=None, seed=0, side=8, **conds) -> torch.Tensor:
    """One forward pass as ComfyUI's sampler makes it."""
    model = sampling_patcher(model)
    additional = model.get_nested_additional_models()
    comfy.model_management.load_models_gpu([model, *additional])
    model.pre_run()
    options = comfy.patcher_extension.copy_nested_dicts(model.model_options["transformer_options"])
    options = comfy.patcher_extension.merge_nested_dicts(options, {"wrappers": model.wrappers})
    context = random(batch, text, narrow.SHAPE.joint_dim, seed=seed + 1).to(DEVICE)
    noise = random(batch, 16, 1, side, side, seed=seed).to(DEVICE)
    sigma = torch.full((batch,), 0.7, device=DEVICE)
    with torch.inference_mode():
        return model.model.apply_model(
            noise,
            sigma,
            c_crossattn=context,
            control=control,
            transformer_options=options,
            **{name: moved(value) for name, value in conds.items()},
        ).float()


def moved(value):
    if isinstance(value, list):
        return [entry.to(DEVICE) for entry in value]
    return value.to(DEVICE) if isinstance(value, torch.Tensor) else value


def sample(model, cfg=1.0, steps=2) -> torch.Tensor:
    return narrow.sample(model, 20, 7, steps=steps, cfg=cfg)


def assert_same(known, found, most=SAME):
    assert torch.isfinite(found).all()
    assert difference(found, known) <= most, difference(found, known)


def by_core(tensors, **sizes):
    """A MODEL of ComfyUI's own loader, which takes the published sizes for granted."""
    told = mock.Mock(return_value=narrow.CONFIG | sizes)
    with mock.patch("comfy.model_detection.detect_unet_config", told):
        return comfy.sd.load_diffusion_model_state_dict(dict(tensors))


def kernels(**others):
    """Has blocks run with these in place of the device's."""
    ops = with_kernels(fused.choose_ops(DEVICE), **others)
    return mock.patch("qwen_l40s.optimizations.blocks.host.choose_ops", lambda device: ops)


def fused_in(model) -> bool:
    return report_of(model).startswith("blocks: fused, ")


def compare(model, settings=HOST_ATTENTION, fused_blocks=True, most=SAME, **arguments):
    """The optimized clone of a MODEL, whose forward pass is the MODEL's own."""
    clone = optimize(model, settings)
    assert_same(forward(model, **arguments), forward(clone, **arguments), most)
    assert fused_in(clone) == fused_blocks, report_of(clone)
    return clone


# ---------------------------------------------------------------------------------- what runs fused


def test_sampling_with_guidance():
    model = stock()
    clone = optimize(model, HOST_ATTENTION)
    assert_same(sample(model, 2.5, 3), sample(clone, 2.5, 3))
    assert "3 timesteps in a table" in report_of(clone), report_of(clone)
    assert "12 of 12 in 6 forward passes" in report_of(clone), report_of(clone)
    table = ModelModulation.of(model.model).table
    assert (len(table), table.passes) == (3, 1)
    assert_same(sample(model, 2.5, 3), sample(clone, 2.5, 3))
    assert table.passes == 1, "a second image of the same schedule computes nothing"
    comfy.model_management.unload_all_models()
    assert len(table) == 0


def rotated_layers(model) -> dict[str, str]:
    """{columns at a time: how many layers}, by the report."""
    found = re.findall(r"layers: (.*) rotated, (\d+) columns", report_of(model))
    return {size: count for count, size in found}


def int8_rotated_by(size):
    """A change for `narrow.quantized`, and its marker; 0 for plain int8."""
    settings = {"convrot": True, "convrot_groupsize": size} if size else {}

    def change(weight):
        parts = quantize_rows(weight, "int8", rotation=size)
        return dict(zip(("weight", "weight_scale"), parts, strict=True))

    return change, {"format": "int8_tensorwise", **settings}


def test_int8_of_other_programs_in_any_groups_and_plain():
    for size in (64, 16, 4, 0):
        tensors = narrow.quantized(WEIGHTS, *int8_rotated_by(size))
        known = {str(size): "24 of 24"} if size else {}
        ours = load_model(narrow.write(FOLDER / "groups.safetensors", tensors))[0]
        for model in (by_core(tensors), ours):  # core's layers quantize rows on a CPU too
            clone = compare(model, most=0.02)
            assert rotated_layers(clone) == known, report_of(clone)
    marker = {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 128}
    tensors = narrow.quantized(WEIGHTS, int8_rotated_by(0)[0], marker)
    with pytest.raises(CheckpointError, match="rotated in groups of 128"):
        load_model(narrow.write(FOLDER / "groups.safetensors", tensors))


def test_files_of_other_loaders():
    """Weights in one fp8 scale, unscaled e4m3, and ConvRot, through ComfyUI's own operations."""
    fp8 = narrow.quantized(WEIGHTS, narrow.fp8_of_one_scale, {"format": "float8_e4m3fn"})
    unscaled = {
        name: weight.to(torch.float8_e4m3fn) if weight.ndim == 2 else weight
        for name, weight in WEIGHTS.items()
    }
    for name, tensors in (("one_scale", fp8), ("unscaled", unscaled), ("plain", WEIGHTS)):
        # Core's scale for activations is one number of the file; ours is one for each token.
        compare(by_core(tensors), most=0.05 if name == "one_scale" and MODE != "cpu" else SAME)


class BlockTensor(torch.Tensor):
    """Blocks of a weight whose `shape` is the weight's, as ComfyUI-GGUF's GGMLTensor."""

    def to(self, *arguments, **options):
        found = super().to(*arguments, **options)
        found.dtype_name, found.tensor_shape = self.dtype_name, self.tensor_shape
        return found

    def clone(self, *arguments, **options):
        return self

    def detach(self, *arguments, **options):
        return self

    @property
    def shape(self):
        return getattr(self, "tensor_shape", self.size())


class BlockOps(comfy.ops.manual_cast):
    """Expands weights in every pass, as ComfyUI-GGUF's GGMLOps."""

    class Linear(comfy.ops.manual_cast.Linear):
        def __init__(self, in_features, out_features, bias=True, device=None, dtype=None):
            torch.nn.Module.__init__(self)
            self.in_features, self.out_features = in_features, out_features
            self.weight = self.bias = None

        def _load_from_state_dict(self, state_dict, prefix, *_):
            for name in ("weight", "bias"):
                value = state_dict[f"{prefix}{name}"]
                setattr(self, name, torch.nn.Parameter(value, requires_grad=False))

        def forward_comfy_cast_weights(self, x, **_):  # newer ComfyUI names what it may fuse
            if not isinstance(self.weight, BlockTensor):
                return super().forward_comfy_cast_weights(x)
            raw = self.weight.to(x.device).as_subclass(torch.Tensor)
            weight = BlockRows(raw, self.weight.dtype_name)
            weight = weight.expand(raw).to(x.dtype)
            return torch.nn.functional.linear(x, weight, self.bias.to(x.device, x.dtype))


class BlockPatcher(comfy.model_patcher.ModelPatcher):
    """Patches every weight when it loads, as ComfyUI-GGUF's GGUFModelPatcher."""

    def load(self, *arguments, force_patch_weights=False, **options):
        super().load(*arguments, force_patch_weights=True, **options)

    def clone(self, *arguments, **options):
        own, self.__class__ = self.__class__, BlockPatcher
        found = super().clone(*arguments, **options)
        found.__class__, self.__class__ = BlockPatcher, own
        return found


def test_a_model_of_another_loader_of_gguf(tmp_path):
    """Its layers run themselves, and the rest of a block is fused."""
    gc.collect()  # as `stock` says
    save_file(WEIGHTS, tmp_path / "weights.safetensors")
    path = gguf_of(tmp_path / "weights.safetensors", tmp_path / "weights.gguf")
    tensors = {}
    for name, entry in map_gguf(read_gguf(path)).items():
        tensors[name] = entry
        if isinstance(entry, BlockRows):
            tensors[name] = entry.values.clone().as_subclass(BlockTensor)
            tensors[name].dtype_name = entry.dtype
            tensors[name].tensor_shape = torch.Size(entry.shape)
    told = mock.Mock(return_value=dict(narrow.CONFIG))
    with mock.patch("comfy.model_detection.detect_unet_config", told):
        model = comfy.sd.load_diffusion_model_state_dict(
            tensors, model_options={"custom_operations": BlockOps}
        )
    compare(BlockPatcher.clone(model))


def test_weights_in_four_bits():
    """On the card in 4 bits, or decoded on load: the same int8 for every product.

    256 wide: comfy-kitchen rotates groups of 256 alone on a card, and under dynamic VRAM ComfyUI
    rounds what is smaller than 16 KiB once more.
    """
    from comfy_kitchen.tensor.w4a8_int8 import quantize_w4a8_int8_weight

    def in_four_bits(weight):
        codes, groups, rows, _, codebook = quantize_w4a8_int8_weight(weight.float())
        entries = {"weight": codes, "weight_s_rel": groups, "weight_s_channel": rows}
        return entries | {"weight_codebook": codebook}

    marker = {"format": "asym_w4a8_int8", "convrot_groupsize": 256}
    weights = narrow.weights(replace(narrow.SHAPE, dim=256, heads=8))
    layers = [*narrow.layers(weights), narrow.MODULATION]
    tensors = narrow.quantized(weights, in_four_bits, marker, layers)
    path = narrow.write(FOLDER / "w4a8.safetensors", tensors)
    decoded = load_model(path)[0]
    with mock.patch.object(load_plan, "_why_packed", return_value="they were asked to"):
        packed, report = load_model(path)
        off_card = load_model(path, modulation="off card")[0]
    assert any("(w4a8), because they were asked to." in note for note in report.notes)
    weight = packed.model.diffusion_model.get_submodule(narrow.LAYER).weight
    assert weight._qdata.shape == (256, 128)
    assert true_sizes.model_sizes(packed).precision == "int8"
    most = SAME if MODE == "cpu" else 2e-2
    clones = [compare(model, most=most) for model in (decoded, packed, off_card)]
    ours = [forward(clone) for clone in clones]
    assert torch.equal(ours[0], ours[1]) and torch.equal(ours[0], ours[2])
    assert torch.equal(forward(decoded), forward(packed))
    assert "layers: int8 through" in report_of(clones[1])
    core = by_core(tensors, num_attention_heads=8)
    # ComfyUI's own layers quantize activations on a CPU too.
    assert difference(forward(compare(core, most=2e-2)), ours[0]) < 2e-2


def lora_file():
    path = FOLDER / "lora.safetensors"
    narrow.save_file(narrow.lora(WEIGHTS, [*narrow.layers(WEIGHTS), narrow.MODULATION]), path)
    return path


@pytest.mark.parametrize(("form", "bound"), [("int8", 0.05), ("fp8", 0.1)])
def test_a_lora_merged_into_quantized_weights(form, bound):
    """ComfyUI rotates what it has merged as the weight was."""
    path = lora_file()
    strength = 5.0  # beside its change the rounding of bf16 on a card is small
    exact = forward(apply_lora(stock(), path, strength, how="merge")[0])
    plain = stock(form)
    own = forward(plain)
    known = rotated_layers(compare(plain, most=SAME if MODE == "cpu" else 2e-2))
    model = apply_lora(plain, path, strength, how="merge")[0]
    clone = compare(model, most=SAME if MODE == "cpu" else 2e-2)
    assert rotated_layers(clone) == known and bool(known) == (form == "int8")
    assert difference(forward(clone), exact) < bound * difference(own, exact)
    assert torch.equal(forward(plain), own)


# ------------------------------------------------------------------- what other nodes do to a MODEL


def test_an_attention_of_another_node():
    calls = []

    def other(func, *arguments, **options):
        calls.append(1)
        return func(*arguments, **options) * 0.5

    model = stock().clone()
    plain = forward(model)
    model.model_options["transformer_options"][SLOT] = other
    known = forward(model)
    assert difference(known, plain) > 1e-3
    # auto leaves it; put behind the node it is heard as well; a name replaces it.
    calls.clear()
    assert_same(known, forward(optimize(model)))
    assert calls
    behind = optimize(stock())
    behind.model_options["transformer_options"][SLOT] = other
    assert_same(known, forward(behind))
    said = "attention: another node's, set after Qwen-Image Optimize"
    assert report_of(behind).endswith(said), report_of(behind)
    assert_same(plain, forward(optimize(model, OptimizeSettings(attention="math"))))
    restored = restore(optimize(model, OptimizeSettings(attention="math")))
    assert restored.model_options["transformer_options"][SLOT] is other


def test_what_is_unknown_of_a_call_of_attention_is_left_to_comfyui(inference_mode):
    slot, calls = SlotAttention("math"), []
    q = random(1, 4, 6, 32, seed=3)

    def default(*arguments, **options):
        calls.append(options)
        return "ComfyUI's"

    known = {"transformer_options": {}, "_inside_attn_wrapper": True}
    assert slot(default, q, q, q, 4, skip_reshape=True, **known).shape == (1, 6, 128)
    for name, value in (("scale", 0.5), ("window", 3)):
        found = slot(default, q, q, q, 4, skip_reshape=True, **known, **{name: value})
        assert found == "ComfyUI's" and calls.pop()[name] == value and not calls


def test_an_argument_of_a_block_that_is_unknown_is_left_to_comfyui(monkeypatch):
    """As a newer ComfyUI would have it: its loop passes more, and its blocks take it."""
    own = QwenImageTransformerBlock.forward

    def newer(self, *args, gate=None, **kwargs):
        return own(self, *args, **kwargs)

    def call(self, *args, **kwargs):
        return torch.nn.Module.__call__(self, *args, gate=1, **kwargs)

    for function in (newer, call):  # no extension's, by the file that they come from
        function.__code__ = function.__code__.replace(co_filename=own.__code__.co_filename)
    monkeypatch.setattr(QwenImageTransformerBlock, "forward", newer)
    monkeypatch.setattr(QwenImageTransformerBlock, "__call__", call, raising=False)
    forget()
    try:
        clone = compare(stock(), fused_blocks=False, most=0)
    finally:
        forget()
    assert "unknown arguments" in report_of(clone)


def test_an_argument_that_a_block_newly_gives_attention_is_left_to_comfyui(monkeypatch):
    own = Attention.forward

    def forward(self, *args, **kwargs):
        """Reads as a newer one, whose call the fused blocks do not know."""
        if False:
            optimized_attention_masked(*args, window=3)  # noqa: F821
        return own(self, *args, **kwargs)

    forget()
    try:
        monkeypatch.setattr(Attention, "forward", forward)
        clone = compare(stock(), fused_blocks=False, most=0)
        assert "gives attention an unknown window" in report_of(clone)
    finally:
        forget()


def test_another_extension_that_has_wrapped_a_block():
    model = stock()
    block = model.model.diffusion_model.transformer_blocks[1]
    own = block.forward

    def doubled(*arguments, **options):
        text, image = own(*arguments, **options)
        return text, image.roll(1, -1)

    plain = forward(model)
    block.forward = doubled
    try:
        clone = compare(model, fused_blocks=False)
        assert difference(forward(clone), plain) > 1e-3
        assert "another extension" in report_of(clone)
        assert block.forward is doubled
    finally:
        del block.forward


def test_a_call_without_a_sampler_keeps_no_table():
    model = optimize(stock(), HOST_ATTENTION)
    known = forward(model)
    model.model.current_patcher = None
    with mock.patch.object(type(model), "pre_run", lambda self: None):
        assert_same(known, forward(model))
        assert "without a table in 1 forward passes, because no ComfyUI" in report_of(model)


def test_gradients_leave_the_blocks_to_comfyui():
    model = stock()
    clone = optimize(model, HOST_ATTENTION)
    forward(clone)
    with mock.patch.object(torch, "inference_mode", torch.enable_grad):
        known, found = forward(model), forward(clone)
    assert torch.equal(found, known)
    assert "gradients" in report_of(clone)


def test_torch_compile_runs_comfyuis_own_blocks():
    torch.compiler.reset()  # past 8 compilations, of other tests too, it runs eagerly
    model = stock()
    clone = optimize(model, HOST_ATTENTION).clone(disable_dynamic=True)
    key = "diffusion_model.transformer_blocks.1"
    set_torch_compile_wrapper(clone, backend="eager", keys=[key])
    assert_same(sample(model), sample(clone))
    assert "torch.compile" in report_of(clone)
    whole = optimize(model).clone(disable_dynamic=True)
    set_torch_compile_wrapper(whole, backend="eager")
    assert_same(sample(model), sample(whole))
    assert report_of(whole).endswith("attention: ComfyUI's code"), report_of(whole)


@pytest.mark.usefixtures("inference_mode")
@pytest.mark.parametrize("form", ["int8", "fp8"])
def test_quantized_layers_compiled_and_copied(form):
    """ComfyUI's own blocks; on a processor the graph alone, without a C++ compiler."""
    model = stock(form)
    known, compiled = sample(model), model.clone(disable_dynamic=True)
    backend = "eager" if MODE == "cpu" else "inductor"
    keys = ["diffusion_model.transformer_blocks.1"]
    set_torch_compile_wrapper(compiled, backend=backend, keys=keys)
    # Inductor rounds between operations where eager code does not, and the reverse.
    assert_same(known, sample(compiled), 0.0 if MODE == "cpu" else 0.02)
    assert_same(known, sample(model.clone(force_deepcopy=True)), 0.0)


@pytest.mark.parametrize("form", ["bf16", "fp8", "int8"])
def test_a_partly_loaded_model(form):
    if MODE != "card":
        return
    comfy.model_management.unload_all_models()
    model = stock(form)
    known = forward(model)
    model.detach()
    for fast in (False, True):
        partly = optimize(stock(form), HOST_ATTENTION) if fast else stock(form)
        with mock.patch("comfy.model_management.load_models_gpu", lambda models: None):
            partly.load(DEVICE, lowvram_model_memory=400_000)
            places = {str(weight.device) for weight in partly.model.diffusion_model.parameters()}
            assert "cpu" in places, places
            assert_same(known, forward(partly), 2e-2 if fast and form != "bf16" else SAME)
        assert fused_in(partly) == fast, report_of(partly)
        partly.detach()


def test_an_attention_that_comes_into_the_slot_halfway():
    def other(func, *arguments, **options):
        return func(*arguments, **options) * 0.5

    def late(executor, model, conds, x, timestep, options):
        if timestep[0] < 0.9:  # behind the first step
            options["transformer_options"][SLOT] = other
        return executor(model, conds, x, timestep, options)

    model = stock()
    plain, late_model = sample(model, 2.5, 3), model.clone()
    late_model.add_wrapper(WrappersMP.CALC_COND_BATCH, late)
    known = sample(late_model, 2.5, 3)
    assert difference(known, plain) > 1e-4
    for settings in (HOST_ATTENTION, OptimizeSettings(), OptimizeSettings(attention="math")):
        clone = optimize(late_model, settings)
        assert_same(known, sample(clone, 2.5, 3))
        assert fused_in(clone)


# ------------------------------------------------------------------------------ off, wrong, refused


def test_off_is_bit_identical():
    model = stock()
    known = forward(model)
    off = optimize(model, OptimizeSettings(blocks=False, attention="comfyui"))
    assert torch.equal(forward(off), known)
    assert torch.equal(forward(restore(optimize(model))), known)
    assert torch.equal(forward(model), known)


def test_nothing_is_left_on_the_model():
    model = stock()
    forward(model)
    ModelModulation.of(model.model)  # which stays with the model, and with it the table
    before = {name: set(module.__dict__) for name, module in model.model.named_modules()}
    clone = optimize(model)
    forward(clone)
    interrupted = mock.patch.object(ChosenBackend, "__call__", side_effect=KeyboardInterrupt)
    with interrupted, pytest.raises(KeyboardInterrupt):
        forward(clone)
    assert {name: set(module.__dict__) for name, module in model.model.named_modules()} == before


def test_a_wrong_kernel_is_noticed_in_the_first_step():
    model = stock()
    clone = optimize(model, HOST_ATTENTION)
    right = fused.choose_ops(DEVICE)

    def wrong(*like):
        launch = right.residual_norm(*like)

        def run(x, gates, norms):
            launch(x, gates, norms)
            if gates is not None:
                x *= 1.2

        return run

    with kernels(residual_norm=wrong):
        found = forward(clone)
    assert torch.equal(found, forward(model))
    assert "stream differs from" in report_of(clone)


def test_a_kernel_that_raises_leaves_the_blocks_to_comfyui():
    model = stock()
    clone = optimize(model, HOST_ATTENTION)
    broken = mock.Mock(side_effect=RuntimeError("ptxas failed\nwith a long log"))
    with kernels(qk_norm_rope=broken):
        found = forward(clone)
    assert torch.equal(found, forward(model))
    assert "raised ptxas failed" in report_of(clone)
    # What is no fault of a kernel is passed on.
    for error in (torch.OutOfMemoryError, comfy.model_management.InterruptProcessingException):
        clone = optimize(model, HOST_ATTENTION)
        with kernels(qk_norm_rope=mock.Mock(side_effect=error)), pytest.raises(error):
            forward(clone)


def test_every_attention_that_runs_here():
    model, ran = stock(), []
    known = forward(model)
    for name in BACKENDS:
        try:
            clone = optimize(model, OptimizeSettings(attention=name))
        except UnavailableError as error:
            assert name in str(error)
            continue
        lossy = clone.get_attachment(OPTIMIZATION_KEY).attention.lossy
        assert_same(known, forward(clone), 0.05 if lossy else SAME)
        assert f"attention: {name}" in report_of(clone)
        ran.append(name)
    assert {"sdpa_flash", "math"} <= set(ran)


# ------------------------------------------------------------------------------ attention in 8 bits

IN_8_BITS = 0.03
ON_A_CARD = 0 if MODE == "cpu" else 0.02  # bf16, and rows in int8


def test_attention_in_8_bits_runs_inside_the_blocks(monkeypatch):
    """And exact attention where the text has a mask."""
    published_attention.on_every_device(monkeypatch)
    references = [random(2, 16, 1, 8, 8, seed=3), random(2, 16, 1, 4, 6, seed=4)]
    edit = {"ref_latents": references, "ref_latents_method": "index_timestep_zero"}
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]])
    settings = OptimizeSettings(attention="kitchen_int8")
    for form in ("bf16", "int8"):
        model = stock(form)
        for case in ({}, {"text": 300, "side": 7}, {"batch": 2, **edit}):
            clone = compare(model, settings, most=IN_8_BITS + ON_A_CARD, **case)
            assert "attention: kitchen_int8: requested" in report_of(clone)
        clone = compare(model, settings, batch=2, text=6, attention_mask=mask)
        assert "attention kitchen_int8 cannot run on" in report_of(clone)
        # Two prompts of different lengths.
        assert_same(sample(model, 2.5), sample(clone, 2.5), IN_8_BITS + ON_A_CARD)
        assert "8 of 8 in 4 forward passes" in report_of(clone), report_of(clone)
    apart = optimize(model, replace(settings, blocks=False))
    assert_same(forward(model), forward(apart), IN_8_BITS)


def test_fast_measures_in_the_first_pass_and_says_what_it_found(monkeypatch):
    published_attention.on_every_device(monkeypatch)
    model = stock()
    known = sample(model, steps=3)
    clone = optimize(model, OptimizeSettings(attention="fast"))
    assert_same(known, sample(clone, steps=3), SAME if MODE == "cpu" else 0.02)
    assert "; at most 0.02 allowed" in report_of(clone), report_of(clone)
    if MODE != "cpu":  # where it is timed
        return
    times = AttentionTimings(300, {"kitchen_int8": 0.6, "sdpa_flash": 0.8})
    with (
        mock.patch.object(chosen, "sm_of", lambda device: (8, 9)),
        mock.patch.object(chosen, "measurement", lambda *_: (times, [])),
    ):
        for most, name in ((0.001, "sdpa_flash"), (0.02, "kitchen_int8")):
            clone = optimize(model, OptimizeSettings(attention="fast", attention_error=most))
            most_of_all = IN_8_BITS if name == "kitchen_int8" else SAME
            assert_same(known, sample(clone, steps=3), most_of_all)
            lines = report_of(clone)
            assert f"attention: {name}: " in lines and "as the reference; " in lines, lines
            found = re.search(r"kitchen_int8 error (.*); at", lines)
            assert 0.001 < float(found[1]) < 0.02, lines
            assert f"; at most {most} allowed" in lines, lines
            assert fused_in(clone)


def test_a_bound_that_is_none_is_refused():
    for error in (0, -0.02, 1.5, float("nan")):
        with pytest.raises(SettingError, match="attention_error"):
            OptimizeSettings(attention="fast", attention_error=error)


def test_other_models_pass_through():
    other = comfy.model_patcher.ModelPatcher(torch.nn.Linear(2, 2), DEVICE, DEVICE)
    assert optimize(other) is other
    output = QwenL40SOptimize.execute(other, "auto", True)
    assert output.args[0] is other
    assert "not Qwen-Image (" in output.args[1]


def test_the_node():
    model = stock()
    optimized, report = QwenL40SOptimize.execute(model, "auto", True).args
    assert optimized is not model
    assert report.startswith("blocks: fused; the first step compares")
    assert_same(forward(model), forward(optimized))
    twice = QwenL40SOptimize.execute(optimized, "comfyui", False).args[0]
    assert torch.equal(forward(twice), forward(model))
    assert not twice.get_wrappers(WrappersMP.APPLY_MODEL, OPTIMIZATION_KEY)
    assert len(twice.callbacks[CallbacksMP.ON_DETACH][OPTIMIZATION_KEY]) == 1
    with pytest.raises(SettingError, match="auto"):
        QwenL40SOptimize.execute(model, "flash", True)


def test_flags_are_those_of_the_run():
    seen = []

    def look(executor, *arguments, **options):
        seen.append((torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.benchmark))
        return executor(*arguments, **options)

    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.benchmark
    settings = OptimizeSettings(attention="comfyui", tf32=True, cudnn_benchmark=True)
    clone = optimize(stock(), settings)
    clone.add_wrapper(WrappersMP.SAMPLER_SAMPLE, look)
    sample(clone)
    assert seen == [(True, True)]
    assert (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.benchmark) == before
