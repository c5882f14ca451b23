"""The diffusers host against diffusers itself, and against folders that are damaged."""

import json
import shutil
import socket
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import QwenImagePipeline
from safetensors.torch import load_file, save_file

from qwen_l40s.errors import CheckpointError, SettingError, UnavailableError
from qwen_l40s.hosts.diffusers import qwen_image_21
from qwen_l40s.hosts.diffusers.load import (
    PRECISION_DTYPES,
    LoadedPipeline,
    OffloadChoice,
    choose_offload,
    load_pipeline,
)
from qwen_l40s.hosts.diffusers.sample import decode, generate, sample
from qwen_l40s.hosts.diffusers.settings import GenerateSettings, choose_precision
from qwen_l40s.loaders.source import TEMPLATE_PREFIX, TEMPLATE_PREFIX_TOKENS
from qwen_l40s.spec.formats import MIB

WEIGHTS = "diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def pipeline(tiny_folder: Path) -> LoadedPipeline:
    return load_pipeline(tiny_folder, precision="fp32", device="cpu")


@pytest.fixture
def own_folder(tiny_folder: Path, tmp_path: Path) -> Path:
    return shutil.copytree(tiny_folder, tmp_path / "model")


def settings(**changes) -> GenerateSettings:
    values = {"prompt": "a red star", "width": 64, "height": 48, "steps": 3, "seed": 7}
    return GenerateSettings(**values | changes)


# --- the same as diffusers ---


@pytest.mark.filterwarnings("ignore:`torch_dtype` is deprecated")  # its successor is not in 0.36
@pytest.mark.parametrize("cfg", [1.0, 4.0])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_latents_and_image_are_bit_identical_to_diffusers(tiny_folder, precision, cfg, device):
    stock = QwenImagePipeline.from_pretrained(
        tiny_folder, torch_dtype=PRECISION_DTYPES[precision], local_files_only=True
    ).to(device)

    def run_stock(output_type):
        return stock(
            "a red star",
            negative_prompt=" " if cfg > 1 else None,
            true_cfg_scale=cfg,
            width=64,
            height=48,
            num_inference_steps=3,
            generator=torch.Generator().manual_seed(7),
            output_type=output_type,
        ).images

    ours = load_pipeline(tiny_folder, precision=precision, device=device.type)
    latents = sample(ours, settings(cfg=cfg), progress=False)
    assert latents.dtype == PRECISION_DTYPES[precision]
    assert torch.equal(latents, run_stock("latent"))
    [image] = decode(ours, latents, 48, 64)
    [expected] = run_stock("pil")
    assert image.size == (64, 48)
    assert np.array_equal(np.asarray(image), np.asarray(expected))


def test_image_of_a_batch_is_the_image_of_its_own_seed(pipeline):
    batch = sample(pipeline, settings(batch=3), progress=False)
    for i in range(3):
        single = sample(pipeline, settings(seed=7 + i), progress=False)
        torch.testing.assert_close(batch[i : i + 1], single, atol=1e-4, rtol=1e-4)
    assert (batch[0] - batch[1]).abs().max() > 0.1


def test_sharded_folder_gives_the_same_latents(pipeline, own_folder):
    model = QwenImagePipeline.from_pretrained(own_folder, local_files_only=True).transformer
    shutil.rmtree(own_folder / "transformer")
    model.save_pretrained(own_folder / "transformer", max_shard_size="2MB")
    assert len(list((own_folder / "transformer").glob("*.safetensors"))) > 1
    sharded = load_pipeline(own_folder, precision="fp32", device="cpu")
    expected = sample(pipeline, settings(), progress=False)
    assert torch.equal(sample(sharded, settings(), progress=False), expected)


def test_one_step_is_finite_where_the_stock_schedule_divides_zero_by_zero(pipeline):
    assert torch.isfinite(sample(pipeline, settings(steps=1), progress=False)).all()


