"""Predicts how long a run's parts take: counted work over measured or expected rates.

A product takes as long as its arithmetic or its bytes (Roofline, CACM 52(4), 2009); times add up.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from ..families.parts import QWEN25_VL
from ..families.protocol import StepTokens, TextEncoder
from ..spec.formats import BYTES_PER_SCALE, BYTES_PER_WEIGHT, KITCHEN_INT8, QUANTIZED
from ..spec.transformer import OFF_CARD, ON_CARD, TransformerShape
from .bytes import PATCHES_PER_TOKEN, table_timesteps, weight_bytes
from .cards import Card
from .phases import Range
from .rates import Rates, attending, class_of
from .request import EXACT, ON_PROCESSOR, RunRequest
from .split_cost import BlockSeconds
from .vae_work import HOST_BYTES_PER_SECOND

WIDE = 2  # bytes of a bf16 number
ROTATION = 4  # of an fp32 cosine or sine
# Expanding a quantized weight to bf16: read and written once, then scaled in place.
CAST = 1 + WIDE
EXPAND = CAST + 2 * WIDE
# Decoding a weight of 4 bits to int8, with a scale for 16 of them: 0.0247 ms for 12288x3072 on an
# H200, 1.41 times what as many bytes take at the rate of the fused norm.
DECODE = 1.41 * (1 / 2 + 1 / 16 + 1)
# ComfyUI's own blocks and ours, bf16, 1024x1024, H200: 178.1 and 124.5 ms.
STOCK = 1.43
# A pass over the modulation's weights takes so many times what the link needs (H200), and the
# CPU so long for each timestep of each of the two layers of a block (predicted).
TABLE_FACTOR = 1.05
TABLE_LAYER_SECONDS = 0.00003
# Bytes of a value of the image that NAG reads, of three parts of attention, and writes.
GUIDED = 4 * WIDE


class Pass(NamedTuple):
    shape: TransformerShape
    tokens: StepTokens
    nag: bool = False

    @classmethod
    def of(cls, request: RunRequest) -> Pass:
        return cls(request.transformer, request.step_tokens, request.nag_tokens > 0)

    def products(self, layer: str) -> tuple[int, int]:
        """Counts (how many, rows of each) of a layer's matrix products. Attention's go item by
        item, with text and image side by side; the MLPs take a stream at once.
        """
        block, (text, image, _, items) = self.shape.block, self.tokens
        tokens = text if layer.startswith(block.text_layers) else image
        attends = layer.startswith(f"{block.attention}.")
        return (items, tokens) if attends else (1, items * tokens)


def block_bytes(
    work: Pass, precision: str, *, expanded: bool = False, attention: str = EXACT
) -> int:
    """Counts the bytes that the kernels between the products of one block read and write.

    Of a token of width D: gate, residual, norm and modulation, twice, read two rows and write two,
    the second in the precision of what reads it. The norm of q and k and their rotation read and
    write both. In fp8 and int8 the attention's output and the MLP's hidden rows, four times as
    wide, are quantized. The GELU is part of that; in bf16 it is in the product's epilogue.

    Args:
        expanded: whether the card does not multiply the precision, so that activations stay bf16
            and outputs of products are copied.
    """
    dim, block = work.shape.dim, work.shape.block
    narrow = precision in QUANTIZED and not expanded
    each = 2 * norm_bytes(dim, narrow) + 4 * WIDE * dim + ROTATION * work.shape.head_dim
    if narrow:
        each += (WIDE + 1) * dim + (WIDE * block.hidden + block.inner) * dim + 2 * BYTES_PER_SCALE
    elif expanded:
        # q, k, v, the output, the hidden rows and theirs are copied; the GELU runs by itself.
        each += 2 * WIDE * (3 + 1 + block.hidden + 1) * dim
        each += WIDE * (block.hidden + block.inner) * dim
    elif block.hidden > block.inner:  # no epilogue multiplies gate and up
        each += WIDE * (block.hidden + block.inner) * dim
    guided = work.nag * GUIDED * dim * work.tokens.image_rows
    # Cached keys and values are copied to those of the pass.
    copied = 2 * 2 * WIDE * dim * work.tokens.prefix_rows
    return guided + copied + work.tokens.rows * each + heads_moved(work, attention)


def heads_moved(work: Pass, attention: str) -> int:
    """Counts the bytes that attention in 8 bits moves for q, k and v in int8 and its result."""
    if attention == EXACT:
        return 0
    read = 3 * work.tokens.rows + 2 * work.tokens.prefix_rows
    return ((WIDE + 1) * read + 2 * WIDE * work.tokens.rows) * work.shape.dim


def norm_bytes(dim: int, narrow: bool) -> int:
    """Counts gate, residual, norm and modulation of one token, quantized where it is narrow."""
    return 3 * WIDE * dim + (dim + BYTES_PER_SCALE if narrow else WIDE * dim)


# What bounds a pass.
CARD, PROCESSOR = "card", "processor"


class PassTimes(NamedTuple):
    """Seconds that card and CPU need for one forward pass, side by side."""

    card: float
    processor: float

    @property
    def seconds(self) -> float:
        return max(self)

    @property
    def bound(self) -> str:
        return PROCESSOR if self.processor > self.card else CARD


def pass_times(
    work: Pass, precision: str, rates: Rates, *, graph: bool = False, attention: str = EXACT
) -> PassTimes:
    """Predicts one forward pass through the fused blocks alone; arguments as of `forward_times`."""
    processor = rates.launches.seconds(work.shape.blocks, precision, graph=graph)
    return PassTimes(_card_seconds(work, precision, rates, attention), processor)


def forward_times(
    request: RunRequest,
    precision: str,
    rates: Rates,
    *,
    moved_bytes: int = 0,
    graph: bool = False,
    packed: bool = False,
    attention: str = EXACT,
) -> PassTimes:
    """Predicts one forward pass of `request.items` images through the fused blocks. `rates` are
    those after `attending`; `moved_bytes` of weights come to the card in each pass; `graph` as of
    `request.repaid_by`. What a bypass LoRA and a ControlNet add was not measured.
    """
    work, added = Pass.of(request), 0.0
    if beside := request.loras.beside(precision):
        added += _lora_seconds(work, beside * request.loras.rank, precision, rates)
    if request.controlnet_bytes:
        added += _controlnet_seconds(work, request.controlnet_bytes, rates)
    if packed:
        layers = request.transformer.quantizable_layers().values()
        added += DECODE * sum(rows * columns for rows, columns in layers) / rates.bandwidth
    card, processor = pass_times(work, precision, rates, graph=graph, attention=attention)
    card = with_copies(card + added, moved_bytes / rates.pcie, rates)
    return PassTimes(card, processor + added)


def with_copies(seconds: float, copies: float, rates: Rates) -> float:
    """Adds to a pass's seconds those of copies of weights that computing does not hide."""
    return max(seconds, copies) + (1 - rates.hides) * min(seconds, copies)


