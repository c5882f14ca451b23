"""Defines what a family of models has: `Family`, its published models, and what it runs with."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Protocol, TypeVar

from ..spec.formats import BYTES_PER_SCALE, GIB
from ..spec.transformer import PIXELS_PER_TOKEN_SIDE, USUAL_SIDE, BlockSpec, TransformerShape
from ..spec.vae import VaeShape
from .schedules import Schedule

# What people call the families, and the licences of their weights.
QWEN_IMAGE, QWEN_IMAGE_21 = "Qwen-Image", "Qwen-Image-2.1"
APACHE = "Apache-2.0"
LICENCE_21 = (
    "Qwen Research License: research, not commercial use (Qwen-Image-2512 and Edit-2511 are "
    f"{APACHE})"
)


class HasShape(Protocol):
    @property
    def shape(self) -> tuple[int, ...]: ...


Tensors = Mapping[str, HasShape]


@dataclass(frozen=True)
class Identity:
    """Tells what a set of tensors is."""

    family: str  # such as "Qwen-Image-Edit-2511" or "not Qwen-Image: looks like FLUX"
    role: str  # such as transformer, text_encoder, vision_tower, lora, controlnet, other
    variant: str | None = None  # what the tensors leave open, or which of several forms it is
    dims: Mapping[str, int | str] = field(default_factory=dict)
    blocks: int | None = None
    folder: str | None = None
    licence: str | None = None  # of published weights, if another than this package's
    cannot_run: tuple[str, ...] = ()
    errors: tuple[str, ...] = ()


Identified = TypeVar("Identified", bound=Identity)


def size(tensors: Tensors, name: str, axis: int = 0) -> int | None:
    """Returns the length of one axis, or None when the tensor is absent or has fewer axes."""
    info = tensors.get(name)
    return info.shape[axis] if info is not None and len(info.shape) > axis else None


def known(**dims: int | str | None) -> dict[str, int | str]:
    """Drops the dims that the tensors do not tell."""
    return {name: value for name, value in dims.items() if value is not None}


def count_blocks(names: Iterable[str], prefix: str) -> int:
    pattern = re.compile(re.escape(prefix) + r"(\d+)\.")
    return len({match[1] for match in map(pattern.match, names) if match})


class StepTokens(NamedTuple):
    # text, image: of one item, that are computed; references are among the image's.
    text: int
    image: int
    prefix: int = 0  # of one item, before them, whose keys and values are cached
    items: int = 1

    @property
    def joint(self) -> int:
        return self.text + self.image

    @property
    def rows(self) -> int:
        """Counts what is computed of all items, as the next ones count of a part."""
        return self.items * self.joint

    @property
    def text_rows(self) -> int:
        return self.items * self.text

    @property
    def image_rows(self) -> int:
        return self.items * self.image

    @property
    def prefix_rows(self) -> int:
        return self.items * self.prefix


class Adapted(NamedTuple):
    targets: set[str]  # their names inside a block, or whole where they are in none
    blocks: set[int]
    widths: Mapping[str, set[int]]  # {target: widths of what it reads}, as far as known
    foreign: bool  # whether some are in a stack of blocks that is another model's


# Of an adapter such as Fun-Acc, which a family may refuse.
WHOLE_TENSORS = (
    "This LoRA holds whole tensors such as proj_out.weight, which neither this package nor "
    "ComfyUI's Load LoRA applies: use the nodes of the LoRA's publisher."
)


class Fits(NamedTuple):
    title: str
    licence: str | None = None
    cannot_run: tuple[str, ...] = ()


class File(NamedTuple):
    """Names a published safetensors file, with its size in GiB."""

    name: str
    gib: float

    @property
    def bytes(self) -> int:
        return round(self.gib * GIB)


Files = Mapping[str, File]


class Template(NamedTuple):
    """Names a workflow of this package, its LoRA, and a transformer that is not the member's."""

    name: str
    lora: File | None = None
    transformer: File | None = None


