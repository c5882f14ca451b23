"""How long Qwen2.5-VL takes to encode prompts, which ComfyUI computes in fp32."""

from __future__ import annotations

from .memory import QUANTIZED
from .placement import ON_CARD
from .rates import Rates
from .setting import ON_PROCESSOR
from .text_encoder import HIDDEN, LANGUAGE, PATCHES_PER_TOKEN, TEMPLATE_TOKENS, VISION, VOCABULARY
from .wish import Wish

# What every token goes through: all but the embedding, of which a row is looked up.
LAYER_PARAMETERS = LANGUAGE - VOCABULARY * HIDDEN
# A weight read, written in fp32 and read again; a quantized one is scaled in between.
CAST_BYTES, EXPAND_BYTES = 2 + 4 + 4, 1 + 4 + (4 + 4) + 4
# fp32 products on the processor, predicted: 16 cores.
PROCESSOR_FLOPS = 0.5e12


def encode_text_seconds(
    wish: Wish, rates: Rates, place: str = ON_CARD, precision: str = "bf16"
) -> float:
    """All prompts of a run: one, or a negative one too.

    Two operations a parameter and token, and the weights cast to fp32 once a prompt.

    Args:
        place: "on card", "drop after encoding", which moves no weights here, or "cpu", whose
            figure is predicted for 16 cores.
        precision: in which the weights are held.
    """
    prompts = 1 if wish.cfg == "off" else 2
    vision = wish.references * wish.member.vision_tokens
    return prompts * prompt_seconds(wish.prompt_tokens, rates, place, precision, vision)


def prompt_seconds(
    tokens: int,
    rates: Rates,
    place: str = ON_CARD,
    precision: str = "bf16",
    vision_tokens: int = 0,
) -> float:
    """One prompt.

    Args:
        tokens: of it, without the template's and with those of images.
        place, precision: as of `encode_text_seconds`.
        vision_tokens: how many of them are of images.
    """
    flops = 2 * LAYER_PARAMETERS * (tokens + TEMPLATE_TOKENS)
    flops += 2 * VISION * PATCHES_PER_TOKEN * vision_tokens
    if place == ON_PROCESSOR:
        return flops / PROCESSOR_FLOPS
    moved = LAYER_PARAMETERS * (EXPAND_BYTES if precision in QUANTIZED else CAST_BYTES)
    moved += CAST_BYTES * VISION if vision_tokens else 0
    return flops / rates.encoder + moved / rates.bandwidth
