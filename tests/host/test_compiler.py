"""Qwen-Image-2.1 under the Comfy Compiler, which records what a block allocates."""

import logging
import re
from collections import Counter

import comfy.model_prefetch
import comfy.sample
import comfy.sd
import narrow_transformer as narrow
import pytest
import torch
from comfy.cli_args import args
from comfyui_boot import MODE, folder
from narrow_21 import TEXT, random, weights_21
from safetensors.torch import save_file

from qwen_l40s.hosts.comfyui.load.transformer import load_model
from qwen_l40s.hosts.comfyui.lora.apply import apply_lora
from qwen_l40s.hosts.comfyui.sample.forward import clean_up
from qwen_l40s.hosts.comfyui.sample.optimize import OptimizeSettings, optimize, report_of
from qwen_l40s.hosts.comfyui.sample.step_cache import cache_steps
from qwen_l40s.planning.step_cache import CacheSettings

pytestmark = [
    pytest.mark.usefixtures("inference_mode"),
    pytest.mark.host_has("comfy.model_base.QwenImage21", "comfy.model_prefetch.malloc_graph_begin"),
]
FOLDER = folder("compiler")
STEPS, BLOCKS = 12, 4
LINE = re.compile(r"Comfy model compiler graph breaks: (\d+), rogues: (\d+)")
EAGER = CacheSettings(budget=1, head=0, tail=0, longest=8)


@pytest.fixture(scope="module")
def models():
    path = FOLDER / "qwen_image_2.1.safetensors"
    weights = {name: each.bfloat16() for name, each in weights_21(BLOCKS).items()}
    save_file(weights, path)
    return {precision: load_model(path, precision)[0] for precision in ("bf16", "int8")}


@pytest.fixture(scope="module")
def lora():
    blocks = [f"transformer_blocks.{block}" for block in range(BLOCKS)]
    layers = [f"{block}.{layer}" for block in blocks for layer in ("attn.to_q", "img_mlp.out")]
    path = FOLDER / "lora.safetensors"
    save_file(narrow.lora(weights_21(BLOCKS), layers), path)
    return path


def sample(model, height=64, width=64, steps=STEPS):
    prompts = [[[random(1, tokens, TEXT).to(torch.bfloat16), {}]] for tokens in (30, 9)]
    latent = torch.zeros(1, 64, height, width)
    settings = (random(*latent.shape), steps, 3.0, "euler", "simple", *prompts, latent)
    return comfy.sample.sample(model, *settings, seed=0, disable_pbar=True)


def prompt(model, caplog):
    """The latents of two sizes, and what the compiler says when the prompt is over."""
    comfy.model_prefetch.cleanup_prefetch_queues()
    caplog.clear()
    with caplog.at_level(logging.INFO):
        latents = [sample(model), sample(model, 48, 80)]
        comfy.model_prefetch.cleanup_prefetch_queues()
    found = LINE.search(caplog.text)
    return latents, None if found is None else tuple(map(int, found.groups()))


@pytest.mark.cuda
@pytest.mark.skipif(MODE != "dynamic", reason="the compiler runs with dynamic VRAM")
@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "no graphs"])
@pytest.mark.parametrize("beside", ["", "merge", "bypass", "step cache"])
@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_no_more_breaks_and_rogues_than_without_our_node(
    models, lora, precision, beside, graphs, monkeypatch, caplog
):
    monkeypatch.setattr(args, "disable_cuda_graphs", not graphs)
    model = models[precision]
    if beside in ("merge", "bypass"):
        model, _ = apply_lora(model, lora, 1.0, how=beside)
    elif beside:
        model = cache_steps(model, EAGER)
    _, core = prompt(model, caplog)
    assert core is not None, "the compiler did not run: nothing is tested"
    optimized = optimize(model)
    latents, ours = prompt(optimized, caplog)
    report = report_of(optimized)
    assert "blocks: fused" in report
    assert "pin_count" not in caplog.text
    assert ("replayed one" in report) == graphs, report
    assert all(mine <= theirs for mine, theirs in zip(ours, core, strict=True)), (ours, core)
    monkeypatch.setattr(args, "disable_comfy_compiler", True)
    uncompiled, line = prompt(optimize(model), caplog)
    assert line is None
    assert all(map(torch.equal, latents, uncompiled))


@pytest.mark.each_device
def test_after_the_compilers_error_comfyuis_blocks_run(models, monkeypatch, caplog):
    """Once: in the step in which it stops, and all that follow."""
    model = models["bf16"]
    expected = sample(optimize(model, OptimizeSettings(blocks=False, attention="comfyui")), steps=4)
    own, calls = comfy.model_prefetch.prefetch_queue_pop, []

    def pop(*given, **more):
        calls.append(given)
        if len(calls) in (3, BLOCKS + 8):
            raise RuntimeError("aimdo memory compile error")
        return own(*given, **more)

    monkeypatch.setattr(comfy.model_prefetch, "prefetch_queue_pop", pop)
    optimized = optimize(model)
    with pytest.raises(RuntimeError, match="aimdo memory compile error"):
        sample(optimized, steps=4)  # the second is not the fused blocks'
    comfy.model_prefetch.cleanup_prefetch_queues()  # as ComfyUI does after each prompt
    assert sum("Accelerator: ComfyUI's compiler" in line for line in caplog.messages) == 1
    assert torch.equal(sample(optimized, steps=4), expected)
    report = report_of(optimized)
    assert "--disable-comfy-compiler" in report and "blocks: fused" not in report
    assert sum("Accelerator: ComfyUI's compiler" in line for line in caplog.messages) == 1


class Pinned(torch.nn.Linear):
    """A layer whose weights lie in a page of dynamic VRAM."""

    def __init__(self, page):
        super().__init__(2, 2)
        self._v, self._v_signature, self._pin_state = page, b"", {"fast_disk": False}


def test_a_loop_that_is_repeated_leaves_no_page_pinned(monkeypatch):
    pins = Counter()
    vbar, management = comfy.model_prefetch.comfy_aimdo.model_vbar, comfy.model_management
    monkeypatch.setattr(vbar, "vbar_fault", lambda page: pins.update([page]) or b"")
    monkeypatch.setattr(vbar, "vbar_unpin", lambda page: pins.subtract([page]))
    monkeypatch.setattr(vbar, "vbar_signature_compare", lambda *both: True)
    monkeypatch.setattr(management, "is_device_cpu", lambda device: False)
    monkeypatch.setattr(management, "device_supports_non_blocking", lambda device: True)
    monkeypatch.setattr(management, "NUM_STREAMS", 2)
    for name in ("sync_stream", "ensure_pin_registerable"):
        monkeypatch.setattr(management, name, lambda *given: None)
    monkeypatch.setattr(comfy.memory_management, "vram_aligned_size", lambda *given: 0)
    device, on = torch.device("cpu"), {"prefetch_dynamic_vbars": True}
    blocks = tuple(torch.nn.Sequential(Pinned(page)) for page in range(4))

    def loop(upto):
        queue = comfy.model_prefetch.make_prefetch_queue(list(blocks), device, on)
        for block in (*blocks, None)[:upto]:
            comfy.model_prefetch.prefetch_queue_pop(queue, device, block, malloc_scope="block")

    loop(upto=3)
    assert pins[2] == 1
    clean_up(blocks)
    loop(upto=5)
    comfy.model_prefetch.cleanup_prefetch_queues()
    assert not +pins
