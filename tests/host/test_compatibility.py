"""Nodes of ComfyUI and stand-ins of other packs, before and after Qwen-Image Optimize.

Each cell of docs/compatibility.md: the same picture as without us, and a report that says what ran.
"""

import contextlib
import functools
import gc
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import comfy.controlnet
import comfy.hooks
import comfy.latent_formats
import comfy.ldm.qwen_image.controlnet as controlnets
import comfy.model_management
import comfy.model_patcher
import comfy.ops
import comfy.sample
import comfy.samplers
import comfy.sd
import narrow_transformer as narrow
import pack_stand_ins as packs
import pytest
import torch
from comfy_extras.nodes_apg import APG
from comfy_extras.nodes_cfg import CFGNorm, CFGZeroStar
from comfy_extras.nodes_custom_sampler import SamplerCustomAdvanced
from comfy_extras.nodes_differential_diffusion import DifferentialDiffusion
from comfy_extras.nodes_easycache import EasyCacheNode, LazyCacheNode
from comfy_extras.nodes_model_advanced import (
    ModelAttentionBackend,
    ModelComputeDtype,
    ModelSamplingAuraFlow,
    RescaleCFG,
)
from comfy_extras.nodes_model_merging import ModelMergeSimple
from comfy_extras.nodes_model_merging_model_specific import ModelMergeQwenImage
from comfy_extras.nodes_model_patch import (
    QwenImageBlockWiseControlNet,
    QwenImageDiffsynthControlnet,
)
from comfy_extras.nodes_nag import NAGuidance
from comfy_extras.nodes_pag import PerturbedAttentionGuidance
from comfy_extras.nodes_perpneg import Guider_PerpNeg, PerpNeg
from comfy_extras.nodes_slg import SkipLayerGuidanceDiT, SkipLayerGuidanceDiTSimple
from comfy_extras.nodes_tcfg import TCFG
from comfy_extras.nodes_torch_compile import TorchCompileModel
from comfyui_boot import ROOT, folder
from narrow_21 import TEXT, weights_21
from narrow_transformer import difference, random

from qwen_l40s.hosts.comfyui.load.transformer import load_model
from qwen_l40s.hosts.comfyui.sample.optimize import optimize, report_of

FOLDER = folder("compatibility")
PAGE = ROOT / "docs" / "compatibility.md"
WEIGHTS = narrow.weights()
PATHS = [
    narrow.write(FOLDER / "own.safetensors", WEIGHTS),
    narrow.write(FOLDER / "other.safetensors", {n: w * 1.1 for n, w in WEIGHTS.items()}),
]
SAME = 5e-6
SEEN = 5e-5
CPU = torch.device("cpu")
Model = comfy.model_patcher.ModelPatcher
WIDE = random(1, 16, 1, 8, 24)


@functools.cache
def loaded(kind: str = "own") -> Model:
    gc.collect()  # ComfyUI fails where a model disappears while it makes room for another one
    if kind != "2.1":
        precision = "int8" if "int8" in kind else "bf16"
        return load_model(PATHS["other" in kind], precision)[0]
    # As `model_21`, whose text changes next to nothing.
    weights = {name: weight * (1 + 2 * (weight.ndim == 2)) for name, weight in weights_21().items()}
    return comfy.sd.load_diffusion_model_state_dict(weights, model_options={"dtype": torch.float32})


def is_21(model: Model) -> bool:
    return type(model.model).__name__ == "QwenImage21"


def noise_of(model: Model) -> torch.Tensor:
    return random(1, 64, 8, 8) if is_21(model) else random(1, 16, 1, 8, 8)


def prompt(model: Model, tokens: int = 20, **values: Any) -> list:
    width = TEXT if is_21(model) else narrow.SHAPE.joint_dim
    return [[random(1, tokens, width, seed=tokens), values]]


def sample(
    model: Model, positive: list | None = None, cfg=2.5, steps=4, noise=None, **more
) -> torch.Tensor:
    prompts = positive or prompt(model), prompt(model, 7)
    noise = noise_of(model) if noise is None else noise
    return narrow.sample(model, *prompts, steps=steps, cfg=cfg, noise=noise, **more)


