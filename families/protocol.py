"""Defines what a family of models has: `Family`, its published models, and what it runs with."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
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
    """Gives the shape of a tensor, as a file's header tells it."""

    @property
    def shape(self) -> tuple[int, ...]: ...


Tensors = Mapping[str, HasShape]


@dataclass(frozen=True)
class Identity:
    """Tells what a set of tensors is.

    Args:
        family: the name people know it by, such as "Qwen-Image-Edit-2511" or "not Qwen-Image: looks
            like FLUX".
        role: transformer, text_encoder, vision_tower, vae, lora, controlnet, model_patch
            or other.
        variant: what the tensors leave open, or which of several forms it is.
        dims: sizes read from the tensors, by name.
        blocks: number of blocks or layers, where the model is a stack of them.
        folder: the folder under ComfyUI's `models/` that it belongs in.
        licence: of the published weights, where it is another one than this package's.
        cannot_run: sentences about what this package cannot run.
        errors: sentences about tensors that contradict each other.
    """

    family: str
    role: str
    variant: str | None = None
    dims: Mapping[str, int | str] = field(default_factory=dict)
    blocks: int | None = None
    folder: str | None = None
    licence: str | None = None
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
    """Counts the different numbers N in names that begin `<prefix>N.`"""
    pattern = re.compile(re.escape(prefix) + r"(\d+)\.")
    return len({match[1] for match in map(pattern.match, names) if match})


class StepTokens(NamedTuple):
    """Counts the tokens of a forward pass.

    Attributes:
        text, image: Of one item, that are computed; references are among the image's.
        prefix: Of one item, before them, whose keys and values are cached.
        items: Images in it.
    """

    text: int
    image: int
    prefix: int = 0
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
    """Tells which modules an adapter such as a LoRA changes.

    Attributes:
        targets: Their names inside a block, or whole where they are in none.
        blocks: The numbers of their blocks.
        widths: {target: the widths of what it reads}, as far as the tensors tell them.
        foreign: Whether some are in a stack of blocks that is another model's.
    """

    targets: set[str]
    blocks: set[int]
    widths: Mapping[str, set[int]]
    foreign: bool


# Of an adapter such as Fun-Acc, which a family may refuse.
WHOLE_TENSORS = (
    "This LoRA holds whole tensors such as proj_out.weight, which neither this package nor "
    "ComfyUI's Load LoRA applies: use the nodes of the LoRA's publisher."
)


class Fits(NamedTuple):
    """Tells what an adapter is for.

    Attributes:
        title: The family's, or with other models that have the same names.
        licence, cannot_run: As of `Identity`.
    """

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
    """Names a workflow of this package, with the LoRA that it adds and, where it is not the
    member's, its transformer.
    """

    name: str
    lora: File | None = None
    transformer: File | None = None


