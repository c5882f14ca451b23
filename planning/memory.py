"""What the weights and one forward of a transformer take, from sizes alone.

Every count is in bytes; GiB is 2**30 bytes, as cards are sold. Nothing is loaded and torch is not
needed: the answer comes before gigabytes are read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..errors import CheckpointError, SettingError

MIB = 2**20
GIB = 2**30

BYTES_PER_WEIGHT = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8": 1, "int8": 1}
QUANTIZED = ("fp8", "int8")
BYTES_PER_SCALE = 4  # fp32, one for each output row

# The area that Qwen-Image is trained at; the choice of a precision leaves room for one step of it.
USUAL_SIDE = 1328

ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")
ADDED_ATTENTION = ("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
# The layers of one block that may be quantized: (rows, columns) in multiples of dim.
BLOCK_GEMMS = {
    **{f"attn.{name}": (1, 1) for name in (*ATTENTION, *ADDED_ATTENTION)},
    **{f"{stream}_mlp.net.0.proj": (4, 1) for stream in ("img", "txt")},
    **{f"{stream}_mlp.net.2": (1, 4) for stream in ("img", "txt")},
}
TIME_CHANNELS = 256  # the sinusoidal embedding of the timestep, fixed in both hosts' code

PIXELS_PER_TOKEN_SIDE = 16  # the VAE's factor of 8, then patches of 2 x 2
# Streams, each tokens x dim of 2 bytes, alive at the worst moment; see `step_activation_bytes`.
LIVE_STREAMS = 28
WORKSPACE_BYTES = GIB // 2


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
        return cls(**sizes, addition_t_cond=family == "Qwen-Image-Layered")

    def quantizable_layers(self) -> dict[str, tuple[int, int]]:
        """{layer name without `.weight`: (rows, columns)} of every layer that may be quantized."""
        return {
            f"transformer_blocks.{block}.{layer}": (rows * self.dim, columns * self.dim)
            for block in range(self.blocks)
            for layer, (rows, columns) in BLOCK_GEMMS.items()
        }


@dataclass(frozen=True)
class WeightBytes:
    """Bytes that a loaded transformer takes, allocator rounding (512 bytes a tensor) left out.

    Args:
        gemm: weight matrices of the layers that may be quantized.
        modulation: weights and biases of `img_mod` and `txt_mod`, never quantized.
        rest: everything else, with the biases of the quantizable layers.
        scales: fp32 scales, one for each output row of a quantized layer.
    """

    gemm: int
    modulation: int
    rest: int
    scales: int

    @property
    def total(self) -> int:
        return self.gemm + self.modulation + self.rest + self.scales


def weight_bytes(
    shape: TransformerShape, precision: str, keep: frozenset[str] = frozenset()
) -> WeightBytes:
    """Counts a transformer in one precision; equals the sum over its tensors exactly.

    Args:
        precision: a name in `BYTES_PER_WEIGHT`. In fp8 and int8 everything that is not a
            quantizable layer is bf16.
        keep: names of quantizable layers that stay bf16 in fp8 and int8.

    Raises:
        SettingError: the precision is unknown, or `keep` names no quantizable layer.
    """
    _check_precision(precision)
    layers = shape.quantizable_layers()
    if unknown := sorted(keep - layers.keys()):
        raise SettingError(
            f"{unknown[0]!r} is no layer that could be quantized: name linear layers of the "
            f"attention and the MLPs, such as {next(iter(layers))!r}."
        )
    size = BYTES_PER_WEIGHT[precision]
    plain = 2 if precision in QUANTIZED else size
    gemm = scales = biases = 0
    for name, (rows, columns) in layers.items():
        quantized = precision in QUANTIZED and name not in keep
        gemm += rows * columns * (size if quantized else plain)
        scales += rows * BYTES_PER_SCALE if quantized else 0
        biases += rows
    rest = biases + 4 * shape.head_dim * shape.blocks + _outside_blocks(shape)
    return WeightBytes(gemm, _modulation(shape) * plain, rest * plain, scales)


def weights_by_precision(
    shape: TransformerShape, keep: frozenset[str] = frozenset()
) -> dict[str, int]:
    """{precision: total bytes of the loaded transformer}, for every known precision."""
    return {name: weight_bytes(shape, name, keep).total for name in BYTES_PER_WEIGHT}


def part_bytes(parameters: int, precision: str) -> int:
    """The bytes of a text encoder or VAE in one precision, scales of fp8 and int8 left out.

    Args:
        parameters: as header inspection counts them (`Part.parameters`); of a text encoder without
            its vision tower, `language_model_parameters`. For a file that stays as it is stored,
            `Part.bytes` is exact.

    Raises:
        SettingError: the precision is unknown.
    """
    _check_precision(precision)
    return parameters * BYTES_PER_WEIGHT[precision]


def language_model_parameters(dims: Mapping[str, int | str], layers: int) -> int:
    """Counts Qwen2.5-VL's language model, without the vision tower and without lm_head.

    Args:
        dims: hidden, intermediate, q_dim, kv_dim and vocabulary, as header inspection finds them.
        layers: a part's `blocks`.

    Raises:
        CheckpointError: the tensors leave one of them open.
    """
    names = ("hidden", "intermediate", "q_dim", "kv_dim", "vocabulary")
    sizes = [value for value in map(dims.get, names) if isinstance(value, int)]
    if len(sizes) < len(names):
        raise CheckpointError(
            f"the text encoder's tensors do not tell all of {', '.join(names)}, which fix its size "
            "in memory: get the file from the model's own source."
        )
    hidden, intermediate, query, key, vocabulary = sizes
    attention = (hidden + 1) * (query + 2 * key) + query * hidden
    layer = attention + 3 * hidden * intermediate + 2 * hidden
    return layers * layer + vocabulary * hidden + hidden


def step_activation_bytes(
    shape: TransformerShape,
    *,
    width: int,
    height: int,
    batch: int = 1,
    text_tokens: int = 512,
    reference_pixels: Sequence[tuple[int, int]] = (),
    frames: int = 1,
) -> int:
    """An upper bound on what one forward takes beside the weights, in bf16, with eager host code.

        (28 * dim * 2 + 16 * head_dim) * tokens
        + 4 * (in_channels * image tokens + joint_dim * text tokens) + 48 * dim * batch
        + 0.5 GiB

    Derived: attention without a score matrix peaks lower than the MLP, whose worst moments are, in
    streams of tokens x dim x 2 bytes:

    - bf16, at the GELU: the MLP's hidden layer before and after it (4 + 4) and what the host's code
      still refers to (3 in ComfyUI 0.33, 7 in diffusers), so 11 and 15. Both were confirmed by
      following the allocations of the real classes on torch's meta device.
    - int8 or fp8 without a fused epilogue, after the first GEMM: 8-bit input (0.5), int32 product
      (8), the same scaled in fp32 (8), bf16 (4), and 7 as above: 27.5.

    The text stream is counted like the image stream although their peaks do not coincide. Then come
    the rotary tables while they are built in fp64, inputs and their normalized copies, and the
    modulation vectors of one block. The last 0.5 GiB stand for GEMM workspaces and blocks that the
    allocator holds unused.

    Measured on an H200 at 1024x1024, batch 1, 200 text tokens, allocated less weights: in ComfyUI
    0.26 GiB in bf16, which is the count above, and 0.27 in fp8 and int8 with fused epilogues; the
    whole card showed 0.42 GiB more than the weights in bf16. In other programs: ComfyUI's fp8 per
    tensor 1.1, diffusers bf16 1.05; this function says 1.2. Larger sizes are derived and not
    measured.

    Args:
        width: pixels; as `height`, rounded up to whole tokens of 16 pixels.
        batch: images in one forward; 2 when a positive and a negative prompt run together.
        text_tokens: of the longest prompt, with what the text encoder says of reference images.
        reference_pixels: (width, height) of every reference image of an edit.
        frames: latent frames that are denoised together: more than 1 in Qwen-Image-Layered.

    Raises:
        SettingError: a size is not positive.
    """
    for name, value in (("width", width), ("height", height), ("batch", batch), ("frames", frames)):
        if value < 1:
            raise SettingError(f"{name} must be at least 1, got {value}.")
    image = frames * _tokens(width, height)
    image += sum(_tokens(*reference) for reference in reference_pixels)
    streams = LIVE_STREAMS * 2 * shape.dim + 16 * shape.head_dim
    inputs = 4 * (shape.in_channels * image + shape.joint_dim * text_tokens)
    modulation = 48 * shape.dim  # two streams x 6 vectors, for two timesteps in Edit-2511
    each = streams * (image + text_tokens) + inputs + modulation
    return batch * each + WORKSPACE_BYTES


def format_gib(count: float) -> str:
    """Binary units, as memory is labelled: `38.1 GiB`, `12 MiB`."""
    return f"{count / GIB:.1f} GiB" if count >= GIB / 10 else f"{count / MIB:.0f} MiB"


def whole_pixels(pixels: int) -> int:
    """A side rounded up to whole tokens, as the hosts pad it."""
    return -(-pixels // PIXELS_PER_TOKEN_SIDE) * PIXELS_PER_TOKEN_SIDE


def _tokens(width: int, height: int) -> int:
    return whole_pixels(width) * whole_pixels(height) // PIXELS_PER_TOKEN_SIDE**2


def _modulation(shape: TransformerShape) -> int:
    return 2 * shape.blocks * (shape.dim + 1) * 6 * shape.dim


def _outside_blocks(shape: TransformerShape) -> int:
    dim = shape.dim
    inputs = (shape.in_channels + 1) * dim + (shape.joint_dim + 1) * dim + shape.joint_dim
    time = (TIME_CHANNELS + 1) * dim + (dim + 1) * dim + (2 * dim if shape.addition_t_cond else 0)
    return inputs + time + (dim + 1) * 2 * dim + (dim + 1) * shape.packed_out_channels


def _check_precision(precision: str) -> None:
    if precision not in BYTES_PER_WEIGHT:
        raise SettingError(
            f"precision {precision!r} is unknown: choose {', '.join(BYTES_PER_WEIGHT)}."
        )
