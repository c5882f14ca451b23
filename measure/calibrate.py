"""Measures what the estimates need to know of this card, in under a minute. What a block consists
of is run together: a product alone runs faster, because a card at its power limit slows down.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F

from ..errors import UnavailableError
from ..families.protocol import StepTokens
from ..families.qwen_image import BLOCK_GEMMS
from ..loaders.quantize import row_format
from ..machine.card import read_cards
from ..machine.store import Calibration
from ..optimizations import reference
from ..optimizations.attention import Attention, AttentionRequest, choose_attention
from ..optimizations.fused import Ops, choose_ops
from ..optimizations.linear import choose_gemm, dense_linear
from ..optimizations.reference import Modulation, QuantizedRows, Tokens
from ..planning.rates import Rates
from ..planning.times import Pass, norm_bytes
from ..spec.formats import MULTIPLIED, QUANTIZED, RowFormat, format_gib
from ..spec.transformer import TransformerShape
from ..verdict import Verdict
from .timing import (
    Launched,
    LaunchedBlocks,
    MixPart,
    MixSum,
    launches_of,
    run_mix,
    time_launches,
)

# Of each precision's mix, of the VAE's layers and of fp32 products.
SECONDS = 5.0
IMAGE_TOKENS, TEXT_TOKENS = 4096, 200
ENCODER_SIZES = 264, 3584, 18944  # rows, width and hidden width of the text encoder's products
# The VAE's widest layers by time: (channels, rows and columns); and what one reads and writes of a
# value in bf16: two norms of 8, two SiLUs of 2, two convolutions of 6, a sum of 3.
RESIDUALS = ((96, 1024), (192, 512), (384, 256))
RESIDUAL_BYTES = 2 * (2 * 8 + 2 * 2 + 2 * 6 + 3)
EPS = 1e-6
GEMM, ATTENTION, NORM, CONVOLUTION, ENCODER = "gemm", "attention", "norm", "convolution", "encoder"
GRAPH = "CUDA graph"


class CalibrationSizes(NamedTuple):
    """Describes what is measured; smaller on a CPU, to try it."""

    work: Pass
    residuals: Sequence[tuple[int, int]] = RESIDUALS
    encoder: tuple[int, int, int] = ENCODER_SIZES
    copied: int = 2**28  # bytes
    seconds: float = SECONDS


def full_sizes(shape: TransformerShape) -> CalibrationSizes:
    return CalibrationSizes(Pass(shape, StepTokens(TEXT_TOKENS, IMAGE_TOKENS)))


def small_sizes(shape: TransformerShape) -> CalibrationSizes:
    return CalibrationSizes(Pass(shape, StepTokens(8, 64)), ((16, 16),), (8, 64, 128), 2**20, 0.05)


@torch.inference_mode()
def calibrate(
    device: torch.device, sizes: CalibrationSizes, say: Callable[[str], None]
) -> tuple[Calibration, dict[str, Verdict]]:
    """Measures rates, and {precision or `GRAPH`: why not}; raises UnavailableError."""
    try:
        return _calibrate(device, sizes, say)
    except torch.OutOfMemoryError as error:
        raise UnavailableError(
            "too little GPU memory is free: this needs 3 GiB, so end other programs on the GPU."
        ) from error


def _calibrate(
    device: torch.device, sizes: CalibrationSizes, say: Callable[[str], None]
) -> tuple[Calibration, dict[str, Verdict]]:
    work = sizes.work
    left_out: dict[str, Verdict] = {}
    gemm: dict[str, float] = {}
    launched: dict[str, Launched] = {}
    ops, shape = choose_ops(device), work.shape
    if isinstance(ops, Verdict):
        raise UnavailableError(f"the fused blocks, which this measures, do not run here: {ops}.")
    sizes_of_pass = work.tokens.items, shape.heads, shape.head_dim, work.tokens.joint
    attend = choose_attention(AttentionRequest(device, torch.bfloat16, *sizes_of_pass))
    shared = {ATTENTION: MixSum(), NORM: MixSum()}
    for precision in MULTIPLIED:
        say(f"{precision} block")
        found = _products(work, precision, device)
        if isinstance(found, Verdict):
            left_out[precision] = found
            continue
        parts = [*found, *_between(work, precision, attend, ops, device)]
        sums = run_mix(parts, device, sizes.seconds)
        gemm[precision] = sums[GEMM].rate
        for name, total in shared.items():
            total.add(sums[name].work, sums[name].seconds)
        del found, parts
        say(f"{precision} launches")
        blocks = LaunchedBlocks(work.shape, precision, ops, attend, device)  # type: ignore[arg-type]
        launched[precision] = time_launches(blocks, device)
        if isinstance(graph := launched[precision].graph, Verdict):
            left_out[GRAPH] = graph
        del blocks
    bandwidth = shared[NORM].rate
    say("VAE")
    convolution = _convolution(sizes, device, bandwidth)
    say("text encoder")
    encoder = run_mix(_encoder(sizes.encoder, device), device, sizes.seconds)[ENCODER].rate
    say("link")
    rates = Rates(
        gemm=gemm,
        attention=shared[ATTENTION].rate,
        bandwidth=bandwidth,
        convolution=convolution,
        encoder=encoder,
        pcie=_link(sizes.copied, device),
        launches=launches_of(launched),
    )
    return Calibration(*_about(device), rates), left_out


def _products(work: Pass, precision: str, device: torch.device) -> list[MixPart] | Verdict:
    """Lists every product of a block, or says why the card does not multiply the precision."""
    gemm = None
    if precision in QUANTIZED:
        gemm = choose_gemm(precision, device)
        if gemm.weight_only and device.type != "cpu":
            return Verdict(gemm.reason)
    parts = []
    counts = {work.products(layer)[1] for layer in BLOCK_GEMMS}
    rows = {tokens: _random(tokens, 4 * work.shape.dim, on=device) for tokens in counts}
    for layer, (height, depth) in BLOCK_GEMMS.items():
        n, k = height * work.shape.dim, depth * work.shape.dim
        _, m = work.products(layer)
        x = rows[m][:, :k].contiguous()
        weight = _random(n, k, on=device) * k**-0.5
        bias, out = _random(n, on=device), torch.empty(m, n, dtype=x.dtype, device=device)
        if gemm is None:
            call = partial(dense_linear, x, weight, bias, out=out)
        else:
            rounded = reference.row_quantize(weight, RowFormat(precision))
            operands = (*gemm.quantize(x), *rounded, bias)
            call = partial(gemm.linear_quantized, *operands, out.dtype, out=out)
        parts.append(MixPart(GEMM, call, 2 * m * n * k))
    return parts


def _between(
    work: Pass, precision: str, attend: Attention, ops: Ops, device: torch.device
) -> list[MixPart]:
    shape, counted = work.shape, work.tokens
    q, k, v = _random(3, counted.items, counted.joint, shape.heads, shape.head_dim, on=device)
    tokens = Tokens(counted.items, counted.text, counted.image, counted.image)
    x, branch = _random(2, counted.rows, shape.dim, on=device)
    halves = Modulation(*_random(2, counted.items, 3 * shape.dim, on=device))
    format = row_format(precision, shape.dim) if precision in QUANTIZED else None
    out = torch.empty_like(x) if format is None else QuantizedRows.empty(x, format)
    norm = ops.residual_norm(x, branch, halves, halves, tokens, EPS, format, out)
    norm = partial(norm, x, halves, halves)
    moved = counted.rows * norm_bytes(shape.dim, format is not None)
    attention = MixPart(
        ATTENTION,
        partial(attend, q, k, v),
        4 * counted.items * counted.joint**2 * shape.dim,
    )
    return [attention, *2 * [MixPart(NORM, norm, moved)]]


def _convolution(sizes: CalibrationSizes, device: torch.device, bandwidth: float) -> float:
    """Finds the rate that explains what residual blocks take besides their traffic."""
    parts, flops, moved = [], 0, 0
    for channels, side in sizes.residuals:
        counted, values = 2 * 2 * 9 * channels**2 * side**2, channels * side**2
        flops, moved = flops + counted, moved + RESIDUAL_BYTES * values
        x = _random(1, channels, 1, side, side, on=device)
        weights = _random(2, channels, channels, 1, 3, 3, on=device) * (9 * channels) ** -0.5
        gamma = _random(channels, 1, 1, 1, on=device)
        call = partial(_residual, x, weights, gamma)
        parts.append(MixPart(CONVOLUTION, call, counted))
    rate = run_mix(parts, device, sizes.seconds)[CONVOLUTION].rate
    seconds = flops / rate
    return flops / max(seconds - moved / bandwidth, seconds / 5)  # a fifth is theirs at least


def _residual(x: torch.Tensor, weights: torch.Tensor, gamma: torch.Tensor) -> torch.Tensor:
    """Computes a residual block as ComfyUI does (comfy/ldm/wan/vae.py), of one frame."""
    y = x
    for weight in weights:
        y = F.silu(F.normalize(y, dim=1) * y.shape[1] ** 0.5 * gamma)
        y = F.conv3d(y, weight, padding=(0, 1, 1))
    return x + y


def _encoder(sizes: tuple[int, int, int], device: torch.device) -> list[MixPart]:
    rows, width, hidden = sizes
    x = torch.randn(rows, width, device=device)
    up = torch.randn(hidden, width, device=device) * width**-0.5
    down = torch.randn(width, hidden, device=device) * hidden**-0.5
    wide = F.linear(x, up)
    flops = 2 * rows * width * hidden
    return [
        MixPart(ENCODER, partial(F.linear, x, up), flops),
        MixPart(ENCODER, partial(F.linear, wide, down), flops),
    ]


def _link(size: int, device: torch.device) -> float:
    """Measures bytes per second from pinned memory to the device, the best of five."""
    if device.type == "cuda":
        try:
            source = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            raise UnavailableError(
                f"{format_gib(size)} of system RAM cannot be pinned: measure with less."
            ) from error
        target = torch.empty_like(source, device=device)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        seconds = []
        for _ in range(5):
            begin.record()
            target.copy_(source, non_blocking=True)
            end.record()
            end.synchronize()
            seconds.append(begin.elapsed_time(end) / 1e3)
        return size / min(seconds)
    source = torch.ones(size, dtype=torch.uint8)
    target = torch.empty_like(source)
    begun = time.perf_counter()
    target.copy_(source)
    return size / (time.perf_counter() - begun)


def _about(device: torch.device) -> tuple[str, str, str, str]:
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    if device.type != "cuda":
        return "CPU", "", torch.__version__, date
    return torch.cuda.get_device_name(device), read_cards(torch).driver, torch.__version__, date


def _random(*size: int, on: torch.device) -> torch.Tensor:
    return torch.randn(size, device=on, dtype=torch.bfloat16)
