"""Draws charts of one layout: the answer, its figures, and a bar for each phase of a run or for
each card. A node shows a chart at a third of its width, so the type is large and the text short.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..planning.advise import Advice, Offer
from ..planning.estimate import Estimate
from ..planning.phases import Phase
from ..planning.times import PROCESSOR
from .figures import dollars, duration, tenths, usd
from .text import (
    BOUND,
    PHASE_WORDS,
    WORKING,
    Refusal,
    answer,
    fullest,
    heading,
    moves,
    parts_of,
    price_of,
    remedy,
    request_text,
    rests_on,
)

if TYPE_CHECKING:
    from PIL import Image

WIDTH = 1280  # pixels
# A picture brings its own ground and a frame, so that it stands on a light page and on a dark one.
PAPER, FRAME = "#17202a", "#66768a"
INK, FAINT, GRID = "#f2f5f8", "#aeb9c5", "#364452"
DARK = "#10171f"  # text on a bright bar
GOOD, WARN, BAD = "#2bc48a", "#ffb000", "#ff7043"
# A node gives a picture 400 pixels of width and 220 of height, at which the least is still read.
ANSWER, FIGURE, LEAST = 80, 48, 34  # font sizes
LINE = 46  # pixels from one line of the least size to the next
SIDE = 40  # pixels of margin
NAMES, SIZES, TIMES = 216, 160, 270  # pixels at both ends of the bars, at the least
BAR = 32
CARDS = 6  # that have a bar in a picture of costs
BESIDE_BAR, BELOW_FIGURE = 560, 360  # pixels of a card's name
SIGNS = {"good": GOOD, "tight": WARN, "bad": BAD, "plain": INK}
HOST_MEMORY = "in system RAM"
COLOURS = {
    "transformer": "#56b4e9",
    "text encoder": "#d58fb8",
    "working memory": "#f0e442",
    "other": "#9aa5b1",
    HOST_MEMORY: WARN,
    "measured": "#56b4e9",
    "USD an image": "#56b4e9",
}


@dataclass(frozen=True)
class Figure:
    label: str
    value: str
    below: str = ""


@dataclass(frozen=True)
class Bar:
    name: str
    parts: Mapping[str, float]  # {a name of `COLOURS`: bytes, or seconds without memory}
    value: str = ""
    time: str = ""


@dataclass(frozen=True)
class Limit:
    """The card's memory: the peak of a run, what a run may use, and what there is."""

    peak: int
    usable: int
    capacity: int


@dataclass(frozen=True)
class RunPicture:
    sign: str
    answer: str
    basis: str = ""
    lines: Sequence[str] = ()
    about: str = ""
    figures: Sequence[Figure] = ()
    bars: Sequence[Bar] = ()
    limit: Limit | None = None  # None where memory is not counted


def memory_chart(estimate: Estimate) -> Image.Image:
    """Draws whether an estimate fits, how long an image takes and what it costs, and a bar for each
    phase: amber is what has no room on the card and waits in system RAM.
    """
    peak, usable = fullest(estimate).needed_bytes, estimate.option.usable_bytes
    ram = f"{tenths(estimate.host_ram_bytes)} GiB system RAM"
    figures = [Figure("VRAM", f"{tenths(peak)} of {tenths(usable)} GiB", ram)]
    if estimate.image_seconds:
        step, cost = duration(estimate.step_seconds), estimate.usd_per_image
        figures.append(Figure("an image", duration(estimate.image_seconds), f"{step} a step"))
        paid = (usd(cost), f"at {price_of(estimate)}") if cost else ("unknown", "no price known")
        figures.append(Figure("cost of an image", *paid))
    sign = "good" if estimate.fits and not estimate.tight else "tight"
    return run_chart(
        RunPicture(
            sign="bad" if estimate.short_of_ram else sign,
            answer=answer(estimate),
            basis=rests_on(estimate),
            lines=[
                estimate.card_note,
                f"A step is {BOUND}." if estimate.bound == PROCESSOR else "",
                "" if estimate.fits else f"{moves(estimate)}.",
                remedy(estimate),
            ],
            about=heading(estimate),
            figures=figures,
            bars=[_phase_bar(estimate, phase) for phase in estimate.phases.values()],
            limit=Limit(peak, usable, estimate.card.memory_bytes),
        )
    )


