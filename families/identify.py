"""Identifies the tensors of a file: parts and adapters (LoRA and its kin) of the families' models,
and by name the other models that people take for one of them.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from .parts import vision_tower
from .protocol import Adapted, Fits, HasShape, Identity, Tensors, known, size
from .registry import FAMILIES, text_encoders, vaes

# Prefixes of the parts of a full checkpoint, and the name of the part. A file may also hold one
# part under its prefix.
PARTS = (
    (re.compile(r"(model\.)?diffusion_model\."), "diffusion model"),
    (re.compile(r"transformer\.(?!resblocks\.)"), "diffusion model"),
    (re.compile(r"(vae|first_stage_model)\."), "vae"),
    # The second as ComfyUI's Save CLIP writes it.
    (re.compile(r"text_encoders?\.([^.]+\.transformer\.)?|qwen\w+\.transformer\."), "text encoder"),
    (re.compile(r"(cond_stage_model|conditioner)\."), "text encoder"),
)
LOOSE = "weights", ""  # what has no known prefix
# Which ComfyUI takes off a transformer; what begins so may be a text encoder too.
WRAPPERS = ("model.model.", "net.", "model.")
INNER = "transformer."  # ends the prefix of a text encoder


_Info = TypeVar("_Info", bound=HasShape)


@dataclass(frozen=True)
class Slice(Generic[_Info]):
    """Holds one part of a file, where a tensor's name is `prefix` and its name in `tensors`."""

    name: str
    prefix: str
    tensors: Mapping[str, _Info]
    identity: Identity


def split_parts(tensors: Mapping[str, _Info]) -> list[Slice[_Info]]:
    """Separates a full checkpoint into its parts.

    An adapter is one part: its prefixes tell the key style. Tensors without a known prefix form the
    part "weights".
    """
    parts: dict[tuple[str, str], dict[str, _Info]] = {}
    for name, info in tensors.items():
        part, prefix = _part_of(name)
        parts.setdefault((part, prefix), {})[name.removeprefix(prefix)] = info
    loose = parts.get(LOOSE, {})
    for prefix in WRAPPERS:
        inner = {it.removeprefix(prefix): loose[it] for it in loose if it.startswith(prefix)}
        if inner and identify(inner).role == "transformer":
            parts["diffusion model", prefix] = inner
            parts[LOOSE] = {it: loose[it] for it in loose if not it.startswith(prefix)}
            break
    # What ComfyUI's CLIP has around a text encoder, such as logit_scale, is no part of its own.
    around = tuple(it.removesuffix(INNER) for _, it in parts if it.endswith(f".{INNER}"))
    for (_, prefix), own in parts.items():
        if not prefix.endswith(INNER):
            for name in [it for it in own if f"{prefix}{it}".startswith(around)]:
                del own[name]
    found = [Slice(*key, own, identify(own)) for key, own in parts.items() if own]
    strange = all(is_unknown(it.identity.family) or it.identity.role == "lora" for it in found)
    if strange and (adapter := lora(tensors)):
        return [Slice(*LOOSE, tensors, adapter)]
    return found or [Slice(*LOOSE, {}, identify_model({}))]


def _part_of(name: str) -> tuple[str, str]:
    for pattern, part in PARTS:
        if match := pattern.match(name):
            return part, match[0]
    return LOOSE


def identify(tensors: Tensors) -> Identity:
    """Returns what the tensors of one part are; an answer always comes, if only that it is not
    Qwen-Image. A model in which tensors of an adapter were left is that model.
    """
    whole = {name: info for name, info in tensors.items() if not SUFFIX.search(name)}
    found = identify_model(whole)
    if whole and not is_unknown(found.family):
        return found
    return lora(tensors) or identify_model(tensors)


def identify_model(tensors: Tensors) -> Identity:
    """Does the same of tensors that are no adapter's."""
    for kinds, other in ((FAMILIES, None), (text_encoders(), vision_tower), (vaes(), None)):
        claims = [(it.title, found) for it in kinds if (found := it.identify(tensors)) is not None]
        if claims:
            return _one(claims)
        if other and (found := other(tensors)) is not None:
            return found
    return _other_model(tensors)


