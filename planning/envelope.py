"""What the runs that were measured cover, and what times rest on beyond it."""

from __future__ import annotations

from collections.abc import Iterator

from .placement import ON_CARD
from .rates import Basis
from .setting import Setting
from .wish import Wish

# Of the matrix in `measured.json`: sides in pixels, and images in one forward pass.
MOST_SIDE, MOST_ITEMS = 2048, 2


def basis_within(basis: Basis, wish: Wish, setting: Setting) -> Basis:
    """What the times of a wish in a setting rest on.

    Args:
        basis: of the card's rates.
        setting: what the plan has settled.
    """
    if basis.kind != "measured" or setting.precision in basis.left_out:
        return Basis("predicted", basis.text, basis.origin, basis.left_out)
    beyond = list(not_measured(wish, setting))
    if not beyond:
        return basis
    *others, last = beyond
    named = f"{', '.join(others)} or {last}" if others else last
    text = f"predicted from rates {basis.origin}: no run there had {named}"
    return Basis("predicted", text, basis.origin, basis.left_out)


def not_measured(wish: Wish, setting: Setting) -> Iterator[str]:
    """What of a wish no measured run had, each as a noun."""
    if not setting.resident:
        yield "weights that leave the card"
    if setting.weight_only:
        yield f"{setting.precision} weights that are computed in bf16"
    if setting.text_encoder_place != ON_CARD:
        yield "a text encoder off the card"
    if wish.loras.count and wish.loras.mode == "beside":
        yield "LoRAs beside the weights"
    if wish.controlnet_bytes:
        yield "a ControlNet"
    if wish.member.layers:
        yield "layers"
    if max(wish.width, wish.height) > MOST_SIDE:
        yield f"a side above {MOST_SIDE} pixels"
    if wish.items > MOST_ITEMS:
        yield f"more than {MOST_ITEMS} images in a pass"
    if wish.transformer != wish.member.transformer:
        yield "a transformer of this shape"
