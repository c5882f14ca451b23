"""The adaptive step cache in ComfyUI: the micro model in fp32, and narrow ones in other forms."""

import functools
from dataclasses import replace

import comfy.model_base
import comfy.sample
import comfy.samplers
import narrow_transformer
import pytest
import torch
from comfyui_boot import ROOT
from diffusers import QwenImagePipeline
from safetensors import safe_open

from qwen_l40s.hosts.comfyui.load.transformer import load_model
from qwen_l40s.hosts.comfyui.sample.optimize import optimize
from qwen_l40s.hosts.comfyui.sample.run import STEP_CACHE_KEY
from qwen_l40s.hosts.comfyui.sample.step_cache import cache_steps
from qwen_l40s.machine.store import CURVES, with_curve
from qwen_l40s.optimizations import change_gate
from qwen_l40s.optimizations.change_gate import IDENTIFYING, NOT_ADAPTIVE, checkpoint_id
from qwen_l40s.step_cache import ADAPTIVE, PUBLISHED_CURVES, CacheSettings, ends, usual_sigmas

pytestmark = pytest.mark.usefixtures("inference_mode")
MICRO = ROOT / "models" / "micro"
FILE = MICRO / "transformer" / "diffusion_pytorch_model.safetensors"
STEPS = 20
PROMPTS = (
    "a large green circle at the bottom right on a white background",
    "a small red star at the top left and a yellow square at the center on a blue background",
    " ",
)
ADAPTIVELY = CacheSettings(method=ADAPTIVE)


@functools.cache
def micro():
    return load_model(MICRO)[0]


@functools.cache
def noise():
    return torch.randn(1, 16, 1, 32, 32, generator=torch.Generator().manual_seed(3))


@functools.cache
def texts(width):
    """Of three prompts, the last one empty."""
    if width != micro().model.diffusion_model.txt_in.in_features:
        generator = torch.Generator().manual_seed(5)
        return [torch.randn(1, tokens, width, generator=generator) for tokens in (12, 20, 7)]
    pipe = QwenImagePipeline.from_pretrained(MICRO, local_files_only=True, transformer=None)
    return [pipe.encode_prompt(prompt)[0].float().clone() for prompt in PROMPTS]


def sample(model, settings=None, text=0, steps=STEPS):
    """(latents, the cache's lines) of a run with CFG 4 and Euler's steps."""
    cached = cache_steps(model, settings)
    known = texts(model.model.diffusion_model.txt_in.in_features)
    latents = comfy.sample.sample_custom(
        cached,
        noise(),
        4.0,
        comfy.samplers.sampler_object("euler"),
        torch.tensor(usual_sigmas(steps, 256)),
        [[known[text], {}]],
        [[known[2], {}]],
        torch.zeros_like(noise()),
        disable_pbar=True,
    )
    cache = cached.get_attachment(STEP_CACHE_KEY)
    return latents, [] if cache is None else cache.lines()


def test_an_adaptive_run_skips_steps_and_stays_near():
    exact = [sample(micro(), text=text)[0] for text in (0, 1)]
    cached = cache_steps(micro(), ADAPTIVELY)
    alone = [sample(micro(), ADAPTIVELY, text) for text in (0, 1)]
    for (found, lines), known in zip(alone, exact, strict=True):
        skipped = STEPS - int(lines[0].split()[4])
        assert 2 <= skipped <= 6
        assert 0 < (found - known).norm() / known.norm() < 0.02
        assert lines[-1] == f"step cache: chooses its steps by {PUBLISHED_CURVES[0].source}"
    # One MODEL after another, the second prompt first.
    for text in (1, 0):
        again = sample(cached, ADAPTIVELY, text)
        assert torch.equal(again[0], alone[text][0])
    assert torch.equal(sample(micro(), replace(ADAPTIVELY, threshold=0))[0], exact[0])


def narrow(tmp_path, *args, **kwargs):
    path = narrow_transformer.write(tmp_path / "narrow.safetensors", narrow_transformer.weights())
    return narrow_transformer.load_patcher(path, *args, **kwargs)


def test_the_gate_sees_what_the_first_block_gets(tmp_path, monkeypatch):
    models = {
        "micro": (micro(), 1e-5),
        "bf16": (narrow(tmp_path), 0.01),
        "off card": (narrow(tmp_path, off_card=True), 0.01),
        "optimized": (optimize(narrow(tmp_path, off_card=True)), 0.01),
        "int8": (narrow(tmp_path, "int8"), 0.01),
    }
    watched, all_open = [], replace(ADAPTIVELY, head=0, tail=0, threshold=0)

    def watch(now, before):
        watched.append((now, before))
        return torch.ones(())

    monkeypatch.setattr(change_gate, "relative_change", watch)
    for name, (model, most) in models.items():
        watched.clear()
        given = []
        block = model.model.diffusion_model.transformer_blocks[0]
        hook = block.attn.register_forward_pre_hook(
            lambda _, args, kwargs, given=given: given.append(kwargs["hidden_states"]),
            with_kwargs=True,
        )
        try:
            sample(model, all_open, steps=12)
        finally:
            hook.remove()
        passes = len(given) // 12
        inputs = [watched[0][1], *(now for now, _ in watched)]
        # From the step before the first that may be skipped to the last of those.
        first, last = ends(12, all_open)
        assert len(inputs) == last - first + 1, name
        for step, found in enumerate(inputs, first - 1):
            for known in given[passes * step : passes * (step + 1)]:
                error = (found - known).float().norm() / known.float().norm()
                assert found.dtype == known.dtype and error <= most, (name, step)


def test_a_calibrated_curve_of_the_checkpoint_wins(tmp_path, monkeypatch):
    monkeypatch.setenv("QWEN_L40S_CACHE", str(tmp_path))
    with safe_open(FILE, framework="pt") as file:
        identity = checkpoint_id(file.get_tensor(name) for name in IDENTIFYING)
    never = replace(PUBLISHED_CURVES[0], coefficients=(0.0, 10.0), precision="fp32")
    (tmp_path / CURVES).write_text(with_curve(tmp_path, identity, never))
    assert sample(micro(), ADAPTIVELY)[1] == [
        "step cache: custom has no effect: no step is skipped",
        "step cache: chooses its steps by the curve that calibrate-cache fitted on this checkpoint "
        "in fp32",
    ]
    other = narrow(tmp_path)
    assert "published" in sample(other, ADAPTIVELY)[1][-1]


def test_another_model_s_blocks_are_refused(tmp_path):
    model = narrow(tmp_path)
    model.model.__class__ = type("Another", (comfy.model_base.QwenImage,), {})
    exact = sample(model)[0]
    found, lines = sample(model, ADAPTIVELY)
    assert torch.equal(found, exact)
    assert lines == [f"step cache: custom has no effect: {NOT_ADAPTIVE}"]
