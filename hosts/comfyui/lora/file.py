"""Reads a LoRA file: what it is, its tensors by ComfyUI's names, and the scale in its metadata.

Which tensors make a LoRA is ComfyUI's to say: `families.identify` names the forms that are known
without it, and of others its own loader is asked.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import comfy.lora
import comfy.utils
import torch

from ....errors import CheckpointError
from ....families.identify import DOWN, SUFFIX, is_unknown, normalize_name
from ....families.protocol import WHOLE_TENSORS, Tensors
from ....files import parse_object
from ....loaders.checkpoint import CheckpointPart, inspect_shards
from ....loaders.quantization import ATTENTION_CONFIG
from ....loaders.shards import read_shards

LONGEST = 512  # letters of a name in which modules are looked for
ADAPTER_METADATA = "lora_adapter_metadata"
MOST_WAYS = 1e8  # that a pattern may take through the names of all modules: a second of `re`


@dataclass(frozen=True)
class LoraFile:
    path: Path
    metadata: dict[str, str] | None
    # by normalized name; on the CPU, in the file's dtypes. An alpha that only the metadata tells is
    # among them.
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    # {normalized name of a tensor: its name in the file}
    names: dict[str, str] = field(default_factory=dict)
    # {normalized name of a module: its name in the file}
    modules: dict[str, str] = field(default_factory=dict)
    # {name of a `.comfy_attention.config` in the file: its text, uint8}
    attention: dict[str, torch.Tensor] = field(default_factory=dict)


def inspect_lora(path: Path) -> CheckpointPart:
    """Identifies a LoRA file by its header: a model in the wrong slot has gigabytes."""
    shards = read_shards(path)
    parts = inspect_shards(shards).parts
    if len(parts) == 1 and parts[0].role == "lora":
        if WHOLE_TENSORS in parts[0].cannot_run:
            raise CheckpointError(WHOLE_TENSORS, path)
        return parts[0]
    if all(is_unknown(part.family) for part in parts) and _is_read(shards.tensors):
        return replace(parts[0], family="LoRA of a new form", bytes=sum(it.bytes for it in parts))
    found = ", ".join(f"{part.family} ({part.role})" for part in parts)
    folders = sorted({part.folder for part in parts if part.folder})
    remedy = f"move it to models/{folders[0]}" if folders else "choose a LoRA"
    raise CheckpointError(f"This is not a LoRA but {found}: {remedy}.", path)


def _is_read(tensors: Tensors) -> bool:
    """Tells whether ComfyUI's loader takes any of them for a LoRA, whatever module it changes."""
    names = [name for name in tensors if len(name) < LONGEST]
    modules = {name[:at] for name in names for at, letter in enumerate(name) if letter == "."}
    try:
        empty = {name: torch.zeros(()).expand(tensors[name].shape) for name in names}
        keys = {module: f"{module}.weight" for module in modules}
        return bool(comfy.lora.load_lora(empty, keys, log_missing=False))
    except KeyError:  # a part of one is missing
        return True
    except RuntimeError:  # an alpha of many numbers
        return False


def read_lora(path: Path) -> LoraFile:
    """Reads a file that `inspect_lora` knows."""
    stored, metadata = comfy.utils.load_torch_file(str(path), safe_load=True, return_metadata=True)
    file, ranks = LoraFile(path, metadata), {}
    for name, tensor in stored.items():
        if name.endswith(ATTENTION_CONFIG):
            file.attention[name] = tensor
            continue
        normalized = normalize_name(name)
        if normalized in file.tensors:
            raise CheckpointError(
                f"This LoRA has {normalized!r} twice, once as {name!r}, but may change it only "
                "once: split the LoRA into two files.",
                path,
            )
        file.tensors[normalized], file.names[normalized] = tensor, name
        suffix = SUFFIX.search(name)
        if suffix is None or name.endswith(".bias"):  # which ComfyUI does not read
            continue
        if fault := _fault(name, suffix["kind"], tensor):
            raise CheckpointError(fault, path)
        module = module_of(normalized)
        file.modules.setdefault(module, module_of(name))
        if suffix["kind"] in DOWN:
            ranks[module] = len(tensor)
    for module, alpha in stored_alphas(path, metadata or {}, ranks).items():
        file.tensors.setdefault(f"{module}.alpha", torch.tensor(alpha, dtype=torch.float64))
    return file


