"""Attention that quantizes: in 8 bits, with what the kernels of that compute, and comfy-kitchen's.

In 8 bits softmax(q k^T) v has q and k in int8, one scale for each head of each token, after
SageAttention (arXiv 2410.02367, 2411.10958): softmax does not see a vector that is taken from every
key, and without their mean keys are small enough. `int8` multiplies weights and values in the
values' own dtype, `int8_fp8` both in e4m3, with one scale for each channel of v.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch

from ...machine.packages import KITCHEN_ATTENTION
from ...spec.formats import EIGHT_BIT, FORMATS
from ...spec.sizes import HEAD_TOKENS_AT_ONCE
from .. import kernels
from ..kernels import on_card_of
from ..reference import SMALLEST_ROW, QKNorm, Rotary, Tokens, wide_dtype
from .backends import HALVES, AttentionRequest, Backend, Limits

HEAD_DIMS = (32, 64, 128)  # that the kernels take
# Keys that their mean is taken of; any vector near it does.
SAMPLED = 128
# Weights of e4m3, 1 at most, are multiplied by this: below 2**-9 nothing is left of them.
WEIGHT_SCALE = 256.0
LARGEST_VALUE = FORMATS["fp8"].largest


class Heads(NamedTuple):
    """Queries, keys and values of (batch, heads) in 8 bits; P is `padded(tokens)`, and Q that of
    the queries, where there are fewer.

    Attributes:
        q: (batch, heads, Q, head_dim), int8.
        k: (batch, heads, P, head_dim), int8; less `mean`.
        q_scale: (batch, heads, Q), fp32, with log2(e) / sqrt(head_dim) in it.
        k_scale: (batch, heads, P), fp32.
        mean: (batch, heads, head_dim), fp32: of `SAMPLED` keys.
        v: (batch, heads, head_dim, P), float8_e4m3fn, zero past the last token; None for "int8".
        v_scale: (batch, heads, head_dim), fp32; None for "int8".
        v_largest: (batch, heads, P / HEAD_TOKENS_AT_ONCE, head_dim), fp32: of so many tokens each.
    """

    q: torch.Tensor
    k: torch.Tensor
    q_scale: torch.Tensor
    k_scale: torch.Tensor
    mean: torch.Tensor
    v: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    v_largest: torch.Tensor | None = None

    @classmethod
    def empty(cls, form: str, keys: torch.Tensor, queries: int | None = None) -> Heads:
        """Makes room for keys like these, (batch, tokens, heads, head_dim), and as many queries, or
        `queries` of them, in one piece of memory.
        """
        size = sum(cls.sizes(form, keys.shape, queries))
        return cls.of(form, keys.shape, keys.new_empty(size, dtype=torch.uint8), queries)

    @classmethod
    def of(
        cls,
        form: str,
        shape: tuple[int, ...],
        memory: torch.Tensor,
        queries: int | None = None,
    ) -> Heads:
        """Lays them out in memory of `sum(sizes(form, shape, queries))` bytes, (bytes,), uint8."""
        parts = memory.split(cls.sizes(form, shape, queries))
        tensors = zip(parts, _tensors(form, shape, queries), strict=True)
        return cls(*(part.view(dtype).view(size) for part, (dtype, size) in tensors))

    @staticmethod
    def sizes(form: str, shape: tuple[int, ...], queries: int | None = None) -> list[int]:
        """Counts each tensor's bytes, for keys of this shape, (batch, tokens, heads, head_dim)."""
        tensors = _tensors(form, shape, queries)
        return [dtype.itemsize * math.prod(size) for dtype, size in tensors]