def _phase_bar(estimate: Estimate, phase: Phase) -> Bar:
    # What would have to be there too for all to stay.
    beyond = max(0, estimate.option.needs.get(phase.name, 0) - phase.card_bytes)
    held = parts_of(phase)
    parts = {part: held.pop(part) for part in ("transformer", "text encoder", WORKING)}
    return Bar(
        PHASE_WORDS[phase.name][0],
        {**parts, "other": sum(held.values()), HOST_MEMORY: beyond},
        f"{tenths(phase.card_bytes)} GiB",
        "" if phase.seconds is None else duration(phase.seconds),
    )


def refusal_chart(refusal: Refusal) -> Image.Image:
    lines = [refusal.card_note, refusal.reason]
    return run_chart(RunPicture("bad", "Does not fit", "predicted", lines, refusal.about))


def cost_chart(advice: Advice) -> Image.Image:
    """Draws the cheapest card at three loads, and a bar for each of the cheapest at the load that
    was asked for; needs at least one that fits and costs something.
    """
    load, offers = advice.images_per_hour, advice.paid
    best = offers[0]
    request = best.found.request
    return run_chart(
        RunPicture(
            sign="tight" if best.found.tight else "good",
            answer=f"{_counted(best, load)}: {_usd(best.usd_for(load))} an image",
            basis=best.found.basis.kind,
            lines=(f"Cheapest for {load:,.10g} images per hour",),
            about=f"{request.family}, {request_text(request)}",
            figures=[_cheapest(offers, each) for each in advice.loads],
            bars=[
                Bar(
                    _counted(offer, load),
                    {"USD an image": offer.usd_for(load)},
                    _usd(offer.usd_for(load)),
                    duration(offer.found.image_seconds),
                )
                for offer in offers[:CARDS]
            ],
        )
    )


def _cheapest(offers: list[Offer], load: float) -> Figure:
    best = min(offers, key=lambda offer: offer.usd_for(load))
    return Figure(
        f"{load:,.10g} images/h", _usd(best.usd_for(load)), _counted(best, load, BELOW_FIGURE)
    )


def _usd(cost: float) -> str:
    # `$0.013`, `$12,345`, `$1.2e+06`: at most eight characters.
    if not 1e-4 <= cost < 1e6:
        return f"${cost:.1e}"
    return f"${cost:,.0f}" if cost >= 1000 else f"${dollars(cost)}"


def _counted(offer: Offer, load: float, room: int = BESIDE_BAR) -> str:
    # `4 RTX 4090`, `3 L40S, tight`; of a longer name the beginning.
    name = f"{offer.cards_for(load):,} {offer.name}{', tight' * offer.found.tight}"
    return wrapped(name, LEAST, room)[0].rstrip(",")


def run_chart(shown: RunPicture) -> Image.Image:
    """Draws it: an RGB picture, 1280 pixels wide and as high as it takes."""
    page = Page()
    _answer(page, shown)
    if shown.figures:
        _rule(page)
        _figures(page, shown)
    if shown.bars:
        _rule(page)
        _phases(page, shown)
    return page.finish()


def _answer(page: Page, shown: RunPicture) -> None:
    colour, indent = SIGNS[shown.sign], 0
    if shown.sign != "plain":
        indent = ANSWER + 24
        _sign(page, shown.sign, (SIDE, page.y, SIDE + ANSWER, page.y + ANSWER))
    middle, room = page.y + ANSWER / 2, WIDTH - 2 * SIDE - indent
    size = fitting(shown.answer, room - 30 - text_width(shown.basis, LEAST), ANSWER)
    page.text((SIDE + indent, middle), shown.answer, size=size, fill=colour)
    page.text((WIDTH - SIDE, middle), shown.basis, fill=FAINT, anchor="rm")
    page.y += ANSWER + 14
    for text, ink in (*((line, INK) for line in shown.lines), (shown.about, FAINT)):
        for line in wrapped(text, LEAST, WIDTH - 2 * SIDE) if text else ():
            page.text((SIDE, page.y + LINE / 2), line, fill=ink)
            page.y += LINE