@dataclass(frozen=True)
class TextEncoder:
    """Describes a text encoder: a Qwen-VL, without lm_head, which encoding never reads."""

    name: str
    title: str  # as header inspection calls all sizes of it
    part: str  # the same with its article, where one has to be chosen
    identify: Callable[[Tensors], Identity | None]
    comfyui: str  # `module:name` of its `hosts.comfyui.load.encoder_kind.HostEncoder`
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    layers: int
    vocabulary: int
    biases: bool  # whether q, k and v have biases; heads are normalized where not
    # vision, vision_hidden, vision_head: parameters of the vision tower, its width, and that of a
    # head; vision_attends: its layers in which a patch sees all of the image.
    vision: int
    vision_hidden: int
    vision_head: int
    vision_attends: int
    template: int  # tokens of the system prompt, which are cut off what comes out
    head_dim: int = 128
    # {(width, layers): name} of the sizes that there are, where several are known.
    published: Mapping[tuple[Any, Any], str] = field(default_factory=dict, hash=False)
    # {precision: the file that Comfy-Org publishes}, the most accurate first.
    files: Files = field(default_factory=dict, hash=False)

    @property
    def query(self) -> int:
        return self.heads * self.head_dim

    @cached_property
    def linears(self) -> tuple[tuple[int, int], ...]:
        """Lists one layer's (rows, columns): q, k, v, output, gate, up and down."""
        hidden, inner, key = self.hidden, self.intermediate, self.kv_heads * self.head_dim
        attention = (self.query, hidden), (key, hidden), (key, hidden), (hidden, self.query)
        return (*attention, (inner, hidden), (inner, hidden), (hidden, inner))

    @cached_property
    def quantized_bytes(self) -> int:
        """Counts the language model's linears in fp8 or int8, with a scale for each row."""
        return self.layers * sum(n * k + BYTES_PER_SCALE * n for n, k in self.linears)

    @cached_property
    def layer_parameters(self) -> int:
        """Counts what every token goes through: all but the embedding, where a row is looked up."""
        small = 2 * self.hidden
        small += sum(n for n, _ in self.linears[:3]) if self.biases else 2 * self.head_dim
        return self.layers * (sum(n * k for n, k in self.linears) + small) + self.hidden

    @property
    def language(self) -> int:
        return self.layer_parameters + self.vocabulary * self.hidden


@dataclass(frozen=True)
class Vae:
    title: str
    part: str  # the same with its article, where one has to be chosen
    shape: VaeShape
    bytes: int  # of its weights in bf16
    identify: Callable[[Tensors], Identity | None]
    # Makes the sizes of what `identify` found in `dims`; without the numbers that a header does not
    # tell.
    read_shape: Callable[[Mapping[str, Any]], VaeShape]
    native_name: Callable[[str], str]  # from diffusers' name of a tensor to ComfyUI's
    comfyui: str  # `module:name` of its `families.comfyui.VaeKind`
    other_channels: tuple[tuple[int, str], ...] = ()  # (image channels, a load's note on them)

    def fits(self, shape: VaeShape) -> bool:
        return shape.latent_channels == self.shape.latent_channels

    def notes(self, dims: Mapping[str, Any]) -> list[str]:
        return [note for count, note in self.other_channels if count == dims.get("image_channels")]