@dataclass(frozen=True)
class TextEncoder:
    """Describes a text encoder: a Qwen-VL, without lm_head, which encoding never reads.

    Attributes:
        name: Of the published model.
        title: As header inspection calls all sizes of it.
        part: The same with its article, where one has to be chosen.
        published: {(width, layers): name} of the sizes that there are, where they have to be told.
        identify: Tells whether tensors are one, of any size.
        comfyui: `module:name` of its `hosts.comfyui.load.encoder_kind.HostEncoder`.
        hidden, intermediate, heads, kv_heads, layers, vocabulary: Of the language model.
        biases: Whether q, k and v have biases; heads are normalized where not.
        vision, vision_hidden, vision_head: Parameters of the vision tower, its width, and that of
            a head.
        template: Tokens of the system prompt, which are cut off what comes out.
        files: {precision: the file that Comfy-Org publishes}, the most accurate first.
    """

    name: str
    title: str
    part: str
    identify: Callable[[Tensors], Identity | None]
    comfyui: str
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
    published: Mapping[tuple[Any, Any], str] = field(default_factory=dict, hash=False)
    files: Files = field(default_factory=dict, hash=False)

    @property
    def query(self) -> int:
        return self.heads * self.head_dim

    @property
    def linears(self) -> tuple[tuple[int, int], ...]:
        """Lists one layer's (rows, columns): q, k, v, output, gate, up and down."""
        hidden, inner, key = self.hidden, self.intermediate, self.kv_heads * self.head_dim
        attention = (self.query, hidden), (key, hidden), (key, hidden), (hidden, self.query)
        return (*attention, (inner, hidden), (inner, hidden), (hidden, inner))

    @property
    def quantized_bytes(self) -> int:
        """Counts the language model's linears in fp8 or int8, with a scale for each row."""
        return self.layers * sum(n * k + BYTES_PER_SCALE * n for n, k in self.linears)

    @property
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
    """Describes the VAE of a family.

    Attributes:
        title: As header inspection calls it.
        part: The same with its article, where one has to be chosen.
        shape: The published sizes.
        bytes: Of its weights in bf16.
        identify: Tells whether tensors are one.
        read_shape: Makes the sizes of what `identify` found in `dims`; without the numbers that a
            header does not tell.
        native_name: Maps the name that diffusers has for a tensor to ComfyUI's; others stay.
        comfyui: `module:name` of its `families.comfyui.VaeKind`.
        other_channels: What a load says of one with so many channels of images.
    """

    title: str
    part: str
    shape: VaeShape
    bytes: int
    identify: Callable[[Tensors], Identity | None]
    read_shape: Callable[[Mapping[str, Any]], VaeShape]
    native_name: Callable[[str], str]
    comfyui: str
    other_channels: tuple[tuple[int, str], ...] = ()

    def fits(self, shape: VaeShape) -> bool:
        """Tells whether a VAE takes the same latents."""
        return shape.latent_channels == self.shape.latent_channels

    def notes(self, dims: Mapping[str, Any]) -> list[str]:
        return [note for count, note in self.other_channels if count == dims.get("image_channels")]


@dataclass(frozen=True)
class Member:
    """Describes one published model.

    Attributes:
        family: That it is of.
        name: As `--family` takes it.
        marker: The tensor that tells it in files for ComfyUI; empty for none.
        told_as: What inspection calls it and no other; empty where neither tensors nor a pipeline
            tell it.
        steps: Of the sampler, as in its model card.
        cfg: The scale of classifier-free guidance, as in its pipeline; 1 is off.
        most_references: Reference images that its workflows take.
        timestep_zero: Whether references are modulated as at timestep zero, which doubles the rows
            of the modulation.
        layers: That its template generates with the whole image; 0 for none.
        vision_tokens: Tokens that each reference image adds to what the text encoder reads.
        reference_words: Text tokens that it adds to what the transformer reads.
        transformer, vae: The published sizes.
        alone: Whether no other member has its tensors, or the marker among them.
        licence: Of the weights.
        side: Of a square that it is trained to generate, in pixels.
        size_step: What both sides are multiples of, in pixels.
        template_side: Of the square that its template generates, where it is not `side`.
        templates: {steps without CFG: the workflow for them}; 0 stands for all other runs, "bf16"
            for those in bf16.
        files: {precision: the transformer that Comfy-Org publishes}.
        vae_file: The same of its VAE.
    """

    family: Family
    name: str
    transformer: TransformerShape
    vae: VaeShape
    marker: str = ""
    told_as: str = ""
    steps: int = 50
    cfg: float = 4.0
    most_references: int = 0
    timestep_zero: bool = False
    layers: int = 0
    vision_tokens: int = 0
    reference_words: int = 0
    alone: bool = False
    licence: str = APACHE
    side: int = USUAL_SIDE
    size_step: int = PIXELS_PER_TOKEN_SIDE
    template_side: int = 0
    templates: Mapping[int | str, Template] = field(default_factory=dict, hash=False)
    files: Files = field(default_factory=dict, hash=False)
    vae_file: File | None = None

    @property
    def default_side(self) -> int:
        return self.template_side or self.side

    def file(self, precision: str) -> File | None:
        """Finds the published transformer that `auto` runs in a precision: fp8, cast without
        scales, becomes int8.
        """
        names = (precision, "fp8", "bf16") if precision == "int8" else (precision, "bf16")
        return next(filter(None, map(self.files.get, names)), None)

    def template(self, steps: int, cfg: str, precision: str) -> Template | None:
        """Finds the workflow for a run."""
        few = self.templates.get(steps) if cfg == "off" else None
        return few or self.templates.get(precision) or self.templates.get(0)

    @property
    def text_encoder(self) -> TextEncoder:
        return self.family.text_encoder

    @property
    def vae_bytes(self) -> int:
        return self.family.vae.bytes


