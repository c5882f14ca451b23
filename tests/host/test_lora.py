"""LoRAs on a small Qwen-Image built by ComfyUI's own classes.

Everything is sampled through ComfyUI's own sampler on the CPU.
"""

import contextlib
import functools
import re
from dataclasses import replace
from pathlib import Path

import comfy.hooks
import comfy.lora
import comfy.model_management
import comfy.model_patcher
import comfy.ops
import comfy.sample
import comfy.sd
import comfy.supported_models
import comfy.utils
import comfy.weight_adapter
import comfyui_boot
import folder_paths
import narrow_transformer as narrow
import pytest
import torch
from comfy.patcher_extension import WrappersMP
from comfy_api.torch_helpers import set_torch_compile_wrapper
from comfy_extras import nodes_lora_extract, nodes_model_merging
from comfyui_boot import folder
from lora_forms import FAILING, FORMS, asked_suffixes
from safetensors.torch import load_file, save_file

from qwen_l40s.errors import CheckpointError, SettingError
from qwen_l40s.families.identify import SUFFIX, split_parts
from qwen_l40s.hosts.comfyui.lora.apply import LoraReport, apply_lora
from qwen_l40s.hosts.comfyui.lora.bypass import compute_loras, sampling_patcher
from qwen_l40s.hosts.comfyui.sample.optimize import optimize, report_of
from qwen_l40s.spec.sizes import RANKS_AT_ONCE

pytestmark = pytest.mark.usefixtures("inference_mode")
FOLDER = folder("lora")
LAYER = narrow.LAYER
MODULES = 28  # 14 a block: 8 of attention, 2 of each MLP, 2 of modulation
PLAIN, INT8, FP8 = None, "int8_tensorwise", "float8_e4m3fn"
# (module's name, names of its two matrices), with dots or with "_" for dots
STYLES = {
    "bare": ("{dotted}", "lora_A.weight", "lora_B.weight"),
    "bare, default": ("{dotted}", "lora_A.default.weight", "lora_B.default.weight"),
    "bare, named": ("{dotted}", "lora_A.mine.weight", "lora_B.mine.weight"),
    "Lightning": ("{dotted}", "lora_down.weight", "lora_up.weight"),
    "diffusers": ("transformer.{dotted}", "lora_A.weight", "lora_B.weight"),
    "old diffusers": ("transformer.{dotted}", "lora.down.weight", "lora.up.weight"),
    "ComfyUI": ("diffusion_model.{dotted}", "lora_A.weight", "lora_B.weight"),
    "checkpoint": ("model.diffusion_model.{dotted}", "lora_A.weight", "lora_B.weight"),
    "kohya": ("lora_unet_{flat}", "lora_down.weight", "lora_up.weight"),
    "LyCORIS": ("lycoris_{flat}", "lora_down.weight", "lora_up.weight"),
    "OneTrainer": ("lora_transformer_{flat}", "lora_down.weight", "lora_up.weight"),
    "PEFT": ("base_model.model.{dotted}", "lora_A.weight", "lora_B.weight"),
    "PEFT, default": (
        "base_model.model.{dotted}",
        "lora_A.default.weight",
        "lora_B.default.weight",
    ),
    "SimpleTuner": ("transformer.base_model.model.{dotted}", "lora_A.weight", "lora_B.weight"),
    "DiffSynth": ("pipe.dit.{dotted}", "lora_A.default.weight", "lora_B.default.weight"),
    "compiled": ("transformer._orig_mod.{dotted}", "lora_A.weight", "lora_B.weight"),
}
Tensors = dict[str, torch.Tensor]
Patcher = comfy.model_patcher.ModelPatcher


WEIGHTS = {name: weight.float() for name, weight in narrow.weights().items()}
# {module: weight} of everything that a LoRA changes.
MATRICES = {
    name.removesuffix(".weight"): weight
    for name, weight in WEIGHTS.items()
    if name.startswith("transformer_blocks.") and weight.ndim == 2
}


def in_8_bits(form: str) -> Tensors:
    def rounded(weight: torch.Tensor) -> Tensors:
        if form == FP8:
            return narrow.fp8_of_one_scale(weight)
        scale = weight.float().abs().amax(dim=1, keepdim=True) / 127
        return {"weight": (weight / scale).round().to(torch.int8), "weight_scale": scale}

    return narrow.quantized(narrow.weights(), rounded, {"format": form})


