"""Writes a quantized transformer, one tensor at a time: from the mapped source through the card or
the processor to the file.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from ..errors import CheckpointError, UnavailableError
from .quantize import comfy_quant_tensor, quantize_rows, relative_error
from .quantized_plan import MARKER_2511, QuantizedPlan, check_destination
from .safetensors_writer import DTYPES, TensorFile, write_safetensors
from .tensor_checks import is_finite

READERS = {
    "int8": "ComfyUI itself and this package",
    "fp8": "this package only: ComfyUI's own fp8 has one scale for a whole weight, and this file "
    "has one for every row",
}


@dataclass(frozen=True)
class QuantizedFile:
    """What was written.

    Args:
        bytes_before: of the transformer's tensors in the source.
        bytes_after: of the file.
        kept: layers that stayed in bf16 because a pattern said so.
        worst_error, mean_error: |rounded - weight| / |weight| of the quantized layers.
        worst_layer: where the worst one is.
        readers: which programs read the file, and why no others do.
    """

    path: Path
    source: Path
    precision: str
    device: str
    bytes_before: int
    bytes_after: int
    quantized: int
    kept: tuple[str, ...]
    worst_error: float
    worst_layer: str
    mean_error: float
    seconds: float
    readers: str

    def as_dict(self) -> dict[str, Any]:
        """Returns only what `json.dumps` takes."""
        return {
            **vars(self),
            "path": str(self.path),
            "source": str(self.source),
            "kept": list(self.kept),
        }


def write_quantized(
    plan: QuantizedPlan,
    destination: str | os.PathLike[str],
    *,
    device: str | torch.device = "cpu",
    overwrite: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> QuantizedFile:
    """Carries out a plan. The file appears whole under its name, or not at all.

    Host memory holds a few tensors at a time; pages of the mapped source come on top, and go when
    the system needs them.

    Args:
        device: where weights are rounded, such as `cpu` or `cuda:0`; the file is the same.
        progress: called with the bytes of the source that are done and their sum; an exception in
            it ends the work.

    Raises:
        SettingError: the destination must not be written.
        CheckpointError: a tensor holds NaN or infinity.
        UnavailableError: the disk or the card has too little room.
    """
    start = time.perf_counter()
    destination, device = Path(destination), torch.device(device)
    check_destination(plan, destination, overwrite=overwrite)
    errors: dict[str, float] = {}
    with write_safetensors(destination, plan.layout) as file, ThreadPoolExecutor(1) as writer:
        written: Future[None] | None = None
        try:
            # One source tensor is computed while what became of the one before it is written.
            for tensors in _stream(plan, device, errors, progress):
                if written is not None:
                    written.result()
                written = writer.submit(_write, file, tensors)
        except torch.cuda.OutOfMemoryError as error:
            raise UnavailableError(
                f"{device} has no room for one weight and its copy: free its memory or choose the "
                "device cpu."
            ) from error
        if written is not None:
            written.result()
    worst = max(errors, key=errors.__getitem__)
    return QuantizedFile(
        path=destination,
        source=plan.source.path,
        precision=plan.precision,
        device=str(device),
        bytes_before=plan.source.part.bytes,
        bytes_after=plan.layout.file_bytes,
        quantized=len(plan.quantized),
        kept=tuple(sorted(plan.kept)),
        worst_error=errors[worst],
        worst_layer=worst,
        mean_error=sum(errors.values()) / len(errors),
        seconds=round(time.perf_counter() - start, 3),
        readers=READERS[plan.precision],
    )


def _stream(
    plan: QuantizedPlan,
    device: torch.device,
    errors: dict[str, float],
    progress: Callable[[int, int], None] | None,
) -> Iterator[dict[str, torch.Tensor]]:
    """Yields what each tensor of the source becomes, on the CPU, and fills {layer: rounding error}.

    `progress` counts what was handed out before: it is called once the next tensor is asked for.
    """
    prefix, done, total = plan.source.part.prefix, 0, plan.source.part.bytes
    missing = set(plan.layout.tensors)
    for header in plan.source.shards.headers:
        with safe_open(header.path, framework="pt") as file:
            for name, info in sorted(header.tensors.items(), key=lambda item: item[1].start):
                if not name.startswith(prefix):
                    continue
                outputs = _outputs(plan, name.removeprefix(prefix), file.get_tensor(name), device)
                if outputs is None:
                    raise CheckpointError(
                        f"{header.path} holds NaN or infinity in the tensor {name!r}: download the "
                        "file again."
                    )
                tensors, error = outputs
                if error is not None:
                    errors[name.removeprefix(prefix).removesuffix(".weight")] = error
                yield tensors
                missing -= tensors.keys()
                done += info.nbytes
                if progress is not None:
                    progress(done, total)
    if MARKER_2511 in missing:
        yield {MARKER_2511: torch.empty(0)}


def _write(file: TensorFile, tensors: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        file.write(name, tensor)


def _outputs(
    plan: QuantizedPlan, name: str, tensor: torch.Tensor, device: torch.device
) -> tuple[dict[str, torch.Tensor], float | None] | None:
    """Returns what one tensor becomes and its rounding error; None when it is not finite."""
    layer = name.removesuffix(".weight")
    if layer == name or layer not in plan.quantized:
        kept = tensor.to(DTYPES[plan.layout.tensors[name].dtype])
        return ({name: kept}, None) if is_finite(kept) else None
    weight = tensor.to(device)
    values, scale = quantize_rows(weight, plan.precision)
    if not scale.isfinite().all():
        return None
    error = relative_error(weight, values, scale)
    tensors = {
        name: values.cpu(),
        f"{layer}.weight_scale": scale.cpu(),
        f"{layer}.comfy_quant": comfy_quant_tensor(plan.precision),
    }
    return tensors, error
