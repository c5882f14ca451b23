"""What the text encoder of Qwen-Image takes: its weights, and one encoding in ComfyUI.

Qwen2.5-VL-7B without lm_head, which encoding never reads. ComfyUI holds it as it is stored and
computes in fp32, one layer's weight cast at a time (comfy/text_encoders/llama.py, qwen_vl.py).
"""

from __future__ import annotations

from .memory import BYTES_PER_SCALE, QUANTIZED, language_model_parameters
from .wish import Wish

FP32 = 4
HIDDEN, INTERMEDIATE, QUERY, KEY, LAYERS, HEADS = 3584, 18944, 3584, 512, 28, 28
VOCABULARY = 152_064
# One layer's linears, (rows, columns): q, k, v, output, gate, up and down.
LINEARS = (
    (QUERY, HIDDEN),
    (KEY, HIDDEN),
    (KEY, HIDDEN),
    (HIDDEN, QUERY),
    (INTERMEDIATE, HIDDEN),
    (INTERMEDIATE, HIDDEN),
    (HIDDEN, INTERMEDIATE),
)
LANGUAGE = language_model_parameters(
    {
        "hidden": HIDDEN,
        "intermediate": INTERMEDIATE,
        "q_dim": QUERY,
        "kv_dim": KEY,
        "vocabulary": VOCABULARY,
    },
    LAYERS,
)
VISION_HIDDEN, VISION_INTERMEDIATE, VISION_LAYERS, VISION_PATCH = 1280, 3420, 32, 3 * 2 * 14 * 14
VISION_HEAD = 80
PATCHES_PER_TOKEN = 4
# The system prompt that ComfyUI puts around a prompt, and cuts off what comes out.
TEMPLATE_TOKENS = 64


def _vision_parameters() -> int:
    hidden, inner, merged = VISION_HIDDEN, VISION_INTERMEDIATE, PATCHES_PER_TOKEN * VISION_HIDDEN
    attention = (hidden + 1) * 3 * hidden + (hidden + 1) * hidden
    mlp = 2 * (hidden + 1) * inner + (inner + 1) * hidden
    merger = hidden + (merged + 1) * merged + (merged + 1) * HIDDEN
    return VISION_PATCH * hidden + VISION_LAYERS * (attention + mlp + 2 * hidden) + merger


VISION = _vision_parameters()


def text_encoder_bytes(wish: Wish, precision: str) -> int:
    """The encoder's weights as held; in fp8 and int8 the language model's linears are quantized.

    Args:
        precision: bf16, fp8 or int8. True sizes in `wish.parts` stand above it.
    """
    if wish.parts.text_encoder_bytes is not None:
        return wish.parts.text_encoder_bytes
    total = 2 * (LANGUAGE + VISION)
    if precision not in QUANTIZED:
        return total
    return total - 2 * LAYERS * sum(n * k for n, k in LINEARS) + quantized_language_bytes()


def quantized_language_bytes() -> int:
    """The language model's linears in fp8 or int8, with a scale for each row."""
    return LAYERS * sum(n * k + BYTES_PER_SCALE * n for n, k in LINEARS)


def encoding_bytes(wish: Wish) -> int:
    """Activations of one encoding at its worst moment, in fp32.

    Without images that is the MLP's second product: 0.253 GiB of a weight that is cast, and two
    wide rows beside three streams (0.28 GiB measured on an H200 for a short prompt). With images
    it may be the attention, whose scores are computed whole because keys have fewer heads than
    queries, or the vision tower, of one image at a time: both followed through ComfyUI's classes.
    """
    tokens = TEMPLATE_TOKENS + wish.prompt_tokens
    cast = FP32 * HIDDEN * INTERMEDIATE
    streams = FP32 * tokens * 3 * HIDDEN
    mlp = streams + max(cast + 2 * FP32 * tokens * INTERMEDIATE, 3 * FP32 * tokens * INTERMEDIATE)
    scores = 2 * FP32 * HEADS * tokens**2
    attention = FP32 * tokens * (2 * HIDDEN + 3 * QUERY) + scores
    patches = PATCHES_PER_TOKEN * wish.member.vision_tokens if wish.references else 0
    return max(mlp, attention, vision_bytes(patches)) + FP32 * tokens**2


def vision_bytes(patches: int) -> int:
    """The vision tower on one image of so many patches of 14 x 14 pixels: where keys are rotated,
    or where what the patches give is merged by its largest weight.
    """
    hidden, merged = VISION_HIDDEN, PATCHES_PER_TOKEN * VISION_HIDDEN
    rotated = patches * (11 * hidden + 4 * VISION_HEAD)
    return FP32 * max(rotated, merged * merged + 3 * patches * hidden) if patches else 0
