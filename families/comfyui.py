"""Tells what ComfyUI runs of each family, and which of them a MODEL or a VAE is."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UnavailableError
from ..spec.transformer import TransformerShape
from ..spec.vae import VaeShape
from .protocol import Family
from .registry import FAMILIES, load, of_families, vaes

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelKind:
    """Holds ComfyUI's classes of a family, and how they are read and run."""

    family: Family
    base: type  # of `comfy.model_base`
    transformer: type  # of its `diffusion_model`
    config: type  # of `comfy.supported_models`
    shape: Callable[[torch.nn.Module], TransformerShape]
    takes: Callable[[torch.nn.Module], tuple[int, int]]  # reads width of text, latent channels
    settings: Callable[[torch.nn.Module], dict[str, Any]]  # reads what only config.json says
    passes: Callable[..., Any]  # makes a `sample.forward.ComfyPass` of one call of the transformer
    # Tells whether a transformer has its references modulated as at timestep zero.
    timestep_zero: Callable[[torch.nn.Module], bool] = lambda transformer: False
    # Makes (transformer, timestep, like, additional_t_cond) what its blocks' modulation is made of;
    # None where all blocks share one.
    embed: Callable[..., torch.Tensor] | None = None
    # Adds a `sample.nag.NegativePrompt` to a call of a transformer; None where that is unknown.
    # Takes the transformer, its arguments by name, the prompt, the `Guidance` and what is kept in a
    # run, and gives the arguments that change.
    add_negative: Callable[..., dict[str, Any]] | None = None

    def holds(self, transformer: object) -> bool:
        """Tells whether a transformer is of the class, by its name: nobody has made one of it."""
        return type(transformer).__name__ == self.transformer.__name__


def later(name: str) -> Callable[..., Any]:
    """Calls what `registry.load` finds under a name, and imports it with the first call."""
    return lambda *given: load(name)(*given)


@of_families
def kinds() -> tuple[ModelKind, ...]:
    found = []
    for family in FAMILIES:
        try:
            found.append(load(family.comfyui))
        except (ImportError, AttributeError) as error:  # a newer ComfyUI has renamed something
            logger.warning(
                "Qwen-Image Accelerator: this ComfyUI's %s is not supported: %s",
                family.title,
                error,
            )
    return tuple(filter(None, found))


def kind_of_family(family: Family, path: Path) -> ModelKind:
    """Returns a family's kind; raises UnavailableError where ComfyUI's form is unknown."""
    for kind in kinds():
        if kind.family is family:
            return kind
    raise UnavailableError(
        f"This ComfyUI version changed its {family.title} code, and Qwen-Image Accelerator does "
        "not support it yet: update Qwen-Image Accelerator, or use ComfyUI's loaders until then.",
        path,
    )


def require(family: Family, path: Path) -> None:
    """Raises UnavailableError where this ComfyUI is older than a family."""
    if family.needs and not hasattr(load("comfy.supported_models"), family.comfyui_class):
        raise UnavailableError(
            f"{family.title} needs ComfyUI {family.needs} or newer, and this ComfyUI is older: "
            "update ComfyUI.",
            path,
        )


def kind_of(model: Any) -> ModelKind | None:
    """Returns the kind of a BaseModel; None of another model, or of a class made of ours."""
    return next((kind for kind in kinds() if type(model) is kind.base), None)


def kind_of_transformer(transformer: Any) -> ModelKind | None:
    """Returns the kind of a transformer, of a class made of ours too; None of another model."""
    return next((kind for kind in kinds() if isinstance(transformer, kind.transformer)), None)


def imported_code() -> list[str]:
    """Lists ComfyUI's modules with the blocks of families, as far as it has them."""
    return [family.comfyui_code for family in FAMILIES if family.comfyui_code in sys.modules]


@dataclass(frozen=True)
class VaeKind:
    takes: Callable[[Any], bool]  # tells whether a `first_stage_model` is one
    # Makes one, of the dims and the {native name: shape} that a header tells.
    build: Callable[[Mapping[str, Any], Mapping[str, tuple[int, ...]]], torch.nn.Module]
    shape: Callable[[Any], VaeShape]
    other_layers: Callable[[Any], str]  # why its layers are not those computed here, or empty
    up: Callable[[Any], list[torch.nn.Module]]  # takes what is behind the decoder's middle apart
    layers: Mapping[type, str]  # {class: what of `decode.fused.FusedLayers` computes it}
    strips: str = ""  # why ComfyUI's code stays without our layers; empty: its tiles are exact


@of_families
def vae_kinds() -> tuple[VaeKind, ...]:
    return tuple(load(vae.comfyui) for vae in vaes())


def kind_of_vae(model: Any) -> VaeKind | None:
    """Returns the kind of a `first_stage_model`; None of another model's."""
    return next((kind for kind in vae_kinds() if kind.takes(model)), None)
