"""Describes Qwen-Image, 2512, Edit and Layered: a stream of text and one of the image, each
modulated by its own layers. Sizes come from norms, biases and first dimensions, because 4-bit
formats flatten the weight.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from ..errors import CheckpointError
from ..spec.transformer import GELU, TIME_CHANNELS, BlockSpec, TransformerShape
from ..spec.vae import VaeShape
from .parts import QWEN25_VL, QWEN_IMAGE_VAE
from .protocol import (
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
from .schedules import OF_QWEN_IMAGE

TITLE, LAYERED_TITLE = "Qwen-Image", "Qwen-Image-Layered"
EDIT_2511_TITLE, MARKER_2511 = "Qwen-Image-Edit-2511", "__index_timestep_zero__"
SAME_TENSORS = (
    "Qwen-Image, 2512, Edit and Edit-2509 have the same tensors: the header cannot tell which"
)
SECOND_TIME_EMBEDDING = "time_text_embed.addition_t_embedding.weight"

# The layers in the order in which they run, those of the image first: their products run long
# enough for the CPU to get ahead of the card.
PLACES = (
    *("attn.to_q", "attn.to_k", "attn.to_v", "attn.add_q_proj", "attn.add_k_proj"),
    *("attn.add_v_proj", "attn.to_out.0", "attn.to_add_out"),
    *("img_mlp.net.0.proj", "txt_mlp.net.0.proj", "img_mlp.net.2", "txt_mlp.net.2"),
)
ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")
ADDED_ATTENTION = ("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
DOUBLE_STREAM = BlockSpec(
    gemms={
        **{f"attn.{name}": (1, 1) for name in (*ATTENTION, *ADDED_ATTENTION)},
        **{f"{stream}_mlp.net.0.proj": (4, 1) for stream in ("img", "txt")},
        **{f"{stream}_mlp.net.2": (1, 4) for stream in ("img", "txt")},
    },
    places=PLACES,
    norms=("img_norm1", "img_norm2", "txt_norm1", "txt_norm2"),
    head_norms=("attn.norm_q", "attn.norm_k", "attn.norm_added_q", "attn.norm_added_k"),
    told_by="attn.add_q_proj",
    activation=GELU,
    gelus=("img_mlp.net.0", "txt_mlp.net.0"),
    biases=True,
    text_layers=("attn.add_", "attn.to_add_out", "txt_mlp."),
    modulation={"image": "img_mod", "text": "txt_mod"},
    modulation_rows=6,
)
BLOCK_GEMMS = DOUBLE_STREAM.gemms


@dataclass(frozen=True)
class QwenImageShape(TransformerShape):
    """Holds the sizes of a Qwen-Image transformer: diffusers' `QwenImageTransformer2DModel`."""

    patch = 2
    addition_t_cond: bool = False  # the second time embedding of Qwen-Image-Layered

    @property
    def family(self) -> Family:
        return QWEN_IMAGE

    @property
    def block(self) -> BlockSpec:
        return DOUBLE_STREAM

    def comfyui_config(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        return rope_axes(settings, self.head_dim) | {
            "num_attention_heads": self.heads,
            "attention_head_dim": self.head_dim,
            "joint_attention_dim": self.joint_dim,
            "out_channels": self.packed_out_channels // 4,
        }

    def outer_layers(self) -> dict[str, tuple[int, int]]:
        dim, time = self.dim, "time_text_embed.timestep_embedder"
        return {
            "img_in": (dim, self.in_channels),
            "txt_in": (dim, self.joint_dim),
            f"{time}.linear_1": (dim, TIME_CHANNELS),
            f"{time}.linear_2": (dim, dim),
            "norm_out.linear": (2 * dim, dim),
            "proj_out": (self.packed_out_channels, dim),
        }

    def other_tensors(self) -> dict[str, tuple[int, ...]]:
        found: dict[str, tuple[int, ...]] = {"txt_norm.weight": (self.joint_dim,)}
        if self.addition_t_cond:
            found[SECOND_TIME_EMBEDDING] = (2, self.dim)
        return found


def rope_axes(settings: Mapping[str, Any], head_dim: int) -> dict[str, tuple[int, ...]]:
    """Says how a head is split over its axes; raises CheckpointError where nothing says it."""
    axes = settings.get("axes_dims_rope")
    if axes is None and head_dim == 128:
        return {}  # the published models: ComfyUI's default
    if not isinstance(axes, list) or len(axes) != 3 or sum(axes) != head_dim:
        raise CheckpointError(
            f"axes_dims_rope is {axes} in config.json, but must be three numbers that add up to "
            f"{head_dim}: put the model's config.json next to its weights."
        )
    return {"axes_dims_rope": tuple(axes)}


# The published models: Qwen-Image, 2512, Edit, 2509 and 2511.
FULL_SIZE = QwenImageShape(
    blocks=60,
    dim=3072,
    heads=24,
    head_dim=128,
    joint_dim=3584,
    in_channels=64,
    packed_out_channels=64,
)
# 1 in 24 of its width: what the benchmarks run on a CPU to show that they work.
SMALL = QwenImageShape(
    blocks=60, dim=128, heads=4, head_dim=32, joint_dim=64, in_channels=64, packed_out_channels=64
)
LAYERED_SHAPE = replace(FULL_SIZE, addition_t_cond=True)

PIPELINES = {
    "QwenImagePipeline": "Qwen-Image or 2512",
    "QwenImageEditPipeline": "Qwen-Image-Edit",
    "QwenImageEditPlusPipeline": "Qwen-Image-Edit-2509",
    "QwenImageLayeredPipeline": LAYERED_TITLE,
}
CONFIG = {
    "attention_head_dim": "head_dim",
    "num_attention_heads": "heads",
    "joint_attention_dim": "joint_dim",
    "in_channels": "in_channels",
    "num_layers": "blocks",
}


class _QwenImage(Family):
    title, label = TITLE, "Qwen-Image 1.x"
    stack, blocks = "transformer_blocks", (DOUBLE_STREAM,)
    text_encoder, vae = QWEN25_VL, QWEN_IMAGE_VAE
    lora_targets = (*DOUBLE_STREAM.gemms, *(f"{it}.1" for it in DOUBLE_STREAM.modulation.values()))
    pipelines, config = PIPELINES, CONFIG
    sigmas = ""
    schedules = OF_QWEN_IMAGE
    repository = "Comfy-Org/Qwen-Image_ComfyUI"
    micro = "micro", "1.x"
    split_rows = norm_guided = True
    untimed = needs = ""
    joined = MappingProxyType({})
    comfyui_class, comfyui_code = "QwenImage", "comfy.ldm.qwen_image.model"
    comfyui, diffusers = ".hosts.comfyui.kinds:KIND", ".hosts.diffusers.qwen_image"

    @property
    def members(self) -> tuple[Member, ...]:
        return MEMBERS

    def identify(self, tensors: Tensors) -> Identity | None:
        return controlnet(tensors) or model_patch(tensors) or transformer(tensors)

    def shape(
        self, sizes: Mapping[str, int], dims: Mapping[str, int | str], title: str
    ) -> QwenImageShape:
        return QwenImageShape(**sizes, addition_t_cond=title == LAYERED_TITLE)

    def from_config(self, identity: Identified, config: Mapping[str, Any]) -> Identified:
        # Edit-2511 differs from Edit-2509 by one setting, which diffusers keeps in config.json and
        # ComfyUI in a marker.
        if identity.family == TITLE and config.get("zero_cond_t") is True:
            return replace(identity, family=EDIT_2511_TITLE, variant=None)
        return identity

    def config_facts(self, tensors: Tensors) -> Mapping[str, object]:
        return {"use_additional_t_cond": SECOND_TIME_EMBEDDING in tensors}

    def adapts(self, found: Adapted, tensors: Tensors) -> Fits | None:
        # FLUX and SD 3 have the same names for joint attention: only names that nobody else has, or
        # a block beyond everybody else's stack, prove Qwen-Image.
        if not found.blocks or found.foreign:
            return None
        own = any(name.startswith(OWN_TARGETS) for name in found.targets)
        if own or max(found.blocks) >= LARGEST_OTHER_STACK:
            return Fits(TITLE)
        shared = found.targets <= set(self.lora_targets)
        others = f"{TITLE}, FLUX or SD 3 (they share the names it changes)"
        return Fits(others) if shared else None

    def step_tokens(self, words: int, painted: int, references: int) -> StepTokens:
        return StepTokens(words, painted + references)

    def member_of(
        self, shape: QwenImageShape, timestep_zero: bool, references: int
    ) -> tuple[Member, str]:
        if shape.addition_t_cond:
            return LAYERED, ""
        if timestep_zero:
            return EDIT_2511, ""
        if not references:
            return TEXT_TO_IMAGE, ""
        return EDIT_2509, (
            f"With reference images, the MODEL counts as {EDIT_2509.name}, because Edit has the "
            "same weights. Edit's reference images add more text tokens."
        )

    def contradiction(self, member: Member, shape: QwenImageShape, timestep_zero: bool) -> str:
        """As of `Family`; a node can make an Edit-2511 without its marker modulate so."""
        if member not in MEMBERS:
            return f"not one of {member.told_as.removeprefix('Qwen-Image-')}"
        if shape.addition_t_cond != (member.layers > 0):
            return LAYERED.name if shape.addition_t_cond else "one without layers"
        return EDIT_2511.name if timestep_zero and not member.timestep_zero else ""


QWEN_IMAGE = _QwenImage()
LIGHTNING = "Qwen-Image-{}-Lightning-{}steps-V1.0-bf16"
_PUBLISHED: dict[str, Any] = {
    "family": QWEN_IMAGE,
    "transformer": FULL_SIZE,
    "vae": QWEN_IMAGE_VAE.shape,
    "vae_file": File("qwen_image_vae", 0.24),
}
TEXT_TO_IMAGE = Member(
    name="qwen-image",
    templates={
        0: Template("text_to_image"),
        4: Template("start_here_24gb", File(LIGHTNING.format("2512", 4), 0.79)),
        8: Template("start_here_48gb", File(LIGHTNING.format("2512", 8), 0.79)),
        "bf16": Template("text_to_image_most_accurate"),
    },
    files={
        "bf16": File("qwen_image_2512_bf16", 38.06),
        "fp8": File("qwen_image_2512_fp8_e4m3fn", 19.03),
    },
    **_PUBLISHED,
)
EDIT = Member(
    name="qwen-image-edit",
    told_as="Qwen-Image-Edit",
    most_references=1,
    vision_tokens=1369,
    reference_words=1369,
    **_PUBLISHED,
)
EDIT_2509 = replace(
    EDIT,
    name="qwen-image-edit-2509",
    told_as="Qwen-Image-Edit-2509",
    steps=40,
    most_references=3,
    vision_tokens=196,
    reference_words=196,
)
EDIT_2511 = replace(
    EDIT_2509,
    name="qwen-image-edit-2511",
    told_as=EDIT_2511_TITLE,
    marker=MARKER_2511,
    timestep_zero=True,
    alone=True,
    templates={
        0: Template("edit_2511"),
        4: Template("edit_2511_lightning", File(LIGHTNING.format("Edit-2511", 4), 0.79)),
    },
    files={
        "bf16": File("qwen_image_edit_2511_bf16", 38.06),
        "int8": File("qwen_image_edit_2511_int8_convrot", 19.09),
    },
)
LAYERED = Member(
    family=QWEN_IMAGE,
    name="qwen-image-layered",
    told_as=LAYERED_TITLE,
    most_references=1,
    layers=4,
    alone=True,
    side=640,
    transformer=LAYERED_SHAPE,
    vae=VaeShape(image_channels=4),
    templates={0: Template("layered")},
    files={"bf16": File("qwen_image_layered_bf16", 38.06)},
    vae_file=File("qwen_image_layered_vae", 0.24),
)
MEMBERS = (
    TEXT_TO_IMAGE,
    replace(TEXT_TO_IMAGE, name="qwen-image-2512"),
    *(EDIT, EDIT_2509, EDIT_2511, LAYERED),
)

OWN_TARGETS = ("img_mlp", "img_mod", "txt_mlp", "txt_mod")
LARGEST_OTHER_STACK = 38  # joint blocks of SD 3.5 Large; FLUX has 19


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
    if SECOND_TIME_EMBEDDING in tensors:
        family, variant = LAYERED_TITLE, None
    elif MARKER_2511 in tensors:
        family, variant = EDIT_2511_TITLE, None
    else:
        family, variant = TITLE, SAME_TENSORS
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
    """Recognizes ControlNets of InstantX's layout and of the Fun layout."""
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
    fun = fun_controlnet(tensors)
    if fun is None or any(re.match(OTHER_MLP, name) for name in tensors):
        return None
    return replace(fun, family=f"ControlNet for {TITLE}", folder="controlnet")


OTHER_MLP = r"control_blocks\.0\.img_mlp\.(?!net\.)"  # of a later family


def fun_controlnet(tensors: Tensors) -> Identity | None:
    """Recognizes a ControlNet of the Fun layout, of whichever family."""
    if not {"control_img_in.weight", "control_blocks.0.after_proj.weight"} <= tensors.keys():
        return None
    return Identity(
        family="ControlNet",
        role="controlnet",
        variant="Fun layout",
        dims=known(
            dim=size(tensors, "control_img_in.weight"),
            control_channels=size(tensors, "control_img_in.weight", 1),
        ),
        blocks=count_blocks(tensors, "control_blocks."),
    )


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
