"""The adaptive step cache in diffusers, and `qwen-l40s calibrate-cache`."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("diffusers")

from qwen_l40s import CheckpointError
from qwen_l40s.cli import main
from qwen_l40s.hosts.diffusers.load import load_pipeline
from qwen_l40s.hosts.diffusers.sample import sample
from qwen_l40s.hosts.diffusers.settings import GenerateSettings
from qwen_l40s.hosts.diffusers.step_cache import cache_steps, checkpoint_of, first_block
from qwen_l40s.loaders.source import bundled_micro_folder
from qwen_l40s.machine.store import CURVES, load_curve
from qwen_l40s.measure.step_cache import HELD_OUT, PROMPTS, Trace, fit
from qwen_l40s.optimizations.change_gate import NOT_ADAPTIVE
from qwen_l40s.step_cache import ADAPTIVE, PUBLISHED_CURVES, CacheSettings

pytestmark = pytest.mark.usefixtures("one_thread")

ADAPTIVELY = CacheSettings(method=ADAPTIVE)
STAR = "a small red star at the top left on a blue background"


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("QWEN_L40S_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def micro():
    return load_pipeline(bundled_micro_folder(), precision="fp32", device="cpu")


def painted(pipe, seed=1, steps=20):
    return pipe(
        STAR,
        negative_prompt=" ",
        true_cfg_scale=4.0,
        width=128,
        height=128,
        num_inference_steps=steps,
        generator=torch.Generator().manual_seed(seed),
        output_type="latent",
    ).images


def test_an_adaptive_run_skips_steps_and_stays_near(micro):
    pipe = micro.to_diffusers()
    pipe.set_progress_bar_config(disable=True)
    exact = painted(pipe)
    with cache_steps(pipe, ADAPTIVELY) as cached:
        found = painted(pipe)
        skipped = cached.figures.skipped
        assert cached.report().endswith(PUBLISHED_CURVES[0].source)
        painted(pipe, seed=2)
        again = painted(pipe)
    assert 2 <= len(skipped) <= 6
    assert 0 < (found - exact).norm() / exact.norm() < 0.02
    assert torch.equal(again, found)
    with cache_steps(pipe, replace(ADAPTIVELY, threshold=0)):
        assert torch.equal(painted(pipe), exact)


def test_another_transformer_s_blocks_are_refused(micro):
    pipe = micro.to_diffusers()
    pipe.set_progress_bar_config(disable=True)
    own = type(pipe.transformer)
    pipe.transformer.__class__ = type("Another", (own,), {})
    try:
        with cache_steps(pipe, ADAPTIVELY) as cached:
            painted(pipe, steps=11)
    finally:
        pipe.transformer.__class__ = own
    assert cached.report() == f"step cache: custom has no effect: {NOT_ADAPTIVE}"


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_gate_sees_what_the_first_block_gets(tiny_folder, precision):
    pipeline = load_pipeline(tiny_folder, precision=precision, device="cpu")
    given, found = [], []

    def watch(x, velocity, sigmas, step):
        found.append(first_block(pipeline.transformer, sigmas)(x, sigmas[step]))

    hook = pipeline.transformer.transformer_blocks[0].attn.register_forward_pre_hook(
        lambda _, args, kwargs: given.append(kwargs["hidden_states"]), with_kwargs=True
    )
    settings = GenerateSettings(prompt=STAR, width=64, height=64, steps=3, batch=2)
    sample(pipeline, settings, progress=False, watch=watch)
    hook.remove()
    assert len(given) == 2 * len(found) == 6
    for step, ours in enumerate(found):
        for known in given[2 * step : 2 * step + 2]:
            error = (ours - known).float().norm() / known.float().norm()
            assert ours.dtype == known.dtype and error < (1e-6 if precision == "fp32" else 5e-3)


def trace(seed, scale=1.0):
    inputs = np.random.default_rng(seed).uniform(0.05, 0.5, 19)
    return Trace(inputs, scale * (2 * inputs**3 - inputs**2 + 0.7 * inputs))


def test_a_fit_finds_the_polynomial_and_holds_prompts_out():
    found = fit([trace(seed) for seed in range(20)], 20, "bf16")
    assert found.curve.coefficients == pytest.approx((0, 2, -1, 0.7, 0), abs=1e-9)
    assert (found.r2, found.held_out_r2) == pytest.approx((1, 1))
    assert (found.fitted, found.held_out) == (14, 6)
    assert (found.curve.steps, found.curve.precision) == (20, "bf16")
    assert 0.05 <= found.curve.least < found.curve.most <= 0.5
    odd = fit([trace(i, 3.0 if i in HELD_OUT else 1.0) for i in range(10)], 20, "bf16")
    assert odd.curve.coefficients == pytest.approx((0, 2, -1, 0.7, 0), abs=1e-9)
    assert odd.r2 == pytest.approx(1) and odd.held_out_r2 < 0
    for bad in (np.nan, 0.0):
        broken = trace(0)
        broken.inputs[3] = bad
        with pytest.raises(CheckpointError, match="does not change from step to step"):
            fit([broken, *(trace(i) for i in range(1, 10))], 20, "bf16")


def test_the_command_stores_a_curve_that_runs_find(tiny_folder, folder, tmp_path, capsys):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n\n".join(f"{prompt} " for prompt in (*PROMPTS, "one more")))
    arguments = ["calibrate-cache", str(tiny_folder), "--device", "cpu", "--steps", "11"]
    assert main([*arguments, "--size", "32x32", "--prompts", str(prompts)]) == 0
    *words, line = capsys.readouterr().out.splitlines()
    report = json.loads(line)
    assert words[0].startswith("R2 is ") and "on the 8 prompts of the fit" in words[0]
    assert report["file"] == str(folder / CURVES)
    assert (report["steps"], report["size"], report["prompts"]) == (11, [32, 32], 11)
    pipeline = load_pipeline(tiny_folder, precision=report["precision"], device="cpu")
    assert report["checkpoint"] == checkpoint_of(pipeline.transformer)
    curve = load_curve(report["checkpoint"], report["precision"], 11)
    assert list(curve.coefficients) == report["coefficients"]
    assert [curve.least, curve.most] == report["range"]
    pipe = pipeline.to_diffusers()
    pipe.set_progress_bar_config(disable=True)
    with cache_steps(pipe, ADAPTIVELY) as cached:
        painted(pipe, steps=11)
    assert cached.report().endswith(curve.source)


def test_bad_input_is_one_sentence(tiny_folder, folder, tmp_path, capsys):
    few, binary = tmp_path / "few.txt", tmp_path / "binary.txt"
    few.write_text("\n".join(PROMPTS[:9]))
    binary.write_bytes(b"\xff\xfe\x00")
    for arguments, message in (
        (["--prompts", str(few)], "9 prompts are too few to fit a curve: give 10 or more"),
        (["--prompts", str(binary)], "must be text in UTF-8"),
        (["--prompts", str(tmp_path / "none.txt")], "No such file or directory"),
        (["--steps", "10"], "takes runs of 11 to 250 steps"),
        (["--steps", "251"], "takes runs of 11 to 250 steps"),
        (["--precision", "int8"], "precision 'int8' is not available"),
    ):
        assert main(["calibrate-cache", str(tiny_folder), "--device", "cpu", *arguments]) == 2
        assert message in capsys.readouterr().err
    assert not folder.exists()
