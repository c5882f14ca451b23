"""The published members of the Qwen-Image family, as far as they decide what a run takes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..errors import SettingError
from .memory import TransformerShape
from .vae_steps import VaeShape
from .work import FULL_SIZE

PUBLISHED_VAE = VaeShape()
LAYERED_SHAPE = replace(FULL_SIZE, addition_t_cond=True)


@dataclass(frozen=True)
class Family:
    """One published model.

    Attributes:
        name: As `--family` takes it.
        most_references: Reference images that its workflows take.
        timestep_zero: Whether references are modulated as at timestep zero, which doubles the rows
            of the modulation.
        layers: Whether several layers are painted together.
        vision_tokens: Text tokens that each reference image adds to the prompt: the text encoder
            sees one megapixel in Edit and 384x384 pixels in its successors, 28x28 a token.
    """

    name: str
    most_references: int = 0
    timestep_zero: bool = False
    layers: bool = False
    vision_tokens: int = 0
    transformer: TransformerShape = FULL_SIZE
    vae: VaeShape = PUBLISHED_VAE


FAMILIES = {
    family.name: family
    for family in (
        Family("qwen-image"),
        Family("qwen-image-2512"),
        Family("qwen-image-edit", most_references=1, vision_tokens=1369),
        Family("qwen-image-edit-2509", most_references=3, vision_tokens=196),
        Family("qwen-image-edit-2511", most_references=3, timestep_zero=True, vision_tokens=196),
        Family(
            "qwen-image-layered",
            most_references=1,
            layers=True,
            transformer=LAYERED_SHAPE,
            vae=VaeShape(image_channels=4),
        ),
    )
}


def find_family(name: str) -> Family:
    """The family of a name.

    Raises:
        SettingError: there is none.
    """
    if name not in FAMILIES:
        raise SettingError(f"family {name!r} is unknown: choose {', '.join(FAMILIES)}.")
    return FAMILIES[name]
