"""ComfyUI's classes compute from the micro models what diffusers' classes compute, in fp32."""

import json

import comfy.latent_formats
import comfy.ops
import comfy.sd
import pytest
import torch
from comfy.ldm.qwen_image.model import QwenImageTransformer2DModel
from comfy.text_encoders.llama import Llama2_, Qwen25_7BVLI_Config
from comfyui_boot import ROOT
from diffusers import QwenImagePipeline
from micro_models import FOLDER as MICRO_21
from micro_models import build_21, hidden_states, velocity
from safetensors.torch import load_file

from qwen_l40s.families.parts import vae_name_to_native

pytestmark = pytest.mark.usefixtures("inference_mode")
FOLDER = ROOT / "models" / "micro"
TOLERANCE = 1e-4
FP32_ON_CPU = {"device": "cpu", "dtype": torch.float32}

# What ComfyUI does not fix of a Qwen3-VL's language model, and its `lm_head`.
TEXT_DIMS = (
    *("hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads"),
)


def config(part: str) -> dict:
    return json.loads((FOLDER / part / "config.json").read_text(encoding="utf-8"))


def text_encoder() -> torch.nn.Module:
    names = "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads"
    dims = config("text_encoder")["text_config"]
    dims = {name: dims[name] for name in (*names.split(), "num_key_value_heads")}
    model = Llama2_(Qwen25_7BVLI_Config(**dims), ops=comfy.ops.manual_cast, **FP32_ON_CPU)
    weights = load_file(FOLDER / "text_encoder" / "model.safetensors")
    language = {
        name.removeprefix("model."): weight
        for name, weight in weights.items()
        if name.startswith("model.")
    }
    model.load_state_dict(language)
    return model


def transformer() -> torch.nn.Module:
    dims = config("transformer")
    names = "in_channels num_layers attention_head_dim num_attention_heads joint_attention_dim"
    model = QwenImageTransformer2DModel(
        **{name: dims[name] for name in (*names.split(), "axes_dims_rope")},
        operations=comfy.ops.manual_cast,
        **FP32_ON_CPU,
    )
    model.load_state_dict(load_file(FOLDER / "transformer" / "diffusion_pytorch_model.safetensors"))
    return model


def reference(pipeline: QwenImagePipeline) -> dict[str, torch.Tensor]:
    """Inputs, and what diffusers' classes make of them: a prompt, one forward at 256 x 256."""
    template = pipeline.prompt_template_encode.format("a small red star at the top left")
    ids = pipeline.tokenizer(template, return_tensors="pt").input_ids
    embeddings = pipeline.text_encoder(ids, output_hidden_states=True).hidden_states[-1]
    prompt = embeddings[:, pipeline.prompt_template_encode_start_idx :].clone()
    noise = torch.Generator().manual_seed(0)
    latents = torch.randn(1, 16, 1, 32, 32, generator=noise)
    pixels = torch.rand(1, 3, 1, 64, 64, generator=noise) * 2 - 1
    sigma = torch.tensor([0.7])
    packed = pipeline.transformer(
        hidden_states=pipeline._pack_latents(latents[:, :, 0], 1, 16, 32, 32),
        encoder_hidden_states=prompt,
        timestep=sigma,
        img_shapes=[[(1, 16, 16)]],
        encoder_hidden_states_mask=None,
        return_dict=False,
    )[0]
    vae = pipeline.vae
    return {
        "ids": ids,
        "embeddings": embeddings,
        "prompt": prompt,
        "latents": latents,
        "sigma": sigma,
        "velocity": pipeline._unpack_latents(packed, 256, 256, 8),
        "decoded": vae.decode(latents).sample,
        "pixels": pixels,
        "encoded": vae.encode(pixels).latent_dist.mode(),
        "latents_mean": torch.tensor(vae.config.latents_mean),
        "latents_std": torch.tensor(vae.config.latents_std),
    }


def test_comfyui_computes_what_diffusers_computes():
    pipeline = QwenImagePipeline.from_pretrained(FOLDER, local_files_only=True).to(torch.float32)
    known = reference(pipeline)
    for name in ("embeddings", "velocity", "decoded", "encoded"):
        assert known[name].std() > 0.01, f"{name} says nothing: it is almost constant"
    native = {vae_name_to_native(name): w for name, w in pipeline.vae.state_dict().items()}
    mask = torch.ones_like(known["ids"], dtype=torch.float32)
    embeddings = text_encoder()(known["ids"], attention_mask=mask)[0]
    velocity = transformer()(
        known["latents"], known["sigma"], known["prompt"], transformer_options={}
    )
    vae = comfy.sd.VAE(sd=native)
    vae.throw_exception_if_invalid()
    vae = vae.first_stage_model.float()
    latents = comfy.latent_formats.Wan21()
    found = {
        "embeddings": embeddings,
        "velocity": velocity,
        "decoded": vae.decode(known["latents"]).clamp(-1, 1),
        "encoded": vae.encode(known["pixels"]),
        "latents_mean": latents.latents_mean.flatten(),
        "latents_std": latents.latents_std.flatten(),
    }
    differences = {name: (value - known[name]).abs().max() for name, value in found.items()}
    assert {part: d for part, d in differences.items() if not d <= TOLERANCE} == {}


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
