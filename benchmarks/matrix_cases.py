"""The runs by which the estimator is fitted and tested, each with the half that it is for."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import NamedTuple

PRECISIONS = ("bf16", "int8", "fp8")
SIZES = ((1024, 1024), (1664, 928), (1328, 1328), (2048, 2048))
REFERENCES = (0, 1, 3)
BATCHES = (1, 2)
PLACES = ("off card", "on card")
# With the modulation on the card a step is the same; only these are run there.
ON_CARD = ((1024, 1024), 1, 0), ((1328, 1328), 2, 1), ((2048, 2048), 1, 3)
# Two forward passes a step.
GUIDED = ((1328, 1328), 1, 0), ((1024, 1024), 1, 3)
TEXT_TOKENS, VISION_TOKENS = 200, 196
LONG_TEXT = 800
TILES = (1, 4)
# Drawn once; which run is in which half must not follow from its place in the list.
SEED = 7


class Case(NamedTuple):
    """One sampling run.

    Attributes:
        modulation: "off card" or "on card".
        text: tokens of the prompt, with those of the references.
        guided: whether there are two passes a step, of prompts of different lengths.
    """

    precision: str
    modulation: str
    size: tuple[int, int]
    batch: int
    references: int
    text: int
    guided: bool = False

    @property
    def tokens(self) -> int:
        """Of one item, image and references."""
        width, height = self.size
        return width // 16 * (height // 16) + self.references * 4096

    @property
    def plain(self) -> bool:
        """Whether it is one image of at most one reference, the modulation off the card."""
        return self.modulation == "off card" and self.batch == 1 and self.references < 2

    @property
    def family(self) -> str:
        return "qwen-image-edit-2511" if self.references else "qwen-image"


def models() -> Iterator[tuple[str, str, list[Case]]]:
    """(precision, place of the modulation, its runs), the fewest tokens first."""
    for precision, place in itertools.product(PRECISIONS, PLACES):
        yield precision, place, sorted(_cases(precision, place), key=lambda case: case.tokens)


def _cases(precision: str, place: str) -> Iterator[Case]:
    chosen = ON_CARD if place == "on card" else itertools.product(SIZES, BATCHES, REFERENCES)
    for size, batch, references in chosen:
        text = TEXT_TOKENS + references * VISION_TOKENS
        yield Case(precision, place, size, batch, references, text)
    if place == "off card":
        for size, batch, references in GUIDED:
            text = TEXT_TOKENS + references * VISION_TOKENS
            yield Case(precision, place, size, batch, references, text, guided=True)
        yield Case(precision, place, (1328, 1328), 1, 0, LONG_TEXT)


def halves(count: int) -> list[str]:
    """ "fit" or "test" for each of so many runs, as many of one as of the other."""
    names = ["fit", "test"] * (count // 2 + 1)
    names = names[:count]
    random.Random(SEED).shuffle(names)
    return names
