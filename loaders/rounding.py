"""Rounds weights on a card: one Triton kernel where it runs, else torch, to the same bits."""

from __future__ import annotations

from collections.abc import Callable, Collection
from concurrent.futures import Future
from typing import Any

import torch

from ..caches import cached, remembered
from ..optimizations import kernels, reference
from ..optimizations.warm_up import warm_up
from ..spec.formats import FORMATS, RowFormat
from ..verdict import Verdict, try_once
from .quantize import quantize_rows


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
    """Begins to compile what rounds rows on a card, once: until it is there torch rounds, to the
    same bits.
    """
    forms = [it for it in forms if (device, dtype, *it) not in _rounding]

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
