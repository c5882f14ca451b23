"""Several cards in words and as JSON: one image sooner, or many images."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from ..planning.advise import together
from ..planning.phases import figure, gib
from ..split_cost import KEYS, LEAST_GAIN, ROWS
from .figures import between, duration, many, significant, tenths

if TYPE_CHECKING:
    from ..planning.advise import Together
    from ..planning.estimate import Estimate

EXCHANGED = {ROWS: "normalized rows", KEYS: "keys and values"}


def cards_answer(
    found: Estimate, count: int, link: float | None = None
) -> tuple[Iterable[str], dict[str, Any]]:
    """(sentences about several cards, what of them belongs into the estimate's JSON object).

    Args:
        count, link: as of `together`.

    Raises:
        SettingError: the link carries nothing.
    """
    several = together(found, count, link)
    if several is None:
        return (), {"cards": None}
    return cards_lines(several), {"cards": cards_json(several)}


def cards_lines(found: Together) -> Iterator[str]:
    """What several cards do for one image and for many, and what that rests on; all predicted."""
    yield f"One image on {found.cards} cards: {'; '.join(_one_image(found))}."
    servers, one = (between(each, significant) for each in found.per_hour)
    yield (
        f"Many images: start a server for each card, which makes {servers} an hour; one image "
        f"after the other on all cards makes {one}."
    )
    if found.each > 1:
        low, likely, high = (f"{each / 1e9:.3g}" for each in found.links)
        carries = f"{likely} GB/s each way, as given."
        if found.assumed:
            carries = (
                f"assumed to carry {low} to {high} GB/s each way, likely {likely}, as PCIe does "
                "without NVLink. `qwen-l40s doctor` measures yours; give it with --link."
            )
        yield f"Link between cards: {carries}"
    if found.splits or found.prompts > 1:
        yield (
            f"Memory: at most {tenths(found.first_bytes)} GiB on the first card, "
            f"{tenths(found.other_bytes)} on each other one: all hold the whole transformer."
        )


def _one_image(found: Together) -> Iterator[str]:
    gain = between(found.gain, "{:.2f}".format)
    if found.splits or found.prompts > 1:
        faster = between(found.faster, "{:.2f}".format)
        yield f"{duration(found.together)}, {faster} times as fast as on one (predicted)"
    if found.prompts > 1:
        yield "ComfyUI's MultiGPU CFG Split computes both prompts at once"
    if idle := found.cards % found.prompts:
        yield f"{many(idle, 'card')} has nothing to do"
    if found.splits:
        exchanged = EXCHANGED[found.likely.best.name]
        yield f"{found.each} cards split the rows of a pass and exchange {exchanged}"
    elif found.refusal:
        yield f"one card computes a pass, as {found.refusal}"
    elif found.each > 1:
        yield (
            f"one card computes a pass, as {found.each} are predicted to be {gain} times as fast, "
            f"and less than {LEAST_GAIN} does not pay"
        )


def cards_json(found: Together) -> dict[str, Any]:
    """Figures in the unit of their name, from the fastest to the slowest; all predicted."""
    servers, one = found.per_hour
    best = found.likely.best if found.splits else None
    return {
        "count": found.cards,
        "link_gbps": [figure(each / 1e9) for each in found.links],
        "link_assumed": found.assumed,
        "prompts_at_once": found.prompts,
        "exchange": best and best.name,
        "image_rows": best and list(best.image_rows),
        "pass_gain": [figure(each) for each in found.gain],
        "image_seconds": [figure(each) for each in found.together],
        "times_as_fast": [figure(each) for each in found.faster],
        "images_per_hour": {
            "one_image_at_a_time": [figure(each) for each in one],
            "servers": [figure(each) for each in servers],
        },
        "many_images": "servers",
        "one_image": "cards" if found.faster.high > 1 else "one card",
        "first_card_gib": gib(found.first_bytes),
        "other_card_gib": gib(found.other_bytes),
        "basis": "predicted",
    }
