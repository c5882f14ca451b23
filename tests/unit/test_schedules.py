"""Schedules of sigmas against diffusers' scheduler, and against what is published of each."""

import itertools
import json
import math
from fractions import Fraction
from pathlib import Path

import pytest

from qwen_l40s.errors import SettingError
from qwen_l40s.families.qwen_image import QWEN_IMAGE
from qwen_l40s.families.qwen_image_21 import QWEN_IMAGE_21
from qwen_l40s.families.registry import (
    FAMILIES,
    family_of_schedule,
    find_schedule,
    schedule_names,
)
from qwen_l40s.families.schedules import (
    OFFICIAL,
    official_sigmas,
    plain_name,
    schedule_of_file,
    shift_of,
)

SCHEDULERS = [
    Path(__file__).resolve().parents[2] / "models" / name / "scheduler/scheduler_config.json"
    for name in ("micro", "micro_21")
]
SIZES = [
    *((256, 256), (512, 512), (768, 768), (1024, 1024), (1328, 1328), (1664, 928)),
    *((1472, 1104), (1536, 1536), (2048, 2048), (2720, 1536), (3072, 1024), (4096, 4096)),
]


def of_diffusers(tokens, config, nodes):
    """What a pipeline of Qwen-Image gives its scheduler; mu goes on past both ends."""
    scheduler = pytest.importorskip("diffusers").FlowMatchEulerDiscreteScheduler
    here = scheduler.from_config(config)
    slope = (config["max_shift"] - config["base_shift"]) / (
        config["max_image_seq_len"] - config["base_image_seq_len"]
    )
    mu = config["base_shift"] + slope * (tokens - config["base_image_seq_len"])
    here.set_timesteps(sigmas=list(nodes), mu=mu)
    return here.sigmas.tolist()


def even(steps):
    return [1 - i * (1 - 1 / steps) / (steps - 1) for i in range(steps)]


@pytest.mark.parametrize(("width", "height"), SIZES)
@pytest.mark.parametrize("path", SCHEDULERS, ids=lambda path: path.parents[1].name)
def test_official_sigmas_are_those_of_diffusers(path, width, height):
    """With the micro models' schedulers, whose configurations are the published ones."""
    config, tokens = json.loads(path.read_text()), width * height // 256
    for steps in (2, 8, 20, 40, 50):
        expected = of_diffusers(tokens, config, even(steps))
        assert OFFICIAL.sigmas(steps, tokens) == pytest.approx(expected, abs=1e-6)


