"""An estimate's memory as a picture: a stacked bar for each phase against the card's capacity."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from ..planning.phases import Phase
from ..spec import GIB, format_gib
from .canvas import (
    BAD,
    FAINT,
    GOOD,
    GRID,
    INK,
    MARGIN,
    SMALL,
    TEXT,
    TITLE,
    WIDTH,
    Page,
    dashed,
    ink_on,
    text_width,
    ticks,
)
from .figures import duration
from .words import PHASE_NAMES, basis_text, heading, usable_bytes, verdict

if TYPE_CHECKING:
    from PIL import Image

    from ..planning.estimate import Estimate

WORKING = {
    "weights of the part that works": "#0b7a5b",
    "activations": "#d9822b",
    "workspace": "#e3b505",
    "context": "#9aa5b1",
}
# Parts that are there while another works; names that are not here take the colours left over.
RESIDENT = {
    "transformer": "#3d6fb6",
    "text encoder": "#8a4f9e",
    "VAE": "#00a3b4",
    "modulation table": "#8d6e63",
    "ControlNet": "#5c6b2e",
    "LoRAs": "#1d3557",
}
OTHERS = ("#9db4d6", "#7e9d3c", "#455a64", "#b59ad0")
BEYOND = "does not stay on the card"
LABELS, VALUES, TIME = 150, 250, 120  # pixels at the left and at the right of the bars
BAR, GAP = 40, 16


def memory_chart(estimate: Estimate) -> Image.Image:
    """Draws what each phase holds on the card, the card's capacity, and in red what would have to
    stay there too.

    Returns:
        An RGB picture, 1280 pixels wide and as high as it takes.
    """
    page = Page(1400)
    page.paragraph(heading(estimate), TITLE)
    page.paragraph(basis_text(estimate), SMALL, FAINT)
    page.y += 6
    page.paragraph(verdict(estimate), TEXT, GOOD if estimate.fits else BAD)
    page.y += 12
    _bars(page, estimate)
    page.y += 12
    colours = _colours(estimate.phases)
    page.legend([*colours.items(), *([] if estimate.fits else [(BEYOND, BAD)])])
    return page.finish()


def _bars(page: Page, estimate: Estimate) -> None:
    left, right = MARGIN + LABELS, WIDTH - MARGIN - VALUES
    capacity, usable = estimate.card.memory_bytes, usable_bytes(estimate)
    needed = {name: _needed(estimate, name) for name in estimate.phases}
    longest = max(capacity, *needed.values())
    scale = (right - left) / (longest * 1.02)
    top = page.y + 48
    bottom = top + len(estimate.phases) * (BAR + GAP)
    for tick in ticks(longest / GIB):
        x = left + tick * GIB * scale
        page.draw.line((x, top, x, bottom), fill=GRID, width=2)
        page.text((x, bottom + 14), f"{tick:g}", size=SMALL, fill=FAINT, anchor="mm")
    page.text((right + 24, bottom + 14), "GiB", size=SMALL, fill=FAINT)
    end = WIDTH - MARGIN
    page.text((end - TIME, top - 14), "on the card", size=SMALL, fill=FAINT, anchor="rm")
    if any(phase.seconds for phase in estimate.phases.values()):
        page.text((end, top - 14), "time", size=SMALL, fill=FAINT, anchor="rm")
    colours = _colours(estimate.phases)
    y = top + GAP // 2
    for name, phase in estimate.phases.items():
        middle = y + BAR / 2
        page.text((left - 14, middle), PHASE_NAMES[name], anchor="rm")
        _bar(page, phase, (left, y), scale, colours)
        on_card = phase.card_bytes
        if (over := needed[name] - on_card) > 0:
            _segment(page, left + on_card * scale, left + needed[name] * scale, y, BAD, over)
        page.text((end - TIME, middle), format_gib(on_card), anchor="rm")
        if phase.seconds is not None:
            page.text((end, middle), duration(phase.seconds), size=SMALL, fill=FAINT, anchor="rm")
        y += BAR + GAP
    _limits(page, top, bottom, left + usable * scale, left + capacity * scale, usable, capacity)
    page.y = bottom + 32


def _needed(estimate: Estimate, name: str) -> int:
    """What the card would hold if everything stayed there that is to."""
    return max(estimate.phases[name].card_bytes, estimate.option.needs.get(name, 0))


def _bar(
    page: Page, phase: Phase, corner: tuple[int, int], scale: float, colours: Mapping[str, str]
) -> None:
    """What a phase holds."""
    left, y = corner
    start = 0
    for name, count in _parts(phase):
        if count:
            end = start + count
            _segment(page, left + start * scale, left + end * scale, y, colours[name], count)
            start = end


def _segment(page: Page, left: float, right: float, y: int, fill: str, count: int) -> None:
    """One part of a bar, with its GiB where they have room."""
    page.draw.rectangle((round(left), y, max(round(left), round(right) - 1), y + BAR), fill=fill)
    text = f"{count / GIB:.1f}"
    if right - left > text_width(text, SMALL) + 10:
        place = ((left + right) / 2, y + BAR / 2)
        page.text(place, text, size=SMALL, fill=ink_on(fill), anchor="mm")


def _limits(
    page: Page,
    top: int,
    bottom: int,
    usable_x: float,
    capacity_x: float,
    usable: int,
    capacity: int,
) -> None:
    """The card's capacity and what may be used of it: a line each, with its name above."""
    left, right = MARGIN + LABELS, WIDTH - MARGIN - VALUES
    dashed(page.draw, capacity_x, top - 24, bottom, INK)
    dashed(page.draw, usable_x, top - 24, bottom, FAINT)
    page.label(capacity_x, top - 36, f"the card's {format_gib(capacity)}", (left, right))
    text = f"to use: {format_gib(usable)}"
    # Next to the lines, so that neither crosses it.
    before = usable_x - left > text_width(text, SMALL) + 8
    x, anchor = (usable_x - 8, "rm") if before else (capacity_x + 8, "lm")
    page.text((x, top - 14), text, size=SMALL, fill=FAINT, anchor=anchor)


def _parts(phase: Phase) -> Iterator[tuple[str, int]]:
    """(name, bytes) from left to right: what works first, then what else lies on the card."""
    counts = (phase.weights, phase.activations, phase.workspace, phase.context)
    yield from zip(WORKING, counts, strict=True)
    yield from phase.resident.items()


def _colours(phases: Mapping[str, Phase]) -> dict[str, str]:
    """A colour for every part that takes anything, as the legend lists them."""
    taken = {name for phase in phases.values() for name, count in _parts(phase) if count}
    resident = dict.fromkeys(name for phase in phases.values() for name in phase.resident)
    others = (name for name in resident if name not in RESIDENT)
    left_over = {name: OTHERS[place % len(OTHERS)] for place, name in enumerate(others)}
    colours = {**WORKING, **RESIDENT, **left_over}
    return {name: colour for name, colour in colours.items() if name in taken}
