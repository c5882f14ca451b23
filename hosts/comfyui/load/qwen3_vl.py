"""Qwen3-VL in ComfyUI 0.37 and newer: what `encoder_kind` asks of Qwen-Image-2.1's text encoder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import comfy.sd1_clip
import torch
from comfy.text_encoders.llama import Llama2_
from comfy.text_encoders.qwen3vl import QWEN3VL_CONFIGS, QWEN3VL_VISION, Qwen3VL
from comfy.text_encoders.qwen_image21 import (
    QwenImage21Qwen3VLClipModel,
    QwenImage21TEModel,
    QwenImage21Tokenizer,
    te,
)

from .encoder_kind import EncoderKind
from .tokenizer import FolderTokenizer, is_token, refuse_images

NAME = "qwen3vl_8b"


class TextOnlyQwen3VL(Qwen3VL):
    """The language model as ComfyUI's `Qwen3VL` has it, without the vision tower."""

    def __init__(
        self,
        config_dict: Mapping[str, Any],
        dtype: torch.dtype | None,
        device: torch.device | str | None,
        operations: Any,
    ) -> None:
        torch.nn.Module.__init__(self)
        config = QWEN3VL_CONFIGS[NAME](**config_dict)
        self.num_layers = config.num_hidden_layers
        self.model = Llama2_(config, device=device, dtype=dtype, ops=operations)
        self.dtype = dtype

    def preprocess_embed(self, embed: Mapping[str, Any], device: torch.device) -> None:
        """Refuses images, which the host would leave out of the prompt without a word."""
        refuse_images()


def text_only_class(pad: int) -> type[comfy.sd1_clip.SDClipModel]:
    """The class that replaces ComfyUI's around `TextOnlyQwen3VL`."""

    class TextOnlyModel(QwenImage21Qwen3VLClipModel):
        def __init__(
            self,
            device: torch.device | str = "cpu",
            dtype: torch.dtype | None = None,
            model_options: Mapping[str, Any] | None = None,
        ) -> None:
            comfy.sd1_clip.SDClipModel.__init__(
                self,
                device=device,
                layer="hidden",
                layer_idx=-1,
                textmodel_json_config={},
                dtype=dtype,
                special_tokens={"pad": pad},
                layer_norm_hidden_state=False,
                model_class=TextOnlyQwen3VL,
                enable_attention_masks=True,
                return_attention_masks=True,
                model_options=model_options or {},
            )
            self.image_spans = []

    return TextOnlyModel


def own_encoder(
    base: type[QwenImage21TEModel], tokenizer: FolderTokenizer
) -> type[QwenImage21TEModel]:
    """`base`, which is ComfyUI's, cutting off the system turn by the folder's ids."""

    class Encoder(base):
        def encode_token_weights(self, token_weight_pairs: dict[str, Any]) -> Any:
            encode = comfy.sd1_clip.SD1ClipModel.encode_token_weights
            out, pooled, extra = encode(self, token_weight_pairs)
            ids = [pair[0] for pair in token_weight_pairs[NAME][0]]
            starts = [place for place, token in enumerate(ids) if is_token(token, tokenizer.start)]
            cut = starts[1] if len(starts) > 1 else 0
            mask = extra.pop("attention_mask")[:, cut:]
            if not mask.all():
                extra["attention_mask"] = mask
            return out[:, cut:], pooled, extra

    return Encoder


def qwen3_vl() -> EncoderKind:
    """It, in the sizes that ComfyUI has."""
    return EncoderKind(
        name=NAME,
        title="Qwen3-VL 8B",
        config=QWEN3VL_CONFIGS[NAME],
        fixed={"lm_head": False},
        vision_width=QWEN3VL_VISION[NAME]["hidden_size"],
        model=Qwen3VL,
        text_only=TextOnlyQwen3VL,
        text_only_clip=text_only_class,
        te=te,
        tokenizer=QwenImage21Tokenizer,
        own_encoder=own_encoder,
        nested=True,
    )