def module_of(name: str) -> str:
    """Returns the module that a tensor changes; the name of one that is none of a LoRA's."""
    return SUFFIX.sub("", name)


def _fault(name: str, kind: str, tensor: torch.Tensor) -> str | None:
    shape = f"{name!r} has the shape {tuple(tensor.shape)}"
    if kind == "alpha" and tensor.numel() != 1:
        return f"{shape}, but must be one number: download the file again."
    if kind in DOWN and tensor.ndim < 2:
        return f"{shape}, but must be a matrix: download the file again."
    if tensor.numel() == 0:
        return f"{shape}, but a LoRA of rank 0 changes nothing: download the file again."
    if kind == "lora_magnitude_vector":
        return (
            f"This is a DoRA in PEFT's format ({name!r}), which ComfyUI would apply without its "
            "magnitudes: save it as a plain LoRA, or merge it into the model."
        )
    # fp8 has no isfinite.
    if not (tensor.float() if tensor.itemsize == 1 else tensor).isfinite().all():
        return f"The tensor {name!r} has NaN or infinity: download the file again."
    return None


def stored_alphas(
    path: Path, metadata: Mapping[str, str], ranks: Mapping[str, int]
) -> dict[str, float]:
    """Gives the alpha of each module that makes the scale of PEFT's LoraConfig, if there is one.

    diffusers writes it as JSON into the metadata (`save_lora_weights` with the part's name before
    each field, `save_lora_adapter` without): `lora_alpha / r`, with `use_rslora` by the root of r.
    """
    found = {}
    try:
        stored = parse_object(metadata.get(ADAPTER_METADATA, "{}").encode()).items()
        config = {name.removeprefix("transformer."): value for name, value in stored}
        if "lora_alpha" not in config:
            return {}
        alphas, rs = (_patterns(config, it, ranks) for it in ("alpha_pattern", "rank_pattern"))
        for module, rank in ranks.items():
            alpha = _matched(alphas, module, config["lora_alpha"])
            r = _matched(rs, module, config.get("r", rank))
            scale = alpha / (math.sqrt(r) if config.get("use_rslora") else r)
            if not math.isfinite(scale) or r < 0:
                raise ValueError(f"lora_alpha {alpha} and r {r}")
            found[module] = scale * rank
    except (ArithmeticError, AttributeError, TypeError, ValueError, re.error) as e:
        raise CheckpointError(
            f"The LoRA's scale in {ADAPTER_METADATA!r} cannot be used ({e}): download the file "
            "again.",
            path,
        ) from e
    return found


def _patterns(
    config: Mapping[str, Any], field: str, modules: Collection[str]
) -> list[tuple[re.Pattern[str], float]]:
    # As PEFT's `get_pattern_key`: the first that the end of the name matches.
    found = (config.get(field) or {}).items()
    for key, _ in found:
        if _ways(key, modules) > MOST_WAYS:
            raise ValueError(f"{field} repeats too often: {key[:60]!r}")
    return [(re.compile(rf"(.*\.)?({key})$"), it) for key, it in found]


def _ways(pattern: str, modules: Collection[str]) -> float:
    # Trainers write names and perhaps `.*`; other patterns could keep `re` busy for years.
    repeats, choices = len(re.findall(r"[*+?{]", pattern)), pattern.count("|")
    if repeats > 8 or choices > 16 or re.search(r"\)[*+?{]", pattern):
        return math.inf
    ways = sum((name.count(".") + 1) * len(name) ** repeats for name in modules)
    return ways * 2**choices / math.factorial(repeats)


def _matched(patterns: list[tuple[re.Pattern[str], float]], module: str, default: float) -> float:
    return next((it for pattern, it in patterns if pattern.match(module)), default)
