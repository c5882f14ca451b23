"""Counts bytes of weights and of a forward pass, from sizes alone and without torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from ..caches import cached
from ..families.parts import QWEN25_VL
from ..families.protocol import StepTokens, TextEncoder
from ..spec.formats import BYTES_PER_SCALE, BYTES_PER_WEIGHT, MIB, QUANTIZED
from ..spec.sizes import COMPARED_AT_ONCE, MOST_TABLE_BYTES, RANKS_AT_ONCE, ROWS_AT_ONCE
from ..spec.transformer import REFERENCE_TOKENS, TransformerShape
from .request import EXACT, FAST, W4A8, RunRequest, Setting, repaid_by
from .step_cache import OFF

BF16, FP32 = 2, 4


@dataclass(frozen=True)
class WeightBytes:
    """Holds what a loaded transformer takes, allocator rounding (512 bytes a tensor) left out."""

    gemm: int  # weight matrices of the layers that may be quantized
    modulation: int  # weights and biases of `img_mod` and `txt_mod`, never quantized
    rest: int  # everything else, with the biases of the quantizable layers
    scales: int

    @property
    def total(self) -> int:
        return self.gemm + self.modulation + self.rest + self.scales


class TransformerBytes(NamedTuple):
    """A transformer's weights as loaded: bytes of all, and of those in its modulation."""

    total: int
    modulation: int


Sizes = Mapping[str, WeightBytes | TransformerBytes]  # by precision


@cached
def weight_bytes(
    shape: TransformerShape, precision: str, keep: frozenset[str] = frozenset()
) -> WeightBytes:
    """Counts a transformer exactly; in fp8 and int8 the quantizable layers but `keep` are so."""
    layers, size = shape.quantizable_layers(), BYTES_PER_WEIGHT[precision]
    plain = 2 if precision in QUANTIZED else size
    gemm = scales = 0
    for name, (rows, columns) in layers.items():
        quantized = precision in QUANTIZED and name not in keep
        gemm += rows * columns * (size if quantized else plain)
        scales += rows * BYTES_PER_SCALE if quantized else 0
    modulation, rest = _parameters(shape)
    return WeightBytes(gemm, modulation * plain, rest * plain, scales)


@cached
def _parameters(shape: TransformerShape) -> tuple[int, int]:
    # (of the modulation; of all else but the weights of quantizable layers)
    every = sum(map(math.prod, shape.tensors().values()))
    gemm = sum(map(math.prod, shape.quantizable_layers().values()))
    columns = 1 if shape.block.biases else 0  # a bias is one more
    modulation = sum(n * (k + columns) for n, k in shape.modulation_layers().values())
    return modulation, every - gemm - modulation


# What one forward pass of the transformer takes for activations, counted from the code.
#
# A stream is one matrix of tokens x dim in bf16. Below, n counts the rows of text and image
# together, i those of the image and t those of the text, over all items of the batch. The buffers
# of optimizations/blocks/ last through the pass: the widest one, in which q, k and v and then the
# MLP's hidden layer lie, the branch of attention or MLP, and in fp8 and int8 the quantized copy
# of the hidden layer, which also serves narrower rows. A block's worst moment is the first block's
# attention: its input, which ComfyUI's loop holds, the residual stream x, and what attention gives.
#
#     bf16        1 + 1 + 4 + 1 + 1     = 8 streams of n
#     fp8, int8   1 + 1 + 4 + 1 + 2 + 1 = 10, and an fp32 scale a row
#
# The int32 and fp32 sums of 8-bit products stay in the kernels' registers. The first step also runs
# one block of ComfyUI's own for the self-check, whose MLP holds 9 i + 2 n, before there are
# buffers, and keeps its result; both results are compared in fp32, some tokens at a time.

# What `fast` holds of the image and text streams where it measures an error: a result, and it in
# fp32 less the exact one.
MEASURED_STREAMS = 3
# fp32 latents that a sampler and its guider hold while the transformer runs: noise, the image, the
# prediction of each prompt with its sum and weight, and a step's intermediate ones.
SAMPLER_LATENTS = 10
# And those of a step cache (optimizations/step_cache.py): the last two velocities, and where the
# next latent is expected. Its temporaries are gone when the transformer runs.
CACHE_LATENTS = 3
# cuBLAS keeps a workspace for each of the two streams of a capture: 32 MiB on an H100 and an H200.
GRAPH_WORKSPACES = 2 * 32 * MIB


