"""Says what a set of tensors is: here the transformers of the Qwen-Image family and what is trained
for them, in `parts` the rest.

The names are those of diffusers' `QwenImageTransformer2DModel`, which ComfyUI keeps. Sizes come
from first dimensions and from norms and biases, because 4-bit formats pack the second dimension and
flatten the weight.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from ..spec.transformer import COMFYUI_21, FAMILY_21
from .header import TensorInfo
from .parts import (
    LICENCE_21_OF_OTHERS,
    MLP_21,
    Identity,
    Tensors,
    count_blocks,
    known,
    other_model,
    qwen3_vl,
    qwen_image_21,
    qwen_image_21_vae,
    size,
    text_encoder,
    tiny_vae,
    vae,
    vision_tower,
)

SAME_TENSORS = (
    "Qwen-Image, 2512, Edit and Edit-2509 have the same tensors: the header cannot tell which"
)


def transformer(tensors: Tensors) -> Identity | None:
    """Tells Qwen-Image, Edit-2511 by its marker, and Layered by its second time embedding."""
    if (
        "txt_norm.weight" not in tensors
        or "transformer_blocks.0.attn.norm_added_q.weight" not in tensors
    ):
        return None
    if any(".img_mlp.w1." in name for name in tensors):  # Lens keeps the names and has a gated MLP
        return None
    if size(tensors, "txt_norm.weight") == 2560 and size(tensors, "proj_out.weight") == 128:
        return Identity("not Qwen-Image: looks like Mage-Flow", "other")  # same names, other sizes
    if "time_text_embed.addition_t_embedding.weight" in tensors:
        family, variant = "Qwen-Image-Layered", None
    elif "__index_timestep_zero__" in tensors:
        family, variant = "Qwen-Image-Edit-2511", None
    else:
        family, variant = "Qwen-Image", SAME_TENSORS
    return Identity(
        family=family,
        role="transformer",
        variant=variant,
        dims=transformer_dims(tensors),
        blocks=count_blocks(tensors, "transformer_blocks."),
        folder="diffusion_models",
    )


def transformer_dims(tensors: Tensors) -> dict[str, int | str]:
    """Returns dim, heads, head_dim, joint_dim, in_channels and packed_out_channels as far as the
    tensors tell them. Packed: a 2 x 2 patch of every latent channel.
    """
    dim = size(tensors, "img_in.bias") or size(tensors, "img_in.weight")
    head_dim = size(tensors, "transformer_blocks.0.attn.norm_q.weight")
    packed = size(tensors, "img_in.weight") != dim  # bitsandbytes stores a flat column
    return known(
        dim=dim,
        heads=dim // head_dim if dim and head_dim else None,
        head_dim=head_dim,
        joint_dim=size(tensors, "txt_norm.weight"),
        in_channels=None if packed else size(tensors, "img_in.weight", 1),
        packed_out_channels=size(tensors, "proj_out.bias") or size(tensors, "proj_out.weight"),
    )


def controlnet(tensors: Tensors) -> Identity | None:
    """Recognizes ControlNets of InstantX's layout (diffusers' `QwenImageControlNetModel`) and of
    the Fun layout.
    """
    if "controlnet_x_embedder.weight" in tensors and "txt_norm.weight" in tensors:
        dims = transformer_dims(tensors)
        control = size(tensors, "controlnet_x_embedder.weight", 1)
        return Identity(
            family="ControlNet for Qwen-Image",
            role="controlnet",
            variant="InstantX layout",
            dims={**dims, **known(control_channels=control)},
            blocks=count_blocks(tensors, "transformer_blocks."),
            folder="controlnet",
        )
    if "control_img_in.weight" in tensors and "control_blocks.0.after_proj.weight" in tensors:
        fun = Identity(
            family="ControlNet for Qwen-Image",
            role="controlnet",
            variant="Fun layout",
            dims=known(
                dim=size(tensors, "control_img_in.weight"),
                control_channels=size(tensors, "control_img_in.weight", 1),
            ),
            blocks=count_blocks(tensors, "control_blocks."),
            folder="controlnet",
        )
        if not any(f"control_blocks.0.{name}.weight" in tensors for name in MLP_21):
            return fun
        return replace(
            fun,
            family=f"ControlNet for {FAMILY_21}",
            folder="model_patches",
            licence=LICENCE_21_OF_OTHERS,
            cannot_run=(
                f"This package does not run ControlNets of {FAMILY_21}: use ComfyUI's Load Model "
                f"Patch (ComfyUI {COMFYUI_21} or newer).",
            ),
        )
    return None


def model_patch(tensors: Tensors) -> Identity | None:
    """Recognizes DiffSynth's block-wise control, which ComfyUI loads as a model patch."""
    if "controlnet_blocks.0.y_rms.weight" not in tensors:
        return None
    return Identity(
        family="DiffSynth control patch for Qwen-Image",
        role="model_patch",
        dims=known(
            dim=size(tensors, "img_in.weight"), in_channels=size(tensors, "img_in.weight", 1)
        ),
        blocks=count_blocks(tensors, "controlnet_blocks."),
        folder="model_patches",
    )


