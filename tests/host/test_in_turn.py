"""Prompts in turn, through the nodes: what one leaves is nothing to the next, whatever its size,
text, model, LoRA and step cache. Each latent is that of a fresh load, bit for bit.
"""

import contextlib
import functools
import gc
import random
import re
import threading
from typing import Any, NamedTuple
from unittest import mock

import comfy.model_management
import comfy.sample
import pytest
import torch
from comfyui_boot import BASE
from narrow_transformer import lora, save_file
from safetensors.torch import load_file

import nodes as core
from qwen_l40s.hosts.comfyui.sample.optimize import report_of
from qwen_l40s.loaders.source import bundled_micro_folder
from qwen_l40s.nodes.loaders import QwenL40SLoad
from qwen_l40s.nodes.lora import QwenL40SLoadLora
from qwen_l40s.nodes.optimize import QwenL40SOptimize
from qwen_l40s.nodes.step_cache import QwenL40SStepCache
from qwen_l40s.nodes.vae import QwenL40SVAEDecode
from qwen_l40s.optimizations.run import flags_for_a_run

pytestmark = pytest.mark.usefixtures("inference_mode")
STEPS = 13
CACHE = {"cache": "custom", "budget": 1.0, "head": 0.1, "tail": 0.1, "longest": 2, "gain": 0.5}
SIZES = {
    "QwenImage": ((1, 16, 1, 8, 8), (1, 16, 1, 12, 6)),
    "QwenImage21": ((1, 64, 4, 4), (1, 64, 6, 3)),
}
TEXTS = "a red ring", "a large green circle at the bottom right of a white background, and a star"
# Of a load: the model's name, its precision, how its LoRA is applied.
KINDS = {
    "1.x, bf16": ("micro (bundled)", "bf16", "merge"),
    "1.x, int8": ("micro (bundled)", "int8", "bypass"),
    "2.1, bf16": ("micro 2.1 (bundled)", "bf16", "merge"),
    "2.1, int8": ("micro 2.1 (bundled)", "int8", "bypass"),
}
NEWER = pytest.mark.host_has("comfy.model_base.QwenImage21")


def each(*kinds: str) -> list:
    return [pytest.param(it, marks=NEWER if "2.1" in it else ()) for it in kinds]


class Prompt(NamedTuple):
    """One prompt's settings; `size` and `text` by their place in `SIZES` and `TEXTS`."""

    size: int
    text: int
    lora: bool
    cached: bool


PROMPTS = [
    Prompt(*(number >> bit & 1 for bit in range(len(Prompt._fields)))) for number in range(16)
]


@functools.cache
def lora_of(name: str) -> str:
    """Writes a LoRA of the first block's attention; gives its name."""
    folder = bundled_micro_folder("2.1") if "2.1" in name else bundled_micro_folder()
    (file,) = (folder / "transformer").glob("*.safetensors")
    tensors = load_file(file)
    modules = [key.removesuffix(".weight") for key in tensors if ".0.attn.to_" in key]
    target = BASE / "models" / "loras" / f"{name}.safetensors"
    target.parent.mkdir(parents=True, exist_ok=True)
    save_file(lora(tensors, [it for it in modules if not it.endswith(".bias")]), target)
    return target.name


class Graph:
    """One load and what hangs on it, kept from prompt to prompt as ComfyUI keeps nodes' outputs."""

    def __init__(self, kind: str) -> None:
        name, precision, how = KINDS[kind]
        whole = {"text_encoder": "automatic", "vae": "automatic"}
        loaded = QwenL40SLoad.execute(model=name, precision=precision, **whole)
        self.plain, self.clip, self.vae, _ = loaded.args
        self._lora = lora_of(name), 1.0, how
        self.model = functools.cache(self._model)
        self.text = functools.cache(self._text)

    def _model(self, with_lora: bool, cached: bool) -> Any:
        model = self.plain
        if with_lora:
            model = QwenL40SLoadLora.execute(model, *self._lora).args[0]
        model = QwenL40SOptimize.execute(model, "math", True).args[0]
        return QwenL40SStepCache.execute(model, CACHE).args[0] if cached else model

    def _text(self, text: str) -> list:
        return self.clip.encode_from_tokens_scheduled(self.clip.tokenize(text))

    def paint(self, prompt: Prompt) -> torch.Tensor:
        """What KSampler gives."""
        model = self.model(prompt.lora, prompt.cached)
        latent = {"samples": torch.zeros(SIZES[type(model.model).__name__][prompt.size])}
        texts = self.text(TEXTS[prompt.text]), self.text("")
        given = model, 7, STEPS, 3.0, "euler", "simple", *texts, latent, 1.0
        return core.KSampler().sample(*given)[0]["samples"]


