"""What one forward pass of the transformer holds beside the weights, counted from the code.

A stream is one matrix of tokens x dim in bf16. Below, n counts the rows of text and image together,
i those of the image and t those of the text, over all items of the batch. Followed through
optimizations/block.py and hosts/comfyui/forward.py, a block's worst moment is the MLP's second
product: the block's input, the residual stream x, the attention's branch, what the MLP has read,
its hidden layer (4 streams, and in fp8 and int8 its quantized copy), and the result.

    bf16        1 + 1 + 1 + 1   + 4     + 1 = 9 streams of n
    fp8, int8   1 + 1 + 1 + 1/2 + 4 + 2 + 1 = 10.5, and two fp32 scales a row

The int32 and fp32 sums of 8-bit products stay in the kernels' registers. The first step also runs
one block of ComfyUI's own for the self-check, whose MLP holds 9 i + 2 n, and compares both results
in fp32, 8 i beside four streams of n.

An H200 confirmed it in allocated memory, table left out: bf16 0.229 GiB at 1024x1024 and 0.374 at
1328x1328, where this counts 0.225 and 0.370; fp8 and int8 0.263 and 0.435, 0.262 and 0.431 here;
with the first step's check 0.293 and 0.487, 0.293 and 0.488 here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..spec import BYTES_PER_SCALE, QUANTIZED, REFERENCE_TOKENS, TransformerShape
from .request import RunRequest, Setting

BF16, FP32 = 2, 4
MLP = 4  # the hidden layer's width in dims
# fp32 latents that a sampler and its guider hold while the transformer runs: noise, the image that
# is painted, the prediction of each prompt with its sum and weight, and a step's intermediate ones.
SAMPLER_LATENTS = 10
# The entries of optimizations/modulation.py's table.
MOST_TABLE_BYTES = 512 * 2**20
MODULATION_ROWS = 6  # shift, scale and gate, of attention and of the MLP


@dataclass(frozen=True)
class Rows:
    """Tokens of all items in one forward pass.

    Attributes:
        items: Images in it.
        text: Rows of the text stream.
        painted: Rows of the image stream that are denoised.
        image: Rows of the image stream, references included.
    """

    items: int
    text: int
    painted: int
    image: int

    @classmethod
    def of(cls, request: RunRequest) -> Rows:
        """Those of a request."""
        tokens = request.prompt_tokens, request.painted_tokens, request.image_tokens
        return cls(request.items, *(request.items * count for count in tokens))

    @property
    def all(self) -> int:
        """Rows of both streams."""
        return self.text + self.image


@dataclass(frozen=True)
class StepBytes:
    """Activations of one forward pass at its worst moment.

    Attributes:
        first: Of the first step, which compares a block with the host's own.
        later: Of every other one.
    """

    first: int
    later: int

    @property
    def most(self) -> int:
        return max(self.first, self.later)


def step_bytes(request: RunRequest, setting: Setting) -> StepBytes:
    """What a forward pass takes beside weights, modulation table and workspaces, in bytes.

    Counted for the fused blocks with exact attention, in ComfyUI, where its loop holds a block's
    input; diffusers holds no more.
    """
    shape, rows = request.transformer, Rows.of(request)
    stream = BF16 * shape.dim
    added, control = control_bytes(request)
    around = _around(shape, rows, request) + added
    fused, left = _fused_block(shape, rows, request, setting)
    host = _host_block(shape, rows, request)
    expected = rows.all * stream
    compared = (3 * rows.all + 8 * max(rows.image, rows.text)) * stream + left
    first = max(host, expected + fused, compared)
    return StepBytes(max(around + first, control), max(around + fused, control))


def input_bytes(request: RunRequest) -> int:
    """What is there while the first block waits for its modulation: its input and all around it."""
    shape, rows = request.transformer, Rows.of(request)
    stream = rows.all * BF16 * shape.dim
    return stream + _around(shape, rows, request) + control_bytes(request)[0]


def embedding_rows(request: RunRequest) -> tuple[int, int]:
    """(rows of the timestep embedding for the image stream, for the text stream) of one pass.

    Edit-2511 modulates its references as at timestep zero, which doubles the first.
    """
    doubled = request.member.timestep_zero and request.references > 0
    return request.items * (2 if doubled else 1), request.items


def table_bytes(request: RunRequest) -> int:
    """The modulation table of a schedule: 4.42 MB for a timestep and each pair of rows."""
    shape = request.transformer
    entry = shape.blocks * sum(embedding_rows(request)) * MODULATION_ROWS * shape.dim * BF16
    return entry * min(request.steps, max(1, MOST_TABLE_BYTES // entry))


def lora_bytes(request: RunRequest) -> int:
    """LoRAs beside the weights: rank x (K + N) in bf16 for every layer that can have one."""
    if request.loras.mode != "bypass":
        return 0
    layers = request.transformer.quantizable_layers().values()
    return BF16 * request.loras.count * request.loras.rank * sum(map(sum, layers))


def _around(shape: TransformerShape, rows: Rows, request: RunRequest) -> int:
    """Latents, conditioning and rotation, which last through all blocks."""
    latent = shape.in_channels
    sampler = SAMPLER_LATENTS * FP32 * latent * request.batch * (rows.painted // rows.items)
    given = BF16 * latent * rows.image + BF16 * shape.joint_dim * rows.text
    # ComfyUI's matrices of 2 x 2 for every pair of a head, and cosine and sine apart from them.
    rotation = (4 + 2) * shape.head_dim // 2 * BF16 * rows.all
    embedding = BF16 * shape.dim * embedding_rows(request)[0]
    last = 0
    if rows.image > rows.painted:  # the loop over references keeps the last one and its places
        last = rows.items * REFERENCE_TOKENS * (BF16 * latent + 3 * FP32)
    return sampler + given + rotation + embedding + last


def _fused_block(
    shape: TransformerShape, rows: Rows, request: RunRequest, setting: Setting
) -> tuple[int, int]:
    """(the worst moment of a block, what it leaves for the next one's first layers)."""
    stream, n = BF16 * shape.dim, rows.all
    most, last = max(rows.image, rows.text), 9 * n * stream
    beside = request.loras.count and request.loras.mode == "bypass"
    expanded = MLP * shape.dim * stream if setting.weight_only else 0
    if expanded:
        last = max(last + most * stream, (8 * n + MLP * most) * stream) + expanded
    if beside:
        # The layer's output, the LoRA's and their sum, at the MLP's first product, when a weight
        # that was expanded is gone.
        return max(last, (8 * n + 3 * MLP * most) * stream), n * stream
    if expanded or setting.precision not in QUANTIZED:
        return last, n * stream
    quantized = n * (shape.dim + BYTES_PER_SCALE)
    hidden = n * (MLP * shape.dim + BYTES_PER_SCALE)
    return (8 * n * stream) + quantized + hidden, quantized


def _host_block(shape: TransformerShape, rows: Rows, request: RunRequest) -> int:
    """ComfyUI's own block at the GELU of its larger stream, followed through its `forward`."""
    most = max(rows.image, rows.text)
    hidden = 2 * MLP
    if request.loras.count and request.loras.mode == "bypass":
        hidden = 3 * MLP
    return (2 * rows.all + (1 + hidden) * most) * BF16 * shape.dim


def _control_blocks(request: RunRequest) -> int:
    """Blocks of a ControlNet, told from its bytes: each has a transformer block's weights in bf16
    and one projection; 5 in InstantX's.
    """
    dim = request.transformer.dim
    block = BF16 * dim * dim * (2 * 4 + 4 * MLP + 2 * MODULATION_ROWS + 1)
    return min(request.transformer.blocks, max(1, request.controlnet_bytes // block))


def control_bytes(request: RunRequest) -> tuple[int, int]:
    """(what a ControlNet adds after blocks, held through the pass; its own pass with that), 0 for
    none. It runs in ComfyUI's blocks and sees no references.
    """
    if not request.controlnet_bytes:
        return 0, 0
    rows, shape = Rows.of(request), request.transformer
    seen = replace(rows, image=rows.painted)
    added = _control_blocks(request) * rows.painted * BF16 * shape.dim
    return added, _around(shape, seen, request) + added + _host_block(shape, seen, request)