# LoRA, LoHa and LoKr files: their key style, their rank, and whether they are for Qwen-Image.
#
# A LoRA names the modules it changes. Only names that nobody else has (`img_mlp`, `txt_mlp`,
# `img_mod`, `txt_mod`) or a block number beyond everybody else's stack prove Qwen-Image: FLUX and
# SD 3 use the same names for joint attention.

SUFFIX = re.compile(
    r"\.(?P<kind>lora_A|lora_B|lora_down|lora_up|lora\.down|lora\.up|lokr_w[12](_[ab])?|lokr_t2"
    r"|hada_w[12]_[ab]|hada_t[12]|dora_scale|lora_magnitude_vector|diff|diff_b|alpha)(\..*)?$"
)
RANK_AXIS = {"lora_A": 0, "lora_down": 0, "lora.down": 0, "hada_w1_b": 0, "lokr_w2_a": 1}
ALGORITHMS = {"lokr": "LoKr", "hada": "LoHa", "lora": "LoRA"}
PREFIXES = {
    "model.diffusion_model.": "checkpoint (model.diffusion_model.)",
    "diffusion_model.": "ComfyUI (diffusion_model.)",
    "base_model.model.": "PEFT (base_model.model.)",
    "transformer.": "diffusers (transformer.)",
    "lora_unet_": "kohya (lora_unet_)",
    "lycoris_": "LyCORIS (lycoris_)",
    "lora_transformer_": "OneTrainer (lora_transformer_)",
    "pipe.dit.": "DiffSynth (pipe.dit.)",
    "transformer_blocks.": "bare (transformer_blocks.)",
}
# Module names inside a block of Qwen-Image, in the dotted form; kohya and LyCORIS write "_" for
# ".".
TARGETS = (
    *(f"attn.{name}" for name in ("to_q", "to_k", "to_v", "to_out.0")),
    *(f"attn.{name}" for name in ("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")),
    *(
        f"{stream}_{module}"
        for stream in ("img", "txt")
        for module in ("mlp.net.0.proj", "mlp.net.2", "mod.1")
    ),
)
DOTTED = {name.replace(".", "_"): name for name in (*TARGETS, *MLP_21)}
BLOCK = re.compile(r"(?:^|[._])transformer_blocks[._](\d{1,4})[._](.+)$")
OWN_TARGETS = ("img_mlp", "img_mod", "txt_mlp", "txt_mod")
FOREIGN_STACKS = ("single_transformer_blocks", "single_blocks", "double_blocks", "joint_blocks")
LARGEST_OTHER_STACK = 38  # joint blocks of SD 3.5 Large; FLUX has 19
# Attention alone tells Qwen-Image-2.1 by its width and by a block beyond those of FLUX.2 klein 9B.
WIDTH_21, LARGEST_OF_THAT_WIDTH = 4096, 8
# The second axes of LoKr's two factors multiply to a layer's input.
READS_INPUT = {"lora_A", "lora_down", "lora.down", "hada_w1_b"} | {
    f"lokr_w{factor}{part}" for factor in (1, 2) for part in ("", "_b")
}
# Of Fun-Acc, for one.
WHOLE_TENSORS = (
    "This LoRA holds whole tensors such as proj_out.weight, which this package and ComfyUI's Load "
    "LoRA leave out: load the file with the nodes of its publisher."
)
ATTENTION_OF_21 = {"attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0"}


def lora(tensors: Tensors) -> Identity | None:
    """Recognizes any low-rank adapter; `blocks` counts the transformer blocks that it touches."""
    found = {name: match for name in tensors if (match := SUFFIX.search(name))}
    if not found or not any(
        match["kind"].startswith(("lora", "lokr", "hada")) for match in found.values()
    ):
        return None
    modules = sorted({name[: match.start()] for name, match in found.items()})
    blocks = {int(match[1]) for module in modules if (match := BLOCK.search(module))}
    targets = {_target(module) for module in modules}
    kinds = {match["kind"] for match in found.values()}
    algorithm = next(
        label
        for start, label in ALGORITHMS.items()
        if any(kind.startswith(start) for kind in kinds)
    )
    foreign = any(stack in module for module in modules for stack in FOREIGN_STACKS)
    of_21 = not foreign and _is_21(targets, blocks, _attention_widths(tensors, found))
    styles = sorted({PREFIXES.get(_prefix(module), "unknown") for module in modules})
    return Identity(
        family=f"{algorithm} for {FAMILY_21}"
        if of_21
        else _family(foreign, targets, blocks, algorithm),
        role="lora",
        variant=f"{' and '.join(styles)} keys, {'with' if 'alpha' in kinds else 'without'} alpha",
        dims=known(
            **_ranks(tensors, found),
            modules=len(modules),
            targets=", ".join(sorted(targets)),
        ),
        blocks=len(blocks) or None,
        folder="loras",
        licence=LICENCE_21_OF_OTHERS if of_21 else None,
        cannot_run=(WHOLE_TENSORS,) if of_21 and "proj_out.weight" in tensors else (),
    )


