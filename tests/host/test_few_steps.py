"""Few-step LoRAs and models: what tells them, the schedule that they bring, and what a run says."""

import math
import os
from functools import partial

import comfy.model_base
import comfy.model_sampling
import comfy.samplers
import comfy.sd
import comfy.utils
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
from comfy_extras.nodes_model_advanced import ModelSamplingAuraFlow
from comfyui_boot import folder
from narrow_21 import TEXT, model_21, weights_21
from reported_runs import reported, running
from safetensors.torch import save_file

from qwen_l40s.errors import CheckpointError, SettingError
from qwen_l40s.families.qwen_image import QWEN_IMAGE
from qwen_l40s.families.qwen_image_21 import QWEN_IMAGE_21
from qwen_l40s.families.registry import find_schedule, schedule_names
from qwen_l40s.families.schedules import official_sigmas
from qwen_l40s.hosts.comfyui.lora.apply import apply_lora
from qwen_l40s.hosts.comfyui.lora.bypass import compute_loras
from qwen_l40s.hosts.comfyui.sample.measure import record_runs
from qwen_l40s.nodes.sigmas import QwenL40SSigmas

pytestmark = pytest.mark.usefixtures("inference_mode")
newer = pytest.mark.host_has("comfy.model_base.QwenImage21")
FOLDER = folder("few_steps")
LIGHTNING = "Qwen-Image-Lightning-{}steps-V2.0-bf16.safetensors"
OF_2511 = "Qwen-Image-Edit-2511-Lightning-4steps-V1.0.safetensors"
FOUR, EIGHT = LIGHTNING.format(4), LIGHTNING.format(8)
LAYERS = ["transformer_blocks.1.attn.to_q", "transformer_blocks.0.attn.to_q"]
EMBED = "time_text_embed.timestep_embedder.linear_"
OUTSIDE = ["modulation.1", f"{EMBED}1", f"{EMBED}2"]
NORM = "txt_in.text_norm"


def model_1(file="qwen_image_bf16"):
    path = narrow.write(FOLDER / f"{file}.safetensors", narrow.weights())
    return narrow.load_patcher(path)


def lora(name, tensors=None, rank=4, layers=LAYERS, **whole):
    """Writes a LoRA of layers of a model with these tensors."""
    path = FOLDER / name
    os.makedirs(path.parent, exist_ok=True)
    pairs = narrow.lora(tensors or narrow.weights(), layers, rank)
    save_file({f"diffusion_model.{it}": tensor for it, tensor in (pairs | whole).items()}, path)
    return path


def with_lora(model, path, strength=1.0, core=False):
    if core:  # LoraLoaderModelOnly
        tensors = comfy.utils.load_torch_file(str(path), safe_load=True)
        return comfy.sd.load_lora_for_models(model, None, tensors, strength, 0)[0]
    return apply_lora(model, path, strength, how="auto")[0]


def sigmas(model, preset="auto", steps=0, width=1024, height=1024, latent=None):
    output = QwenL40SSigmas.execute(model, preset, steps, width, height, latent)
    found, report = output.args
    assert output.ui["text"] == [report] and found.dtype == torch.float32
    return found.tolist(), report


# (LoRAs with their strengths, a trailing "core" for ComfyUI's own loader; the schedule; words)
OF_1 = {
    "published": ([(FOUR, 1.0)], "lightning 4", [FOUR]),
    "8 steps": ([(EIGHT, 1.0)], "lightning 8", [EIGHT]),
    "of Edit-2511": ([(OF_2511, 1.0)], "lightning 4", ["2511"]),
    "trained further": ([("my-lightning-8steps-of-mine.safetensors", 1.0)], "lightning 8", []),
    "renamed": ([("mine.safetensors", 1.0)], None, []),
    "by ComfyUI's loader": ([(FOUR, 1.0, "core")], None, []),
    "weak": ([(FOUR, 0.3)], "lightning 4", [FOUR, "0.3"]),
    "off": ([(FOUR, 0.0)], None, []),
    "reversed": ([(FOUR, -1.0)], None, []),
    "with another": ([(FOUR, 1.0), ("style.safetensors", 0.7)], "lightning 4", []),
    "two": ([(FOUR, 1.0), (EIGHT, 1.0)], "lightning 8", [FOUR, EIGHT]),
    "two, one weak": ([(FOUR, 1.0), (EIGHT, 0.2)], "lightning 4", [FOUR, EIGHT]),
    "unknown": ([("Someones-6steps.safetensors", 1.0)], None, ["'Someones-6steps", "6 steps"]),
    "unknown and known": ([("Someones-6steps.safetensors", 1.0), (FOUR, 0.5)], "lightning 4", []),
    "many steps": ([("style_4000steps.safetensors", 1.0)], None, []),
}


