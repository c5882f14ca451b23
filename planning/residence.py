"""What a run takes of host memory, by what it is for.

The weights themselves stay in their files, which ComfyUI maps: the system caches them where memory
is left, and reads them again where none is. Counted are copies, and what has to wait in host memory
while it is not on the card.
"""

from __future__ import annotations

from .memory import GIB, MIB, QUANTIZED, weight_bytes
from .phases import phases, transformer_bytes, vae_bytes
from .placement import ON_CARD
from .setting import Setting
from .text_encoder import quantized_language_bytes, text_encoder_bytes
from .wish import Wish

# Python, torch with CUDA, ComfyUI and its nodes. Predicted.
PROGRAM_BYTES = 3 * GIB
# While a file is quantized on load, and the pinned ring through which weights pass the card
# (hosts/comfyui/precision.py, optimizations/weight_stream.py).
STAGING_BYTES = 2 * GIB
RING_BYTES = 128 * MIB
# Prompts that were encoded last (optimizations/embedding_cache.py).
PROMPT_BYTES = 64 * MIB
FP32 = 4
# An image as it comes from the VAE, and as it is saved.
IMAGE_COPIES = 2


def host_ram(
    wish: Wish, setting: Setting, card_bytes: int | None = None, *, quantize_on_load: bool = True
) -> dict[str, int]:
    """{what it is for: bytes of host memory}.

    Args:
        card_bytes: what CUDA shows of the card; what does not fit there waits in host memory. None
            where it does.
        quantize_on_load: whether fp8 and int8 are made of a bf16 file on load. A file that is
            quantized already, such as the node SaveQuantized writes, takes no copy; nor does what
            `wish.parts` says is at hand.
    """
    weights = transformer_bytes(wish, setting)
    parts = {"ComfyUI, torch and CUDA": PROGRAM_BYTES}
    at_hand = wish.parts.text_encoder_bytes is not None
    made = quantize_on_load and wish.parts.transformer_bytes is None
    if made and setting.precision in QUANTIZED:
        counted = weight_bytes(wish.transformer, setting.precision)
        parts["transformer, quantized on load"] = counted.gemm + counted.scales
        parts["staging while it is quantized"] = STAGING_BYTES
    if setting.off_card:
        parts["modulation that waits"] = weights.modulation
        parts["pinned ring"] = RING_BYTES
    if setting.text_encoder_place != ON_CARD:
        parts["text encoder that waits"] = text_encoder_bytes(wish, setting.text_encoder)
    elif quantize_on_load and setting.text_encoder in QUANTIZED and not at_hand:
        parts["text encoder, quantized on load"] = quantized_language_bytes()
    if not setting.resident:
        sampled = phases(wish, setting, card_bytes)["sampling"].weights
        away = weights.total - (weights.modulation if setting.off_card else 0) - sampled
        parts["transformer that is moved in each step"] = away
    pixels = wish.batch * wish.frames * wish.width * wish.height
    parts["images"] = IMAGE_COPIES * FP32 * wish.vae.image_channels * pixels
    parts["prompts"] = PROMPT_BYTES
    return {name: count for name, count in parts.items() if count}


def host_ram_bytes(wish: Wish, setting: Setting, card_bytes: int | None = None) -> int:
    """The sum of `host_ram`."""
    return sum(host_ram(wish, setting, card_bytes).values())


def cached_bytes(wish: Wish, setting: Setting) -> int:
    """What the system's page cache holds of the model files at best: not required, but with less
    of it the next load reads the disk again.
    """
    text = text_encoder_bytes(wish, setting.text_encoder)
    return transformer_bytes(wish, setting).total + text + vae_bytes(wish)
