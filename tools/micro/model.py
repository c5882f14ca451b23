"""The micro models: parts of the configs in their bundled folders, with weights to train.

The real classes at the smallest dims that both hosts accept.

1.x: ComfyUI fixes the text encoder's head_dim at 128 and finds it by 512 key rows; transformers
wants hidden = heads x 128; so the text encoder has 4 heads, 4 key-value heads and a hidden size of
512. The VAE keeps the real compression, channels and latent statistics: ComfyUI's Wan 2.1 latent
format holds those as constants.

2.1: ComfyUI reads the transformer's dims from its shapes, but fixes the RoPE axes at 16 + 56 + 56,
so that a head has 128 channels. The text encoder's heads have 128 too, with the rotation of 24 + 20
+ 20. Of the VAE it fixes the multipliers, the 64 latent channels and their statistics.
"""

from __future__ import annotations

import importlib
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, ModelMixin
from transformers import PreTrainedModel, Qwen2TokenizerFast

from ...loaders.source import TEMPLATE_PREFIX, bundled_micro_folder
from .streams import DualStream, SingleStream

INDEX = "model_index.json"
WEIGHTED = ("transformer", "vae", "text_encoder")
USER = "<|im_start|>user\n"
SYSTEM_21 = "<|im_start|>system\nComprehend and analyze the provided prompt.<|im_end|>\n"
SUFFIX = "<|im_end|>\n<|im_start|>assistant\n"


@dataclass(frozen=True)
class Family:
    """One kind of micro model.

    Attributes:
        name: a key of `MICRO_FOLDERS`.
        stream: how training runs the transformer.
        dropped: the start of a prompt in its template, which is cut off after encoding.
        prefix: what of the template follows up to the prompt.
        latent_noise: the largest deviation of the noise on which the decoder is trained last.
    """

    name: str
    stream: type[DualStream] | type[SingleStream]
    dropped: str
    prefix: str
    latent_noise: float

    @property
    def folder(self) -> Path:
        """The bundled model."""
        return bundled_micro_folder(self.name)

    @property
    def index(self) -> dict[str, Any]:
        """{part: [library, class]}, and `_class_name` of the pipeline."""
        return json.loads((self.folder / INDEX).read_text(encoding="utf-8"))

    @property
    def pipeline(self) -> type[diffusers.DiffusionPipeline]:
        return getattr(diffusers, self.index["_class_name"])

    def part_class(self, part: str) -> type[ModelMixin] | type[PreTrainedModel]:
        """The class of a part, as a host builds it."""
        library, name = self.index[part]
        return getattr(importlib.import_module(library), name)


QWEN_IMAGE = Family("1.x", DualStream, TEMPLATE_PREFIX, "", latent_noise=0.0)
QWEN_IMAGE_21 = Family("2.1", SingleStream, SYSTEM_21, USER, latent_noise=0.4)
FAMILIES = {family.name: family for family in (QWEN_IMAGE, QWEN_IMAGE_21)}


@dataclass
class MicroModel:
    """The parts of a pipeline that training reads or changes."""

    family: Family
    transformer: ModelMixin
    vae: ModelMixin
    text_encoder: PreTrainedModel
    tokenizer: Qwen2TokenizerFast
    scheduler: FlowMatchEulerDiscreteScheduler

    def save(self, folder: Path) -> None:
        """Writes a diffusers folder: bf16 weights, and all else as in the bundled one."""
        copy = build(family=self.family)  # what is trained stays in fp32
        for name in WEIGHTED:
            part = getattr(copy, name)
            part.load_state_dict(getattr(self, name).state_dict())
            part.bfloat16().save_pretrained(folder / name)
        others = shutil.ignore_patterns("*.safetensors", "*.md")
        shutil.copytree(self.family.folder, folder, ignore=others, dirs_exist_ok=True)


def build(seed: int = 0, family: Family = QWEN_IMAGE) -> MicroModel:
    """Builds untrained parts in fp32 on the CPU, the same for the same seed."""
    parts = {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for name in WEIGHTED:
            kind, folder = family.part_class(name), family.folder / name
            if issubclass(kind, PreTrainedModel):
                config = kind.config_class.from_pretrained(folder, local_files_only=True)
                parts[name] = kind(config).float()
            else:
                parts[name] = kind.from_config(kind.load_config(folder, local_files_only=True))
    return _model(family, parts)


def load(folder: Path) -> MicroModel:
    """Reads a folder that `MicroModel.save` wrote, in fp32, to train on."""
    found = json.loads((folder / INDEX).read_text(encoding="utf-8"))["_class_name"]
    [family] = (each for each in FAMILIES.values() if each.index["_class_name"] == found)
    parts = {
        name: family.part_class(name).from_pretrained(folder / name, local_files_only=True).float()
        for name in WEIGHTED
    }
    return _model(family, parts)


def _model(family: Family, parts: dict[str, Any]) -> MicroModel:
    words = family.folder / ("tokenizer" if "tokenizer" in family.index else "processor")
    return MicroModel(
        family,
        **parts,
        tokenizer=Qwen2TokenizerFast.from_pretrained(words, local_files_only=True),
        scheduler=FlowMatchEulerDiscreteScheduler.from_pretrained(
            family.folder / "scheduler", local_files_only=True
        ),
    )
