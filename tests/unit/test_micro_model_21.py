"""The micro Qwen-Image-2.1: small, ordinary, and what both hosts ask of its dims."""

import json
import shutil

import numpy as np
import pytest
import torch

from qwen_l40s.cli import build_parser
from qwen_l40s.cli.estimate import request_of
from qwen_l40s.errors import CheckpointError, SettingError
from qwen_l40s.hosts.diffusers.load import load_pipeline
from qwen_l40s.hosts.diffusers.sample import generate, settled
from qwen_l40s.hosts.diffusers.settings import GenerateSettings
from qwen_l40s.loaders.source import bundled_micro_folder
from qwen_l40s.micro.judge import adherence
from qwen_l40s.micro.scene import gallery_prompts, parse_prompt

FOLDER = bundled_micro_folder("2.1")
PARTS = ("transformer", "vae", "text_encoder")

pytestmark = pytest.mark.usefixtures("one_thread")


def test_prompts_are_cut_after_the_system_turn():
    """Where the second turn starts, by which ComfyUI finds it."""
    pipeline = load_pipeline(FOLDER, device="cpu", precision="fp32").to_diffusers()
    words = pipeline.processor.tokenizer
    ids = words(pipeline.prompt_template_t2i.format("a red star")).input_ids
    assert words.decode(ids[pipeline._drop_idx :]).startswith("<|im_start|>user\na red star")
    assert ids[pipeline._drop_idx] == ids[0] == words.convert_tokens_to_ids("<|im_start|>")


@pytest.fixture
def turbo(tmp_path):
    """A folder that is trained for certain sigmas; `write` puts others into it."""
    folder = tmp_path / "turbo"
    shutil.copytree(FOLDER, folder)
    index = json.loads((folder / "model_index.json").read_text(encoding="utf-8"))

    def write(sigmas):
        text = json.dumps(index | {"sample_sigmas": sigmas})
        (folder / "model_index.json").write_text(text, encoding="utf-8")
        return folder

    return write


def test_a_turbo_folder_runs_the_sigmas_that_it_is_trained_for(turbo):
    sigmas, asked = [1.0, 0.9, 0.4], {"width": 64, "height": 64}
    stock = load_pipeline(FOLDER, device="cpu", precision="fp32").to_diffusers()
    stock.set_progress_bar_config(disable=True)
    noise = torch.Generator().manual_seed(7)
    [expected] = stock("a red star", **asked, sigmas=sigmas, generator=noise).images
    ours = load_pipeline(turbo(sigmas), device="cpu", precision="fp32")
    made = generate(ours, "a red star", **asked, seed=7, progress=False)
    assert (made.settings.steps, made.settings.cfg) == (3, 1.0)  # as diffusers, without guidance
    assert np.array_equal(np.asarray(made.images[0]), np.asarray(expected))
    with pytest.raises(SettingError, match=r"has the 3 sigmas .*: leave steps out, or use"):
        generate(ours, "a red star", **asked, steps=8, progress=False)


def test_an_estimate_without_options_is_of_what_generate_makes(turbo):
    """Of a Turbo folder and any other: as many steps, with guidance or without."""
    for folder, steps in ((bundled_micro_folder(), 50), (FOLDER, 40), (turbo([1.0, 0.9, 0.4]), 3)):
        pipeline = load_pipeline(folder, device="cpu")
        made = settled(GenerateSettings(prompt="", width=64, height=64), pipeline)
        options = ["estimate", "--model", str(folder)]
        asked = request_of(build_parser(options).parse_args(options))
        assert made.steps == asked.steps == steps
        assert (made.cfg > 1) == (asked.passes == 2)


@pytest.mark.parametrize(
    "sigmas", [[], 8, ["1"], [0.4, 0.9], [1.0, 0.0], [1.5, 0.5], [1.0, 1.0], [True]]
)
def test_damaged_sigmas(turbo, sigmas):
    with pytest.raises(CheckpointError, match="sample_sigmas are not numbers that fall"):
        load_pipeline(turbo(sigmas), device="cpu")


@pytest.mark.slow
def test_the_model_paints_what_it_is_told():
    """Prompts of (shape, colour) pairs that training never showed."""
    pipeline = load_pipeline(FOLDER, device="cpu", precision="fp32")
    results = []
    for seed, prompt in enumerate(gallery_prompts(10, seed=3)):
        painted = generate(
            pipeline, prompt, width=256, height=256, steps=20, cfg=4.0, seed=seed, progress=False
        )
        results.append(adherence(painted.images[0], parse_prompt(prompt)))
    assert sum(result.score == 1 for result in results) >= 8
