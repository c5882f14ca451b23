"""What a backend of attention is; those of PyTorch, its kernels one at a time, and of packages.

Left alone, PyTorch takes the first kernel that fits. On an H200 that is FlashAttention-2, 0.800 ms
for 24 heads x 128 and 4296 tokens in bf16, where cuDNN takes 0.454.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from ...caches import cached
from ...machine.packages import FLASH_ATTENTION_3, KITCHEN_ATTENTION, Package
from ...spec.formats import FORMATS
from ...spec.formats import KITCHEN_INT8 as KITCHEN_NAME
from ..kernels import on_card_of

HALVES = frozenset({torch.bfloat16, torch.float16})
FLOATS = HALVES | {torch.float32}


@dataclass(frozen=True)
class AttentionRequest:
    """Describes the tensors of an attention call, without their values."""

    device: torch.device
    dtype: torch.dtype  # of q, k, v, the mask and the result
    batch: int
    heads: int
    head_dim: int
    tokens: int  # text and image tokens of one item together
    masked: bool = False  # whether an additive mask comes with it

    @classmethod
    def of(cls, q: torch.Tensor, mask: torch.Tensor | None) -> AttentionRequest:
        """Describes a call with q, (batch, tokens, heads, head_dim), and mask."""
        batch, tokens, heads, head_dim = q.shape
        return cls(q.device, q.dtype, batch, heads, head_dim, tokens, mask is not None)


@dataclass(frozen=True)
class Limits:
    """Limits the calls that a backend computes on one kind of device."""

    oldest: tuple[int, int] = (0, 0)  # the lowest compute capability
    # the only compute capabilities; empty: all from `oldest` on
    cards: tuple[tuple[int, int], ...] = ()
    dtypes: frozenset[torch.dtype] = FLOATS
    widest: int = 2**16  # the most elements of a head
    # the only elements of a head that it takes; empty: every number up to `widest`
    heads: tuple[int, ...] = ()
    head_bytes: int = 1  # what the bytes of a head are a multiple of
    fewest: int = 1  # the fewest tokens
    masks: bool = True  # whether it takes an additive mask

    def refusal(self, request: AttentionRequest, sm: tuple[int, int] | None) -> str:
        """Says why a request is outside, in one clause; empty when it is inside."""
        if sm is not None and self.cards and sm not in self.cards:
            return f"{sm_name(sm)}, has code for {', '.join(map(sm_name, self.cards))}"
        if sm is not None and sm < self.oldest:
            return f"{sm_name(sm)}, needs {sm_name(self.oldest)} or newer"
        if request.dtype not in self.dtypes:
            taken = " and ".join(sorted(dtype_name(dtype) for dtype in self.dtypes))
            return f"takes {taken}, not {dtype_name(request.dtype)}"
        if request.head_dim > self.widest:
            return f"takes heads of at most {self.widest}, not {request.head_dim}"
        if self.heads and request.head_dim not in self.heads:
            return f"takes heads of {', '.join(map(str, self.heads))}, not {request.head_dim}"
        if request.head_dim * request.dtype.itemsize % self.head_bytes:
            multiple = self.head_bytes // request.dtype.itemsize
            return f"takes heads of a multiple of {multiple}, not {request.head_dim}"
        if request.tokens < self.fewest:
            return f"needs {self.fewest} tokens, there are {request.tokens}"
        return "takes no mask" if request.masked and not self.masks else ""


ANY = Limits()


@dataclass(frozen=True)
class Backend:
    name: str
    # takes q, k, v, each (B, tokens, heads, head_dim) with any strides but a contiguous last
    # dimension, and None or the mask, (B, 1, 1, tokens), which is added to the scores; gives (B,
    # tokens, heads * head_dim), contiguous, in memory of its own
    attend: Callable[..., Any]
    # whether nothing is quantized: the result is as near to the true one as the dtype allows
    exact: bool = True
    card: Limits | None = None  # its limits on an NVIDIA card; None where it does not run on one
    cpu: Limits | None = None  # the same on a CPU
    other: Limits | None = None  # the same on any other device
    package: Package | None = None  # what has to be installed; None for PyTorch's own
    # whether it writes the matrix of scores to memory: never the fastest
    whole_scores: bool = False
    # gives what else speaks against a request
    further: Callable[[AttentionRequest], str] | None = None
    # whether `attend` takes `lse=True`, and then gives the logarithms of the sums of exp(scores)
    # besides, (B, heads, tokens of q) in fp32
    gives_lse: bool = False
    # Whether its first call of each length takes long. H100, 24 heads x 128, any length: 46 ms of
    # cuDNN, below 1 ms of flash and efficient; at 4296 tokens a call of cuDNN takes 0.62 ms, of
    # flash 0.77.
    plans: bool = False


def sm_name(sm: tuple[int, int]) -> str:
    return f"sm_{sm[0]}{sm[1]}"


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# PyTorch's own kernels: each by its operator, called as F.scaled_dot_product_attention calls it.
# Choosing among them with `sdpa_kernel` takes 20 us a call, and sets flags of the whole process
# that another thread may be setting for its own card. In a torch whose operators are others, the
# trial fails and says so.

# The efficient kernel reads the mask, and FlashAttention heads, 8 elements at a time.
ALIGNMENT = 8


def _flash(q, k, v, mask, lse, causal=False):
    if q.is_cpu:
        if causal:  # the CPU's is_causal would count from the first key
            mask = lower_right(q.shape[-2], k.shape[-2], q)
        return torch._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=mask)
    width = q.shape[-1]
    q, k, v = (F.pad(x, (0, -width % ALIGNMENT)) if width % ALIGNMENT else x for x in (q, k, v))
    how = {"is_causal": causal, "scale": 1 / math.sqrt(width)}
    found = torch._scaled_dot_product_flash_attention(q, k, v, **how)
    return found[0][..., :width], found[1]


def _cudnn(q, k, v, mask, lse):
    return torch._scaled_dot_product_cudnn_attention(q, k, v, mask, lse)


def _efficient(q, k, v, mask, lse):
    if mask is not None:
        mask = aligned_mask(mask).expand(*q.shape[:-1], k.shape[-2])
    return torch._scaled_dot_product_efficient_attention(q, k, v, mask, lse)


def _math(q, k, v, mask, lse):
    if q.is_cpu or q.is_cuda:
        return torch._scaled_dot_product_attention_math(q, k, v, attn_mask=mask)
    # Apple's has an operator of its own.
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask), None


def _needs_lse(q, k, v) -> bool:
    return torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)


def _attend(
    compute: Callable[..., torch.Tensor],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    lse: bool = False,
    **how: bool,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    # The kernels lay their result out as q is: transposed back, it is contiguous without a copy.
    given = (x.transpose(1, 2) for x in (q, k, v))
    found = compute(*given, mask, lse or _needs_lse(q, k, v), **how)
    out = found[0].transpose(1, 2).flatten(2)
    # The efficient kernel's rows are padded to 32, and cuDNN's have one dimension more.
    return (out, found[1].flatten(2)[..., : q.shape[1]]) if lse else out


def aligned_mask(mask: torch.Tensor) -> torch.Tensor:
    """Starts a mask's rows at multiples of 8 elements, as the efficient kernel reads them.

    What is aligned already comes back as it is: aligned once per forward, it is copied in no block.
    """
    *strides, last = mask.stride()
    starts = (mask.storage_offset(), *strides)
    if last == 1 and all(start % ALIGNMENT == 0 for start in starts):
        return mask
    tokens = mask.shape[-1]
    return F.pad(mask.contiguous(), (0, -tokens % ALIGNMENT))[..., :tokens]


def lower_right(queries: int, keys: int, like: torch.Tensor) -> torch.Tensor:
    """Makes the causal mask, (queries, keys), of queries of which the last one reads all keys, as
    `torch.nn.attention.bias.causal_lower_right`.
    """
    return like.new_full((queries, keys), -torch.inf).triu_(keys - queries + 1)


def _against_cudnn(request: AttentionRequest) -> str:
    strict = not torch.is_deterministic_algorithms_warn_only_enabled()
    if strict and torch.are_deterministic_algorithms_enabled():
        return "torch counts it as not deterministic"
    return ""


# Its CPU kernel, unlike the one for cards, takes masks.
SDPA_FLASH = Backend(
    "sdpa_flash",
    functools.partial(_attend, _flash),
    card=Limits(oldest=(8, 0), dtypes=HALVES, widest=256, masks=False),
    cpu=ANY,
    gives_lse=True,
)
SDPA_CUDNN = Backend(
    "sdpa_cudnn",
    functools.partial(_attend, _cudnn),
    card=Limits(oldest=(8, 0), dtypes=HALVES, widest=128, head_bytes=16, fewest=2),
    further=_against_cudnn,
    gives_lse=True,
    plans=True,
)
SDPA_EFFICIENT = Backend(
    "sdpa_efficient",
    functools.partial(_attend, _efficient),
    card=Limits(oldest=(5, 0), head_bytes=16),
    gives_lse=True,
)
MATH = Backend(
    "math",
    functools.partial(_attend, _math),
    card=ANY,
    cpu=ANY,
    other=ANY,
    whole_scores=True,
)


# The package of FlashAttention 3, for Hopper.


@cached
def flash_attention_3() -> Callable[..., torch.Tensor | tuple[torch.Tensor, ...]]:
    """Finds the function of version 3, whose module has a name in each distribution."""
    return importlib.import_module(FLASH_ATTENTION_3.present.module).flash_attn_func


def _version_3(q, k, v, mask=None):
    with on_card_of(q):
        out = flash_attention_3()(q, k, v)
    # Its first releases gave the log-sum-exp too, asked or not.
    return (out if isinstance(out, torch.Tensor) else out[0]).flatten(2)


FLASH_ATTN_3 = Backend(
    "flash_attn_3",
    _version_3,
    card=Limits(cards=((9, 0),), dtypes=HALVES, widest=256, head_bytes=16, masks=False),
    package=FLASH_ATTENTION_3,
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
    KITCHEN_NAME,
    kitchen,
    exact=False,
    card=Limits(
        FORMATS["int8"].oldest,
        dtypes=HALVES,
        heads=(64, 128, 256),
        fewest=1025,
        masks=False,
    ),
    package=KITCHEN_ATTENTION,
)
