"""Predicts the time of one forward pass whose tokens are split over several cards.

Each card computes the blocks for its tokens, and needs keys K and values V of all tokens. The first
card has the text tokens and fewer image tokens, so that all cards end together. There are two ways
to exchange (rows are tokens of a matrix):

    keys   A card sends its K and V, in bf16. Its own v hides the copy of K, its q that of V.
    rows   A card sends the normalized rows that q, k and v are made of, in 8 bits where the layers
           take them. Each card then computes K and V of the other cards' rows too. Its own q, k
           and v hide the copy, and where they do not, the MLP of the block before.

A block then takes, for a card's share of the rows:

    share x one card's time + K and V of other rows + the copy where it is not hidden + FIXED
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ..errors import SettingError
from ..families.protocol import StepTokens
from ..families.qwen_image import BLOCK_GEMMS
from ..spec.formats import BYTES_PER_SCALE

KEYS, ROWS = "keys", "rows"
# A split has to be so many times as fast as one card; below that it steps aside.
LEAST_GAIN = 1.25
# Events and waits of one block, in seconds. Fitted to 13 times in bf16 of two H100.
FIXED = 0.00004
BF16 = 2  # bytes of a number
# A block's products, of one stream in multiples of D x D; q, k and v are one each.
PRODUCTS = sum(rows * columns for rows, columns in BLOCK_GEMMS.values()) // 2
KEYS_AND_VALUES, FIRST, HALF_OF_LAST = 2 / PRODUCTS, 3 / PRODUCTS, 2 / PRODUCTS
# The time of an operation in 8 bits, a bf16 product's and attention's being 1: products in 8 bits
# reach less of their higher peak.
QUANTIZED_OPERATION = 2 / 3


class BlockSeconds(NamedTuple):
    # image, text: products of each stream.
    image: float
    text: float
    joint: float  # attention, and all between products; as long for every row

    @classmethod
    def shared(
        cls, seconds: float, tokens: StepTokens, width: int, *, quantized: bool, text: float
    ) -> BlockSeconds:
        """Shares a measured block out by operations; `text` are measured seconds of the text."""
        product = 2.0 * PRODUCTS * tokens.image_rows * width**2
        product *= QUANTIZED_OPERATION if quantized else 1
        attention = 4 * tokens.rows * tokens.joint * width
        rest = max(seconds - text, 0.0)
        joint = rest * attention / (product + attention)
        return cls(rest - joint, min(text, seconds), joint)


class Exchange(NamedTuple):
    seconds: float
    name: str
    image_rows: tuple[int, ...]  # of an item, by card; the first has the text rows, too
    # Whether rows leave in two pieces, the first behind the second's last product of the block
    # before: only where the copy would be exposed otherwise, and of one item.
    early: bool


@dataclass(frozen=True)
class SplitCost:
    """One pass over `cards` cards; figures are predicted or measured, as they are given."""

    tokens: StepTokens
    width: int
    block: BlockSeconds
    row_bytes: int | None  # of a normalized row; None where only keys can be sent
    cards: int  # at least 2, and at most the image rows of an item
    link: float  # bytes a second from card to card, both ways at once
    blocks: int = 60
    outside: float = 0.0  # seconds before and after the blocks, on the first card alone
    launch: float = 0.0  # CPU's seconds for a block; one thread launches all

    @cached_property
    def best(self) -> Exchange:
        keys = self._exchange(KEYS, 2 * BF16 * self.width, made=0.0, window=KEYS_AND_VALUES)
        if self.row_bytes is None:
            return keys
        return min(keys, self._exchange(ROWS, self.row_bytes, made=KEYS_AND_VALUES, window=FIRST))

    @property
    def seconds(self) -> float:
        """Counts the pass on all cards, with what others get of its input, give of its result."""
        tokens = self.tokens
        others = tokens.items * (tokens.image - self.best.image_rows[0])
        ends = 2 * others * BF16 * self.width / self.link
        return self.outside + ends + self.blocks * self.best.seconds

    @property
    def gain(self) -> float:
        return (self.outside + self.blocks * sum(self.block)) / self.seconds

    @property
    def pays(self) -> bool:
        return self.gain >= LEAST_GAIN

    @property
    def words(self) -> str:
        """Says in one sentence why it does not pay."""
        return (
            f"{self.cards} GPUs would be {self.gain:.2f}x as fast as one GPU at "
            f"{self.link / 1e9:.3g} GB/s, but a split needs {LEAST_GAIN}x: one GPU computes the "
            "forward pass."
        )

    def _exchange(self, name: str, row_bytes: int, *, made: float, window: float) -> Exchange:
        """Computes a block with one exchange. Every card makes a share of a stream's products of
        all rows, `made`; the copy hides behind a share of its own, `window`.
        """
        tokens, block, others = self.tokens, self.block, self.cards - 1
        each = block.joint / tokens.joint
        image = (1 - made) * block.image + each * tokens.image
        text = (1 - made) * block.text + each * tokens.text
        first = round(tokens.image * (image - others * text) / (self.cards * image))
        first = max(1, min(first, tokens.image - others))
        shared, more = divmod(tokens.image - first, others)
        image_rows = (first, *(shared + (place < more) for place in range(others)))
        ends = [(self.cards * self.launch, False)]
        for count, with_text in ((first, 1), (image_rows[1], 0)):
            own = count + with_text * tokens.text
            products = count / tokens.image * block.image + with_text * block.text
            most = max(own * others, tokens.joint - own)  # sent, or received
            copy = row_bytes * tokens.items * most / self.link
            exposed = copy - window * products
            early = name == ROWS and tokens.items == 1 and exposed > 0
            if early:
                exposed -= min(copy / 2, HALF_OF_LAST * count / tokens.image * block.image)
            seconds = products + made * (block.image + block.text - products) + each * own
            ends.append((seconds + max(0.0, exposed) + FIXED, early))
        seconds, early = max(ends)
        return Exchange(seconds, name, image_rows, early)


def row_bytes(width: int, *, quantized: bool) -> int:
    """Counts the bytes of a normalized row that is sent: in 8 bits with its scale, or in bf16."""
    return width + BYTES_PER_SCALE if quantized else BF16 * width


def check_link(link: float) -> None:
    """Raises SettingError unless a link carries something, in bytes a second."""
    if not 0 < link < float("inf"):
        raise SettingError(
            f"the link is {link / 1e9:g} GB/s, but must be above 0: `qwen-l40s doctor` measures it."
        )
