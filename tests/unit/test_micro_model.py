"""The bundled micro model: what ships in models/micro is small, ordinary, and a Qwen-Image."""

import math
from pathlib import Path

import pytest
import torch
from diffusers import QwenImagePipeline
from safetensors.torch import load_file

from qwen_l40s.loaders.checkpoint import inspect_checkpoint
from qwen_l40s.loaders.source import bundled_micro_folder
from qwen_l40s.micro.judge import adherence
from qwen_l40s.micro.scene import HELD_OUT_PAIRS, gallery_prompts, parse_prompt

FOLDER = Path(__file__).resolve().parents[2] / "models" / "micro"

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(("family", "megabytes"), [("1.x", 16), ("2.1", 8)])
def test_the_folder_is_small_and_its_weights_finite_bf16(family, megabytes):
    files = [file for file in bundled_micro_folder(family).rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) <= megabytes * 1_000_000
    # Nothing but what diffusers writes, and the model card.
    assert {it.suffix for it in files} <= {".json", ".safetensors", ".txt", ".jinja", ".md"}
    for file in (file for file in files if file.suffix == ".safetensors"):
        for name, weight in load_file(file).items():
            assert weight.dtype == torch.bfloat16 and weight.isfinite().all(), (file, name)


def test_our_own_inspection_calls_it_a_qwen_image():
    found = inspect_checkpoint(FOLDER)
    assert found.errors == ()
    families = {part.family for part in found.parts}
    assert families == {"Qwen-Image or 2512", "Qwen-Image VAE", "Qwen2.5-VL text encoder"}
    assert all(part.cannot_run == () for part in found.parts)


@pytest.fixture(scope="module")
def pipeline():
    """Loaded by diffusers alone, in fp32."""
    loaded = QwenImagePipeline.from_pretrained(FOLDER, local_files_only=True).to(torch.float32)
    loaded.set_progress_bar_config(disable=True)
    return loaded


@torch.no_grad()
def test_images_never_reach_the_time_taps_that_are_zero(pipeline):
    """The VAE was trained on images: what only a video would use is saved as zeros."""
    for name, weight in pipeline.vae.named_parameters():
        if weight.ndim == 5 and weight.shape[2] == 3 and "time_conv" not in name:
            assert weight[:, :, :2].abs().max() == 0, name
            assert weight[:, :, 2].abs().max() > 0, name


@pytest.mark.slow
def test_the_model_paints_what_it_is_told(pipeline):
    """Prompts of (shape, colour) pairs that training never showed, by diffusers' own pipeline."""
    prompts = gallery_prompts(10, seed=3)
    scenes = [parse_prompt(prompt) for prompt in prompts]
    for scene in scenes:
        assert {(thing.shape, thing.colour) for thing in scene.objects} <= set(HELD_OUT_PAIRS)
    images = pipeline(
        prompt=prompts,
        negative_prompt=[" "] * len(prompts),
        true_cfg_scale=4.0,
        num_inference_steps=20,
        width=256,
        height=256,
        generator=[torch.Generator().manual_seed(seed) for seed in range(len(prompts))],
    ).images
    results = [adherence(image, scene) for image, scene in zip(images, scenes, strict=True)]
    assert sum(math.isclose(result.score, 1) for result in results) >= 8, [
        (prompt, result.as_dict())
        for prompt, result in zip(prompts, results, strict=True)
        if result.score < 1
    ]
    # The judge that passed them fails each one for another prompt.
    others = [adherence(image, scene) for image, scene in zip(images[1:], scenes, strict=False)]
    assert sum(result.score == 1 for result in others) == 0
