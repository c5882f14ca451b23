"""Runs the rows of `qwen-l40s bench`: one model after the other, each row at each size."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any

from ..errors import UnavailableError
from ..optimizations.hardware import first_line
from ..planning.memory import TransformerShape
from ..planning.work import Inputs, forward_work
from .bench_models import Models
from .bench_rows import BASELINE, Row

if TYPE_CHECKING:
    import torch

    from ..optimizations.measure_forward import InputTensors, Output, Repeats
    from ..optimizations.op_cases import OpCase

Fields = dict[str, Any]
# (name, inputs, fields); fields hold "error" where the row failed.
Take = Callable[[str, Inputs, Fields], None]


@dataclass(frozen=True)
class Setup:
    """What a run measures.

    Args:
        rows: the programs, in the order of `bench_rows`.
        inputs: the sizes.
        steps: of an image.
        debug: whether the traceback of a row that fails is printed.
    """

    device: torch.device
    shape: TransformerShape
    rows: tuple[Row, ...]
    inputs: tuple[Inputs, ...]
    repeats: Repeats
    steps: int
    debug: bool = False

    @property
    def edit(self) -> bool:
        """Whether there are reference images, and with them Edit-2511's timestep zero."""
        return self.inputs[0].references > 0


def run_forward(setup: Setup, take: Take) -> None:
    """Whole forward passes."""
    known: dict[Inputs, Output] = {}
    tensors = _all_tensors(setup)

    def measure(models: Models, row: Row, inputs: Inputs) -> Fields:
        from ..optimizations.measure_forward import relative_errors

        fields, output = models.measure(row, tensors[inputs], setup.repeats)
        if output is None:
            return fields
        if row.name == BASELINE:
            known[inputs] = output
        fields |= relative_errors(output, known.get(inputs))
        return fields | achieved(forward_work(setup.shape, inputs, row.precision), fields["ms"])

    _each(setup, measure, take)


def run_block(setup: Setup, take: Take) -> None:
    """What one more block costs: the forward pass through all blocks less that through one."""
    more = setup.shape.blocks - 1
    alone: dict[tuple[str, Inputs], Fields] = {}
    one = replace(setup, shape=replace(setup.shape, blocks=1))
    run_forward(one, lambda name, inputs, fields: alone.update({(name, inputs): fields}))
    precisions = {row.name: row.precision for row in setup.rows}

    def combine(name: str, inputs: Inputs, fields: Fields) -> None:
        first = alone[name, inputs]
        if "error" in first or "error" in fields:
            take(name, inputs, first if "error" in first else fields)
            return
        result = dict(fields)
        for key in ("ms", "ms_p10", "ms_p90", "wall_ms", "host_ms", "kernel_ms"):
            base = first["ms"] if key.startswith("ms") else first[key]
            result[key] = None if fields[key] is None else (fields[key] - base) / more
        groups = first.get("kernel_groups_ms", {})
        result["kernel_groups_ms"] = {
            group: (ms - groups[group]) / more
            for group, ms in fields.get("kernel_groups_ms", {}).items()
        }
        result["samples_ms_of_1_block"] = first["samples_ms"]
        block = forward_work(replace(setup.shape, blocks=1), inputs, precisions[name])
        take(name, inputs, result | achieved(block, result["ms"]))

    run_forward(setup, combine)


