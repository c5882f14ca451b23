"""The bundled micro model: what ships in models/micro is small, ordinary, and a Qwen-Image."""

import json
import math
from pathlib import Path

import pytest
import torch
from diffusers import QwenImagePipeline
from safetensors import safe_open

from qwen_l40s.loaders.checkpoint import inspect_checkpoint
from qwen_l40s.micro.judge import adherence
from qwen_l40s.micro.scene import HELD_OUT_PAIRS, gallery_prompts, parse_prompt

FOLDER = Path(__file__).resolve().parents[2] / "models" / "micro"
PARTS = ("transformer", "vae", "text_encoder")
# The constants of Qwen-Image's VAE, which ComfyUI's Wan 2.1 latent format holds as well.
LATENTS_MEAN = [
    *(-0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508),
    *(0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921),
]
LATENTS_STD = [
    *(2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743),
    *(3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160),
]


pytestmark = pytest.mark.usefixtures("one_thread")


def config(part, name="config.json"):
    return json.loads((FOLDER / part / name).read_text(encoding="utf-8"))


def test_the_folder_is_at_most_16_megabytes():
    files = [file for file in FOLDER.rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) <= 16_000_000
    # Nothing but what diffusers writes, and the model card.
    assert {file.suffix for file in files} <= {".json", ".safetensors", ".txt", ".md"}


def test_the_index_names_the_real_models_classes():
    index = json.loads((FOLDER / "model_index.json").read_text(encoding="utf-8"))
    known = {name: value for name, value in index.items() if name != "_diffusers_version"}
    assert known == {
        "_class_name": "QwenImagePipeline",
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
        "text_encoder": ["transformers", "Qwen2_5_VLForConditionalGeneration"],
        "tokenizer": ["transformers", "Qwen2Tokenizer"],
        "transformer": ["diffusers", "QwenImageTransformer2DModel"],
        "vae": ["diffusers", "AutoencoderKLQwenImage"],
    }


@pytest.mark.parametrize("part", PARTS)
def test_every_weight_is_a_finite_bf16(part):
    (file,) = (FOLDER / part).glob("*.safetensors")
    with safe_open(file, "pt") as weights:
        for name in weights.keys():  # noqa: SIM118 (not a dict)
            weight = weights.get_tensor(name)
            assert weight.dtype == torch.bfloat16, name
            assert weight.isfinite().all(), name


def test_the_transformer_has_blocks_and_heads_enough():
    dims = config("transformer")
    assert dims["num_layers"] >= 6 and dims["num_attention_heads"] >= 4
    assert (dims["patch_size"], dims["in_channels"], dims["out_channels"]) == (2, 64, 16)
    assert sum(dims["axes_dims_rope"]) == dims["attention_head_dim"]


def test_the_vae_compresses_8_times_into_16_channels_of_the_real_statistics():
    dims = config("vae")
    assert (dims["z_dim"], dims["input_channels"]) == (16, 3)
    assert 2 ** len(dims["temperal_downsample"]) == 8
    assert (dims["latents_mean"], dims["latents_std"]) == (LATENTS_MEAN, LATENTS_STD)


def test_the_text_encoder_fits_both_hosts():
    dims = config("text_encoder")
    text = dims["text_config"]
    assert text["hidden_size"] == 128 * text["num_attention_heads"] == 512
    assert text["num_key_value_heads"] * 128 == 512  # ComfyUI finds Qwen2.5-VL by these key rows
    assert text["rope_parameters"]["mrope_section"] == [16, 24, 24]
    assert dims["tie_word_embeddings"] and text["tie_word_embeddings"]
    assert text["hidden_size"] == config("transformer")["joint_attention_dim"]
    assert len(config("tokenizer", "vocab.json")) <= text["vocab_size"] <= 4096
    assert dims["vision_config"]["depth"] == 1


def test_the_scheduler_is_the_real_models():
    settings = config("scheduler", "scheduler_config.json")
    assert (settings["num_train_timesteps"], settings["shift"]) == (1000, 1.0)
    assert (settings["base_shift"], settings["max_shift"]) == (0.5, 0.9)
    assert settings["base_image_seq_len"] == 256
    assert (settings["shift_terminal"], settings["max_image_seq_len"]) == (0.02, 8192)
    assert settings["use_dynamic_shifting"] and settings["time_shift_type"] == "exponential"


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
