"""Lists the families that this package runs, and answers what is asked of all of them.
CONTRIBUTING.md shows how to add one; a family that is appended while a process runs is not among
the choices of its nodes.
"""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any, TypeVar

from ..caches import cached
from ..errors import CheckpointError, SettingError
from ..spec.transformer import BlockSpec, TransformerShape
from ..spec.vae import PIXELS_PER_LATENT, VaeShape
from .protocol import Family, Member, TextEncoder, Vae
from .qwen_image import EDIT, EDIT_2511, LAYERED, QWEN_IMAGE, TEXT_TO_IMAGE
from .qwen_image_21 import QWEN_IMAGE_21
from .schedules import OFFICIAL, Schedule

FAMILIES: list[Family] = [QWEN_IMAGE, QWEN_IMAGE_21]
_Found = TypeVar("_Found")


def of_families(look: Callable[[], _Found]) -> Callable[[], _Found]:
    """Remembers what a look at all families found, until there is one more."""
    found = cached(lambda families: look())
    return lambda: found(tuple(FAMILIES))


@of_families  # an estimate asks for its member hundreds of times
def members() -> Mapping[str, Member]:
    return {member.name: member for family in FAMILIES for member in family.members}


def find_member(name: str) -> Member:
    """Returns the published model of a name; raises SettingError where there is none."""
    known = members()
    if name not in known:
        raise SettingError(f"family {name!r} is unknown: choose {', '.join(known)}.")
    return known[name]


def likely_member(references: int, layers: int) -> Member:
    """Chooses the member where nothing but a request tells it."""
    if layers:
        return LAYERED
    return EDIT_2511 if references else TEXT_TO_IMAGE


def member_by_text(references: int, text_tokens: int) -> Member | None:
    """Tells the member whose references add more text tokens than any other's; None for others."""
    return EDIT if references == 1 and text_tokens > EDIT.vision_tokens else None


def schedule_names() -> tuple[str, ...]:
    names = (it.name for family in FAMILIES for it in family.schedules)
    return tuple(dict.fromkeys((OFFICIAL.name, *names)))


def family_of_schedule(name: str) -> Family | None:
    """Returns the first family whose few-step models know a schedule; None for the official one."""
    return next((it for it in FAMILIES if name in (own.name for own in it.schedules)), None)


def find_schedule(name: str, family: Family) -> Schedule:
    """Returns a schedule for models of a family; raises SettingError for another family's."""
    known = {it.name: it for it in (OFFICIAL, *family.schedules)}
    if name in known:
        return known[name]
    owner = family_of_schedule(name)
    whose = f"of {owner.title}" if owner else "unknown"
    if owner and owner.needs:
        whose += f", which needs ComfyUI {owner.needs} or newer"
    raise SettingError(
        f"the schedule {name!r} is {whose}, but the model is {family.label}: choose "
        f"{', '.join(known)}."
    )


def text_encoders() -> list[TextEncoder]:
    return list(dict.fromkeys(family.text_encoder for family in FAMILIES))


def vaes() -> list[Vae]:
    return list(dict.fromkeys(family.vae for family in FAMILIES))


def family_with(part: TextEncoder | Vae) -> Family:
    return next(family for family in FAMILIES if part in (family.text_encoder, family.vae))


def takes_text(width: int | str | None) -> bool:
    """Tells whether text of a width is some family's; of a part that gives none it may be."""
    return width is None or any(width == encoder.hidden for encoder in text_encoders())


def vae_shapes() -> dict[int, VaeShape]:
    """Returns {latent channels: the published VAE that has so many}."""
    return {vae.shape.latent_channels: vae.shape for vae in reversed(vaes())}


def known_latents() -> str:
    """Says in a clause what shapes the families' latents have."""
    first, *more = ((it.title.removesuffix(" VAE"), it.shape) for it in vaes())

    def told(title: str, verb: str, shape: VaeShape) -> str:
        sides = f"height / {shape.pixels}, width / {shape.pixels}"
        return f"{title}'s {verb}(batch, {shape.latent_channels}, {sides})"

    others = (told(title.removeprefix(f"{first[0]}-"), "", shape) for title, shape in more)
    return ", ".join((told(first[0], "are ", first[1]), *others))


def micro_folders() -> dict[str, str]:
    """Returns {name: folder in models/} of the bundled models, that of the first family first."""
    return {name: folder for folder, name in (it.micro for it in FAMILIES if it.micro)}


