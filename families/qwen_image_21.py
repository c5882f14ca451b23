"""Qwen-Image-2.1 and its Turbo: text and image are one stream, and all blocks share one modulation.
Keys and values of text and references are kept from a prompt's first step. The gated MLP's first
weights are apart in diffusers, and [gate; up] in one in ComfyUI and its files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from ..caches import cached
from ..spec.transformer import SPLIT_SWIGLU, SWIGLU, TIME_CHANNELS, BlockSpec, TransformerShape
from .parts import QWEN3_VL, QWEN_IMAGE_21_VAE
from .protocol import (
    LICENCE_21,
    WHOLE_TENSORS,
    Adapted,
    Family,
    File,
    Fits,
    Identified,
    Identity,
    Member,
    StepTokens,
    Template,
    Tensors,
    count_blocks,
    known,
    size,
)
from .protocol import QWEN_IMAGE_21 as TITLE
from .qwen_image import ATTENTION, fun_controlnet, rope_axes
from .schedules import OF_QWEN_IMAGE_21

COMFYUI = "0.37"  # the first that has it
# A header does not tell the licence of what others train for it.
LICENCE_OF_OTHERS = f"of {TITLE}: research, not commercial use"
REFERENCE_WORDS = 6  # around a reference in its prompt: "<image1>" and the marks of vision
GATE_UP = "img_mlp.gate_up"
GATED = ("img_mlp.gate_layer", "img_mlp.proj")  # the halves of GATE_UP, in its order
MLP = (*GATED[::-1], GATE_UP, "img_mlp.out")


@cached
def single_stream(fused_mlp: bool, mlp_ratio: int = 3) -> BlockSpec:
    """Describes a block, as of `QwenImage21Shape`."""
    first = dict.fromkeys(GATED, (mlp_ratio, 1))
    if fused_mlp:
        first = {GATE_UP: (2 * mlp_ratio, 1)}
    gates = tuple(first) * (2 if fused_mlp else 1)
    attention = "attn.to_q", "attn.to_k", "attn.to_v"
    return BlockSpec(
        gemms={
            **{f"attn.{name}": (1, 1) for name in ATTENTION},
            **first,
            "img_mlp.out": (1, mlp_ratio),
        },
        places=(*2 * attention, *2 * ("attn.to_out.0",), *gates, *2 * ("img_mlp.out",)),
        norms=("img_norm1", "img_norm2"),
        head_norms=("attn.norm_q", "attn.norm_k"),
        told_by=next(iter(first)),
        activation=SWIGLU if fused_mlp else SPLIT_SWIGLU,
        biases=False,
        hidden=2 * mlp_ratio,
        inner=mlp_ratio,
    )


@dataclass(frozen=True)
class QwenImage21Shape(TransformerShape):
    """Holds the sizes of a Qwen-Image-2.1: diffusers' `QwenImage21Transformer2DModel`."""

    fused_mlp: bool = False  # whether gate and up are one weight, as in ComfyUI's own files
    mlp_ratio: int = 3  # width of the gated MLP in multiples of dim

    @property
    def family(self) -> Family:
        return QWEN_IMAGE_21

    @property
    def block(self) -> BlockSpec:
        return single_stream(self.fused_mlp, self.mlp_ratio)

    def in_comfyui(self) -> QwenImage21Shape:
        return replace(self, fused_mlp=True)

    def comfyui_config(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        return rope_axes(settings, self.head_dim)

    def outer_layers(self) -> dict[str, tuple[int, int]]:
        dim, time = self.dim, "time_text_embed.timestep_embedder"
        return {
            "img_in": (dim, self.in_channels),
            f"{time}.linear_1": (dim, TIME_CHANNELS),
            f"{time}.linear_2": (dim, dim),
            "proj_out": (self.packed_out_channels, dim),
            "txt_in.in_layer": (dim, self.joint_dim),
            "txt_in.out_layer": (dim, dim),
            "modulation.1": (4 * dim, dim),
            "norm_out.linear": (dim, dim),
        }

    def other_tensors(self) -> dict[str, tuple[int, ...]]:
        return {"txt_in.text_norm.weight": (self.joint_dim,)}


# 7.1 B parameters.
SHAPE = QwenImage21Shape(
    blocks=32,
    dim=4096,
    heads=32,
    head_dim=128,
    joint_dim=4096,
    in_channels=64,
    packed_out_channels=64,
    fused_mlp=True,
)

PIPELINES = {"QwenImage21Pipeline": TITLE}
CONFIG = {
    "attention_head_dim": "head_dim",
    "num_attention_heads": "heads",
    "context_in_dim": "joint_dim",
    "in_channels": "in_channels",
    "num_layers": "blocks",
}


class _QwenImage21(Family):
    title = label = untimed = TITLE
    stack, blocks = "transformer_blocks", (single_stream(True), single_stream(False))
    text_encoder, vae = QWEN3_VL, QWEN_IMAGE_21_VAE
    lora_targets = (*(f"attn.{name}" for name in ATTENTION), *MLP)
    pipelines, config = PIPELINES, CONFIG
    sigmas = "sample_sigmas"
    schedules = OF_QWEN_IMAGE_21
    repository = "Comfy-Org/Qwen-Image-2.1"
    micro = "micro_21", "2.1"
    split_rows = norm_guided = False
    needs = COMFYUI
    joined = MappingProxyType({GATE_UP: GATED})
    comfyui_class, comfyui_code = "QwenImage21", "comfy.ldm.qwen_image21.model"
    comfyui, diffusers = ".hosts.comfyui.kinds:KIND_21", ".hosts.diffusers.qwen_image_21"

    @property
    def members(self) -> tuple[Member, ...]:
        return (MEMBER,)

    def identify(self, tensors: Tensors) -> Identity | None:
        return controlnet(tensors) or transformer(tensors)

    def shape(
        self, sizes: Mapping[str, int], dims: Mapping[str, int | str], title: str
    ) -> QwenImage21Shape:
        ratio = dims.get("mlp_ratio")
        return QwenImage21Shape(
            **sizes,
            fused_mlp=dims.get("mlp") == GATE_UP,
            mlp_ratio=ratio if isinstance(ratio, int) else SHAPE.mlp_ratio,
        )

    def from_config(self, identity: Identified, config: Mapping[str, Any]) -> Identified:
        return identity

    def config_facts(self, tensors: Tensors) -> Mapping[str, object]:
        return {}

    def adapts(self, found: Adapted, tensors: Tensors) -> Fits | None:
        if found.foreign or any(name.startswith(OTHER_TARGETS) for name in found.targets):
            return None
        joint = any(name.startswith("attn.add_") for name in found.targets)
        # Attention alone tells it by its width and by a block beyond those of FLUX.2 klein 9B.
        deep = max(found.blocks, default=0) >= LARGEST_OF_THAT_WIDTH
        widths = set().union(*(found.widths.get(f"attn.{name}", ()) for name in ATTENTION))
        if not (found.targets & set(MLP) or (widths == {SHAPE.dim} and deep and not joint)):
            return None
        whole = (WHOLE_TENSORS,) if "proj_out.weight" in tensors else ()
        return Fits(TITLE, LICENCE_OF_OTHERS, whole)

    def step_tokens(self, words: int, painted: int, references: int) -> StepTokens:
        return StepTokens(0, painted, words + references)

    def member_of(
        self, shape: QwenImage21Shape, timestep_zero: bool, references: int
    ) -> tuple[Member, str]:
        return MEMBER, ""

    def contradiction(self, member: Member, shape: QwenImage21Shape, timestep_zero: bool) -> str:
        return "" if member == MEMBER else MEMBER.name


QWEN_IMAGE_21 = _QwenImage21()
VIGGLE = "Qwen-Image-2.1-viggle-turbo-v0.3-6step-lora-r128"
MEMBER = Member(
    family=QWEN_IMAGE_21,
    name="qwen-image-2.1",
    told_as=TITLE,
    transformer=SHAPE,
    vae=QWEN_IMAGE_21_VAE.shape,
    steps=40,
    cfg=1.0,
    most_references=10,
    vision_tokens=1024,
    reference_words=REFERENCE_WORDS,
    alone=True,
    licence=LICENCE_21,
    side=2048,
    size_step=32,
    template_side=1024,
    templates={
        0: Template("qwen_image_21"),
        6: Template("qwen_image_21_viggle_6", File(VIGGLE, 0.6)),
        8: Template("start_here_12gb", transformer=File("qwen_image_2.1_turbo_int8_convrot", 6.76)),
    },
    files={
        "bf16": File("qwen_image_2.1_bf16", 13.26),
        "int8": File("qwen_image_2.1_int8_convrot", 6.76),
    },
    vae_file=File("qwen_image_2.1_vae_bf16", 0.63),
)

OTHER_TARGETS = ("img_mlp.net", "img_mod", "txt_mlp", "txt_mod")  # of Qwen-Image 1.x
LARGEST_OF_THAT_WIDTH = 8


def transformer(tensors: Tensors) -> Identity | None:
    """Recognizes the transformer by its text projection and gated MLP."""
    if "txt_in.text_norm.weight" not in tensors or not any(".img_mlp." in it for it in tensors):
        return None
    dim = size(tensors, "img_in.weight")
    head_dim = size(tensors, "transformer_blocks.0.attn.norm_q.weight")
    blocks = count_blocks(tensors, "transformer_blocks.")
    forms = [form for form in (GATE_UP, GATED[0]) if any(f".{form}." in name for name in tensors)]
    mlp = forms[0] if forms else None
    rows = size(tensors, f"transformer_blocks.0.{mlp}.weight")
    return Identity(
        family=TITLE,
        role="transformer",
        variant="2.1-Turbo has the same tensors: the header cannot tell which",
        dims=known(
            dim=dim,
            heads=dim // head_dim if dim and head_dim else None,
            head_dim=head_dim,
            joint_dim=size(tensors, "txt_in.text_norm.weight"),
            in_channels=size(tensors, "img_in.weight", 1),
            packed_out_channels=size(tensors, "proj_out.weight"),
            mlp=mlp,
            mlp_ratio=rows // dim // (2 if mlp == GATE_UP else 1) if rows and dim else None,
        ),
        blocks=blocks,
        folder="diffusion_models",
        licence=LICENCE_21 if (dim, blocks) == (SHAPE.dim, SHAPE.blocks) else None,
        errors=(
            f"It holds {' and '.join(forms)}, which are the same weights in two forms, but a file "
            "has only one of them: download it again.",
        )
        if len(forms) > 1
        else (),
    )


def controlnet(tensors: Tensors) -> Identity | None:
    """Recognizes a ControlNet of the Fun layout, which this package does not run."""
    fun = fun_controlnet(tensors)
    if fun is None or not any(f"control_blocks.0.{name}.weight" in tensors for name in MLP):
        return None
    return replace(
        fun,
        family=f"ControlNet for {TITLE}",
        folder="model_patches",
        licence=LICENCE_OF_OTHERS,
        cannot_run=(
            f"This package does not run ControlNets of {TITLE}: use ComfyUI's Load Model "
            f"Patch (ComfyUI {COMFYUI} or newer).",
        ),
    )
