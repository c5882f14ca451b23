"""Builds text encoders of ComfyUI's classes. Sizes can be set; the vision tower is built whole. A
model folder's own tokenizer replaces the published one, and the end of the chat template is found
by its ids.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import comfy.sd1_clip
import comfy.text_encoders.qwen_image
import torch
from comfy.text_encoders.llama import Qwen25_7BVLI, Qwen25_7BVLI_Config
from comfy.text_encoders.qwen_image import QwenImageTEModel, QwenImageTokenizer
from transformers import Qwen2Tokenizer

from ....caches import cached
from ....errors import CheckpointError, UnavailableError
from ....families.comfyui import require
from ....families.registry import family_with, load, text_encoder_titled
from ....loaders.source import (
    TEMPLATE_PREFIX,
    Source,
    check_prefix,
    holds_tokenizer,
    tokenizer_folders,
)
from ....optimizations.patches import put

START = "<|im_start|>"
USER = "user\n"


@dataclass(frozen=True)
class FolderTokenizer:
    folder: Path  # holds tokenizer.json, or vocab.json with merges.txt
    start: int  # id of `<|im_start|>`
    user: tuple[int, ...]  # ids of `user` and a line end, which follow it before the prompt
    pad: int


def find_tokenizer(source: Source, vocabulary: int, fixed_prefix: bool) -> FolderTokenizer:
    """Finds the tokenizer of a text encoder: in `tokenizer/` or `processor/` next to its folder, or
    with it.
    """
    folders = tokenizer_folders(source.files[0])
    folder = next((folder for folder in folders if holds_tokenizer(folder)), None)
    if folder is None:
        raise CheckpointError(
            f"ComfyUI's tokenizer does not fit this text encoder ({vocabulary} tokens), and the "
            "folder has no tokenizer: put the model's tokenizer.json, or vocab.json with "
            "merges.txt, into the tokenizer folder.",
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
            f"The tokenizer has {len(tokenizer)} tokens, but the text encoder has {vocabulary}: "
            "use both from one model.",
            folder,
        )
    if fixed_prefix:
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
    return not torch.is_tensor(token) and token == expected


def refuse_images(*_: Any, **__: Any) -> None:
    """Raises UnavailableError: the prompt has an image and nothing here can see it."""
    raise UnavailableError(
        "This text encoder has no vision tower, so it cannot read the image in the prompt: load "
        "the text encoder of a Qwen-Image-Edit model (for Qwen-Image-2.1, Qwen3-VL 8B), or encode "
        "without an image."
    )


def tokenizer_class(
    tokenizer: FolderTokenizer, width: int, base: type[comfy.sd1_clip.SD1Tokenizer], name: str
) -> type[comfy.sd1_clip.SD1Tokenizer]:
    """Returns ComfyUI's tokenizer over the folder's vocabulary, for embeddings `width` wide."""

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


@dataclass(frozen=True)
class EncoderKind:
    name: str  # what ComfyUI calls it
    title: str
    config: Callable[..., Any]  # the published sizes
    vision_width: int  # of the vision tower in ComfyUI
    model: type[torch.nn.Module]
    clip_model: type[comfy.sd1_clip.SDClipModel]  # the class around `model`
    te: Callable[..., type]
    tokenizer: type[comfy.sd1_clip.SD1Tokenizer]
    # from what `te` returns, and a folder's tokenizer, to a class that cuts off the chat template
    # by that tokenizer's ids
    own_encoder: Callable[[type, FolderTokenizer], type]
    fixed: Mapping[str, Any] = field(default_factory=dict)  # what else its class is given
    nested: bool = False  # whether ComfyUI recognizes a file by nested names of the vision tower
    # whether ComfyUI cuts off as many tokens as Qwen-Image's template has
    fixed_prefix: bool = False


class HostEncoder(NamedTuple):
    """Gives ComfyUI's side of a text encoder."""

    kind: Callable[[], EncoderKind]  # makes its `EncoderKind`, where this ComfyUI has it
    is_one: Callable[[object], bool]  # tells whether a CLIP's `cond_stage_model` is one


def kind_of(source: Source) -> EncoderKind:
    """Returns what a file is loaded with."""
    encoder = text_encoder_titled(source.part.family)
    require(family_with(encoder), source.path)
    return load(encoder.comfyui).kind()


