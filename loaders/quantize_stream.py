"""Quantizes the layers of a model one by one, several in work at a time, on a card if there is one.

A mapped bf16 weight is read from its file, goes to the card in slabs of rows, is rounded there and
comes back in half the bytes: host memory holds the result and the slabs, never the bf16 model.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed

import torch

from ..errors import CheckpointError
from .quantize import DTYPES, quantize_rows

# One thread spends its time reading the file and copying, so several keep a card's bus busy. On a
# CPU torch's own threads share the work of one layer.
WORKERS_OF_A_CARD = 8
# Pinned memory, from which and to which a card copies 3 times as fast: so much for each worker and
# each way. torch keeps these 128 MiB for its next pinned tensors.
SLAB_BYTES = 8 * 2**20


def quantize_layers(
    layers: Iterable[str],
    weight_of: Callable[[str], torch.Tensor],
    format: str,
    device: torch.device,
    done: Callable[[], None] = lambda: None,
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Returns {layer: (values [N, K], scale [N, 1] float32)} on the CPU.

    Args:
        weight_of: returns a layer's weight [N, K] of any floating dtype; called in other threads.
        format: fp8 or int8.
        device: where the rounding is computed.
        done: called after each layer, in the caller's thread; what it raises ends the work.

    Raises:
        CheckpointError: a weight holds NaN or infinity.
    """
    workers = min(WORKERS_OF_A_CARD, os.cpu_count() or 1) if device.type == "cuda" else 1
    staging = _Staging(device)
    pool = ThreadPoolExecutor(workers, thread_name_prefix="quantize")
    try:
        futures = {
            pool.submit(staging.quantize, layer, weight_of, format): layer for layer in layers
        }
        found = {}
        for future in as_completed(futures):
            values, scale = future.result()
            if not scale.isfinite().all():
                raise CheckpointError(
                    f"the tensor {f'{futures[future]}.weight'!r} holds NaN or infinity: download "
                    "the file again."
                )
            found[futures[future]] = (values, scale)
            done()
        return found
    finally:
        pool.shutdown(cancel_futures=True)
        if device.type == "cuda":
            # Each worker's stream holds memory that no other stream could use.
            torch.cuda.empty_cache()


class _Staging(threading.local):
    """What each worker has for itself: a stream of the card, and pinned memory on both ways."""

    _stream: torch.cuda.Stream | None = None

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def quantize(
        self, layer: str, weight_of: Callable[[str], torch.Tensor], format: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        weight = weight_of(layer)
        if self._device.type != "cuda":
            return quantize_rows(weight, format)
        if self._stream is None:  # `__init__` also runs in the thread that hands out the work
            self._stream = torch.cuda.Stream(self._device)
            self._up = torch.empty(SLAB_BYTES, dtype=torch.uint8, pin_memory=True)
            self._down = torch.empty(SLAB_BYTES, dtype=torch.uint8, pin_memory=True)
        rows = SLAB_BYTES // max(1, weight.shape[1] * weight.itemsize)
        with torch.cuda.stream(self._stream):
            if rows == 0 or weight.device.type != "cpu":
                values, scale = quantize_rows(weight.to(self._device), format)
                return values.cpu(), scale.cpu()
            values = torch.empty(weight.shape, dtype=DTYPES[format])
            scale = torch.empty((len(weight), 1))
            slabs = zip(weight.split(rows), values.split(rows), scale.split(rows), strict=True)
            for slab, slab_values, slab_scale in slabs:
                self._through_the_card(slab, slab_values, slab_scale, format)
        return values, scale

    def _through_the_card(
        self, slab: torch.Tensor, values: torch.Tensor, scale: torch.Tensor, format: str
    ) -> None:
        up = self._up[: slab.nbytes].view(slab.dtype).view(slab.shape).copy_(slab)
        rounded, found = quantize_rows(up.to(self._device, non_blocking=True), format)
        down = self._down[: values.nbytes].view(values.dtype).view(values.shape)
        down.copy_(rounded, non_blocking=True)
        scale.copy_(found)  # waits for the stream
        self._stream.synchronize()
        values.copy_(down)
