"""Times the operations of a block, each through everything that computes it, and a copy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from ..errors import UnavailableError
from ..optimizations import reference
from ..optimizations.attention import BACKENDS as ATTENTION
from ..optimizations.attention import AttentionRequest, choose_attention
from ..optimizations.fused import Ops, choose_ops
from ..optimizations.linear import choose_gemm
from ..optimizations.reference import Modulation, QKNorm, QuantizedRows, Rotary, Tokens
from ..spec.formats import FORMATS, RowFormat
from ..spec.transformer import TransformerShape
from ..verdict import Verdict
from .measure import Fields, by_turns, times_ms
from .rows import BenchSetup, Inputs

EPS = 1e-6
COPIED_BYTES, COPIED_BYTES_CPU = 2**31, 2**20
Call = Callable[[], Any]


class OpCase(NamedTuple):
    task: str
    program: str
    make: Callable[[], Call]  # makes inputs and gives the call, or raises UnavailableError
    flops: int  # of products and attention; 0 where memory is what counts
    bytes: int  # inputs read once and outputs written once

    @property
    def name(self) -> str:
        return f"{self.task} {self.program}"


def op_cases(shape: TransformerShape, inputs: Inputs, device: torch.device) -> list[OpCase]:
    """Lists every case for the tokens of one forward pass, nothing of it made yet."""
    parts = (_gemms, _attentions, _kernels)
    return [case for part in parts for case in part(shape, inputs, device)] + [_copy(device)]


def _gemms(shape: TransformerShape, inputs: Inputs, device: torch.device) -> Iterator[OpCase]:
    """Lists the block's three shapes of products, from bf16 rows to bf16, quantizing included."""
    dim, m = shape.dim, inputs.batch * (inputs.text + inputs.stream_tokens)

    def dense(k: int, n: int) -> Call:
        x, weight, bias = _normal(m, k, on=device), _weight(n, k, device), _normal(n, on=device)
        return lambda: F.linear(x, weight, bias)

    def quantized(k: int, n: int, format: str, backend: str) -> Call:
        gemm = choose_gemm(format, device, backend=backend)
        x, bias = _normal(m, k, on=device), _normal(n, on=device)
        weight, scale = reference.row_quantize(_weight(n, k, device), RowFormat(format))
        return lambda: gemm.linear(x, weight, scale, bias)

    for k, n in ((dim, dim), (dim, 4 * dim), (4 * dim, dim)):
        task, flops, moved = f"gemm {k}x{n}", 2 * m * k * n, 2 * (m * k + m * n)
        yield OpCase(task, "bf16", partial(dense, k, n), flops, moved + 2 * n * k)
        for format, known in FORMATS.items():
            for name in known.gemms:
                make = partial(quantized, k, n, format, name)
                yield OpCase(task, f"{format} {name}", make, flops, moved + n * k)


def _attentions(shape: TransformerShape, inputs: Inputs, device: torch.device) -> Iterator[OpCase]:
    batch, joint = inputs.batch, inputs.text + inputs.stream_tokens
    request = AttentionRequest(device, torch.bfloat16, batch, shape.heads, shape.head_dim, joint)

    def make(name: str) -> Call:
        attention = choose_attention(request, name)
        q, k, v = (_normal(batch, joint, shape.heads, shape.head_dim, on=device) for _ in range(3))
        return lambda: attention(q, k, v)

    flops, moved = 4 * batch * joint * joint * shape.dim, 4 * 2 * batch * joint * shape.dim
    for name in ATTENTION:
        yield OpCase("attention", name, partial(make, name), flops, moved)