def build(form: str | None = PLAIN, disable_dynamic: bool = False) -> Patcher:
    tensors = {name: weight.clone() for name, weight in WEIGHTS.items()}
    plain = form is PLAIN
    patcher = narrow.stock(tensors, torch.float32, None) if plain else narrow.stock(in_8_bits(form))
    patcher.cached_patcher_init = (build, (form,))
    return patcher


def sample(model: Patcher, hooks: comfy.hooks.HookGroup | None = None, steps: int = 1):
    noise = torch.Generator().manual_seed(3)
    latent = torch.randn(1, 16, 1, 8, 8, generator=noise)
    prompt = [[torch.randn(1, 5, narrow.SHAPE.joint_dim, generator=noise), {}]]
    if hooks is not None:
        prompt = comfy.hooks.set_hooks_for_conditioning(prompt, hooks)
    return narrow.sample(model, prompt, steps=steps, noise=latent)


def lora(seed: int = 1, rank: int = 4, alpha: float | None = 2.0) -> Tensors:
    tensors = narrow.lora(WEIGHTS, MATRICES, rank, seed)
    if alpha is not None:
        tensors |= {f"{module}.alpha": torch.tensor(alpha) for module in MATRICES}
    return tensors


def in_style(tensors: Tensors, style: str) -> Tensors:
    module_form, down, up = STYLES[style]
    renamed = {}
    for name, tensor in tensors.items():
        dotted, _, kind = name.partition(".lora_")
        module = module_form.format(dotted=dotted, flat=dotted.replace(".", "_"))
        renamed[f"{module}.{down if kind.startswith('down') else up}"] = tensor
    return renamed


def saved(tensors: Tensors, name: str = "lora", metadata: dict[str, str] | None = None) -> Path:
    path = FOLDER / f"{name}.safetensors"
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, path, metadata)
    return path


def applied(model: Patcher, tensors: Tensors, strength: float = 1.0, how: str = "merge") -> Patcher:
    clone, report = apply_lora(model, saved(tensors), strength, how=how)
    assert (report.applied, report.modules) == (MODULES, MODULES), report
    return clone


def refused(
    tensors: Tensors, *words: str, how: str = "merge", error: type[Exception] = CheckpointError
) -> None:
    path = saved(tensors, "refused")
    run = functools.partial(apply_lora, build(), path, 1.0, how=how)
    comfyui_boot.refused(error, *words, path.name, run=run)


def by_core(model: Patcher, tensors: Tensors, strength: float = 1.0) -> Patcher:
    return comfy.sd.load_lora_for_models(model, None, tensors, strength, 0)[0]


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return (one - other).abs().max().item()


def layer_of(model: Patcher) -> torch.nn.Module:
    return model.model.diffusion_model.get_submodule(LAYER)


def test_merge_is_what_core_does() -> None:
    for form in (PLAIN, INT8, FP8):
        base, tensors = build(form), lora()
        without, ours = sample(base), sample(applied(base, tensors, 0.7))
        assert torch.equal(ours, sample(by_core(base, tensors, 0.7))), form
        assert distance(ours, without) > 0.05, f"{form}: the LoRA changes nothing to speak of"
        assert torch.equal(sample(base), without), f"{form}: the model kept the LoRA"


def test_every_key_style_applies_every_module() -> None:
    base, tensors = build(), lora(alpha=None)
    expected = sample(by_core(base, tensors))
    for style in STYLES:
        for how in ("merge", "bypass"):
            found = sample(applied(base, in_style(tensors, style), how=how))
            assert distance(found, expected) < 1e-5, (style, how)


def test_beside_leaves_quantized_weights_alone() -> None:
    for form in (INT8, FP8):
        for how in ("bypass", "merge"):
            base = build(form)
            before = layer_of(base).weight
            values, scale = before._qdata.clone(), before._params.scale.clone()
            sample(applied(base, lora(), how=how))
            after = layer_of(base).weight
            same = torch.equal(after._qdata, values) and torch.equal(after._params.scale, scale)
            assert same == (how == "bypass"), (form, how)


