"""One table of what a MODEL can be given: fused blocks sample what ComfyUI's own blocks do.

Each row is sampled by ComfyUI's blocks and by fused ones, with Qwen-Image Optimize after and before
what changes the MODEL; 1.x also with the modulation weights off the card, for the same bits.
"""

import functools
import gc
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import comfy.model_management
import comfy.model_patcher
import comfy.sd
import narrow_21 as of_21
import narrow_transformer as narrow
import pytest
import torch
from comfy.patcher_extension import WrappersMP
from comfyui_boot import MODE, folder
from narrow_transformer import difference, random

from qwen_l40s.hosts.comfyui.load.transformer import load_model
from qwen_l40s.hosts.comfyui.lora.apply import apply_lora
from qwen_l40s.hosts.comfyui.sample.attention import SLOT
from qwen_l40s.hosts.comfyui.sample.nag import NagSettings, guide_attention
from qwen_l40s.hosts.comfyui.sample.optimize import OptimizeSettings, optimize, report_of
from qwen_l40s.hosts.comfyui.sample.step_cache import cache_steps
from qwen_l40s.planning.step_cache import cache_settings

CPU = MODE == "cpu"
FOLDER = folder("equality")
WEIGHTS = narrow.weights()
DEVICE = comfy.model_management.get_torch_device()
HOST_ATTENTION = OptimizeSettings(attention="comfyui")
Model = comfy.model_patcher.ModelPatcher
FORMS = "bf16", "int8", "fp8"
BLOCK = "transformer_blocks.1"


@dataclass(frozen=True)
class Case:
    """A row: `change` makes another MODEL, and `how` is what `sample` is given.

    Attributes:
        form: A precision, a file of `FILES`, or a form of 2.1.
        says: What the report has; blocks that are not fused where it begins so.
        effect: Whether `change` changes the latent.
        most: The largest difference; ComfyUI computes 1.x in fp32 on a CPU and in bf16 on a card.
    """

    form: str = "bf16"
    how: dict[str, Any] = field(default_factory=dict)
    change: Callable[[Model], Model] | None = None
    says: str = "^blocks: fused, (\\d+) of \\1 in "
    effect: bool = True
    most: float = 5e-6


def files() -> dict[str, dict[str, torch.Tensor]]:
    condition = "time_text_embed.addition_t_embedding.weight"
    matrices = {n: w.to(torch.float8_e4m3fn) if w.ndim == 2 else w for n, w in WEIGHTS.items()}
    return {
        "Edit-2511": {**WEIGHTS, narrow.MARKER_2511: torch.empty(0)},
        "Layered": {**WEIGHTS, condition: random(2, narrow.SHAPE.dim).bfloat16()},
        "fp32": {name: weight.float() for name, weight in WEIGHTS.items()},
        "unscaled fp8": matrices,
    }


FILES = files()


@functools.cache
def model(form: str, off_card: bool = False, disable_dynamic: bool = False) -> Model:
    gc.collect()  # ComfyUI fails where a model disappears while it makes room for another one
    path = narrow.write(FOLDER / f"{form}.safetensors", FILES.get(form, WEIGHTS))
    precision = {"unscaled fp8": "fp8"}.get(form, form if form in FORMS else "bf16")
    if not off_card and not disable_dynamic:
        return load_model(path, precision, modulation="on card")[0]
    with torch.inference_mode():  # as loader nodes run
        return narrow.load_patcher(path, precision, off_card, disable_dynamic)


def sample(model: Model, texts=(20, 7), **how) -> torch.Tensor:
    """Two steps unless told; prompts of different lengths never batch."""
    return narrow.sample(model, *texts, **how)


def check(case: Case, made: Model) -> None:
    """Fused blocks against ComfyUI's, each node before and after the other."""
    change = case.change or Model.clone
    plain, known = sample(made, **case.how), sample(change(made), **case.how)
    away = difference(known, plain)
    assert away > 5e-5 if case.change and case.effect else away <= case.most, away
    for one in (optimize(change(made), HOST_ATTENTION), change(optimize(made))):
        found = sample(one, **case.how)
        assert torch.isfinite(found).all()
        assert difference(found, known) <= case.most, (difference(found, known), report_of(one))
        assert re.search(case.says, report_of(one), re.M), report_of(one)
    assert torch.equal(sample(made, **case.how), plain), "the MODEL was changed"


# ---------------------------------------------------------------------------- what changes a MODEL


def adding(**conds: Any) -> Callable[[Model], Model]:
    """What a ControlNet or another node gives to the transformer."""

    def call(apply_model, given):
        more = {name: value() for name, value in conds.items()}
        return apply_model(given["input"], given["timestep"], **given["c"] | more)

    return lambda model: patched(model, "set_model_unet_function_wrapper", call)