def _sign(page: Page, sign: str, box: tuple[float, float, float, float]) -> None:
    left, top, right, _ = box
    size, draw = right - left, page.draw

    def at(*shares: float) -> list[tuple[float, float]]:
        points = zip(shares[::2], shares[1::2], strict=True)
        return [(left + x * size, top + y * size) for x, y in points]

    if sign == "tight":
        draw.polygon(at(0.5, 0.02, 1, 0.95, 0, 0.95), fill=WARN)
        draw.line(at(0.5, 0.35, 0.5, 0.65), fill=DARK, width=11)
        (x, y), *_ = at(0.5, 0.8)
        draw.ellipse((x - 7, y - 7, x + 7, y + 7), fill=DARK)
        return
    draw.ellipse(box, fill=SIGNS[sign])
    if sign == "good":
        draw.line(at(0.25, 0.52, 0.43, 0.7, 0.76, 0.32), fill=DARK, width=12, joint="curve")
    else:
        for line in ((0.3, 0.3, 0.7, 0.7), (0.7, 0.3, 0.3, 0.7)):
            draw.line(at(*line), fill=DARK, width=12)


def _rule(page: Page) -> None:
    page.y += 12
    page.draw.line((SIDE, page.y, WIDTH - SIDE, page.y), fill=GRID, width=3)
    page.y += 12


def _figures(page: Page, shown: RunPicture) -> None:
    width, gap = (WIDTH - 2 * SIDE) / 3, 30
    for place, figure in enumerate(shown.figures):
        left, room = SIDE + place * width, width - gap
        page.text((left, page.y + LINE / 2), figure.label, fill=FAINT)
        middle = page.y + LINE + FIGURE * 0.6
        page.text((left, middle), figure.value, size=fitting(figure.value, room, FIGURE))
        below = middle + FIGURE * 0.6 + LINE / 2
        if place == 0 and shown.limit is not None:
            _peak(page, shown, left, left + room, below)
        else:
            size = fitting(figure.below, room, LEAST)
            page.text((left, below), figure.below, size=size, fill=FAINT)
    page.y += 2 * LINE + round(1.2 * FIGURE)


def _peak(page: Page, shown: RunPicture, left: float, right: float, middle: float) -> None:
    limit = shown.limit
    scale = (right - left) / max(limit.capacity, limit.peak)
    top, bottom = middle - BAR / 2, middle + BAR / 2
    page.draw.rectangle((left, top, left + limit.capacity * scale, bottom), fill=GRID)
    colour = SIGNS["good" if shown.sign == "plain" else shown.sign]
    page.draw.rectangle((left, top, max(left + 4, left + limit.peak * scale), bottom), fill=colour)
    _mark(page, left + limit.usable * scale, middle, INK)


def _mark(page: Page, x: float, middle: float, colour: str) -> None:
    for half, fill in ((5, PAPER), (2, colour)):
        box = (x - half, middle - BAR / 2 - 5, x + half, middle + BAR / 2 + 5)
        page.draw.rectangle(box, fill=fill)


def _phases(page: Page, shown: RunPicture) -> None:
    sizes = SIZES if any(bar.value for bar in shown.bars) else 0
    names = max(NAMES, *(text_width(bar.name, LEAST) + 24 for bar in shown.bars))
    left, right = SIDE + names, WIDTH - SIDE - TIMES - sizes
    longest = max(sum(bar.parts.values()) for bar in shown.bars)
    if shown.limit is not None:
        longest = max(longest, shown.limit.usable)
    scale, top = (right - left) / (longest or 1), page.y
    for bar in shown.bars:
        middle = page.y + LINE / 2
        page.text((SIDE, middle), bar.name)
        _bar(page, bar, left, middle, scale)
        page.text((right + sizes, middle), bar.value, anchor="rm")
        size = fitting(bar.time, TIMES - 24, LEAST)
        page.text((WIDTH - SIDE, middle), bar.time, size=size, fill=FAINT, anchor="rm")
        page.y += LINE
    if shown.limit is not None:
        x = left + shown.limit.usable * scale
        for y in range(round(top), round(page.y), 14):
            page.draw.line((x, y, x, min(y + 8, page.y)), fill=INK, width=3)
    page.y += 6
    _legend(page, shown)
    page.y -= 12


