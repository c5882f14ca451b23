"""Both hosts compute the same from the micro model: ComfyUI's classes against diffusers', in fp32.

Needs a ComfyUI: the one that `qwen-l40s doctor` finds, through COMFYUI_PATH or in ~/ComfyUI. Its
own .venv runs it where it has one, else this Python, which then needs ComfyUI's requirements.
"""

import json
from pathlib import Path

import torch
from comfyui_host import comfyui_folder, run_in_comfyui
from diffusers import QwenImagePipeline
from safetensors.torch import save_file

from qwen_l40s.loaders.convert import vae_name_to_native

FOLDER = Path(__file__).resolve().parent.parent / "models" / "micro"
TOLERANCE = 1e-4


@torch.inference_mode()
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


def test_comfyui_computes_what_diffusers_computes(tmp_path):
    comfyui_folder()
    pipeline = QwenImagePipeline.from_pretrained(FOLDER, local_files_only=True).to(torch.float32)
    known = reference(pipeline)
    for name in ("embeddings", "velocity", "decoded", "encoded"):
        assert known[name].std() > 0.01, f"{name} says nothing: it is almost constant"
    expected, vae = tmp_path / "reference.safetensors", tmp_path / "vae.safetensors"
    save_file(known, expected)
    native = {vae_name_to_native(name): w for name, w in pipeline.vae.state_dict().items()}
    save_file(native, vae)
    printed = run_in_comfyui("comfyui_parity.py", expected, FOLDER, vae)
    differences = json.loads(printed.splitlines()[-1])
    assert len(differences) == 6
    assert {part: d for part, d in differences.items() if not d <= TOLERANCE} == {}
