"""Finds the card of an estimate: the one that ComfyUI runs on, or any of the list."""

from __future__ import annotations

from dataclasses import replace

import comfy.model_management
import torch

from ....errors import SettingError
from ....loaders.header import State, fingerprint
from ....machine.card import power_limit
from ....machine.store import CALIBRATION, cache_folder, known_cards, own_cards_path
from ....planning.card_list import BUNDLED
from ....planning.cards import DEFAULT_CARD, Card, card_by_driver, find_card
from ..load.plan import card_facts

THIS_CARD = "this card"


def card_choices() -> list[str]:
    """Lists the machine's own first, then those of the list; of the bundled one where the user's is
    damaged, which is an error when a node runs.
    """
    try:
        return [THIS_CARD, *known_cards()]
    except SettingError:
        return [THIS_CARD, *known_cards(BUNDLED)]


def own_files_changed_at() -> State:
    """Changes with what `qwen-l40s bench --calibrate` measured and with the user's own list."""
    return fingerprint((cache_folder() / CALIBRATION, own_cards_path()))


def card_of(name: str = THIS_CARD, device: torch.device | None = None) -> tuple[Card, str]:
    """Finds the card of a choice, and what there is to say of it; empty where it was named."""
    if not isinstance(name, str):
        raise SettingError(
            f"the GPU is {name!r}, which is not a name: choose {THIS_CARD!r}, or one of the list, "
            f"such as {DEFAULT_CARD!r}."
        )
    cards = known_cards()
    if name != THIS_CARD:
        return find_card(name, cards, own_cards_path()), ""
    device = device or comfy.model_management.get_torch_device()
    facts = card_facts(device)
    if facts is None:
        where = "the CPU" if device.type == "cpu" else f"{device.type}, not an NVIDIA GPU"
        note = f"ComfyUI runs on {where} here, so this estimate is for one {DEFAULT_CARD}."
        return find_card(DEFAULT_CARD, cards), note
    return card_by_driver(replace(facts, limit_watts=power_limit(facts.name)), cards), ""
