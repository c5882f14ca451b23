"""What a Qwen-Image is: units, number formats, the sizes and layers of its parts, its families.

Everything that tells one family of models from another is in its `Family`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from .errors import CheckpointError, SettingError

# --- units ---

MIB, GIB = 2**20, 2**30
GB = 10**9  # as disks, files and downloads are sold
METADATA_KEY = "qwen_l40s"  # of what this package writes into safetensors files and images


def format_gib(count: float) -> str:
    """A size of memory or of a file: `38.1 GiB`, `12 MiB`."""
    return f"{count / GIB:.1f} GiB" if count >= GIB / 10 else f"{count / MIB:.0f} MiB"


# --- number formats, and the cards that multiply them ---

BYTES_PER_WEIGHT = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8": 1, "int8": 1}
QUANTIZED = ("fp8", "int8")
MULTIPLIED = ("bf16", *QUANTIZED)  # the precisions that a transformer computes its products in
BYTES_PER_SCALE = 4  # fp32, one for each output row
# Largest magnitude of e4m3, and of int8 used symmetrically.
LARGEST = {"fp8": 448.0, "int8": 127.0}


class RowFormat(NamedTuple):
    """How the rows of a matrix are quantized, each by its own largest magnitude.

    Attributes:
        storage: "fp8" or "int8".
        rotation: Before that, so many columns at a time are multiplied by a Hadamard matrix, as
            ConvRot does: a power of 4, or 0 for none.
    """

    storage: str
    rotation: int = 0

    def __str__(self) -> str:
        return f"{self.storage} rotated by {self.rotation}" if self.rotation else self.storage


def is_rotation(size: object, columns: int) -> bool:
    """Whether so many columns can be rotated in groups of `size`, a power of 4."""
    if type(size) is not int or size < 4 or columns % size:
        return False
    return size & (size - 1) == 0 and size.bit_length() % 2 == 1


# The oldest compute capability whose tensor cores multiply the format here.
OLDEST_CAPABILITY = {"fp8": (8, 9), "int8": (8, 0)}
# Those of older cards do not multiply bf16 either; ComfyUI computes in fp32 there.
OLDEST_BF16 = (8, 0)


@dataclass(frozen=True)
class CardFacts:
    """What a choice needs to know of one card.

    Args:
        name: as the driver calls it.
        total_bytes: what CUDA shows, with ECC's share already gone: 45,373 MiB on an L40S.
        capability: compute capability, (8, 9) on an L40S.
    """

    name: str
    total_bytes: int
    capability: tuple[int, int]

    def multiplies(self, precision: str) -> bool:
        """Whether its tensor cores multiply a precision."""
        return self.capability >= OLDEST_CAPABILITY.get(precision, (0, 0))

    @property
    def computes_in(self) -> str:
        """What ComfyUI computes bf16 weights in."""
        return "bf16" if self.capability >= OLDEST_BF16 else "fp32"


def sm(capability: tuple[int, int]) -> str:
    """As NVIDIA writes it: sm_89."""
    return f"sm_{capability[0]}{capability[1]}"


# --- the transformer ---

# The area that Qwen-Image is trained at; the choice of a precision leaves room for one step of it.
USUAL_SIDE = 1328
PIXELS_PER_TOKEN_SIDE = 16  # the VAE's factor of 8, then patches of 2 x 2
# Edit workflows scale a reference image to one megapixel.
REFERENCE_SIDE = 1024
REFERENCE_TOKENS = (REFERENCE_SIDE // PIXELS_PER_TOKEN_SIDE) ** 2
TIME_CHANNELS = 256  # the sinusoidal embedding of the timestep, fixed in both hosts' code
# Where the modulation weights wait: on the card, or in host memory.
ON_CARD, OFF_CARD = "on card", "off card"
PLACES = ("auto", ON_CARD, OFF_CARD)


def whole_pixels(pixels: int) -> int:
    """A side rounded up to whole tokens, as the hosts pad it."""
    return -(-pixels // PIXELS_PER_TOKEN_SIDE) * PIXELS_PER_TOKEN_SIDE


@dataclass(frozen=True, eq=False)
class BlockSpec:
    """The layers of one transformer block.

    Attributes:
        gemms: {layer: (rows, columns) in multiples of dim}, those that may be quantized.
        head_norms: The RMSNorms of queries and keys.
        biases: Whether its layers have biases.
        text_layers: How the names of layers begin that the text stream goes through.
        modulation: {stream: the layer that makes its shifts, scales and gates}.
        modulation_rows: What that layer gives: shift, scale and gate, of attention and of the MLP.
        hidden, inner: Columns in multiples of dim of what the MLP's first layers give, and of what
            its last ones read: a gate halves them.
    """

    gemms: Mapping[str, tuple[int, int]]
    head_norms: tuple[str, ...]
    biases: bool
    text_layers: tuple[str, ...] = ()
    modulation: Mapping[str, str] = field(default_factory=dict)
    modulation_rows: int = 0
    hidden: int = 4
    inner: int = 4


ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")
ADDED_ATTENTION = ("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
DOUBLE_STREAM = BlockSpec(
    gemms={
        **{f"attn.{name}": (1, 1) for name in (*ATTENTION, *ADDED_ATTENTION)},
        **{f"{stream}_mlp.net.0.proj": (4, 1) for stream in ("img", "txt")},
        **{f"{stream}_mlp.net.2": (1, 4) for stream in ("img", "txt")},
    },
    head_norms=("attn.norm_q", "attn.norm_k", "attn.norm_added_q", "attn.norm_added_k"),
    biases=True,
    text_layers=("attn.add_", "attn.to_add_out", "txt_mlp."),
    modulation={"image": "img_mod", "text": "txt_mod"},
    modulation_rows=6,
)
BLOCK_GEMMS = DOUBLE_STREAM.gemms

# Qwen-Image-2.1: text and image are one stream, and one modulation is shared by all blocks. The
# gated MLP's first weights are apart, or [gate; up] in one, as ComfyUI's own files have them.
GATE_UP = "img_mlp.gate_up"
GATED = ("img_mlp.gate_layer", "img_mlp.proj")  # the halves of GATE_UP, in its order


@functools.cache
def single_stream(fused_mlp: bool, mlp_ratio: int = 3) -> BlockSpec:
    """A block of Qwen-Image-2.1, as of `SingleStreamShape`."""
    first = {GATE_UP: (2 * mlp_ratio, 1)} if fused_mlp else dict.fromkeys(GATED, (mlp_ratio, 1))
    return BlockSpec(
        gemms={
            **{f"attn.{name}": (1, 1) for name in ATTENTION},
            **first,
            "img_mlp.out": (1, mlp_ratio),
        },
        head_norms=("attn.norm_q", "attn.norm_k"),
        biases=False,
        hidden=2 * mlp_ratio,
        inner=mlp_ratio,
    )


SINGLE_STREAM, FUSED_SINGLE_STREAM = single_stream(False), single_stream(True)
BLOCKS = (DOUBLE_STREAM, SINGLE_STREAM, FUSED_SINGLE_STREAM)
FAMILY_21 = "Qwen-Image-2.1"  # as header inspection calls it


@dataclass(frozen=True)
class TransformerShape:
    """The sizes of a Qwen-Image transformer that fix all its tensors.

    Args:
        blocks: transformer blocks, 60 in the published models.
        dim: width of both streams, heads x head_dim.
        joint_dim: width of the text encoder's output.
        in_channels: channels of one packed latent token.
        packed_out_channels: channels of one packed output token.
        addition_t_cond: whether there is the second time embedding of Qwen-Image-Layered.
    """

    blocks: int
    dim: int
    heads: int
    head_dim: int
    joint_dim: int
    in_channels: int
    packed_out_channels: int
    addition_t_cond: bool = False

    @property
    def block(self) -> BlockSpec:
        """The layers of its blocks."""
        return DOUBLE_STREAM

    @classmethod
    def from_dims(
        cls, dims: Mapping[str, int | str], blocks: int | None, family: str
    ) -> TransformerShape:
        """Takes what header inspection found: a part's `dims`, `blocks` and `family`.

        Raises:
            CheckpointError: the tensors leave a size open, or the heads do not make up the width.
        """
        sizes: dict[str, int] = {}
        found = {**dims, "blocks": blocks or 0}
        names = ("blocks", "dim", "heads", "head_dim", "joint_dim", "in_channels")
        for name in (*names, "packed_out_channels"):
            value = found.get(name)
            if not isinstance(value, int) or value < 1:
                raise CheckpointError(
                    f"the tensors do not tell the transformer's {name}, which fixes its size in "
                    "memory: get the file in bf16, fp8 or int8 from the model's own source."
                )
            sizes[name] = value
        if sizes["heads"] * sizes["head_dim"] != sizes["dim"]:
            raise CheckpointError(
                f"the transformer is {sizes['dim']} wide and its heads are {sizes['head_dim']}: "
                "the width must be a whole number of heads, so get the file again."
            )
        if family == FAMILY_21:
            ratio = dims.get("mlp_ratio")
            return SingleStreamShape(
                **sizes,
                fused_mlp=dims.get("mlp") == GATE_UP,
                mlp_ratio=ratio if isinstance(ratio, int) else 3,
            )
        return TransformerShape(**sizes, addition_t_cond=family == "Qwen-Image-Layered")

    def quantizable_layers(self) -> dict[str, tuple[int, int]]:
        """{layer name without `.weight`: (rows, columns)} of every layer that may be quantized."""
        return {
            f"transformer_blocks.{block}.{layer}": (rows * self.dim, columns * self.dim)
            for block in range(self.blocks)
            for layer, (rows, columns) in self.block.gemms.items()
        }

    def modulation_layers(self) -> dict[str, tuple[int, int]]:
        """{layer name without `.weight`: (rows, columns)} of what sees the timestep alone, in the
        blocks.
        """
        size = (self.block.modulation_rows * self.dim, self.dim)
        return {
            f"transformer_blocks.{block}.{name}.1": size
            for block in range(self.blocks)
            for name in self.block.modulation.values()
        }

    def outer_layers(self) -> dict[str, tuple[int, int]]:
        """{layer name without `.weight`: (rows, columns)} of the layers around the blocks."""
        dim, time = self.dim, "time_text_embed.timestep_embedder"
        return {
            "img_in": (dim, self.in_channels),
            "txt_in": (dim, self.joint_dim),
            f"{time}.linear_1": (dim, TIME_CHANNELS),
            f"{time}.linear_2": (dim, dim),
            "norm_out.linear": (2 * dim, dim),
            "proj_out": (self.packed_out_channels, dim),
        }

    def other_tensors(self) -> dict[str, tuple[int, ...]]:
        """{name: shape} of what is no linear layer, around the blocks."""
        found: dict[str, tuple[int, ...]] = {"txt_norm.weight": (self.joint_dim,)}
        if self.addition_t_cond:
            found["time_text_embed.addition_t_embedding.weight"] = (2, self.dim)
        return found

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """{name: shape} of every parameter, with the names of diffusers' class, which ComfyUI
        keeps.
        """
        found = self.other_tensors()

        def linear(name: str, rows: int, columns: int) -> None:
            found[f"{name}.weight"] = (rows, columns)
            if self.block.biases:
                found[f"{name}.bias"] = (rows,)

        outer, modulation = self.outer_layers(), self.modulation_layers()
        behind = ("norm_out.linear", "proj_out")
        for name, size in outer.items():
            if name not in behind:
                linear(name, *size)
        for block in (f"transformer_blocks.{index}" for index in range(self.blocks)):
            for name, (rows, columns) in self.block.gemms.items():
                linear(f"{block}.{name}", rows * self.dim, columns * self.dim)
            for name in self.block.head_norms:
                found[f"{block}.{name}.weight"] = (self.head_dim,)
            for name in self.block.modulation.values():
                linear(f"{block}.{name}.1", *modulation[f"{block}.{name}.1"])
        for name in behind:
            linear(name, *outer[name])
        return found


@dataclass(frozen=True)
class SingleStreamShape(TransformerShape):
    """The same of a Qwen-Image-2.1: diffusers' `QwenImage21Transformer2DModel`.

    Args:
        fused_mlp: whether gate and up are one weight, as in ComfyUI's own files.
        mlp_ratio: width of the gated MLP in multiples of dim.
    """

    fused_mlp: bool = False
    mlp_ratio: int = 3

    @property
    def block(self) -> BlockSpec:
        return single_stream(self.fused_mlp, self.mlp_ratio)

    def outer_layers(self) -> dict[str, tuple[int, int]]:
        found, dim = super().outer_layers(), self.dim
        del found["txt_in"]
        return found | {
            "txt_in.in_layer": (dim, self.joint_dim),
            "txt_in.out_layer": (dim, dim),
            "modulation.1": (4 * dim, dim),
            "norm_out.linear": (dim, dim),
        }

    def other_tensors(self) -> dict[str, tuple[int, ...]]:
        return {"txt_in.text_norm.weight": (self.joint_dim,)}


# The published models: Qwen-Image, 2512, Edit, 2509 and 2511.
FULL_SIZE = TransformerShape(
    blocks=60,
    dim=3072,
    heads=24,
    head_dim=128,
    joint_dim=3584,
    in_channels=64,
    packed_out_channels=64,
)

# 1 in 24 of its width: what the benchmarks run on a CPU to show that they work.
SMALL = TransformerShape(
    blocks=60, dim=128, heads=4, head_dim=32, joint_dim=64, in_channels=64, packed_out_channels=64
)
LAYERED_SHAPE = replace(FULL_SIZE, addition_t_cond=True)
# Qwen-Image-2.1 and its Turbo: 7.1 B parameters.
SHAPE_21 = SingleStreamShape(
    blocks=32,
    dim=4096,
    heads=32,
    head_dim=128,
    joint_dim=4096,
    in_channels=64,
    packed_out_channels=64,
    fused_mlp=True,
)

# --- the VAE ---

PIXELS_PER_LATENT = 8


@dataclass(frozen=True)
class VaeShape:
    """The sizes that fix a VAE's activations.

    Args:
        dim: channels of the decoder at full resolution: 96 in the published VAE.
        latent_channels: 16, or 64 in Qwen-Image-2.1.
        image_channels: 3, or 4 in Qwen-Image-Layered and Qwen-Image-2.1.
        padded_frames: the frames of the padded copy that a convolution reads of one image: 0 in
            ComfyUI, where the kernel pads; 3 in diffusers, 1 in its class of Qwen-Image-2.1. Of
            16-bit tensors diffusers norms and enlarges copies in fp32.
        encoder_dim: the same of the encoder; None where it is the decoder's.
        widths: channels of each stage from full to latent resolution, in multiples of those.
        shortcut_frames: of each halving from full resolution, the frames that the shortcut around
            its stage spreads one image over; empty where no shortcut leads around a stage.
    """

    dim: int = 96
    latent_channels: int = 16
    image_channels: int = 3
    padded_frames: int = 0
    encoder_dim: int | None = None
    widths: tuple[int, ...] = (1, 2, 4, 4)
    shortcut_frames: tuple[int, ...] = ()

    @property
    def pixels(self) -> int:
        """Of a latent one's side."""
        return 2 ** (len(self.widths) - 1)

    def channels(self, direction: str) -> tuple[int, ...]:
        """Of each stage, from full to latent resolution."""
        dim = self.encoder_dim if direction == "encode" else None
        return tuple((dim or self.dim) * width for width in self.widths)

    def middle_channels(self, direction: str) -> int:
        """Channels at latent resolution, in the middle of the encoder or the decoder."""
        return self.channels(direction)[-1]


