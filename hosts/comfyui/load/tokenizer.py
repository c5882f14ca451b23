"""Uses a model folder's own tokenizer where ComfyUI would use that of the published model.

ComfyUI finds the end of the chat template by the ids of the published vocabulary; here the same
search runs with the ids of the folder's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import comfy.sd1_clip
import torch
from comfy.text_encoders.qwen_image import QwenImageTEModel
from transformers import Qwen2Tokenizer

from ....errors import CheckpointError, UnavailableError
from ....loaders.parts import QWEN3_VL
from ....loaders.source import TEMPLATE_PREFIX, Source, check_prefix, holds_tokenizer

START = "<|im_start|>"
USER = "user\n"
NAME = "qwen25_7b"  # what ComfyUI's Qwen-Image classes call this encoder


@dataclass(frozen=True)
class FolderTokenizer:
    """A tokenizer on disk and the ids that this package asks it for.

    Args:
        folder: holds tokenizer.json, or vocab.json with merges.txt.
        start: id of `<|im_start|>`.
        user: ids of `user` and a line end, which follow it before the prompt.
        pad: id for padding.
    """

    folder: Path
    start: int
    user: tuple[int, ...]
    pad: int


def find_tokenizer(source: Source, vocabulary: int) -> FolderTokenizer:
    """Finds the tokenizer of a text encoder: in `tokenizer/` or `processor/` next to its folder, or
    with it.

    Raises:
        CheckpointError: there is none or it is broken, it has more tokens than the embedding has
            rows, or it cuts the chat template into another number of tokens than Qwen-Image's.
    """
    weights = source.files[0].parent
    folders = (weights.parent / "tokenizer", weights.parent / "processor", weights)
    folder = next((folder for folder in folders if holds_tokenizer(folder)), None)
    if folder is None:
        raise CheckpointError(
            f"ComfyUI's own tokenizer does not fit this text encoder ({vocabulary} tokens), and it "
            "has none of its own: put the model's tokenizer.json, or vocab.json with merges.txt, "
            "into its tokenizer folder.",
            folders[0],
        )
    try:
        tokenizer = Qwen2Tokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # the tokenizers package raises no narrower class
        reason = str(error).partition("\n")[0]
        raise CheckpointError(
            f"The tokenizer cannot be read ({reason}): download it again.", folder
        ) from error
    if len(tokenizer) > vocabulary:
        raise CheckpointError(
            f"The tokenizer has {len(tokenizer)} tokens and the text encoder {vocabulary}: take "
            "both from one model.",
            folder,
        )
    if not source.part.family.startswith(QWEN3_VL):  # whose template ends where a turn does
        check_prefix(folder, len(tokenizer(TEMPLATE_PREFIX).input_ids))
    user = tokenizer(USER).input_ids
    pad = tokenizer.pad_token_id
    return FolderTokenizer(
        folder=folder,
        start=tokenizer.convert_tokens_to_ids(START),
        user=tuple(user),
        pad=-1 if pad is None else pad,
    )


def end_of_template(ids: Sequence[object], tokenizer: FolderTokenizer) -> int:
    """Counts the tokens up to the prompt: through the second `<|im_start|>` and `user` and a line
    end after it. Images and textual inversions in `ids` are no numbers.
    """
    starts = [index for index, token in enumerate(ids) if is_token(token, tokenizer.start)][:2]
    if not starts:
        return 0
    after = starts[-1] + 1
    header = ids[after : after + len(tokenizer.user)]
    matches = len(header) == len(tokenizer.user) and all(map(is_token, header, tokenizer.user))
    end = after + len(tokenizer.user)
    return end if matches and len(ids) > end else starts[-1]


def is_token(token: object, expected: int) -> bool:
    """Whether it is that id, and no image or textual inversion."""
    return not torch.is_tensor(token) and token == expected


def refuse_images() -> None:
    """Raises UnavailableError: the prompt has an image and nothing here can see it."""
    raise UnavailableError(
        "This text encoder has no vision tower, which the image in the prompt needs: load the "
        "text encoder of a Qwen-Image-Edit model (for Qwen-Image-2.1 Qwen3-VL 8B), or encode "
        "without an image."
    )


def tokenizer_class(
    tokenizer: FolderTokenizer, width: int, base: type[comfy.sd1_clip.SD1Tokenizer], name: str
) -> type[comfy.sd1_clip.SD1Tokenizer]:
    """ComfyUI's tokenizer over the folder's vocabulary, for embeddings `width` wide.

    Args:
        name: What ComfyUI calls the text encoder.
    """

    class Words(comfy.sd1_clip.SDTokenizer):
        def __init__(
            self, embedding_directory: object = None, tokenizer_data: dict[str, Any] | None = None
        ) -> None:
            super().__init__(
                str(tokenizer.folder),
                pad_with_end=False,
                embedding_size=width,
                embedding_key=name,
                tokenizer_class=Qwen2Tokenizer,
                has_start_token=False,
                has_end_token=False,
                pad_to_max_length=False,
                max_length=99999999,
                min_length=1,
                pad_token=tokenizer.pad,
                tokenizer_data=tokenizer_data or {},
                tokenizer_args={"local_files_only": True},
            )

    class Tokenizer(base):
        def __init__(
            self, embedding_directory: object = None, tokenizer_data: dict[str, Any] | None = None
        ) -> None:
            data = {**(tokenizer_data or {}), f"{name}_tokenizer_class": Words}
            super().__init__(embedding_directory=embedding_directory, tokenizer_data=data)

        def tokenize_with_weights(
            self, text: str, return_word_ids: bool = False, *args: Any, **kwargs: Any
        ) -> dict[str, Any]:
            if len(kwargs.get("images", ())) > 0:
                refuse_images()
            return super().tokenize_with_weights(text, return_word_ids, *args, **kwargs)

    return Tokenizer


def encoder_class(
    base: type[QwenImageTEModel], tokenizer: FolderTokenizer
) -> type[QwenImageTEModel]:
    """`base`, which is ComfyUI's, cutting off the template by the folder's ids."""

    class Encoder(base):
        def encode_token_weights(
            self, token_weight_pairs: dict[str, Any], template_end: int = -1
        ) -> Any:
            if template_end == -1:
                ids = [pair[0] for pair in token_weight_pairs[NAME][0]]
                template_end = end_of_template(ids, tokenizer)
            return super().encode_token_weights(token_weight_pairs, template_end=template_end)

    return Encoder