def _tensors(
    form: str, shape: tuple[int, ...], queries: int | None
) -> list[tuple[torch.dtype, tuple[int, ...]]]:
    batch, tokens, heads, head_dim = shape
    pair, length = (batch, heads), padded(tokens)
    channels = (*pair, head_dim)
    lengths = padded(tokens if queries is None else queries), length
    found = [(torch.int8, (*pair, it, head_dim)) for it in lengths]
    found += [(torch.float32, (*pair, it)) for it in lengths] + [(torch.float32, channels)]
    if form == "int8_fp8":
        found += [(torch.float8_e4m3fn, (*channels, length)), (torch.float32, channels)]
        found += [(torch.float32, (*pair, length // HEAD_TOKENS_AT_ONCE, head_dim))]
    return found


def padded(tokens: int) -> int:
    return -(-tokens // HEAD_TOKENS_AT_ONCE) * HEAD_TOKENS_AT_ONCE


def qk_norm_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    norm: QKNorm | None,
    rotary: Rotary | None,
    tokens: Tokens,
    eps: float,
    into: Heads | None = None,
    first: int = 0,
) -> None:
    """Normalizes the heads of queries and keys and turns them by their position, in place or into
    8 bits.

        n = x / sqrt(mean(x * x) + eps) * weight;  (a, b) = (a cos - b sin, a sin + b cos)

    with a and b the elements 2 i and 2 i + 1 of a head. Computed in fp32, or float64 for a float64
    q, and rounded once.

    Args:
        q: (B, queries, heads, head_dim), in joint order from token `first` on; batch and tokens
            with any stride.
        k: (B, joint, heads, head_dim), likewise.
        norm: Weights of both streams.
        rotary: Cosines and sines of every token; both None where q and k are normalized and
            rotated, for int8.
        tokens: How many of the tokens are text.
        eps: Added to the mean square.
        into: Is written, and q and k stay as they are; None changes them in place.
    """
    if norm is not None:
        if into is not None:
            q, k = (part.to(torch.float32, copy=True) for part in (q, k))
        wide = wide_dtype(q)
        cos, sin = (part.to(wide).unsqueeze(2) for part in rotary)
        for x, start, weights in (
            (q, first, (norm.text_query, norm.query)),
            (k, 0, (norm.text_key, norm.key)),
        ):
            stop = start + x.shape[1]
            cut = min(max(tokens.text, start), stop)
            for begin, end, weight in ((start, cut, weights[0]), (cut, stop, weights[1])):
                here = slice(begin - start, end - start)
                part = x[:, here].to(wide)
                part = part * (part.square().mean(-1, keepdim=True) + eps).rsqrt()
                a, b = (part * weight.to(wide)).unflatten(-1, (-1, 2)).unbind(-1)
                c, s = cos[:, begin:end], sin[:, begin:end]
                x[:, here] = torch.stack((a * c - b * s, a * s + b * c), dim=-1).flatten(-2)
    if into is not None:
        quantize_heads(q, k, into)


def score_scale(head_dim: int) -> float:
    """Gives what queries are multiplied by, for weights that are powers of two."""
    return math.log2(math.e) / math.sqrt(head_dim)


def quantize_heads(q: torch.Tensor, k: torch.Tensor, into: Heads) -> None:
    """Quantizes queries and keys to int8, by the largest magnitude of each head of each token.

        scale = max(|row|) / 127, or 1 for a zero row;  q = round_to_even(row / scale)

    Args:
        q, k: (batch, tokens, heads, head_dim), normalized and rotated; q may have fewer tokens.
        into: Is written, of as many.
    """
    tokens, head_dim = k.shape[1], k.shape[3]
    q, k = (part.transpose(1, 2).float() for part in (q, k))
    into.mean.copy_(k[:, :, sampled(tokens, k.device)].mean(2))
    k = k - into.mean.unsqueeze(2)
    for x, values, scales, factor in (
        (q, into.q, into.q_scale, score_scale(head_dim)),
        (k, into.k, into.k_scale, 1.0),
    ):
        largest = x.abs().amax(-1)
        scale = _scale(largest, 127.0)
        steps = (x * scale.reciprocal().unsqueeze(-1)).clamp(-127, 127).round()
        values[:, :, : x.shape[2]] = steps.to(torch.int8)
        scales[:, :, : x.shape[2]] = scale * factor


def sampled(tokens: int, device: torch.device | None = None) -> torch.Tensor:
    """Gives the tokens that the mean of the keys is taken of, (SAMPLED,), int64."""
    return torch.arange(SAMPLED, device=device) * tokens // SAMPLED


def quantize_values(v: torch.Tensor, into: Heads) -> None:
    """Quantizes values to e4m3, transposed, by the largest magnitude of each channel.

    Args:
        v: (batch, tokens, heads, head_dim).
    """
    tokens = v.shape[1]
    v = v.permute(0, 2, 3, 1).float()
    largest = v.abs().amax(-1)
    scale = _scale(largest, LARGEST_VALUE)
    into.v.zero_()
    into.v[..., :tokens] = (v * scale.reciprocal().unsqueeze(-1)).to(into.v.dtype)
    into.v_scale.copy_(scale)


def _scale(largest: torch.Tensor, steps: float) -> torch.Tensor:
    # By a tensor: by a number, a card multiplies with the reciprocal, which is not the same.
    exact = largest / torch.full((), steps, device=largest.device)
    return torch.where(largest < SMALLEST_ROW, 1.0, exact)


def attention_8bit(
    heads: Heads, v: torch.Tensor, mask: torch.Tensor | None, out: torch.Tensor
) -> None:
    """Computes softmax(q @ k.T + mask) @ v of heads in 8 bits; some queries at a time.

    Args:
        heads: With values in e4m3 where weights are to be multiplied in it.
        v: (batch, tokens, heads, head_dim), any strides.
        mask: (batch, 1, 1, tokens), added to the scores, or None.
        out: (batch, queries, heads, head_dim), is written.
    """
    tokens = v.shape[1]
    k = (heads.k * heads.k_scale.unsqueeze(-1))[:, :, :tokens]
    if heads.v is None:
        values = v.transpose(1, 2).float()
    else:
        values = heads.v[..., :tokens].float().transpose(2, 3)
    queries = out.shape[1]
    for start in range(0, queries, HEAD_TOKENS_AT_ONCE):
        some = slice(start, min(start + HEAD_TOKENS_AT_ONCE, queries))
        q = heads.q[:, :, some] * heads.q_scale[:, :, some].unsqueeze(-1)
        scores = q @ k.transpose(2, 3)
        if mask is not None:
            scores = scores + mask.float() * math.log2(math.e)
        weights = torch.exp2(scores - scores.amax(-1, keepdim=True))
        sums = weights.sum(-1, keepdim=True)
        if heads.v is None:
            mixed = weights.to(v.dtype).float() @ values / sums
        else:
            weights = (weights * WEIGHT_SCALE).to(heads.v.dtype).float()
            mixed = weights @ values / (sums * WEIGHT_SCALE) * heads.v_scale.unsqueeze(2)
        out[:, some] = mixed.transpose(1, 2).to(out.dtype)


def _in_8_bits(
    form: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    into = Heads.empty(form, k, q.shape[1])
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    mask = mask if mask is None or mask.stride(3) == 1 else mask.contiguous()
    if q.is_cuda:
        from ..kernels.attention_8bit import attention_8bit as attention
        from ..kernels.qk_norm_rope import qk_norm_rope

        packed = k.shape[3], 1
        q, k = (x if x.stride()[2:] == packed else x.contiguous() for x in (q, k))
        tokens = Tokens(len(k), 0, k.shape[1], k.shape[1])
        quantize = qk_norm_rope(q, k, None, None, tokens, 0.0, into)
        for launch in (*quantize, *attention(into, v, mask, out)):
            launch.once()
    else:
        quantize_heads(q, k, into)
        if into.v is not None:
            quantize_values(v, into)
        attention_8bit(into, v, mask, out)
    return out.flatten(2)


def _without_triton(request: AttentionRequest) -> str:
    return kernels.missing() if request.device.type == "cuda" else ""


INT8, INT8_FP8 = (
    Backend(
        form,
        functools.partial(_in_8_bits, form),
        exact=False,
        card=Limits(FORMATS[multiplied].oldest, dtypes=HALVES, heads=HEAD_DIMS),
        cpu=Limits(heads=HEAD_DIMS),
        further=_without_triton,
        quantizes=True,
    )
    for form, multiplied in EIGHT_BIT.items()
)


def kitchen(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Attends by comfy-kitchen, q, k, v and the softmax's weights in int8; as `Backend.attend`.

    The package rotates q and k by a Hadamard matrix before it rounds them. It takes other kernels
    for keys up to 256 and 1,024, pads heads of other sizes, and reads masks. `KITCHEN_INT8` takes
    none of these, so that one path is tried and measured.
    """
    from comfy_kitchen import int8_attention

    with on_card_of(q):
        out = int8_attention(*(x.transpose(1, 2) for x in (q, k, v)))
    return out.transpose(1, 2).flatten(2)


KITCHEN_INT8 = Backend(
    "kitchen_int8",
    kitchen,
    exact=False,
    card=Limits(
        FORMATS["int8"].oldest, dtypes=HALVES, heads=(64, 128, 256), fewest=1025, masks=False
    ),
    package=KITCHEN_ATTENTION,
)