PUBLISHED_VAE = VaeShape()
# In diffusers, where it is cut into tiles; `StripVae` is the same in ComfyUI.
VAE_21 = VaeShape(
    dim=144,
    latent_channels=64,
    image_channels=4,
    padded_frames=1,
    encoder_dim=96,
    widths=(1, 2, 4, 8, 8),
    shortcut_frames=(1, 2, 2, 2),
)


@dataclass(frozen=True)
class StripCost:
    """What a host's own VAE takes that cuts an image into exact strips.

    Attributes:
        fixed: Bytes at once, of an image of any size.
        bytes: At once, for a pixel.
        flops, moved: Operations of convolutions, and bytes read and written, for a pixel.
    """

    fixed: int
    bytes: int
    flops: int
    moved: int


@dataclass(frozen=True)
class StripVae:
    """The VAE of Qwen-Image-2.1. ComfyUI cuts each layer of one image into strips of rows that read
    what they need of their neighbours, so that nothing is left to plan.

    The costs are counted in bf16, on tensors without memory that went through ComfyUI's class at
    512x512 to 2048x2048. An H200 took 4.68 GiB to decode 2048x2048 where 4.64 are counted. It took
    3.41 to encode where tensors alone are 2.44: the bytes of a pixel are the measured ones.
    """

    latent_channels: int = 64
    image_channels: int = 4
    decode: StripCost = StripCost(137_600_000, 1_154, 17_700_000, 90_700)
    encode: StripCost = StripCost(116_100_000, 845, 3_050_000, 29_900)
    pixels = 16  # of a latent one's side


