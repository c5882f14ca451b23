"""LoRAs on a ComfyUI MODEL: merged into its weights, or as a bypass around them."""

from __future__ import annotations

from ....errors import SettingError

MODES = ("merge", "bypass")
OLDER_NAMES = {"beside": "bypass"}


def mode_of(name: str) -> str:
    """The mode of a name, which may be an older one.

    Raises:
        SettingError: the name is unknown.
    """
    mode = OLDER_NAMES.get(name, name)
    if mode not in MODES:
        raise SettingError(f"how is {name!r}: a LoRA is applied by {' or '.join(MODES)}.")
    return mode
