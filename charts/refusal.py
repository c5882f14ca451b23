"""What an estimate says of a run that stops on its card: that it does not fit, and what would."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..planning.estimate import DOES_NOT_FIT
from .figures import folded
from .run_chart import RunPicture, run_chart
from .words import request_text

if TYPE_CHECKING:
    from PIL import Image

    from ..planning.cards import Card
    from ..planning.request import RunRequest

ANSWER = "Does not fit"


@dataclass(frozen=True)
class Refusal:
    """A request that a card does not run, even where weights move.

    Attributes:
        reason: The planner's sentence, with the remedy.
        card_note: As of `Estimate`.
    """

    card: Card
    request: RunRequest
    reason: str
    card_note: str = ""

    @property
    def summary(self) -> str:
        """The answer, then the card and the request."""
        about = f"{self.card_note} {self._about}".strip()
        return f"{ANSWER}: {self.reason}\n{about}"

    @property
    def text(self) -> str:
        """The same in lines that a terminal shows whole."""
        return "\n".join(line for text in self.summary.splitlines() for line in folded(text, ""))

    def as_dict(self) -> dict[str, Any]:
        """For JSON: of an estimate's keys, those that have an answer."""
        return {
            "card": self.card.name,
            "family": self.request.family,
            "fits": False,
            "verdict": DOES_NOT_FIT,
            "reason": self.reason,
            "notes": [*filter(None, [self.card_note])],
        }

    def chart(self) -> Image.Image:
        """The answer as a picture."""
        lines = [self.card_note, self.reason]
        return run_chart(RunPicture("bad", ANSWER, "predicted", lines, self._about))

    @property
    def _about(self) -> str:
        return f"{self.card.name}: {self.request.family}, {request_text(self.request)}"
