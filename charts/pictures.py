"""An estimate, and what an image costs on rented cards, as pictures."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..planning.phases import Phase
from ..planning.times import PROCESSOR
from .figures import dollars, duration, tenths, usd
from .notes import price_of
from .run_chart import HOST_MEMORY, LEAST, Bar, Figure, Limit, RunPicture, run_chart, wrapped
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
    request_text,
    rests_on,
    saved_otherwise,
    usable_bytes,
)

if TYPE_CHECKING:
    from PIL import Image

    from ..planning.advise import Advice, Offer
    from ..planning.estimate import Estimate

CARDS = 6  # that have a bar
NAME, THIRD = 560, 360  # pixels of a name beside a bar, and below a figure


def memory_chart(estimate: Estimate) -> Image.Image:
    """Draws whether an estimate fits, how long an image takes and what it costs, and a bar for each
    phase: amber is what has no room on the card and waits in host memory.
    """
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
    cost = _usd(best.usd_for(load))
    return Figure(f"{load:,.10g} images/h", cost, _counted(best, load, THIRD))


def _usd(cost: float) -> str:
    # `$0.013`, `$12,345`, `$1.2e+06`: at most eight characters.
    if not 1e-4 <= cost < 1e6:
        return f"${cost:.1e}"
    return f"${cost:,.0f}" if cost >= 1000 else f"${dollars(cost)}"


def _counted(offer: Offer, load: float, room: int = NAME) -> str:
    # `4 RTX 4090`, `3 L40S, tight`; of a longer name the beginning.
    name = f"{offer.cards_for(load):,} {offer.name}{', tight' * offer.found.tight}"
    return wrapped(name, LEAST, room)[0].rstrip(",")
