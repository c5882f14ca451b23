"""Loads the Qwen-Image VAE into a ComfyUI VAE, from native and from diffusers names."""

from __future__ import annotations

import os

import comfy.ldm.wan.vae
import comfy.ldm.wan.vae2_2
import comfy.model_patcher
import comfy.sd
import torch

from ....errors import CheckpointError
from ....loaders.convert import (
    check_finite,
    check_names,
    shapes_of,
    vae_21_name_to_native,
    vae_name_to_native,
)
from ....loaders.header import PLAIN_DTYPES
from ....loaders.parts import LATENT_CHANNELS, LATENT_CHANNELS_21
from ....loaders.source import Source, open_source
from ....spec.transformer import FAMILY_21
from ...loading import check_known
from ..contract import require_21
from ..decode.fused import compile_ahead
from .plan import LoadReport
from .weights import FLOAT_NAMES, map_tensors

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
    if _is_21(source):
        require_21(source.path)
    names = _native_by_stored_name(source)
    shapes = _check(source, names)
    mapped = map_tensors(source)
    # diffusers convolves one frame of 2.1 in 2 dimensions.
    tensors = {native: mapped[name].view(shapes[native]) for name, native in names.items()}
    for name, tensor in tensors.items():
        check_finite(source.path, name, _on_card(tensor))
    vae = comfy.sd.VAE(sd=tensors, dtype=VAE_DTYPES[precision])
    vae.throw_exception_if_invalid()
    compile_ahead(vae)
    vae.patcher.cached_patcher_init = (load_vae_patcher, (source, precision))
    why = "as requested" if VAE_DTYPES[precision] else f"auto: ComfyUI's choice on {vae.device}"
    return vae, LoadReport(
        what="VAE",
        path=source.path,
        family=source.part.family,
        precision=FLOAT_NAMES.get(vae.vae_dtype, str(vae.vae_dtype)),
        reason=why,
        bytes=vae.model_size(),
        why=why,
        notes=_notes(source, names),
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
    """Loads the same VAE once more, for ComfyUI's clones on other devices.

    ComfyUI's VAE has no way to be built without dynamic VRAM: as in its own loader,
    `disable_dynamic` changes nothing.
    """
    return load_vae(source, precision)[0].patcher


def _native_by_stored_name(source: Source) -> dict[str, str]:
    names = list(source.tensors)
    if NATIVE in names:
        return {name: name for name in names}
    to_native = vae_21_name_to_native if _is_21(source) else vae_name_to_native
    return {name: to_native(name) for name in names}


def _is_21(source: Source) -> bool:
    return source.part.dims.get("latent_channels") == LATENT_CHANNELS_21


def _check(source: Source, names: dict[str, str]) -> dict[str, tuple[int, ...]]:
    """Compares names, shapes and dtypes in the header with ComfyUI's class; returns its shapes."""
    tensors = source.tensors
    infos = {native: tensors[name] for name, native in names.items()}
    for name, info in infos.items():
        # Quantized: its scales would be lost.
        if info.dtype not in PLAIN_DTYPES:
            raise CheckpointError(
                f"This file holds {name!r} as {info.dtype} and a VAE must be stored in "
                f"{', '.join(PLAIN_DTYPES)}: use the unquantized file.",
                source.path,
            )
    found = {name: info.shape for name, info in infos.items()}
    dim = source.part.dims.get("dim")
    if not dim:
        raise CheckpointError(
            "This file lacks the norm before the decoder's last layer, which gives the VAE's "
            "width: download it again.",
            source.path,
        )
    if _is_21(source):
        decoder = found.get("decoder.head.0.gamma", (dim,))[0]
        with torch.device("meta"):
            shapes = shapes_of(_class_21(int(dim), int(decoder), found))
        found |= {
            name: (*size[:2], 1, *size[2:])
            for name, size in found.items()
            if len(size) == 4 and len(shapes.get(name, ())) == 5
        }
        check_names(source.path, found, shapes, f"the {FAMILY_21} VAE")
        return shapes
    given, made = (
        _channels(found, f"{name}.weight", axis)
        for name, axis in (("encoder.conv1", 1), ("decoder.head.2", 0))
    )
    check_names(source.path, found, vae_shapes(int(dim), given, made), "the Qwen-Image VAE")
    return found


def vae_shapes(dim: int, given: int = 3, made: int = 3) -> dict[str, tuple[int, ...]]:
    """Of ComfyUI's class for Qwen-Image's VAE, by name."""
    with torch.device("meta"):
        vae = comfy.ldm.wan.vae.WanVAE(
            dim=dim,
            z_dim=LATENT_CHANNELS,
            dim_mult=[1, 2, 4, 4],
            num_res_blocks=2,
            attn_scales=[],
            temperal_downsample=[False, True, True],
            image_channels=given,
            conv_out_channels=made,
        )
    return shapes_of(vae)


def _class_21(dim: int, decoder: int, found: dict[str, tuple[int, ...]]) -> torch.nn.Module:
    return comfy.ldm.wan.vae2_2.WanVAE(
        dim=dim,
        dec_dim=decoder,
        z_dim=LATENT_CHANNELS_21,
        dim_mult=[1, 2, 4, 8, 8],
        num_res_blocks=2,
        attn_scales=[],
        temperal_downsample=[False, True, True, True],
        image_channels=found.get("decoder.head.2.weight", (4,))[0],
        patch_size=1,
        temporal_kernel=1,
    )


def _channels(found: dict[str, tuple[int, ...]], name: str, axis: int) -> int:
    shape = found.get(name, ())
    return shape[axis] if len(shape) == 5 else 3


def _notes(source: Source, names: dict[str, str]) -> tuple[str, ...]:
    notes = []
    if any(name != native for name, native in names.items()):
        notes.append("diffusers names converted to ComfyUI's")
    if source.part.licence:
        notes.append(source.part.licence)
    if not _is_21(source) and source.part.dims.get("image_channels") == 4:
        notes.append("4 channels: it decodes to RGBA, for Qwen-Image-Layered")
    return tuple(notes)
