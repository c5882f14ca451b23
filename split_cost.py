"""What one forward pass costs when its rows are split over several cards, and whether that pays.

Every card computes the blocks for its own rows; only K and V are needed of all rows. The first card
has the text rows and fewer image rows for that. Two exchanges bring K and V together:

    keys   K and V of the own rows are sent, in bf16; K's copy hides behind the own v, V's behind q
    rows   the normalized rows that q, k and v are made of are sent, in 8 bits where the layers
           take them, and K and V of the others' rows are made here, too; the copy hides behind
           the own q, k and v, and where that is not enough behind the MLP of the block before

A block then takes, with the share of the rows that a card has:

    share x one card's time + K and V of others' rows + what no product hides of the copy + FIXED
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from .errors import SettingError
from .spec.formats import BYTES_PER_SCALE
from .spec.transformer import BLOCK_GEMMS

KEYS, ROWS = "keys", "rows"
# A split has to be so many times as fast as one card; below that it steps aside.
LEAST_GAIN = 1.25
# Events and waits of one block, in seconds. Fitted to 13 times in bf16, two H100 (docs/cards.md).
FIXED = 0.00004
BF16 = 2  # bytes of a number
# Of a stream's products in one block, those of q alone; of K and V; and of all three.
# And half of the MLP's last one.
QUERY, KEYS_AND_VALUES, FIRST, HALF_OF_LAST = (
    count * 2 / sum(rows * columns for rows, columns in BLOCK_GEMMS.values())
    for count in (1, 2, 3, 2)
)
# Products with fewer rows take as long as reading their weights does: the operations of a byte,
# which are 200 to 400 on cards with tensor cores.
LEAST_ROWS = 256
# The time of an operation, a bf16 product's being 1: those of a product in 8 bits reach less of
# their higher peak, attention about what bf16 products do.
QUANTIZED_OPERATION, ATTENTION_OPERATION = 2 / 3, 1.0


class Rows(NamedTuple):
    """The rows of one pass: `items` times `text` and `image` ones, each of `width` numbers."""

    items: int
    text: int
    image: int
    width: int

    @property
    def all(self) -> int:
        """Rows of both streams."""
        return self.items * (self.text + self.image)


@dataclass(frozen=True)
class BlockSeconds:
    """One block on one card.

    Args:
        image, text: products of each stream.
        joint: attention, and all between products; as long for every row.
    """

    image: float
    text: float
    joint: float

    @property
    def all(self) -> float:
        """The whole block."""
        return self.image + self.text + self.joint

    def scaled(self, seconds: float) -> BlockSeconds:
        """The same shares of a block that was measured."""
        factor = seconds / self.all
        return BlockSeconds(self.image * factor, self.text * factor, self.joint * factor)

    @classmethod
    def shared(
        cls, seconds: float, rows: Rows, *, quantized: bool, text: float | None = None
    ) -> BlockSeconds:
        """A measured block, shared out by the operations of its parts.

        Args:
            quantized: whether products are in 8 bits.
            text: seconds of the text's products, where they were measured.
        """
        weights = sum(n * k for n, k in BLOCK_GEMMS.values()) // 2 * rows.width**2
        product = 2 * weights * (QUANTIZED_OPERATION if quantized else 1)
        attention = 4 * rows.items * (rows.text + rows.image) ** 2 * rows.width
        parts = cls(
            product * rows.items * rows.image,
            product * max(LEAST_ROWS, rows.items * rows.text),
            ATTENTION_OPERATION * attention,
        )
        if text is None:
            return parts.scaled(seconds)
        rest = replace(parts, text=0.0).scaled(max(seconds - text, 0.0))
        return replace(rest, text=min(text, seconds))


@dataclass(frozen=True)
class Exchange:
    """One block with one exchange: what the card that ends last does.

    Attributes:
        name: `KEYS` or `ROWS`.
        image_rows: Of an item, by card; the first has the text rows, too.
        sent: Bytes that a card sends or receives in a block, whichever is more.
        extra: Seconds for K and V of the others' rows.
        window: Seconds of the products behind which the copy hides.
        early: Whether rows leave in two pieces, the first behind the second's last product of the
            block before: only where the copy would be exposed otherwise, and of one item.
        exposed: Seconds of the copy that nothing hides.
        seconds: Of the whole block.
    """

    name: str
    image_rows: tuple[int, ...]
    sent: int
    extra: float
    window: float
    early: bool
    exposed: float
    seconds: float


@dataclass(frozen=True)
class SplitCost:
    """One pass over `cards` cards; figures are predicted or measured, as they are given.

    Args:
        rows: of the pass.
        block: seconds of a block on one card.
        row_bytes: of a normalized row as it is sent (`row_bytes`); None where only keys can be:
            with LoRAs beside weights, or layers that run themselves.
        cards: at least 2, and at most the image rows of an item.
        link: bytes a second from card to card, both ways at once.
        blocks: of the pass.
        outside: seconds before and after the blocks, on the first card alone.
        launch: seconds of the processor for a block on one card; one thread launches all cards'.

    Raises:
        SettingError: the link carries nothing, or rows and cards do not divide so.
    """

    rows: Rows
    block: BlockSeconds
    row_bytes: int | None
    cards: int
    link: float
    blocks: int = 60
    outside: float = 0.0
    launch: float = 0.0

    def __post_init__(self) -> None:
        check_link(self.link)
        if not 2 <= self.cards <= self.rows.image:
            raise SettingError(
                f"{self.rows.image} image rows do not split over {self.cards} cards: a split has 2 "
                "cards at least, and each takes a row."
            )

    @cached_property
    def keys(self) -> Exchange:
        """K and V are sent."""
        return self._exchange(KEYS)

    @cached_property
    def normalized(self) -> Exchange | None:
        """Normalized rows are sent; None where only keys can be."""
        return None if self.row_bytes is None else self._exchange(ROWS)

    @property
    def best(self) -> Exchange:
        """The faster exchange."""
        found = filter(None, (self.normalized, self.keys))
        return min(found, key=lambda exchange: exchange.seconds)

    @property
    def one_card_seconds(self) -> float:
        """The pass on one card."""
        return self.outside + self.blocks * self.block.all

    @property
    def seconds(self) -> float:
        """The pass on all cards: with what the others get of its input, and give of its result."""
        rows = self.rows
        others = rows.items * (rows.image - self.best.image_rows[0])
        ends = 2 * others * BF16 * rows.width / self.link
        return self.outside + ends + self.blocks * self.best.seconds

    @property
    def gain(self) -> float:
        """How many times as fast as one card."""
        return self.one_card_seconds / self.seconds

    @property
    def pays(self) -> bool:
        """Whether to split."""
        return self.gain >= LEAST_GAIN

    @property
    def words(self) -> str:
        """The decision, in one sentence."""
        about = f"{self.gain:.2f} times as fast as one card at {self.link / 1e9:.3g} GB/s"
        if self.pays:
            return f"{self.cards} cards compute a pass {about}; they exchange {self.best.name}."
        return (
            f"{self.cards} cards would compute a pass {about}, and a split needs {LEAST_GAIN}: one "
            "card computes it."
        )

    def _exchange(self, name: str) -> Exchange:
        """With the rows by which the last card ends first.

        That end falls and then rises as the first card gets rows: a search by thirds, in which
        the others share evenly, and then whole rows around it.
        """
        most = self.rows.image - (self.cards - 1)

        def end(first: int) -> float:
            other = (self.rows.image - first) / (self.cards - 1)
            return max(self._card(name, first, 0).seconds, self._card(name, other, 1).seconds)

        low, high = 1, most
        while high - low > 2:
            third = (high - low) // 3
            left, right = low + third, high - third
            if end(left) < end(right):
                high = right
            else:
                low = left
        around = range(max(1, low - self.cards), min(most, high + self.cards) + 1)
        return min((self._shared(name, first) for first in around), key=_seconds)

    def _shared(self, name: str, first: int) -> Exchange:
        """What the card that ends last does, where the first has so many image rows of an item."""
        others = [*_even(self.rows.image - first, self.cards - 1)]
        slowest = max((self._card(name, first, 0), self._card(name, others[0], 1)), key=_seconds)
        return replace(slowest, image_rows=(first, *others))

    def _card(self, name: str, image_rows: float, card: int) -> Exchange:
        """What one card does that has so many image rows of an item."""
        rows, block = self.rows, self.block
        own = rows.items * (image_rows + (rows.text if card == 0 else 0))
        part = image_rows / rows.image
        products = part * block.image + (block.text if card == 0 else 0)
        others = (1 - part) * block.image + (0 if card == 0 else block.text)
        if name == ROWS:
            each, extra, window = self.row_bytes, KEYS_AND_VALUES * others, FIRST * products
        else:
            each, extra, window = 2 * BF16 * rows.width, 0.0, 2 * QUERY * products
        sent = round(each * max(own * (self.cards - 1), rows.all - own))
        copy = sent / self.link
        exposed = max(0.0, copy - window)
        early = name == ROWS and rows.items == 1 and exposed > 0
        if early:
            exposed = max(0.0, exposed - min(copy / 2, HALF_OF_LAST * part * block.image))
        seconds = products + block.joint * own / rows.all + extra + exposed + FIXED
        seconds = max(seconds, self.cards * self.launch)
        return Exchange(name, (), sent, extra, window, early, exposed, seconds)


def row_bytes(width: int, *, quantized: bool) -> int:
    """A normalized row as it is sent: in 8 bits with its scale, or in bf16."""
    return width + BYTES_PER_SCALE if quantized else BF16 * width


def check_cards(cards: int) -> None:
    """Raises SettingError unless there is a card."""
    if cards < 1:
        raise SettingError(f"cards must be at least 1, got {cards}.")


def check_link(link: float) -> None:
    """Raises SettingError unless a link carries something.

    Args:
        link: bytes a second.
    """
    if not 0 < link < float("inf"):
        raise SettingError(
            f"the link must be above 0 GB/s, got {link / 1e9:g}: `qwen-l40s doctor` measures it."
        )


def _seconds(exchange: Exchange) -> float:
    return exchange.seconds


def _even(count: int, parts: int) -> Iterator[int]:
    """Whole numbers that differ by one at most, the larger first."""
    return (-(-(count - place) // parts) for place in range(parts))
