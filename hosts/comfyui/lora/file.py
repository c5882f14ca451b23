"""Reads a LoRA file for ComfyUI: tensors under the names that it maps, checked one by one."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import comfy.utils
import torch

from ....errors import CheckpointError
from ....families.identify import SUFFIX, normalize_name
from ....families.protocol import WHOLE_TENSORS
from ....loaders.checkpoint import CheckpointPart, inspect_checkpoint
from ....loaders.quantization import ATTENTION_CONFIG


@dataclass(frozen=True)
class LoraFile:
    """The tensors of a LoRA.

    Args:
        tensors: by normalized name; on the CPU, in the file's dtypes.
        modules: {normalized name of a module: its name in the file}
        attention: {name of a `.comfy_attention.config` in the file: its text, uint8}
        ignored: names of tensors that are no LoRA's.
        metadata: the file's own, for nodes that look for it.
    """

    path: Path
    metadata: dict[str, str] | None
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    modules: dict[str, str] = field(default_factory=dict)
    attention: dict[str, torch.Tensor] = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)


def inspect_lora(path: Path) -> CheckpointPart:
    """What a LoRA file is, from its header: a model in the wrong slot has tens of gigabytes.

    Raises:
        CheckpointError: the file is no LoRA, or more than one; the message says what it is and
            where it belongs.
    """
    parts = inspect_checkpoint(path).parts
    if len(parts) == 1 and parts[0].role == "lora":
        if WHOLE_TENSORS in parts[0].cannot_run:
            raise CheckpointError(WHOLE_TENSORS, path)
        return parts[0]
    found = ", ".join(f"{part.family} ({part.role})" for part in parts)
    folders = sorted({part.folder for part in parts if part.folder})
    remedy = f"move it to models/{folders[0]}" if folders else "choose a LoRA"
    raise CheckpointError(f"This is not a LoRA but {found}: {remedy}.", path)


def read_lora(path: Path) -> LoraFile:
    """Reads a file that `inspect_lora` knows.

    Raises:
        CheckpointError: it names a module twice, holds NaN, infinity or nothing, or is of a form
            that ComfyUI would apply wrongly.
    """
    stored, metadata = comfy.utils.load_torch_file(str(path), safe_load=True, return_metadata=True)
    file = LoraFile(path, metadata)
    for name, tensor in stored.items():
        if name.endswith(ATTENTION_CONFIG):
            file.attention[name] = tensor
            continue
        suffix = SUFFIX.search(name)
        if suffix is None:
            file.ignored.append(name)
            continue
        _check_tensor(path, name, suffix["kind"], tensor)
        normalized = normalize_name(name)
        if normalized in file.tensors:
            raise CheckpointError(
                f"This LoRA holds {normalized!r} twice, once as {name!r}: a LoRA changes each "
                "module once, so split it into two files.",
                path,
            )
        file.tensors[normalized] = tensor
        file.modules.setdefault(SUFFIX.sub("", normalized), SUFFIX.sub("", name))
    return file


def _check_tensor(path: Path, name: str, kind: str, tensor: torch.Tensor) -> None:
    if kind == "alpha" and tensor.numel() != 1:
        raise CheckpointError(
            f"{name!r} has the shape {tuple(tensor.shape)} and must be one number: download the "
            "file again.",
            path,
        )
    if tensor.numel() == 0:
        raise CheckpointError(
            f"{name!r} has the shape {tuple(tensor.shape)}, and a LoRA of rank 0 changes nothing: "
            "download the file again.",
            path,
        )
    if kind == "lora_magnitude_vector":
        raise CheckpointError(
            f"This is a DoRA as PEFT writes it ({name!r}), which ComfyUI would apply without its "
            "magnitudes: save it as a plain LoRA, or merge it into the model.",
            path,
        )
    # fp8 has no isfinite.
    if not (tensor.float() if tensor.itemsize == 1 else tensor).isfinite().all():
        raise CheckpointError(
            f"This file holds NaN or infinity in the tensor {name!r}: download it again.", path
        )
