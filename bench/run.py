"""Goes through the rows of `bench forward` and `ops`, those of one model or operation by turns."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import torch

from ..errors import UnavailableError
from ..machine.card import first_line
from . import measure
from .forward import (
    Body,
    InputTensors,
    Measured,
    build_transformer,
    in_diffusers,
    input_tensors,
    measure_forward,
    random_tensors,
    relative_error,
)
from .measure import Fields
from .ops import OpCase, op_cases
from .rows import BASELINE, COMFYUI, BenchSetup, Inputs, Row, forward_work

# Every row of a model or an operation is measured once before any is measured again.
TURNS = 2
DENSE = "bf16"
Add = Callable[[Fields], None]


def measure_row(
    row: Row, setup: BenchSetup, tensors: InputTensors, built: dict[Any, Any], body: Body
) -> Measured:
    """Calls `body` with a row's forward pass; `built` is what rows of the same weights share."""
    key = row.host, row.needs_card
    if row.weights == DENSE and DENSE not in built:
        built[DENSE] = dict(random_tensors(setup.shape, setup.device))
    if row.host != COMFYUI:
        if key not in built:
            about = setup.shape, setup.edit
            built[key] = build_transformer(built[DENSE], *about, compiled=row.needs_card)
        return in_diffusers(built[key], tensors, body, ours=row.ours)
    from .comfyui import bf16_model, in_comfyui, prepared, quantized_model

    if key not in built:
        weights, build = row.weights, quantized_model
        if weights == DENSE:
            weights, build = built[DENSE], bf16_model
        built[key] = build(weights, setup.shape, setup.device, setup.edit)
    return in_comfyui(prepared(built[key], row), tensors, body)


def run_forward(setup: BenchSetup, add: Add) -> None:
    """Whole forward passes; the error with LoRAs is that of the same LoRAs beside bf16."""
    known: dict[tuple[Inputs, int], torch.Tensor] = {}
    stock: dict[Inputs, float] = {}
    tensors = {inputs: input_tensors(setup.shape, inputs, setup.device) for inputs in setup.inputs}

    def one(built: dict[Any, Any], inputs: Inputs, row: Row, repeats: int, again: bool) -> Fields:
        body = partial(
            measure_forward, setup=setup, tensors=tensors[inputs], repeats=repeats, again=again
        )
        fields, stream = measure_row(row, setup, tensors[inputs], built, body)
        if stream is None:
            return {"samples_ms": fields["samples_ms"]}
        if row.name == BASELINE or (row.loras and row.precision == DENSE):
            known[inputs, row.loras] = stream
        error = relative_error(stream, known.get((inputs, row.loras)))
        return fields | {"rel_error_blocks": error}

    def finish(row: Row, inputs: Inputs, fields: Fields) -> Fields:
        about = {"name": row.name, "size": inputs.size, "batch": inputs.batch}
        if "error" in fields:
            return about | fields
        if row.name == BASELINE:
            stock[inputs] = fields["ms"]
        if inputs in stock:
            about["x_stock"] = fields["ms"] / stock[inputs]
        work = forward_work(setup.shape, inputs, row.precision)
        return about | fields | achieved(work, fields["ms"])

    gc.collect()
    gc.freeze()  # going through what the hosts have imported takes half a second
    for _, same in groupby(setup.rows, key=lambda row: row.weights):
        built: dict[Any, Any] = {}
        rows = list(same)
        for inputs in setup.inputs:
            torch._dynamo.reset()  # or a second size would be compiled for any size
            for row, fields in by_turns(rows, partial(one, built, inputs), setup):
                add(finish(row, inputs, fields))
        built.clear()
        torch._dynamo.reset()  # which keeps compiled models
        if COMFYUI in {row.host for row in rows}:
            from .comfyui import forget_models

            forget_models()
        gc.collect()
        measure.reset_peaks(setup.device)
    gc.unfreeze()


def run_ops(setup: BenchSetup, add: Add) -> None:
    """Single operations."""
    for inputs in setup.inputs:
        cases = op_cases(setup.shape, inputs, setup.device)
        chosen = [case for case in cases if case.name in setup.names]
        for _, same in groupby(chosen, key=lambda case: case.task):
            for case, fields in by_turns(list(same), partial(_time_op, setup, {}), setup):
                if "ms" in fields:
                    fields |= achieved(case, fields["ms"])
                    del fields["samples_ms"]  # of short calls there are hundreds
                add({"name": case.name, "size": inputs.size, "batch": inputs.batch} | fields)


@torch.inference_mode()
def _time_op(
    setup: BenchSetup, made: dict[str, Any], case: OpCase, repeats: int, again: bool
) -> Fields:
    if not again:
        try:
            made[case.name] = case.make()
        except UnavailableError as error:
            # Without the advice what to use instead.
            return {"left_out": str(error).partition("; use ")[0]}
    call = made[case.name]
    for _ in range(setup.warm_up):
        call()
    fields = {"samples_ms": measure.times_ms(call, setup.device, repeats)}
    if setup.profile and not again:
        fields |= measure.kernel_fields(call, setup.device, True)
    return fields


def achieved(work: Any, ms: float) -> dict[str, float | None]:
    """TFLOP/s and GB/s of counted work (`flops` and `bytes`); None of what is not computed."""
    found = {"tflops": work.flops / 1e9, "gbs": work.bytes / 1e6}
    return {name: amount / ms if amount and ms > 0 else None for name, amount in found.items()}


def by_turns(
    things: Sequence[Any], one: Callable[[Any, int, bool], Fields], setup: BenchSetup
) -> Iterator[tuple[Any, Fields]]:
    """Measures every thing, then every thing again, so that a card that slows down slows all.

    Args:
        one: Measures a thing so many times, the first time with all that is wanted of it. What it
            raises is the thing's "error".

    Yields:
        Each thing and its fields, with median and spread of the samples of all turns.
    """
    found: list[Fields] = [{"samples_ms": []} for _ in things]
    turns = min(TURNS, setup.repeats)
    for turn in range(turns):
        for fields, thing in zip(found, things, strict=True):
            if "error" in fields or "left_out" in fields:
                continue
            try:
                more = one(thing, (setup.repeats + turn) // turns, turn > 0)
            except Exception as error:  # hosts, kernels, compilers and torch raise anything
                if setup.debug:
                    traceback.print_exc()
                fields["error"] = f"{type(error).__name__}: {first_line(error)}"
                continue
            fields |= more | {"samples_ms": [*fields["samples_ms"], *more.get("samples_ms", ())]}
    for fields, thing in zip(found, things, strict=True):
        samples = fields.pop("samples_ms")
        if "error" in fields:
            yield thing, {"error": fields["error"]}
        else:
            yield thing, (measure.time_fields(samples) if samples else {}) | fields
