"""The card that an estimate is for: the one that ComfyUI runs on, or any of the list."""

from __future__ import annotations

from dataclasses import dataclass

import comfy.model_management

from ...errors import SettingError
from ...planning.cards import Card, find_card, known_cards, with_memory
from .card_choices import THIS_CARD
from .precision import card_facts

DEFAULT_CARD = "L40S"


@dataclass(frozen=True)
class ChosenCard:
    """A card, and what there is to say of the choice; empty where it was named."""

    card: Card
    note: str = ""


def card_of(name: str) -> ChosenCard:
    """The card of a choice.

    Raises:
        SettingError: no card of the list has that name; the message suggests the nearest.
    """
    cards = known_cards()
    if name != THIS_CARD:
        return ChosenCard(find_card(name, cards))
    device = comfy.model_management.get_torch_device()
    facts = card_facts(device)
    if facts is None:
        where = "the processor" if device.type == "cpu" else f"{device.type}, not an NVIDIA card"
        note = f"ComfyUI runs on {where} here: this is about one {DEFAULT_CARD}."
        return ChosenCard(find_card(DEFAULT_CARD, cards), note)
    try:
        listed = find_card(facts.name, cards)
    except SettingError as error:
        raise SettingError(
            f"this machine's {facts.name} is not in the list of cards: choose one that is like it "
            f"from {', '.join(cards)}."
        ) from error
    return ChosenCard(with_memory(listed, facts.total_bytes))