def forward_seconds(request: RunRequest, precision: str, rates: Rates, **how: Any) -> float:
    return forward_times(request, precision, rates, **how).seconds


def sampling_seconds(
    request: RunRequest, precision: str, rates: Rates, *, repaid: int = 0, **how: Any
) -> float:
    """Predicts all steps without the modulation's table; graphs replay after `repaid`, if any."""
    plain, more = replace(request, nag_tokens=0), request.passes - 1

    def step(graph: bool) -> float:
        seconds = forward_seconds(request, precision, rates, graph=graph, **how)
        if more and request.nag_tokens:
            return seconds + forward_seconds(plain, precision, rates, graph=graph, **how)
        return seconds * (1 + more)

    launched = repaid or request.computed_steps
    seconds = launched * step(False)
    if replayed := request.computed_steps - launched:
        seconds += replayed * step(True)
    own = plain.step_tokens.prefix
    # By the host's blocks, once a prompt.
    for count, tokens in ((request.passes, own), (1, request.step_tokens.prefix - own)):
        if tokens:
            prefix = Pass(request.transformer, StepTokens(0, tokens, items=request.items))
            seconds += count * STOCK * pass_times(prefix, precision, rates).seconds
    return seconds


def table_seconds(request: RunRequest, rates: Rates, modulation: str) -> float:
    """Predicts the modulation of a new schedule: one pass of the weights over the link where they
    are off the card, and one over the card's memory for each timestep.
    """
    weights = request.parts.modulation_bytes
    if weights is None:
        weights = weight_bytes(request.transformer, "bf16").modulation
    if not weights:
        return 0.0
    launches = 2 * request.transformer.blocks * TABLE_LAYER_SECONDS
    seconds = request.steps * max(weights / rates.bandwidth, launches)
    if modulation != OFF_CARD:
        return seconds
    walks = -(-request.steps // table_timesteps(request))
    return max(seconds, walks * weights * TABLE_FACTOR / rates.pcie)


def product_seconds(
    rows: int, columns: int, depth: int, precision: str, rates: Rates, count: int = 1
) -> float:
    """Predicts products of (rows, depth) and (depth, columns) in one precision, bf16 out."""
    size = BYTES_PER_WEIGHT[precision]
    moved = (rows + columns) * depth * size + rows * columns * WIDE
    if precision in QUANTIZED:
        moved += BYTES_PER_SCALE * (rows + columns)
    arithmetic = 2 * rows * columns * depth / rates.gemm[precision]
    return count * max(arithmetic, moved / rates.bandwidth)


def _card_seconds(work: Pass, precision: str, rates: Rates, attention: str = EXACT) -> float:
    # Without waiting for the CPU.
    block = block_seconds(work, precision, rates, attention)
    return work.shape.blocks * sum(block) + _outside_seconds(work, rates)


def block_seconds(work: Pass, precision: str, rates: Rates, attention: str = EXACT) -> BlockSeconds:
    """Predicts one block of the pass; arguments as of `forward_times`."""
    shape = work.shape
    expanded = precision in QUANTIZED and precision not in rates.gemm
    multiplied = "bf16" if expanded else precision
    moved = block_bytes(work, precision, expanded=expanded, attention=attention)
    products = {True: 0.0, False: 0.0}
    for layer, (rows, columns) in shape.block.gemms.items():
        n, k = rows * shape.dim, columns * shape.dim
        count, m = work.products(layer)
        seconds = product_seconds(m, n, k, multiplied, rates, count)
        if expanded:
            seconds += count * EXPAND * n * k / rates.bandwidth
        products[layer.startswith(shape.block.text_layers)] += seconds
    joint = attention_seconds(work, rates) + moved / rates.bandwidth
    return BlockSeconds(image=products[False], text=products[True], joint=joint)


def attention_seconds(work: Pass, rates: Rates) -> float:
    """Predicts one block: 4 joint^2 dim operations an item, at least q, k, v and the output."""
    tokens = work.tokens
    keys = tokens.joint + tokens.prefix
    arithmetic = 4 * tokens.rows * keys * work.shape.dim / rates.attention
    moved = 2 * WIDE * tokens.items * (tokens.joint + keys) * work.shape.dim
    return max(arithmetic, moved / rates.bandwidth)


def _outside_seconds(work: Pass, rates: Rates) -> float:
    # Before and after the blocks, in bf16 whatever the precision. Besides their products both
    # streams are normed, joined and split: some ten times read and written. The modulation comes
    # from a table, two streams of six rows a block.
    shape = work.shape
    image, text = work.tokens.image_rows, work.tokens.text_rows
    products = (
        (image, shape.dim, shape.in_channels),
        (text, shape.dim, shape.joint_dim),
        (image, shape.packed_out_channels, shape.dim),
    )
    seconds = sum(product_seconds(*sizes, "bf16", rates) for sizes in products)
    table = 2 * shape.block.modulation_rows * shape.blocks * work.tokens.items
    return seconds + (10 * work.tokens.rows + table) * shape.dim * WIDE / rates.bandwidth


def _lora_seconds(work: Pass, rank: int, precision: str, rates: Rates) -> float:
    # Of a rank together on every layer of every block, beside the weights: a thin product of plain
    # rows, which q, k and v share, and which a quantizing norm then writes too. The second one is
    # in the epilogue of a quantized product; cuBLAS has no such epilogue: in bf16 the output is
    # written and read once more, and the GELU is apart.
    block, spec = 0.0, work.shape.block
    for layer, (rows, columns) in spec.gemms.items():
        n, k = rows * work.shape.dim, columns * work.shape.dim
        count, m = work.products(layer)
        first = layer in spec.first_readers
        inner = rows > columns and not first
        if layer not in spec.other_readers:
            width = 3 * rank if first and spec.other_readers else rank
            block += product_seconds(m, width, k, "bf16", rates, count)
        if precision in QUANTIZED:
            again = m * k * WIDE if first or inner else 0
        else:
            again = (4 if inner else 2) * m * n * WIDE
        block += count * (2 * m * n * rank / rates.gemm["bf16"] + again / rates.bandwidth)
    return work.shape.blocks * block


def _controlnet_seconds(work: Pass, weights: int, rates: Rates) -> float:
    # The transformer's own blocks in bf16, as many as its bytes make up, and what they add to the
    # image stream after each block of the transformer.
    shape = work.shape
    share = weights / weight_bytes(shape, "bf16").total
    added = 4 * shape.blocks * work.tokens.image_rows * shape.dim * WIDE / rates.bandwidth
    return STOCK * share * _card_seconds(work, "bf16", rates) + added


# A step in ComfyUI without this package: what an estimate is compared with.


class StockFormat(NamedTuple):
    weights: str  # the precision of all its weights, modulation among them
    products: str
    attention: str = EXACT


# As ComfyUI and its templates call it; the template of 2512 runs an fp8 file in bf16.
STOCK_FORMATS = {
    "bf16": StockFormat("bf16", "bf16"),
    "fp8, products in bf16": StockFormat("fp8", "bf16"),
    "fp8 fast": StockFormat("fp8", "fp8"),
    "int8 ConvRot": StockFormat("int8", "int8"),
    "int8 ConvRot, --use-ck-attention": StockFormat("int8", "int8", KITCHEN_INT8),
}


# What ComfyUI's own blocks take, as an H200 and its host measured them: bytes that the kernels
# between the products move, in those of our fused ones; and seconds of the CPU for a block in
# bf16, and in 8 bits. 1.x in torch: 178 ms a pass at 1024x1024 in bf16, 117 at 512x512; 195 and 201
# in int8 and fp8, which the CPU bounds. 2.1 in comfy-kitchen's fused kernels: 135 and 827 ms
# at 1024x1024 and 2048x2048; at 512x512 73 in int8.
TWO_STREAMS, ONE_STREAM = (7.05, (0.00195, 0.0033)), (2.2, (0.00095, 0.0022))


def stock_steps(
    request: RunRequest, card: Card, slow: Rates, fast: Rates, room: int
) -> dict[str, Range]:
    """Predicts {what of `STOCK_FORMATS`: seconds of a step} at rates with exact attention, with
    weights beyond `room` crossing the link; LoRAs, ControlNets and layers are not predicted.
    """
    found: dict[str, Range] = {}
    request = replace(request, nag_tokens=0)
    if request.loras.count or request.controlnet_bytes or request.member.layers:
        return found
    for name, how in STOCK_FORMATS.items():
        if card.facts().multiplies(how.products):
            ends = slow, fast
            # On an H200 it takes as long as ComfyUI's exact attention.
            if how.attention != EXACT and "attention" not in class_of(card).stock:
                ends = attending(card, how.attention, slow, fast)
            high, low = (request.passes * stock_pass(request, how, it, card, room) for it in ends)
            found[name] = Range(low, high)
    return found


def stock_pass(request: RunRequest, how: StockFormat, rates: Rates, card: Card, room: int) -> float:
    """Predicts one forward pass of ComfyUI's own blocks, on the card or on its CPU."""
    work, stock = Pass.of(request), class_of(card).stock
    traffic, launches = TWO_STREAMS if work.shape.block.text_layers else ONE_STREAM
    image, text, _ = block_seconds(work, how.products, rates)
    wide, size = weight_bytes(work.shape, "bf16"), BYTES_PER_WEIGHT[how.weights]
    moved = traffic * block_bytes(work, "bf16") + heads_moved(work, how.attention)
    moved += size * wide.modulation / WIDE / work.shape.blocks
    each = stock.get(how.products, 1.0) * (image + text) + moved / rates.bandwidth
    each += stock.get("attention", 1.0) * attention_seconds(work, rates)
    seconds = work.shape.blocks * each + _outside_seconds(work, rates)
    launched = work.shape.blocks * launches[how.products in QUANTIZED]
    copies = max(0, size * wide.total // WIDE - room) / rates.pcie
    if how.weights != how.products:  # in the stream of the copies
        copies += CAST * wide.total / WIDE / rates.bandwidth
    return max(with_copies(seconds, copies, rates), rates.launches.host + launched)


# How long a text encoder takes to encode prompts. ComfyUI computes all of it in fp32.

# A weight read, written in fp32 and read again; a quantized one is scaled in between.
CAST_BYTES, EXPAND_BYTES = 2 + 4 + 4, 1 + 4 + (4 + 4) + 4
# fp32 products on the CPU, predicted: 16 cores.
PROCESSOR_FLOPS = 0.5e12
# Of bf16x2: a weight read; a quantized one written in bf16 and read again. A number of an input
# read, written in two parts and these read; one of an output, written and added up in fp32.
SPLIT_BYTES, SPLIT_EXPAND_BYTES = WIDE, 1 + 2 * WIDE
SPLIT_INPUT_BYTES, SPLIT_OUTPUT_BYTES = 4 * 2 + 5 * WIDE, 2 * 4 + 3 * 4
# Of the CPU for a layer (H200): 63 to 80 ms for the 36 of 2.1, 120 to 190 for the 28 of 1.x.
LAYER_SECONDS = Range(0.00175, 0.0068)


def encode_text_seconds(
    request: RunRequest,
    rates: Rates,
    place: str = ON_CARD,
    precision: str = "bf16",
    *,
    split: bool = False,
    end: int = 0,
) -> float:
    """Predicts all prompts of a run, one or a negative one too, and NAG's. With images the first
    encodes these and the template; keys and values of both go to system RAM and back once a prompt.

    Args:
        place: "on card", "drop after encoding", which moves no weights here, or "cpu", whose
            figure is predicted for 16 cores.
        precision: in which the weights are loaded.
        split: as of `prompt_seconds`.
        end: of `LAYER_SECONDS`, 0 for the fastest.
    """
    encoder, texts = request.member.text_encoder, [request.text_tokens] * request.prompts
    texts += [request.nag_tokens] * (request.nag_tokens > 0)
    launches = 0.0 if place == ON_PROCESSOR else encoder.layers * LAYER_SECONDS[end]

    def part(tokens: int, **more: int) -> float:
        found = prompt_seconds(tokens, rates, place, precision, encoder, split=split, **more)
        return max(found, launches)

    vision, template = request.references * request.member.vision_tokens, encoder.template
    if not vision:
        return sum(part(template + it) for it in texts)
    # At the rate of memory that is not pinned, as when 2.1 was measured: 0.44 s with one reference,
    # 0.15 s for another instruction (H200). Pinned memory was not measured.
    kept = template + vision
    copied = encoder.layers * 2 * 4 * encoder.kv_heads * encoder.head_dim * kept
    copies = 0.0 if place == ON_PROCESSOR else copied / min(HOST_BYTES_PER_SECOND, rates.pcie)
    first = part(kept, vision_tokens=vision, images=request.references) + copies
    return first + sum(part(it, kept=kept) + copies for it in texts)


def prompt_seconds(
    tokens: int,
    rates: Rates,
    place: str = ON_CARD,
    precision: str = "bf16",
    encoder: TextEncoder = QWEN25_VL,
    *,
    vision_tokens: int = 0,
    images: int = 1,
    kept: int = 0,
    split: bool = False,
) -> float:
    """Predicts the card for one prompt or a part of it: two operations a parameter and token, and
    the weights cast to fp32; so ComfyUI encodes.

    Args:
        tokens: of it, with those of template and images.
        place, precision: as of `encode_text_seconds`.
        vision_tokens: how many of them are of `images`.
        kept: tokens before the part, whose keys and values are there.
        split: whether products are bf16x2, of twice the rows in bf16 with attention in fp32.
    """
    parameters, patches = encoder.layer_parameters, PATCHES_PER_TOKEN * vision_tokens
    flops = 2 * (parameters * tokens + encoder.vision * patches)
    if place == ON_PROCESSOR:
        return flops / PROCESSOR_FLOPS
    if not split:
        moved = parameters * (CAST_BYTES if precision == "bf16" else EXPAND_BYTES)
        moved += CAST_BYTES * encoder.vision if vision_tokens else 0
        return flops / rates.encoder + moved / rates.bandwidth
    moved = parameters * (SPLIT_BYTES if precision == "bf16" else SPLIT_EXPAND_BYTES)
    moved += SPLIT_BYTES * encoder.vision if vision_tokens else 0
    each = (SPLIT_OUTPUT_BYTES * n + SPLIT_INPUT_BYTES * k for n, k in encoder.linears)
    moved += encoder.layers * tokens * sum(each)
    attends = encoder.layers * encoder.query * tokens * (kept + tokens)
    attends += encoder.vision_attends * encoder.vision_hidden * patches**2 // images
    return 2 * flops / rates.gemm["bf16"] + 4 * attends / rates.encoder + moved / rates.bandwidth