def built(model, loras, tensors=None):
    for name, strength, *core in loras:
        model = with_lora(model, lora(name, tensors), strength, bool(core))
    return model


@pytest.mark.parametrize("name", OF_1)
def test_auto_takes_the_schedule_of_the_lora(name):
    loras, schedule, words = OF_1[name]
    model = built(model_1(), loras)
    found, report = sigmas(model, steps=20)
    known = find_schedule(schedule, QWEN_IMAGE) if schedule else None
    expected = known.sigmas(len(known.nodes), 4096) if known else official_sigmas(20, 4096)
    assert found == pytest.approx(expected, abs=1e-6)
    assert report.startswith(f"{schedule or 'official'}: {len(expected) - 1} steps at 1024x1024")
    assert all(it in report for it in words), report
    assert ("steps is 20" in report) == bool(schedule)


def test_auto_changes_nothing_of_a_preset():
    model = built(model_1(), [(FOUR, 1.0)])
    found, report = sigmas(model, "official", 20)
    assert found == pytest.approx(official_sigmas(20, 4096), abs=1e-6) and FOUR in report
    assert sigmas(model, "lightning 4")[1].count("\n") == 0
    assert sigmas(model_1(), "lightning 4")[1].count("\n") == 1  # not told by the MODEL


@pytest.mark.parametrize(
    ("file", "schedule"),
    [
        ("qwen_image_edit_2511_fp8_e4m3fn_scaled_lightning_4steps_v1.0", "lightning 4"),
        ("qwen_image_2512_fp8_e4m3fn_scaled_8steps_v1.0", "lightning 8"),
        ("qwen_image_2512_fp8_e4m3fn_scaled", "official"),
    ],
)
def test_the_models_file_tells_what_is_merged_into_it(file, schedule):
    model = model_1(file)
    assert sigmas(model)[1].startswith(f"{schedule}: ")
    assert len(run(shifted(model, 3.0), steps=3)) == (schedule != "official")


def test_a_lora_of_the_other_model_is_refused():
    path = lora("Qwen-Image-2.1-Lightning-4steps.safetensors", weights_21())
    model = model_1()
    with pytest.raises(CheckpointError):
        with_lora(model, path)
    assert sigmas(model)[1].startswith("official: ")


@newer
def test_a_lora_of_1x_is_refused_for_21():
    model = model_21()
    with pytest.raises(CheckpointError):
        with_lora(model, lora(FOUR))
    assert sigmas(model)[1].startswith("official: ")


def run(model, cfg=1.0, *others, **more):
    """Samples in a prompt with a Report node, and returns the notes that name the LoRA."""
    with running():
        for settings in (more, *others):
            prompt = [[narrow.random(1, 7, narrow.SHAPE.joint_dim), {}]]
            narrow.sample(model, prompt, cfg=cfg, **settings)
    return [it for it in reported(model).data["notes"] if "steps" in it and "'" in it]


def shifted(model, shift):
    return ModelSamplingAuraFlow().patch_aura(model, shift)[0]


def test_a_run_says_once_what_is_not_as_the_lora_is_trained(caplog):
    model = built(model_1(), [(FOUR, 1.0)])
    right = shifted(model, 3.0)
    assert run(right, steps=4) == []
    assert run(shifted(model, 3.1), steps=4) == []  # of ComfyUI's templates
    assert run(model, steps=4) == []  # ComfyUI's own shift of 1.x, which is 3.16
    for other, settings, word in (
        (shifted(model, 1.0), {"steps": 4}, "sigmas"),
        (right, {"steps": 8}, "sigmas"),
        (right, {"steps": 4, "cfg": 4.0}, "CFG is 4"),
        (built(right, [(EIGHT, 1.0)]), {"steps": 8}, EIGHT),
        (built(shifted(model_1(), 3.0), [(FOUR, 0.3)]), {"steps": 4}, "0.3"),
    ):
        caplog.clear()
        with caplog.at_level("INFO"):
            (note,) = run(other, **settings)
        assert word in note and FOUR in note
        assert sum(note in it.message for it in caplog.records) == 1


