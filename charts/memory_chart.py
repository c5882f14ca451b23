"""An estimate as a picture: whether it fits, how long an image takes and what it costs, and a bar
for each phase against the card's memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..planning.phases import Phase
from ..planning.times import PROCESSOR
from .figures import duration, tenths, usd
from .notes import price_of
from .run_chart import HOST_MEMORY, Bar, Figure, Limit, RunPicture, run_chart
from .words import (
    BOUND,
    PHASE_NAMES,
    WORKING,
    answer,
    fullest,
    heading,
    moves,
    parts_of,
    remedy,
    rests_on,
    saved_otherwise,
    usable_bytes,
)

if TYPE_CHECKING:
    from PIL import Image

    from ..planning.estimate import Estimate


def memory_chart(estimate: Estimate) -> Image.Image:
    """Draws an estimate, with in amber what has no room on the card and waits in host memory."""
    peak, usable = fullest(estimate).card_bytes, usable_bytes(estimate.card)
    figures = [Figure("card memory", f"{tenths(peak)} of {tenths(usable)} GiB")]
    if estimate.image_seconds:
        step, cost = duration(estimate.step_seconds), estimate.usd_per_image
        figures.append(Figure("an image", duration(estimate.image_seconds), f"{step} a step"))
        if cost:
            figures.append(Figure("cost of an image", usd(cost), f"at {price_of(estimate)}"))
        else:
            figures.append(Figure("cost of an image", "unknown", "no price known"))
    return run_chart(
        RunPicture(
            sign="good" if estimate.fits and not estimate.tight else "tight",
            answer=answer(estimate),
            basis=rests_on(estimate),
            lines=[
                estimate.card_note,
                f"A step is {BOUND}." if estimate.bound == PROCESSOR else "",
                "" if estimate.fits else f"{moves(estimate)}.",
                remedy(estimate),
                saved_otherwise(estimate),
            ],
            about=heading(estimate),
            figures=figures,
            bars=[_bar(estimate, name, phase) for name, phase in estimate.phases.items()],
            limit=Limit(peak, usable, estimate.card.memory_bytes),
        )
    )


def _bar(estimate: Estimate, name: str, phase: Phase) -> Bar:
    # What would have to be there too for all to stay.
    beyond = max(0, estimate.option.needs.get(name, 0) - phase.card_bytes)
    held = parts_of(phase)
    parts = {part: held.pop(part) for part in ("transformer", "text encoder", WORKING)}
    time = "" if phase.seconds is None else duration(phase.seconds)
    return Bar(
        PHASE_NAMES[name],
        {**parts, "other": sum(held.values()), HOST_MEMORY: beyond},
        f"{tenths(phase.card_bytes)} GiB",
        time,
    )