def member_of_file(name: str) -> Member | None:
    named = [it for it in members() if name.startswith(it.replace("-", "_"))]
    return members()[max(named, key=len)] if named else None


def pixels_of(channels: int) -> int:
    """Returns the pixels of a latent pixel's side, by the latent's channels."""
    shape = vae_shapes().get(channels)
    return shape.pixels if shape else PIXELS_PER_LATENT


def counted_vae(shape: VaeShape) -> VaeShape:
    """Returns the shape that an estimate counts: for one in strips the published one."""
    return vae_shapes().get(shape.latent_channels, shape) if shape.strips else shape


# What header inspection found, by the title that it gave.


def family_titled(title: str) -> Family | None:
    """Returns the family of a transformer that inspection calls so; None where it is not run."""
    for family in FAMILIES:
        titles = family.title, *family.pipelines.values(), *(it.told_as for it in family.members)
        if title and title in titles:
            return family
    return None


def member_titled(title: str) -> Member | None:
    """Returns the member of such a transformer; None where others have the same tensors."""
    return next((it for it in members().values() if title and it.told_as == title), None)


def marker_titled(title: str) -> str:
    """Names the tensor by which files for ComfyUI tell such a member; empty for none."""
    member = member_titled(title)
    return member.marker if member else ""


def may_be(name: str, found: str) -> bool:
    """Tells whether tensors that count as the member `found` may be those of the member `name`."""
    if name == found:
        return True
    asked, known = members().get(name), members()[found]
    return not known.alone and (asked is None or asked.transformer == known.transformer)


def belongs(part: Any, model: Any) -> bool:
    """Tells whether a text encoder or a VAE is what a transformer runs with."""
    family = family_titled(model.family)
    if family is None:
        return False
    if part.role == "text_encoder":
        fits = part.dims.get("hidden") == model.dims.get("joint_dim")
        return fits and part.family.startswith(family.text_encoder.title)
    vae = (member_titled(model.family) or family.members[0]).vae
    channels = part.dims.get("latent_channels"), part.dims.get("image_channels")
    known = vae.latent_channels, vae.image_channels
    return part.family == family.vae.title and channels == known


def text_encoder_titled(title: str) -> TextEncoder:
    fitting = (it for it in text_encoders() if title.startswith(it.title))
    return max(fitting, key=lambda it: len(it.title))


def vae_titled(title: str) -> Vae:
    return next(it for it in vaes() if it.title == title)


def adapts_other(title: str, family: Family) -> bool:
    """Tells whether an adapter is for another family than this one, as far as its names tell."""
    return any(title.endswith(f" for {it.title}") for it in FAMILIES if it is not family)


def is_later(title: str, dims: Mapping[str, int | str]) -> bool:
    """Tells whether a part is of another model than the first, which a new node has chosen."""
    first = FAMILIES[0]
    own = (family_titled(title) or first) is first and not title.startswith(LAYERED.told_as)
    encoder = next((it for it in text_encoders() if title.startswith(it.title)), first.text_encoder)
    vae = next((it for it in vaes() if it.title == title), first.vae)
    channels = dims.get("image_channels", vae.shape.image_channels)
    same = (encoder, vae) == (first.text_encoder, first.vae)
    return not (own and same and channels == first.vae.shape.image_channels)


def pipeline_family(pipeline: str) -> Family | None:
    return next((family for family in FAMILIES if pipeline in family.pipelines), None)


def title_by_pipeline(title: str, pipeline: str) -> str | None:
    """Returns the title by the pipeline around a transformer; None where that adds nothing."""
    family = pipeline_family(pipeline)
    named = family.pipelines[pipeline] if family and family.title == title else None
    return None if named == title else named


def shape_from_header(
    title: str, dims: Mapping[str, int | str], blocks: int | None
) -> TransformerShape:
    """Makes a shape of what inspection found, or raises CheckpointError for an open size."""
    family = family_titled(title)
    if family is None:
        raise CheckpointError(
            f"This is {title}, whose transformer cannot run here: choose a file of Qwen-Image."
        )
    sizes: dict[str, int] = {}
    found = {**dims, "blocks": blocks or 0}
    names = ("blocks", "dim", "heads", "head_dim", "joint_dim", "in_channels")
    for name in (*names, "packed_out_channels"):
        value = found.get(name)
        if not isinstance(value, int) or value < 1:
            raise CheckpointError(
                f"the tensors do not show the {title} transformer's {name}, which sets its size "
                "in memory: get the file in bf16, fp8 or int8 from the model's publisher."
            )
        sizes[name] = value
    if sizes["heads"] * sizes["head_dim"] != sizes["dim"]:
        raise CheckpointError(
            f"the {title} transformer is {sizes['dim']} wide with heads of {sizes['head_dim']}, "
            "but the width must be a multiple of the head size: download the file again."
        )
    return family.shape(sizes, dims, title)


