"""Decides precision and place of weights before they are read, and rounds them then."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from ..caches import cached, remembered
from ..charts.text import precision_reason, reasons, weight_only
from ..errors import SettingError, UnavailableError
from ..loaders.quantize import quantize_rows
from ..optimizations import kernels, reference
from ..optimizations.warm_up import warm_up
from ..planning.bytes import TransformerBytes, weight_bytes
from ..planning.plan import LEAST_SIDE, PlanOption, check_tensor_cores, plan
from ..planning.request import AS_STORED, AUTO, PRECISIONS, Parts, RunRequest
from ..spec.formats import BYTES_PER_WEIGHT, FORMATS, QUANTIZED, CardFacts, RowFormat, format_gib
from ..spec.transformer import OFF_CARD, ON_CARD, PLACES, TransformerShape
from ..verdict import Verdict, try_once

PIPELINE_PRECISIONS = (AUTO, "bf16", "fp32", *QUANTIZED)
ONE_MODULATION = "modulation: stays in VRAM, because all blocks of this model share one"
LOADER_PRECISIONS = (*PRECISIONS, AS_STORED)


class PrecisionChoice(NamedTuple):
    """A precision by name (a key of `BYTES_PER_WEIGHT`) and why it was chosen."""

    name: str
    reason: str


@dataclass(frozen=True)
class LoadDecision:
    """How a transformer is loaded.

    Args:
        precision: a key of `BYTES_PER_WEIGHT`.
        reason: why in that precision.
        off_card: whether the modulation waits in system RAM.
        place_reason: why there; empty where there is nothing to say.
        why: both reasons in a few words.
        option: of the plan that it follows; None without an NVIDIA card.
    """

    precision: str
    reason: str
    off_card: bool
    place_reason: str
    why: str
    option: PlanOption | None = None


def choose_precision(
    requested: str, device: str, *, parameters: int, available_bytes: int
) -> PrecisionChoice:
    """Resolves `auto`; any other known name is taken as it is.

    Args:
        requested: one of `PIPELINE_PRECISIONS`.
        device: where the model runs, such as `cpu` or `cuda:0`.
        parameters: number of weights of all parts together.
        available_bytes: memory that can be had on `device` now.

    Raises:
        SettingError: `requested` is no known name.
    """
    check_known("precision", requested, PIPELINE_PRECISIONS)
    if requested != "auto":
        return PrecisionChoice(requested, "requested")
    if device != "cpu":
        reason = f"auto on {device}: diffusers' layers run in bf16; int8 runs in the ComfyUI nodes"
        return PrecisionChoice("bf16", reason)
    fp32_bytes = parameters * BYTES_PER_WEIGHT["fp32"]
    sizes = f"{format_gib(fp32_bytes)} in fp32, {format_gib(available_bytes)} available"
    if fp32_bytes <= available_bytes / 2:
        return PrecisionChoice("fp32", f"auto on cpu: fits in half of the memory ({sizes})")
    return PrecisionChoice(
        "bf16", f"auto on cpu: fp32 would take more than half of the memory ({sizes})"
    )


def check_known(setting: str, value: str, known: Iterable[str]) -> None:
    """Raises SettingError where a setting has another value than the known ones."""
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
    sizes: Mapping[str, TransformerBytes] | None = None,
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
        requested: one of `LOADER_PRECISIONS`.
        modulation: one of `spec.transformer.PLACES`.
        stored: what the file holds, a key of `BYTES_PER_WEIGHT`.
        card: where the transformer runs; None where there is no NVIDIA card.
        sizes: {precision: bytes} where shape and precision do not tell them.
        packed, cast: as of `Parts`.
        gguf: whether `stored` is what the file's blocks become.
        because: why in that precision, where the caller has decided.

    Raises:
        SettingError: the precision or the place is unknown.
        UnavailableError: fp8 or int8 was demanded by name of a card that does not multiply it, or
            the card is too small even for a small image.
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
        off_card=option.setting.off_card,
        place_reason=place_reason,
        why=_in_few_words(requested, stored, option, gguf, because),
        option=option,
    )


def _in_few_words(
    requested: str, stored: str, option: PlanOption | None, gguf: bool, because: str
) -> str:
    if because:
        words = because
    elif requested == "auto" and gguf:
        words = f"auto: GGUF's blocks become {stored}"
    elif requested != "auto":
        words = requested if requested == AS_STORED else "as requested"
    elif option is None or stored == option.setting.precision in QUANTIZED:
        words = f"auto: the file holds {stored}"
    elif option.setting.precision == "bf16":
        words = "auto: bf16, no int8 products"
    else:
        words = "auto: int8, the fastest"
    if option is None:
        return f"{words}; no NVIDIA GPU"
    if moved := option.moved_bytes:
        return f"{words}; {format_gib(moved)} streamed to {option.card.name} per forward pass"
    spare = max(0, option.headroom_bytes)
    side = option.request.width
    return f"{words}; {format_gib(spare)} to spare on {option.card.name} at {side}x{side}"


def _recommended(
    card: CardFacts,
    request: RunRequest,
    stored: str,
    as_stored: bool,
    sizes: Mapping[str, TransformerBytes],
    because: str,
) -> PlanOption:
    how = {"as_stored": as_stored, "known_sizes": sizes, "why": because}
    try:
        return plan(card, request, stored, **how)[0]
    except UnavailableError:  # the image may be a smaller one
        least = replace(request, width=LEAST_SIDE, height=LEAST_SIDE)
        return plan(card, least, stored, **how)[0]


def _on_processor(
    requested: str, modulation: str, stored: str, gguf: bool, because: str
) -> LoadDecision:
    name = stored if requested in ("auto", AS_STORED) else requested
    why = because or precision_reason(name, None, requested, stored, gguf=gguf)
    place = "modulation: stays with the other weights, because there is no NVIDIA GPU"
    return LoadDecision(
        precision=name,
        reason="; ".join(filter(None, (why, weight_only(name, None)))),
        off_card=False,
        place_reason=place if modulation == OFF_CARD else "",
        why=_in_few_words(requested, stored, None, gguf, because),
    )


# What rounds weights: one Triton kernel where it runs, else torch, to the same bits.


def round_weight(
    weight: torch.Tensor, format: str, *, rotation: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounds as `quantize_rows`: 60 blocks take 2.0 s on an H200, and 3.1 in torch's operations."""
    form = RowFormat(format, rotation)
    kernel = _kernel(weight.device, weight.dtype, form, weight.shape[1]) if len(weight) else None
    return kernel(weight, form) if kernel else quantize_rows(weight, format, rotation=rotation)