def steps(count: int, **more) -> Callable[[Model], torch.Tensor]:
    return functools.partial(sample, steps=count, **more)


# ----------------------------------------------------------------------------------- ways to sample


def custom(model: Model, sampler=None, guider=None) -> torch.Tensor:
    """By SamplerCustomAdvanced."""
    if guider is None:
        guider = comfy.samplers.CFGGuider(model)
        guider.set_conds(prompt(model), prompt(model, 7))
        guider.set_cfg(2.5)
    noise = noise_of(model)

    class Noise:
        seed = 0

        def generate_noise(self, latent):
            return noise

    sampler = sampler or comfy.samplers.sampler_object("euler")
    sigmas = comfy.samplers.KSampler(model, 4, CPU).sigmas
    latent = {"samples": torch.zeros_like(noise)}
    with torch.inference_mode():
        found = SamplerCustomAdvanced.execute(Noise(), guider, sampler, sigmas, latent).result[0]
    return found["samples"].float()


def perp_neg(model: Model) -> torch.Tensor:
    guider = Guider_PerpNeg(model)
    guider.set_conds(*(prompt(model, tokens) for tokens in (20, 7, 3)))
    guider.set_cfg(2.5, 1.0)
    return custom(model, guider=guider)


def in_parts(model: Model) -> torch.Tensor:
    """As two KSampler (Advanced) of which the first leaves noise."""
    first = sample(model, last_step=2, force_full_denoise=False)
    how = 4, 2.5, "euler", "simple", prompt(model), prompt(model, 7), first
    more = {"start_step": 2, "disable_noise": True, "disable_pbar": True}
    with torch.inference_mode():
        return comfy.sample.sample(model, torch.zeros_like(first), *how, **more).float()


def inpaint(model: Model) -> torch.Tensor:
    mask = torch.linspace(0, 1, 8).repeat(8, 1)[None, None]
    return sample(model, noise_mask=mask)


def in_tiles(model: Model) -> torch.Tensor:
    """As Ultimate SD Upscale: image to image in tiles, the last of another size."""
    sizes = (8, 8), (8, 8), (6, 8)
    found = [
        sample(model, steps=6, denoise=0.5, noise=random(1, 16, 1, *size, seed=seed))
        for seed, size in enumerate(sizes)
    ]
    return torch.cat([tile.flatten() for tile in found])


def hooked(model: Model) -> torch.Tensor:
    """A LoRA on the positive prompt alone, for half of the steps."""
    lora = narrow.lora(WEIGHTS, ["transformer_blocks.0.attn.to_q", narrow.MODULATION], scale=0.3)
    patched, _, hooks = comfy.hooks.load_hook_lora_for_models(model, None, lora, 1.0, 0.0)
    frames = comfy.hooks.HookKeyframeGroup()
    frames.add(comfy.hooks.HookKeyframe(1.0))
    frames.add(comfy.hooks.HookKeyframe(0.0, start_percent=0.5))
    hooks.set_keyframes_on_hooks(frames)
    return sample(patched, comfy.hooks.set_hooks_for_conditioning(prompt(model), hooks))


def regions(model: Model) -> torch.Tensor:
    """Conditioning (Set Area) and (Set Mask), combined."""
    mask = torch.zeros(1, 64, 64)
    mask[..., :32] = 1
    area = prompt(model, 9, area=(8, 4, 0, 4), strength=1.0)
    masked = prompt(model, 11, mask=mask, mask_strength=1.0)
    return sample(model, prompt(model) + area + masked)


class Vae:
    """Sixteen channels of an image, an eighth of its size."""

    def encode(self, pixels):
        small = torch.nn.functional.avg_pool2d(pixels.movedim(-1, 1), 8)
        return small.repeat(1, 6, 1, 1)[:, :16, None]

    def spacial_compression_encode(self):
        return 8


IMAGE = random(1, 3, 64, 64, seed=5).sigmoid()


