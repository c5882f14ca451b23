"""Rounds layers one after the other; their weights pass a card in slabs of rows, through pinned
memory.
"""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch

from ..families.registry import is_quantizable
from ..spec.formats import MIB, RowFormat
from .gguf_blocks import BlockRows
from .quantize import VALUE_DTYPES, cast_fp8, known_format, root_ratio, row_format
from .rounding import round_weight

IN_BF16 = "bf16"  # what `quantize_layers` makes of GGUF's blocks that are not quantized anew

# Weights pass a card in slabs of so much, through pinned memory, which is copied 3 times as fast.
# Torch's threads fill or empty one slab while the others are on their way or rounded. torch keeps
# the 144 MiB for its next pinned tensors.
SLAB_BYTES = 32 * MIB
SLABS = 3


Rounding = Callable[..., tuple[torch.Tensor, torch.Tensor]]  # as `round_weight`
Squares = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], torch.Tensor]


class RoundedLayer(NamedTuple):
    """values [N, K] * scale is the weight, rotated as `form` says; both on the CPU, scale float32
    [N, 1], or [] for one.

    `error` is |values * scale - weight| / |weight|, None where it was not asked for.
    """

    layer: str
    values: torch.Tensor
    scale: torch.Tensor
    form: RowFormat
    error: float | None


def quantize_layers(
    layers: Iterable[str],
    weight_of: Callable[[str], torch.Tensor | BlockRows],
    format: str,
    device: torch.device,
    take: Callable[[RoundedLayer], None],
    refuse: Callable[[str], Exception],
    *,
    per_row: bool = True,
    squares: Squares | None = None,
    forget: Callable[[torch.Tensor], None] = lambda weight: None,
) -> None:
    """Rounds layers and hands out each as it is ready, in the caller's thread.

    A mapped bf16 weight is read from its file, goes to a card in slabs of rows, is rounded there
    and comes back in half the bytes: system RAM holds the results and the slabs, never the model.

    Args:
        weight_of: returns a layer's weight [N, K] of any floating dtype, of which fp8 is cast on
            the device, or in GGUF's blocks, which are expanded there.
        format: fp8 or int8; or bf16, whose scales are each row's largest magnitude.
        refuse: makes the error for a tensor, by name, that holds NaN or infinity.
        per_row: False for one scale for the whole weight.
        squares: `measured_squares` or `expected_squares`, of which the rounding errors come; None
            without.
        forget: called with what `weight_of` gave, or its blocks, once that is read.
    """
    if format == IN_BF16:
        dtype, rounding = torch.bfloat16, _as_bf16
    else:
        dtype, rounding = VALUE_DTYPES[known_format(format)], round_weight

    def run() -> Iterator[RoundedLayer]:
        """Layers that are done; of up to `SLABS` later ones some rows are on their way."""
        slabs: deque[_Slab] = deque()  # the first is the one that began first
        for layer in layers:
            weight, form, slab_rows = weight_of(layer), RowFormat(format), 0
            if per_row and format != IN_BF16 and is_quantizable(layer):
                form = row_format(format, weight.shape[1])
            expand: Callable[[torch.Tensor], torch.Tensor] | None
            if isinstance(weight, BlockRows):
                stored, expand = weight.values, weight.expand
            else:
                stored, expand = weight, cast_fp8 if weight.itemsize == 1 else None
            if per_row and device.type == "cuda" and stored.is_cpu and stored.numel():
                # The way back has half of the bytes.
                returned = weight.shape[1] * dtype.itemsize
                slab_rows = SLAB_BYTES // max(stored.shape[1] * stored.itemsize, 2 * returned)
            if not slab_rows:  # the weight goes whole
                there = stored.to(device)
                there = expand(there) if expand else there
                there = there if per_row else there.reshape(1, -1)
                values, scale = rounding(there, format, rotation=form.rotation)
                error = squares and root_ratio(squares(there, values, scale, form.rotation))
                scale = scale.cpu() if per_row else scale.cpu().reshape(())
                forget(stored)
                yield RoundedLayer(layer, values.cpu().reshape(weight.shape), scale, form, error)
                continue
            slabs = slabs or deque(_Slab(device, rounding, squares) for _ in range(SLABS))
            target, scale = _new(torch.Size(weight.shape), dtype), torch.empty((len(stored), 1))
            sums = torch.zeros(2, dtype=torch.float64)
            rounded = RoundedLayer(layer, target, scale, form, None)
            for first in range(0, len(stored), slab_rows):
                if done := slabs[0].finish():  # with it, the layer whose rows it had before
                    yield done
                slabs[0].begin(stored, expand, (slice(first, first + slab_rows), rounded, sums))
                slabs.rotate(-1)
            forget(stored)
        yield from filter(None, (slab.finish() for slab in slabs))

    try:
        # A host's mode is that of its prompt, and the weights outlive it.
        with torch.inference_mode(False):
            for rounded in run():
                if not rounded.scale.isfinite().all():
                    raise refuse(f"{rounded.layer}.weight")
                take(rounded)
    finally:
        if device.type == "cuda":
            # Each slab's stream holds memory that no other stream could use.
            torch.cuda.empty_cache()


def _as_bf16(
    weight: torch.Tensor, format: str, *, rotation: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    values = weight.to(torch.bfloat16)
    return values, values.abs().amax(dim=1, keepdim=True).float()


Target = tuple[slice, RoundedLayer, torch.Tensor]  # rows, and sums of squares


class _Slab:
    """Some rows on their way over a card: a stream, and pinned memory on both ways."""

    def __init__(self, device: torch.device, rounding: Rounding, squares: Squares | None) -> None:
        self._device, self._rounding, self._squares = device, rounding, squares
        self._stream = torch.cuda.Stream(device)
        sizes, kind = (SLAB_BYTES, SLAB_BYTES // 2), torch.uint8
        try:
            self._up, self._down = (torch.empty(it, dtype=kind, pin_memory=True) for it in sizes)
        except RuntimeError:  # the system pins no more; torch waits for copies of other memory
            self._up, self._down = (torch.empty(it, dtype=kind) for it in sizes)
        self._target: Target | None = None

    def begin(
        self,
        weight: torch.Tensor,
        expand: Callable[[torch.Tensor], torch.Tensor] | None,
        target: Target,
    ) -> None:
        rows, rounded, _ = self._target = target
        part, form = weight[rows], rounded.form
        up = self._up[: part.nbytes].copy_(_bytes(part)).view(part.dtype).view(part.shape)
        with torch.cuda.stream(self._stream):
            there = torch.empty(part.shape, dtype=part.dtype, device=self._device)
            there.copy_(up, non_blocking=True)
            there = expand(there) if expand else there
            values, self._scale = self._rounding(there, form.storage, rotation=form.rotation)
            self._values = self._down[: values.nbytes].copy_(_bytes(values), non_blocking=True)
            if self._squares:
                self._sums = self._squares(there, values, self._scale, form.rotation)

    def finish(self) -> RoundedLayer | None:
        """Returns the layer whose last rows these are."""
        if self._target is None:
            return None
        (rows, rounded, sums), self._target = self._target, None
        with torch.cuda.stream(self._stream):
            rounded.scale[rows].copy_(self._scale)  # waits for the stream
            if self._squares:
                sums += self._sums.cpu()
        _bytes(rounded.values[rows]).copy_(self._values)
        if rows.stop < len(rounded.values):
            return None
        return rounded._replace(error=root_ratio(sums)) if self._squares else rounded


def _new(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Allocates system RAM, in huge pages where there are some: filled at 29 GB/s, else at 18."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, shape.numel() * dtype.itemsize, flags=flags)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