# The layers of Qwen-Image's VAE as tiles see them: how far each one reads.
#
# The network is Wan 2.1's: stages of residual blocks with halvings between them, and one attention
# over all latent pixels in the middle. Everything else reads at most a pixel to each side in a
# convolution, and norms are per pixel, so that a tile with a margin gives what the whole gives.
# Qwen-Image-2.1's is Wan 2.2's, where a shortcut leads around each stage.

Kind = Literal["convolution", "residual", "attention", "up", "down", "head", "stage"]
Interval = tuple[int, int]


@dataclass(frozen=True)
class VaeLayer:
    """One layer that a tile runs through.

    Args:
        kind: "convolution" is one of 3x3; "residual" is two with norms, and a shortcut;
            "attention" reads every pixel of the whole, so that no tile runs it; "up" doubles the
            pixels before a convolution; "down" is one of stride 2 that pads below and to the
            right; "head" is a norm and a convolution; "stage" is `inner` with a shortcut around
            all of it, which averages or repeats pixels.
        frames: of a stage, those that its shortcut spreads one image over.
    """

    kind: Kind
    channels_in: int
    channels_out: int
    inner: tuple[VaeLayer, ...] = ()
    frames: int = 1

    def reads(self, low: int, high: int) -> Interval:
        """The rows (or columns) of the input behind rows [low, high) of the output."""
        if self.kind == "up":
            return (low - 1) // 2, -(-(high + 1) // 2)
        if self.kind == "down":
            return 2 * low, 2 * high + 1
        if self.kind == "stage":
            for step in reversed(self.inner):
                low, high = step.reads(low, high)
            # Its shortcut averages whole squares of 2x2.
            return low, high + high % 2 if self.inner[-1].kind == "down" else high
        margin = 2 if self.kind == "residual" else 1
        return low - margin, high + margin

    def gives(self, low: int, high: int) -> Interval:
        """The rows of the output that come out when rows [low, high) go in."""
        if self.kind == "up":
            return 2 * low, 2 * high
        if self.kind == "down":
            return low // 2, high // 2
        for step in self.inner:
            low, high = step.gives(low, high)
        return low, high