class StepBytes(NamedTuple):
    first: int  # of the first step, which compares a block with the host's
    later: int

    @property
    def most(self) -> int:
        return max(self.first, self.later)


def step_bytes(request: RunRequest, setting: Setting) -> StepBytes:
    """Counts the activations of a forward pass, without modulation table and workspaces.

    Counted for the fused blocks in ComfyUI, where its loop holds a block's input; diffusers holds
    no more. `fast` attends exactly in its first pass, in which it measures errors. A cached prefix
    is computed in the host's blocks, in the first step.
    """
    shape, tokens = request.transformer, request.step_tokens
    stream = BF16 * shape.dim
    added, control = control_bytes(request)
    around = _around(shape, tokens, request) + added
    buffers, fused = _fused_bytes(shape, tokens, request, setting)
    begins = fused
    if request.attention == FAST:
        exact = replace(setting, attention=EXACT)
        buffers, begins = _fused_bytes(shape, tokens, request, exact)
        begins += MEASURED_STREAMS * tokens.rows * stream
    host = _host_block(shape, tokens, request, setting)
    expected = tokens.rows * stream
    at_once = min(max(tokens.image_rows, tokens.text_rows), COMPARED_AT_ONCE * tokens.items)
    compared = buffers + (3 * tokens.rows + 4 * at_once) * stream
    first = max(host, expected + begins, compared)
    return StepBytes(max(around + first, control), max(around + fused, control))


def _fused_bytes(
    shape: TransformerShape, tokens: StepTokens, request: RunRequest, setting: Setting
) -> tuple[int, int]:
    # (the buffers; all of a fused block at its worst moment)
    buffers = buffer_bytes(request, setting)
    streams = 2 * tokens.rows * BF16 * shape.dim
    return buffers, buffers + streams + _beside_buffers(shape, tokens, request, setting)


def input_bytes(request: RunRequest) -> int:
    """Counts what is on the card while the first block waits for its modulation."""
    shape, tokens = request.transformer, request.step_tokens
    stream = tokens.rows * BF16 * shape.dim
    return stream + _around(shape, tokens, request) + control_bytes(request)[0]


def embedding_rows(request: RunRequest) -> tuple[int, int]:
    """Counts rows of the timestep embedding for (image, text); Edit-2511 doubles the first."""
    doubled = request.member.timestep_zero and request.references > 0
    return request.items * (2 if doubled else 1), request.items


def table_bytes(request: RunRequest) -> int:
    """Counts the modulation table of a schedule: 4.42 MB for a timestep and each pair of rows."""
    return _row_bytes(request) * table_rows(request)


