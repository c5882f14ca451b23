"""What an image costs on rented cards, as a picture: the cheapest at three loads, and a bar for
each of the cheapest at the load that was asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .canvas import wrapped
from .figures import dollars, duration
from .run_chart import LEAST, Bar, Figure, RunPicture, run_chart
from .words import request_text

if TYPE_CHECKING:
    from PIL import Image

    from ..planning.advise import Advice, Offer

CARDS = 6  # that have a bar
NAME, THIRD = 560, 360  # pixels of a name beside a bar, and below a figure


def cost_chart(advice: Advice) -> Image.Image:
    """Draws at least one card that fits and costs something: RGB, 1280 pixels wide and as high as
    it takes.
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
    """`$0.013`, `$12,345`, `$1.2e+06`: at most eight characters."""
    if not 1e-4 <= cost < 1e6:
        return f"${cost:.1e}"
    return f"${cost:,.0f}" if cost >= 1000 else f"${dollars(cost)}"


def _counted(offer: Offer, load: float, room: int = NAME) -> str:
    """`4 RTX 4090`, `3 L40S, tight`; of a longer name the beginning."""
    name = f"{offer.cards_for(load):,} {offer.name}{', tight' * offer.found.tight}"
    return wrapped(name, LEAST, room)[0].rstrip(",")