def test_auto_leaves_quantized_weights_alone() -> None:
    path, noise = saved(lora(), "auto"), torch.Generator().manual_seed(4)
    for form, how in ((PLAIN, "merge"), (INT8, "bypass"), (FP8, "bypass")):
        base = build(form)
        model, report = apply_lora(base, path, 1.0, how="auto")
        assert report.how == how, form
        assert ("would round the quantized weights" in report.text()) == (how == "bypass"), form
        assert torch.equal(sample(model), sample(applied(base, lora(), how=how))), form
    for rank, how in ((16, "bypass"), (17, "merge")):
        loha = {}
        for factor in ("w1", "w2"):
            loha[f"{LAYER}.hada_{factor}_a"] = torch.randn(128, rank, generator=noise)
            loha[f"{LAYER}.hada_{factor}_b"] = torch.randn(rank, 128, generator=noise)
        _, report = apply_lora(build(INT8), saved(loha, "loha"), 1.0, how="auto")
        assert report.how == how, report.text()


def test_hooks_on_quantized_weights() -> None:
    """Computed beside them, with the strength of each keyframe; what is no product is refused."""

    def hooks(tensors: Tensors, *strengths: float) -> comfy.hooks.HookGroup:
        frames = comfy.hooks.HookKeyframeGroup()
        for number, strength in enumerate(strengths):
            start = number / len(strengths)
            frames.add(comfy.hooks.HookKeyframe(strength, start_percent=start))
        found = comfy.hooks.create_hook_lora(tensors, 1.0, 0.0)
        found.set_keyframes_on_hooks(frames)
        return found

    first, second = lora(1), lora(2)
    halves = [{name: it for name, it in first.items() if (".attn." in name) == of} for of in (0, 1)]
    dora = {f"{module}.dora_scale": torch.ones(len(it), 1) for module, it in MATRICES.items()}
    for form in (INT8, FP8):
        model = build(form)
        compute_loras(model)  # without our blocks, which round a sum once more
        known, whole = sample(model), applied(model, first, how="bypass")
        half = sample(applied(model, second, 0.5, "bypass"))
        for group, expected in (
            (hooks(first, 1.0), sample(whole)),
            (hooks(second, 0.5), half),
            (hooks(second, 0.0), known),
            (hooks(halves[0], 1.0).clone_and_combine(hooks(halves[1], 1.0)), sample(whole)),
        ):
            assert distance(sample(model, group), expected) < 1e-5, form
        fading = sample(model, hooks(second, 0.5, 0.0), 2)
        assert min(distance(fading, known), distance(fading, half)) > 0.002
        assert torch.equal(sample(optimize(model), hooks(first, 1.0)), sample(optimize(whole)))
        assert torch.equal(sample(model), known), form
        with pytest.raises(SettingError, match="precision bf16"):
            sample(optimize(model), hooks(first | dora, 1.0))


def test_loras_stack() -> None:
    base, first, second = build(), lora(1), lora(2, rank=8, alpha=None)
    expected = sample(by_core(by_core(base, first), second, -0.5))
    assert distance(expected, sample(by_core(base, first))) > 0.05
    for one in ("merge", "bypass"):
        for other in ("merge", "bypass"):
            both = applied(applied(base, first, how=one), second, -0.5, how=other)
            for _ in range(2):  # a second run loads nothing anew
                assert distance(sample(both), expected) < 1e-5, (one, other)


def test_clones_are_independent() -> None:
    base = build()
    without = sample(base)
    for how in ("merge", "bypass"):
        changed = applied(base, lora(), how=how)
        child = applied(changed.clone(), lora(2), how=how)
        results = [sample(model) for model in (changed, child, base, changed.clone(), base)]
        assert torch.equal(results[2], without) and torch.equal(results[4], without), how
        assert torch.equal(results[3], results[0]), how
        assert distance(results[1], results[0]) > 0.05, how


def test_comfyuis_own_bypass_is_no_other_extension() -> None:
    model = comfy.sd.load_bypass_lora_for_models(build(), None, lora(), 0.7, 0)[0]
    optimized = optimize(model)
    assert distance(sample(optimized), sample(model)) < 1e-4
    assert "another extension" not in report_of(optimized)


def test_unload_and_reload() -> None:
    for how in ("merge", "bypass"):
        model = applied(build(INT8), lora(), how=how)
        first = sample(model)
        comfy.model_management.unload_all_models()
        assert not comfy.model_management.loaded_models()
        assert torch.equal(sample(model), first), how


