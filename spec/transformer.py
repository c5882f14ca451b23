"""Describes the sizes and layers of a transformer, block by block."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

from ..caches import cached

# The area that Qwen-Image is trained at; the choice of a precision leaves room for one step of it.
USUAL_SIDE = 1328
PIXELS_PER_TOKEN_SIDE = 16  # the VAE's factor of 8, then patches of 2 x 2
# Edit workflows scale a reference image to one megapixel.
REFERENCE_SIDE = 1024
REFERENCE_TOKENS = (REFERENCE_SIDE // PIXELS_PER_TOKEN_SIDE) ** 2
TIME_CHANNELS = 256  # the sinusoidal embedding of the timestep, fixed in both hosts' code
# Where the modulation weights wait: on the card, or in system RAM.
ON_CARD, OFF_CARD = "on card", "off card"
PLACES = ("auto", ON_CARD, OFF_CARD)


def whole_pixels(pixels: int) -> int:
    """Rounds a side up to whole tokens, as the hosts pad it."""
    return -(-pixels // PIXELS_PER_TOKEN_SIDE) * PIXELS_PER_TOKEN_SIDE


GELU, SWIGLU, SPLIT_SWIGLU = "gelu", "swiglu", "swiglu of two layers"


@dataclass(frozen=True, eq=False)
class BlockSpec:
    """Describes one transformer block, by the names of its modules in the hosts: where one has
    other names, it is another form.
    """

    # {layer: (rows, columns) in multiples of dim}, those that may be quantized
    gemms: Mapping[str, tuple[int, int]]
    # The layer of each of `block_form.PLACES`: q, k, v of the image, then of the text, both outputs
    # of attention, and the first and the last layers of the MLP, the image's before the text's. Of
    # one stream the text's name the same layers as the image's. The same layer as q, k and v gives
    # all three, in this order of its rows.
    places: tuple[str, ...]
    norms: tuple[str, ...]  # the LayerNorms, without weights
    head_norms: tuple[str, ...]  # the RMSNorms of queries and keys
    told_by: str  # a module that no block of another form has
    activation: str  # of the MLP; `SWIGLU` of [gate; up] in one layer, or of two
    biases: bool  # whether its layers have biases
    gelus: tuple[str, ...] = ()  # the modules whose `approximate` must be "tanh"
    attention: str = "attn"  # the module that has `heads`
    # how the names of layers begin that the text stream goes through
    text_layers: tuple[str, ...] = ()
    # {stream: the layer that makes its shifts, scales and gates}
    modulation: Mapping[str, str] = field(default_factory=dict)
    # what that layer gives: shift, scale and gate, of attention and of the MLP
    modulation_rows: int = 0
    # hidden, inner: columns in multiples of dim of what the MLP's first layers give, and of what
    # its last ones read: a gate halves them
    hidden: int = 4
    inner: int = 4

    @cached_property
    def qk_norms(self) -> tuple[str, ...]:
        """Names the RMSNorms of a `QKNorm`."""
        return self.head_norms if len(self.head_norms) == 4 else 2 * self.head_norms

    @property
    def qkv(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Names the layers of q, k and v: of the image, and of the text."""
        return self.places[:3], self.places[3:6]

    @property
    def query(self) -> str:
        """Names the layer that makes the image's queries."""
        return self.places[0]

    @cached_property
    def thirds(self) -> tuple[int | None, ...]:
        """Tells which third of its layer's rows each place has; None for all of them."""
        found = [part if q == k else None for q, k, _ in self.qkv for part in range(3)]
        return (*found, *[None] * (len(self.places) - len(found)))

    @cached_property
    def first_readers(self) -> tuple[str, ...]:
        """Names the layers that q is made by, of each stream."""
        return tuple(dict.fromkeys(q for q, *_ in self.qkv))

    @cached_property
    def other_readers(self) -> tuple[str, ...]:
        """Names the layers that read the same rows as the first, besides them."""
        return tuple(it for names in self.qkv for it in names if it not in self.first_readers)


@dataclass(frozen=True)
class TransformerShape:
    """Holds the sizes of a transformer that fix all its tensors."""

    patch: ClassVar[int] = 1  # latent pixels of a token's side
    # the linear layers behind the blocks
    behind: ClassVar[tuple[str, ...]] = ("norm_out.linear", "proj_out")

    blocks: int
    dim: int  # width of its streams, heads x head_dim
    heads: int
    head_dim: int
    joint_dim: int  # width of the text encoder's output
    in_channels: int  # channels of one packed latent token
    packed_out_channels: int  # channels of one packed output token

    @property
    def family(self) -> Any:
        """Gives the `families.protocol.Family` that this is a shape of."""
        raise NotImplementedError

    @property
    def block(self) -> BlockSpec:
        raise NotImplementedError

    def in_comfyui(self) -> TransformerShape:
        """Gives the shape as ComfyUI builds it, where that has other layers than a file."""
        return self

    def comfyui_config(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Returns what ComfyUI's configuration takes besides what it detects.

        Args:
            settings: the config.json of the weights, or what stands for it.

        Raises:
            CheckpointError: they lack something that no tensor tells.
        """
        return {}

    def outer_layers(self) -> dict[str, tuple[int, int]]:
        """Returns {layer without `.weight`: (rows, columns)} of those around the blocks."""
        raise NotImplementedError

    def other_tensors(self) -> dict[str, tuple[int, ...]]:
        """Returns {name: shape} of what is neither a linear layer nor a norm of heads."""
        raise NotImplementedError

    @cached
    def quantizable_layers(self) -> Mapping[str, tuple[int, int]]:
        """Returns {layer name without `.weight`: (rows, columns)} of what may be quantized."""
        return {
            f"{self.family.stack}.{block}.{layer}": (rows * self.dim, columns * self.dim)
            for block in range(self.blocks)
            for layer, (rows, columns) in self.block.gemms.items()
        }

    def modulation_layers(self) -> dict[str, tuple[int, int]]:
        """Returns the same of what sees the timestep alone, in the blocks."""
        size = (self.block.modulation_rows * self.dim, self.dim)
        return {
            f"{self.family.stack}.{block}.{name}.1": size
            for block in range(self.blocks)
            for name in self.block.modulation.values()
        }

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Returns {name: shape} of every parameter, named as in diffusers and ComfyUI."""
        found = self.other_tensors()

        def linear(name: str, rows: int, columns: int) -> None:
            found[f"{name}.weight"] = (rows, columns)
            if self.block.biases:
                found[f"{name}.bias"] = (rows,)

        outer, modulation = self.outer_layers(), self.modulation_layers()
        for name, size in outer.items():
            if name not in self.behind:
                linear(name, *size)
        for block in (f"{self.family.stack}.{index}" for index in range(self.blocks)):
            for name, (rows, columns) in self.block.gemms.items():
                linear(f"{block}.{name}", rows * self.dim, columns * self.dim)
            for name in self.block.head_norms:
                found[f"{block}.{name}.weight"] = (self.head_dim,)
            for name in self.block.modulation.values():
                linear(f"{block}.{name}.1", *modulation[f"{block}.{name}.1"])
        for name in self.behind:
            linear(name, *outer[name])
        return found
