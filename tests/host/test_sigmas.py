"""The node that gives sigmas: what it takes, what it refuses, and a run of core's sampler."""

from functools import partial

import comfy.model_base
import comfy.sd
import comfyui_boot
import narrow_transformer as narrow
import pytest
import torch
from comfy_extras.nodes_custom_sampler import (
    BasicGuider,
    KSamplerSelect,
    RandomNoise,
    SamplerCustomAdvanced,
)
from comfyui_boot import folder
from narrow_21 import TEXT, model_21

from qwen_l40s.errors import SettingError
from qwen_l40s.families.registry import schedule_names
from qwen_l40s.families.schedules import official_sigmas
from qwen_l40s.nodes.sigmas import QwenL40SSigmas

pytestmark = pytest.mark.usefixtures("inference_mode")
newer = pytest.mark.host_has("comfy.model_base.QwenImage21")
PATH = narrow.write(folder("sigmas") / "qwen_image.safetensors", narrow.weights())
refused = partial(comfyui_boot.refused, SettingError)


def model_1():
    return narrow.load_patcher(PATH, "bf16", False)


def run(model, preset="official", steps=0, width=0, height=0, latent=None):
    output = QwenL40SSigmas.execute(model, preset, steps, width, height, latent)
    sigmas, report = output.args
    assert output.ui["text"] == [report] and sigmas.dtype == torch.float32
    return sigmas, report


def empty(width, height, channels=16):
    """As EmptySD3LatentImage makes it, which a sampler makes fit."""
    samples = torch.zeros(1, channels, height // 8, width // 8)
    return {"samples": samples, "downscale_ratio_spacial": 8}


def test_a_model_of_1x_gets_diffusers_schedule():
    model = model_1()
    sigmas, report = run(model, width=1664, height=928)
    assert sigmas.tolist() == pytest.approx(official_sigmas(50, 104 * 58), abs=1e-6)
    assert report == "official: 50 steps at 1664x928, for Qwen-Image."
    sigmas, report = run(model, steps=20, width=1664, height=928, latent=empty(512, 768))
    assert sigmas.tolist() == pytest.approx(official_sigmas(20, 32 * 48), abs=1e-6)
    sigmas, report = run(model, "lightning 4")
    assert sigmas.tolist() == pytest.approx([1, 0.9, 0.75, 0.5, 0], abs=1e-6)
    assert "is only for a Lightning LoRA of 4 steps" in report


def test_schedules_that_do_not_fit_are_refused():
    model = model_1()
    needs = "'turbo 8' is of Qwen-Image-2.1, which needs ComfyUI 0.37 or newer"
    refused(needs, "choose official, lightning 4, lightning 8", run=lambda: run(model, "turbo 8"))
    words = "steps is 8, but the schedule 'lightning 4' has 4 steps", "leave steps out"
    refused(*words, run=lambda: run(model, "lightning 4", 8))
    refused("1000x1024", "multiples of 16", run=lambda: run(model, width=1000, height=1024))
    weights = narrow.weights() | {
        "time_text_embed.addition_t_embedding.weight": torch.zeros(2, 128)
    }
    path = narrow.write(folder("layers") / "layered.safetensors", weights)
    layered = narrow.load_patcher(path, "bf16", False)
    refused("qwen-image-layered", "BasicScheduler", run=lambda: run(layered))
    model.model = comfy.model_base.BaseModel.__new__(comfy.model_base.BaseModel)
    torch.nn.Module.__init__(model.model)
    refused("the MODEL is BaseModel", "use BasicScheduler", run=lambda: run(model))


@newer
def test_a_model_of_21_gets_its_schedules():
    model = model_21()
    sigmas, report = run(model)
    assert sigmas.tolist() == pytest.approx(official_sigmas(40, 128 * 128), abs=1e-6)
    assert report == "official: 40 steps at 2048x2048, for Qwen-Image-2.1."
    for name in ("lightning 4", *schedule_names()[3:]):
        sigmas, report = run(model, name, latent=empty(1024, 1024))
        assert len(sigmas) == int(name[-1]) + 1 and name in report.splitlines()[1]
    refused("'lightning 8' is of Qwen-Image, and", run=lambda: run(model, "lightning 8"))
    refused("1040x1024", "multiples of 32", run=lambda: run(model, width=1040, height=1024))
    _, report = run(model, latent={"samples": torch.ones(1, 64, 65, 64)})
    assert "multiples of 32, but the LATENT is 1024x1040" in report


@newer
def test_cores_sampler_runs_it():
    model, latent = model_21(), empty(128, 128)
    sigmas, _ = run(model, steps=3, latent=latent)
    (guider,) = BasicGuider.execute(model, [[torch.ones(1, 5, TEXT), {}]]).args
    (noise,) = RandomNoise.execute(1).args
    (sampler,) = KSamplerSelect.execute("euler").args
    output, _ = SamplerCustomAdvanced.execute(noise, guider, sampler, sigmas, latent).args
    assert output["samples"].shape == (1, 64, 8, 8) and output["samples"].isfinite().all()
