"""The operations of a block, each through everything that computes it, and a card's ceilings."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from ..errors import UnavailableError
from ..machine.card import first_line
from ..machine.packages import KITCHEN, check_package
from ..optimizations import reference
from ..optimizations.attention import BACKENDS as ATTENTION
from ..optimizations.attention import AttentionRequest, choose_attention
from ..optimizations.fallback import Fallback
from ..optimizations.fused import TORCH, Ops, choose_ops
from ..optimizations.linear import BACKENDS as GEMMS
from ..optimizations.linear import choose_gemm
from ..optimizations.reference import Modulation, QKNorm, Rotary, Tokens
from ..spec.formats import RowFormat
from ..spec.transformer import TransformerShape
from .inputs import Inputs
from .timing import time_cold

# Tokens of a 1024x1024 image with 200 text tokens, and the MLP's first layer.
M, K, N = 4296, 3072, 12288
COPIED_BYTES = 2**31
# On a CPU these sizes only show that the code runs.
CPU_SIDE = 256


def measure_ceilings(device: torch.device) -> tuple[dict[str, float], dict[str, str]]:
    """Multiplies 4296 x 3072 by 3072 x 12288 in every format, and copies 2 GiB on the card.

    Returns:
        {name with unit: figure}, copies counted as read and written.
        {name with unit: reason} of what does not run on this device.
    """
    m, k, n = (M, K, N) if device.type == "cuda" else (CPU_SIDE, CPU_SIDE, CPU_SIDE)
    copied = COPIED_BYTES if device.type == "cuda" else 2**20
    flops = 2 * m * k * n / 1e9
    cases: dict[str, tuple[Callable[[], Callable[[], Any]], float]] = {
        "bf16 GEMM TFLOP/s": (lambda: _bf16(m, k, n, device), flops),
        "fp8 rowwise GEMM TFLOP/s": (lambda: _fp8(m, k, n, device), flops),
        "int8 GEMM TFLOP/s": (lambda: _int8(m, k, n, device), flops),
        "copy GB/s": (lambda: _copy(copied, device), 2 * copied / 1e6),
    }
    figures, missing = {}, {}
    for name, (make, work) in cases.items():
        try:
            figures[name] = work / time_cold(make(), device).median
        except Exception as error:  # which formats a build and a card multiply is declared nowhere
            missing[name] = first_line(error)
    return figures, missing


def _bf16(m: int, k: int, n: int, device: torch.device) -> Callable[[], Any]:
    x, weight = _normal(m, k, on=device), _normal(n, k, on=device)
    return lambda: F.linear(x, weight)


def _fp8(m: int, k: int, n: int, device: torch.device) -> Callable[[], Any]:
    x, weight = (_normal(rows, k, on=device).to(torch.float8_e4m3fn) for rows in (m, n))
    scale_a, scale_b = torch.ones(m, 1, device=device), torch.ones(1, n, device=device)
    # Fast accumulation is Hopper's ceiling, whatever one thinks of its sums.
    return lambda: torch._scaled_mm(
        x,
        weight.t(),
        scale_a=scale_a,
        scale_b=scale_b,
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )


def _int8(m: int, k: int, n: int, device: torch.device) -> Callable[[], Any]:
    x, weight = (
        torch.randint(-127, 127, (rows, k), device=device, dtype=torch.int8) for rows in (m, n)
    )
    return lambda: torch._int_mm(x, weight.t())


def _copy(count: int, device: torch.device) -> Callable[[], Any]:
    source = torch.empty(count, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


EPS = 1e-6
Call = Callable[[], Any]


class OpCase(NamedTuple):
    """One operation through one program.

    Attributes:
        name: What is computed and by what.
        make: Makes the inputs and gives the call; raises UnavailableError where it cannot run.
        flops: Of products and attention; 0 where memory is what counts.
        bytes: Inputs read once and outputs written once.
    """

    name: str
    make: Callable[[], Call]
    flops: int
    bytes: int


def op_cases(shape: TransformerShape, inputs: Inputs, device: torch.device) -> list[OpCase]:
    """Every case for the tokens of one forward pass, nothing of it made yet."""
    tokens = Tokens(inputs.batch, inputs.text, inputs.stream_tokens, inputs.stream_tokens)
    return [
        *_gemms(shape.dim, tokens.rows, device),
        *_attentions(shape, tokens, device),
        *_norms(shape.dim, tokens, device),
        *_rotations(shape, tokens, device),
        *_quantizers(4 * shape.dim, tokens.rows, device),
        *_decoders(4 * shape.dim, shape.dim, device),
    ]


def _gemms(dim: int, m: int, device: torch.device) -> list[OpCase]:
    """The block's three shapes of products, from bf16 rows to bf16 rows, quantizing included."""
    cases = []
    for k, n in ((dim, dim), (dim, 4 * dim), (4 * dim, dim)):
        flops, moved = 2 * m * k * n, 2 * (m * k + m * n)

        def dense(k: int = k, n: int = n) -> Call:
            x, weight, bias = (
                _normal(m, k, on=device),
                _weight(n, k, device),
                _normal(n, on=device),
            )
            return lambda: F.linear(x, weight, bias)

        cases.append(OpCase(f"gemm {k}x{n} bf16", dense, flops, moved + 2 * n * k))
        for format, names in GEMMS.items():
            for backend in names:

                def quantized(
                    k: int = k, n: int = n, format: str = format, backend: str = backend
                ) -> Call:
                    gemm = choose_gemm(format, device, backend=backend)
                    x, bias = _normal(m, k, on=device), _normal(n, on=device)
                    weight, scale = reference.row_quantize(_weight(n, k, device), RowFormat(format))
                    return lambda: gemm.linear(x, weight, scale, bias)

                name = f"gemm {k}x{n} {format} {backend}"
                cases.append(OpCase(name, quantized, flops, moved + n * k))
    return cases


