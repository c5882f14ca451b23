"""The micro model through ComfyUI's sampler against diffusers' pipeline: the same noise, sigmas and
text embeddings, in fp32.

Needs a ComfyUI that COMFYUI_PATH names, or one in ~/ComfyUI; without one these tests say so.
"""

import json
from pathlib import Path

import pytest
import torch
from comfyui_host import run_in_comfyui
from diffusers import QwenImagePipeline
from safetensors.torch import save_file

ROOT = Path(__file__).resolve().parent.parent
PROMPT = "a large green circle at the bottom right on a white background"


@torch.inference_mode()
def reference(folder: Path) -> dict[str, torch.Tensor]:
    """Inputs, and what diffusers makes of them: one forward, and 20 steps at 256 x 256."""
    pipe = QwenImagePipeline.from_pretrained(folder, local_files_only=True).to(torch.float32)
    pipe.set_progress_bar_config(disable=True)
    noise = torch.randn(1, 16, 1, 32, 32, generator=torch.Generator().manual_seed(3))
    packed = pipe._pack_latents(noise[:, :, 0], 1, 16, 32, 32)
    positive, negative = pipe.encode_prompt(PROMPT)[0], pipe.encode_prompt(" ")[0]

    def sample(cfg: float) -> torch.Tensor:
        latents = pipe(
            prompt_embeds=positive,
            prompt_embeds_mask=torch.ones(positive.shape[:2], dtype=torch.long),
            negative_prompt_embeds=negative if cfg > 1 else None,
            negative_prompt_embeds_mask=torch.ones(negative.shape[:2], dtype=torch.long),
            true_cfg_scale=cfg,
            width=256,
            height=256,
            num_inference_steps=20,
            latents=packed.clone(),
            output_type="latent",
        ).images
        return pipe._unpack_latents(latents, 256, 256, 8).contiguous()

    sigma = torch.tensor([0.7])
    velocity = pipe.transformer(
        hidden_states=packed,
        encoder_hidden_states=positive,
        timestep=sigma,
        img_shapes=[[(1, 16, 16)]],
        encoder_hidden_states_mask=None,
        return_dict=False,
    )[0]
    known = {"cfg 1": sample(1.0), "cfg 4": sample(4.0)}
    return known | {
        "noise": noise,
        "positive": positive.clone(),
        "negative": negative.clone(),
        "sigma": sigma,
        "sigmas": pipe.scheduler.sigmas.clone(),
        "velocity": pipe._unpack_latents(velocity, 256, 256, 8).contiguous(),
    }


@pytest.fixture(scope="module")
def differences(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> dict[str, float]:
    file = tmp_path_factory.mktemp("sampling") / "reference.safetensors"
    save_file(reference(ROOT / "models" / "micro"), file)
    return json.loads(run_in_comfyui("comfyui_sampling.py", file).splitlines()[-1])


def test_one_forward_is_the_same(differences):
    assert differences["velocity"] <= 1e-4


def test_the_final_latent_is_the_same_without_guidance(differences):
    assert differences["cfg 1"] <= 1e-2


def test_the_final_latent_is_the_same_with_guidance_and_our_cfgnorm(differences):
    assert differences["token norms at odd sides"] <= 1e-6
    assert differences["cfg 4, our CFGNorm"] <= 1e-2


def test_core_s_cfgnorm_comes_near_and_plain_guidance_does_not(differences):
    """CFGNorm takes the norms of single pixels, diffusers those of tokens of 2 x 2 pixels."""
    assert 1e-3 < differences["cfg 4, ComfyUI's CFGNorm"] <= 0.03
    assert differences["cfg 4, not rescaled"] > 0.1
