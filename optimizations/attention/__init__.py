"""Joint attention over text and image tokens: every way to compute it, and which one is chosen.

One file per way; `registry` lists them and says why one cannot run, `choice` picks one.
"""

from .choice import Attention, choose_attention
from .chosen import ChosenAttention
from .registry import BACKENDS, check_backends, refusal
from .request import Request
from .sdpa import aligned_mask

__all__ = [
    "BACKENDS",
    "Attention",
    "ChosenAttention",
    "Request",
    "aligned_mask",
    "check_backends",
    "choose_attention",
    "refusal",
]