def test_a_schedule_that_is_named(pipeline, caplog):
    """The official one is the folder's, but for the last bits of its sigmas."""
    plain = sample(pipeline, settings(), progress=False)
    named = sample(pipeline, settings(schedule="official"), progress=False)
    torch.testing.assert_close(named, plain, rtol=1e-4, atol=1e-4)
    result = generate(pipeline, **vars(settings(steps=None, schedule="lightning 4")))
    assert (result.settings.steps, result.settings.cfg) == (4, 1.0)
    assert "is only for a Lightning LoRA of 4 steps" in caplog.text
    assert torch.equal(sample(pipeline, settings(), progress=False), plain)


def test_runs_leave_no_state_for_the_next_run(pipeline):
    first = sample(pipeline, settings(), progress=False)
    sample(pipeline, settings(steps=1, width=128, batch=2), progress=False)
    assert torch.equal(sample(pipeline, settings(), progress=False), first)


def test_nothing_is_asked_of_the_network(tiny_folder, monkeypatch):
    def refuse(*_args, **_kwargs):
        raise AssertionError("a connection was attempted")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    load_pipeline(tiny_folder, device="cpu")


def test_template_prefix_is_that_of_diffusers(pipeline):
    pipe = pipeline.to_diffusers()
    assert pipe.prompt_template_encode.startswith(TEMPLATE_PREFIX + "{}")
    assert pipe.prompt_template_encode_start_idx == TEMPLATE_PREFIX_TOKENS


# --- running ---


def test_callback_sees_every_step(pipeline):
    calls = []
    generate(
        pipeline,
        "a star",
        width=32,
        height=32,
        steps=2,
        progress=False,
        callback=lambda *call: calls.append(call),
    )
    assert [call[:2] for call in calls] == [(1, 2), (2, 2)]
    assert calls[0][2].shape == (1, 4, 64)


def test_what_the_callback_raises_stops_the_run(pipeline):
    calls = []

    def stop(step, _total, _latents):
        calls.append(step)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sample(pipeline, settings(), progress=False, callback=stop)
    assert calls == [1]


def test_card_that_runs_out_of_memory_is_one_sentence(pipeline):
    def run_out(*_call):
        raise torch.cuda.OutOfMemoryError("tried to allocate")

    with pytest.raises(UnavailableError, match="32x32 in a batch of 2 does not fit"):
        generate(pipeline, "a star", width=32, height=32, batch=2, progress=False, callback=run_out)


def test_long_prompt_is_cut_with_a_warning(pipeline, caplog):
    sample(pipeline, settings(prompt="shape " * 400, steps=1), progress=False)
    assert not caplog.records
    sample(pipeline, settings(prompt="shape " * 600, steps=1), progress=False)
    assert "the end of the prompt is cut off" in caplog.text


# --- folders that are not what they must be ---


def edit_json(path: Path, **changes) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_pipeline_that_diffusers_does_not_have_yet(own_folder, monkeypatch):
    def missing():
        raise ImportError("cannot import name 'QwenImage21Pipeline'")

    monkeypatch.setattr(qwen_image_21, "parts", missing)
    (own_folder / "model_index.json").write_text('{"_class_name": "QwenImage21Pipeline"}')
    with pytest.raises(UnavailableError, match=r"needs diffusers 0\.42 and transformers 4\.57"):
        load_pipeline(own_folder)


def test_other_pipelines_are_refused(own_folder):
    for pipeline_class, message in (
        ("QwenImageEditPlusPipeline", "only text to image"),
        ("QwenImageLayeredPipeline", "only text to image"),
        ("FluxPipeline", "a FluxPipeline, not"),
    ):
        edit_json(own_folder / "model_index.json", _class_name=pipeline_class)
        with pytest.raises(CheckpointError, match=message):
            load_pipeline(own_folder)


def edited(part, change):
    def damage(folder: Path) -> None:
        path = folder / part / ("model.safetensors" if part == "text_encoder" else WEIGHTS)
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path, metadata={"format": "pt"})

    return damage