def random_weights(module: torch.nn.Module) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(7)
    for parameter in module.parameters():
        scale = 0.5 / parameter.shape[-1] ** 0.5
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    return module.eval()


def controlled(kind: type, make: Callable[[], torch.nn.Module]) -> Callable[[Model], torch.Tensor]:
    def run(model: Model) -> torch.Tensor:
        latents = comfy.latent_formats.Wan21()
        more = {"compression_ratio": 1, "latent_format": latents, "load_device": CPU}
        control = kind(random_weights(make()), extra_conds=[], **more)
        control.set_cond_hint(IMAGE, 1.0, (0.0, 0.6), vae=Vae())
        return sample(model, prompt(model, control=control, control_apply_to_uncond=True))

    return run


MAKE = {"operations": comfy.ops.disable_weight_init, "device": CPU, "dtype": torch.float32}


def instant_x() -> torch.nn.Module:
    config = {name: value for name, value in narrow.CONFIG.items() if name != "image_model"}
    return controlnets.QwenImageControlNetModel(**config | {"num_layers": 1}, **MAKE)


def fun() -> torch.nn.Module:
    return controlnets.QwenImageFunControlNetModel(
        **{"inner_dim": 128, "num_attention_heads": 4, "attention_head_dim": 32},
        **{"num_control_blocks": 2, "main_model_double": 2, "injection_layers": (0, 1)},
        **MAKE,
    )


def diff_synth(model: Model) -> Model:
    control = random_weights(QwenImageBlockWiseControlNet(num_layers=2, dim=128, **MAKE))
    patcher = comfy.model_patcher.CoreModelPatcher(control, CPU, CPU)
    image = IMAGE.movedim(1, -1)
    return QwenImageDiffsynthControlnet().diffsynth_controlnet(model, patcher, Vae(), image)[0]


def with_lora(model: Model) -> Model:
    lora = narrow.lora(WEIGHTS, ["transformer_blocks.0.attn.to_q", narrow.MODULATION], scale=0.3)
    for _ in range(2):  # as Power Lora Loader, which calls ComfyUI's loader for each row
        model = comfy.sd.load_lora_for_models(model, None, lora, 0.5, 0)[0]
    return model


def merged_by_blocks(model: Model) -> Model:
    ratios = {"transformer_blocks.0.": 0.3, "transformer_blocks.1.": 1.0}
    return ModelMergeQwenImage().merge(model, loaded("other"), **ratios)[0]


def painted(model: Model) -> torch.Tensor:
    with packs.lan_paint():
        return inpaint(model)


def nag_fork(model: Model) -> torch.Tensor:
    with packs.nag_fork(model):
        return sample(model, cfg=1.0)


def cache_dit(model: Model) -> torch.Tensor:
    """Removes what CacheDiT leaves on the transformer."""
    try:
        return sample(packs.cache_dit(model), steps=6)
    finally:
        model.model.diffusion_model.__dict__.pop("forward", None)


def unloaded(model: Model) -> torch.Tensor:
    """Takes object patches off the model, as ComfyUI does before another's."""
    found = sample(model)
    comfy.model_management.unload_all_models()
    return found


def restores(run: Callable[[Model], torch.Tensor]) -> Callable[[Model], torch.Tensor]:
    def restored(model: Model) -> torch.Tensor:
        with contextlib.ExitStack() as stack:
            matmul = torch.backends.cuda.matmul
            stack.callback(setattr, matmul, "allow_fp16_accumulation", False)
            return run(model)

    return restored


# ---------------------------------------------------------------------------------------- the table

FUSED = "fused"
OTHERS = "another extension runs the transformer with its own code"
COMPILED = "torch.compile runs the model"
CHANGED = "attn was changed by another extension"


@dataclass(frozen=True)
class Case:
    """A cell: `patch` makes the MODEL, `run` samples it.

    Attributes:
        says: What runs the blocks: FUSED, or the report's reason why ComfyUI's own do.
        on_21: The same of Qwen-Image-2.1; empty where it is not tried.
        effect: Whether it changes the picture; None where there is none to compare with.
        most: The largest difference.
        note: For the page.
    """

    patch: Callable[[Model], Model] = lambda model: model
    run: Callable[[Model], torch.Tensor] = sample
    says: str = FUSED
    on_21: str = ""
    effect: bool | None = True
    most: float = SAME
    note: str = ""


