"""Describes how the pipelines of diffusers that run here differ, and how each reads prompts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffusers import DiffusionPipeline, ModelMixin
from transformers import PreTrainedModel, Qwen2Tokenizer
from transformers.processing_utils import ProcessorMixin

from ...errors import CheckpointError
from ...families.protocol import Member
from ...loaders.source import TEMPLATE_PREFIX, check_prefix, holds_tokenizer


@dataclass(frozen=True)
class PipelineParts:
    """Tells what differs between the pipelines that run here."""

    pipeline: type[DiffusionPipeline]
    models: Mapping[str, type[ModelMixin]]  # {part: class} of what diffusers itself defines
    text_encoder: type[PreTrainedModel]
    words: str  # the part that cuts prompts into tokens, which `load_words` reads from its folder
    load_words: Callable[[Path], Qwen2Tokenizer | ProcessorMixin]
    # of a call of this pipeline alone; of a Turbo the sigmas that it is trained for
    arguments: Mapping[str, Any]
    member: Member  # the published model, with its steps and guidance


def load_tokenizer(folder: Path) -> Qwen2Tokenizer:
    """Loads tokenizer.json, or vocab.json with merges.txt."""
    _check_tokenizer(folder)
    tokenizer = Qwen2Tokenizer.from_pretrained(folder, local_files_only=True)
    check_prefix(folder, len(tokenizer(TEMPLATE_PREFIX).input_ids))
    return tokenizer


SPECIAL_TOKENS = {
    "image": "<|image_pad|>",
    "video": "<|video_pad|>",
    "vision_start": "<|vision_start|>",
    "vision_end": "<|vision_end|>",
}


def load_processor(folder: Path) -> ProcessorMixin:
    """Loads what Qwen-Image-2.1 reads prompts and references with: Qwen3-VL's processor without
    that of videos, which needs torchvision.
    """
    from transformers import Qwen3VLProcessor  # since 4.57

    class ImageProcessor(Qwen3VLProcessor):
        def __init__(self, image_processor=None, tokenizer=None, chat_template=None) -> None:
            for name, token in SPECIAL_TOKENS.items():
                setattr(self, f"{name}_token", token)
                setattr(self, f"{name}_token_id", tokenizer.convert_tokens_to_ids(token))
            ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)

    _check_tokenizer(folder)
    try:
        return ImageProcessor.from_pretrained(folder, local_files_only=True)
    except OSError as error:
        reason = str(error).partition("\n")[0]
        raise CheckpointError(
            f"The processor cannot be read ({reason}): download the folder again.", folder
        ) from error


def _check_tokenizer(folder: Path) -> None:
    if not holds_tokenizer(folder):
        raise CheckpointError(
            "The tokenizer is missing (tokenizer.json, or vocab.json and merges.txt): download the "
            "folder again.",
            folder,
        )
