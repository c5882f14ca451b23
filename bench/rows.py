"""The rows of `qwen-l40s bench`: what each one runs, and how a run goes through them."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any

from ..errors import SettingError, UnavailableError
from ..machine.card import first_line
from ..spec.transformer import TransformerShape
from .inputs import Inputs, forward_work

if TYPE_CHECKING:
    import torch

    from .forward import ForwardOutput, InputTensors, Repeats
    from .ops import OpCase

COMFYUI, DIFFUSERS = "ComfyUI", "diffusers"


@dataclass(frozen=True)
class Row:
    """One program in one precision.

    Args:
        name: as results call it.
        host: whose module runs: ComfyUI or diffusers.
        weights: which random model it needs, such as "bf16" or "comfyui fp8". Rows of one model
            stand together, and so the model is built once.
        variant: what is done to the model, a name that the host's code knows.
        precision: bf16, fp8 or int8.
        needs_card: whether it has nothing to run on a CPU.
        step: the technique that it adds to the row before it in the waterfall.
        attention: as the node Optimize takes it, of "ours".
        loras: how many of rank 64 are beside all layers of attention and MLP.
    """

    name: str
    host: str
    weights: str
    variant: str
    precision: str = "bf16"
    needs_card: bool = False
    step: str = ""
    attention: str = "auto"
    loras: int = 0


BASELINE = "comfyui bf16"
TABLE = "ours bf16 table build"
FORWARD = (
    Row(BASELINE, COMFYUI, "bf16", "stock", step="stock ComfyUI, bf16"),
    Row("comfyui bf16 cudnn", COMFYUI, "bf16", "stock_cudnn", needs_card=True),
    Row("ours bf16 attention", COMFYUI, "bf16", "attention", step="+ attention choice"),
    Row("ours bf16 blocks", COMFYUI, "bf16", "unscheduled", step="+ fused blocks"),
    Row("ours bf16", COMFYUI, "bf16", "ours", step="+ modulation tables"),
    Row("ours bf16, 1 LoRA", COMFYUI, "bf16", "ours", loras=1),
    Row("ours bf16, 3 LoRAs", COMFYUI, "bf16", "ours", loras=3),
    Row(TABLE, COMFYUI, "bf16", "table"),
    Row("diffusers bf16 eager", DIFFUSERS, "bf16", "eager"),
    Row("ours bf16 in diffusers", DIFFUSERS, "bf16", "ours"),
    Row("diffusers bf16 compiled", DIFFUSERS, "bf16", "compiled", needs_card=True),
    Row("comfyui fp8", COMFYUI, "comfyui fp8", "stock", "fp8"),
    Row("ours fp8", COMFYUI, "ours fp8", "ours", "fp8", step="+ fp8"),
    Row("ours fp8, 1 LoRA", COMFYUI, "ours fp8", "ours", "fp8", loras=1),
    Row("ours fp8, 3 LoRAs", COMFYUI, "ours fp8", "ours", "fp8", loras=3),
    Row("comfyui int8", COMFYUI, "comfyui int8", "stock", "int8"),
    Row("ours int8 plain", COMFYUI, "ours int8 plain", "ours", "int8"),
    Row("ours int8", COMFYUI, "ours int8", "ours", "int8", step="or int8"),
    *(
        Row(f"ours int8, attention {name}", COMFYUI, "ours int8", "ours", "int8", attention=name)
        for name in ("int8", "int8_fp8")
    ),
    # The best exact attention of an L40S.
    Row(
        "ours int8, attention sdpa_flash",
        *(COMFYUI, "ours int8", "ours", "int8"),
        needs_card=True,
        attention="sdpa_flash",
    ),
    Row("ours int8, 1 LoRA", COMFYUI, "ours int8", "ours", "int8", loras=1),
    Row("ours int8, 3 LoRAs", COMFYUI, "ours int8", "ours", "int8", loras=3),
)
BLOCK = tuple(row for row in FORWARD if row.name != TABLE)
IMAGE = tuple(
    row
    for row in FORWARD
    if row.host == COMFYUI
    and row.variant in ("stock", "ours")
    and row.attention == "auto"
    and not (row.loras or row.weights.endswith("plain"))
)


def select(rows: Sequence[Row], patterns: Sequence[str]) -> tuple[Row, ...]:
    """The rows that any pattern names; all without patterns.

    Raises:
        SettingError: A pattern names none.
    """
    names = select_names([row.name for row in rows], patterns)
    return tuple(row for row in rows if row.name in names)


def select_names(names: Sequence[str], patterns: Sequence[str]) -> tuple[str, ...]:
    """As `select`, of plain names."""
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise SettingError(
                f"--only {pattern!r} names no row: choose from {', '.join(map(repr, names))}, or "
                "a pattern such as 'ours *'."
            )
    return tuple(
        name
        for name in names
        if not patterns or any(fnmatchcase(name, pattern) for pattern in patterns)
    )


DENSE = "bf16"


class RandomModels:
    """The models over one set of weights; close them before the next are built.

    Args:
        weights: "bf16", which both hosts share, or a program and a precision: "ours fp8"; "plain"
            behind them is int8 that is not rotated.
        edit: whether it is an Edit-2511.
    """

    def __init__(
        self, weights: str, shape: TransformerShape, device: torch.device, edit: bool
    ) -> None:
        self._weights, self._shape, self._device, self._edit = weights, shape, device, edit
        self._tensors: dict[str, torch.Tensor] | None = None
        self._patcher: Any = None
        self._transformer: Any = None
        self._compiled = False

    def measure(
        self, row: Row, tensors: InputTensors, repeats: Repeats
    ) -> tuple[dict[str, Any], ForwardOutput | None]:
        """One row at one size: what results have of it, and the output, if it has one."""
        if row.host != COMFYUI:
            return self._measure_diffusers(row, tensors, repeats)
        from . import comfyui

        if row.variant == "table":
            patcher = self.patcher()
            return comfyui.measure_table(patcher, tensors, repeats, self._device), None
        patcher = comfyui.prepared(self.patcher(), row)
        scheduled = row.variant != "unscheduled"
        return comfyui.measure_pass(patcher, tensors, repeats, self._device, scheduled=scheduled)

    def patcher(self) -> Any:
        """ComfyUI's model."""
        if self._patcher is None:
            from .comfyui import bf16_model, quantized_model

            place = self._device, self._edit
            if self._weights == DENSE:
                self._patcher = bf16_model(self._shape, self._dense(), *place)
            else:
                program, precision, *plain = self._weights.split()
                self._patcher = quantized_model(
                    *(self._shape, precision, *place), stock=program == "comfyui", rotate=not plain
                )
        return self._patcher

    def close(self) -> None:
        """Frees everything."""
        had_patcher = self._patcher is not None
        self._patcher = self._transformer = self._tensors = None
        if self._compiled:
            from .diffusers import forget_compiled

            forget_compiled()
        if had_patcher:
            from .comfyui import forget_models

            forget_models()
        gc.collect()
        if self._device.type == "cuda":
            import torch

            torch.cuda.empty_cache()

    def _measure_diffusers(
        self, row: Row, tensors: InputTensors, repeats: Repeats
    ) -> tuple[dict[str, Any], ForwardOutput]:
        from . import diffusers

        if self._transformer is None:
            weights = self._dense()
            self._transformer = diffusers.build_transformer(self._shape, weights, self._edit)
        if row.variant == "ours":
            return diffusers.measure_ours(self._transformer, tensors, repeats, self._device)
        if row.variant == "compiled" and not self._compiled:
            diffusers.compile_blocks(self._transformer)
            self._compiled = True
        if self._compiled:
            diffusers.forget_compiled()
        return diffusers.measure_pass(self._transformer, tensors, repeats, self._device)

    def _dense(self) -> dict[str, torch.Tensor]:
        if self._tensors is None:
            from .forward import random_tensors

            self._tensors = dict(random_tensors(self._shape, self._device))
        return self._tensors


