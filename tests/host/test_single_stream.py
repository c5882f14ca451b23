"""Qwen-Image-2.1 in ComfyUI: its blocks run fused beside ComfyUI's prefix cache."""

import comfy.model_base
import comfy.sample
import comfy.sd
import pytest
import torch
from narrow_21 import TEXT, random, weights_21

from qwen_l40s.hosts.comfyui.sample.optimize import OptimizeSettings, optimize, report_of

pytestmark = [
    pytest.mark.usefixtures("inference_mode"),
    pytest.mark.host_has("comfy.model_base.QwenImage21"),
]
EMPTY = torch.zeros(1, 64, 8, 8)


def model_21(fused=True):
    options = {"dtype": torch.float32}
    return comfy.sd.load_diffusion_model_state_dict(weights_21(fused=fused), model_options=options)


def sample(model, steps=3, cfg=1.0, batch=1, references=(), **more):
    prompts = [
        [[random(1, 7 + more_text, TEXT), {"reference_latents": list(references)} | more]]
        for more_text in (0, 2)
    ]
    latent = EMPTY.expand(batch, -1, -1, -1).contiguous()
    settings = (random(*latent.shape), steps, cfg, "euler", "simple", *prompts, latent)
    return comfy.sample.sample(model, *settings, seed=0, disable_pbar=True)


def close(ours, theirs):
    return torch.linalg.vector_norm(ours - theirs) <= 1e-5 * torch.linalg.vector_norm(theirs)


@pytest.mark.parametrize("fused_mlp", [True, False])
def test_the_blocks_run_fused_with_comfyuis_prefix_cache_on(fused_mlp):
    model = model_21(fused_mlp)
    for how in (
        {},
        {"cfg": 3.0},
        {"batch": 2},
        {"references": [random(1, 64, 4, 6)], "image_slots": [3]},
    ):
        expected = sample(model, **how)
        optimized = optimize(model)
        assert close(sample(optimized, **how), expected)
        passes = 6 if how.get("cfg") else 3
        report = report_of(optimized)
        assert f"blocks: fused, {2 * passes} of {2 * passes} in {passes} forward passes" in report
        assert torch.equal(sample(model, **how), expected)


def test_off_is_comfyuis_own():
    model = model_21()
    off = optimize(model, OptimizeSettings(blocks=False, attention="comfyui"))
    assert torch.equal(sample(off), sample(model))
