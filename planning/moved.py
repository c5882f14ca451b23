"""What stays on a card that does not hold all, while the host moves the rest to it and off it."""

from __future__ import annotations

from dataclasses import replace

from .estimate import Phase
from .memory import format_gib
from .wish import Wish

# The block that computes, and the one whose weights are on their way.
BLOCKS_ON_CARD = 2


def least_weights(wish: Wish, weights: int) -> int:
    """Of a transformer's weights, what is on the card at least while a block computes."""
    return min(weights, BLOCKS_ON_CARD * -(-weights // wish.transformer.blocks))


def within(phase: Phase, usable: int) -> Phase:
    """A phase for which the host moves off the card what has no room beside the part that works,
    and of that part what has none either.
    """
    over, resident, note = phase.card_bytes - usable, dict(phase.resident), phase.note
    if over <= 0:
        return phase
    for name in ("transformer", "text encoder"):
        leaves = min(over, resident.get(name, 0))
        if leaves:
            resident[name], over = resident[name] - leaves, over - leaves
            note += f"; {format_gib(leaves)} of the {name} leave the card for it"
    moved = min(phase.weights, over)
    if moved:
        note += f"; {format_gib(moved)} of its weights are moved to the card as it computes"
    return replace(
        phase,
        weights=phase.weights - moved,
        resident={name: count for name, count in resident.items() if count},
        note=note,
    )