def test_the_host_counts_what_lies_beside() -> None:
    tensors = lora(alpha=None)
    model = applied(build(), tensors, how="bypass")
    sample(model)
    loaded = comfy.model_management.loaded_models()
    beside = [other for other in loaded if other in sampling_patcher(model).get_additional_models()]
    # Rank 4 is padded to 8, and so is where a layer's rows of a shared matrix begin.
    assert [other.model_size() for other in beside] == [
        2 * sum(tensor.nbytes for tensor in tensors.values())
    ]
    lows = [low for part in beside for low in part.model.changes]
    assert {low.start % RANKS_AT_ONCE for low in lows} == {0} != {low.start for low in lows}


def test_beside_follows_the_model_into_another_one() -> None:
    """What torch.compile under dynamic VRAM and MultiGPU do."""
    model = applied(build(), lora(), how="bypass")
    expected = sample(model)
    for other in (
        model.clone(force_deepcopy=True),
        model.deepclone_multigpu(new_load_device=torch.device("cpu")),
    ):
        assert other.model is not model.model
        assert distance(sample(other), expected) < 1e-5


def test_beside_under_torch_compile() -> None:
    """Graphs are cached by code: one without the LoRA must not serve a model with it."""
    base = build()

    def compiled(model: Patcher) -> Patcher:
        clone = model.clone()
        set_torch_compile_wrapper(
            clone, backend="eager", keys=["diffusion_model.transformer_blocks.1"]
        )
        return clone

    changed = applied(base, lora(), how="bypass")
    expected = [sample(model) for model in (base, changed, base)]
    found = [sample(compiled(model)) for model in (base, changed, base)]
    assert all(torch.equal(*pair) for pair in zip(expected, found, strict=True))
    assert not torch.equal(expected[0], expected[1])
    assert torch.equal(sample(applied(compiled(base), lora(), how="bypass")), expected[1])


def test_a_failed_forward_leaves_nothing_behind() -> None:
    model = applied(build(), lora(), how="bypass")
    without = {"forward" in module.__dict__ for module in model.model.modules()}
    seen = []

    def interrupt(executor: object, *args: object, **kwargs: object) -> None:
        seen.append("forward" in layer_of(model).__dict__)
        raise InterruptedError

    model.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, "test", interrupt)
    with contextlib.suppress(InterruptedError):
        sample(model)
    assert seen == [True], "the layer was not wrapped"
    assert {"forward" in module.__dict__ for module in model.model.modules()} == without == {False}


def test_what_cannot_run_beside() -> None:
    dora = lora()
    for module, weight in MATRICES.items():
        dora[f"{module}.dora_scale"] = torch.ones(len(weight), 1)
    base = build()
    assert torch.equal(sample(applied(base, dora)), sample(by_core(base, dora)))
    refused(dora, "merge", how="bypass", error=SettingError)
    for form, tensors, says in ((INT8, dora, True), (INT8, lora(), False), (PLAIN, dora, False)):
        model = optimize(by_core(build(form), tensors))
        sample(model)
        assert bool(re.search("^LoRAs: ", report_of(model), re.M)) == says, report_of(model)
    refused({**dora, f"{LAYER}.dora_scale": torch.ones(3, 1)}, LAYER)


def test_biases_and_norms() -> None:
    """Changed as a whole, and merged either way: they are never quantized."""
    tensors = {
        **lora(),
        f"{LAYER}.diff_b": torch.ones(128),
        "transformer_blocks.0.attn.norm_q.diff": torch.ones(32),
    }
    for form in (PLAIN, INT8):
        base = build(form)
        expected = sample(by_core(base, tensors))
        for how in ("merge", "bypass"):
            model, report = apply_lora(base, saved(tensors), 1.0, how=how)
            assert (report.applied, report.modules) == (MODULES + 1, MODULES + 1)
            if form is PLAIN or how == "merge":
                assert distance(sample(model), expected) < 1e-5, (form, how)
            assert "transformer_blocks.1.attn.to_q.bias" in " ".join(model.patches), how
    weight = {**lora(), f"{LAYER}.diff": torch.ones(128, 128)}
    with pytest.raises(SettingError, match="merge"):
        apply_lora(build(INT8), saved(weight), 1.0, how="bypass")


