"""Whatever this package computes in the place of a module of ComfyUI's, another pack may change.

Each part of a block and of a VAE, each way to change it, at each time: the same picture as without
us, and a report that names the part. Each node that reads patches: it finds our LoRAs.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from types import FunctionType, MethodType
from typing import Any
from unittest import mock

import comfy.lora
import comfy.model_patcher
import comfy.sd
import comfy.utils
import folder_paths
import narrow_transformer as narrow
import pytest
import torch
import vae_cases
from comfy.patcher_extension import WrappersMP
from comfy_extras import nodes_model_merging as merging
from comfy_extras.nodes_train import TrainLoraNode
from comfyui_boot import folder
from narrow_21 import strong_21
from narrow_transformer import difference, random
from safetensors.torch import load_file, save_file

from qwen_l40s.families.registry import blocks_of
from qwen_l40s.hosts.comfyui.decode.decode import decode, encode
from qwen_l40s.hosts.comfyui.load.transformer import load_model
from qwen_l40s.hosts.comfyui.lora.apply import apply_lora
from qwen_l40s.hosts.comfyui.lora.bypass import bypass_models, sampling_patcher
from qwen_l40s.hosts.comfyui.sample.optimize import optimize, report_of
from qwen_l40s.optimizations.inventory import attributes_of

FOLDER = folder("changed_by_others")
WEIGHTS = narrow.weights()
PATH = narrow.write(FOLDER / "model.safetensors", WEIGHTS)
SAME = 5e-6
Model = comfy.model_patcher.ModelPatcher
newer = pytest.mark.host_has("comfy.model_base.QwenImage21")


@functools.cache
def stock(title: str = "1.x") -> Model:
    return load_model(PATH, "bf16")[0] if title == "1.x" else strong_21()


TITLES = ["1.x", pytest.param("2.1", marks=newer)]


def block_of(model: Model) -> torch.nn.Module:
    return blocks_of(model.model.diffusion_model)[0]


def sample(model: Model, steps: int = 2) -> torch.Tensor:
    return narrow.sample(model, 20, steps=steps)


# What another pack does to a module: each is a context in which the module gives something else.


def halved(out: Any) -> Any:
    return type(out)(map(halved, out)) if isinstance(out, (tuple, list)) else out * 0.5


@contextlib.contextmanager
def hook(holder: Any, name: str) -> Iterator[None]:
    handle = getattr(holder, name).register_forward_hook(lambda module, given, out: halved(out))
    try:
        yield
    finally:
        handle.remove()


@contextlib.contextmanager
def hook_before(holder: Any, name: str) -> Iterator[None]:
    def change(module: torch.nn.Module, given: tuple, named: dict) -> tuple:
        if given:
            return (given[0] * 0.5, *given[1:]), named
        first = next(iter(named))
        return given, {**named, first: named[first] * 0.5}

    handle = getattr(holder, name).register_forward_pre_hook(change, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def own_forward(holder: Any, name: str) -> contextlib.AbstractContextManager:
    module = getattr(holder, name)
    forward = module.forward
    changed = lambda *given, **named: halved(forward(*given, **named))  # noqa: E731
    return mock.patch.object(module, "forward", changed)


@contextlib.contextmanager
def another_class(holder: Any, name: str) -> Iterator[None]:
    module = getattr(holder, name)
    own = type(module)
    forward = lambda self, *given, **named: halved(own.forward(self, *given, **named))  # noqa: E731
    module.__class__ = type("Halved", (own,), {"forward": forward})
    try:
        yield
    finally:
        module.__class__ = own


class Wrapped(torch.nn.Module):
    """A module around another, as PEFT puts it in its place."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *given: Any, **named: Any) -> Any:
        return halved(self.inner(*given, **named))

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.inner, name)


@contextlib.contextmanager
def wrapped(holder: Any, name: str) -> Iterator[None]:
    module = getattr(holder, name)
    setattr(holder, name, Wrapped(module))
    try:
        yield
    finally:
        setattr(holder, name, module)


WAYS = (hook, hook_before, own_forward, another_class, wrapped)


def parts(root: torch.nn.Module) -> dict[str, tuple[torch.nn.Module, str]]:
    """{path: (holder, name)} of each module below a root that is called."""
    found = {}
    for path, module in root.named_modules():
        if path and not isinstance(module, torch.nn.ModuleList):
            holder, _, name = path.rpartition(".")
            found[path] = root.get_submodule(holder), name
    return found


