"""What a run takes of host memory, by what it is for.

The weights themselves stay in their files, which ComfyUI maps: the system caches them where memory
is left, and reads them again where none is. Counted are copies, and what has to wait in host memory
while it is not on the card.
"""

from __future__ import annotations

from .disk import made_on_load
from .memory import GIB, MIB, QUANTIZED, weight_bytes
from .phases import transformer_bytes
from .placement import ON_CARD
from .setting import Setting
from .text_encoder import quantized_language_bytes, text_encoder_bytes
from .wish import TEXT_ENCODER, Wish

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
    wish: Wish, setting: Setting, *, moved_bytes: int = 0, quantize_on_load: bool = True
) -> dict[str, int]:
    """{what it is for: bytes of host memory}.

    Args:
        moved_bytes: of the transformer, what the plan's option brings to the card in each forward
            pass; it waits in host memory, where a copy that was quantized on load is already.
        quantize_on_load: whether fp8 and int8 are made of a bf16 file on load. A file that is
            quantized already, such as the node SaveQuantized writes, takes no copy; nor does what
            `wish.parts` says is at hand.
    """
    weights = transformer_bytes(wish, setting)
    parts = {"ComfyUI, torch and CUDA": PROGRAM_BYTES}
    files = dict(wish.parts.file_bytes)
    held = wish.parts.text_encoder_bytes
    at_hand = held is not None and held == files.get(TEXT_ENCODER, held)
    copied = 0
    if quantize_on_load and made_on_load(wish, setting):
        counted = weight_bytes(wish.transformer, setting.precision)
        copied = counted.gemm + counted.scales
        parts["transformer, quantized on load"] = copied
        parts["staging while it is quantized"] = STAGING_BYTES
    if setting.off_card:
        parts["modulation that waits"] = weights.modulation
        parts["pinned ring"] = RING_BYTES
    if setting.text_encoder_place != ON_CARD:
        parts["text encoder that waits"] = text_encoder_bytes(wish, setting.text_encoder)
    elif quantize_on_load and setting.text_encoder in QUANTIZED and not at_hand:
        parts["text encoder, quantized on load"] = quantized_language_bytes()
    parts["transformer that is moved in each pass"] = max(0, moved_bytes - copied)
    pixels = wish.batch * wish.frames * wish.width * wish.height
    parts["images"] = IMAGE_COPIES * FP32 * wish.vae.image_channels * pixels
    parts["prompts"] = PROMPT_BYTES
    return {name: count for name, count in parts.items() if count}


def host_ram_bytes(wish: Wish, setting: Setting, *, moved_bytes: int = 0) -> int:
    """The sum of `host_ram`."""
    return sum(host_ram(wish, setting, moved_bytes=moved_bytes).values())