def text_only_class(
    base: type[comfy.sd1_clip.SDClipModel], pad: int
) -> type[comfy.sd1_clip.SDClipModel]:
    """Returns a class of ComfyUI's without the vision tower; `pad` pads the tokenizer's ids."""

    class TextOnly(base):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.special_tokens = {"pad": pad}
            del self.transformer.visual
            # ComfyUI would leave images out of the prompt without a word.
            kind, own = type(self.transformer), {"preprocess_embed": refuse_images}
            put(self.transformer, __class__=type(kind.__name__, (kind,), own))

    return TextOnly


# Qwen2.5-VL 7B, and Qwen3-VL 8B for Qwen-Image-2.1.

NAME = "qwen25_7b"  # what ComfyUI's Qwen-Image classes call this encoder


def encoder_class(
    base: type[QwenImageTEModel], tokenizer: FolderTokenizer
) -> type[QwenImageTEModel]:
    """Returns `base`, which is ComfyUI's, cutting off the template by the folder's ids."""

    class Encoder(base):
        def encode_token_weights(
            self, token_weight_pairs: dict[str, Any], template_end: int = -1
        ) -> Any:
            if template_end == -1:
                ids = [pair[0] for pair in token_weight_pairs[NAME][0]]
                template_end = end_of_template(ids, tokenizer)
            return super().encode_token_weights(token_weight_pairs, template_end=template_end)

    return Encoder


def _is_qwen3_vl(encoder: object) -> bool:
    hosts = (kind.__module__ for kind in type(encoder).__mro__)
    module = next((it for it in hosts if it.startswith("comfy.")), None)
    return module == "comfy.text_encoders.qwen_image21"


def _is_qwen25_vl(encoder: object) -> bool:
    # Other models' text encoders are classes over it, in modules of their own.
    own = QwenImageTEModel.__module__
    others = (kind for kind in type(encoder).__mro__ if issubclass(kind, QwenImageTEModel))
    return isinstance(encoder, QwenImageTEModel) and not any(
        kind.__module__.startswith("comfy.") and kind.__module__ != own for kind in others
    )


KIND_OF_QWEN25 = EncoderKind(
    name=NAME,
    title="Qwen2.5-VL",
    config=Qwen25_7BVLI_Config,
    vision_width=1280,
    model=Qwen25_7BVLI,
    clip_model=comfy.text_encoders.qwen_image.Qwen25_7BVLIModel,
    te=comfy.text_encoders.qwen_image.te,
    tokenizer=QwenImageTokenizer,
    own_encoder=encoder_class,
    fixed_prefix=True,
)


@cached
def _qwen3_vl() -> EncoderKind:
    from comfy.text_encoders import qwen3vl, qwen_image21

    name = "qwen3vl_8b"
    config = qwen3vl.QWEN3VL_CONFIGS[name]

    def own_encoder(base: type, tokenizer: FolderTokenizer) -> type:
        class Encoder(base):
            def encode_token_weights(self, token_weight_pairs: dict[str, Any]) -> Any:
                encode = comfy.sd1_clip.SD1ClipModel.encode_token_weights
                out, pooled, extra = encode(self, token_weight_pairs)
                ids = [pair[0] for pair in token_weight_pairs[name][0]]
                starts = [at for at, token in enumerate(ids) if is_token(token, tokenizer.start)]
                cut = starts[1] if len(starts) > 1 else 0
                mask = extra.pop("attention_mask")[:, cut:]
                if not mask.all():
                    extra["attention_mask"] = mask
                return out[:, cut:], pooled, extra

        return Encoder

    return EncoderKind(
        name=name,
        title="Qwen3-VL 8B",
        config=config,
        fixed={"lm_head": False},
        vision_width=qwen3vl.QWEN3VL_VISION[name]["hidden_size"],
        model=qwen3vl.Qwen3VL,
        clip_model=qwen_image21.QwenImage21Qwen3VLClipModel,
        te=qwen_image21.te,
        tokenizer=qwen_image21.QwenImage21Tokenizer,
        own_encoder=own_encoder,
        nested=True,
    )


QWEN25_VL = HostEncoder(lambda: KIND_OF_QWEN25, _is_qwen25_vl)
QWEN3_VL = HostEncoder(_qwen3_vl, _is_qwen3_vl)