def node(kind: Any, *given: Any) -> Callable[[Model], Model]:
    return lambda model: kind.execute(model, *given).result[0]


def euler_by(make: Callable[[Any], Any]) -> Callable[[Model], torch.Tensor]:
    return lambda model: custom(model, make(comfy.samplers.sampler_object("euler")))


def older(kind: type, method: str, *given: Any) -> Callable[[Model], Model]:
    """Of a node in the older form."""
    return lambda model: getattr(kind(), method)(model, *given)[0]


PAID = "no effect on Qwen-Image, with or without this pack"
BOTH = {"on_21": FUSED}
CORE = {
    "EasyCache": Case(
        *(node(EasyCacheNode, 3.0, 0.1, 0.95, False), steps(12)),
        **BOTH,
    ),
    "LazyCache": Case(node(LazyCacheNode, 3.0, 0.1, 0.95, False), steps(12), **BOTH),
    "TorchCompileModel": Case(
        node(TorchCompileModel, "eager"),
        says=COMPILED,
        on_21=COMPILED,
        effect=False,
    ),
    "ModelSamplingAuraFlow": Case(older(ModelSamplingAuraFlow, "patch_aura", 3.1), **BOTH),
    "ModelAttentionBackend": Case(
        older(ModelAttentionBackend, "patch", "pytorch attention"),
        effect=False,
        **BOTH,
    ),
    "ModelComputeDtype": Case(older(ModelComputeDtype, "patch", "bf16"), most=2e-2),
    "CFGNorm": Case(node(CFGNorm, 0.9), **BOTH),
    "CFGZeroStar": Case(node(CFGZeroStar)),
    "RescaleCFG": Case(older(RescaleCFG, "patch", 0.7)),
    "APG, TCFG": Case(lambda model: node(TCFG)(node(APG, 1.0, 5.0, 0.3)(model)), **BOTH),
    "SkipLayerGuidanceDiT": Case(
        node(SkipLayerGuidanceDiT, 3.0, 0.0, 1.0, "1", "1"),
        on_21=FUSED,
    ),
    "SkipLayerGuidanceDiTSimple": Case(
        node(SkipLayerGuidanceDiTSimple, 0.0, 1.0, "1", "1"),
        on_21=FUSED,
    ),
    "PerturbedAttentionGuidance": Case(
        node(PerturbedAttentionGuidance, 3.0), effect=False, note=PAID
    ),
    "NAGuidance": Case(
        *(node(NAGuidance, 5.0, 0.5, 1.5), steps(3, cfg=1.0)),
        effect=False,
        note=PAID,
    ),
    "DifferentialDiffusion": Case(node(DifferentialDiffusion), inpaint),
    "Perp-Neg": Case(
        lambda model: node(PerpNeg, prompt(model, 3), 1.0)(model),
        **BOTH,
    ),
    "Perp-Neg Guider": Case(run=perp_neg, **BOTH),
    "LoRA hooks on a prompt, with keyframes": Case(run=hooked),
    "Conditioning (Set Area), (Set Mask)": Case(run=regions),
    "ModelMergeSimple": Case(
        lambda model: ModelMergeSimple().merge(model, loaded("other"), 0.4)[0],
    ),
    "ModelMergeQwenImage": Case(merged_by_blocks),
    "Load LoRA, LoraLoaderModelOnly": Case(with_lora),
    "KSampler (Advanced), in parts": Case(run=in_parts, effect=False, **BOTH),
    "SamplerCustomAdvanced": Case(run=custom, effect=False, **BOTH),
    "Set Latent Noise Mask": Case(run=inpaint, **BOTH),
    "InstantX ControlNet": Case(run=controlled(comfy.controlnet.ControlNet, instant_x)),
    "Fun ControlNet": Case(
        run=controlled(comfy.controlnet.QwenFunControlNet, fun),
    ),
    "QwenImageDiffsynthControlnet": Case(diff_synth),
}
PACKS = {
    "KJNodes 3f20054: Patch Sage Attention": Case(packs.kj_sage, on_21=FUSED),
    "KJNodes 3f20054: TorchCompileModelQwenImage": Case(
        packs.kj_compile, says=COMPILED, on_21=COMPILED, effect=False
    ),
    "KJNodes 3f20054: Patch Torch Settings": Case(
        packs.kj_torch_settings, restores(sample), effect=False, **BOTH
    ),
    "TeaCache 1a11412, MagCache: Compile Model": Case(
        *(packs.compiled_model, unloaded),
        says=OTHERS,
        on_21=OTHERS,
        effect=False,
    ),
    "RES4LYF 022c873": Case(
        run=lambda model: custom(model, comfy.samplers.KSAMPLER(packs.res_2s)),
        **BOTH,
    ),
    "MagCache 47bdd2a": Case(packs.mag_cache, steps(6, cfg=1.0)),
    "Spectrum-Qwen ddb5470": Case(packs.spectrum, steps(6, cfg=1.0)),
    "DyPE 3fd9149": Case(packs.dype),
    "CacheDiT ab1a144": Case(run=cache_dit, effect=None),
    "LanPaint 32cf848": Case(run=painted, **BOTH),
    "Detail-Daemon 3394e44": Case(run=euler_by(packs.detail_daemon), **BOTH),
    "TiledDiffusion a155b1b": Case(
        *(packs.tiled_diffusion, steps(3, noise=WIDE)),
        note="the pack fails on the five dimensions of 1.x's latents, without this pack too",
    ),
    "Ultimate SD Upscale": Case(run=in_tiles, effect=None),
    "Power Lora Loader, LoRA Manager": Case(with_lora),
    "reference attention": Case(packs.reference_attention),
    "NAG forks for Qwen-Image": Case(run=nag_fork, says=CHANGED),
}
CASES = CORE | PACKS


