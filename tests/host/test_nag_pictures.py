"""What NAG does to the micro model's pictures: the prompt leaves a colour open, and the negative
prompt names the one that most pictures take. Other seeds and settings, with the counts:

NAG_SEEDS=40 NAG_SETTINGS=5,2.5,0.5 pytest -s tests/host/test_nag_pictures.py
"""

import functools
import os

import comfy.sample
import pytest
import torch

from qwen_l40s.hosts.comfyui.load.text_encoder import load_text_encoder
from qwen_l40s.hosts.comfyui.load.transformer import load_model
from qwen_l40s.hosts.comfyui.load.vae import load_vae
from qwen_l40s.hosts.comfyui.sample.nag import NagSettings, guide_attention
from qwen_l40s.hosts.comfyui.sample.optimize import optimize
from qwen_l40s.loaders.source import bundled_micro_folder
from qwen_l40s.micro.judge import adherence
from qwen_l40s.micro.scene import parse_prompt

pytestmark = pytest.mark.usefixtures("inference_mode")
SEEDS = int(os.environ.get("NAG_SEEDS", "6"))
SETTINGS = NagSettings(*map(float, os.environ.get("NAG_SETTINGS", "5,2.5,0.25").split(",")))
PROMPT = "a large circle at the center on a white background"
LATENT = 16, 1, 32, 32


@functools.cache
def parts():
    folder = bundled_micro_folder()
    return load_model(folder, "bf16")[0], load_text_encoder(folder)[0], load_vae(folder)[0]


def paint(negative, cfg=1.0, nag=None):
    """A picture of each seed, uint8 (256, 256, 3)."""
    model, clip, vae = parts()
    told, untold = (
        clip.encode_from_tokens_scheduled(clip.tokenize(it)) for it in (PROMPT, negative)
    )
    model = optimize(model if nag is None else guide_attention(model, untold, nag)[0])
    seeds = [torch.Generator().manual_seed(seed) for seed in range(SEEDS)]
    noise = torch.stack([torch.randn(LATENT, generator=seed) for seed in seeds])
    how = 20, cfg, "euler", "simple", told, untold, torch.zeros_like(noise)
    latents = comfy.sample.sample(model, noise, *how, seed=0, disable_pbar=True)
    images = torch.stack([vae.decode(it[None]).squeeze()[..., :3] for it in latents])
    return (images.float().clamp(0, 1) * 255).round().byte().cpu().numpy()


def counts(images, colour):
    """How many show one whole circle, and how many one object of the colour on white."""
    scene = parse_prompt(PROMPT.replace("circle", f"{colour} circle"))
    found = [adherence(image, scene) for image in images]
    return sum(it.shape for it in found), sum(it.colours for it in found)


def test_the_named_colour_goes_and_the_circle_stays():
    """Of 40 seeds, purple and whole circles: 19 and 40 at CFG 1, none and 40 at CFG 4 with the
    negative prompt, none and 38 with NAG.
    """
    found = {
        name: counts(paint("a purple circle", cfg, nag), "purple")
        for name, cfg, nag in (("CFG 1", 1.0, None), ("CFG 4", 4.0, None), ("NAG", 1.0, SETTINGS))
    }
    print(f"{SEEDS} seeds, (whole circles, purple): {found}")
    whole, named = found["NAG"]
    assert whole >= 0.9 * SEEDS - 1
    assert named <= found["CFG 4"][1] + 0.05 * SEEDS and named < found["CFG 1"][1]
