"""The micro model on a CUDA card, against the same run on the CPU."""

import pytest

pytest.importorskip("torch")

from qwen_l40s.hosts.diffusers.load import load_pipeline
from qwen_l40s.hosts.diffusers.sample import generate, sample
from qwen_l40s.hosts.diffusers.settings import GenerateSettings
from qwen_l40s.loaders.source import bundled_micro_folder
from qwen_l40s.micro.judge import adherence
from qwen_l40s.micro.scene import parse_prompt

pytestmark = pytest.mark.cuda

PROMPT = "a large green circle at the bottom right on a white background"


def test_card_follows_the_cpu_in_fp32():
    settings = GenerateSettings(prompt=PROMPT, width=256, height=256, steps=4)
    runs = [
        sample(
            load_pipeline(bundled_micro_folder(), precision="fp32", device=device),
            settings,
            progress=False,
        ).cpu()
        for device in ("cpu", "cuda")
    ]
    assert (runs[1] - runs[0]).norm() / runs[0].norm() < 1e-3


def test_auto_is_bf16_on_the_card_and_paints_the_prompt():
    pipeline = load_pipeline(bundled_micro_folder())
    assert pipeline.device.startswith("cuda")
    assert pipeline.precision.name == "bf16"
    image = generate(pipeline, PROMPT, width=256, height=256, progress=False).images[0]
    assert adherence(image, parse_prompt(PROMPT)).score == 1
