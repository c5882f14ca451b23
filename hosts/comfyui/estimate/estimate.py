"""Estimates for what a node was asked."""

from __future__ import annotations

from dataclasses import replace

from ....machine.store import load_calibration
from ....planning.estimate import Estimate, estimate
from .cards import ChosenCard
from .request import WiredRequest


def estimate_on(chosen: ChosenCard, wired: WiredRequest, usd_per_hour: float | None) -> Estimate:
    """The estimate of a request on a card, with what was measured on one of its name.

    Raises:
        SettingError: the price is negative or no number.
        UnavailableError: nothing that the request allows runs on the card.
    """
    card = chosen.card
    calibration = load_calibration(card)
    found = estimate(wired.request, card, calibration=calibration, usd_per_hour=usd_per_hour)
    return replace(found, notes=(*found.notes, *wired.notes), card_note=chosen.note)