def test_sigmas_are_wired_and_a_ksampler_runs_too():
    model = shifted(built(model_1(), [(FOUR, 1.0)]), 3.0)
    wired = torch.tensor(find_schedule("lightning 4", QWEN_IMAGE).sigmas(4, 4096))
    for other, notes in ({"steps": 4}, 0), ({"steps": 8}, 1):
        assert len(run(model, 1.0, other, sigmas=wired)) == notes


def test_runs_that_are_not_judged():
    model = built(model_1(), [(FOUR, 1.0)])
    later = torch.tensor([0.6, 0.3, 0.0])  # image to image
    first = torch.tensor([1.0, 0.9, 0.75])  # SplitSigmas
    assert [run(model, sigmas=it) for it in (later, first)] == [[], []]
    assert run(built(model_1(), [("Someones-6steps.safetensors", 1.0)]), cfg=4.0) == []
    assert run(model_1(), cfg=4.0) == []


def test_lightning_is_comfyuis_simple_with_shift_3():
    sampling = shifted(model_1(), 3.0).get_model_object("model_sampling")
    for steps in (4, 8):
        theirs = comfy.samplers.calculate_sigmas(sampling, "simple", steps).tolist()
        own = find_schedule(f"lightning {steps}", QWEN_IMAGE).sigmas(steps, 4096)
        assert own == pytest.approx(theirs, abs=1e-6)


@pytest.mark.parametrize("side", [512, 1024, 2048])
def test_lightning_of_21_is_comfyuis_shift_by_size(side):
    tokens = side * side // 256
    mu = 0.5 + 0.4 * (tokens - 256) / (8192 - 256)
    shift = comfy.model_sampling.flux_time_shift
    theirs = [shift(mu, 1.0, t) for t in (1.0, 0.75, 0.5, 0.25)]
    own = find_schedule("lightning 4", QWEN_IMAGE_21).sigmas(4, tokens)
    assert own == pytest.approx([*theirs, 0.0], abs=1e-6)
    assert own[2] == pytest.approx(math.exp(mu) / (math.exp(mu) + 1))


VIGGLE = "Qwen-Image-2.1-viggle-turbo-{}.safetensors"
TURBO = "qwen_image_2.1_turbo_lora_avg_rank_178_bf16.safetensors"
PRUNA = "p_q_image_2.1_{}_comfyui_bf16.safetensors"
LOOSE = "pytorch_lora_weights.safetensors"
RENAMED = "mine.safetensors"
# (file, layers outside of the blocks, rank, whether it has a whole tensor; the schedule)
OF_21 = {
    "Lightning, in its folder": (f"Qwen-Image-2.1-Lightning/{LOOSE}", [], 4, False, "lightning 4"),
    "Lightning, loose": (LOOSE, [], 4, False, None),
    "Viggle": (VIGGLE.format("v0.3-6step-lora-r128"), OUTSIDE, 128, False, "viggle 6"),
    "Viggle v0.1": (VIGGLE.format("4step-lora-r64"), OUTSIDE, 64, False, None),
    "Viggle, renamed": (RENAMED, OUTSIDE, 128, False, "viggle 6"),
    "like Viggle's, of another rank": (RENAMED, OUTSIDE, 16, False, None),
    "like Viggle's, of more": (RENAMED, [*OUTSIDE, "img_in"], 128, False, None),
    "Turbo": (TURBO, ["img_in"], 40, True, "turbo 8"),
    "Turbo, renamed": (RENAMED, ["img_in"], 40, True, "turbo 8"),
    "Pruna": (PRUNA.format("8_steps_v0.1"), [], 64, False, "pruna 8"),
    "Pruna v0.2": (PRUNA.format("6_steps_v0.2"), [], 64, False, None),
}


@newer
@pytest.mark.parametrize("core", [False, True])
@pytest.mark.parametrize("name", OF_21)
def test_the_loras_of_21(name, core):
    file, outside, rank, whole, schedule = OF_21[name]
    tensors = weights_21()
    diff = {f"{NORM}.diff": torch.ones_like(tensors[f"{NORM}.weight"])} if whole else {}
    path = lora(file, tensors, rank, [*LAYERS, *outside], **diff)
    if core and not ((outside == OUTSIDE and rank == 128) or whole):
        schedule = None  # its tensors are not its own
    found, report = sigmas(with_lora(model_21(), path, core=core))
    assert report.startswith(f"{schedule or 'official'}: "), report
    own = find_schedule(schedule or "official", QWEN_IMAGE_21)
    assert found == pytest.approx(own.sigmas(own.steps(0, 40), 4096), abs=1e-6)


