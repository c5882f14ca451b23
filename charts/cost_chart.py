"""What an image costs at every load, as a picture: the cheapest card for the load first, then a
line for each of the cheapest cards.

A node shows the picture a third as wide as it is, as `run_chart` says.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..planning.cards import SECONDS_PER_HOUR
from .canvas import (
    FAINT,
    GOOD,
    GRID,
    INK,
    WARN,
    WIDTH,
    Page,
    colours,
    dashed,
    text_width,
    wrapped,
)
from .figures import dollars
from .run_chart import ANSWER, LABEL, LEAST, SIDE, fitting
from .words import request_text

if TYPE_CHECKING:
    from PIL import Image

    from ..planning.advise import Advice, Offer
    from ..planning.request import RunRequest

CARDS = 6  # that have a line
# Of the field between the axes, and of the list beside it, in pixels.
LEFT, RIGHT, HEIGHT = SIDE + 140, 620, 6 * 64
NAMES, COSTS = 670, WIDTH - SIDE
SWATCH, BETWEEN = 30, 16
COLUMN = 150  # of costs


def cost_chart(advices: Sequence[Advice], request: RunRequest) -> Image.Image:
    """Draws cost against load, both on logarithmic scales.

    A line for each of the cheapest cards at a price above 0 that fit, a dashed one at the load, and
    a list of these cards by cost to the right of it: nodes give little height to a picture.

    Args:
        advices: from `planning.advise.advise`, at least one that fits and has a price above 0.
        request: what the images are.

    Returns:
        An RGB picture, 1280 pixels wide and as high as it takes.
    """
    shown = [each for each in advices if each.offer.fits and each.offer.usd_per_hour][:CARDS]
    tints = colours(len(shown))
    load = shown[0].images_per_hour
    page = Page(3000)
    page.y = SIDE
    _answer(page, shown[0], request)
    head = page.y + LEAST * 0.6
    field = _field(head + LEAST * 1.1, [each.offer for each in shown], load)
    page.text((SIDE, head), "USD per image, by images per hour", size=LEAST, fill=FAINT)
    _axes(page, field)
    for advice, tint in reversed(list(zip(shown, tints, strict=True))):
        points = [(field.x(at), field.y(advice.offer.usd_for(at))) for at in field.loads()]
        page.draw.line(points, fill=tint, width=8 if advice is shown[0] else 5, joint="curve")
    dashed(page.draw, field.x(load), field.top, field.bottom, INK, 4)
    _list(page, field.top, shown, tints)
    page.y = field.bottom + 60
    return page.finish()


def _answer(page: Page, best: Advice, request: RunRequest) -> None:
    """How many of which card, and what an image costs, in one line."""
    room = WIDTH - 2 * SIDE
    load = f"Cheapest for {best.images_per_hour:,.10g} images per hour"
    page.text((SIDE, page.y + LABEL * 0.6), load, size=LABEL, fill=FAINT)
    page.y += round(LABEL * 1.3)
    name, cost = _counted(best), f"${dollars(best.usd)} an image"
    size = fitting(f"{name}  {cost}", room, ANSWER)
    middle = page.y + size * 0.6
    page.text((SIDE, middle), name, size=size, fill=WARN if best.offer.tight else GOOD)
    page.text((SIDE + text_width(f"{name}  ", size), middle), cost, size=size)
    page.y += round(size * 1.3)
    for line in wrapped(f"{request.family}, {request_text(request)}", LEAST, room):
        page.text((SIDE, page.y + LEAST * 0.65), line, size=LEAST, fill=FAINT)
        page.y += round(LEAST * 1.3)
    page.y += 20


def _counted(advice: Advice) -> str:
    """`4 RTX 4090`, `3 L40S, tight`."""
    return f"{advice.cards[1]:,} {advice.offer.card.name}{', tight' * advice.offer.tight}"


def _list(page: Page, top: float, shown: Sequence[Advice], tints: Sequence[str]) -> None:
    """The cards by cost: the colour of the line, how many, and what an image costs."""
    row = HEIGHT / CARDS
    left = NAMES + SWATCH + BETWEEN
    for place, (advice, tint) in enumerate(zip(shown, tints, strict=True)):
        middle = top + (place + 0.5) * row
        page.draw.rectangle((NAMES, middle - 8, NAMES + SWATCH, middle + 8), fill=tint)
        name = wrapped(_counted(advice), LEAST, COSTS - COLUMN - left)[0].rstrip(",")
        page.text((left, middle), name, size=LEAST, fill=WARN if advice.offer.tight else INK)
        page.text((COSTS, middle), f"${dollars(advice.usd)}", size=LEAST, anchor="rm")


@dataclass(frozen=True)
class _Field:
    """Where the axes lie: pixels, and the powers of ten that they span."""

    top: float
    loads_log: tuple[float, float]
    costs_log: tuple[float, float]

    bottom = property(lambda self: self.top + HEIGHT)
    right = RIGHT

    def x(self, load: float) -> float:
        """Pixels of a load."""
        low, high = self.loads_log
        return LEFT + (math.log10(load) - low) / (high - low) * (self.right - LEFT)

    def y(self, usd: float) -> float:
        """Pixels of a cost."""
        low, high = self.costs_log
        return self.bottom - (math.log10(usd) - low) / (high - low) * HEIGHT

    def loads(self) -> Iterator[float]:
        """A load for each pixel."""
        low, high = self.loads_log
        count = round(self.right - LEFT)
        for step in range(count + 1):
            yield 10 ** (low + (high - low) * step / count)


def _field(top: float, offers: Sequence[Offer], load: float) -> _Field:
    """Spans the load and that of one card of each kind, with room on both sides."""
    full = [SECONDS_PER_HOUR / offer.seconds.high for offer in offers]
    loads = (math.log10(min(load, *full) / 5), math.log10(max(load, *full) * 5))
    every_load = list(_Field(top, loads, (0.0, 1.0)).loads())
    costs = [math.log10(offer.usd_for(each)) for offer in offers for each in every_load]
    low, high = min(costs), max(costs)
    return _Field(top, loads, (low - 0.08, max(high, low + 0.5) + 0.08))


def _axes(page: Page, field: _Field) -> None:
    for value in _rounds(*field.loads_log, LEFT, field.right, width=110):
        x = field.x(value)
        page.draw.line((x, field.top, x, field.bottom), fill=GRID, width=3)
        span = (LEFT - 60, field.right + 24)
        page.label(x, field.bottom + 32, _thousands(value), span, fill=FAINT, size=LEAST)
    for value in _rounds(*field.costs_log, field.bottom, field.top, width=60):
        y = field.y(value)
        page.draw.line((LEFT, y, field.right, y), fill=GRID, width=3)
        page.text((LEFT - 16, y), _tick(value), size=LEAST, fill=FAINT, anchor="rm")


def _thousands(load: float) -> str:
    """`0.1`, `100`, `10k`, `1M`."""
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if load >= unit:
            return f"{load / unit:g}{name}"
    return f"{load:g}"


def _tick(usd: float) -> str:
    """`$0.02`, `$500`; as a power of ten where the digits would not fit."""
    if 1e-4 < usd < 1e4:
        return f"${usd:.4f}".rstrip("0").rstrip(".")
    return f"${usd:.0e}"


def _rounds(low: float, high: float, start: float, end: float, width: float) -> list[float]:
    """1, 2 and 5 times powers of ten, or as many of the powers as labels have room."""
    decade = abs(end - start) / (high - low)
    factors = (1, 2, 5) if decade * math.log10(2) > width else (1,)
    every = max(1, math.ceil(width / decade))
    values = [
        factor * 10.0**power
        for power in range(math.floor(low), math.ceil(high) + 1)
        if power % every == 0
        for factor in factors
    ]
    return [value for value in values if low <= math.log10(value) <= high]
