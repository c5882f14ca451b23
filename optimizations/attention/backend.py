"""What is asked of an attention backend, and the limits that one declares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ...machine.packages import Package

HALVES = frozenset({torch.bfloat16, torch.float16})
FLOATS = HALVES | {torch.float32}


@dataclass(frozen=True)
class AttentionRequest:
    """The attention of one block.

    Attributes:
        dtype: Of q, k, v, the mask and the result.
        tokens: Text and image tokens of one item together.
        masked: Whether an additive mask comes with it.
    """

    device: torch.device
    dtype: torch.dtype
    batch: int
    heads: int
    head_dim: int
    tokens: int
    masked: bool = False

    @classmethod
    def of(cls, q: torch.Tensor, mask: torch.Tensor | None) -> AttentionRequest:
        """The request of a call with q, (batch, tokens, heads, head_dim), and mask."""
        batch, tokens, heads, head_dim = q.shape
        return cls(q.device, q.dtype, batch, heads, head_dim, tokens, mask is not None)


@dataclass(frozen=True)
class Limits:
    """What a backend takes on one kind of device.

    Attributes:
        oldest: The compute capability that it needs at least.
        cards: The only compute capabilities that it has code for; empty: every one from `oldest`.
        widest: The most elements of a head.
        head_bytes: What the bytes of a head are a multiple of.
        masks: Whether it takes an additive mask.
    """

    oldest: tuple[int, int] = (0, 0)
    cards: tuple[tuple[int, int], ...] = ()
    dtypes: frozenset[torch.dtype] = FLOATS
    widest: int = 2**16
    head_bytes: int = 1
    masks: bool = True

    def refusal(self, request: AttentionRequest, sm: tuple[int, int] | None) -> str:
        """Why a request is outside, in one clause; empty when it is inside."""
        if sm is not None and self.cards and sm not in self.cards:
            return f"{sm_name(sm)}, has code for {', '.join(map(sm_name, self.cards))}"
        if sm is not None and sm < self.oldest:
            return f"{sm_name(sm)}, needs {sm_name(self.oldest)} or newer"
        if request.dtype not in self.dtypes:
            taken = " and ".join(sorted(dtype_name(dtype) for dtype in self.dtypes))
            return f"takes {taken}, not {dtype_name(request.dtype)}"
        if request.head_dim > self.widest:
            return f"takes heads of at most {self.widest}, not {request.head_dim}"
        if request.head_dim * request.dtype.itemsize % self.head_bytes:
            multiple = self.head_bytes // request.dtype.itemsize
            return f"takes heads of a multiple of {multiple}, not {request.head_dim}"
        return "takes no mask" if request.masked and not self.masks else ""


ANY = Limits()


@dataclass(frozen=True)
class Backend:
    """One way to compute attention.

    Attributes:
        attend: Takes q, k, v, each (B, tokens, heads, head_dim) with any strides but a contiguous
            last dimension, and None or the mask, (B, 1, 1, tokens), which is added to the scores;
            gives (B, tokens, heads * head_dim), contiguous, in memory of its own.
        exact: Whether nothing is quantized: the result is as near to the true one as the dtype
            allows.
        card: Its limits on an NVIDIA card; None where it does not run on one.
        cpu: The same on a processor.
        other: The same on any other device.
        package: What has to be installed; None for PyTorch's own.
        unproven: Where the package's own code was never run for this project, in one clause. Its
            calls are tested against the published signature, with a module that stands in for it.
        whole_scores: Whether it writes the matrix of scores to memory: never the fastest.
        further: Gives what else speaks against a request.
        quantizes: Whether the fused blocks make its operands where they normalize q and k.
    """

    name: str
    attend: Callable[..., torch.Tensor]
    exact: bool = True
    card: Limits | None = None
    cpu: Limits | None = None
    other: Limits | None = None
    package: Package | None = None
    unproven: str = ""
    whole_scores: bool = False
    further: Callable[[AttentionRequest], str] | None = None
    quantizes: bool = False


def sm_of(device: torch.device) -> tuple[int, int] | None:
    """Compute capability of an NVIDIA card; None for any other device."""
    usable = device.type == "cuda" and torch.cuda.is_available() and torch.version.hip is None
    return torch.cuda.get_device_capability(device) if usable else None


def sm_name(sm: tuple[int, int]) -> str:
    return f"sm_{sm[0]}{sm[1]}"


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