def test_mu_goes_on_past_the_largest_size():
    assert math.log(shift_of(4096)) == pytest.approx(0.6935, abs=1e-4)
    assert math.log(shift_of(2048 * 2048 // 256)) == pytest.approx(1.3129, abs=1e-4)
    assert official_sigmas(1) == [1.0, 0.0]


# As published: fractions and shifts of the card or the code, apart from the package's numbers.
GIVEN = {
    "turbo 8": [1.0, 0.978453, 0.95418, 0.926626, 0.89508, 0.845148, 0.704534, 0.414568],
    "pruna 8": [float(2 * t / (1 + t)) for t in (Fraction(8 - i, 8) for i in range(8))],
    "pruna 5": [1.0, 0.94, 6 / 7, 2 / 3, 0.4],
    "pai 4": [1.0, 0.9169867038726807, 0.7861579060554504, 0.5494909882545471],
}
SHIFTED = {
    "viggle 6": [1.0, 0.9375, 0.875, 0.75, 0.5, 0.25],
    "viggle 9": [1.0, 0.9583, 0.9167, 0.875, 0.75, 0.5, 0.25, 1 / 6, 1 / 12],
    "lightning 4": [1.0, 0.75, 0.5, 0.25],
}
NAMES = (OFFICIAL.name, "lightning 8", *GIVEN, *SHIFTED)


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_few_step_schedules_are_those_of_their_sources(width, height):
    tokens, config = width * height // 256, json.loads(SCHEDULERS[1].read_text())

    def found(family, name):
        schedule = find_schedule(name, family)
        return schedule.sigmas(schedule.steps(None, 40), tokens)

    for name, nodes in GIVEN.items():
        assert found(QWEN_IMAGE_21, name) == pytest.approx([*nodes, 0.0], abs=1e-6)
    for name, nodes in SHIFTED.items():
        expected = of_diffusers(tokens, config | {"shift_terminal": None}, nodes)
        assert found(QWEN_IMAGE_21, name) == pytest.approx(expected, abs=1e-6)
    three = {"base_shift": math.log(3), "max_shift": math.log(3), "shift_terminal": None}
    for steps in (4, 8):
        expected = of_diffusers(tokens, config | three, even(steps))
        assert found(QWEN_IMAGE, f"lightning {steps}") == pytest.approx(expected, abs=1e-6)


def test_every_schedule_says_where_it_is_published_and_falls():
    assert sorted(schedule_names()) == sorted(NAMES)
    for family in FAMILIES:
        for it in (OFFICIAL, *family.schedules):
            assert it.source.startswith("https://")
            sigmas = it.sigmas(it.steps(None, 40), 4096)
            assert sigmas[0] == 1 and sigmas[-1] == 0
            assert all(a > b for a, b in itertools.pairwise(sigmas))
            assert bool(it.advice) == bool(it.nodes)


def test_steps_and_families_that_a_schedule_does_not_have():
    viggle = find_schedule("viggle 6", QWEN_IMAGE_21)
    with pytest.raises(SettingError, match="steps is 8, but the schedule 'viggle 6' has 6 steps"):
        viggle.steps(8, 40)
    assert (viggle.steps(6, 40), viggle.steps(0, 40), OFFICIAL.steps(0, 40)) == (6, 6, 40)
    assert OFFICIAL.steps(25, 40) == 25
    words = "'viggle 6' is of Qwen-Image-2.1, which needs ComfyUI 0.37 or newer, but the model is"
    with pytest.raises(SettingError, match=rf"{words} .+: choose official, lightning 4, lightning"):
        find_schedule("viggle 6", QWEN_IMAGE)
    with pytest.raises(SettingError, match="'lightning 8' is of Qwen-Image, but the model"):
        find_schedule("lightning 8", QWEN_IMAGE_21)
    with pytest.raises(SettingError, match="'karras' is unknown"):
        find_schedule("karras", QWEN_IMAGE)
    assert family_of_schedule("official") is None


# {schedule: published files}, as the lists of files of lightx2v, Viggle, PrunaAI and Comfy-Org have
# them, and their copies in ComfyUI's form; None of what is few-step and has no sigmas here.
LIGHTNING = "Qwen-Image-{}Lightning-{}steps-{}.safetensors"
FILES_1 = {
    "lightning 4": [
        *(LIGHTNING.format("", 4, it) for it in ("V1.0", "V1.0-bf16", "V2.0", "V2.0-bf16")),
        *(LIGHTNING.format(f"{it}-", 4, "V1.0-bf16") for it in ("Edit", "Edit-2509", "Edit-2511")),
        LIGHTNING.format("2512-", 4, "V1.0-fp32"),
        LIGHTNING.format("fp8-e4m3fn-", 4, "V1.0-bf16"),
        "qwen_image_2512_fp8_e4m3fn_scaled_4steps_v1.0.safetensors",
        "qwen_image_edit_2511_fp8_e4m3fn_scaled_lightning_4steps_v1.0.safetensors",
    ],
    "lightning 8": [
        *(LIGHTNING.format("", 8, it) for it in ("V1.0", "V1.1", "V1.1-bf16", "V2.0-bf16")),
        *(LIGHTNING.format(f"{it}-", 8, "V1.0-bf16") for it in ("Edit", "Edit-2509", "Edit-2511")),
        "qwen_image_2512_fp8_e4m3fn_scaled_8steps_v1.0.safetensors",
    ],
    None: [
        "qwen_image_2512_fp8_e4m3fn_scaled.safetensors",
        "qwen_image_edit_2511_fp8_e4m3fn_scaled_lightning.safetensors",
        "Wuli-Qwen-Image-2512-Turbo-LoRA-2steps-V1.0-bf16.safetensors",
    ],
}
VIGGLE = "Qwen-Image-2.1-viggle-turbo-{}.safetensors"
FILES_21 = {
    "lightning 4": ["Qwen-Image-2.1-Lightning/pytorch_lora_weights.safetensors"],
    "turbo 8": [
        "qwen_image_2.1_turbo_bf16.safetensors",
        "qwen_image_2.1_turbo_int8_convrot.safetensors",
        "qwen_image_2.1_turbo_lora_avg_rank_178_bf16.safetensors",
        "Qwen-Image-2.1-Turbo/transformer",
    ],
    "viggle 6": [
        VIGGLE.format("v0.3-6step-lora-r256"),
        VIGGLE.format("v0.2.1-6step-lora-r128"),
        VIGGLE.format("v0.3-6step-int8_convrot"),
        "Qwen-Image-2.1-viggle-turbo-v0.3-6step-Q8_0.gguf",
    ],
    "pruna 8": [
        "p_qwen_image_2.1_8step_v0.1.safetensors",
        "p_qwen_image_2.1_8step_v0.1-comfyui-T8.safetensors",
        "p_q_image_2.1_8_steps_v0.1_comfyui_bf16.safetensors",
    ],
    "pruna 5": [
        "p_qwen_image_2.1_5step_v0.1_comfyui.safetensors",
        "p_q_image_2.1_5_steps_v0.1_comfyui_bf16.safetensors",
    ],
    None: [
        VIGGLE.format("4step-lora-r64"),
        VIGGLE.format("v0.2-5step-lora-r256"),
        "p_q_image_2.1_6_steps_v0.2_comfyui_bf16.safetensors",
        "p_q_image_2.1_6_steps_upsampled_v0.2_comfyui_bf16.safetensors",
        "Wuli-Qwen-Image-2.1-Turbo.safetensors",
        "turbo8_lora_step2500.safetensors",
        "qwen_image_2.1_bf16.safetensors",
        "pytorch_lora_weights.safetensors",
    ],
}


@pytest.mark.parametrize(("family", "files"), [(QWEN_IMAGE, FILES_1), (QWEN_IMAGE_21, FILES_21)])
def test_published_files_are_told_by_name(family, files):
    for schedule, names in files.items():
        for name in names:
            found = schedule_of_file(plain_name(Path("loras", name)), family.schedules)
            assert (found and found.name) == schedule, name