class Late:
    """A pack that changes the model in its forward pass, from the second step on."""

    def __init__(self, model: Model, change: contextlib.AbstractContextManager) -> None:
        self.model, self.change, self.calls = model.clone(), change, 0
        self.stack = contextlib.ExitStack()
        self.model.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, "late", self.forward)

    def forward(self, executor: Any, *given: Any, **named: Any) -> torch.Tensor:
        self.calls += 1
        if self.calls == 2:
            self.stack.enter_context(self.change)
        return executor(*given, **named)

    def sample(self) -> torch.Tensor:
        with self.stack:
            return sample(self.model)


def assert_same(name: str, known: torch.Tensor, found: torch.Tensor, report: str) -> None:
    assert difference(found, known) <= SAME, (name, difference(found, known), report)


def changes(way: Callable, model: Model) -> dict[str, contextlib.AbstractContextManager]:
    return {path: functools.partial(way, *part) for path, part in parts(block_of(model)).items()}


@pytest.mark.parametrize("title", TITLES)
@pytest.mark.parametrize("way", WAYS)
def test_a_part_of_a_block_that_is_changed_in_a_run(way, title):
    model, plain, seen = stock(title), sample(stock(title)), 0
    for path, change in changes(way, model).items():
        known = Late(model, change()).sample()
        seen += difference(known, plain) > 1e-5
        late = Late(optimize(model), change())
        assert_same(path, known, late.sample(), report_of(late.model))
        assert path in report_of(late.model), (path, report_of(late.model))
    assert seen > 0.4 * len(changes(way, model)), seen


@pytest.mark.parametrize("title", TITLES)
@pytest.mark.parametrize("way", WAYS)
def test_a_part_of_a_block_that_was_changed_before(way, title):
    """Before Optimize, and between two runs of an optimized model; by nobody any more at last."""
    model, plain = stock(title), sample(stock(title))
    between, seen = optimize(model), 0
    for path, change in changes(way, model).items():
        sample(between)
        with change():
            known, before = sample(model), optimize(model)
            seen += difference(known, plain) > 1e-5
            assert_same(path, known, sample(before), report_of(before))
            assert_same(path, known, sample(between), report_of(between))
        assert_same(path, plain, sample(between), report_of(between))
        assert report_of(between).startswith("blocks: fused, 4 of 4"), report_of(between)
    assert seen > 0.4 * len(changes(way, model)), seen


def methods(model: Model) -> dict[str, tuple[torch.nn.Module, str]]:
    """Each method that a block's forward calls by name."""
    block, found = block_of(model), {}
    for path, module in (("", block), *parts(block).items()):
        module = module if path == "" else block.get_submodule(path)
        for name, value in vars(type(module)).items():
            called = isinstance(value, FunctionType) and not name.startswith("__")
            if called and name not in ("forward", "extra_repr", "reset_parameters"):
                found[f"{path}.{name}"] = module, name
    return found


def on_the_instance(module: torch.nn.Module, name: str) -> contextlib.AbstractContextManager:
    own = getattr(module, name)
    return mock.patch.dict(vars(module), {name: lambda *it, **named: halved(own(*it, **named))})


@pytest.mark.parametrize("title", TITLES)
def test_a_method_that_is_put_on_an_instance(title):
    model, plain, seen = stock(title), sample(stock(title)), []
    for path, where in methods(model).items():
        known = Late(model, on_the_instance(*where)).sample()
        seen += [path] * (difference(known, plain) > 1e-5)
        late = Late(optimize(model), on_the_instance(*where))
        assert_same(path, known, late.sample(), report_of(late.model))
    assert title == "2.1" or {"._modulate", "._apply_gate"} <= set(seen), seen


def attribute(module: torch.nn.Module, name: str, value: Any) -> contextlib.AbstractContextManager:
    return mock.patch.object(module, name, value)


@pytest.mark.parametrize("title", TITLES)
def test_an_attribute_that_the_code_of_a_part_reads(title):
    model, plain, seen = stock(title), sample(stock(title)), []
    others = {"eps": 0.5, "approximate": "none"}
    for path, module in block_of(model).named_modules():
        for name in others.keys() & attributes_of(module).keys():
            known = Late(model, attribute(module, name, others[name])).sample()
            seen += [path] * (difference(known, plain) > 1e-5)
            late = Late(optimize(model), attribute(module, name, others[name]))
            assert_same(path, known, late.sample(), report_of(late.model))
    assert {"img_norm1", "img_norm2", "attn.norm_q"} <= set(seen), seen