@functools.cache
def without(name: str, kind: str) -> torch.Tensor:
    """The picture without us, of a case whose effect is seen."""
    case, model = CASES[name], loaded(kind)
    found = case.run(case.patch(model))
    if case.effect is not None:
        patched = case.patch is not Case.patch
        away = difference(found, case.run(model) if patched else sample(model))
        assert away > SEEN if case.effect else away <= SAME, away
    return found


def check(name: str, order: str, kind: str, says: str) -> None:
    case, known, model = CASES[name], without(name, kind), loaded(kind)
    model = optimize(case.patch(model)) if order == "before" else case.patch(optimize(model))
    found, report = case.run(model), report_of(model)
    assert torch.isfinite(found).all()
    assert difference(found, known) <= case.most, (difference(found, known), report)
    if says == FUSED:
        assert re.match(r"blocks: fused, (\d+) of \1 in ", report), report
    else:
        assert re.search(f"^blocks: ComfyUI's code.*: {says}", report, re.M), report


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("name", CASES)
def test_the_picture_stays_and_the_report_says_what_ran(name, order):
    check(name, order, "own", CASES[name].says)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("inference_mode")
def test_int8(name):
    check(name, "after", "int8", CASES[name].says)


@pytest.mark.host_has("comfy.model_base.QwenImage21")
@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.on_21])
def test_the_same_of_qwen_image_21(name, order):
    check(name, order, "2.1", CASES[name].on_21)


def test_a_model_is_known_while_another_models_patch_is_on_it():
    model = loaded()
    try:
        sample(packs.compiled_model(model))
        assert optimize(model) is not model
    finally:
        comfy.model_management.unload_all_models()


# ----------------------------------------------------------------------------------------- the page

