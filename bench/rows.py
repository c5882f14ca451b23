"""Lists the rows of `qwen-l40s bench`: what each one runs, and at which sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import filter as matching
from typing import TYPE_CHECKING, Any

from ..errors import SettingError
from ..spec.transformer import (
    PIXELS_PER_TOKEN_SIDE,
    REFERENCE_SIDE,
    REFERENCE_TOKENS,
    TransformerShape,
)

if TYPE_CHECKING:
    import torch

COMFYUI, DIFFUSERS = "ComfyUI", "diffusers"


@dataclass(frozen=True)
class Row:
    """Describes a program in one precision, the first words of its name."""

    name: str
    attention: str = "auto"  # of "ours", as the node Optimize takes it

    @property
    def host(self) -> str:
        return DIFFUSERS if DIFFUSERS in self.name else COMFYUI

    @property
    def ours(self) -> bool:
        return self.name.startswith("ours")

    @property
    def from_int8(self) -> bool:
        """Whether a server loads the file of ComfyUI's int8 ConvRot."""
        return self.name in ("comfyui int8", FROM_INT8)

    @property
    def precision(self) -> str:
        return self.name.replace(",", "").split()[1]

    @property
    def weights(self) -> str:
        """Names the random model that it shares with its neighbours: "bf16" or "comfyui fp8"."""
        of_all = self.precision == "bf16"
        return self.precision if of_all else f"{self.name.split()[0]} {self.precision}"


BASELINE, FROM_INT8 = "comfyui bf16", "ours int8 from int8"
FORWARD = (
    Row(BASELINE),
    Row("ours bf16"),
    Row("diffusers bf16"),
    Row("comfyui fp8"),
    Row("ours fp8"),
    Row("comfyui int8"),
    Row("ours int8"),
    # The best exact attention of an L40S.
    Row("ours int8, attention sdpa_flash", "sdpa_flash"),
)
# Of prompts in a server.
IMAGE = (
    *(Row(name) for name in (BASELINE, "ours bf16", "ours fp8", "comfyui int8", "ours int8")),
    Row(FROM_INT8),
)


def select(names: Sequence[str], patterns: Sequence[str]) -> tuple[str, ...]:
    """Picks the names that any pattern matches; all without patterns."""
    found = {pattern: matching(names, pattern) for pattern in patterns}
    for pattern in (pattern for pattern, each in found.items() if not each):
        raise SettingError(
            f"--only {pattern!r} names no row: choose from {', '.join(map(repr, names))}, or "
            "a pattern such as 'ours *'."
        )
    return tuple(name for name in names if not found or any(name in it for it in found.values()))


@dataclass(frozen=True)
class Inputs:
    width: int  # pixels, as `height` divisible by 16
    height: int
    batch: int = 1
    text: int = 200  # tokens of each image
    references: int = 0  # images of 1024x1024, which Edit-2511 modulates as at timestep zero

    @property
    def size(self) -> str:
        return f"{self.width}x{self.height}"

    @property
    def stream_tokens(self) -> int:
        """Counts one item's image stream, with the tokens of its references."""
        sides = self.width // PIXELS_PER_TOKEN_SIDE, self.height // PIXELS_PER_TOKEN_SIDE
        return sides[0] * sides[1] + self.references * REFERENCE_TOKENS


@dataclass(frozen=True)
class Published:
    """Names a member, its files that `write_models` writes, and how its template runs."""

    name: str  # as `--family` takes it
    member: str
    transformer: str
    text_encoder: str
    vae: str
    encodes: str  # the node that encodes text and references
    image: str  # its input for a reference, by number
    cfg: float  # with more than `prompt.FEW` steps
    both: Mapping[str, Any] = field(default_factory=dict)  # its inputs for the negative prompt too

    @property
    def int8(self) -> str:
        return self.transformer.replace("bf16", "int8_convrot")


PUBLISHED = (
    Published(
        name="1.x",
        member="qwen-image",
        transformer="qwen_image_random_bf16.safetensors",
        text_encoder="qwen_2.5_vl_7b_random_bf16.safetensors",
        vae="qwen_image_vae_random_bf16.safetensors",
        encodes="TextEncodeQwenImageEditPlus",
        image="image{}",
        cfg=4.0,
    ),
    Published(
        name="2.1",
        member="qwen-image-2.1",
        transformer="qwen_image_2.1_random_bf16.safetensors",
        text_encoder="qwen3vl_8b_random_bf16.safetensors",
        vae="qwen_image_2.1_vae_random_bf16.safetensors",
        encodes="TextEncodeQwenImage21",
        image="images.image_{}",
        cfg=1.0,
        both={"negative_prompt": " ", "resolution": REFERENCE_SIDE},
    ),
)


def published(name: str | None) -> Published:
    return next(it for it in PUBLISHED if name in (it.name, None))


@dataclass(frozen=True)
class BenchSetup:
    device: torch.device
    shape: TransformerShape
    rows: tuple[Row, ...]  # in the order of `FORWARD`; none of `ops`
    names: tuple[str, ...]  # of the operations of `ops`
    files: Published  # of `image`
    inputs: tuple[Inputs, ...]
    repeats: int
    steps: int
    debug: bool
    models: Any  # a Path, or None
    free_gib: float | None

    @property
    def edit(self) -> bool:
        return self.inputs[0].references > 0
