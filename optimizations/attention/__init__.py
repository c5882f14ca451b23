"""Joint attention over text and image tokens: every way to compute it, and which one is chosen.

`backends`, `eight_bit` and `sage` hold them, `registry` lists them and says why one cannot run,
`choice` picks one, `fast` measures what quantized ones cost in accuracy.
"""

from .backend import AttentionRequest
from .backends import aligned_mask
from .choice import Attention, ChosenAttention, choose_attention, is_lossy
from .fast import FAST, MOST_ERROR
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