def patched(model: Model, name: str, *given: Any) -> Model:
    clone = model.clone()
    getattr(clone, name)(*given)
    return clone


def residuals() -> dict[str, list]:
    dtype = torch.float32 if CPU else torch.bfloat16
    return {"input": [random(1, 16, narrow.SHAPE.dim).to(DEVICE, dtype), None]}


def in_place(arguments):
    arguments["img"] *= 1.5
    if "txt" in arguments:
        arguments["txt"] = arguments["txt"] + 1
    return arguments


def replaced(arguments, extra):
    before = arguments["img"].clone()
    arguments["vec"].mul_(1.1)
    out = extra["original_block"](arguments)
    assert torch.equal(arguments["img"], before), "the block has changed what it was given"
    return {"img": out["img"] * 0.9, "txt": out["txt"]}


def turned(arguments, extra):
    arguments["pe"] = arguments["pe"].roll(1, 2)
    return extra["original_block"](arguments)


def halved(arguments, extra):
    out = extra["original_block"](arguments)
    out["img"].mul_(0.5)
    return out


def block(function, index=0, kind="double_block") -> Callable[[Model], Model]:
    return lambda model: patched(model, "set_model_patch_replace", function, "dit", kind, index)


def between(kind: str) -> Callable[[Model], Model]:
    return lambda model: patched(model, "set_model_patch", in_place, kind)


def of_attention(q, k, v, pe=None, attn_mask=None, extra_options=None):
    return {"q": q * (1.2 + extra_options["block_index"]), "k": k, "v": v, "pe": pe}


def by_block(func, *arguments, transformer_options=None, **options):
    out = func(*arguments, transformer_options=transformer_options, **options)
    return out * (0.5 + transformer_options["block_index"])


def in_slot(model: Model) -> Model:
    clone = model.clone()
    clone.model_options["transformer_options"][SLOT] = by_block
    return clone


def added_inside(kind: str, patch: Callable) -> Callable[[Model], Model]:
    """A patch that a wrapper adds inside of the model's call."""

    def wrapper(executor, *arguments, **options):
        *given, last = arguments
        return executor(*given, {**last, "patches": {kind: [patch]}}, **options)

    return lambda model: patched(model, "add_wrapper", WrappersMP.DIFFUSION_MODEL, wrapper)


def later_for_one(kind: str) -> Callable[[Model], Model]:
    """A timestep that changes for one prompt of a step, whose sigmas say nothing of this."""

    def function(apply_model, given):
        late = 0.5 if given["cond_or_uncond"] == [1] else 1.0
        return apply_model(given["input"], given["timestep"] * late, **given["c"])

    def wrapper(executor, x, t, *arguments, **options):
        given = next(one for one in arguments if isinstance(one, dict) and "uuids" in one)
        return executor(
            x, t * (0.5 if given["cond_or_uncond"] == [1] else 1.0), *arguments, **options
        )

    if kind == "function":
        return lambda model: patched(model, "set_model_unet_function_wrapper", function)
    return lambda model: patched(model, "add_wrapper", kind, wrapper)


@functools.cache
def lora_file(of="all", rank=3):
    weights = of_21.weights_21(fused=False) if of == "2.1" else WEIGHTS
    names = [it.removesuffix(".weight") for it in weights if it.endswith(".weight")]
    halves = ("to_q", "to_out.0", "gate_layer", "proj")
    layers = {
        "all": [*narrow.layers(WEIGHTS), narrow.MODULATION],
        "modulation": [it for it in names if it.endswith("_mod.1")],
        "2.1": [it for it in names if it.startswith(BLOCK) and it.endswith(halves)],
    }
    path = FOLDER / f"lora of {of}, {rank}.safetensors"
    narrow.save_file(narrow.lora(weights, layers[of], rank, seed=rank), path)
    return path


def lora(how: str, of="all") -> Callable[[Model], Model]:
    return lambda model: apply_lora(model, lora_file(of), 0.7, how=how)[0]


def three(model: Model) -> Model:
    for rank, strength in ((1, -1.0), (24, 0.3), (512, 0.05)):
        model = apply_lora(model, lora_file("all", rank), strength, how="bypass")[0]
    return model


def guided(width: int) -> Callable[[Model], Model]:
    negative = [[random(1, 9, width, seed=5), {}]]
    return lambda model: guide_attention(model, negative, NagSettings(4.0, 1.2, 0.5))[0]


def skips(model: Model) -> Model:
    return cache_steps(model, cache_settings("fast"))


# ------------------------------------------------------------------------------------------- 1.x

OWN_BLOCKS = "^blocks: ComfyUI's code.*attn1_patch"
IN_8_BITS = {"most": 5e-6 if CPU else 2e-2}
WRITES = block(replaced)


def references(latents, **more):
    return {"reference_latents": latents, **more}


