"""A stretch of loads in which one of two offers is the cheaper one."""

from __future__ import annotations

from dataclasses import dataclass

from .advise import Offer


@dataclass(frozen=True)
class Stretch:
    """Loads above `low` up to and with `high`, in images an hour, at which one offer is cheaper.

    Attributes:
        high: infinite where it has no end.
        cheaper: None where both cost the same.
    """

    low: float
    high: float
    cheaper: Offer | None