# {(device, dtype, form, columns): the compilation of what rounds such rows; None where none runs}
_rounding: dict[tuple[Any, ...], Future | None] = remembered({})


def compile_rounding(
    device: torch.device,
    dtype: torch.dtype,
    forms: Collection[tuple[RowFormat, int]],
    *more: Callable[[], None],
) -> None:
    """Begins to compile what rounds rows on a card: until it is there torch rounds, to the same
    bits.

    Args:
        forms: (form, columns) of the rows.
        more: Called with it, and what they prepare is compiled too.
    """

    def work() -> None:
        if forms:
            from ..optimizations.kernels.rows import weight_quantizer
        for form, columns in forms:
            weight = torch.empty(4, columns, dtype=dtype, device="meta")
            weight_quantizer(weight, form, reference.QuantizedRows.empty(weight, form)).prepared()
        for prepare in more:
            prepare()

    compiling = warm_up(device, work)
    _rounding.update({(device, dtype, *it): compiling for it in forms})


def _kernel(
    device: torch.device, dtype: torch.dtype, form: RowFormat, columns: int
) -> Callable[[torch.Tensor, RowFormat], tuple[torch.Tensor, torch.Tensor]] | None:
    """Returns the kernel for such rows, if a trial of it gives the same bits."""
    if device.type == "cuda" and torch.version.hip is None:
        runs = torch.cuda.get_device_capability(device) >= FORMATS[form.storage].oldest
    else:
        runs = device.type == "cpu" and kernels.interpreted()
    if not runs or kernels.missing() or dtype.itemsize not in (2, 4) or not columns:
        return None
    from ..optimizations.kernels.rows import WIDEST_ROW, quantize_weight

    if columns > WIDEST_ROW:
        return None
    if (device, dtype, form, columns) not in _rounding:
        compile_rounding(device, dtype, [(form, columns)])
    compiling = _rounding[device, dtype, form, columns]
    if compiling and not compiling.done():
        return None

    def trial() -> str:
        generator = torch.Generator().manual_seed(0)
        weight = torch.randn(4, columns, generator=generator).to(device, dtype)
        expected = quantize_rows(weight, form.storage, rotation=form.rotation)
        pairs = zip(quantize_weight(weight, form), expected, strict=True)
        same = all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)
        return "" if same else "a trial gave a wrong result"

    refusal = try_once((quantize_weight, device, dtype, form, columns), trial)
    if refusal:
        _log(refusal)
    return None if refusal else quantize_weight


@cached
def _log(refusal: Verdict) -> None:
    Verdict(f"Triton: {refusal}").log("torch rounds the weights, which takes longer")