REFERENCES = [random(1, 16, 1, 8, 8, seed=3), random(1, 16, 1, 4, 6, seed=4)]
METHODS = "index", "negative_index", "offset", "index_timestep_zero"
SAMPLERS = "euler_ancestral", "heun", "dpm_2", "dpmpp_2m", "dpmpp_2s_ancestral", "uni_pc"
CASES = {
    "one prompt": Case(),
    "CFG in two passes": Case(how={"cfg": 2.5}),
    "CFG in one pass": Case(how={"cfg": 2.5, "texts": (20, 20)}),
    "a batch, one text token": Case(how={"batch": 5, "texts": (1, 7)}),
    "300 text tokens": Case(how={"texts": (300, 7)}),
    "a size that ends within a token": Case(how={"side": 7}),
    "a mask of the text": Case(
        how={"texts": (6, 6), "values": {"attention_mask": torch.tensor([[1, 1, 1, 0, 0, 0]])}}
    ),
    "image to image": Case(how={"denoise": 0.5, "steps": 4}),
    "inpainting": Case(how={"noise_mask": (random(1, 1, 8, 8) > 0).float()}),
    **{
        f"references by {method}, batch {batch}": Case(
            how={"batch": batch, "values": references(REFERENCES, reference_latents_method=method)}
        )
        for method in METHODS
        for batch in (1, 2)
    },
    **{f"sampler {name}": Case(how={"sampler": name, "steps": 4}) for name in SAMPLERS},
    **{
        f"{form} weights": Case(form, says=f"layers: {form} through", **IN_8_BITS)
        for form in FORMS[1:]
    },
    "unscaled fp8": Case("unscaled fp8", **IN_8_BITS),
    "an fp32 file": Case("fp32"),
    "Edit-2511": Case("Edit-2511", {"values": references(REFERENCES[:1])}),
    "Layered": Case("Layered"),
    "Layered, the second condition": Case(
        "Layered", change=adding(additional_t_cond=lambda: torch.tensor([1], device=DEVICE))
    ),
    **{
        f"LoRA, {how}, {form}": Case(form, {"cfg": 2.0}, lora(how), **IN_8_BITS)
        for how in ("merge", "bypass")
        for form in FORMS
    },
    **{
        f"LoRA of the modulation, {how}": Case(change=lora(how, "modulation"))
        for how in ("merge", "bypass")
    },
    **{f"three LoRAs, {form}": Case(form, change=three, **IN_8_BITS) for form in FORMS},
    "ControlNet": Case(change=adding(control=residuals)),
    "NAG": Case(change=guided(narrow.SHAPE.joint_dim)),
    "step cache": Case(how={"steps": 14}, change=skips),
    "patches between blocks": Case(change=between("double_block")),
    "a patch that a wrapper adds inside": Case(change=added_inside("double_block", in_place)),
    "a replaced block": Case(change=WRITES),
    "a rotation of one block": Case(change=block(turned, 1)),
    "attention by block": Case(change=in_slot),
    "attn1_patch": Case(
        change=lambda model: patched(model, "set_model_attn1_patch", of_attention), says=OWN_BLOCKS
    ),
    "attn1_patch that a wrapper adds": Case(
        change=added_inside("attn1_patch", of_attention), says=OWN_BLOCKS
    ),
    **{
        f"another timestep for one prompt, by {kind}": Case(
            "bf16", {"cfg": 2.5, "steps": 3}, later_for_one(kind)
        )
        for kind in ("function", WrappersMP.APPLY_MODEL, WrappersMP.DIFFUSION_MODEL)
    },
}


@pytest.mark.each_device
@pytest.mark.parametrize("name", CASES)
def test_qwen_image(name, inference_mode):
    case, of_table = CASES[name], name.startswith("LoRA of the modulation")
    if not CPU:
        most = 5e-2 if case.how.get("steps", 2) > 3 else 2e-2
        case = replace(case, most=max(case.most, most))
    check(case, model(case.form))
    if CPU or case.change in (None, WRITES) or of_table:
        # Under dynamic VRAM a merge is in the dtype of the weight; a table is of whole models.
        whole = MODE == "dynamic" and of_table and "merge" in name
        change, off_card = case.change or Model.clone, model(case.form, off_card=True)
        nodes = Model.clone, functools.partial(optimize, settings=HOST_ATTENTION)
        for node in nodes if CPU or case.form not in FORMS[1:] else nodes[:1]:
            known = node(change(model(case.form, disable_dynamic=whole)))
            found = sample(node(change(off_card)), **case.how)
            assert torch.equal(sample(known, **case.how), found), "off the card, other bits"


GRAPHS = [n for n, it in CASES.items() if it.change is None or n.startswith(("LoRA, by", "NAG"))]


