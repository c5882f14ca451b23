"""ComfyUI's classes compute from a small 2.1 what diffusers' classes compute, in fp32."""

import json

import comfy.latent_formats
import comfy.ops
import comfy.sd
import pytest
import torch
from comfy.text_encoders.llama import Llama2_
from micro_models import FOLDER as MICRO_21
from micro_models import build_21, hidden_states, velocity

pytestmark = pytest.mark.usefixtures("inference_mode")
TOLERANCE = 1e-4
FP32_ON_CPU = {"device": "cpu", "dtype": torch.float32}

# What ComfyUI does not fix of a Qwen3-VL's language model, and its `lm_head`.
TEXT_DIMS = (
    *("hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads"),
)


@pytest.mark.host_has("comfy.model_base.QwenImage21")
def test_comfyui_recognizes_and_computes_the_micro_21(monkeypatch):
    """Its dims, with weights that let the text through.

    Sub-quadratic attention, ComfyUI's choice for a CPU, adds the causal mask of 2.1's text as 0 and
    1, so that text sees what follows it: the outputs then differ by 0.2.
    """
    from comfy.ldm.modules.attention import attention_pytorch
    from comfy.ldm.qwen_image21 import model as native
    from comfy.model_detection import detect_unet_config
    from comfy.text_encoders.llama import Qwen3VL_8BConfig

    model = build_21()
    for weight in model.transformer.parameters():
        if weight.ndim == 2:
            torch.nn.init.normal_(weight, std=0.08)
    language = model.text_encoder.model.language_model
    ids, mask, sigma = torch.arange(9)[None], torch.ones(1, 9), torch.tensor([0.7])
    latents = torch.randn(1, 64, 16, 16)
    hidden = hidden_states(language, ids)
    tokens = latents.flatten(2).transpose(1, 2)
    known = velocity(model.transformer, tokens, sigma, hidden, mask.bool())

    weights = model.transformer.state_dict()
    dims = detect_unet_config(weights, "")
    assert dims["image_model"] == "qwen_image21"
    monkeypatch.setattr(native, "optimized_attention", attention_pytorch)
    transformer = native.QwenImage21Transformer2DModel(
        **dims, operations=comfy.ops.manual_cast, **FP32_ON_CPU
    )
    transformer.load_state_dict(weights)
    text = {name: getattr(language.config, name) for name in TEXT_DIMS}
    text |= {"vocab_size": language.vocab_size, "lm_head": False}
    encoder = Llama2_(Qwen3VL_8BConfig(**text), ops=comfy.ops.manual_cast, **FP32_ON_CPU)
    encoder.load_state_dict(language.state_dict())
    last = {"intermediate_output": text["num_hidden_layers"] - 1}
    _, features, *_ = encoder(ids, mask, **last, final_layer_norm_intermediate=False)
    torch.testing.assert_close(features, hidden, atol=TOLERANCE, rtol=0)
    found = transformer(latents, sigma, features, transformer_options={})
    known = known.transpose(1, 2).reshape(latents.shape)
    torch.testing.assert_close(found, known, atol=TOLERANCE, rtol=0)
    assert known.std() > 0.1
    statistics = comfy.latent_formats.QwenImage21()
    vae = json.loads((MICRO_21 / "vae" / "config.json").read_text(encoding="utf-8"))
    assert statistics.latents_mean.flatten().tolist() == pytest.approx(vae["latents_mean"])
    assert statistics.latents_std.flatten().tolist() == pytest.approx(vae["latents_std"])
