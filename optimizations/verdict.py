"""Why something of this package does not run, and what runs in its place."""

from __future__ import annotations

import logging
from dataclasses import dataclass

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Verdict:
    """One reason, wherever it was found.

    Attributes:
        fact: One clause.
        remedy: What would change it; empty where nothing is known.
        final: Whether it stays so for this model on this card, so that nothing is tried again.
    """

    fact: str
    remedy: str = ""
    final: bool = False

    def __str__(self) -> str:
        return f"{self.fact}: {self.remedy}" if self.remedy else self.fact

    def log(self, instead: str) -> None:
        """Logs it, and what runs `instead`."""
        logger.warning("Qwen-Image L40S: %s: %s.", self, instead)
