"""Joint attention over text and image tokens: every way to compute it, and which one is chosen.

`backends` and `quantized` hold them, `registry` lists them and says why one cannot run, `choice`
picks one, `chosen` keeps it for a run and measures what quantized ones cost in accuracy.
"""

from .backends import AttentionRequest, aligned_mask
from .choice import FAST, Attention, choose_attention, is_lossy
from .chosen import MOST_ERROR, ChosenAttention
from .registry import BACKENDS, check_backends, refusal

__all__ = [
    "BACKENDS",
    "FAST",
    "MOST_ERROR",
    "Attention",
    "AttentionRequest",
    "ChosenAttention",
    "aligned_mask",
    "check_backends",
    "choose_attention",
    "is_lossy",
    "refusal",
]
