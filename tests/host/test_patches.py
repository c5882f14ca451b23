"""After a run nothing of ComfyUI, torch or Triton is another than before, but what is listed."""

import comfy.model_management
import comfy.ops
import narrow_transformer as narrow
import pytest
import torch
from comfyui_boot import folder
from host_snapshot import changed, instances, modules_and_classes
from narrow_transformer import random

from qwen_l40s.hosts.comfyui.lora.apply import apply_lora
from qwen_l40s.hosts.comfyui.sample.optimize import OptimizeSettings, optimize
from qwen_l40s.hosts.comfyui.sample.step_cache import cache_steps
from qwen_l40s.planning.step_cache import cache_settings

pytestmark = pytest.mark.each_device
FOLDER = folder("patches")
WEIGHTS = narrow.weights()
PATH = narrow.write(FOLDER / "bf16.safetensors", WEIGHTS)
LORA = FOLDER / "lora.safetensors"
narrow.save_file(narrow.lora(WEIGHTS, narrow.layers(WEIGHTS)), LORA)


def sample(model, steps):
    return narrow.sample(model, [[random(1, 7, narrow.SHAPE.joint_dim), {}]], steps=steps)


def run(model):
    """All that this package does to a MODEL, a run of it, and what ComfyUI does as it unloads."""
    beside, _ = apply_lora(model, LORA, 1.0, how="bypass")
    fast = optimize(beside, OptimizeSettings(tf32=True, cudnn_benchmark=True))
    sample(cache_steps(fast, cache_settings("balanced")), steps=11)
    comfy.model_management.unload_all_models()


def test_after_a_run_all_is_as_before_but_for_what_is_listed():
    known = narrow.stock({name: it.clone() for name, it in WEIGHTS.items()})
    sample(known, steps=1)
    comfy.model_management.unload_all_models()
    before = modules_and_classes() | instances(model=known.model, patcher=known)
    run(known)
    after = modules_and_classes() | instances(model=known.model, patcher=known)
    assert changed(before, after) == []


@pytest.mark.usefixtures("inference_mode")
@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_a_model_of_our_loader_is_as_before_a_run(precision):
    ours = narrow.load_patcher(PATH, precision, off_card=True)
    sample(ours, steps=1)
    comfy.model_management.unload_all_models()
    before = modules_and_classes() | instances(model=ours.model, patcher=ours)
    run(ours)
    after = modules_and_classes() | instances(model=ours.model, patcher=ours)
    assert changed(before, after) == []


def test_what_is_not_listed_is_found(monkeypatch):
    model = narrow.stock({name: it.clone() for name, it in WEIGHTS.items()})
    block = model.model.diffusion_model.transformer_blocks[0]
    before = modules_and_classes() | instances(model=model.model)
    monkeypatch.setattr(comfy.ops, "cast_bias_weight", None)
    monkeypatch.setattr(torch.nn.Linear, "forward", None)
    monkeypatch.setattr(block, "ours", 1, raising=False)
    found = changed(before, modules_and_classes() | instances(model=model.model))
    assert {name for _, name in found} >= {"cast_bias_weight", "ours"}