def test_what_is_not_applied_is_told() -> None:
    tensors = {f"transformer.{name}": tensor for name, tensor in lora(alpha=None).items()}
    block = "transformer.transformer_blocks.59.attn.to_q"
    for module in ("text_encoder.layers.0.self_attn.q_proj", block):
        tensors[f"{module}.lora_A.weight"] = torch.ones(4, 128)
        tensors[f"{module}.lora_B.weight"] = torch.ones(128, 4)
    tensors["transformer.proj_out.alpha"] = torch.tensor(1.0)
    norm = "transformer.transformer_blocks.0.attn.norm_q"
    tensors[f"{norm}.diff_b"] = torch.ones(32)
    tensors["something.else"] = torch.ones(1)
    said = "transformer.transformer_blocks.59.attn.comfy_attention.config"
    tensors[said] = torch.tensor(list(b'{"attention": "comfy_kitchen_int8"}'), dtype=torch.uint8)
    model, report = apply_lora(build(), saved(tensors), 1.0, how="merge")
    assert (report.applied, report.modules) == (MODULES, MODULES + 4)
    assert dict(report.not_applied) == {
        "text_encoder.layers.0.self_attn.q_proj": "text encoder",
        block: "this model has no such module",
        "transformer.proj_out": "its tensors are incomplete",
        norm: "this model has no such module",
        "something.else": "ComfyUI's loader did not read it",
        said: "this ComfyUI's model has no such setting",
    }
    text = report.text()
    assert "28 of 32 keys applied" in text and "and 3 more" in text, text
    assert len(model.patches) == MODULES


def test_the_report() -> None:
    tensors = {
        name: tensor if "to_q" in name else tensor[:, :2] if "up" in name else tensor[:2]
        for name, tensor in lora(alpha=None).items()
    }
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    path = saved(tensors, "mixed")
    for form, how, rounded in ((PLAIN, "merge", 0), (INT8, "merge", 24), (INT8, "bypass", 24)):
        _, report = apply_lora(build(form), path, -0.25, how=how)
        known = (path, how, -0.25, MODULES, MODULES, (), (2, 4), nbytes, rounded)
        assert replace(report, why="", loss=None) == LoraReport(*known), report
        assert (report.loss == 0) == (form is PLAIN), "fp32 loses nothing"


def test_strength_zero() -> None:
    base = build()
    for how in ("merge", "bypass"):
        model, report = apply_lora(base, saved(lora()), 0.0, how=how)
        assert model is base
        assert (report.applied, report.modules) == (0, MODULES)
        assert "not applied" in report.text() and "strength is 0" in report.text()


def test_wrong_settings() -> None:
    for strength, how in ((1.0, "sideways"), (float("nan"), "merge"), (float("inf"), "bypass")):
        with pytest.raises(SettingError, match=r"sideways|finite"):
            apply_lora(build(), saved(lora()), strength, how=how)


def test_wrong_files() -> None:
    refused(WEIGHTS, "not a LoRA", "transformer", "move it to models/diffusion_models")
    refused({"a.b": torch.ones(3)}, "not a LoRA")
    text_encoder = {
        "lora_te1_layers_0_q.lora_down.weight": torch.ones(4, 8),
        "lora_te1_layers_0_q.lora_up.weight": torch.ones(8, 4),
    }
    refused(text_encoder, "none of its 1 keys", "text encoder", "LoRA for another model")
    flux = {
        "transformer.single_transformer_blocks.0.attn.to_q.lora_A.weight": torch.ones(4, 128),
        "transformer.single_transformer_blocks.0.attn.to_q.lora_B.weight": torch.ones(128, 4),
    }
    refused({**lora(), **flux}, "single_transformer_blocks.0.attn.to_q")
    refused({**lora(), f"transformer.{LAYER}.lora_down.weight": torch.ones(4, 128)}, "twice")
    kohya = f"lora_unet_{LAYER.replace('.', '_')}"
    pair = {f"{kohya}.lora_down.weight": torch.ones(4, 128)}
    refused({**lora(), **pair, f"{kohya}.lora_up.weight": torch.ones(128, 4)}, "two names")