@newer
def test_viggles_second_schedule_is_as_published():
    path = lora("viggle-turbo-6step.safetensors", weights_21(), 128, [*LAYERS, *OUTSIDE])
    model = with_lora(model_21(), path)
    compute_loras(model)
    record_runs(model)
    nine = find_schedule("viggle 9", QWEN_IMAGE_21).sigmas(9, 64)
    noise = narrow.random(1, 64, 8, 8)
    for steps, notes in ((nine[:8], 0), (official_sigmas(9, 64), 1)):
        with running():
            more = {"sigmas": torch.tensor(steps), "noise": noise}
            narrow.sample(model, [[narrow.random(1, 7, 96), {}]], **more)
        found = reported(model).data["notes"]
        assert sum("viggle-turbo" in it for it in found) == notes, found


# --- the node that gives sigmas


refused = partial(comfyui_boot.refused, SettingError)


def by_node(model, preset="official", steps=0, width=0, height=0, latent=None):
    return sigmas(model, preset, steps, width, height, latent)


def empty(width, height, channels=16):
    """As EmptySD3LatentImage makes it, which a sampler makes fit."""
    samples = torch.zeros(1, channels, height // 8, width // 8)
    return {"samples": samples, "downscale_ratio_spacial": 8}


def test_a_model_of_1x_gets_diffusers_schedule():
    model = model_1()
    found, report = by_node(model, width=1664, height=928)
    assert found == pytest.approx(official_sigmas(50, 104 * 58), abs=1e-6)
    assert report == "official: 50 steps at 1664x928, for Qwen-Image."
    found, report = by_node(model, steps=20, width=1664, height=928, latent=empty(512, 768))
    assert found == pytest.approx(official_sigmas(20, 32 * 48), abs=1e-6)
    found, report = by_node(model, "lightning 4")
    assert found == pytest.approx([1, 0.9, 0.75, 0.5, 0], abs=1e-6)
    assert "is only for a Lightning LoRA of 4 steps" in report


def test_schedules_that_do_not_fit_are_refused():
    model = model_1()
    needs = "'turbo 8' is of Qwen-Image-2.1, which needs ComfyUI 0.37 or newer"
    refused(
        needs, "choose official, lightning 4, lightning 8", run=lambda: by_node(model, "turbo 8")
    )
    words = "steps is 8, but the schedule 'lightning 4' has 4 steps", "leave steps out"
    refused(*words, run=lambda: by_node(model, "lightning 4", 8))
    refused("1000x1024", "multiples of 16", run=lambda: by_node(model, width=1000, height=1024))
    weights = narrow.weights() | {
        "time_text_embed.addition_t_embedding.weight": torch.zeros(2, 128)
    }
    path = narrow.write(FOLDER / "layered.safetensors", weights)
    layered = narrow.load_patcher(path, "bf16", False)
    refused("qwen-image-layered", "BasicScheduler", run=lambda: by_node(layered))
    model.model = comfy.model_base.BaseModel.__new__(comfy.model_base.BaseModel)
    torch.nn.Module.__init__(model.model)
    refused("the MODEL is BaseModel", "use BasicScheduler", run=lambda: by_node(model))


@newer
def test_a_model_of_21_gets_its_schedules():
    model = model_21()
    found, report = by_node(model)
    assert found == pytest.approx(official_sigmas(40, 128 * 128), abs=1e-6)
    assert report == "official: 40 steps at 2048x2048, for Qwen-Image-2.1."
    for name in ("lightning 4", *schedule_names()[3:]):
        found, report = by_node(model, name, latent=empty(1024, 1024))
        assert len(found) == int(name[-1]) + 1 and name in report.splitlines()[1]
    refused("'lightning 8' is of Qwen-Image", run=lambda: by_node(model, "lightning 8"))
    refused("1040x1024", "multiples of 32", run=lambda: by_node(model, width=1040, height=1024))
    _, report = by_node(model, latent={"samples": torch.ones(1, 64, 65, 64)})
    assert "multiples of 32, but the LATENT is 1024x1040" in report


@newer
def test_cores_sampler_runs_it():
    model, latent = model_21(), empty(128, 128)
    found, _ = by_node(model, steps=3, latent=latent)
    (guider,) = BasicGuider.execute(model, [[torch.ones(1, 5, TEXT), {}]]).args
    (noise,) = RandomNoise.execute(1).args
    (sampler,) = KSamplerSelect.execute("euler").args
    given = noise, guider, sampler, torch.tensor(found), latent
    output, _ = SamplerCustomAdvanced.execute(*given).args
    assert output["samples"].shape == (1, 64, 8, 8) and output["samples"].isfinite().all()