@functools.cache
def known(kind: str, prompt: Prompt) -> torch.Tensor:
    """The latent of a fresh load."""
    gc.collect()
    graph = Graph(kind)
    found, report = graph.paint(prompt), report_of(graph.model(prompt.lora, prompt.cached))
    assert re.match(r"blocks: fused, (\d+) of \1 in ", report), report
    comfy.model_management.unload_all_models()
    return found


def check(graph: Graph, kind: str, prompts: list[Prompt]) -> None:
    for number, prompt in enumerate(prompts):
        assert torch.equal(graph.paint(prompt), known(kind, prompt)), (number, prompts)


@pytest.mark.parametrize("kind", each(*KINDS))
def test_prompts_in_turn(kind):
    assert len({known(kind, it).numpy().tobytes() for it in PROMPTS}) == len(PROMPTS)
    graph, order = Graph(kind), PROMPTS.copy()
    random.Random(0).shuffle(order)
    check(graph, kind, order)
    comfy.model_management.unload_all_models()
    check(graph, kind, order[:2])


@pytest.mark.parametrize("other", each("1.x, int8", "2.1, bf16"))
def test_two_models_in_turn(other):
    graphs = {kind: Graph(kind) for kind in ("1.x, bf16", other)}
    for prompt in PROMPTS[::5]:
        for kind, graph in graphs.items():
            check(graph, kind, [prompt])


@pytest.fixture
def one_at_a_time(monkeypatch):
    """Has threads draw noise and ask for models one at a time. In ComfyUI itself all noise is of
    torch's one generator: between a seed and its noise another thread may draw. And all threads
    change one list of models.
    """
    lock, models = threading.RLock(), comfy.model_management
    for owner, name in ((comfy.sample, "prepare_noise"), (models, "load_models_gpu")):
        own = getattr(owner, name)

        def locked(*given, own=own, **named):
            with lock:
                return own(*given, **named)

        monkeypatch.setattr(owner, name, locked)


@pytest.mark.usefixtures("one_at_a_time")
@pytest.mark.parametrize("other", each("1.x, int8", "2.1, bf16"))
def test_two_threads_that_sample_two_models(other):
    """As ComfyUI with a second queue, or a pack that samples in the background."""
    errors, prompts = [], PROMPTS[::5]
    graphs = {kind: Graph(kind) for kind in ("1.x, bf16", other)}
    for kind, graph in graphs.items():  # ComfyUI loads models for one thread at a time
        check(graph, kind, prompts)

    def work(kind: str) -> None:
        try:
            with torch.inference_mode():
                check(graphs[kind], kind, prompts)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=[kind]) for kind in graphs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors


def test_a_switch_of_two_runs_stays_until_the_second_has_ended():
    switches = torch.backends.cudnn
    before = switches.benchmark
    with contextlib.ExitStack() as first, contextlib.ExitStack() as second:
        for run in (first, second):
            run.enter_context(flags_for_a_run(tf32=False, cudnn_benchmark=True))
        first.close()
        assert switches.benchmark
        second.close()
        assert switches.benchmark is before


@pytest.mark.parametrize("kind", each("1.x, bf16", "2.1, int8"))
def test_a_preview_and_a_decode_between_steps(kind):
    graph, images = Graph(kind), []

    def between(model: Any, steps: int, **_: Any):
        def called(step: int, x0: torch.Tensor, x: torch.Tensor, steps: int) -> None:
            images.append(QwenL40SVAEDecode.execute({"samples": x0}, graph.vae).args[0])

        return called

    prompts = PROMPTS[::5]
    for prompt in prompts:
        known(kind, prompt)  # without a preview
    with mock.patch("latent_preview.prepare_callback", between):
        check(graph, kind, prompts)
    assert len(images) == len(prompts) * STEPS
    assert all(image.isfinite().all() for image in images)
