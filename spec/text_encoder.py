"""The sizes of the text encoders."""

from __future__ import annotations

from dataclasses import dataclass

from .formats import BYTES_PER_SCALE


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
        """Columns of the queries."""
        return self.heads * self.head_dim

    @property
    def linears(self) -> tuple[tuple[int, int], ...]:
        """One layer's, (rows, columns): q, k, v, output, gate, up and down."""
        hidden, inner, key = self.hidden, self.intermediate, self.kv_heads * self.head_dim
        attention = (self.query, hidden), (key, hidden), (key, hidden), (hidden, self.query)
        return (*attention, (inner, hidden), (inner, hidden), (hidden, inner))

    @property
    def quantized_bytes(self) -> int:
        """The language model's linears in fp8 or int8, with a scale for each row."""
        return self.layers * sum(n * k + BYTES_PER_SCALE * n for n, k in self.linears)

    @property
    def layer_parameters(self) -> int:
        """What every token goes through: all but the embedding, of which a row is looked up."""
        small = 2 * self.hidden
        small += sum(n for n, _ in self.linears[:3]) if self.biases else 2 * self.head_dim
        return self.layers * (sum(n * k for n, k in self.linears) + small) + self.hidden

    @property
    def language(self) -> int:
        """Parameters of the language model."""
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