def _kernels(shape: TransformerShape, inputs: Inputs, device: torch.device) -> Iterator[OpCase]:
    """Lists the kernels between products, of which the estimator's bandwidth is fitted."""
    tokens = Tokens(inputs.batch, inputs.text, inputs.stream_tokens, inputs.stream_tokens)
    dim, rows, width = shape.dim, tokens.rows, 4 * shape.dim

    def modulation() -> Modulation:
        return Modulation(*(0.1 * _normal(tokens.batch, 3 * dim, on=device) for _ in range(2)))

    def norm(branch: bool, format: RowFormat | None) -> Call:
        ops, x, norms = _ops(device), _normal(rows, dim, on=device), modulation()
        added, gates = (_normal(rows, dim, on=device), modulation()) if branch else (None, None)
        out = torch.empty_like(x) if format is None else QuantizedRows.empty(x, format)
        launch = ops.residual_norm(x, added, gates, norms, tokens, EPS, format, out)
        return lambda: launch(x, gates, norms)

    def rotate() -> Call:
        ops, size = _ops(device), (tokens.batch, tokens.joint, shape.heads, shape.head_dim)
        norms = QKNorm(*(1 + 0.1 * _normal(shape.head_dim, on=device) for _ in range(4)))
        turned = torch.rand(tokens.joint, shape.head_dim // 2, device=device)
        rotary = Rotary(*(part.bfloat16()[None] for part in (turned.cos(), turned.sin())))
        q, k = _normal(*size, on=device), _normal(*size, on=device)
        launch = ops.qk_norm_rope(q, k, norms, rotary, tokens, EPS)
        return lambda: launch(norms, rotary)

    def quantize(kernel: str, format: RowFormat) -> Call:
        ops, x = _ops(device), _normal(rows, width, on=device)
        launch = getattr(ops, kernel)(x, format, QuantizedRows.empty(x, format))
        return lambda: launch(x)

    once = 2 * rows * dim
    found: list[tuple[str, Callable[[], Call], int]] = [
        ("norm+modulate", partial(norm, False, None), 2 * once),
        ("residual+norm+modulate", partial(norm, True, None), 4 * once),
        ("residual+norm+modulate+fp8", partial(norm, True, RowFormat("fp8")), 7 * once // 2),
        ("qk norm+rope", rotate, 4 * once),
    ]
    for format in (*map(RowFormat, FORMATS), RowFormat("int8", 256)):
        for task, kernel in (("gelu+quantize", "gelu_quantize"), ("quantize", "row_quantize")):
            found.append((f"{task} {format}", partial(quantize, kernel, format), 3 * rows * width))
    for task, make, moved in found:
        yield OpCase(task, "ours", make, 0, moved)


def _copy(device: torch.device) -> OpCase:
    count = COPIED_BYTES if device.type == "cuda" else COPIED_BYTES_CPU

    def make() -> Call:
        source = torch.empty(count, dtype=torch.uint8, device=device).random_()
        target = torch.empty_like(source)
        return lambda: target.copy_(source)

    return OpCase("copy", "torch", make, 0, 2 * count)


def _ops(device: torch.device) -> Ops:
    ops = choose_ops(device)
    if isinstance(ops, Verdict):
        raise UnavailableError(str(ops))
    return ops


def _weight(n: int, k: int, device: torch.device) -> torch.Tensor:
    return _normal(n, k, on=device) * k**-0.5


def _normal(*size: int, on: torch.device) -> torch.Tensor:
    return torch.randn(size, device=on, dtype=torch.bfloat16)


def run_ops(setup: BenchSetup, add: Callable[[Fields], None]) -> None:
    """Measures the chosen cases, those of one task alternately."""
    for inputs in setup.inputs:
        cases = op_cases(setup.shape, inputs, setup.device)
        chosen = [case for case in cases if case.name in setup.names]
        for _, same in groupby(chosen, key=lambda case: case.task):
            cases = list(same)
            rows = by_turns(cases, inputs, partial(_time_op, setup, {}), setup)
            for case, row in zip(cases, rows, strict=True):
                row.pop("samples_ms", None)  # of short calls there are hundreds
                if "ms" in row:
                    row["gbs"] = case.bytes / row["ms"] / 1e6
                    row |= {"tflops": case.flops / row["ms"] / 1e9} if case.flops else {}
                add(row)


@torch.inference_mode()
def _time_op(
    setup: BenchSetup, made: dict[str, Call], case: OpCase, repeats: int, again: bool
) -> Fields:
    if not again:
        try:
            made[case.name] = case.make()
        except UnavailableError as error:
            return {"left_out": str(error)}
    return {"samples_ms": times_ms(made[case.name], setup.device, repeats)}
