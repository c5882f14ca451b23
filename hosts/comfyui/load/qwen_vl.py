"""The text encoders in ComfyUI: Qwen2.5-VL 7B, and Qwen3-VL 8B for Qwen-Image-2.1."""

from __future__ import annotations

from functools import partial
from typing import Any

import comfy.sd1_clip
import comfy.text_encoders.qwen_image
import torch
from comfy.text_encoders.llama import BaseLlama, Qwen25_7BVLI, Qwen25_7BVLI_Config
from comfy.text_encoders.qwen_image import QwenImageTEModel, QwenImageTokenizer

from ....caches import cached
from .encoder_kind import (
    EncoderKind,
    FolderTokenizer,
    HostEncoder,
    TextOnly,
    end_of_template,
    is_token,
    text_only_class,
)

NAME = "qwen25_7b"  # what ComfyUI's Qwen-Image classes call this encoder


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


class TextOnlyQwen25(TextOnly, BaseLlama, torch.nn.Module):
    """Stands in for ComfyUI's `Qwen25_7BVLI`."""

    sizes = Qwen25_7BVLI_Config


def _is_qwen25_vl(encoder: object) -> bool:
    """Tells whether a CLIP's `cond_stage_model` is Qwen-Image's.

    Other models' text encoders are classes over it, in modules of their own.
    """
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
    """Describes Qwen3-VL in the sizes that ComfyUI has, since 0.37."""
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
QWEN3_VL = HostEncoder(
    _qwen3_vl, lambda encoder: type(encoder).__module__ == "comfy.text_encoders.qwen_image21"
)