def test_damaged_tensors() -> None:
    for how in ("merge", "bypass"):
        for bad in (float("nan"), float("-inf")):
            tensors = lora()
            tensors[f"{LAYER}.lora_up.weight"][5, 1] = bad
            refused(tensors, "NaN or infinity", f"{LAYER}.lora_up.weight", how=how)
        refused({**lora(), f"{LAYER}.alpha": torch.tensor(float("nan"))}, "NaN", how=how)
        refused({**lora(), f"{LAYER}.alpha": torch.ones(2)}, "must be one number", how=how)
        half = lora()
        del half[f"{LAYER}.lora_down.weight"]
        refused(half, f"{LAYER}.lora_down.weight", how=how)
        odd = {**lora(), f"{LAYER}.lora_down.weight": torch.ones(3, 128)}
        refused(odd, LAYER, how=how)
        wide = {**lora(), f"{LAYER}.lora_down.weight": torch.ones(4, 256)}
        refused(wide, LAYER, "(128, 256)", "(128, 128)", how=how)
        refused(lora(rank=0), "rank 0", how=how)
        refused({**lora(), f"{LAYER}.lokr_w1": torch.ones(8, 8)}, LAYER, how=how)
        refused({**lora(), f"{LAYER}.diff_b": torch.ones(64)}, LAYER, "(64,)", how=how)
    refused({**lora(), f"{LAYER}.lora_magnitude_vector": torch.ones(128)}, "DoRA", "PEFT")


def test_metadata_is_kept_as_core_keeps_it() -> None:
    path = saved(lora(), metadata={"ss_network_dim": "4"})
    for how in ("merge", "bypass"):
        model, _ = apply_lora(build(), path, 1.0, how=how)
        assert model.get_attachment("lora_metadata") == {"ss_network_dim": "4"}


def test_fp8_and_bf16_files() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float8_e4m3fn):
        tensors = {
            name: tensor.to(dtype) if tensor.ndim else tensor for name, tensor in lora().items()
        }
        rounded = {name: tensor.float() for name, tensor in tensors.items()}
        base = build()
        expected = sample(by_core(base, rounded))
        for how in ("merge", "bypass"):
            assert distance(sample(applied(base, tensors, how=how)), expected) < 1e-5, (dtype, how)


def test_another_model_of_the_same_blocks_is_refused() -> None:
    model = build()
    model.model.__class__ = type("MageFlow", (type(model.model),), {})
    words = "The MODEL is MageFlow, but this node is for Qwen-Image"
    with pytest.raises(SettingError, match=words):
        applied(model, lora())


def test_inspection_knows_every_form_of_comfyuis_loader() -> None:
    suffixes = asked_suffixes(comfy.lora.load_lora)
    forms = (*FORMS.values(), *FAILING.values())
    written = {end for form in forms for end in form(*MATRICES[LAYER].shape)}
    assert suffixes == written, "another form than those that are tried here"
    assert {it for it in suffixes if SUFFIX.sub("", f"x{it}") != "x"} == set()


def in_form(form: str) -> Tensors:
    """A file of a form, with its modules in one of the styles that ComfyUI itself knows."""
    styles = ("diffusion_model.{}", "transformer.{}", "{}", "lora_unet_{}", "lycoris_{}")
    style = styles[[*FORMS].index(form) % len(styles)]
    names = {it: it.replace(".", "_") if style.endswith("_{}") else it for it in MATRICES}
    return {
        f"{style.format(names[module])}{end}": tensor
        for module, weight in MATRICES.items()
        for end, tensor in FORMS[form](*weight.shape).items()
    }


@pytest.mark.parametrize("form", FORMS)
def test_a_form_does_what_core_does(form: str) -> None:
    tensors = in_form(form)
    [part] = split_parts(tensors)
    assert (part.identity.role, part.identity.dims["modules"]) == ("lora", MODULES)
    chosen = {}
    for weights in (INT8, PLAIN):
        base = build(weights)
        known, path = sample(by_core(base, tensors, 0.7)), saved(tensors, "form")
        assert distance(known, sample(base)) > 1e-3, "it changes nothing to speak of"
        for how in ("merge", "auto"):
            model, report = apply_lora(base, path, 0.7, how=how)
            found = sample(model)
            assert (report.applied, report.modules, report.not_applied) == (MODULES, MODULES, ())
            same = torch.equal(found, known) if report.how == "merge" else weights is INT8
            assert same, (weights, how, distance(found, known))
        chosen[weights] = report.how
    if chosen[INT8] == "merge":
        with pytest.raises(SettingError):
            apply_lora(build(INT8), path, 1.0, how="bypass")
    else:
        beside = sample(apply_lora(base, path, 0.7, how="bypass")[0])
        assert distance(beside, known) < 1e-5