class Family(Protocol):
    """Tells everything that differs between models whose transformers have one block.

    Attributes:
        title: As header inspection and people call it.
        label: The same where it has to be told from later ones.
        stack: The name of the module that holds the transformer's blocks.
        blocks: The forms of a block, in files and in the hosts.
        text_encoder, vae: What it runs with.
        lora_targets: The layers of a block that LoRAs change.
        pipelines: {class of a diffusers pipeline: title of what it generates with}.
        sigmas: The key in such a pipeline's index that lists a Turbo's sigmas; empty for none.
        schedules: Of its few-step models.
        config: {key in a transformer's config.json: name in `Identity.dims`, or "blocks"}.
        repository: Who has its files for ComfyUI, below huggingface.co.
        micro: The folder in models/ of the bundled model, and its name for people; None without.
        split_rows: Whether cards can share a pass's rows.
        norm_guided: Whether its pipeline rescales guided predictions to the positive one's norms.
        untimed: What a prediction says is not measured of it; empty where it is.
        needs: The oldest ComfyUI that has it; empty for all that this package runs in.
        joined: {layer: the layers that hold its rows in other files}, as ComfyUI has one for them.
        comfyui_class: What ComfyUI calls it in `comfy.supported_models`.
        comfyui_code: ComfyUI's module with its blocks.
        comfyui: `module:name` of its `families.comfyui.ModelKind`; None is there in a ComfyUI that
            is older.
        diffusers: The module with what diffusers has of it: `PIPELINE`, `PASSES`, `VAE`, `parts`,
            `vae_shape`, `up_layers` and `denormalized`, as in `hosts.diffusers.qwen_image`.
    """

    title: str
    label: str
    stack: str
    blocks: tuple[BlockSpec, ...]
    text_encoder: TextEncoder
    vae: Vae
    lora_targets: tuple[str, ...]
    pipelines: Mapping[str, str]
    sigmas: str
    schedules: tuple[Schedule, ...]
    config: Mapping[str, str]
    repository: str
    micro: tuple[str, str] | None
    split_rows: bool
    norm_guided: bool
    untimed: str
    needs: str
    joined: Mapping[str, tuple[str, ...]]
    comfyui_class: str
    comfyui_code: str
    comfyui: str
    diffusers: str

    @property
    def members(self) -> tuple[Member, ...]:
        """Lists the published models; the first is what tensors stand for that leave it open."""

    def identify(self, tensors: Tensors) -> Identity | None:
        """Tells whether tensors are a transformer of it, or are trained for one."""

    def shape(self, sizes: Mapping[str, int], dims: Mapping[str, int | str], title: str) -> Any:
        """Makes the shape of a transformer that was identified.

        Args:
            sizes: what every `TransformerShape` takes.
            dims, title: of its identity.
        """

    def from_config(self, identity: Identified, config: Mapping[str, Any]) -> Identified:
        """Completes an identity, or a `CheckpointPart`, by what only a config.json tells."""

    def config_facts(self, tensors: Tensors) -> Mapping[str, object]:
        """Returns what a transformer's tensors prove of keys in its config.json, besides sizes."""

    def adapts(self, found: Adapted, tensors: Tensors) -> Fits | None:
        """Says what an adapter is for; None where it is not for this family."""

    def step_tokens(self, words: int, painted: int, references: int) -> StepTokens:
        """Counts the tokens of one item in a forward pass.

        Args:
            words: of text, with those that references add.
            generated: tokens that are denoised.
            references: tokens of reference images.
        """

    def member_of(self, shape: Any, timestep_zero: bool, references: int) -> tuple[Member, str]:
        """Returns the member that a loaded transformer counts as, and a note where others have the
        same weights.
        """

    def contradiction(self, member: Member, shape: Any, timestep_zero: bool) -> str:
        """Says what a loaded transformer is instead of a member; empty where it may be one."""
