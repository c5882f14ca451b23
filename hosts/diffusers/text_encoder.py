"""Loads the prompt side through transformers: the text encoder, and its tokenizer or processor.

transformers fills what a checkpoint lacks with random numbers and a tokenizer folder without files
with an empty vocabulary, and only logs it. Both would paint a wrong image, so both are errors here.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import PreTrainedModel, Qwen2Tokenizer
from transformers.processing_utils import ProcessorMixin

from ...errors import CheckpointError
from ...loaders.quantize import check_finite
from ...loaders.source import TEMPLATE_PREFIX, check_prefix, holds_tokenizer


def load_text_encoder(
    model_class: type[PreTrainedModel], folder: Path, *, dtype: torch.dtype, device: str
) -> PreTrainedModel:
    """Loads the safetensors in `folder` in evaluation mode.

    Raises:
        CheckpointError: a tensor is missing, unexpected, not finite, or of another shape than
            config.json asks for.
    """
    with _quiet_report():
        model, report = model_class.from_pretrained(
            folder,
            dtype=dtype,
            device_map=device,
            local_files_only=True,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # so that the report has them
            output_loading_info=True,
        )
    mismatched = {name for name, *_ in report["mismatched_keys"]}
    faults = (
        ("lacks the tensor", report["missing_keys"]),
        ("has no place in its config.json for the tensor", report["unexpected_keys"]),
        ("has another shape than its config.json asks for in the tensor", mismatched),
    )
    for fault, names in faults:
        if names:
            raise CheckpointError(
                f"The text encoder {fault} {min(names)!r} ({len(names)} in all): download the "
                "folder again, unquantized.",
                folder,
            )
    for name, weight in model.named_parameters():
        check_finite(folder, name, weight)
    return model


@contextmanager
def _quiet_report() -> Iterator[None]:
    # The same facts become our one sentence.
    theirs = logging.getLogger("transformers.modeling_utils")
    theirs.addFilter(_is_no_report)
    try:
        yield
    finally:
        theirs.removeFilter(_is_no_report)


def _is_no_report(record: logging.LogRecord) -> bool:
    message = record.getMessage()
    return "LOAD REPORT" not in message and "checkpoint seem corrupted" not in message


def load_tokenizer(folder: Path) -> Qwen2Tokenizer:
    """Loads tokenizer.json, or vocab.json with merges.txt.

    Raises:
        CheckpointError: neither is there, or Qwen-Image's chat template before the prompt is not 34
            tokens long, which is what the pipeline cuts off.
    """
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

    Raises:
        CheckpointError: the tokenizer or another file is missing.
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