Fields = dict[str, Any]
# (name, inputs, fields); fields hold "error" where the row failed.
RowSink = Callable[[str, Inputs, Fields], None]


@dataclass(frozen=True)
class BenchSetup:
    """What a run measures.

    Args:
        rows: the programs, in the order of `FORWARD`.
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


def run_forward(setup: BenchSetup, take: RowSink) -> None:
    """Whole forward passes; the error with LoRAs is that of the same LoRAs beside bf16."""
    known: dict[tuple[Inputs, int], ForwardOutput] = {}
    tensors = _all_tensors(setup)

    def measure(models: RandomModels, row: Row, inputs: Inputs) -> Fields:
        from .forward import relative_errors

        fields, output = models.measure(row, tensors[inputs], setup.repeats)
        if output is None:
            return fields
        if row.name == BASELINE or (row.loras and row.precision == DENSE):
            known[inputs, row.loras] = output
        fields |= relative_errors(output, known.get((inputs, row.loras)))
        return fields | achieved(forward_work(setup.shape, inputs, row.precision), fields["ms"])

    _each(setup, measure, take)


def run_block(setup: BenchSetup, take: RowSink) -> None:
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


def run_image(setup: BenchSetup, take: RowSink) -> None:
    """Sampling and decoding."""
    tensors = _all_tensors(setup)
    vaes: list[Any] = []
    known: dict[Inputs, torch.Tensor] = {}

    def measure(models: RandomModels, row: Row, inputs: Inputs) -> Fields:
        from . import comfyui
        from . import timing as measured

        if not vaes:
            vaes.append(comfyui.random_vae(setup.device, small=setup.shape.dim < 3072))
        patcher = comfyui.prepared(models.patcher(), row)

        def paint() -> comfyui.ImageTimes:
            return comfyui.paint(patcher, vaes[0], tensors[inputs], setup.steps, setup.device)

        resting_gib = measured.allocated_gib(setup.device)
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
        paths = comfyui.paths_of(patcher)
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
            "extra_gib": peaks and peaks.allocated - resting_gib,
            "rel_error": None if error is None else float(error),
            "samples_ms": samples,
        }

    _each(setup, measure, take)


def run_ops(setup: BenchSetup, names: tuple[str, ...], take: RowSink) -> None:
    """Single operations."""
    from .ops import op_cases

    for inputs in setup.inputs:
        for case in op_cases(setup.shape, inputs, setup.device):
            if case.name not in names:
                continue
            fields = _attempt(partial(_measure_op, case, setup), setup.debug)
            take(case.name, inputs, fields)


def _measure_op(case: OpCase, setup: BenchSetup) -> Fields:
    import torch

    from .forward import kernel_fields, timing_fields
    from .timing import time_cold

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


def _each(
    setup: BenchSetup, measure: Callable[[RandomModels, Row, Inputs], Fields], take: RowSink
) -> None:
    with _imports_frozen():
        for weights, rows in groupby(setup.rows, key=lambda row: row.weights):
            models = RandomModels(weights, setup.shape, setup.device, setup.edit)
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
def _imports_frozen() -> Iterator[None]:
    """Keeps the garbage collector from what the hosts have imported: going through it takes half a
    second, at the beginning of each row and, now and then, in a repetition that is timed.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _all_tensors(setup: BenchSetup) -> dict[Inputs, InputTensors]:
    from .forward import input_tensors

    return {inputs: input_tensors(setup.shape, inputs, setup.device) for inputs in setup.inputs}
