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
from .canvas import FAINT, GOOD, GRID, INK, WARN, WIDTH, Page, colours, dashed, wrapped
from .figures import dollars
from .run_chart import ANSWER, FIGURE, LABEL, LEAST, SIDE, fitting
from .words import request_text

if TYPE_CHECKING:
    from PIL import Image

    from ..planning.advise import Advice, Offer
    from ..planning.request import RunRequest

CARDS = 6  # that have a line
LEFT, HEIGHT = SIDE + 150, 520  # of the field between the axes, in pixels
COUNTS, COSTS = 950, WIDTH - SIDE  # where the columns of the list end
ROW = 62


def cost_chart(advices: Sequence[Advice], request: RunRequest) -> Image.Image:
    """Draws cost against load, both on logarithmic scales.

    A line for each of the cheapest cards at a price above 0 that fit, a dashed one at the load, and
    below a list of these cards by cost.

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
    field = _field(page.y + 64, [each.offer for each in shown], load)
    _axes(page, field)
    for advice, tint in reversed(list(zip(shown, tints, strict=True))):
        points = [(field.x(at), field.y(advice.offer.usd_for(at))) for at in field.loads()]
        page.draw.line(points, fill=tint, width=8 if advice is shown[0] else 5, joint="curve")
    dashed(page.draw, field.x(load), field.top, field.bottom, INK, 4)
    page.y = field.bottom + 128
    _list(page, shown, tints)
    return page.finish()


def _answer(page: Page, best: Advice, request: RunRequest) -> None:
    offer, room = best.offer, WIDTH - 2 * SIDE
    page.text((SIDE, page.y + 20), f"Cheapest for {_hourly(best)}", size=LABEL, fill=FAINT)
    page.y += 58
    name = f"{best.cards[1]:,} {offer.card.name}{', tight' * offer.tight}"
    colour = WARN if offer.tight else GOOD
    size = fitting(name, room, ANSWER)
    page.text((SIDE, page.y + ANSWER / 2), name, size=size, fill=colour)
    page.y += ANSWER + 20
    page.text((SIDE, page.y + FIGURE / 2), f"${dollars(best.usd)} an image", size=FIGURE)
    page.y += FIGURE + 24
    for line in wrapped(f"{request.family}, {request_text(request)}", LEAST, room):
        page.text((SIDE, page.y + LEAST * 0.65), line, size=LEAST, fill=FAINT)
        page.y += round(LEAST * 1.3)
    page.y += 24


def _hourly(advice: Advice) -> str:
    return f"{advice.images_per_hour:,.10g} images an hour"


def _list(page: Page, shown: Sequence[Advice], tints: Sequence[str]) -> None:
    """The cards by cost: the colour of the line, how many, and what an image costs."""
    middle = page.y + LEAST * 0.6
    page.text((COUNTS, middle), "cards, USD an hour", size=LEAST, fill=FAINT, anchor="rm")
    page.text((COSTS, middle), "USD an image", size=LEAST, fill=FAINT, anchor="rm")
    page.y += round(LEAST * 1.5)
    for advice, tint in zip(shown, tints, strict=True):
        offer, middle = advice.offer, page.y + ROW / 2
        page.draw.rectangle((SIDE, middle - 8, SIDE + 44, middle + 8), fill=tint)
        counted = f"{advice.cards[1]:,} at ${dollars(offer.usd_per_hour)}"
        name = f"{offer.card.name}{', tight' * offer.tight}"
        left = SIDE + 62
        room = COUNTS - 40 - left - page.draw.textlength(counted, font_size=LEAST)
        size = fitting(name, room, LABEL)
        ink = WARN if offer.tight else INK
        page.text((left, middle), wrapped(name, size, room)[0], size=size, fill=ink)
        page.text((COUNTS, middle), counted, size=LEAST, fill=FAINT, anchor="rm")
        page.text((COSTS, middle), f"${dollars(advice.usd)}", size=LABEL, anchor="rm")
        page.y += ROW


@dataclass(frozen=True)
class _Field:
    """Where the axes lie: pixels, and the powers of ten that they span."""

    top: float
    loads_log: tuple[float, float]
    costs_log: tuple[float, float]

    bottom = property(lambda self: self.top + HEIGHT)
    right = property(lambda self: WIDTH - SIDE)

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
    page.text((SIDE, field.top - 40), "USD an image", size=LEAST, fill=FAINT)
    for value in _rounds(*field.loads_log, LEFT, field.right, width=200):
        x = field.x(value)
        page.draw.line((x, field.top, x, field.bottom), fill=GRID, width=3)
        span = (LEFT - 60, field.right)
        page.label(x, field.bottom + 30, f"{value:,.10g}", span, fill=FAINT, size=LEAST)
    for value in _rounds(*field.costs_log, field.bottom, field.top, width=70):
        y = field.y(value)
        page.draw.line((LEFT, y, field.right, y), fill=GRID, width=3)
        page.text((LEFT - 16, y), _tick(value), size=LEAST, fill=FAINT, anchor="rm")
    place = (field.right, field.bottom + 80)
    page.text(place, "images an hour", size=LEAST, fill=FAINT, anchor="rm")


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
