"""Runs in ComfyUI's own Python: its classes on the weights and inputs that diffusers' classes had.

    python comfyui_parity.py COMFYUI REFERENCE.safetensors MODEL_FOLDER NATIVE_VAE.safetensors

REFERENCE holds fp32 inputs and what diffusers made of them (see test_host_parity.py). The weights
are the folder's own files; only the VAE has native names. Prints one JSON object: the largest
absolute difference of each part, all in fp32 on the CPU.
"""

import json

import comfyui_boot

REFERENCE, FOLDER, NATIVE_VAE = comfyui_boot.ARGUMENTS
comfyui_boot.start("--cpu")

import comfy.latent_formats
import comfy.ops
import comfy.sd
import torch
from comfy.ldm.qwen_image.model import QwenImageTransformer2DModel
from comfy.text_encoders.llama import Llama2_, Qwen25_7BVLI_Config
from safetensors.torch import load_file

FP32_ON_CPU = {"device": "cpu", "dtype": torch.float32}


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


@torch.inference_mode()
def differences() -> dict[str, float]:
    known = load_file(REFERENCE)
    mask = torch.ones_like(known["ids"], dtype=torch.float32)
    embeddings = text_encoder()(known["ids"], attention_mask=mask)[0]
    velocity = transformer()(
        known["latents"], known["sigma"], known["prompt"], transformer_options={}
    )
    vae = comfy.sd.VAE(sd=load_file(NATIVE_VAE))
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
    return {name: (value - known[name]).abs().max().item() for name, value in found.items()}


if __name__ == "__main__":
    print(json.dumps(differences()))