def test_a_hook_on_all_modules():
    """As torch has it for a whole process."""

    def hooked(module: torch.nn.Module, given: tuple, out: Any) -> Any:
        return halved(out) if isinstance(module, torch.nn.SiLU) else None

    model, fast = stock(), optimize(stock())
    plain = sample(fast)
    handle = torch.nn.modules.module.register_module_forward_hook(hooked)
    try:
        known = sample(model)
        assert_same("all", known, sample(fast), report_of(fast))
    finally:
        handle.remove()
    assert difference(known, plain) > 1e-4


# ----------------------------------------------------------------------------------- the modulation

LAYERS = [f"transformer_blocks.{i}.{stream}_mod.1" for i in range(2) for stream in ("img", "txt")]


def fresh(off_card: bool = False) -> Model:
    """A model that no other test has."""
    return narrow.load_patcher(PATH, off_card=off_card)


def of_sigma(model: Model, end: str = "weight") -> Model:
    """A LoRA of the modulation whose strength follows the sigma, as nodes add it at run time."""
    clone, now = model.clone(), {}

    def publish(executor: Any, *given: Any, **named: Any) -> Any:
        options = next(it for it in (*given, *named.values()) if isinstance(it, dict))
        now["sigma"] = float(options["sigmas"][0])
        return executor(*given, **named)

    clone.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, "of_sigma", publish)
    for seed, name in enumerate(LAYERS):
        key = f"diffusion_model.{name}.{end}"
        change = random(*comfy.utils.get_attr(clone.model, key).shape, seed=seed) * 0.03
        clone.add_weight_wrapper(key, lambda w, c=change: w + c.to(w) * now["sigma"])
    return clone


@pytest.mark.parametrize("end", ["weight", "bias"])
def test_weights_that_follow_the_sigma(end):
    known = sample(of_sigma(fresh(), end), steps=4)
    effect = difference(known, sample(fresh(), steps=4))
    assert effect > 1e-4
    for name, model in {
        "behind it": optimize(of_sigma(fresh(), end)),
        "before it": of_sigma(optimize(fresh()), end),
        "off the card": of_sigma(fresh(off_card=True), end),
        "off the card, optimized": optimize(of_sigma(fresh(off_card=True), end)),
    }.items():
        assert difference(sample(model, steps=4), known) < max(SAME, 0.01 * effect), name


def scaled_in_place(layer: torch.nn.Module, name: str) -> None:
    getattr(layer, name).mul_(0.5)


def by_data(layer: torch.nn.Module, name: str) -> None:
    getattr(layer, name).data = getattr(layer, name).data * 0.5


def another_parameter(layer: torch.nn.Module, name: str) -> None:
    setattr(layer, name, torch.nn.Parameter(getattr(layer, name) * 0.5, requires_grad=False))


def low_rank(layer: torch.nn.Module, name: str) -> None:
    weight = getattr(layer, name)
    sides = [random(size, 1, seed=size).to(weight) for size in weight.shape]
    weight.add_(sides[0].mul(0.05).squeeze(1) if weight.ndim == 1 else sides[0] @ sides[1].T * 0.05)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (scaled_in_place, "weight"),
        (by_data, "bias"),
        (another_parameter, "weight"),
        (low_rank, "weight"),
        (low_rank, "bias"),
    ],
)
@pytest.mark.usefixtures("inference_mode")
def test_weights_of_the_modulation_that_are_changed_between_two_prompts(change, name):
    for off_card in (False, True):
        plain, fast = fresh(), optimize(fresh(off_card=off_card))
        before = sample(plain)
        assert_same("before", before, sample(fast), report_of(fast))
        for model in (plain, fast):
            layer = model.model.diffusion_model.get_submodule(LAYERS[0])
            change(layer.__dict__.get("_linear", layer), name)
        known = sample(plain)
        assert difference(known, before) > 1e-4
        assert_same("after", known, sample(fast), report_of(fast))


def test_a_table_is_not_made_anew_for_the_same_weights():
    fast = optimize(fresh())
    sample(fast)
    assert "2 computed in this run" in report_of(fast)
    layer = fast.model.diffusion_model.get_submodule(LAYERS[0])
    layer.weight = torch.nn.Parameter(layer.weight.clone(), requires_grad=False)
    sample(fast)
    assert "0 computed in this run" in report_of(fast), report_of(fast)


# ----------------------------------------------------------------------------------------- training


