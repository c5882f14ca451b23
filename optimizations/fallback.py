"""Why the host's own code runs in place of this package's."""

from __future__ import annotations

import logging
from dataclasses import dataclass

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Fallback:
    """One reason, wherever it was found.

    Attributes:
        reason: One clause.
        final: Whether it stays so for this model on this card, so that nothing is tried again.
    """

    reason: str
    final: bool = False

    def __str__(self) -> str:
        return self.reason

    def log(self, instead: str) -> None:
        """Logs it, and what runs `instead`."""
        logger.warning("Qwen-Image L40S: %s: %s.", self.reason, instead)
