"""How our decoding node takes a wish's images through the VAE in what is free on the card."""

from __future__ import annotations

from collections.abc import Callable

from ..errors import UnavailableError
from .memory import GIB, format_gib
from .vae import VaePlan, plan_decode
from .vae_steps import PIXELS_PER_LATENT
from .wish import Wish

# Images that it decodes together at most (hosts/comfyui/planned_vae.py).
MOST_TOGETHER = 16
# What it asks ComfyUI to free at first where too little is (hosts/comfyui/vae_room.py).
LEAST_ROOM = int(1.5 * GIB)


def decode_plan(wish: Wish, free: int | None, others: int = 0) -> VaePlan:
    """How our decoding node decodes the wish's images in `free` bytes.

    As the node, it asks the host to move other models off the card only where nothing exact fits
    beside them, and then for the least room that does.

    Args:
        free: bytes for what comes and goes; None for any number.
        others: bytes of other models' weights that could leave the card.

    Raises:
        UnavailableError: it does not fit `free` and `others` together.
    """
    together = 1 if wish.tiles == 1 else min(wish.batch * wish.frames, MOST_TOGETHER)

    def planner(budget: int | None) -> VaePlan:
        return plan_decode(
            wish.vae,
            wish.height // PIXELS_PER_LATENT,
            wish.width // PIXELS_PER_LATENT,
            batch=together,
            budget=None if wish.tiles == 1 else budget,
            tiles=wish.tiles,
            image_on_card=False,
        )

    if wish.tiles != 1:
        return planner(None) if free is None else _least_room(planner, max(0, free), others)
    whole = planner(None)
    most = None if free is None else max(0, free) + others
    if most is not None and whole.peak_bytes > most:
        raise UnavailableError(
            f"to decode {wish.width}x{wish.height} whole takes {format_gib(whole.peak_bytes)} and "
            f"the card has {format_gib(most)} with all other models off it: set tiles to 0, for as "
            "few as fit, or choose a smaller size."
        )
    return whole


def _least_room(planner: Callable[[int | None], VaePlan], free: int, others: int) -> VaePlan:
    most, room, found = free + others, LEAST_ROOM, _within(planner, free)
    if found and found.exact:
        return found
    while room < most:
        larger = _within(planner, room) if room > free else None
        if larger and larger.exact:
            return larger
        room *= 2
    last = _within(planner, most)
    return last if last and last.exact else found or planner(most)


def _within(planner: Callable[[int | None], VaePlan], budget: int) -> VaePlan | None:
    try:
        return planner(budget)
    except UnavailableError:
        return None
