"""The published text encoder without its weights."""

from __future__ import annotations

from accelerate import init_empty_weights
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration


def published_shapes() -> dict[str, list[int]]:
    """Names and shapes of the published Qwen2.5-VL 7B, by transformers 5."""
    config = Qwen2_5_VLConfig()
    text, vision = config.text_config, config.vision_config
    text.hidden_size, text.intermediate_size, text.num_hidden_layers = 3584, 18944, 28
    text.num_attention_heads, text.num_key_value_heads, text.vocab_size = 28, 4, 152064
    text.layer_types = text.layer_types[:28]
    vision.hidden_size, vision.intermediate_size, vision.out_hidden_size = 1280, 3420, 3584
    with init_empty_weights(include_buffers=True):
        model = Qwen2_5_VLForConditionalGeneration(config)
    return {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
