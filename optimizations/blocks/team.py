"""Which cards share a forward pass, in which way, and whether that gains anything."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..attention import Attention, AttentionRequest, ChosenAttention
from ..modulation import Entry
from .block import BlockExecutor, Step
from .self_check import FirstBlockCheck
from .split import KEYS, ROWS, Card, CopyLane, Split, shares_of

if TYPE_CHECKING:
    from .graphs import PassMemory
    from .host import HostPass, PreparedModel

EXCHANGED = {KEYS: "keys and values", ROWS: "normalized rows"}
LEAST_GAIN = 1.25  # below which one card is left the work
TRIED = 3  # blocks, to find out
FAST_LINK = 100.0  # GB/s, from which on keys and values cost less than making them
Given = tuple[torch.Tensor, torch.Tensor, Step, Entry]  # text, image, step, modulation


class CardAttention:
    """What was chosen for a card's attention in one pass; asked for once."""

    def __init__(self, attention: ChosenAttention) -> None:
        self._attention = attention
        self._chosen: Attention | None = None

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """As `block.Attend`, with fewer queries than keys."""
        return self._choice(k, mask)(q, k, v, mask)

    def form(self, k: torch.Tensor, mask: torch.Tensor | None) -> str | None:
        """The form of 8-bit attention, as `BlockExecutor` takes it."""
        chosen = self._choice(k, mask)
        return chosen.name if chosen.quantizes else None

    def _choice(self, k: torch.Tensor, mask: torch.Tensor | None) -> Attention:
        if self._chosen is None:
            self._chosen = self._attention.choose(AttentionRequest.of(k, mask))
        return self._chosen


class SplitPlan(NamedTuple):
    """How a pass is split.

    Attributes:
        exchange: `KEYS` or `ROWS`.
        images: Image tokens of an item for each card; the first has the text as well.
    """

    exchange: str
    images: tuple[int, ...]


class Member(NamedTuple):
    """What a card brings to a pass.

    Attributes:
        host: Its pass; the first is the one that the host has called.
        prepared: What is known of its model.
        memory: That no other pass uses meanwhile.
        weights: Where they are; None where they may move.
    """

    host: HostPass
    prepared: PreparedModel
    memory: PassMemory
    weights: Hashable | None

    def refusal(self) -> str:
        """Why it takes no share, in one clause; empty where it does."""
        if self.weights is None:
            return f"{self.host.device}: {self.host.layers.moving}"
        found = next(filter(None, self.prepared.unsupported), None)
        return "" if found is None else f"{self.host.device}: some blocks do not run fused: {found}"

    def card(self, attention: ChosenAttention) -> Card:
        """What computes its share."""
        own, workspace = CardAttention(attention), self.memory.workspace
        known = self.prepared.known(self.weights)
        ops, layers = self.prepared.ops, self.host.layers
        executor = BlockExecutor(layers, ops, own.attend, workspace, known, own.form)
        return Card(executor, workspace, self.host.blocks, self.host.device)


@dataclass
class SplitFigures:
    """What one run had of several cards.

    Attributes:
        check: Of a block on all cards against the host's own.
        plan: Of the last pass that was split.
        passes: That were.
        blocks, seconds: What the processor issued of them, and took for it.
        gain: How many times as fast as one card they are; None where nobody measured.
        refusal: Why the passes that come run on one card.
        reasons: Why others did, with how many.
    """

    check: FirstBlockCheck
    plan: SplitPlan | None = None
    passes: int = 0
    blocks: int = 0
    seconds: float = 0.0
    gain: float | None = None
    refusal: str = ""
    reasons: dict[str, int] = field(default_factory=dict)

    def refuse(self, reason: str, final: bool = False) -> None:
        """Counts a pass on one card, and the rest of the run where that is final."""
        self.reasons[reason] = self.reasons.get(reason, 0) + 1
        if final:
            self.refusal = reason

    def lines(self) -> list[str]:
        """Lines about the run."""
        lines = []
        if self.passes:
            rows = " + ".join(map(str, self.plan.images))
            host = 1e6 * self.seconds / max(self.blocks, 1)
            lines.append(
                f"cards: {len(self.plan.images)} share {self.passes} forward passes, image tokens "
                f"{rows}; they exchange {EXCHANGED[self.plan.exchange]}; the processor takes "
                f"{host:.0f} us a block"
            )
            if self.gain is not None:
                lines[0] += f"; {self.gain:.2f} times as fast as one, measured"
        return lines + [
            f"cards: one in {count} forward passes: {reason}"
            for reason, count in self.reasons.items()
        ]


class Team:
    """The cards of one pass.

    Args:
        members: The first is the one that the host has called.
        lanes: Of each pair, from the one to the other.
        gbps: What the slowest of them reaches.
        gains: What was measured, by shape; is added to.

    Attributes:
        refusal: Why they cannot share it, in one clause; empty where they can.
    """

    def __init__(
        self,
        members: Sequence[Member],
        lanes: dict[tuple[int, int], CopyLane],
        gbps: float,
        gains: dict[Hashable, float],
    ) -> None:
        self._members, self._lanes, self._gbps, self._gains = members, lanes, gbps, gains
        self.refusal = next(filter(None, (member.refusal() for member in members)), "")

    def plan(self, text: torch.Tensor, step: Step, attention: ChosenAttention) -> SplitPlan | str:
        """How a pass is split, or why it is not."""
        count, tokens = len(self._members), step.tokens
        rows = tokens.joint // count
        first = rows - tokens.text
        if first < 1:
            return "the text has more rows than a card's share"
        rest = tokens.image - first
        images = [
            first,
            *(rest * (i + 1) // (count - 1) - rest * i // (count - 1) for i in range(count - 1)),
        ]
        return SplitPlan(ROWS if self._gbps < FAST_LINK else KEYS, tuple(images))

    def split(self, plan: SplitPlan, step: Step, attention: ChosenAttention) -> Split:
        """The pass itself."""
        cards = [member.card(attention) for member in self._members]
        shares = shares_of(step.tokens, plan.images, plan.exchange)
        return Split(cards, shares, self._lanes, self._members[0].host.additions)

    def gain(self, executor: BlockExecutor, split: Split, given: Given) -> float | None:
        """How many times as fast as one card they are, by a few blocks both ways; once for a shape.

        Args:
            executor: Of one card alone.
            given: As `Split.run` takes it.
        """
        text, image, step, entry = given
        host = self._members[0].host
        if host.device.type != "cuda":
            return None
        key = step.tokens, text.dtype, len(self._members)
        if key not in self._gains:
            blocks = host.blocks[:TRIED]
            for _ in range(2):  # the first compiles
                x = torch.cat([it.reshape(-1, it.shape[-1]) for it in (text, image)])
                alone = _timed(executor.run_all, blocks, x, step, entry)
                split.run(*given, 0, len(blocks))
            self._gains[key] = alone / split.milliseconds()
        return self._gains[key]

    def release(self) -> None:
        """Frees what other cards than the first keep for passes."""
        for member in self._members[1:]:
            member.memory.release()


def _timed(work: Callable[..., object], *given: Any) -> float:
    """Milliseconds of the current card."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work(*given)
    end.record()
    end.synchronize()
    return start.elapsed_time(end)
