"""A third family in ComfyUI without a changed line of the package."""

import comfy.model_base
import comfy.model_detection
import comfy.sample
import comfy.sd
import comfy.supported_models
import pytest
import torch
from comfy.quant_ops import QuantizedTensor
from comfyui_boot import folder
from safetensors.torch import load_file, save_file
from toy_family import model, weights
from toy_family.family import MEMBER, TITLE, TOY

from qwen_l40s.errors import CheckpointError
from qwen_l40s.families import registry
from qwen_l40s.hosts.comfyui.estimate.request import request_from
from qwen_l40s.hosts.comfyui.load.transformer import load_model
from qwen_l40s.hosts.comfyui.lora.apply import apply_lora
from qwen_l40s.hosts.comfyui.sample.optimize import OptimizeSettings, optimize, report_of
from qwen_l40s.hosts.comfyui.save import save_quantized
from qwen_l40s.loaders.source import open_source
from qwen_l40s.planning.options import request_settings

pytestmark = pytest.mark.usefixtures("inference_mode")
FOLDER = folder("toy_family")
LAYERS = len(weights.SHAPE.quantizable_layers())


@pytest.fixture(autouse=True)
def known(monkeypatch):
    """To ComfyUI as it would know it, and to the package as one more entry."""
    detect = model.detect(comfy.model_detection.detect_unet_config)
    monkeypatch.setattr(comfy.model_detection, "detect_unet_config", detect)
    monkeypatch.setattr(comfy.model_base, "ToyImage", model.ToyImage, raising=False)
    monkeypatch.setattr(comfy.supported_models, "ToyImage", model.ToyConfig, raising=False)
    models = [*comfy.supported_models.models, model.ToyConfig]
    monkeypatch.setattr(comfy.supported_models, "models", models)
    registry.FAMILIES.append(TOY)
    yield
    registry.FAMILIES.remove(TOY)


@pytest.fixture
def file():
    return weights.write(FOLDER / "toy_image.safetensors")


def paint(patcher, batch=1, cfg=1.0):
    generator = torch.Generator().manual_seed(0)
    latent = torch.zeros(batch, 16, 1, 8, 12)
    noise = torch.randn(latent.shape, generator=generator)
    prompts = ([[torch.randn(1, words, 64, generator=generator), {}]] for words in (5, 7))
    settings = noise, 3, cfg, "euler", "simple", *prompts, latent
    return comfy.sample.sample(patcher, *settings, seed=0, disable_pbar=True)


def close(found, expected, most):
    return (found - expected).norm() <= most * expected.norm()


def blocks_of_last_run(patcher):
    return next(line for line in report_of(patcher).splitlines() if line.startswith("blocks:"))


@pytest.mark.parametrize("precision", ["bf16", "int8", "fp8"])
def test_it_is_loaded_optimized_and_painted(file, precision):
    plain = comfy.sd.load_diffusion_model(str(file))
    expected = paint(plain)
    patcher, report = load_model(file, precision)
    assert report.source.part.family == TITLE
    quantized = [
        weight
        for _, weight in patcher.model.diffusion_model.named_parameters()
        if isinstance(weight, QuantizedTensor)
    ]
    assert len(quantized) == (LAYERS if precision != "bf16" else 0)
    own = paint(patcher)
    if precision == "bf16":
        assert torch.equal(own, expected)
    assert close(own, expected, 0.05)
    for how in ({}, {"batch": 2}, {"cfg": 3.0}):
        fast = optimize(patcher)
        assert close(paint(fast, **how), paint(patcher, **how), 1e-5 if not quantized else 0.03)
        assert "fused" in blocks_of_last_run(fast)
    off = optimize(patcher, OptimizeSettings(blocks=False, attention="comfyui"))
    assert torch.equal(paint(off), own)


@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_a_lora_is_merged_and_runs_beside_it(file, precision):
    lora = weights.write_lora(FOLDER / "lora.safetensors")
    plain, _ = load_model(file, "bf16")
    without = paint(plain)
    expected = paint(apply_lora(plain, lora, 1.0, how="merge")[0])
    assert not close(without, expected, 0.1)
    patcher, _ = load_model(file, precision)
    for how in ("merge", "bypass"):
        changed, report = apply_lora(patcher, lora, 1.0, how=how)
        assert (report.applied, report.not_applied, report.how) == (LAYERS, (), how)
        for found in (paint(changed), paint(optimize(changed))):
            assert close(found, expected, 0.02 if precision == "bf16" else 0.06)


def test_a_lora_of_another_family_is_refused(file):
    path, name = FOLDER / "other.safetensors", "transformer_blocks.0.img_mlp.net.2"
    pair = {
        f"{name}.lora_A.weight": torch.ones(2, 512),
        f"{name}.lora_B.weight": torch.ones(128, 2),
    }
    save_file(pair, path)
    with pytest.raises(CheckpointError, match="for Qwen-Image, but the MODEL is Toy-Image"):
        apply_lora(load_model(file)[0], path, 1.0, how="merge")


def test_it_is_saved_quantized_and_estimated(file):
    patcher, _ = load_model(file, "bf16")
    for precision in ("int8", "fp8"):
        path = FOLDER / f"saved_{precision}.safetensors"
        save_quantized(patcher, path, precision, overwrite=True)
        assert open_source(path, "transformer").part.family == TITLE
        again, _ = load_model(path, "as stored")
        fresh, _ = load_model(file, precision)
        assert torch.equal(paint(again), paint(fresh))
        assert len(load_file(path)) > LAYERS
    found = request_from(request_settings(), model=patcher).request
    assert (found.family, found.parts.transformer) == (MEMBER.name, weights.SHAPE)