def _blocks(channels_in: int, channels: int, count: int) -> list[VaeLayer]:
    first = VaeLayer("residual", channels_in, channels)
    return [first] + [VaeLayer("residual", channels, channels)] * (count - 1)


def _stage(steps: list[VaeLayer], frames: int) -> VaeLayer:
    return VaeLayer("stage", steps[0].channels_in, steps[-1].channels_out, tuple(steps), frames)


def up_steps(shape: VaeShape) -> tuple[VaeLayer, ...]:
    """The decoder behind its middle: stages of three residual blocks, and the head."""
    stages, frames = shape.channels("decode")[::-1], shape.shortcut_frames[::-1]
    steps, given = [], stages[0]
    for index, channels in enumerate(stages):
        stage = _blocks(given, channels, 3)
        if index < len(stages) - 1:
            # Without a shortcut, enlarging halves the channels.
            given = channels if frames else channels // 2
            stage.append(VaeLayer("up", channels, given))
            stage = [_stage(stage, frames[index])] if frames else stage
        steps += stage
    return (*steps, VaeLayer("head", stages[-1], shape.image_channels))


def down_steps(shape: VaeShape) -> tuple[VaeLayer, ...]:
    """The encoder before its middle: the first convolution and stages of two residual blocks."""
    stages, frames = shape.channels("encode"), shape.shortcut_frames
    steps, given = [VaeLayer("convolution", shape.image_channels, stages[0])], stages[0]
    for index, channels in enumerate(stages):
        stage = _blocks(given, channels, 2)
        if index < len(stages) - 1:
            stage.append(VaeLayer("down", channels, channels))
        steps += [_stage(stage, (*frames, 1)[index])] if frames else stage
        given = channels
    return tuple(steps)


