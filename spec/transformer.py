"""The sizes and layers of the transformers, block by block."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ..errors import CheckpointError

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
    """Rounds a side up to whole tokens, as the hosts pad it."""
    return -(-pixels // PIXELS_PER_TOKEN_SIDE) * PIXELS_PER_TOKEN_SIDE


@dataclass(frozen=True, eq=False)
class BlockSpec:
    """Describes the layers of one transformer block.

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
    """Describes a block of Qwen-Image-2.1, as of `SingleStreamShape`."""
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
COMFYUI_21 = "0.37"  # the first that has it
NEEDS_21 = f"{FAMILY_21} needs ComfyUI {COMFYUI_21} or newer"


@dataclass(frozen=True)
class TransformerShape:
    """Holds the sizes of a Qwen-Image transformer that fix all its tensors.

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
        """Describes its blocks."""
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
        """Returns {layer name without `.weight`: (rows, columns)} of what may be quantized."""
        return {
            f"transformer_blocks.{block}.{layer}": (rows * self.dim, columns * self.dim)
            for block in range(self.blocks)
            for layer, (rows, columns) in self.block.gemms.items()
        }

    def modulation_layers(self) -> dict[str, tuple[int, int]]:
        """Returns the same of what sees the timestep alone, in the blocks."""
        size = (self.block.modulation_rows * self.dim, self.dim)
        return {
            f"transformer_blocks.{block}.{name}.1": size
            for block in range(self.blocks)
            for name in self.block.modulation.values()
        }

    def outer_layers(self) -> dict[str, tuple[int, int]]:
        """Returns the same of the layers around the blocks."""
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
        """Returns {name: shape} of what is no linear layer, around the blocks."""
        found: dict[str, tuple[int, ...]] = {"txt_norm.weight": (self.joint_dim,)}
        if self.addition_t_cond:
            found["time_text_embed.addition_t_embedding.weight"] = (2, self.dim)
        return found

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Returns {name: shape} of every parameter, named as in diffusers and ComfyUI."""
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
    """Holds the same of a Qwen-Image-2.1: diffusers' `QwenImage21Transformer2DModel`.

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
