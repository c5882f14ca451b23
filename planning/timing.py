"""How long a run's parts take: counted work over measured or expected rates.

A product takes as long as its arithmetic or its bytes, whichever is more (S. Williams, A. Waterman,
D. Patterson: Roofline, CACM 52(4), 2009); kernels follow one another, so that their times add up.
"""

from __future__ import annotations

from .encoder_timing import encode_text_seconds
from .memory import (
    BLOCK_GEMMS,
    BYTES_PER_SCALE,
    BYTES_PER_WEIGHT,
    QUANTIZED,
    weight_bytes,
)
from .placement import OFF_CARD
from .rates import Rates
from .traffic import EXPAND, WIDE, Pass, block_bytes
from .vae_timing import decode_seconds, encode_image_seconds
from .wish import Wish

__all__ = [
    "Pass",
    "decode_seconds",
    "encode_image_seconds",
    "encode_text_seconds",
    "forward_seconds",
    "pass_seconds",
    "sampling_seconds",
    "table_seconds",
]

# What the processor needs to launch one block, in eager Python (H200's host, 1024x1024, batch 1):
# a faster card waits for it.
LAUNCH_SECONDS = {False: 0.00085, True: 0.00115}
# ComfyUI's own blocks beside ours, bf16, 1024x1024, H200: 178.1 and 124.5 ms.
STOCK = 1.43
# A pass over the weights takes so many times what the link needs, and the processor so long for
# each of the two layers of a block (H200).
TABLE_FACTOR = 1.05
TABLE_LAYER_SECONDS = 0.0003


def forward_seconds(wish: Wish, precision: str, rates: Rates, *, moved_bytes: int = 0) -> float:
    """One forward pass of `wish.items` images through the fused blocks.

    What a LoRA beside the weights and a ControlNet add is counted and was not measured.

    Args:
        precision: bf16, fp8 or int8, in which the weights are held.
        moved_bytes: of weights that the host brings to the card in each pass, because they do not
            all stay there; added, because not every host computes meanwhile.
    """
    work = Pass.of(wish)
    seconds = pass_seconds(work, precision, rates)
    if wish.loras.mode == "beside":
        seconds += wish.loras.count * _lora_seconds(work, wish.loras.rank, rates)
    if wish.controlnet_bytes:
        seconds += _controlnet_seconds(work, wish.controlnet_bytes, rates)
    return seconds + moved_bytes / rates.pcie


def pass_seconds(work: Pass, precision: str, rates: Rates) -> float:
    """One forward pass, no shorter than its launches."""
    seconds = _card_seconds(work, precision, rates)
    return max(seconds, work.shape.blocks * LAUNCH_SECONDS[precision in QUANTIZED])


def sampling_seconds(wish: Wish, precision: str, rates: Rates, *, moved_bytes: int = 0) -> float:
    """All steps of a run, without the modulation's table."""
    return (
        wish.steps * wish.passes * forward_seconds(wish, precision, rates, moved_bytes=moved_bytes)
    )


def table_seconds(wish: Wish, rates: Rates, modulation: str) -> float:
    """One pass over the modulation weights, which a new schedule takes.

    Args:
        modulation: "on card" or "off card".
    """
    weights = wish.parts.modulation_bytes
    if weights is None:
        weights = weight_bytes(wish.transformer, "bf16").modulation
    rate = rates.pcie / TABLE_FACTOR if modulation == OFF_CARD else rates.bandwidth
    return max(weights / rate, 2 * wish.transformer.blocks * TABLE_LAYER_SECONDS)


def product_seconds(
    rows: int, columns: int, depth: int, precision: str, rates: Rates, count: int = 1
) -> float:
    """Products of (rows, depth) and (depth, columns), the operands in one precision, bf16 out."""
    size = BYTES_PER_WEIGHT[precision]
    moved = (rows + columns) * depth * size + rows * columns * WIDE
    if precision in QUANTIZED:
        moved += BYTES_PER_SCALE * (rows + columns)
    arithmetic = 2 * rows * columns * depth / rates.gemm[precision]
    return count * max(arithmetic, moved / rates.bandwidth)


def _card_seconds(work: Pass, precision: str, rates: Rates) -> float:
    """What the card computes, without waiting for the processor."""
    shape = work.shape
    expanded = precision in QUANTIZED and precision not in rates.gemm
    multiplied = "bf16" if expanded else precision
    block = attention_seconds(work, rates)
    block += block_bytes(work, precision, expanded=expanded) / rates.bandwidth
    for layer, (rows, columns) in BLOCK_GEMMS.items():
        n, k = rows * shape.dim, columns * shape.dim
        count, m = work.products(layer)
        block += product_seconds(m, n, k, multiplied, rates, count)
        if expanded:
            block += count * EXPAND * n * k / rates.bandwidth
    return shape.blocks * block + _outside_seconds(work, rates)


def attention_seconds(work: Pass, rates: Rates) -> float:
    """Of one block: 4 joint^2 dim operations an item, no shorter than q, k, v and the output."""
    arithmetic = 4 * work.items * work.joint**2 * work.shape.dim / rates.attention
    return max(arithmetic, 4 * WIDE * work.rows * work.shape.dim / rates.bandwidth)


def _outside_seconds(work: Pass, rates: Rates) -> float:
    """The layers before and after the blocks, in bf16 whatever the precision.

    Beside their products both streams are normed, joined and taken apart: some ten times read and
    written. The modulation comes from a table, two streams of six rows a block.
    """
    shape = work.shape
    image, text = work.items * work.image, work.items * work.text
    products = (
        (image, shape.dim, shape.in_channels),
        (text, shape.dim, shape.joint_dim),
        (image, shape.packed_out_channels, shape.dim),
    )
    seconds = sum(product_seconds(*sizes, "bf16", rates) for sizes in products)
    table = 2 * 6 * shape.blocks * work.items
    return seconds + (10 * work.rows + table) * shape.dim * WIDE / rates.bandwidth


def _lora_seconds(work: Pass, rank: int, rates: Rates) -> float:
    """One LoRA on every layer of every block, computed beside it, as ComfyUI calls layers.

    Two thin products, their sum with the layer's output, and a copy of it to where the fused
    block wants it.
    """
    block = 0.0
    for layer, (rows, columns) in BLOCK_GEMMS.items():
        n, k = rows * work.shape.dim, columns * work.shape.dim
        count, m = work.products(layer)
        block += product_seconds(m, rank, k, "bf16", rates, count)
        block += product_seconds(m, n, rank, "bf16", rates, count)
        block += count * (3 + 2) * m * n * WIDE / rates.bandwidth
    return work.shape.blocks * block


def _controlnet_seconds(work: Pass, weights: int, rates: Rates) -> float:
    """A ControlNet of the transformer's own blocks in bf16, as many as its bytes make up, and what
    it adds to the image stream after each block of the transformer.
    """
    shape = work.shape
    share = weights / weight_bytes(shape, "bf16").total
    added = 4 * shape.blocks * work.items * work.image * shape.dim * WIDE / rates.bandwidth
    return STOCK * share * _card_seconds(work, "bf16", rates) + added