def _bar(page: Page, bar: Bar, left: float, middle: float, scale: float) -> None:
    x = left
    for name, count in bar.parts.items():
        if count:
            end = x + count * scale
            # A gap tells neighbours apart whose colours do not.
            box = (x, middle - BAR / 2, max(x + 2, end - 3), middle + BAR / 2)
            page.draw.rectangle(box, fill=COLOURS[name])
            x = end


def _legend(page: Page, shown: RunPicture) -> None:
    used = {name for bar in shown.bars for name, count in bar.parts.items() if count}
    entries = [(name, colour) for name, colour in COLOURS.items() if name in used]
    if len(entries) == 1:
        entries = []
    if shown.limit is not None:
        entries.append(("limit", INK))
    x: float = SIDE
    for name, colour in entries:
        width = 44 + text_width(name, LEAST) + 30
        if x > SIDE and x + width > WIDTH - SIDE:
            x, page.y = SIDE, page.y + LINE
        middle = page.y + LINE / 2
        thin = name == "limit"
        page.draw.rectangle(
            (x + 12 * thin, middle - 15, x + (17 if thin else 30), middle + 15), fill=colour
        )
        page.text((x + 44, middle), name, fill=FAINT)
        x += width
    page.y += LINE if entries else 0


class Page:
    """Draws from top to bottom on as much height as it takes; the next line begins at `y`."""

    def __init__(self) -> None:
        from PIL import Image, ImageDraw

        self.image = Image.new("RGB", (WIDTH, 3200), PAPER)
        self.draw = ImageDraw.Draw(self.image)
        self.y = SIDE - 8

    def text(
        self,
        place: tuple[float, float],
        text: str,
        *,
        size: int = LEAST,
        fill: str = INK,
        anchor: str = "lm",
    ) -> None:
        self.draw.text(place, plain(text), fill=fill, font=font(size), anchor=anchor)

    def finish(self) -> Image.Image:
        """Cuts the picture below what was drawn last, and frames it."""
        height = min(self.image.height, round(self.y) + SIDE - 4)
        self.draw.rectangle((0, 0, WIDTH - 1, height - 1), outline=FRAME, width=3)
        return self.image.crop((0, 0, WIDTH, height))


def font(size: int) -> Any:
    """Returns PIL's own font, which is there wherever PIL is."""
    from PIL import ImageFont

    return ImageFont.load_default(size)


def text_width(text: str, size: int) -> float:
    return font(size).getlength(text)


def plain(text: str) -> str:
    """Keeps what the font can draw: accents and line breaks go, the rest becomes "?"."""
    decomposed = unicodedata.normalize("NFKD", " ".join(text.split()))
    letters = (letter for letter in decomposed if not unicodedata.combining(letter))
    return "".join(
        letter if letter.isascii() and letter.isprintable() else "?" for letter in letters
    )


def wrapped(text: str, size: int, width: float) -> list[str]:
    """Folds a text into lines of at most `width` pixels; a word that is longer is broken."""
    lines = [""]
    for word in plain(text).split(" "):
        longer = f"{lines[-1]} {word}".strip()
        if text_width(longer, size) <= width:
            lines[-1] = longer
            continue
        if lines[-1]:
            lines.append("")
        for letter in word:
            if lines[-1] and text_width(lines[-1] + letter, size) > width:
                lines.append("")
            lines[-1] += letter
    return lines


def fitting(text: str, room: float, most: int) -> int:
    """Finds the largest font size of a line that has so many pixels; `LEAST` at the least."""
    return next((size for size in range(most, LEAST, -2) if text_width(text, size) <= room), LEAST)
