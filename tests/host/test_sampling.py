"""The micro model, loaded by this package and sampled by ComfyUI, against diffusers: same noise,
sigmas and text embeddings, in fp32.
"""

import functools

import comfy.model_management
import comfy.sample
import comfy.samplers
import pytest
import torch
from comfy_extras.nodes_cfg import CFGNorm
from comfyui_boot import ROOT
from diffusers import QwenImagePipeline

from qwen_l40s.hosts.comfyui.load.transformer import load_model
from qwen_l40s.hosts.comfyui.sample.cfg_norm import token_norms
from qwen_l40s.nodes.optimize import QwenL40SCFGNorm

pytestmark = pytest.mark.usefixtures("inference_mode")
MICRO = ROOT / "models" / "micro"
PROMPT = "a large green circle at the bottom right on a white background"


@functools.cache
def reference() -> dict[str, torch.Tensor]:
    """Inputs, and what diffusers makes of them: one forward, and 20 steps at 256 x 256."""
    pipe = QwenImagePipeline.from_pretrained(MICRO, local_files_only=True).to(torch.float32)
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


@functools.cache
def model():
    return load_model(MICRO)[0]


def sample(patched, cfg):
    known = reference()
    latents = comfy.sample.sample_custom(
        patched,
        known["noise"],
        cfg,
        comfy.samplers.sampler_object("euler"),
        known["sigmas"],
        [[known["positive"], {}]],
        [[known["negative"], {}]],
        torch.zeros_like(known["noise"]),
        disable_pbar=True,
    )
    return model().model.process_latent_in(latents)


def difference(found, known):
    return float((found - known).norm() / known.norm())


def test_one_forward_is_the_same():
    known = reference()
    comfy.model_management.load_models_gpu([model()])
    velocity = model().model.diffusion_model(
        known["noise"], known["sigma"], known["positive"], transformer_options={}
    )
    assert difference(velocity, known["velocity"]) <= 1e-4


def test_the_final_latent_is_the_same_without_guidance():
    assert difference(sample(model(), 1.0), reference()["cfg 1"]) <= 1e-2


def test_the_final_latent_is_the_same_with_guidance_and_our_cfgnorm():
    exact = QwenL40SCFGNorm.execute(model()).result[0]
    assert difference(sample(exact, 4.0), reference()["cfg 4"]) <= 1e-2


def test_norms_of_tokens_at_odd_sides():
    odd = torch.randn(2, 16, 1, 5, 7, generator=torch.Generator().manual_seed(1))
    tokens = torch.nn.functional.pad(odd, (0, 1, 0, 1)).unfold(3, 2, 2).unfold(4, 2, 2)
    norms = tokens.square().sum(dim=(1, -1, -2)).sqrt()[:, None]
    spread = norms.repeat_interleave(2, -1).repeat_interleave(2, -2)[..., :5, :7]
    assert difference(token_norms(odd), spread) <= 1e-6


def test_core_s_cfgnorm_comes_near_and_plain_guidance_does_not():
    """CFGNorm takes the norms of single pixels, diffusers those of tokens of 2 x 2 pixels."""
    normed = CFGNorm.execute(model(), 1.0, pre_cfg=True).result[0]
    known = reference()["cfg 4"]
    assert 1e-3 < difference(sample(normed, 4.0), known) <= 0.03
    assert difference(sample(model(), 4.0), known) > 0.1
