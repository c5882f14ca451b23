"""Qwen3-VL in ComfyUI 0.37 and newer: what `encoder_kind` asks of Qwen-Image-2.1's text encoder."""

from __future__ import annotations

from functools import partial
from typing import Any

import comfy.sd1_clip
from comfy.text_encoders.qwen3vl import QWEN3VL_CONFIGS, QWEN3VL_VISION, Qwen3VL
from comfy.text_encoders.qwen_image21 import (
    QwenImage21Qwen3VLClipModel,
    QwenImage21TEModel,
    QwenImage21Tokenizer,
    te,
)

from .encoder_kind import EncoderKind, TextOnly, text_only_class
from .tokenizer import FolderTokenizer, is_token

NAME = "qwen3vl_8b"


class TextOnlyQwen3VL(TextOnly, Qwen3VL):
    """Stands in for ComfyUI's `Qwen3VL`."""

    sizes = property(lambda self: QWEN3VL_CONFIGS[NAME])


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
    around = {"base": QwenImage21Qwen3VLClipModel, "layer": "hidden", "layer_idx": -1}
    return EncoderKind(
        name=NAME,
        title="Qwen3-VL 8B",
        config=QWEN3VL_CONFIGS[NAME],
        fixed={"lm_head": False},
        vision_width=QWEN3VL_VISION[NAME]["hidden_size"],
        model=Qwen3VL,
        text_only=TextOnlyQwen3VL,
        text_only_clip=partial(text_only_class, TextOnlyQwen3VL, **around),
        te=te,
        tokenizer=QwenImage21Tokenizer,
        own_encoder=own_encoder,
        nested=True,
    )