# What other tests try, and what nothing does: the blocks, and where or why not.
ELSEWHERE = {
    "ComfyUI-GGUF": (
        "yes; its layers run themselves",
        "test_optimize.py::test_a_model_of_another_loader_of_gguf",
    ),
    "LoRAs as bypass": ("yes", "test_equality.py::test_qwen_image"),
    "Extract and Save LoRA, Save Checkpoint": (
        "as with other files",
        "test_loader.py::test_what_comfyui_s_own_nodes_save_is_read_again",
    ),
    "patches of attention (attn1_patch)": (
        "no: attn1_patch",
        "test_equality.py::test_qwen_image",
    ),
    "MultiGPU CFG Split": ("yes", "test_cards.py::test_nodes_may_stand_in_any_order"),
    "weights partly in system RAM": ("yes", "test_optimize.py::test_a_partly_loaded_model"),
    "a change to a part of a block": (
        "no for that block",
        "test_changed_by_others.py::test_a_part_of_a_block_that_is_changed_in_a_run",
    ),
    "a change to a function of ComfyUI or torch": (
        "no, from that step on",
        "test_other_packs.py::test_a_late_change_of_a_block_is_heeded",
    ),
    "add_weight_wrapper, runtime LoRAs": (
        "yes; the modulation is computed in each step",
        "test_changed_by_others.py::test_weights_that_follow_the_sigma",
    ),
    "weights written in place": (
        "yes; the modulation is computed again",
        "test_changed_by_others.py::test_weights_of_the_modulation_that_are_changed_between_two_prompts",
    ),
    "seamless tiling (circular padding)": (
        "yes; the VAE is ComfyUI's",
        "test_changed_by_others.py::test_a_vae_that_another_pack_has_changed",
    ),
    "Train LoRA": ("no: gradients are recorded", "test_changed_by_others.py::test_training"),
    "Save Model, ModelMerge with a LoRA": (
        "yes; a LoRA in bypass is one of the patches",
        "test_changed_by_others.py::test_a_lora_is_among_the_patches",
    ),
    "wrappers around parts (PEFT)": (
        "yes; no for a wrapped block",
        "test_wrapped_parts.py::test_the_picture_is_that_of_the_parts",
    ),
    "Nunchaku, piFlow, DF11": (
        "no: the MODEL is left unchanged",
        "test_optimize.py::test_other_models_pass_through",
    ),
}
NOT_TRIED = {
    "DisTorch2 with a second GPU": "ComfyUI runs a block on another GPU",
    "TeaCache": "its node does not know Qwen-Image",
    "Attention Couple (ppm)": "it changes only Stable Diffusion and Anima",
    "Impact's FaceDetailer, Easy-Use": "they run ComfyUI's samplers and change no MODEL",
    "raylight": "it starts its workers",
}


def verdict(says: str) -> str:
    return "yes" if says == FUSED else f"no: {says}"


def grouped(head: str, rows: Iterable[tuple[str, ...]]) -> str:
    """A table with a row for each answer: the names that have it come last."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, *answer in rows:
        groups.setdefault(tuple(answer), []).append(name)
    lines = [f"| {' | '.join((*answer, '; '.join(names)))} |" for answer, names in groups.items()]
    return "\n".join((f"| {head} |", "|" + "---|" * (head.count("|") + 1), *lines))


def of_cases(cases: Mapping[str, Case]) -> str:
    return grouped(
        "fast path | with 2.1 | nodes",
        (
            (
                f"{name} ({case.note})" if case.note else name,
                verdict(case.says),
                verdict(case.on_21) if case.on_21 else "not tried",
            )
            for name, case in cases.items()
        ),
    )


def tables() -> str:
    elsewhere = grouped("fast path | what", ((name, says) for name, (says, _) in ELSEWHERE.items()))
    left = grouped("not tried, because | nodes", NOT_TRIED.items())
    core, packs = of_cases(CORE), of_cases(PACKS)
    parts = "## Nodes of ComfyUI", core, "## Other packs", packs, "## Elsewhere", elsewhere, left
    return "\n\n".join(parts)


def test_the_page_is_the_table():
    for _, at in ELSEWHERE.values():
        file, test = at.split("::")
        assert f"def {test}(" in (ROOT / "tests" / "host" / file).read_text(encoding="utf-8"), at
    made = tables()
    page = PAGE.read_text(encoding="utf-8")
    assert f"{made}\n" in page, f"the page needs:\n\n{made}\n"