def before_middle(shape: VaeShape, direction: str) -> tuple[VaeLayer, ...]:
    """What precedes the attention and is sliced with it."""
    width = shape.middle_channels(direction)
    block = VaeLayer("residual", width, width)
    if direction == "encode":
        return (block,)
    return (VaeLayer("convolution", shape.latent_channels, width), block)


def after_middle(shape: VaeShape, direction: str) -> tuple[VaeLayer, ...]:
    """What follows the attention and is sliced with it."""
    width = shape.middle_channels(direction)
    block = VaeLayer("residual", width, width)
    if direction == "decode":
        return (block,)
    return (block, VaeLayer("head", width, 2 * shape.latent_channels))


def middle_steps(shape: VaeShape, direction: str) -> tuple[VaeLayer, ...]:
    """The attention with what precedes and follows it."""
    width = shape.middle_channels(direction)
    attention = VaeLayer("attention", width, width)
    return (*before_middle(shape, direction), attention, *after_middle(shape, direction))


def intervals(
    steps: Sequence[VaeLayer], low: int, high: int, size: int | None = None
) -> list[Interval]:
    """What each step needs so that rows [low, high) come out of the last one.

    Args:
        low, high: rows of the last step's output.
        size: rows of the whole at the first step's input, where intervals are cut, so that a
            convolution pads there as it does in the whole; None for a whole without end.

    Returns:
        One interval for each step's input, and (low, high) itself.
    """
    sizes = [size]
    for step in steps[:-1]:
        sizes.append(None if sizes[-1] is None else step.gives(0, sizes[-1])[1])
    found = [(low, high)]
    for step, whole in zip(reversed(steps), reversed(sizes), strict=True):
        low, high = step.reads(low, high)
        if whole is not None:
            low, high = max(0, low), min(whole, high)
        found.append((low, high))
    return found[::-1]


