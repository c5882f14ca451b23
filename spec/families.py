"""The published models: everything that tells one family from another is in its `Family`, with the
sizes of its text encoder.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import SettingError
from .formats import BYTES_PER_SCALE
from .transformer import (
    FULL_SIZE,
    LAYERED_SHAPE,
    PIXELS_PER_TOKEN_SIDE,
    SHAPE_21,
    USUAL_SIDE,
    SingleStreamShape,
    TransformerShape,
)
from .vae import PIXELS_PER_LATENT, PUBLISHED_VAE, VAE_21, VaeShape

APACHE = "Apache-2.0"
LICENCE_21 = (
    "Qwen Research License: research, not commercial use (Qwen-Image-2512 and Edit-2511 are "
    f"{APACHE})"
)


@dataclass(frozen=True)
class TextEncoder:
    """The sizes of a Qwen-VL text encoder, without lm_head, which encoding never reads.

    Attributes:
        name: Of the published model.
        hidden, intermediate, heads, kv_heads, layers, vocabulary: Of the language model.
        biases: Whether q, k and v have biases; heads are normalized where not.
        vision, vision_hidden, vision_head: Parameters of the vision tower, its width, and that of
            a head.
        template: Tokens of the system prompt, which are cut off what comes out.
    """

    name: str
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    layers: int
    vocabulary: int
    biases: bool
    vision: int
    vision_hidden: int
    vision_head: int
    template: int
    head_dim: int = 128

    @property
    def query(self) -> int:
        """Returns the columns of the queries."""
        return self.heads * self.head_dim

    @property
    def linears(self) -> tuple[tuple[int, int], ...]:
        """Lists one layer's (rows, columns): q, k, v, output, gate, up and down."""
        hidden, inner, key = self.hidden, self.intermediate, self.kv_heads * self.head_dim
        attention = (self.query, hidden), (key, hidden), (key, hidden), (hidden, self.query)
        return (*attention, (inner, hidden), (inner, hidden), (hidden, inner))

    @property
    def quantized_bytes(self) -> int:
        """Counts the language model's linears in fp8 or int8, with a scale for each row."""
        return self.layers * sum(n * k + BYTES_PER_SCALE * n for n, k in self.linears)

    @property
    def layer_parameters(self) -> int:
        """Counts what every token goes through: all but the embedding, where a row is looked up."""
        small = 2 * self.hidden
        small += sum(n for n, _ in self.linears[:3]) if self.biases else 2 * self.head_dim
        return self.layers * (sum(n * k for n, k in self.linears) + small) + self.hidden

    @property
    def language(self) -> int:
        """Counts the language model's parameters."""
        return self.layer_parameters + self.vocabulary * self.hidden


QWEN25_VL = TextEncoder(
    name="Qwen2.5-VL 7B",
    hidden=3584,
    intermediate=18944,
    heads=28,
    kv_heads=4,
    layers=28,
    vocabulary=152_064,
    biases=True,
    vision=676_550_144,
    vision_hidden=1280,
    vision_head=80,
    template=64,
)
QWEN3_VL = TextEncoder(
    name="Qwen3-VL 8B",
    hidden=4096,
    intermediate=12288,
    heads=32,
    kv_heads=8,
    layers=36,
    vocabulary=151_936,
    biases=False,
    vision=576_388_336,
    vision_hidden=1152,
    vision_head=72,
    template=20,
)


@dataclass(frozen=True)
class Family:
    """One published model.

    Attributes:
        name: As `--family` takes it.
        steps: Of the sampler, as in its model card.
        cfg: The scale of classifier-free guidance, as in its pipeline; 1 is off.
        most_references: Reference images that its workflows take.
        timestep_zero: Whether references are modulated as at timestep zero, which doubles the rows
            of the modulation.
        layers: Whether several layers are painted together.
        vision_tokens: Text tokens that each reference image adds to the prompt: the text encoder
            sees one megapixel in Edit and 384x384 pixels in its successors, 28x28 a token; one
            megapixel of 32x32 a token in 2.1, whose transformer has the reference in their place.
        transformer, vae, text_encoder: The published sizes.
        vae_bytes: Of the VAE's weights in bf16.
        licence: Of the weights.
        side: Of a square that it is trained to paint, in pixels.
        size_step: What both sides are multiples of, in pixels.
        cached_prefix: Whether text and references are computed in a prompt's first step alone, and
            their keys and values kept for the others.
    """

    name: str
    steps: int = 50
    cfg: float = 4.0
    most_references: int = 0
    timestep_zero: bool = False
    layers: bool = False
    vision_tokens: int = 0
    transformer: TransformerShape = FULL_SIZE
    vae: VaeShape = PUBLISHED_VAE
    text_encoder: TextEncoder = QWEN25_VL
    vae_bytes: int = 2 * 126_892_531
    licence: str = APACHE
    side: int = USUAL_SIDE
    size_step: int = PIXELS_PER_TOKEN_SIDE
    cached_prefix: bool = False


FAMILIES = {
    family.name: family
    for family in (
        Family("qwen-image"),
        Family("qwen-image-2512"),
        Family("qwen-image-edit", most_references=1, vision_tokens=1369),
        Family("qwen-image-edit-2509", steps=40, most_references=3, vision_tokens=196),
        Family(
            "qwen-image-edit-2511",
            steps=40,
            most_references=3,
            timestep_zero=True,
            vision_tokens=196,
        ),
        Family(
            "qwen-image-layered",
            most_references=1,
            layers=True,
            transformer=LAYERED_SHAPE,
            vae=VaeShape(image_channels=4),
        ),
        Family(
            "qwen-image-2.1",
            steps=40,
            cfg=1.0,
            most_references=10,
            vision_tokens=1024,
            transformer=SHAPE_21,
            vae=VAE_21,
            text_encoder=QWEN3_VL,
            vae_bytes=675_480_808,
            licence=LICENCE_21,
            side=2048,
            size_step=32,
            cached_prefix=True,
        ),
    )
}


TEXT_TO_IMAGE = FAMILIES["qwen-image"]
SINGLE_STREAM_FAMILY = FAMILIES["qwen-image-2.1"]


def pixels_of(channels: int) -> int:
    """Returns the pixels of a latent pixel's side, by the latent's channels."""
    vae = SINGLE_STREAM_FAMILY.vae
    return vae.pixels if channels == vae.latent_channels else PIXELS_PER_LATENT


def family_of(shape: TransformerShape) -> Family:
    """Returns the family that a transformer's shape tells; the first of those that share it."""
    single = isinstance(shape, SingleStreamShape)
    return SINGLE_STREAM_FAMILY if single else TEXT_TO_IMAGE


def find_family(name: str) -> Family:
    """Returns the family of a name.

    Raises:
        SettingError: there is none.
    """
    if name not in FAMILIES:
        raise SettingError(f"family {name!r} is unknown: choose {', '.join(FAMILIES)}.")
    return FAMILIES[name]
