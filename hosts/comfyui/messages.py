"""What loaders report."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ...spec.formats import format_gib


@dataclass(frozen=True)
class LoadReport:
    """One part as it was loaded.

    Args:
        what: the part in words, such as "text encoder".
        path: what it was loaded from.
        family: what its header says it is.
        precision: how the weights are stored now, such as "bf16".
        reason: why in that precision.
        bytes: of all weights as they are stored now, less those that wait off the card.
        why: the same in a few words.
        where: in a few words what waits elsewhere; empty where nothing does.
        notes: sentences about what was converted, refused or left out.
        hint: the one of them that the node itself shows.
    """

    what: str
    path: Path
    family: str
    precision: str
    reason: str
    bytes: int
    why: str
    where: str = ""
    notes: tuple[str, ...] = ()
    hint: str = ""

    def text(self) -> str:
        """Returns a few lines for a node, a log or a terminal."""
        lines = [
            f"{self.what}: {self.family} from {self.path}",
            f"{self.precision}, {format_gib(self.bytes)} of weights ({self.reason})",
            *self.notes,
        ]
        return "\n".join(lines)

    def summary(self) -> str:
        """Returns what was chosen and why, in at most three lines for the node."""
        return "\n".join(filter(None, (self.chosen, self.why, self.hint)))

    @property
    def chosen(self) -> str:
        """`bf16, 25.4 GiB, modulation off card (12.7 GiB in host memory)`."""
        return ", ".join(filter(None, (self.precision, format_gib(self.bytes), self.where)))
