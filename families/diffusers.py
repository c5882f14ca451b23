"""What diffusers runs of each family, and which of them a module is."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from .protocol import Family
from .registry import FAMILIES, load


def pass_of(transformer: object) -> type | None:
    """Returns what makes a call of a transformer, a `hosts.diffusers.forward.TransformerPass`; None
    of another model's.
    """
    found = (load(family.diffusers).PASSES.get(type(transformer)) for family in FAMILIES)
    return next(filter(None, found), None)


def family_of_vae(vae: Any) -> tuple[Family, ModuleType]:
    """Returns the family whose VAE it is, and its module."""
    modules = ((family, load(family.diffusers)) for family in FAMILIES)
    return next(it for it in modules if it[1].VAE and isinstance(vae, it[1].VAE))


def pipelines() -> list[str]:
    """Lists the pipelines that run here."""
    return [load(family.diffusers).PIPELINE for family in FAMILIES]


def module_of(pipeline: str) -> ModuleType | None:
    """Returns the module of a pipeline; None where it does not run here."""
    modules = (load(family.diffusers) for family in FAMILIES)
    return next((module for module in modules if pipeline == module.PIPELINE), None)


def is_related(pipeline: str) -> bool:
    """Tells whether a pipeline that does not run here is one of a family's."""
    known = {name for family in FAMILIES for name in family.pipelines} - {*pipelines()}
    return pipeline.startswith(tuple(name.removesuffix("Pipeline") for name in known))
