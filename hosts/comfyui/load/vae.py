"""Loads the Qwen-Image VAE into a ComfyUI VAE, from native and from diffusers names."""

from __future__ import annotations

import os
from collections.abc import Container
from typing import Any

import comfy.model_patcher
import comfy.sd
import torch

from ....errors import CheckpointError
from ....families.comfyui import require
from ....families.registry import family_with, load, vae_titled
from ....loaders.header import PLAIN_DTYPES
from ....loaders.quantize import check_finite
from ....loaders.source import Source, check_names, left_out, native_names, open_source, shapes_of
from ....optimizations.patches import put
from ...loading import LoadDecision, check_known
from ..decode.kept import KeptVAE
from .report import FLOAT_NAMES, LoadReport
from .weights import map_tensors

VAE_DTYPES = {"auto": None, "bf16": torch.bfloat16, "fp32": torch.float32}
NATIVE = "decoder.middle.0.residual.0.gamma"


def load_vae(
    path: str | os.PathLike[str] | Source, precision: str = "auto"
) -> tuple[comfy.sd.VAE, LoadReport]:
    """Loads the VAE behind `path`: Qwen-Image's with 3 channels, Layered's with 4, or 2.1's.

    Args:
        path: a safetensors file, a vae/ folder, a diffusers folder, or one of them as
            `open_source` read it.
        precision: auto (what ComfyUI chooses for the card), bf16 or fp32.

    Raises:
        CheckpointError: the file is not a Qwen-Image VAE, or is damaged.
        SettingError: the precision is unknown.
        UnavailableError: this ComfyUI is older than the model.
    """
    check_known("VAE precision", precision, VAE_DTYPES)
    source = open_source(path, "vae")
    require(family_with(vae_titled(source.part.family)), source.path)
    names = _names(source)
    shapes = _check(source, names)
    mapped: dict[str, Any] = map_tensors(source)
    # diffusers convolves one frame of 2.1 in 2 dimensions.
    tensors = {native: mapped[names[native]].view(shape) for native, shape in shapes.items()}
    for name, tensor in tensors.items():
        check_finite(source.path, name, _on_card(tensor))
    vae = KeptVAE(sd=tensors, dtype=VAE_DTYPES[precision])
    vae.throw_exception_if_invalid()
    second = load_vae_patcher, (source, precision)
    put(vae.patcher, cached_patcher_init=second)
    why = "as requested" if VAE_DTYPES[precision] else f"auto: ComfyUI's choice on {vae.device}"
    held = FLOAT_NAMES.get(vae.vae_dtype, str(vae.vae_dtype))
    return vae, LoadReport(
        what="VAE",
        source=source,
        load=LoadDecision(held, why, why),
        bytes=vae.model_size(),
        notes=_notes(source, names, shapes),
    )


def _on_card(tensor: torch.Tensor) -> torch.Tensor:
    # To look at all of a VAE takes 0.06 s there, and 0.3 with 16 threads of an H200's.
    try:
        return tensor.to(comfy.model_management.vae_device())
    except torch.OutOfMemoryError:
        return tensor


def load_vae_patcher(
    source: Source, precision: str, disable_dynamic: bool = False
) -> comfy.model_patcher.ModelPatcher:
    """Loads the same VAE once more, for ComfyUI's clones on other devices; as in ComfyUI's loader,
    `disable_dynamic` changes nothing.
    """
    return load_vae(source, precision)[0].patcher


def _names(source: Source) -> dict[str, str]:
    native = NATIVE in source.tensors
    return native_names(source, str if native else vae_titled(source.part.family).native_name)


def _check(source: Source, names: dict[str, str]) -> dict[str, tuple[int, ...]]:
    """Compares names, shapes and dtypes in the header with ComfyUI's class; returns its shapes."""
    tensors = source.tensors
    infos = {native: tensors[name] for native, name in names.items()}
    found = {name: info.shape for name, info in infos.items()}
    dim = source.part.dims.get("dim")
    if not dim:
        raise CheckpointError(
            "This file lacks the norm before the decoder's last layer, whose size is the VAE's "
            "width: download it again.",
            source.path,
        )
    vae = vae_titled(source.part.family)
    with torch.device("meta"):
        shapes = shapes_of(load(vae.comfyui).build(source.part.dims, found))
    infos = {name: infos[name] for name in infos if name in shapes}
    for name, info in infos.items():
        # Quantized: its scales would be lost.
        if info.dtype not in PLAIN_DTYPES:
            raise CheckpointError(
                f"This file has {names[name]!r} as {info.dtype}, but a VAE must be stored in "
                f"{', '.join(PLAIN_DTYPES)}: use the unquantized file.",
                source.path,
            )
    # diffusers convolves one frame of 2.1 in 2 dimensions.
    found = {
        name: (*size[:2], 1, *size[2:]) if len(size) == 4 and len(shapes[name]) == 5 else size
        for name, size in ((name, info.shape) for name, info in infos.items())
    }
    check_names(source.path, found, shapes, vae.part)
    return shapes


def _notes(source: Source, names: dict[str, str], shapes: Container[str]) -> tuple[str, ...]:
    vae = vae_titled(source.part.family)
    notes = [*left_out([name for name in names if name not in shapes], vae.part)]
    if any(name != native for native, name in names.items()):
        notes.append("diffusers names were converted to ComfyUI's")
    if source.part.licence:
        notes.append(source.part.licence)
    return (*notes, *vae.notes(source.part.dims))