def table_rows(request: RunRequest) -> int:
    """Counts the rows of the timestep embedding that the table may hold, computed together."""
    each = sum(embedding_rows(request))
    rows, size = request.steps * each, _row_bytes(request)
    return max(each, min(rows, MOST_TABLE_BYTES // size)) if size else rows


def table_timesteps(request: RunRequest) -> int:
    """Counts the timesteps of a schedule that the table may hold."""
    return table_rows(request) // sum(embedding_rows(request))


def _row_bytes(request: RunRequest) -> int:
    shape = request.transformer
    return shape.blocks * shape.block.modulation_rows * shape.dim * BF16


def graph_bytes(request: RunRequest, setting: Setting) -> int:
    """Counts CUDA graphs of the blocks, 0 where none is predicted. They share one pool: rows of the
    streams and of attention, and the modulation of one timestep.
    """
    if not repaid_by(request, setting):
        return 0
    rows = 2 * request.step_tokens.rows * request.transformer.dim * BF16
    rows += heads_bytes(request, setting.attention)
    return rows + _row_bytes(request) * sum(embedding_rows(request)) + GRAPH_WORKSPACES


def lora_bytes(request: RunRequest, setting: Setting) -> int:
    """Counts bypass LoRAs: rank x (K + N) in bf16 for every layer that can have one."""
    if not (ranks := _ranks_beside(request, setting)):
        return 0
    return BF16 * ranks * sum(map(sum, request.transformer.quantizable_layers().values()))


def _ranks_beside(request: RunRequest, setting: Setting) -> int:
    ranks = request.loras.beside(setting.precision) * request.loras.rank
    return -(-ranks // RANKS_AT_ONCE) * RANKS_AT_ONCE


def _around(shape: TransformerShape, tokens: StepTokens, request: RunRequest) -> int:
    # Latents, conditioning and rotation, which last through all blocks.
    latent = shape.in_channels
    latents = SAMPLER_LATENTS + CACHE_LATENTS * (request.cache != OFF)
    sampled = request.batch * request.painted_tokens
    sampler = latents * FP32 * latent * sampled
    text = request.items * (request.prompt_tokens + request.nag_tokens)
    given = BF16 * latent * tokens.image_rows + BF16 * shape.joint_dim * text
    # ComfyUI's matrices of 2 x 2 for every pair of a head, and cosine and sine separately.
    rotation = (4 + 2) * shape.head_dim // 2 * BF16 * (tokens.rows + tokens.prefix_rows)
    embedding = BF16 * shape.dim * embedding_rows(request)[0]
    last = 0
    if (
        tokens.image > request.painted_tokens
    ):  # the loop over references keeps the last one and its places
        last = tokens.items * REFERENCE_TOKENS * (BF16 * latent + 3 * FP32)
    prefixes = request.passes * 2 * shape.blocks * tokens.prefix_rows * shape.dim * BF16
    return sampler + given + rotation + embedding + last + prefixes


def buffer_bytes(request: RunRequest, setting: Setting) -> int:
    """Counts the executor's buffers, which every block of a pass uses again."""
    dim, block, tokens = request.transformer.dim, request.transformer.block, request.step_tokens
    # q of these rows with k and v of all, or the MLP's hidden rows.
    widest = max(3 * tokens.rows + 2 * tokens.prefix_rows, block.hidden * tokens.rows) * dim
    rows = -(-tokens.rows // ROWS_AT_ONCE) * ROWS_AT_ONCE
    count = rows * (-(-widest // tokens.rows) + dim) * BF16
    # What LoRAs make of the rows that q, k and v read.
    count += rows * 3 * _ranks_beside(request, setting) * BF16
    if setting.precision in QUANTIZED and not setting.weight_only:
        count += rows * (block.inner * dim + BYTES_PER_SCALE)
    # One weight of each stream is decoded at a time, which may be the MLP's.
    streams = 2 if block.text_layers else 1
    return count + (streams * block.hidden * dim * dim if setting.packed else 0)


# comfy-kitchen pads keys to a multiple of this, and has so many scales for as many of them.
KEYS_AT_ONCE, SCALES_OF_QUERIES, SCALES_OF_KEYS = 128, 32, 4


def heads_bytes(request: RunRequest, attention: str) -> int:
    """Counts int8 copies of q, k and v with scales for attention in 8 bits; 0 for exact."""
    if attention == EXACT:
        return 0
    head_dim, tokens = request.transformer.head_dim, request.step_tokens
    queries, keys = tokens.joint, tokens.joint + tokens.prefix
    tiles_of_queries, tiles_of_keys = (-(-it // KEYS_AT_ONCE) for it in (queries, keys))
    values = (queries + keys + KEYS_AT_ONCE * tiles_of_keys) * head_dim
    scales = SCALES_OF_QUERIES * tiles_of_queries + SCALES_OF_KEYS * tiles_of_keys + head_dim
    return request.items * request.transformer.heads * (values + FP32 * scales)


def _beside_buffers(
    shape: TransformerShape, tokens: StepTokens, request: RunRequest, setting: Setting
) -> int:
    # The most that a block takes at once beside its input, the residual stream and buffers.
    stream = BF16 * shape.dim
    most = max(tokens.image_rows, tokens.text_rows)
    # What attention gives, and reads.
    found = tokens.rows * stream + heads_bytes(request, setting.attention)
    if request.nag_tokens:  # to the image and to each text, and a product of these in fp32
        found = (1 + 2 + FP32 // BF16) * tokens.rows * stream
    if setting.weight_only:
        # The result of the MLP's first product beside the weight that was expanded for it.
        found = max(found, shape.block.hidden * (most + shape.dim) * stream)
    return found


def _host_block(
    shape: TransformerShape, tokens: StepTokens, request: RunRequest, setting: Setting | None = None
) -> int:
    # ComfyUI's own, followed through its `forward`: at the GELU of its larger stream, or at
    # attention, where 0.33 holds queries, keys and values twice (0.40 frees them earlier).
    block, most = shape.block, max(tokens.image_rows, tokens.text_rows, tokens.prefix_rows)
    # The GELU's input and result; or gate and up with their product.
    hidden = block.hidden + block.inner
    attended = 10 * tokens.rows + 2 * tokens.prefix_rows
    if request.nag_tokens:  # keys and values of the image beside another text, and a second result
        attended += 3 * tokens.rows + 2 * tokens.prefix_rows
    if setting and request.loras.beside(setting.precision):
        # The layer's output, the LoRA's and their sum; the text's comes last.
        hidden = 3 * block.hidden
        attended += max(2 * tokens.text_rows, 2 * tokens.image_rows - tokens.text_rows)
    modulation = block.modulation_rows * sum(embedding_rows(request))
    stream, heads = BF16 * shape.dim, setting and heads_bytes(request, setting.attention)
    attends = attended * stream + (heads or 0)
    return max((2 * tokens.rows + (1 + hidden) * most) * stream, attends) + modulation * stream


def _control_blocks(request: RunRequest) -> int:
    # Each has a transformer block's weights in bf16 and one projection; 5 in InstantX's.
    dim, spec = request.transformer.dim, request.transformer.block
    parameters = sum(rows * columns for rows, columns in spec.gemms.values())
    block = BF16 * dim * dim * (parameters + 2 * spec.modulation_rows + 1)
    return min(request.transformer.blocks, max(1, request.controlnet_bytes // block))


def control_bytes(request: RunRequest) -> tuple[int, int]:
    """Counts (what a ControlNet adds after blocks, kept through the pass; its own pass with that),
    0 for none. It runs in ComfyUI's blocks and sees no references.
    """
    if not request.controlnet_bytes:
        return 0, 0
    tokens, shape = request.step_tokens, request.transformer
    seen = tokens._replace(image=request.painted_tokens)
    added = _control_blocks(request) * seen.image_rows * BF16 * shape.dim
    return added, _around(shape, seen, request) + added + _host_block(shape, seen, request)


# What the text encoder takes: its weights, and one encoding in ComfyUI, which holds it as it is
# stored and computes in fp32, one layer's weight cast at a time (comfy/text_encoders/llama.py,
# qwen_vl.py).

PATCHES_PER_TOKEN = 4


def text_encoder_bytes(request: RunRequest, precision: str) -> int:
    """Counts the encoder's weights as loaded; in fp8 and int8 the language model's linears."""
    known = request.parts.text_encoder_bytes
    return encoder_bytes(request.member.text_encoder, precision) if known is None else known


def encoder_bytes(encoder: TextEncoder, precision: str) -> int:
    total = BF16 * (encoder.language + encoder.vision)
    if precision not in (*QUANTIZED, W4A8):
        return total
    linears = encoder.layers * sum(n * k for n, k in encoder.linears)
    # Of 16 bytes in 8 bits, 4 bits leave 8 and a scale.
    saved = linears * 7 // 16 if precision == W4A8 else 0
    return total - BF16 * linears + encoder.quantized_bytes - saved


def encoding_bytes(request: RunRequest) -> int:
    """Counts the activations of one encoding at its worst moment, in fp32.

    Without images that is the MLP's second product: 0.253 GiB of a weight that is cast, and two
    wide rows with three streams (0.28 GiB measured on an H200 for a short prompt). With images
    it may be the attention, whose scores are computed whole because keys have fewer heads than
    queries, or the vision tower, of one image at a time: both followed through ComfyUI's classes.
    """
    encoder = request.member.text_encoder
    tokens, hidden = encoder.template + request.prompt_tokens, encoder.hidden
    cast = FP32 * hidden * encoder.intermediate
    streams, wide = FP32 * tokens * 3 * hidden, FP32 * tokens * encoder.intermediate
    mlp = streams + max(cast + 2 * wide, 3 * wide)
    scores = 2 * FP32 * encoder.heads * tokens**2
    attention = FP32 * tokens * (2 * hidden + 3 * encoder.query) + scores
    patches = PATCHES_PER_TOKEN * request.member.vision_tokens if request.references else 0
    return max(mlp, attention, vision_bytes(patches, encoder)) + FP32 * tokens**2


def vision_bytes(patches: int, encoder: TextEncoder = QWEN25_VL) -> int:
    """Counts the vision tower on one image of so many patches of 14 x 14 pixels: where keys are
    rotated, or where what the patches give is merged by its largest weight.
    """
    hidden, merged = encoder.vision_hidden, PATCHES_PER_TOKEN * encoder.vision_hidden
    rotated = patches * (11 * hidden + 4 * encoder.vision_head)
    return FP32 * max(rotated, merged * merged + 3 * patches * hidden) if patches else 0