def parts(size: int, count: int) -> list[Interval]:
    """Splits [0, size) into `count` intervals whose lengths differ by at most one."""
    return [(i * size // count, (i + 1) * size // count) for i in range(count)]


# --- the text encoders ---


@dataclass(frozen=True)
class TextEncoder:
    """The sizes of a Qwen-VL text encoder, without lm_head, which encoding never reads.

    Attributes:
        name: Of the published model.
        hidden, intermediate, heads, kv_heads, layers, vocabulary: Of the language model.
        biases: Whether q, k and v have biases; heads are normalized where not.
        vision, vision_hidden, vision_head: Parameters of the vision tower, its width, and that of
            a head.
        template: Tokens of the system prompt, which are cut off what comes out.
    """

    name: str
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    layers: int
    vocabulary: int
    biases: bool
    vision: int
    vision_hidden: int
    vision_head: int
    template: int
    head_dim: int = 128

    @property
    def query(self) -> int:
        """Columns of the queries."""
        return self.heads * self.head_dim

    @property
    def linears(self) -> tuple[tuple[int, int], ...]:
        """One layer's, (rows, columns): q, k, v, output, gate, up and down."""
        hidden, inner, key = self.hidden, self.intermediate, self.kv_heads * self.head_dim
        attention = (self.query, hidden), (key, hidden), (key, hidden), (hidden, self.query)
        return (*attention, (inner, hidden), (inner, hidden), (hidden, inner))

    @property
    def quantized_bytes(self) -> int:
        """The language model's linears in fp8 or int8, with a scale for each row."""
        return self.layers * sum(n * k + BYTES_PER_SCALE * n for n, k in self.linears)

    @property
    def layer_parameters(self) -> int:
        """What every token goes through: all but the embedding, of which a row is looked up."""
        small = 2 * self.hidden
        small += sum(n for n, _ in self.linears[:3]) if self.biases else 2 * self.head_dim
        return self.layers * (sum(n * k for n, k in self.linears) + small) + self.hidden

    @property
    def language(self) -> int:
        """Parameters of the language model."""
        return self.layer_parameters + self.vocabulary * self.hidden


QWEN25_VL = TextEncoder(
    name="Qwen2.5-VL 7B",
    hidden=3584,
    intermediate=18944,
    heads=28,
    kv_heads=4,
    layers=28,
    vocabulary=152_064,
    biases=True,
    vision=676_550_144,
    vision_hidden=1280,
    vision_head=80,
    template=64,
)
QWEN3_VL = TextEncoder(
    name="Qwen3-VL 8B",
    hidden=4096,
    intermediate=12288,
    heads=32,
    kv_heads=8,
    layers=36,
    vocabulary=151_936,
    biases=False,
    vision=576_388_336,
    vision_hidden=1152,
    vision_head=72,
    template=20,
)

# --- the families ---

APACHE = "Apache-2.0"
LICENCE_21 = (
    "Qwen Research License: research, not commercial use (Qwen-Image-2512 and Edit-2511 are "
    f"{APACHE})"
)


@dataclass(frozen=True)
class Family:
    """One published model.

    Attributes:
        name: As `--family` takes it.
        steps: Of the sampler, as in its model card.
        most_references: Reference images that its workflows take.
        timestep_zero: Whether references are modulated as at timestep zero, which doubles the rows
            of the modulation.
        layers: Whether several layers are painted together.
        vision_tokens: Text tokens that each reference image adds to the prompt: the text encoder
            sees one megapixel in Edit and 384x384 pixels in its successors, 28x28 a token; one
            megapixel of 32x32 a token in 2.1, whose transformer has the reference in their place.
        transformer, vae, text_encoder: The published sizes.
        vae_bytes: Of the VAE's weights in bf16.
        licence: Of the weights.
        side: Of a square that it is trained to paint, in pixels.
        size_step: What both sides are multiples of, in pixels.
        cached_prefix: Whether text and references are computed in a prompt's first step alone, and
            their keys and values kept for the others.
    """

    name: str
    steps: int = 50
    most_references: int = 0
    timestep_zero: bool = False
    layers: bool = False
    vision_tokens: int = 0
    transformer: TransformerShape = FULL_SIZE
    vae: VaeShape | StripVae = PUBLISHED_VAE
    text_encoder: TextEncoder = QWEN25_VL
    vae_bytes: int = 2 * 126_892_531
    licence: str = APACHE
    side: int = USUAL_SIDE
    size_step: int = PIXELS_PER_TOKEN_SIDE
    cached_prefix: bool = False


FAMILIES = {
    family.name: family
    for family in (
        Family("qwen-image"),
        Family("qwen-image-2512"),
        Family("qwen-image-edit", most_references=1, vision_tokens=1369),
        Family("qwen-image-edit-2509", steps=40, most_references=3, vision_tokens=196),
        Family(
            "qwen-image-edit-2511",
            steps=40,
            most_references=3,
            timestep_zero=True,
            vision_tokens=196,
        ),
        Family(
            "qwen-image-layered",
            most_references=1,
            layers=True,
            transformer=LAYERED_SHAPE,
            vae=VaeShape(image_channels=4),
        ),
        Family(
            "qwen-image-2.1",
            steps=40,
            most_references=10,
            vision_tokens=1024,
            transformer=SHAPE_21,
            vae=StripVae(),
            text_encoder=QWEN3_VL,
            vae_bytes=675_480_808,
            licence=LICENCE_21,
            side=2048,
            size_step=32,
            cached_prefix=True,
        ),
    )
}


TEXT_TO_IMAGE = FAMILIES["qwen-image"]
SINGLE_STREAM_FAMILY = FAMILIES["qwen-image-2.1"]


def pixels_of(channels: int) -> int:
    """Pixels of a latent pixel's side, by the latent's channels."""
    vae = SINGLE_STREAM_FAMILY.vae
    return vae.pixels if channels == vae.latent_channels else PIXELS_PER_LATENT


def family_of(shape: TransformerShape) -> Family:
    """The family that a transformer's shape tells; the first of those that share it."""
    single = isinstance(shape, SingleStreamShape)
    return SINGLE_STREAM_FAMILY if single else TEXT_TO_IMAGE


def find_family(name: str) -> Family:
    """The family of a name.

    Raises:
        SettingError: there is none.
    """
    if name not in FAMILIES:
        raise SettingError(f"family {name!r} is unknown: choose {', '.join(FAMILIES)}.")
    return FAMILIES[name]