@dataclass(frozen=True)
class Member:
    family: Family
    name: str
    transformer: TransformerShape
    vae: VaeShape
    marker: str = ""  # the tensor that tells it in files for ComfyUI; empty for none
    told_as: str = ""  # what inspection calls it alone; empty where nothing tells it
    steps: int = 50
    cfg: float = 4.0  # the scale of classifier-free guidance, as in its pipeline; 1 is off
    most_references: int = 0
    timestep_zero: bool = False  # of references; it doubles rows of the modulation
    layers: int = 0  # that its template generates with the whole image; 0 for none
    vision_tokens: int = 0  # tokens that each reference image adds to what the text encoder reads
    reference_words: int = 0  # text tokens that it adds to what the transformer reads
    alone: bool = False  # whether no other member has its tensors, or the marker among them
    licence: str = APACHE
    side: int = USUAL_SIDE  # of a square that it is trained to generate, in pixels
    size_step: int = PIXELS_PER_TOKEN_SIDE  # what both sides are multiples of, in pixels
    template_side: int = 0
    # {steps without CFG: the workflow for them}; 0 stands for all other runs, "bf16" for those in
    # bf16.
    templates: Mapping[int | str, Template] = field(default_factory=dict, hash=False)
    files: Files = field(default_factory=dict, hash=False)  # {precision: Comfy-Org's transformer}
    vae_file: File | None = None

    @property
    def default_side(self) -> int:
        return self.template_side or self.side

    def file(self, precision: str) -> File | None:
        """Finds the transformer that `auto` runs: fp8, cast without scales, becomes int8."""
        names = (precision, "fp8", "bf16") if precision == "int8" else (precision, "bf16")
        return next(filter(None, map(self.files.get, names)), None)

    def template(self, steps: int, cfg: str, precision: str) -> Template | None:
        few = self.templates.get(steps) if cfg == "off" else None
        return few or self.templates.get(precision) or self.templates.get(0)

    @property
    def text_encoder(self) -> TextEncoder:
        return self.family.text_encoder

    @property
    def vae_bytes(self) -> int:
        return self.family.vae.bytes


class Family(Protocol):
    """Tells everything that differs between models whose transformers have one block."""

    title: str
    label: str  # the same where later ones are named beside it
    stack: str  # the name of the module that holds the transformer's blocks
    blocks: tuple[BlockSpec, ...]
    text_encoder: TextEncoder
    vae: Vae
    lora_targets: tuple[str, ...]
    pipelines: Mapping[str, str]  # {class of a diffusers pipeline: title of what it generates with}
    sigmas: str  # the key in such a pipeline's index that lists a Turbo's sigmas; empty for none
    schedules: tuple[Schedule, ...]
    config: Mapping[str, str]  # {key of config.json: name in `Identity.dims`, or "blocks"}
    repository: str  # who has its files for ComfyUI, below huggingface.co
    micro: tuple[str, str] | None  # folder in models/ of the bundled model, its name for people
    split_rows: bool  # whether cards can share a pass's rows
    norm_guided: bool  # whether its pipeline rescales guided predictions to the norm
    untimed: str  # what a prediction says is not measured of it; empty where it is
    needs: str  # the oldest ComfyUI that has it; empty for all that this package runs in
    joined: Mapping[str, tuple[str, ...]]  # {layer in ComfyUI: its layers in other files}
    comfyui_class: str  # what ComfyUI calls it in `comfy.supported_models`
    comfyui_code: str
    comfyui: str  # `module:name` of its `ModelKind`, which is None in an older ComfyUI
    diffusers: str  # module with PIPELINE, PASSES, VAE ..., as `hosts.diffusers.qwen_image`

    @property
    def members(self) -> tuple[Member, ...]:
        """Lists the published models; the first is what tensors stand for that leave it open."""

    def identify(self, tensors: Tensors) -> Identity | None:
        """Tells whether tensors are a transformer of it, or are trained for one."""

    def shape(self, sizes: Mapping[str, int], dims: Mapping[str, int | str], title: str) -> Any:
        """Makes the shape of a transformer that was identified."""

    def from_config(self, identity: Identified, config: Mapping[str, Any]) -> Identified:
        """Completes an identity, or a `CheckpointPart`, by what only a config.json tells."""

    def config_facts(self, tensors: Tensors) -> Mapping[str, object]:
        """Returns what a transformer's tensors prove of keys in its config.json, besides sizes."""

    def adapts(self, found: Adapted, tensors: Tensors) -> Fits | None:
        """Says what an adapter is for; None where it is not for this family."""

    def step_tokens(self, words: int, painted: int, references: int) -> StepTokens:
        """Counts the tokens of one item in a forward pass; `words` include those of references."""

    def member_of(self, shape: Any, timestep_zero: bool, references: int) -> tuple[Member, str]:
        """Returns the member that a transformer counts as, and a note where others are alike."""

    def contradiction(self, member: Member, shape: Any, timestep_zero: bool) -> str:
        """Says what a loaded transformer is instead of a member; empty where it may be one."""
