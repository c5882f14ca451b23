"""An estimate as a picture: whether it fits, how long an image takes and what it costs, and a bar
for each phase against the card's memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..planning.phases import Phase
from .figures import duration, tenths, tenths_between, usd
from .run_chart import Bar, Figure, Limit, RunPicture, run_chart
from .words import (
    PHASE_NAMES,
    WORKING,
    answer,
    next_step,
    parts_of,
    request_line,
    rests_on,
    usable_bytes,
)

if TYPE_CHECKING:
    from PIL import Image

    from ..planning.estimate import Estimate


def memory_chart(estimate: Estimate) -> Image.Image:
    """Draws an estimate, with in red what would have to stay on the card and has no room there."""
    peak, usable = estimate.option.peak_bytes, usable_bytes(estimate)
    room = f"{tenths_between(peak, usable)} GiB {'to spare' if estimate.fits else 'too much'}"
    figures = [Figure("Card memory", f"{tenths(peak)} of {tenths(usable)} GiB")]
    if estimate.image_seconds:
        cost = estimate.usd_per_image
        figures += [
            Figure("An image", duration(estimate.image_seconds)),
            Figure("A step", duration(estimate.step_seconds)),
            Figure("Cost", f"{usd(cost)} an image" if cost else "no price known"),
        ]
    says = [f"{room} on {estimate.card.name}."]
    if estimate.tight or not estimate.fits:
        says.append(next_step(estimate))
    return run_chart(
        RunPicture(
            "bad" if not estimate.fits else "tight" if estimate.tight else "good",
            answer(estimate),
            says,
            [request_line(estimate), estimate.card_note],
            [rests_on(estimate)],
            figures,
            [_bar(estimate, name, phase) for name, phase in estimate.phases.items()],
            Limit(peak, usable, estimate.card.memory_bytes),
        )
    )


def _bar(estimate: Estimate, name: str, phase: Phase) -> Bar:
    # What would have to stay there too.
    beyond = max(0, estimate.option.needs.get(name, 0) - phase.card_bytes)
    held = parts_of(phase)
    parts = {part: held.pop(part) for part in ("transformer", "text encoder", WORKING)}
    time = "" if phase.seconds is None else duration(phase.seconds)
    return Bar(
        PHASE_NAMES[name],
        {**parts, "other": sum(held.values()), "beyond the card": beyond},
        tenths(phase.card_bytes),
        time,
    )
