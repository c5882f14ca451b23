"""Loads the Qwen2.5-VL text encoder into a ComfyUI CLIP.

What the published file is goes through ComfyUI's own loading, so that every encoder node works on
it. Other sizes and a folder's own tokenizer go in through the places that ComfyUI has for them.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import comfy.memory_management
import comfy.model_patcher
import comfy.sd
import comfy.text_encoders.qwen_image
import comfy.utils
import folder_paths

from ...errors import CheckpointError, SettingError
from ...loaders.precision import AS_STORED, check_host_memory
from ...loaders.source import Source, fingerprint, open_source
from ...loaders.text_encoders import SIZES
from ...optimizations.resources import available_memory
from .folder_tokenizer import FolderTokenizer, encoder_class, find_tokenizer, tokenizer_class
from .placed_clip import CPU, PLACEMENTS, PlacedClip, device_options
from .precision import STAGING_BYTES
from .qwen25 import Layout, read_layout, text_only_class
from .report import LoadReport
from .tensors import map_tensors
from .text_encoder_weights import LANGUAGE_LINEAR, Prepared, prepare

PRECISIONS = ("auto", "bf16", "fp8", "int8", AS_STORED)
# ComfyUI's own tokenizer knows ids up to this, and its padding.
PUBLISHED_TOKENS = 151_666
PUBLISHED_PAD = 151_643
STORED_KINDS = {"F8_E4M3": "fp8", "F8_E5M2": "fp8", "I8": "int8"}


def load_text_encoder(
    path: str | os.PathLike[str],
    precision: str = "auto",
    placement: str = "auto",
    *,
    disable_dynamic: bool = False,
) -> tuple[PlacedClip, LoadReport]:
    """Loads the text encoder behind `path`.

    Args:
        path: ComfyUI's single file, a text_encoder/ folder, or a diffusers folder.
        precision: auto or "as stored", bf16, fp8 or int8: how the weights of the language model
            are held. ComfyUI computes in fp32 whatever it is.
        placement: "auto", "cpu" or "drop after encoding": whether it is on the card, and for how
            long.
        disable_dynamic: loads without dynamic VRAM, as ComfyUI's own loaders take it.

    Raises:
        CheckpointError: the file is not a Qwen2.5-VL that ComfyUI can run, is damaged, or its
            tokenizer is missing.
        SettingError: the precision or the placement is unknown.
        UnavailableError: host memory does not suffice.
    """
    if precision not in PRECISIONS:
        raise SettingError(
            f"text encoder precision {precision!r} is unknown: choose {', '.join(PRECISIONS)}."
        )
    devices = device_options(placement)
    source = open_source(path, "text_encoder")
    layout = read_layout(source)
    tokenizer = _own_tokenizer(source, layout)
    # ComfyUI has no dynamic VRAM for what computes on the processor.
    mapped = comfy.memory_management.aimdo_enabled and not disable_dynamic and placement != CPU
    _check_memory(source, layout, precision, mapped)
    prepared = prepare(source, layout, map_tensors(source), precision)
    options = _model_options(layout, tokenizer, prepared) | devices
    clip = _build(source, tokenizer, prepared, options, disable_dynamic)
    clip.patcher.cached_patcher_init = (
        load_text_encoder_patcher,
        (os.fspath(path), precision, placement),
    )
    ids = (tokenizer.start, tokenizer.user, tokenizer.pad) if tokenizer else ()
    made_of = fingerprint(source.files), precision, layout.config, ids, clip.is_dynamic()
    reason = {"auto": "auto: as stored", AS_STORED: AS_STORED}.get(precision, "requested")
    size = SIZES.get((source.part.dims["hidden"], source.part.blocks))
    return PlacedClip.over(clip, placement, made_of), LoadReport(
        what="text encoder",
        path=source.path,
        family=f"{source.part.family}, {size}" if size else source.part.family,
        precision=prepared.precision,
        reason=f"{reason}; ComfyUI computes this encoder in fp32",
        bytes=clip.patcher.model_size(),
        notes=(f"placement {placement}: {PLACEMENTS[placement]}", *layout.notes, *prepared.notes),
    )


def load_text_encoder_patcher(
    path: str, precision: str, placement: str, disable_dynamic: bool = False
) -> comfy.model_patcher.ModelPatcher:
    """Loads the same text encoder once more, for ComfyUI's clones on other devices and without
    dynamic VRAM.
    """
    return load_text_encoder(path, precision, placement, disable_dynamic=disable_dynamic)[0].patcher


def _own_tokenizer(source: Source, layout: Layout) -> FolderTokenizer | None:
    """The tokenizer beside the file; None where ComfyUI's own fits."""
    published = layout.vocabulary >= PUBLISHED_TOKENS
    return None if published else find_tokenizer(source, layout.vocabulary)


def _model_options(
    layout: Layout, tokenizer: FolderTokenizer | None, prepared: Prepared
) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if layout.config:
        options["qwen25_7b_model_config"] = dict(layout.config)
    if not layout.vision:
        options["qwen25_7b_class"] = text_only_class(tokenizer.pad if tokenizer else PUBLISHED_PAD)
    if prepared.converted:
        # These layers take a weight over, where the plain ones would copy it.
        options["quantization_metadata"] = {"mixed_ops": True}
    return options


def _build(
    source: Source,
    tokenizer: FolderTokenizer | None,
    prepared: Prepared,
    options: dict[str, Any],
    disable_dynamic: bool,
) -> comfy.sd.CLIP:
    tensors = prepared.tensors
    embeddings = folder_paths.get_folder_paths("embeddings")
    if tokenizer is None:
        if comfy.sd.detect_te_model(tensors) is not comfy.sd.TEModel.QWEN25_7B:
            raise CheckpointError(
                f"{source.path} is not recognized by ComfyUI as the Qwen2.5-VL 7B of "
                "Qwen-Image: get the model's own text encoder."
            )
        return comfy.sd.load_text_encoder_state_dicts(
            [tensors],
            embedding_directory=embeddings,
            clip_type=comfy.sd.CLIPType.QWEN_IMAGE,
            model_options=options,
            disable_dynamic=disable_dynamic,
        )
    base = comfy.text_encoders.qwen_image.te(**comfy.sd.llama_detect([tensors]))
    target = SimpleNamespace(
        params={},
        clip=encoder_class(base, tokenizer),
        tokenizer=tokenizer_class(tokenizer, int(source.part.dims["hidden"])),
    )
    return comfy.sd.CLIP(
        target,
        embedding_directory=embeddings,
        parameters=comfy.utils.calculate_parameters(tensors),
        state_dict=[tensors],
        model_options=options,
        disable_dynamic=disable_dynamic,
    )


def _check_memory(source: Source, layout: Layout, precision: str, mapped: bool) -> None:
    """Refuses what host memory cannot hold, before weights are read.

    Args:
        mapped: whether weights that need no conversion stay in the file.
    """
    target = precision if precision in ("bf16", "fp8", "int8") else None
    needed = converted = 0
    for name, info in layout.infos.items():
        rounded = target in ("fp8", "int8") and LANGUAGE_LINEAR.fullmatch(name)
        if rounded and STORED_KINDS.get(info.dtype) != target:
            converted += info.elements
        elif info.dtype in STORED_KINDS:  # taken over as it is mapped, or dequantized
            converted += 2 * info.elements if target == "bf16" else 0
        elif target and info.dtype != "BF16":
            converted += 2 * info.elements
        elif not mapped:
            needed += info.nbytes
    needed += converted + (STAGING_BYTES if converted else 0)
    check_host_memory(needed, available_memory(), f"{source.path.name} in {precision}")
