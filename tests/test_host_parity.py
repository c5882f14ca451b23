"""Both hosts compute the same from the micro model: ComfyUI's classes against diffusers', in fp32.

Needs a ComfyUI: the one that `qwen-l40s doctor` finds, through COMFYUI_PATH or in ~/ComfyUI. Its
own .venv runs it where it has one, else this Python, which then needs ComfyUI's requirements.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from diffusers import QwenImagePipeline
from safetensors.torch import save_file

from qwen_l40s.loaders.convert import vae_name_to_native
from qwen_l40s.optimizations.software import find_comfyui

TESTS = Path(__file__).resolve().parent
FOLDER = TESTS.parent / "models" / "micro"
TOLERANCE = 1e-4


def comfyui() -> Path:
    """ComfyUI's folder; skips the test where there is none."""
    folder = find_comfyui() or Path.home() / "ComfyUI"
    if not (folder / "comfy" / "sd.py").is_file():
        pytest.skip(f"no ComfyUI in {folder}: name one with COMFYUI_PATH")
    return folder


def run_in_comfyui(*arguments: Path) -> dict[str, float]:
    """What comfyui_parity.py prints; skips the test where ComfyUI's requirements are missing."""
    folder = comfyui()
    own = folder / ".venv" / "bin" / "python"
    command = [own if own.exists() else sys.executable, TESTS / "comfyui_parity.py", folder]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)
    missing = re.search(
        r"ModuleNotFoundError: No module named '(?!comfy[.'])([\w.]+)'", done.stderr
    )
    if missing:
        pytest.skip(f"{command[0]} cannot run the ComfyUI in {folder}: it has no {missing[1]}")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


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
    comfyui()
    pipeline = QwenImagePipeline.from_pretrained(FOLDER, local_files_only=True).to(torch.float32)
    known = reference(pipeline)
    for name in ("embeddings", "velocity", "decoded", "encoded"):
        assert known[name].std() > 0.01, f"{name} says nothing: it is almost constant"
    expected, vae = tmp_path / "reference.safetensors", tmp_path / "vae.safetensors"
    save_file(known, expected)
    native = {vae_name_to_native(name): w for name, w in pipeline.vae.state_dict().items()}
    save_file(native, vae)
    differences = run_in_comfyui(expected, FOLDER, vae)
    assert len(differences) == 6
    assert {part: d for part, d in differences.items() if not d <= TOLERANCE} == {}
