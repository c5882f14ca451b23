"""Operands of the kernels between the GEMMs of a block, and what their results have to be.

The same checks are for the plain-torch twins, for Triton's interpreter and for a card. The truth is
the twin in float64, which tests/unit/test_block_kernels.py compares with published code.
"""

import copy

import torch

from qwen_l40s.optimizations import reference
from qwen_l40s.optimizations.reference import (
    Guidance,
    Modulation,
    QKNorm,
    QuantizedRows,
    Rotary,
    Tokens,
)
from qwen_l40s.spec.formats import RowFormat

EPS = 1e-6
FORMATS = (RowFormat("fp8"), RowFormat("int8"))
ROTATIONS = (16, 64, 256, 1024)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# batch, text, image, zero_from
TOKENS = {
    "one item": Tokens(1, 3, 5, 5),
    "a reference image at timestep zero": Tokens(1, 3, 5, 2),
    "all of the image at timestep zero": Tokens(2, 1, 2, 0),
    "batch of two with a reference": Tokens(2, 2, 3, 2),
    "batch of five": Tokens(5, 2, 1, 1),
    "one text token": Tokens(1, 1, 5, 5),
    "one image token": Tokens(2, 3, 1, 1),
}
# heads, head_dim
HEADS = {
    "the model's heads": (24, 128),
    "one head": (1, 64),
    "three heads": (3, 32),
    "wide heads": (2, 256),
    "narrow heads": (5, 16),
}
# Half of the distance between two numbers, relative.
HALF_STEP = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}
# Lies around and between what a kernel may write.
UNTOUCHED = 7.0


def with_kernels(ops, **kernels):
    """The same, with other kernels in the place of some."""
    found = copy.copy(ops)
    vars(found).update(kernels)
    return found