def _attentions(shape: TransformerShape, tokens: Tokens, device: torch.device) -> list[OpCase]:
    batch, joint = tokens.batch, tokens.joint
    request = AttentionRequest(device, torch.bfloat16, batch, shape.heads, shape.head_dim, joint)

    def make(name: str) -> Call:
        attention = choose_attention(request, name)
        size = (batch, joint, shape.heads, shape.head_dim)
        q, k, v = (_normal(*size, on=device) for _ in range(3))
        return lambda: attention(q, k, v)

    flops = 4 * batch * joint * joint * shape.dim
    moved = 4 * 2 * tokens.rows * shape.dim
    return [
        OpCase(f"attention {name}", lambda name=name: make(name), flops, moved)
        for name in ATTENTION
    ]


def _norms(dim: int, tokens: Tokens, device: torch.device) -> list[OpCase]:
    """LayerNorm and modulation of one stream, and what ours does besides in the same pass."""
    rows = tokens.rows

    def modulation() -> Modulation:
        return Modulation(*(0.1 * _normal(tokens.batch, 3 * dim, on=device) for _ in range(2)))

    def fused(of: Callable[[], Ops], branch: bool, format: RowFormat | None) -> Call:
        ops, x, norms = of(), _normal(rows, dim, on=device), modulation()
        added, gates = (_normal(rows, dim, on=device), modulation()) if branch else (None, None)
        return lambda: ops.residual_norm(x, added, gates, norms, tokens, EPS, format)

    def adaln() -> Call:
        kitchen, x = _kitchen(), _normal(1, rows, dim, on=device)
        scale, shift = (0.1 * _normal(1, 1, dim, on=device) for _ in range(2))
        return lambda: kitchen.adaln(x, scale, shift, EPS)

    def core() -> Call:
        x = _normal(1, rows, dim, on=device)
        scale, shift = (0.1 * _normal(1, 1, dim, on=device) for _ in range(2))
        return lambda: torch.addcmul(shift, F.layer_norm(x, (dim,), eps=EPS), 1 + scale)

    once = 2 * rows * dim
    cases = [
        OpCase("norm+modulate ComfyUI's", core, 0, 2 * once),
        OpCase("norm+modulate comfy-kitchen adaln", adaln, 0, 2 * once),
    ]
    for name, of in _programs(device):
        for what, branch, format, moved in (
            ("norm+modulate", False, None, 2 * once),
            ("residual+norm+modulate", True, None, 4 * once),
            ("residual+norm+modulate+fp8", True, RowFormat("fp8"), 3 * once + once // 2),
        ):

            def make(
                of: Callable[[], Ops] = of,
                branch: bool = branch,
                format: RowFormat | None = format,
            ) -> Call:
                return fused(of, branch, format)

            cases.append(OpCase(f"{what} {name}", make, 0, moved))
    return cases


def _rotations(shape: TransformerShape, tokens: Tokens, device: torch.device) -> list[OpCase]:
    """RMSNorm and rotation of queries and keys."""
    size = (tokens.batch, tokens.joint, shape.heads, shape.head_dim)
    half = shape.head_dim // 2

    def weights() -> QKNorm:
        return QKNorm(*(1 + 0.1 * _normal(shape.head_dim, on=device) for _ in range(4)))

    def angles() -> torch.Tensor:
        return torch.rand(tokens.joint, half, device=device)

    def fused(of: Callable[[], Ops]) -> Call:
        ops, norm, turned = of(), weights(), angles()
        q, k = _normal(*size, on=device), _normal(*size, on=device)
        rotary = Rotary(*(part.bfloat16()[None] for part in (turned.cos(), turned.sin())))
        return lambda: ops.qk_norm_rope(q, k, norm, rotary, tokens, EPS)

    def kitchen() -> Call:
        ck, norm, turned = _kitchen(), weights(), angles()
        # (batch, heads, tokens, head_dim), as ComfyUI has them.
        q, k = (_normal(*size, on=device).transpose(1, 2).contiguous() for _ in range(2))
        cos, sin = turned.cos(), turned.sin()
        matrices = torch.stack([cos, -sin, sin, cos], dim=-1).unflatten(-1, (2, 2))
        matrices = matrices[None, None].bfloat16()
        return lambda: ck.rms_rope_(q, k, matrices, norm.query, norm.key, EPS)

    moved = 4 * 2 * tokens.rows * shape.dim
    return [
        OpCase("qk norm+rope comfy-kitchen rms_rope_", kitchen, 0, moved),
        *(
            OpCase(f"qk norm+rope {name}", lambda of=of: fused(of), 0, moved)
            for name, of in _programs(device)
        ),
    ]


def _quantizers(width: int, rows: int, device: torch.device) -> list[OpCase]:
    cases = []
    for name, of in _programs(device):
        for format in (*map(RowFormat, reference.STORAGE), RowFormat("int8", 256)):

            def gelu(of: Callable[[], Ops] = of, format: RowFormat = format) -> Call:
                ops, x = of(), _normal(rows, width, on=device)
                return lambda: ops.gelu_quantize(x, format)

            def plain(of: Callable[[], Ops] = of, format: RowFormat = format) -> Call:
                ops, x = of(), _normal(rows, width, on=device)
                return lambda: ops.row_quantize(x, format)

            moved = 3 * rows * width
            cases.append(OpCase(f"gelu+quantize {format} {name}", gelu, 0, moved))
            cases.append(OpCase(f"quantize {format} {name}", plain, 0, moved))
    return cases


def _decoders(n: int, k: int, device: torch.device) -> list[OpCase]:
    """Of a weight in 4 bits, with a scale for 16 of them."""

    def decode(of: Callable[[], Ops]) -> Call:
        ops = of()
        codes = torch.randint(-128, 128, (n, k // 2), dtype=torch.int8, device=device)
        scale = torch.rand(n, k // 16, device=device).to(torch.float8_e4m3fn).view(torch.uint8)
        codebook = torch.randn(16, device=device)
        return lambda: ops.decode_weight(codes, scale, codebook, 4)

    moved = n * k // 2 + n * k // 16 + n * k
    return [
        OpCase(f"decode {n}x{k} int4 {name}", lambda of=of: decode(of), 0, moved)
        for name, of in _programs(device)
    ]


def _programs(device: torch.device) -> tuple[tuple[str, Callable[[], Ops]], ...]:
    """Our two ways to compute the kernels."""

    def triton() -> Ops:
        ops = choose_ops(device)
        if isinstance(ops, Fallback) or ops is TORCH:
            raise UnavailableError(str(ops) if isinstance(ops, Fallback) else ops.name)
        return ops

    return ("ours torch", lambda: TORCH), ("ours triton", triton)


def _kitchen() -> Any:
    capability, _ = check_package(KITCHEN)
    if not capability.usable:
        raise UnavailableError(f"{capability.name} {capability.reason}")
    return importlib.import_module(KITCHEN.module)


def _weight(n: int, k: int, device: torch.device) -> torch.Tensor:
    return _normal(n, k, on=device) * k**-0.5


def _normal(*size: int, on: torch.device) -> torch.Tensor:
    return torch.randn(size, device=on, dtype=torch.bfloat16)
