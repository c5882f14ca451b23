"""What of ComfyUI the text encoders are built with: Qwen2.5-VL, and Qwen3-VL for Qwen-Image-2.1.

ComfyUI's classes are the published 7B and 8B. Their sizes can be set; the vision tower, 1280 wide
with 32 blocks in the 7B, is always built.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import comfy.sd1_clip
import comfy.text_encoders.qwen_image
import torch
from comfy.text_encoders.llama import BaseLlama, Llama2_, Qwen25_7BVLI, Qwen25_7BVLI_Config
from comfy.text_encoders.qwen_image import QwenImageTokenizer

from ....loaders.parts import QWEN3_VL
from ....loaders.source import Source
from ..contract import require_21
from .tokenizer import FolderTokenizer, encoder_class, is_token, refuse_images


@dataclass(frozen=True)
class EncoderKind:
    """One of them.

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


def kind_of(source: Source) -> EncoderKind:
    """What a file is loaded with.

    Raises:
        UnavailableError: this ComfyUI is older than the model.
    """
    if not source.part.family.startswith(QWEN3_VL):
        return QWEN25
    require_21(source.path)
    return _qwen3_vl()


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
        torch.nn.Module.__init__(self)
        config = self.sizes(**config_dict)
        self.num_layers = config.num_hidden_layers
        self.model = Llama2_(config, device=device, dtype=dtype, ops=operations)
        self.dtype = dtype

    def preprocess_embed(self, embed: Mapping[str, Any], device: torch.device) -> None:
        """Refuses images, which the host would leave out of the prompt without a word."""
        refuse_images()


class TextOnlyQwen25(TextOnly, BaseLlama, torch.nn.Module):
    """Stands in for ComfyUI's `Qwen25_7BVLI`."""

    sizes = Qwen25_7BVLI_Config


def text_only_class(
    model: type[TextOnly],
    pad: int,
    base: type[comfy.sd1_clip.SDClipModel] = comfy.sd1_clip.SDClipModel,
    **more: Any,
) -> type[comfy.sd1_clip.SDClipModel]:
    """The class that replaces ComfyUI's around a model; `pad` is its tokenizer's padding."""

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
            self.image_spans = []  # which Qwen3-VL's reads

    return TextOnlyModel


QWEN25 = EncoderKind(
    name="qwen25_7b",
    title="Qwen2.5-VL",
    config=Qwen25_7BVLI_Config,
    vision_width=1280,
    model=Qwen25_7BVLI,
    text_only=TextOnlyQwen25,
    text_only_clip=partial(text_only_class, TextOnlyQwen25),
    te=comfy.text_encoders.qwen_image.te,
    tokenizer=QwenImageTokenizer,
    own_encoder=encoder_class,
)


def _qwen3_vl() -> EncoderKind:
    """Qwen3-VL in the sizes that ComfyUI has, since 0.37."""
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