# The layers of blocks, by their names in files.


def is_quantizable(layer: str) -> bool:
    """Tells whether a layer is one of attention or the MLP in a block, which may be quantized."""
    return _layer_names()[0].fullmatch(layer) is not None


def is_modulation(layer: str) -> bool:
    """Tells whether a layer computes a block's modulation, from the timestep alone."""
    return _layer_names()[1].fullmatch(layer) is not None


@of_families
def _layer_names() -> tuple[re.Pattern[str], re.Pattern[str]]:
    blocks = [(family.stack, spec) for family in FAMILIES for spec in family.blocks]
    quantized = ((stack, name) for stack, spec in blocks for name in spec.gemms)
    modulation = (
        (stack, f"{name}.1") for stack, spec in blocks for name in spec.modulation.values()
    )
    return _in_blocks(quantized), _in_blocks(modulation)


def _in_blocks(names: Iterable[tuple[str, str]]) -> re.Pattern[str]:
    each = dict.fromkeys(rf"{re.escape(stack)}\.[0-9]+\.{re.escape(name)}" for stack, name in names)
    return re.compile("|".join(each))


def first_reader(layer: str) -> str:
    """Returns the first of a block's layers that read the same rows, equal for all of them."""
    for spec in block_specs():
        for group in spec.qkv:
            for name in group:
                if layer.endswith(f".{name}"):
                    return layer.removesuffix(name) + group[0]
    return layer


# Modules of a host, which have the same names in ComfyUI and in diffusers.


def block_specs() -> list[BlockSpec]:
    return [spec for family in FAMILIES for spec in family.blocks]


def spec_of(block: Any) -> BlockSpec | None:
    """Returns the form of a block, by a module that no other has; None of an unknown one."""
    for spec in block_specs():
        module = block
        for name in spec.told_by.split("."):
            # Past Module.__getattr__, which takes long where there is none.
            module = getattr(module, "_modules", {}).get(name) or getattr(module, name, None)
            if module is None:
                break
        else:
            return spec
    return None


def modulation_of(block: Any) -> Mapping[str, str]:
    """Returns {stream: layer} of a block's modulation; empty where all blocks share one."""
    for spec in block_specs():
        if spec.modulation and all(hasattr(block, name) for name in spec.modulation.values()):
            return spec.modulation
    return {}


@of_families  # asked of each block in each pass
def attention_names() -> tuple[str, ...]:
    return tuple(dict.fromkeys(spec.attention for spec in block_specs()))


def blocks_of(transformer: Any) -> tuple[Any, ...]:
    stacks = dict.fromkeys(family.stack for family in FAMILIES)
    found = next(filter(functools.partial(hasattr, transformer), stacks), next(iter(stacks)))
    return tuple(getattr(transformer, found))


def load(name: str) -> Any:
    """Imports `module` or `module:name`, of this package after a dot; raises ImportError."""
    path, _, attribute = name.partition(":")
    module = importlib.import_module(path, __package__.rpartition(".")[0])
    return getattr(module, attribute) if attribute else module


# What diffusers runs of each family.


def in_diffusers() -> dict[str, ModuleType]:
    """Returns {a pipeline that runs here: its family's module}."""
    modules = (load(family.diffusers) for family in FAMILIES)
    return {module.PIPELINE: module for module in modules}


def pass_of(transformer: object) -> type | None:
    """Returns the `TransformerPass` that makes a call; None of another model's."""
    found = (module.PASSES.get(type(transformer)) for module in in_diffusers().values())
    return next(filter(None, found), None)


def family_of_vae(vae: Any) -> tuple[Family, ModuleType]:
    """Returns the family whose VAE it is, and its module."""
    known = zip(FAMILIES, in_diffusers().values(), strict=True)
    return next(it for it in known if it[1].VAE and isinstance(vae, it[1].VAE))


def is_related(pipeline: str) -> bool:
    """Tells whether a pipeline is of a family, and not one that runs here."""
    known = {name for family in FAMILIES for name in family.pipelines} - in_diffusers().keys()
    return pipeline.startswith(tuple(name.removesuffix("Pipeline") for name in known))