def trained(model: Model) -> tuple[dict, dict]:
    settings = {
        "batch_size": 1, "grad_accumulation_steps": 1, "steps": 1, "learning_rate": 1e-2, "rank": 4,
        "seed": 3, "optimizer": "SGD", "loss_function": "MSE", "training_dtype": "fp32",
        "lora_dtype": "fp32", "quantized_backward": False, "algorithm": "LoRA",
        "gradient_checkpointing": True, "checkpoint_depth": 1, "offloading": False,
        "existing_lora": "[None]", "bucket_mode": False, "bypass_mode": False,
    }  # fmt: skip
    torch.manual_seed(0)
    latents = [{"samples": random(2, 16, 1, 8, 8)}]
    given = {name: [value] for name, value in settings.items()}
    prompt = [[[random(1, 9, 64, seed=9), {}]]]
    return TrainLoraNode.execute(model=[model], latents=latents, positive=prompt, **given).result[
        :2
    ]


@pytest.mark.filterwarnings("ignore:In CPU autocast")
def test_training():
    """Where ComfyUI's Train LoRA records gradients its own code runs, and no layer is left out."""
    known, losses = trained(fresh())
    int8 = load_model(PATH, "int8")[0]
    models = optimize(fresh()), fresh(off_card=True), optimize(fresh(off_card=True))
    for model in (*models, int8, optimize(int8)):
        lora, found = trained(model)
        assert lora.keys() == known.keys()
        assert found["loss"] == pytest.approx(losses["loss"], rel=1e-4)
        most = 1e-3 if model in models else 0.05
        moved = [name for name in lora if difference(lora[name], known[name]) > most]
        assert not moved, moved


def test_a_model_without_blocks():
    """ComfyUI counts no block where a file has no block 0, and samples."""
    moved = {name.replace("_blocks.0.", "_blocks.2."): it for name, it in WEIGHTS.items()}
    model = narrow.stock(moved)
    model.model.diffusion_model.transformer_blocks = torch.nn.ModuleList()
    assert_same("none", sample(model), sample(optimize(model)), "")


# ---------------------------------------------------------------------------------------------- VAE

LATENT = random(1, 16, 1, 5, 4)
LATENT_21 = random(1, 64, 4, 4)


def circular(model: torch.nn.Module) -> None:
    for layer in model.modules():
        if isinstance(layer, torch.nn.Conv2d):
            layer.padding_mode = "circular"


def circular_by_method(model: torch.nn.Module) -> None:
    def convolve(self: Any, x: torch.Tensor, weight: Any, bias: Any, *_: Any) -> torch.Tensor:
        x = torch.nn.functional.pad(x, self._reversed_padding_repeated_twice, mode="circular")
        return torch.nn.functional.conv2d(x, weight, bias, self.stride)

    for layer in model.modules():
        if isinstance(layer, torch.nn.Conv2d):
            layer._conv_forward = MethodType(convolve, layer)


def other_decode(model: torch.nn.Module) -> None:
    own, own_encode = model.decode, model.encode
    model.decode = lambda *given, **named: own(*given, **named) * 0.5
    model.encode = lambda *given, **named: own_encode(*given, **named) * 0.5


VAE_CHANGES = (circular, circular_by_method, other_decode)


def assert_vae_is_heeded(vae: comfy.sd.VAE, name: str, latent: torch.Tensor) -> None:
    known = vae_cases.core_decode(vae, latent)
    for tiles, fused in ((0, True), (4, False)):
        found, report = decode(vae, latent, tiles, fused)
        assert torch.equal(found, known), (name, tiles, fused, report)
    pixels = known.clamp(0, 1)
    known = vae_cases.core_encode_each(vae, pixels)
    for tiles, fused in ((0, True), (4, False)):
        found, report = encode(vae, pixels, tiles, fused)
        assert torch.equal(found, known), (name, tiles, fused, report)
        assert "ComfyUI's code ran, because " in report


@pytest.mark.parametrize("change", VAE_CHANGES)
@pytest.mark.usefixtures("inference_mode")
def test_a_vae_that_another_pack_has_changed(change):
    vae = vae_cases.random_vae()
    plain = vae_cases.core_decode(vae, LATENT)
    change(vae.first_stage_model)
    assert difference(vae_cases.core_decode(vae, LATENT), plain) > 1e-3
    assert_vae_is_heeded(vae, change.__name__, LATENT)


def vae_parts(model: torch.nn.Module) -> dict[str, tuple[torch.nn.Module, str]]:
    """One part of each class in each half: what holds for one holds for its like."""
    found, seen = {}, set()
    for path, part in parts(model).items():
        kind = path.partition(".")[0], type(model.get_submodule(path)), path.split(".")[-1]
        if kind not in seen and isinstance(model.get_submodule(path), torch.nn.Module):
            seen.add(kind)
            found[path] = part
    return found