def _one(claims: list[tuple[str, Identity]]) -> Identity:
    (_, found), *more = claims
    titles = " and ".join(title for title, _ in claims)
    sentence = (
        f"The {found.role} has the tensors of {titles}, but a file holds only one model: download "
        "it again."
    )
    return replace(found, errors=(*found.errors, sentence)) if more else found


# LoRA files of all kinds: their key style, their rank, and which family they are for.

# What `comfy.lora.load_lora` asks for behind a module's name; a test compares them.
SUFFIX = re.compile(
    r"(\.|_(?=lora\.))(?P<kind>lora_A|lora_B|lora_(down|up|mid)|lora(_linear_layer)?\.(down|up)"
    r"|lokr_w[12](_[ab])?|lokr_t2|hada_w[12]_[ab]|hada_t[12]|oft_blocks|rescale|[ab][12](?=\.weight$)"
    r"|dora_scale|lora_magnitude_vector|reshape_weight|set_weight|[wb]_norm|diff|diff_b|alpha)"
    r"(\..*)?$"
)
DOWN = ("lora_A", "lora_down", "lora.down", "lora_linear_layer.down")  # have the rank as their rows
RANK_AXIS = {**dict.fromkeys((*DOWN, "hada_w1_b"), 0), "lokr_w2_a": 1}
# Of a file with several kinds the first; others that SUFFIX knows make none.
ALGORITHMS = {
    "lokr": "LoKr",
    "hada": "LoHa",
    "lora": "LoRA",
    "oft": "LoRA (OFT)",
    "a1": "LoRA (GLoRA)",
    "diff": "LoRA (whole differences)",
    "w_norm": "LoRA (whole differences)",
    "set": "LoRA (whole weights)",
}
# What trainers put before a module's name, in any combination: who does.
PREFIXES = {
    "model.diffusion_model.": "checkpoint (model.diffusion_model.)",
    "diffusion_model.": "ComfyUI (diffusion_model.)",
    "base_model.model.": "PEFT (base_model.model.)",
    "transformer.": "diffusers (transformer.)",
    "lora_unet_": "kohya (lora_unet_)",
    "lycoris_": "LyCORIS (lycoris_)",
    "lora_transformer_": "OneTrainer (lora_transformer_)",
    "pipe.dit.": "DiffSynth (pipe.dit.)",
    "dit.": "DiffSynth (dit.)",
    "_orig_mod.": "torch.compile (_orig_mod.)",
    "transformer_blocks.": "bare (transformer_blocks.)",
}
BARE, CORES = "transformer_blocks.", "lora_unet_"  # what ComfyUI maps
_WRAPPERS = tuple(it for it in PREFIXES if it.endswith(".") and it != BARE)
# Names with "_" for ".", which only the list of the model's modules can undo: ComfyUI's list, which
# has them under `CORES`.
_FLAT = tuple(it for it in PREFIXES if it.endswith("_") and it != CORES)
# The second axes of LoKr's two factors multiply to a layer's input.
READS_INPUT = {*DOWN, "hada_w1_b"} | {
    f"lokr_w{factor}{part}" for factor in (1, 2) for part in ("", "_b")
}
FOREIGN_STACKS = ("single_transformer_blocks", "single_blocks", "double_blocks", "joint_blocks")