def cast(name, dtype, value=None):
    def change(tensors):
        tensors[name] = tensors[name].to(dtype)
        if value is not None:
            tensors[name].view(-1)[-1] = value

    return change


def drop(name):
    return lambda tensors: tensors.pop(name)


def add(**more):
    return lambda tensors: tensors.update(more)


def copied(source, target):
    return lambda folder: shutil.copy(folder / source, folder / target)


def written(path, content):
    return lambda folder: (folder / path).write_bytes(content)


def removed(path):
    return lambda folder: (folder / path).unlink()


def truncate(folder: Path) -> None:
    path = folder / "vae" / WEIGHTS
    path.write_bytes(path.read_bytes()[:-100])


E4M3, TO_Q, NORM = torch.float8_e4m3fn, "transformer_blocks.1.attn.to_q.weight", "model.norm.weight"


TRANSFORMER, ENCODER = partial(edited, "transformer"), partial(edited, "text_encoder")
NARROW = {"in_channels": 32}
DAMAGED = {
    "no VAE": (lambda folder: shutil.rmtree(folder / "vae"), r"vae\)"),
    "no index": (removed("model_index.json"), "model_index.json"),
    "a VAE as transformer": (copied(f"vae/{WEIGHTS}", f"transformer/{WEIGHTS}"), "img_in.bias"),
    "a VAE's config": (copied("vae/config.json", "transformer/config.json"), "AutoencoderKLQwen"),
    "cut": (truncate, "truncated"),
    "fp8": (TRANSFORMER(cast("img_in.weight", E4M3)), "'img_in.weight' is F8_E4M3"),
    "no weight": (TRANSFORMER(drop("img_in.weight")), "'img_in.weight'"),
    "a weight more": (edited("vae", add(more=torch.zeros(1))), r"'more' .*vae\)"),
    "another config": (
        lambda folder: edit_json(folder / "transformer" / "config.json", **NARROW),
        r"'img_in.weight' .*\(128, 64\).* \(128, 32\)",
    ),
    "an encoder without": (ENCODER(drop("model.layers.0.mlp.up_proj.weight")), "up_proj.*encoder"),
    "an encoder's shape": (ENCODER(add(**{NORM: torch.ones(3)})), "norm.weight.*text_encoder"),
    "an encoder's scale": (
        ENCODER(add(**{f"{NORM}_scale": torch.ones(1)})),
        "weight_scale.*encoder",
    ),
    "an encoder in fp8": (ENCODER(cast(NORM, E4M3)), "'model.norm.weight' is F8_E4M3"),
    "no merges": (removed("tokenizer/merges.txt"), "tokenizer.json, or vocab.json and"),
    "other merges": (written("tokenizer/merges.txt", b"#version: 0.2\n"), "instead of 34"),
    "no scheduler": (removed("scheduler/scheduler_config.json"), "scheduler"),
    "NaN": (TRANSFORMER(cast(TO_Q, torch.float32, torch.nan)), f"{TO_Q}.* NaN.*{WEIGHTS}"),
    "infinity in bf16": (TRANSFORMER(cast(TO_Q, torch.bfloat16, torch.inf)), "NaN or infinity"),
    "infinity in fp16": (TRANSFORMER(cast(TO_Q, torch.float16, -torch.inf)), "NaN or infinity"),
    "an encoder's NaN": (ENCODER(cast(NORM, torch.float32, torch.nan)), r"norm\.weight.*encoder"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_folder(own_folder, name):
    damage, named = DAMAGED[name]
    damage(own_folder)
    with pytest.raises(CheckpointError, match=named):
        load_pipeline(own_folder, device="cpu")


def test_path_that_is_no_folder(own_folder):
    with pytest.raises(CheckpointError, match="not a diffusers folder"):
        load_pipeline(own_folder / "model_index.json")


def test_overflow_is_an_error_instead_of_a_black_image(own_folder):
    edited("transformer", lambda tensors: tensors["proj_out.weight"].mul_(1e38))(own_folder)
    huge = load_pipeline(own_folder, device="cpu")
    with pytest.raises(CheckpointError, match="gave NaN or infinity in fp32"):
        generate(huge, "a star", width=32, height=32, steps=2, progress=False)


# --- precision, device, memory ---


def test_precision_choice():
    for requested, device, available, name, reason in (
        ("auto", "cuda:0", 1, "bf16", "auto on cuda:0"),
        ("auto", "cpu", 8000, "fp32", "fits in half"),
        ("auto", "cpu", 7999, "bf16", "more than half"),
        ("fp32", "cpu", 1, "fp32", "requested"),
    ):
        choice = choose_precision(requested, device, parameters=1000, available_bytes=available)
        assert choice.name == name
        assert reason in choice.reason


@pytest.mark.parametrize(
    ("precision", "device", "error", "message"),
    [
        ("fp8", "cpu", SettingError, "'fp8'.*auto, bf16, fp32"),
        ("fp16", "cpu", SettingError, "'fp16'.*auto, bf16, fp32"),
        ("auto", "tpu", SettingError, "choose auto, cpu, cuda or cuda:N"),
        ("auto", "cuda:99", UnavailableError, "cuda:99"),
    ],
)
def test_what_cannot_be_had(tiny_folder, precision, device, error, message):
    with pytest.raises(error, match=message):
        load_pipeline(tiny_folder, precision=precision, device=device)


def test_model_larger_than_memory_is_refused_before_loading(tiny_folder, monkeypatch):
    monkeypatch.setattr("qwen_l40s.hosts.diffusers.load.available_bytes", lambda _device: 1_000_000)
    with pytest.raises(UnavailableError, match=r"in bf16 needs \d MiB .* cpu has 1 MiB"):
        load_pipeline(tiny_folder, device="cpu")


# --- offload ---


def test_parts_that_do_not_fit_together_take_turns():
    sizes = {"text_encoder": 15, "transformer": 40, "vae": 5}
    weights = {part: size * MIB for part, size in sizes.items()}
    for requested, device, free, host, expected in (
        ("auto", "cuda:0", 70, 0, "none"),
        ("auto", "cuda:0", 69, 60, "model"),
        ("auto", "cuda:0", 39, 60, r"needs 40 MiB .* cuda:0 has 39 MiB"),
        ("auto", "cuda:0", 69, 59, r"needs 60 MiB .* the host has 59 MiB"),
        ("none", "cuda:0", 60, 0, "none"),
        ("none", "cuda:0", 59, 99, r"needs 60 MiB .* cuda:0 has 59 MiB"),
        ("model", "cuda:0", 99, 60, "model"),
        ("model", "cpu", 60, 60, "none"),
        ("auto", "cpu", 59, 59, r"needs 60 MiB .* cpu has 59 MiB"),
    ):
        about = {"what": "a model", "device": device, "weights": weights, "work": 10 * MIB}
        about |= {"free": free * MIB, "host_free": host * MIB}
        if expected in ("none", "model"):
            assert choose_offload(requested, **about).name == expected
        else:
            with pytest.raises(UnavailableError, match=expected):
                choose_offload(requested, **about)


@pytest.mark.parametrize("optimized", [False, True])
def test_parts_that_take_turns_make_the_same_image(tiny_folder, optimized):
    whole = load_pipeline(tiny_folder, precision="fp32", device="cpu", optimized=optimized)
    turns = replace(whole, offload=OffloadChoice("model", "as on a small card"))
    about = {"width": 64, "height": 48, "steps": 2, "progress": False}
    [expected] = generate(whole, "a red star", **about).images
    for _ in range(2):
        [image] = generate(turns, "a red star", **about).images
        assert np.array_equal(np.asarray(image), np.asarray(expected))
    hooks = [hasattr(part, "_hf_hook") for part in (turns.text_encoder, turns.transformer)]
    assert hooks == [True, True]