@pytest.mark.parametrize("build", [vae_cases.wan, pytest.param(vae_cases.wan_21, marks=newer)])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.usefixtures("inference_mode")
def test_a_part_of_a_vae(build, way):
    vae = vae_cases.random_vae(build)
    latent = LATENT_21 if build is vae_cases.wan_21 else LATENT
    for path, part in vae_parts(vae.first_stage_model).items():
        with way(*part):
            assert f"has changed {path}" in decode_report(vae, latent), path
    assert "ComfyUI's code" not in decode(vae, latent, 0, True)[1]


@pytest.mark.usefixtures("inference_mode")
def test_an_attribute_of_a_part_of_a_vae():
    vae, count = vae_cases.random_vae(), 0
    for path, module in vae.first_stage_model.named_modules():
        for name, value in attributes_of(module).items():
            other = [*value, 1] if isinstance(value, list) else "another"
            with attribute(module, name, other):
                report = decode_report(vae, LATENT)
                assert "ComfyUI's code ran, because" in report, (path, name)
                count += 1
    assert count > 500


def decode_report(vae: comfy.sd.VAE, latent: torch.Tensor) -> str:
    """What runs, without running it: ComfyUI's own code fails with some of these changes."""
    with mock.patch.object(comfy.sd.VAE, "decode", lambda self, samples: samples):
        return decode(vae, latent, 0, True)[1]


# ---------------------------------------------------------------- nodes that read a MODEL's patches


def lora_file() -> str:
    tensors = narrow.lora(WEIGHTS, narrow.layers(WEIGHTS), scale=0.3)
    path = FOLDER / "lora.safetensors"
    save_file({f"diffusion_model.{name}": it for name, it in tensors.items()}, path)
    return path


def by_core(model: Model, strength: float = 1.0) -> Model:
    return comfy.sd.load_lora_for_models(model, None, load_file(lora_file()), strength, 0)[0]


def saved(model: Model, node: Any, *more: Any) -> Model:
    """What a node of ComfyUI's has written, loaded by ComfyUI."""
    folder_paths.set_output_directory(str(FOLDER))
    for old in FOLDER.glob("written*"):
        old.unlink()
    node().save(model, *more, "written")
    (path,) = FOLDER.glob("written*")
    prefix = "model.diffusion_model."
    tensors = {name.removeprefix(prefix): it for name, it in load_file(path).items()}
    return load_model(narrow.write(FOLDER / "written again.safetensors", tensors), "auto")[0]


LORAS = [("bf16", "bypass"), ("bf16", "merge"), ("fp8", "auto"), ("int8", "core")]


@pytest.mark.parametrize("precision, how", LORAS)
@pytest.mark.usefixtures("inference_mode")
def test_a_lora_is_among_the_patches(precision, how):
    """With a strong LoRA, against which the rounding of 8 bits is small."""
    base, plain = load_model(PATH, precision)[0], load_model(PATH, "bf16")[0]
    model = by_core(base) if how == "core" else apply_lora(base, lora_file(), 1.0, how=how)[0]
    known, without = sample(by_core(plain)), sample(plain)
    effect = difference(without, known)

    def near(name: str, found: torch.Tensor, known: torch.Tensor = known) -> None:
        assert difference(found, known) < 0.15 * effect, (name, difference(found, known), effect)

    near("sampled", sample(model))
    near("optimized", sample(optimize(model)))
    near("written", sample(saved(model, merging.ModelSave)))
    near("sampled once more", sample(model))
    merged = merging.ModelMergeSimple().merge
    half = sample(by_core(plain, 0.5))
    near("half, first", sample(merged(model, plain, 0.5)[0]), half)
    near("merged in", sample(merged(plain, model, 0.0)[0]))
    near("half, second", sample(merged(plain, model, 0.5)[0]), half)
    near("half, both", sample(merged(base, model, 0.5)[0]), half)
    assert (sampling_patcher(model) is model) == (how == "merge")


@pytest.mark.usefixtures("inference_mode")
def test_a_lora_that_is_computed_is_loaded_once():
    """As long as nobody changes a patch, whatever else nodes put on the MODEL behind it."""
    model = optimize(apply_lora(load_model(PATH, "int8")[0], lora_file(), 1.0, how="auto")[0])
    sample(model)
    token = model.model.current_weight_patches_uuid
    (layers,) = bypass_models(sampling_patcher(model))
    for clone in (model, model.clone(), optimize(model)):
        sample(clone)
        assert model.model.current_weight_patches_uuid == token
        assert [*bypass_models(sampling_patcher(clone))] == [layers]
    assert sampling_patcher(model) is sampling_patcher(model)
