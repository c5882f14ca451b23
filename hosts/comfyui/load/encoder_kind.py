"""Builds text encoders of ComfyUI's classes. Sizes can be set; the vision tower is built whole. A
model folder's own tokenizer replaces the published one, and the end of the chat template is found
by its ids.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import comfy.sd1_clip
import comfy.text_encoders.qwen_image
import torch
from comfy.text_encoders.llama import BaseLlama, Llama2_, Qwen25_7BVLI, Qwen25_7BVLI_Config
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

START = "<|im_start|>"
USER = "user\n"


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


def find_tokenizer(source: Source, vocabulary: int, fixed_prefix: bool) -> FolderTokenizer:
    """Finds the tokenizer of a text encoder: in `tokenizer/` or `processor/` next to its folder, or
    with it.

    Args:
        vocabulary: Rows of the embedding.
        fixed_prefix: As of `EncoderKind`.

    Raises:
        CheckpointError: there is none or it is broken, it has more tokens than the embedding has
            rows, or it cuts the chat template into another number of tokens than Qwen-Image's.
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
    """Returns whether it is that id, and no image or textual inversion."""
    return not torch.is_tensor(token) and token == expected


def refuse_images() -> None:
    """Raises UnavailableError: the prompt has an image and nothing here can see it."""
    raise UnavailableError(
        "This text encoder has no vision tower, so it cannot read the image in the prompt: load "
        "the text encoder of a Qwen-Image-Edit model (for Qwen-Image-2.1, Qwen3-VL 8B), or encode "
        "without an image."
    )


def tokenizer_class(
    tokenizer: FolderTokenizer, width: int, base: type[comfy.sd1_clip.SD1Tokenizer], name: str
) -> type[comfy.sd1_clip.SD1Tokenizer]:
    """Returns ComfyUI's tokenizer over the folder's vocabulary, for embeddings `width` wide.

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


@dataclass(frozen=True)
class EncoderKind:
    """One of the text encoders.

    Attributes:
        name: What ComfyUI calls it.
        title: The same for people.
        config: The published sizes.
        fixed: What else its class is told.
        vision_width: Of the vision tower in ComfyUI.
        model: The module; `text_only` without the vision tower.
        text_only_clip: From the id of the padding to the class around `text_only`.
        te: ComfyUI's function of that name.
        tokenizer: ComfyUI's class.
        own_encoder: From what `te` returns, and a folder's tokenizer, to a class that cuts off the
            chat template by that tokenizer's ids.
        nested: Whether ComfyUI recognizes a file by nested names of the vision tower.
        fixed_prefix: Whether ComfyUI cuts off as many tokens as Qwen-Image's template has.
    """

    name: str
    title: str
    config: Callable[..., Any]
    vision_width: int
    model: type[torch.nn.Module]
    text_only: type[torch.nn.Module]
    text_only_clip: Callable[[int], type[comfy.sd1_clip.SDClipModel]]
    te: Callable[..., type]
    tokenizer: type[comfy.sd1_clip.SD1Tokenizer]
    own_encoder: Callable[[type, FolderTokenizer], type]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    nested: bool = False
    fixed_prefix: bool = False


class HostEncoder(NamedTuple):
    """Gives ComfyUI's side of a text encoder.

    Attributes:
        kind: Makes its `EncoderKind`, where this ComfyUI has it.
        is_one: Tells whether a CLIP's `cond_stage_model` is one.
    """

    kind: Callable[[], EncoderKind]
    is_one: Callable[[object], bool]


def kind_of(source: Source) -> EncoderKind:
    """Returns what a file is loaded with.

    Raises:
        UnavailableError: this ComfyUI is older than the model.
    """
    encoder = text_encoder_titled(source.part.family)
    require(family_with(encoder), source.path)
    return load(encoder.comfyui).kind()


class TextOnly:
    """The language model as a class of ComfyUI's has it, without the vision tower."""

    sizes: Callable[..., Any]

    def __init__(
        self,
        config_dict: Mapping[str, Any],
        dtype: torch.dtype | None,
        device: torch.device | str | None,
        operations: Any,
    ) -> None:
        torch.nn.Module.__init__(self)  # type: ignore[arg-type]
        config = self.sizes(**config_dict)
        self.num_layers = config.num_hidden_layers
        self.model = Llama2_(config, device=device, dtype=dtype, ops=operations)
        self.dtype = dtype

    def preprocess_embed(self, embed: Mapping[str, Any], device: torch.device) -> None:
        """Refuses images, which the host would leave out of the prompt without a word."""
        refuse_images()


def text_only_class(
    model: type[TextOnly],
    pad: int,
    base: type[comfy.sd1_clip.SDClipModel] = comfy.sd1_clip.SDClipModel,
    **more: Any,
) -> type[comfy.sd1_clip.SDClipModel]:
    """Returns the class that replaces ComfyUI's around a model; `pad` pads the tokenizer's ids."""

    class TextOnlyModel(base):
        def __init__(
            self,
            device: torch.device | str = "cpu",
            dtype: torch.dtype | None = None,
            model_options: Mapping[str, Any] | None = None,
        ) -> None:
            comfy.sd1_clip.SDClipModel.__init__(
                self,
                device=device,
                textmodel_json_config={},
                dtype=dtype,
                special_tokens={"pad": pad},
                layer_norm_hidden_state=False,
                model_class=model,
                enable_attention_masks=True,
                return_attention_masks=True,
                model_options=model_options or {},
                **more,
            )
            self.image_spans: list[Any] = []  # which Qwen3-VL's reads

    return TextOnlyModel


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


class TextOnlyQwen25(TextOnly, BaseLlama, torch.nn.Module):
    """Stands in for ComfyUI's `Qwen25_7BVLI`."""

    sizes = Qwen25_7BVLI_Config


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
    text_only=TextOnlyQwen25,
    text_only_clip=partial(text_only_class, TextOnlyQwen25),
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

    class TextOnlyQwen3VL(TextOnly, qwen3vl.Qwen3VL):
        """Stands in for ComfyUI's `Qwen3VL`."""

        sizes = staticmethod(config)

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

    around = {"base": qwen_image21.QwenImage21Qwen3VLClipModel, "layer": "hidden", "layer_idx": -1}
    return EncoderKind(
        name=name,
        title="Qwen3-VL 8B",
        config=config,
        fixed={"lm_head": False},
        vision_width=qwen3vl.QWEN3VL_VISION[name]["hidden_size"],
        model=qwen3vl.Qwen3VL,
        text_only=TextOnlyQwen3VL,
        text_only_clip=partial(text_only_class, TextOnlyQwen3VL, **around),
        te=qwen_image21.te,
        tokenizer=qwen_image21.QwenImage21Tokenizer,
        own_encoder=own_encoder,
        nested=True,
    )


QWEN25_VL = HostEncoder(lambda: KIND_OF_QWEN25, _is_qwen25_vl)
QWEN3_VL = HostEncoder(_qwen3_vl, _is_qwen3_vl)