@pytest.mark.parametrize("name", GRAPHS)
def test_graphs_of_qwen_image(name, played_graphs, inference_mode):
    """CUDA graphs of all blocks, played."""
    case = CASES[name]
    changed = (case.change or Model.clone)(model(case.form))
    how = {"steps": 3} | case.how
    one = optimize(changed, OptimizeSettings())
    assert difference(sample(one, **how), sample(changed, **how)) <= case.most, report_of(one)


# ------------------------------------------------------------------------------------------- 2.1

newer = pytest.mark.host_has("comfy.model_base.QwenImage21")
CACHES = "cache", "off", "no memory"
EDIT = {"values": references([random(1, 64, 4, 6)], image_slots=[3])}
PAIR = [random(1, 64, 4, 6), random(1, 64, 2, 2)]
TWO = {"batch": 2, "values": references(PAIR, image_slots=[0, 3])}
IN_ALL = {"says": "^blocks: fused, (6 of 6 in 3|12 of 12 in 6) forward passes", "most": 1e-5}


def first_alone(executor, x, t, *given, **named):
    return executor(x, t[:1], *given, **named)


def single(function) -> Callable[[Model], Model]:
    return block(function, 0, "single_block")


# What is done to 2.1, with how it is sampled; each with ComfyUI's prefix cache and without it.
CASES_21 = {
    "one prompt": Case("fused", **IN_ALL),
    "gate and up apart": Case("apart", **IN_ALL),
    "CFG": Case("fused", {"cfg": 3.0}, **IN_ALL),
    "a batch": Case("fused", {"batch": 2}, **IN_ALL),
    "an edit": Case("fused", EDIT, **IN_ALL),
    "two references, a batch": Case("apart", TWO, **IN_ALL),
    "one timestep for a batch": Case(
        "fused",
        {"batch": 3},
        lambda model: patched(model, "add_wrapper", WrappersMP.APPLY_MODEL, first_alone),
        effect=False,
        **IN_ALL,
    ),
    "a hook that looks": Case(
        "fused",
        EDIT,
        single(lambda args, more: more["original_block"](args)),
        effect=False,
        **IN_ALL,
    ),
    "a skipped block": Case(
        "fused", EDIT, single(lambda args, more: args), "^blocks: fused, 3 of 3 in 3", most=1e-5
    ),
    "a replaced block": Case("fused", TWO, single(halved), **IN_ALL),
    "a patch between blocks": Case(
        "fused",
        TWO,
        lambda model: patched(model, "set_model_patch", in_place, "single_block"),
        **IN_ALL,
    ),
    "a patch before the blocks": Case(
        "fused",
        EDIT,
        lambda model: patched(model, "set_model_patch", in_place, "post_input"),
        **IN_ALL,
    ),
    "attn1_patch": Case(
        "fused",
        change=lambda model: patched(
            model, "set_model_attn1_patch", lambda q, k, v, **rest: {"q": q * 0.5}
        ),
        says=OWN_BLOCKS,
        most=0.0,
    ),
    "Fun ControlNet": Case("fused", EDIT, of_21.fun_control, **IN_ALL),
    "Fun ControlNet, at first": Case(
        "fused", change=functools.partial(of_21.fun_control, until=0.9), **IN_ALL
    ),
    **{
        f"LoRA of halves, {how}": Case("fused", change=lora(how, "2.1"), **IN_ALL)
        for how in ("merge", "bypass")
    },
    "NAG": Case("fused", change=guided(of_21.TEXT), **IN_ALL),
}


@functools.cache
def model_21(form: str) -> Model:
    return of_21.strong_21(form == "fused")


def with_cache(form: str, cache: str, monkeypatch) -> Model:
    made = model_21(form).clone()
    if cache == "off":
        made.model_options["transformer_options"]["qwen_image21_cache"] = {"device": "off"}
    if cache == "no memory":
        kind = type(made.model.diffusion_model)
        monkeypatch.setattr(kind, "select_prefix_cache", lambda *given: (None, False))
    return made


@newer
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("name", CASES_21)
def test_qwen_image_21(name, cache, monkeypatch, inference_mode):
    case = CASES_21[name]
    case = replace(case, how={"steps": 3} | case.how)
    check(case, with_cache(case.form, cache, monkeypatch))


@newer
@pytest.mark.parametrize("name", [name for name, it in CASES_21.items() if it.change is None])
def test_graphs_of_qwen_image_21(name, played_graphs, monkeypatch, inference_mode):
    """Whole rows at once, but for the passes that are compared: of each length one."""
    case = CASES_21[name]
    check(replace(case, how={"steps": 3} | case.how), with_cache(case.form, "off", monkeypatch))
    assert len(played_graphs) >= (4 if "cfg" in case.how else 2)
    assert all(step.segments and step.prefix is None for step in played_graphs)