def run_image(setup: Setup, take: Take) -> None:
    """Sampling and decoding."""
    tensors = _all_tensors(setup)
    vaes: list[Any] = []
    known: dict[Inputs, torch.Tensor] = {}

    def measure(models: Models, row: Row, inputs: Inputs) -> Fields:
        from ..hosts.comfyui import bench_forward, bench_image
        from ..optimizations import measure as measured

        if not vaes:
            vaes.append(bench_image.random_vae(setup.device, small=setup.shape.dim < 3072))
        patcher = getattr(bench_forward, row.variant)(models.patcher())

        def paint() -> bench_image.ImageTimes:
            return bench_image.paint(patcher, vaes[0], tensors[inputs], setup.steps, setup.device)

        held = measured.allocated_gib(setup.device)
        for _ in range(setup.repeats.warmup):
            paint()
        measured.reset_peaks(setup.device)
        times = [paint() for _ in range(setup.repeats.repeats)]
        peaks = measured.peaks(setup.device)
        samples = [found.sample + found.decode for found in times]
        latents = times[-1].latents
        if row.name == BASELINE:
            known[inputs] = latents
        reference = known.get(inputs)
        error = None if reference is None else (latents - reference).norm() / reference.norm()
        paths = bench_forward.paths_of(patcher)
        return {
            **({"paths": paths} if paths else {}),
            "ms": measured.quantile(samples, 0.5),
            "ms_p10": measured.quantile(samples, 0.1),
            "ms_p90": measured.quantile(samples, 0.9),
            "sample_ms": measured.quantile([found.sample for found in times], 0.5),
            "decode_ms": measured.quantile([found.decode for found in times], 0.5),
            "steps": setup.steps,
            "kernel_ms": None,
            "peak_gib": peaks and peaks.allocated,
            "peak_reserved_gib": peaks and peaks.reserved,
            "extra_gib": peaks and peaks.allocated - held,
            "rel_error": None if error is None else float(error),
            "samples_ms": samples,
        }

    _each(setup, measure, take)


def run_ops(setup: Setup, names: tuple[str, ...], take: Take) -> None:
    """Single operations."""
    from ..optimizations.op_cases import op_cases

    for inputs in setup.inputs:
        for case in op_cases(setup.shape, inputs, setup.device):
            if case.name not in names:
                continue
            fields = _attempt(partial(_measure_op, case, setup), setup.debug)
            take(case.name, inputs, fields)


def _measure_op(case: OpCase, setup: Setup) -> Fields:
    import torch

    from ..optimizations.measure import time_cold
    from ..optimizations.measure_forward import kernel_fields, timing_fields

    device, repeats = setup.device, setup.repeats
    with torch.inference_mode():
        try:
            call = case.make()
        except UnavailableError as error:
            # Without the advice what to use instead.
            return {"left_out": str(error).partition("; use ")[0]}
        fields = timing_fields(time_cold(call, device, repeats.warmup, repeats.repeats))
        if repeats.kernels:
            fields |= kernel_fields(call, device, True)
    return fields | achieved(case, fields["ms"])


def achieved(work: Any, ms: float) -> dict[str, float | None]:
    """TFLOP/s and GB/s of counted work (`flops` and `bytes`); None of what is not computed or, on a
    machine that other programs keep busy, not positive.
    """
    found = {"tflops": work.flops / 1e9, "gbs": work.bytes / 1e6}
    return {name: amount / ms if amount and ms > 0 else None for name, amount in found.items()}


def _each(setup: Setup, measure: Callable[[Models, Row, Inputs], Fields], take: Take) -> None:
    with _imports_set_aside():
        for weights, rows in groupby(setup.rows, key=lambda row: row.weights):
            models = Models(weights, setup.shape, setup.device, setup.edit)
            try:
                for row in rows:
                    for inputs in setup.inputs:
                        attempt = partial(measure, models, row, inputs)
                        take(row.name, inputs, _attempt(attempt, setup.debug))
            finally:
                models.close()


def _attempt(measure: Callable[[], Fields], debug: bool) -> Fields:
    try:
        return measure()
    except Exception as error:  # hosts, kernels, compilers and torch raise anything
        if debug:
            traceback.print_exc()
        return {"error": f"{type(error).__name__}: {first_line(error)}"}


@contextmanager
def _imports_set_aside() -> Iterator[None]:
    """Keeps the garbage collector from what the hosts have imported: going through it takes half a
    second, at the beginning of each row and, now and then, in a repetition that is timed.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _all_tensors(setup: Setup) -> dict[Inputs, InputTensors]:
    from ..optimizations.measure_forward import input_tensors

    return {inputs: input_tensors(setup.shape, inputs, setup.device) for inputs in setup.inputs}