class Calls:
    """Calls kernels once, prepared for what they are given; as their twins in `reference`."""

    def __init__(self, ops):
        self.ops = ops

    def residual_norm(self, x, branch, gates, norms, tokens, eps, format=None, plain=None):
        out = None if norms is None else torch.empty_like(x)
        if format is not None:
            out = QuantizedRows.empty(x, format)
        given = x, branch, gates, norms, tokens, eps, format, out, plain
        self.ops.residual_norm(*given)(x, gates, norms)
        return (out, None) if format is None else (out.values, out.scale)

    def qk_norm_rope(self, q, k, norm, rotary, *how):
        self.ops.qk_norm_rope(q, k, norm, rotary, *how)(norm, rotary)

    def gelu_quantize(self, x, format, keep=False):
        out = QuantizedRows.empty(x, format)
        self.ops.gelu_quantize(x, format, out, keep=keep)(x)
        return out.values, out.scale

    def row_quantize(self, x, format):
        out = QuantizedRows.empty(x, format)
        self.ops.row_quantize(x, format, out)(x)
        return out.values, out.scale

    def swiglu_quantize(self, gate, up, format, keep=False):
        out = None if format is None else QuantizedRows.empty(gate, format)
        self.ops.swiglu_quantize(gate, up, format, out, keep)()
        return out and (out.values, out.scale)

    def low_rank_rows(self, x, text_down, image_down, order, out):
        self.ops.low_rank_rows(x, text_down, image_down, order, out)(x, text_down, image_down)

    def decode_weight(self, codes, group_scale, codebook, bits):
        out = codes.new_empty(len(codes), codes.shape[1] * 8 // bits)
        given = codes, group_scale, codebook
        self.ops.decode_weight(*given, bits, out)(*given)
        return out

    def scaled_gemm(self, a, b, scale_a, scale_b, bias, out_dtype, beside=None, **activated):
        columns = len(b) // 2 if activated.get("swiglu") else len(b)
        out = a.new_empty(len(a), columns, dtype=out_dtype)
        launch = self.ops.scaled_gemm(a, b, scale_a, scale_b, bias, out, beside, **activated)
        launch(b, scale_b, bias, beside and beside[1], a)
        return out


def random(*shape, dtype=torch.float32, device="cpu", seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device, dtype)


def assert_rounded(out, exact, noise, *, truncated=False):
    """`out` is `exact`, rounded once to its dtype; `noise` is what fp32 adds before that."""
    steps = 2 if truncated and out.dtype == torch.bfloat16 else 1
    error = (out.double() - exact).abs() - exact.abs() * HALF_STEP[out.dtype] * steps
    assert (error <= noise).all(), f"off by {error.max().item():.3g}"


def assert_quantized(q, scale, twin_q, twin_scale):
    """Equal but for numbers that fp32 put on the other side of the middle of two steps.

    Sums of a row in another order change the last bits of each number, about 1e-7 of it; a step is
    6 % of an fp8 number, so that one number in some hundred thousand ends a step apart.
    """
    assert (q.dtype, q.shape) == (twin_q.dtype, twin_q.shape)
    assert (scale.dtype, scale.shape) == (torch.float32, (len(q), 1))
    torch.testing.assert_close(scale, twin_scale, rtol=2e-6, atol=0)
    apart = (_steps(q) - _steps(twin_q)).abs()
    assert apart.max() <= 1
    assert apart.sum() <= max(1, q.numel() // 1000)


def _steps(q):
    """Numbers the values of a format from the smallest to the largest."""
    if q.dtype == torch.int8:
        return q.int()
    bits = q.view(torch.uint8).int()
    return torch.where(bits < 128, bits, 128 - bits)


def formats_of(width):
    return *FORMATS, *(RowFormat("int8", size) for size in ROTATIONS if width % size == 0)


def surrounded(*shape, dtype, device):
    """Zeros of a shape, and the buffer around them: rows before and after that are UNTOUCHED."""
    buffer = torch.full((shape[0] + 2, *shape[1:]), UNTOUCHED, dtype=dtype, device=device)
    return buffer[1:-1].zero_(), buffer


def assert_surrounded(buffer):
    assert (buffer[0] == UNTOUCHED).all()
    assert (buffer[-1] == UNTOUCHED).all()


def halves(tokens, width, dtype=torch.float32, device="cpu", seed=0):
    """Modulation of attention and of the MLP, side by side as the model computes them."""
    entries = tokens.batch * (2 if tokens.zero_from < tokens.image else 1)
    text = random(tokens.batch, 6 * width, dtype=dtype, device=device, seed=seed)
    image = random(entries, 6 * width, dtype=dtype, device=device, seed=seed + 1)
    cut = 3 * width
    return Modulation(text[:, :cut], image[:, :cut]), Modulation(text[:, cut:], image[:, cut:])


def doubled(values):
    return type(values)(*(value.double() for value in values))


def check_residual_norm(function, tokens, width, dtype, *, device="cpu", truncated=False):
    """Every form of the kernel, of one size; `truncated` where casts to bf16 truncate."""
    gates, norms = halves(tokens, width, dtype, device)
    branch = random(tokens.rows, width, dtype=dtype, device=device, seed=2)
    before = random(tokens.rows, width, dtype=dtype, device=device, seed=3)
    x, buffer = surrounded(tokens.rows, width, dtype=dtype, device=device)

    x.copy_(before)
    exact = before.double()
    reference.residual_norm(exact, branch.double(), doubled(gates), None, tokens, EPS)
    assert function(x, branch, gates, None, tokens, EPS) == (None, None)
    assert_rounded(x, exact, 4e-6, truncated=truncated)
    after = x.clone()

    # The norm is that of the rounded row.
    exact, _ = reference.residual_norm(after.double(), None, None, doubled(norms), tokens, EPS)
    x.copy_(before)
    h, scale = function(x, branch, gates, norms, tokens, EPS)
    assert torch.equal(x, after)
    assert (h.dtype, scale) == (dtype, None)
    assert_rounded(h, exact, 3e-5, truncated=truncated)
    alone, _ = function(x, None, None, norms, tokens, EPS)
    assert torch.equal(x, after)
    assert torch.equal(alone, h)

    for format in formats_of(width):
        twin = reference.row_quantize(exact, format)
        x.copy_(before)
        assert_quantized(*function(x, branch, gates, norms, tokens, EPS, format), *twin)
        assert torch.equal(x, after)
        assert_quantized(*function(x, None, None, norms, tokens, EPS, format), *twin)
        # As LoRAs read it: over the branch.
        x.copy_(before)
        over = branch.clone()
        assert_quantized(*function(x, over, gates, norms, tokens, EPS, format, over), *twin)
        assert_rounded(over, exact, 3e-5, truncated=truncated)
    assert_surrounded(buffer)


def rotation(items, joint, head_dim, dtype=torch.float32, device="cpu"):
    angle = random(items, joint, head_dim // 2, seed=4) * 3
    return Rotary(angle.cos().to(device, dtype), angle.sin().to(device, dtype))


def norm_weights(head_dim, dtype=torch.float32, device="cpu"):
    return QKNorm(*random(4, head_dim, dtype=dtype, device=device, seed=5).abs_())


def check_qk_norm_rope(
    function, tokens, heads, head_dim, dtype, *, items=1, angles=None, device="cpu", truncated=False
):
    shape = tokens.joint, 3, heads, head_dim
    _, buffer = surrounded(tokens.batch, *shape, dtype=dtype, device=device)
    q, k, v = (buffer[1:-1, :, part] for part in range(3))
    for part, seed in ((q, 6), (k, 7), (v, 8)):
        part.copy_(random(*q.shape, seed=seed))
    rotary = rotation(items, tokens.joint, head_dim, angles or torch.float32, device)
    norm = norm_weights(head_dim, dtype, device)
    exact_q, exact_k, values = q.double(), k.double(), v.clone()
    reference.qk_norm_rope(exact_q, exact_k, doubled(norm), doubled(rotary), tokens, EPS)
    function(q, k, norm, rotary, tokens, EPS)
    assert_rounded(q, exact_q, 1e-5, truncated=truncated)
    assert_rounded(k, exact_k, 1e-5, truncated=truncated)
    assert torch.equal(v, values)
    assert_surrounded(buffer)


def check_gelu_quantize(function, x):
    for format in formats_of(x.shape[1]):
        q, scale = function(x, format)
        assert_quantized(q, scale, *reference.gelu_quantize(x.double(), format))
        kept, twin = x.clone(), x.clone()
        again = function(kept, format, keep=True)
        assert torch.equal(again[0].float(), q.float()) and torch.equal(again[1], scale)
        reference.gelu_quantize(twin, format, keep=True)
        # The interpreter truncates a cast to bf16.
        torch.testing.assert_close(kept, twin, rtol=2**-7, atol=1e-6, equal_nan=True)


def check_swiglu_quantize(function, gate, up):
    for format in (None, *formats_of(gate.shape[1])):
        kept, twin = gate.clone(), gate.clone()
        if gate.stride(1) == 1 and not gate.is_contiguous():  # halves of one matrix
            kept, twin = (gate.new_empty(len(gate), 2 * gate.shape[1])[:, : gate.shape[1]],) * 2
            kept.copy_(gate)
            twin = gate.clone()
        given = up if kept.stride() == up.stride() else up.contiguous()
        found = function(kept, given, format, keep=True)
        exact = reference.swiglu_quantize(gate.double(), up.double(), format)
        reference.swiglu_quantize(twin, up, None)
        # The interpreter truncates a cast to bf16.
        torch.testing.assert_close(kept, twin, rtol=2**-7, atol=1e-6, equal_nan=True)
        if format is None:
            assert found is None
            continue
        assert_quantized(*found, *exact)
        again = gate.clone()
        if up.stride() == again.stride():
            q, _ = function(again, up, format)
            assert torch.equal(q.float(), found[0].float()) and torch.equal(again, gate)


def check_some_queries(ops, *, dtype=torch.bfloat16, device="cpu", spans=((0, 9), (5, 14))):
    """Queries of some tokens alone are those of a whole pass, bit for bit."""
    batch, heads, head_dim = 2, 3, 64
    tokens = Tokens(batch, 6, 17, 11)
    q, k = random(2, batch, tokens.joint, heads, head_dim, dtype=dtype, device=device)
    rotary = rotation(1, tokens.joint, head_dim, device=device)
    norm = norm_weights(head_dim, dtype, device)
    turned = q.clone(), k.clone()
    ops.qk_norm_rope(*turned, norm, rotary, tokens, EPS)
    for first, stop in spans:
        some, keys = q[:, first:stop].contiguous(), k.clone()
        ops.qk_norm_rope(some, keys, norm, rotary, tokens, EPS, first)
        assert torch.equal(some, turned[0][:, first:stop])
        assert torch.equal(keys, turned[1])


def check_guided_rows(function, shape, cuts, dtype, *, on=(), merged=True, device="cpu", **how):
    """Rows of a prompt, of a negative prompt and of the image, beside the twin in float64."""
    batch, tokens, heads, head_dim = shape
    outs = [
        random(batch, tokens, heads * head_dim, dtype=dtype, device=device, seed=seed)
        for seed in range(3)
    ]
    # One with the strides of a backend that pads its queries.
    sums = [
        4 * random(batch, heads, tokens + 5, device=device, seed=seed)[..., :tokens]
        for seed in range(3, 6)
    ]
    parts = list(zip(outs, sums, strict=True)) if merged else [(it, None) for it in outs[:2]]
    exact = [(out.double(), lse if lse is None else lse.double()) for out, lse in parts]
    guidance = Guidance(4.0, 1.2, 0.5, on)
    expected = reference.guided_rows(guidance, exact, *cuts)
    found = function(guidance, parts, *cuts)
    assert found.data_ptr() == outs[1].data_ptr()
    assert_rounded(found, expected, 2e-5, **how)
