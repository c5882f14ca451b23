"""What an image costs at every load, as a picture: a line for each card, and where they cross."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..planning.cards import SECONDS_PER_HOUR
from .advice import comparison_text
from .canvas import FAINT, GRID, INK, MARGIN, PAPER, SMALL, TITLE, WIDTH, Page, colours, dashed
from .figures import dollars
from .words import request_text

if TYPE_CHECKING:
    from PIL import Image

    from ..planning.advise import Advice, Comparison, Offer
    from ..planning.request import RunRequest

SUBTITLE = (
    "cards rented by the hour, as many as the load needs; the line is the middle of the times, the "
    "band their range"
)

LEFT, HEIGHT = MARGIN + 84, 470  # of the field between the axes, in pixels
DOT = 13


def cost_chart(
    advices: Sequence[Advice], comparisons: Sequence[Comparison], request: RunRequest
) -> Image.Image:
    """Draws cost against load, both on logarithmic scales.

    A line for each card at a price above 0 that fits, a tinted band for the range of those that
    are compared, a numbered dot at the break-even load of two, a dashed line at the load.

    Args:
        advices: from `planning.advise.advise`, at least one that fits and has a price above 0.
        comparisons: of `planning.advise.compare`; its first offer is what the picture is about.
        request: what the images are, for the title.

    Returns:
        An RGB picture, 1280 pixels wide and as high as it takes.
    """
    load = advices[0].images_per_hour
    offers = [advice.offer for advice in advices if advice.offer.fits and advice.offer.usd_per_hour]
    compared = [offer for found in comparisons for offer in _both(found)]
    # Those that are compared first: theirs are the colours that differ most.
    offers.sort(key=lambda offer: compared.index(offer) if offer in compared else len(compared))
    tints = colours(len(offers))
    crossing = [found for found in comparisons if found.break_even]
    full = SECONDS_PER_HOUR / offers[0].seconds.middle
    marked = [load, full, *(found.break_even for found in crossing)]

    page = Page(3000)
    page.paragraph(f"Cost of an image: {request.family}, {request_text(request)}", TITLE)
    page.paragraph(SUBTITLE, SMALL, FAINT)
    page.y += 64
    field = _field(page.y, offers, marked)
    _axes(page, field)
    drawn = list(zip(offers, tints, strict=True))
    for offer, tint in drawn:
        if offer in compared:
            _band(page, field, offer, tint)
    for offer, tint in reversed(drawn):
        middle = offer.seconds.middle
        points = [(field.x(load), field.y(_usd(offer, load, middle))) for load in field.loads()]
        page.draw.line(points, fill=tint, width=4 if offer in compared else 2, joint="curve")
    x = field.x(load)
    dashed(page.draw, x, field.top, field.bottom, INK)
    page.label(x, field.top - 14, f"{load:,.10g} images an hour", (LEFT, field.right))
    taken: list[tuple[float, float]] = []
    for number, found in enumerate(crossing, 1):
        place = found.break_even
        usd = min(_usd(offer, place, offer.seconds.middle) for offer in _both(found))
        taken.append(_free_place(field.x(place), field.y(usd), taken))
        _dot(page, taken[-1], number)
    page.y = field.bottom + 62
    page.legend((_named(offer), tint) for offer, tint in drawn)
    for found in comparisons:
        page.y += 6
        if found in crossing:
            _dot(page, (MARGIN + DOT, page.y + DOT), crossing.index(found) + 1)
        page.y += 2
        page.paragraph(comparison_text(found), SMALL, INK, indent=2 * DOT + 12)
    return page.finish()


def _both(found: Comparison) -> tuple[Offer, Offer]:
    return found.first, found.second


def _named(offer: Offer) -> str:
    return f"{offer.card.name}, ${dollars(offer.usd_per_hour)}/h"


def _usd(offer: Offer, load: float, seconds: float) -> float:
    return offer.usd_for(load, seconds)


@dataclass(frozen=True)
class _Field:
    """Where the axes lie: pixels, and the powers of ten that they span."""

    top: float
    loads_log: tuple[float, float]
    costs_log: tuple[float, float]

    bottom = property(lambda self: self.top + HEIGHT)
    right = property(lambda self: WIDTH - MARGIN)

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


def _field(top: float, offers: Sequence[Offer], marked: Sequence[float]) -> _Field:
    """Spans every mark with room on both sides."""
    loads = (math.log10(min(marked) / 8), math.log10(max(marked) * 8))
    every_load = list(_Field(top, loads, (0.0, 1.0)).loads())
    costs = [
        math.log10(_usd(offer, load, seconds))
        for offer in offers
        for load in every_load
        for seconds in offer.seconds
    ]
    low, high = min(costs), max(costs)
    return _Field(top, loads, (low - 0.08, max(high, low + 0.5) + 0.08))


def _axes(page: Page, field: _Field) -> None:
    for value in _rounds(*field.loads_log, LEFT, field.right, width=90):
        x = field.x(value)
        page.draw.line((x, field.top, x, field.bottom), fill=GRID, width=2)
        page.label(
            x, field.bottom + 16, f"{value:,.10g}", (LEFT - 40, field.right + 20), fill=FAINT
        )
    for value in _rounds(*field.costs_log, field.bottom, field.top, width=36):
        y = field.y(value)
        page.draw.line((LEFT, y, field.right, y), fill=GRID, width=2)
        page.text(
            (LEFT - 10, y),
            _tick(value),
            size=SMALL,
            fill=FAINT,
            anchor="rm",
        )
    page.text((MARGIN, field.top - 36), "USD an image", size=SMALL, fill=FAINT)
    page.text(
        (field.right, field.bottom + 40), "images an hour", size=SMALL, fill=FAINT, anchor="rm"
    )


def _tick(usd: float) -> str:
    """`$0.02`, `$500`; as a power of ten where the digits would not fit."""
    if 1e-5 < usd < 1e6:
        return f"${usd:.6f}".rstrip("0").rstrip(".")
    return f"${usd:.0e}"


def _rounds(low: float, high: float, start: float, end: float, width: float) -> list[float]:
    """1, 2 and 5 times powers of ten, or the powers alone where labels would touch."""
    decade = abs(end - start) / (high - low)
    factors = (1, 2, 5) if decade * math.log10(2) > width else (1,)
    values = [
        factor * 10.0**power
        for power in range(math.floor(low), math.ceil(high) + 1)
        for factor in factors
    ]
    return [value for value in values if low <= math.log10(value) <= high]


def _band(page: Page, field: _Field, offer: Offer, colour: str) -> None:
    """The range of one card as a tint that others show through."""
    from PIL import Image, ImageDraw

    low, high = (
        [(field.x(load), field.y(_usd(offer, load, seconds))) for load in field.loads()]
        for seconds in offer.seconds
    )
    mask = Image.new("L", page.image.size, 0)
    ImageDraw.Draw(mask).polygon([*low, *reversed(high)], fill=46)
    page.image.paste(colour, mask=mask)


def _free_place(x: float, y: float, taken: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """There, or above what is there already."""
    while any(math.hypot(x - other[0], y - other[1]) < 2 * DOT + 2 for other in taken):
        y -= 2 * DOT + 2
    return x, y


def _dot(page: Page, place: tuple[float, float], number: int) -> None:
    x, y = place
    page.draw.ellipse((x - DOT, y - DOT, x + DOT, y + DOT), fill=PAPER, outline=INK, width=2)
    page.text((x, y), str(number), size=SMALL, anchor="mm")
