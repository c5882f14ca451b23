"""What the package is told of it."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qwen_l40s.families.parts import QWEN25_VL, QWEN_IMAGE_VAE
from qwen_l40s.families.protocol import (
    Adapted,
    Family,
    Fits,
    Identity,
    Member,
    StepTokens,
    Tensors,
    count_blocks,
    known,
    size,
)
from qwen_l40s.spec.transformer import SWIGLU, TIME_CHANNELS, BlockSpec, TransformerShape

TITLE = "Toy-Image"
QKV, OUT = "attention.qkv", "attention.out"
GATE_UP, DOWN = "feed_forward.gate_up", "feed_forward.down"


@functools.cache
def block(ratio: int) -> BlockSpec:
    return BlockSpec(
        gemms={QKV: (3, 1), OUT: (1, 1), GATE_UP: (2 * ratio, 1), DOWN: (1, ratio)},
        places=(*6 * (QKV,), *2 * (OUT,), *2 * (GATE_UP,), *2 * (DOWN,)),
        norms=("before_attention", "before_mlp"),
        head_norms=("attention.query_norm", "attention.key_norm"),
        told_by=QKV,
        activation=SWIGLU,
        biases=False,
        attention="attention",
        hidden=2 * ratio,
        inner=ratio,
    )


@dataclass(frozen=True)
class ToyShape(TransformerShape):
    patch = 2
    behind = ("unpatch",)
    ratio: int = 2

    @property
    def family(self) -> Family:
        return TOY

    @property
    def block(self) -> BlockSpec:
        return block(self.ratio)

    def outer_layers(self) -> dict[str, tuple[int, int]]:
        return {
            "patch": (self.dim, self.in_channels),
            "caption": (self.dim, self.joint_dim),
            "time.0": (self.dim, TIME_CHANNELS),
            "time.2": (self.dim, self.dim),
            "modulation": (6 * self.dim, self.dim),
            "unpatch": (self.packed_out_channels, self.dim),
        }

    def other_tensors(self) -> dict[str, tuple[int, ...]]:
        return {}


PUBLISHED = ToyShape(
    blocks=30,
    dim=2560,
    heads=20,
    head_dim=128,
    joint_dim=QWEN25_VL.hidden,
    in_channels=64,
    packed_out_channels=64,
)
NONE: Mapping[str, Any] = {}
PIPELINES = {"ToyPipeline": TITLE}
CONFIG = {"num_layers": "blocks", "width": "dim"}


class _Toy(Family):
    title = label = untimed = TITLE
    stack, blocks = "layers", (block(2),)
    text_encoder, vae = QWEN25_VL, QWEN_IMAGE_VAE
    lora_targets = tuple(block(2).gemms)
    pipelines, config, joined = PIPELINES, CONFIG, NONE
    sigmas = needs = ""
    schedules = ()
    repository = "Toy/Toy-Image"
    micro = None
    split_rows = norm_guided = False
    comfyui_class, comfyui_code = "ToyImage", "toy_family.model"
    comfyui, diffusers = "toy_family.comfyui:KIND", "toy_family.diffusers"

    @property
    def members(self) -> tuple[Member, ...]:
        return (MEMBER,)

    def identify(self, tensors: Tensors) -> Identity | None:
        head_dim = size(tensors, "layers.0.attention.query_norm.weight")
        if head_dim is None or f"layers.0.{QKV}.weight" not in tensors:
            return None
        dim = size(tensors, "patch.weight")
        rows = size(tensors, f"layers.0.{GATE_UP}.weight")
        return Identity(
            family=TITLE,
            role="transformer",
            dims=known(
                dim=dim,
                heads=dim // head_dim if dim else None,
                head_dim=head_dim,
                joint_dim=size(tensors, "caption.weight", 1),
                in_channels=size(tensors, "patch.weight", 1),
                packed_out_channels=size(tensors, "unpatch.weight"),
                ratio=rows // dim // 2 if rows and dim else None,
            ),
            blocks=count_blocks(tensors, "layers."),
            folder="diffusion_models",
        )

    def shape(
        self, sizes: Mapping[str, int], dims: Mapping[str, int | str], title: str
    ) -> ToyShape:
        return ToyShape(**sizes, ratio=dims["ratio"])

    def from_config(self, identity: Identity, config: Mapping[str, Any]) -> Identity:
        return identity

    def config_facts(self, tensors: Tensors) -> Mapping[str, object]:
        return {}

    def adapts(self, found: Adapted, tensors: Tensors) -> Fits | None:
        return Fits(TITLE) if found.targets & set(self.lora_targets) else None

    def step_tokens(self, words: int, painted: int, references: int) -> StepTokens:
        return StepTokens(0, words + painted + references)

    def member_of(
        self, shape: ToyShape, timestep_zero: bool, references: int
    ) -> tuple[Member, str]:
        return MEMBER, ""

    def contradiction(self, member: Member, shape: ToyShape, timestep_zero: bool) -> str:
        return "" if member == MEMBER else MEMBER.name


TOY = _Toy()
MEMBER = Member(
    family=TOY,
    name="toy-image",
    transformer=PUBLISHED,
    vae=QWEN_IMAGE_VAE.shape,
    told_as=TITLE,
    steps=8,
    cfg=1.0,
    alone=True,
)
