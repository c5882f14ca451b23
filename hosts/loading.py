"""Decides precision and place of a transformer's weights before they are read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from ..charts.text import few_words, precision_reason, reasons, weight_only
from ..errors import SettingError, UnavailableError
from ..planning.bytes import Sizes, TransformerBytes, weight_bytes
from ..planning.plan import LEAST_SIDE, PlanOption, check_tensor_cores, plan
from ..planning.request import AS_STORED, PRECISIONS, Parts, RunRequest
from ..spec.formats import QUANTIZED, CardFacts
from ..spec.transformer import OFF_CARD, ON_CARD, PLACES, TransformerShape

ONE_MODULATION = "modulation: stays in VRAM, because all blocks of this model share one"
LOADER_PRECISIONS = (*PRECISIONS, AS_STORED)


@dataclass(frozen=True)
class LoadDecision:
    precision: str  # of a transformer a key of `BYTES_PER_WEIGHT`
    reason: str  # why in that precision
    why: str  # in a few words, and how the part lies in memory
    # Of a transformer alone.
    off_card: bool = False  # whether the modulation waits in system RAM
    place_reason: str = ""  # why there; empty where there is nothing to say
    option: PlanOption | None = None  # of the plan that it follows; None without an NVIDIA card


def check_known(setting: str, value: str, known: Iterable[str]) -> None:
    known = tuple(known)
    if value not in known:
        raise SettingError(f"{setting} {value!r} is unknown: choose {', '.join(known)}.")


def decide_load(
    requested: str,
    modulation: str = "auto",
    *,
    stored: str,
    shape: TransformerShape,
    card: CardFacts | None,
    sizes: Sizes | None = None,
    packed: TransformerBytes | None = None,
    gguf: bool = False,
    cast: bool = False,
    because: str = "",
) -> LoadDecision:
    """Decides how a transformer is loaded.

    `auto` is what `plan` recommends for one image of the family's size next to a text encoder
    in bf16. Weights that do not stay in VRAM are no error, because the host moves them to it
    in every step; the reason then says so.

    Args:
        stored: what the file holds, a key of `BYTES_PER_WEIGHT`.
        card: where the transformer runs; None where there is no NVIDIA card.
        sizes: {precision: bytes} where shape and precision do not tell them.
        packed, cast: as of `Parts`.
        gguf: whether `stored` is what the file's blocks become.
        because: why in that precision, where the caller has decided.
    """
    check_known("precision", requested, LOADER_PRECISIONS)
    check_known("modulation", modulation, PLACES)
    if card is None:
        return _on_processor(requested, modulation, stored, gguf, because)
    as_stored = requested == AS_STORED
    member = shape.family.members[0]
    request = RunRequest(
        family=member.name,
        precision="auto" if as_stored else requested,
        width=member.side,
        height=member.side,
        modulation=modulation,
        parts=Parts(transformer=shape, packed=packed, cast=cast, gguf=gguf),
    )
    sizes = dict(sizes or {})
    if not shape.modulation_layers():
        request = replace(request, modulation=ON_CARD)
    if not as_stored:
        check_tensor_cores(requested, card, LOADER_PRECISIONS)
    name = stored if as_stored else None
    if as_stored and stored not in QUANTIZED:
        sizes["bf16"] = sizes.get(stored) or weight_bytes(shape, stored)
    option = _recommended(card, request, stored, as_stored, sizes, because)
    words = reasons(option)
    place_reason = words.pop("modulation", "")
    if not shape.modulation_layers():
        place_reason = ONE_MODULATION if modulation == OFF_CARD else ""
    words.pop("text encoder", None)  # its own loader says where it is
    return LoadDecision(
        precision=name or option.setting.precision,
        reason="; ".join(words.values()),
        why=few_words(option),
        off_card=option.setting.off_card,
        place_reason=place_reason,
        option=option,
    )


def _recommended(
    card: CardFacts,
    request: RunRequest,
    stored: str,
    as_stored: bool,
    sizes: Sizes,
    because: str,
) -> PlanOption:
    how: dict[str, Any] = {"as_stored": as_stored, "known_sizes": sizes, "why": because}
    try:
        return plan(card, request, stored, **how)[0]
    except UnavailableError:  # the image may be a smaller one
        least = replace(request, width=LEAST_SIDE, height=LEAST_SIDE)
        return plan(card, least, stored, **how)[0]


def _on_processor(
    requested: str, modulation: str, stored: str, gguf: bool, because: str
) -> LoadDecision:
    name = stored if requested in ("auto", AS_STORED) else requested
    few, why = because, because
    if not because:
        few, why = precision_reason(name, None, requested, stored, gguf=gguf)
    place = "modulation: stays with the other weights, because there is no NVIDIA GPU"
    return LoadDecision(
        precision=name,
        reason="; ".join(filter(None, (why, weight_only(name, None)))),
        why=f"{few}; no NVIDIA GPU",
        place_reason=place if modulation == OFF_CARD else "",
    )