@pytest.mark.parametrize("form", FAILING)
def test_a_form_that_does_not_fit_is_refused(form: str) -> None:
    """ComfyUI logs a line for the layer, or ends in the middle of a step, or adds nonsense."""
    ends = FAILING[form](*MATRICES[LAYER].shape)
    refused({**lora(alpha=None), **{f"{LAYER}{end}": it for end, it in ends.items()}}, LAYER)
    refused({f"{LAYER}{end}": it for end, it in ends.items()}, LAYER, how="auto")


def test_what_the_loader_leaves_out_is_told() -> None:
    """ComfyUI logs a line for each tensor; a second change of a weight takes the first one's place
    without one.
    """
    biases = {f"{module}.lora_B.bias": torch.ones(4) for module in MATRICES}
    _, report = apply_lora(build(), saved({**lora(), **biases}), 1.0, how="merge")
    assert {name for name, _ in report.not_applied} == {*biases}
    assert (report.applied, report.modules) == (MODULES, MODULES)
    tensors = {**lora(), f"{LAYER}.diff": torch.ones(128, 128)}
    model, report = apply_lora(build(), saved(tensors), 1.0, how="merge")
    assert torch.equal(sample(model), sample(by_core(build(), tensors)))
    assert {name for name, _ in report.not_applied} == {
        f"{LAYER}.lora_{side}.weight" for side in ("up", "down")
    }


def test_a_parameter_that_is_no_weight() -> None:
    tensors = {**lora(), f"diffusion_model.{LAYER}.bias.diff": torch.ones(128)}
    model, report = apply_lora(build(), saved(tensors), 1.0, how="merge")
    assert (report.applied, report.modules) == (MODULES + 1, MODULES + 1)
    assert torch.equal(sample(model), sample(by_core(build(), tensors)))


def test_a_form_that_only_a_newer_comfyui_knows(monkeypatch) -> None:
    class Halved(comfy.weight_adapter.WeightAdapterBase):
        name = "halved"

        def __init__(self, loaded_keys: set[str], weights: tuple[torch.Tensor]) -> None:
            self.loaded_keys, self.weights = loaded_keys, weights

        @classmethod
        def load(cls, x: str, lora: Tensors, *others: object) -> "Halved | None":
            return cls(set(), (lora[f"{x}.halves"],)) if f"{x}.halves" in lora else None

        def calculate_weight(self, weight, key, strength, model, offset, function, *more):
            weight += function(strength / 2 * self.weights[0].to(weight))
            return weight

    new = {f"transformer.{LAYER}.halves": torch.ones(128, 128) / 10}
    refused(new, "not a LoRA")
    monkeypatch.setattr(comfy.weight_adapter, "adapters", [*comfy.weight_adapter.adapters, Halved])
    others = {name: it for name, it in lora().items() if not name.startswith(LAYER)}
    for tensors, modules in ((new, 1), (new | others, MODULES)):
        model, report = apply_lora(build(INT8), saved(tensors), 1.0, how="auto")
        assert (report.applied, report.modules, report.how) == (modules, modules, "merge")
        assert torch.equal(sample(model), sample(by_core(build(INT8), tensors)))


@pytest.mark.parametrize("lora_type", nodes_lora_extract.LORA_TYPES)
def test_what_core_extracts_and_saves(lora_type: str) -> None:
    base = build()
    [difference] = nodes_model_merging.ModelSubtract().merge(by_core(base, lora()), base, 1.0)
    nodes_lora_extract.LoraSave.execute(f"{lora_type}/of", 4, lora_type, True, difference)
    [path] = Path(folder_paths.get_output_directory(), lora_type).iterdir()
    model, report = apply_lora(base, path, 1.0, how="merge")
    assert report.applied == report.modules and not report.not_applied, report
    assert torch.equal(sample(model), sample(by_core(base, load_file(path))))
    assert distance(sample(model), sample(by_core(base, lora()))) < 0.1