def lora(tensors: Tensors) -> Identity | None:
    """Recognizes any low-rank adapter; `blocks` counts the transformer blocks that it touches."""
    names = (name for name in tensors if not name.endswith(".bias"))  # of PEFT, which nobody reads
    found = {name: match for name in names if (match := SUFFIX.search(name))}
    modules = sorted({name[: match.start()] for name, match in found.items()})
    kinds = {match["kind"] for match in found.values()}
    algorithm = next(
        (
            label
            for start, label in ALGORITHMS.items()
            if any(kind.startswith(start) for kind in kinds)
        ),
        None,
    )
    if algorithm is None:
        return None
    foreign = any(stack in module for module in modules for stack in FOREIGN_STACKS)
    widths = _widths(tensors, found)

    @functools.cache
    def adapted(stack: str) -> Adapted:
        return _adapted(modules, widths, foreign, stack)

    fits, (targets, blocks, *_) = _fits(adapted, tensors)
    styles = sorted({PREFIXES.get(_prefix(module), "unknown") for module in modules})
    return Identity(
        family=f"{algorithm} for {fits.title}"
        if fits
        else f"not Qwen-Image: a {algorithm} for another model",
        role="lora",
        variant=f"{' and '.join(styles)} keys, {'with' if 'alpha' in kinds else 'without'} alpha",
        dims=known(
            **_ranks(tensors, found),
            modules=len(modules),
            targets=", ".join(sorted(targets)),
        ),
        blocks=len(blocks) or None,
        folder="loras",
        licence=fits and fits.licence,
        cannot_run=fits.cannot_run if fits else (),
    )


def _fits(adapted: Callable[[str], Adapted], tensors: Tensors) -> tuple[Fits | None, Adapted]:
    # Later families are asked first: they tell themselves from earlier ones.
    found: list[tuple[bool, int, Fits, Adapted]] = []
    for family in reversed(FAMILIES):
        changed = adapted(family.stack)
        if (fits := family.adapts(changed, tensors)) is not None:
            found.append((fits.title != family.title, len(found), fits, changed))
    return min(found)[2:] if found else (None, adapted(FAMILIES[0].stack))


def _widths(tensors: Tensors, found: dict[str, re.Match[str]]) -> dict[str, int]:
    # Of what each module reads.
    widths: dict[str, int] = {}
    for name, match in found.items():
        if match["kind"] in READS_INPUT:
            module = name[: match.start()]
            widths[module] = widths.get(module, 1) * (size(tensors, name, 1) or 0)
    return widths


def _adapted(
    modules: Sequence[str], widths: Mapping[str, int], foreign: bool, stack: str
) -> Adapted:
    # As a family sees it whose blocks are in this stack.
    block = re.compile(rf"(?:^|[._]){re.escape(stack)}[._](\d{{1,4}})[._](.+)$")
    targets = (target for family in FAMILIES for target in family.lora_targets)
    dotted = {it.replace(".", "_"): it for it in targets}
    by_target: dict[str, set[int]] = {}
    blocks: set[int] = set()
    for module in modules:
        match = block.search(module)
        name = match[2] if match else module.removeprefix(_prefix(module))
        target = by_target.setdefault(dotted.get(name, name), set())
        if module in widths:
            target.add(widths[module])
        if match:
            blocks.add(int(match[1]))
    return Adapted({*by_target}, blocks, by_target, foreign)


def _prefix(module: str) -> str:
    return next((prefix for prefix in PREFIXES if module.startswith(prefix)), "")


def _ranks(tensors: Tensors, found: dict[str, re.Match[str]]) -> dict[str, int | None]:
    ranks = set()
    for name, match in found.items():
        axis, shape = RANK_AXIS.get(match["kind"]), tensors[name].shape
        if axis is not None and len(shape) > axis:
            ranks.add(shape[axis])
    return {
        "rank": min(ranks, default=None),
        "largest_rank": max(ranks) if len(ranks) > 1 else None,
    }


# ComfyUI 0.33 maps, for Qwen-Image, bare names (`transformer_blocks.`), `transformer.`,
# `diffusion_model.`, `lora_unet_` and `lycoris_`, and takes `.lora_A.default.weight` only under
# `default`. PEFT, DiffSynth-Studio, OneTrainer and ai-toolkit also write names that it skips with a
# line in the log.

# PEFT writes the adapter's own name into the middle.
_ADAPTER = re.compile(r"\.lora_([AB])\.[^.]+\.weight$")