def _attention_widths(tensors: Tensors, found: dict[str, re.Match[str]]) -> set[int]:
    widths: dict[str, int] = {}
    for name, match in found.items():
        module = name[: match.start()]
        if match["kind"] in READS_INPUT and _target(module) in ATTENTION_OF_21:
            widths[module] = widths.get(module, 1) * (size(tensors, name, 1) or 0)
    return set(widths.values())


def _is_21(targets: set[str], blocks: set[int], widths: set[int]) -> bool:
    if any(name.startswith(OWN_TARGETS) for name in targets & set(TARGETS)):
        return False
    if targets & set(MLP_21):
        return True
    joint = any(name.startswith("attn.add_") for name in targets)
    deep = max(blocks, default=0) >= LARGEST_OF_THAT_WIDTH
    return widths == {WIDTH_21} and deep and not joint


def _target(module: str) -> str:
    match = BLOCK.search(module)
    name = match[2] if match else module.removeprefix(_prefix(module))
    return DOTTED.get(name, name)


def _prefix(module: str) -> str:
    return next((prefix for prefix in PREFIXES if module.startswith(prefix)), "")


def _family(foreign: bool, targets: set[str], blocks: set[int], algorithm: str) -> str:
    if blocks and not foreign:
        if max(blocks) >= LARGEST_OTHER_STACK or any(
            name.startswith(OWN_TARGETS) for name in targets
        ):
            return f"{algorithm} for Qwen-Image"
        if targets <= set(TARGETS):
            return f"{algorithm} for Qwen-Image, FLUX or SD 3 (they share the names it changes)"
    return f"not Qwen-Image: a {algorithm} for another model"


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


# The first answer wins. A ControlNet holds a whole transformer's names, and so stands before it;
# Qwen3-VL before the vision tower that it contains.
DETECTORS: tuple[Callable[[Tensors], Identity | None], ...] = (
    lora,
    controlnet,
    model_patch,
    transformer,
    qwen_image_21,
    text_encoder,
    qwen3_vl,
    vision_tower,
    qwen_image_21_vae,
    vae,
    tiny_vae,
)

# Prefixes of the parts of a full checkpoint, and the name of the part. A file may also hold one
# part under its prefix.
PARTS = (
    (re.compile(r"(model\.)?diffusion_model\."), "diffusion model"),
    (re.compile(r"transformer\.(?!resblocks\.)"), "diffusion model"),
    (re.compile(r"(vae|first_stage_model)\."), "vae"),
    (re.compile(r"text_encoders?\.([^.]+\.transformer\.)?"), "text encoder"),
    (re.compile(r"(cond_stage_model|conditioner)\."), "text encoder"),
)
HINTS = ("2512", "2511", "2509", "layered", "edit", "turbo")


@dataclass(frozen=True)
class Slice:
    """Holds one part of a file, where a tensor's name is `prefix` and its name in `tensors`."""

    name: str
    prefix: str
    tensors: Tensors


def identify(tensors: Tensors) -> Identity:
    """Returns what the tensors of one part are; an answer always comes, if only that it is not
    Qwen-Image.
    """
    for detector in DETECTORS:
        if (identity := detector(tensors)) is not None:
            return identity
    return other_model(tensors)


def split_parts(tensors: Tensors) -> list[Slice]:
    """Separates a full checkpoint into its parts.

    An adapter is one part: its prefixes tell the key style. Tensors without a known prefix form the
    part "weights".
    """
    if lora(tensors) is not None:
        return [Slice("weights", "", tensors)]
    parts: dict[tuple[str, str], dict[str, TensorInfo]] = {}
    for name, info in tensors.items():
        part, prefix = _part_of(name)
        parts.setdefault((part, prefix), {})[name.removeprefix(prefix)] = info
    return [Slice(*key, own) for key, own in parts.items()] or [Slice("weights", "", {})]


def _part_of(name: str) -> tuple[str, str]:
    for pattern, part in PARTS:
        if match := pattern.match(name):
            return part, match[0]
    return "weights", ""


def file_name_hint(stem: str) -> str | None:
    """Returns what a file's name says about the variant, worded so that it is not taken for
    evidence.
    """
    words = [word for word in HINTS if word in stem.lower()]
    return (
        f"the file name says {' '.join(words)}, which nothing in the file confirms"
        if words
        else None
    )
