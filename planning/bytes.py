"""What the weights and one forward of a transformer take, from sizes alone.

Every count is in bytes; GiB is 2**30 bytes, as cards are sold. Nothing is loaded and torch is not
needed: the answer comes before gigabytes are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ..errors import CheckpointError, SettingError
from ..spec import (
    BYTES_PER_SCALE,
    BYTES_PER_WEIGHT,
    QUANTIZED,
    TIME_CHANNELS,
    TransformerShape,
)
from .request import RunRequest


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


class TransformerBytes(NamedTuple):
    """A transformer's weights as loaded: bytes of all, and of those in its modulation."""

    total: int
    modulation: int


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


# What the text encoder of Qwen-Image takes: its weights, and one encoding in ComfyUI.
#
# Qwen2.5-VL-7B without lm_head, which encoding never reads. ComfyUI holds it as it is stored and
# computes in fp32, one layer's weight cast at a time (comfy/text_encoders/llama.py, qwen_vl.py).

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


def text_encoder_bytes(request: RunRequest, precision: str) -> int:
    """The encoder's weights as held; in fp8 and int8 the language model's linears are quantized.

    Args:
        precision: bf16, fp8 or int8. True sizes in `request.parts` stand above it.
    """
    if request.parts.text_encoder_bytes is not None:
        return request.parts.text_encoder_bytes
    total = 2 * (LANGUAGE + VISION)
    if precision not in QUANTIZED:
        return total
    return total - 2 * LAYERS * sum(n * k for n, k in LINEARS) + quantized_language_bytes()


def quantized_language_bytes() -> int:
    """The language model's linears in fp8 or int8, with a scale for each row."""
    return LAYERS * sum(n * k + BYTES_PER_SCALE * n for n, k in LINEARS)


def encoding_bytes(request: RunRequest) -> int:
    """Activations of one encoding at its worst moment, in fp32.

    Without images that is the MLP's second product: 0.253 GiB of a weight that is cast, and two
    wide rows beside three streams (0.28 GiB measured on an H200 for a short prompt). With images
    it may be the attention, whose scores are computed whole because keys have fewer heads than
    queries, or the vision tower, of one image at a time: both followed through ComfyUI's classes.
    """
    tokens = TEMPLATE_TOKENS + request.prompt_tokens
    cast = FP32 * HIDDEN * INTERMEDIATE
    streams = FP32 * tokens * 3 * HIDDEN
    mlp = streams + max(cast + 2 * FP32 * tokens * INTERMEDIATE, 3 * FP32 * tokens * INTERMEDIATE)
    scores = 2 * FP32 * HEADS * tokens**2
    attention = FP32 * tokens * (2 * HIDDEN + 3 * QUERY) + scores
    patches = PATCHES_PER_TOKEN * request.member.vision_tokens if request.references else 0
    return max(mlp, attention, vision_bytes(patches)) + FP32 * tokens**2


def vision_bytes(patches: int) -> int:
    """The vision tower on one image of so many patches of 14 x 14 pixels: where keys are rotated,
    or where what the patches give is merged by its largest weight.
    """
    hidden, merged = VISION_HIDDEN, PATCHES_PER_TOKEN * VISION_HIDDEN
    rotated = patches * (11 * hidden + 4 * VISION_HEAD)
    return FP32 * max(rotated, merged * merged + 3 * patches * hidden) if patches else 0