def normalize_name(name: str) -> str:
    """Returns the same tensor's name as ComfyUI maps it:
    base_model.model.transformer_blocks.0.attn.to_q.lora_A.default.weight becomes
    transformer_blocks.0.attn.to_q.lora_A.weight.
    """
    simpler = None
    while simpler != name:  # not by recursion, for a file may hold any name
        simpler, name = name, _ADAPTER.sub(r".lora_\1.weight", name)
        for prefix in _WRAPPERS:
            name = name.removeprefix(prefix)
        for prefix in _FLAT:
            if name.startswith(prefix):
                name = CORES + name.removeprefix(prefix)
    return name


# Other models that people put into a slot of ours, by tensors of which each is theirs alone; of two
# rows that a file fits, the first.
SIGNS: Mapping[str, tuple[str, ...]] = {
    "FLUX.2": tuple(f"double_stream_modulation_img.{it}.weight" for it in ("lin", "linear")),
    "Chroma": ("distilled_guidance_layer.norms.0.scale",),
    "HunyuanVideo": ("txt_in.individual_token_refiner.blocks.0.norm1.weight",),
    "FLUX": (
        "double_blocks.0.img_attn.qkv.weight",
        "single_transformer_blocks.0.norm.linear.weight",
    ),
    "a FLUX ControlNet": ("controlnet_x_embedder.weight",),
    "Wan": ("head.modulation", "condition_embedder.time_proj.weight"),
    "Z-Image": tuple(f"noise_refiner.0.attention.{it}.weight" for it in ("k_norm", "norm_k")),
    "Stable Diffusion 3": ("joint_blocks.0.context_block.attn.qkv.weight",),
    "SDXL": ("label_emb.0.0.weight", "add_embedding.linear_1.weight"),
    "Stable Diffusion": ("input_blocks.0.0.weight", "down_blocks.0.resnets.0.conv1.weight"),
    "the Wan 2.2 VAE": (
        "decoder.upsamples.0.upsamples.0.residual.2.weight",
        "decoder.up_blocks.0.upsampler.resample.1.weight",
    ),
    "a FLUX or Stable Diffusion VAE": tuple(
        f"decoder.{it}.norm1.weight" for it in ("mid.block_1", "mid_block.resnets.0")
    ),
    "a tiny VAE, for models/vae_approx": (
        *("decoder.22.bias", "decoder.3.conv.0.weight", "decoder.layers.2.conv.0.weight"),
    ),
    "a Qwen3.5 language model, as the prompt enhancers of Qwen-Image-2.1 are": (
        "model.language_model.layers.0.linear_attn.A_log",
    ),
    "a T5 text encoder": ("encoder.block.0.layer.0.SelfAttention.k.weight",),
    "a CLIP text encoder": ("text_model.encoder.layers.0.mlp.fc1.weight",),
    "a Qwen3 text encoder": ("model.layers.0.self_attn.q_norm.weight",),
    "a Llama or Mistral text encoder": ("model.layers.0.self_attn.q_proj.weight",),
}
NOT_RUN = "not Qwen-Image: "
UNKNOWN = f"{NOT_RUN}no known model has these tensors"
NAMED = 60  # letters of a tensor's name


def told(title: str) -> str:
    return title.removeprefix(NOT_RUN)


def is_unknown(title: str) -> bool:
    """Tells whether a title is that of tensors which no model here has."""
    return title.startswith(UNKNOWN)


def _other_model(tensors: Tensors) -> Identity:
    for name, signs in SIGNS.items():
        if not tensors.keys().isdisjoint(signs):
            return Identity(f"{NOT_RUN}looks like {name}", "other")
    if not tensors:
        return Identity(f"{NOT_RUN}it holds no tensors", "other")
    first, more = next(iter(tensors)), len(tensors) - 1
    name = first if len(first) <= NAMED else f"{first[:NAMED]}..."
    others = f" and {more} more" if more else ""
    return Identity(f"{UNKNOWN}, {name}{others}", "other")
