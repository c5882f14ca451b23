"""Which jobs a server's card cannot run, by its GET /system_stats."""

import copy
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from qwen_l40s.client.graph.fits import ELSEWHERE, MICROS, misfit
from qwen_l40s.client.graph.workflow import read_workflow
from qwen_l40s.errors import UnavailableError
from qwen_l40s.machine.card_list import known_cards
from qwen_l40s.planning.plan import plan
from qwen_l40s.planning.request import RunRequest
from qwen_l40s.spec.formats import GIB

API = Path(__file__).resolve().parents[2] / "workflows" / "api"
GRAPHS = {path.stem: read_workflow(path) for path in sorted(API.glob("*.json"))}
CARDS = known_cards()


def stats(listed, **device):
    """As ComfyUI 0.33 answers on a card of the list."""
    card = CARDS[listed]
    shown = {
        "name": f"cuda:0 {card.also[0]} : cudaMallocAsync",
        "type": "cuda",
        "index": 0,
        "vram_total": card.memory_bytes,
    }
    return {"system": {"ram_total": 64 * GIB}, "devices": [{**shown, **device}]}


def changed(name, **nodes):
    """A template with other values in some of its nodes."""
    graph = copy.deepcopy(GRAPHS[name])
    for node, inputs in nodes.items():
        graph[node]["inputs"] |= inputs
    return graph


LARGE = changed("text_to_image_2048", size={"batch_size": 16})


@pytest.mark.parametrize("card", ["L40S", "RTX 6000 Ada", "H200", "RTX 4060"])
def test_a_card_takes_every_template_that_runs_on_it_streamed_or_not(card):
    assert {name: misfit(graph, stats(card)) for name, graph in GRAPHS.items()} == dict.fromkeys(
        GRAPHS
    )


@pytest.mark.parametrize("card", ["RTX 4060", "RTX 3060 12GB", "L40S"])
@pytest.mark.parametrize("precision", ["auto", "bf16", "int8", "fp8", "as stored"])
@pytest.mark.parametrize("side, batch", [(1328, 1), (1328, 16), (2048, 16), (2048, 48)])
def test_a_card_refuses_what_the_planner_refuses_in_its_words(card, precision, side, batch):
    size = {"width": side, "height": side, "batch_size": batch}
    graph = changed("text_to_image_bf16", load={"precision": precision}, size=size)
    named = "auto" if precision == "as stored" else precision
    request = RunRequest(
        precision=named, width=side, height=side, batch=batch, steps=50, text_tokens=1
    )
    try:
        plan(CARDS[card].facts(), request)
    except UnavailableError as error:
        refusal = str(error).replace(CARDS[card].name, CARDS[card].also[0])
    else:
        refusal = None
    assert misfit(graph, stats(card)) == refusal


def test_the_sentence_tells_fact_rule_and_remedy():
    assert misfit(LARGE, stats("RTX 4060")) == (
        "NVIDIA GeForce RTX 4060 has 7.6 GiB and a step of a batch of 16 of 2048x2048 takes 20.1 "
        "GiB even when weights move to it block by block: choose a smaller size or batch, or "
        "choose a card with more memory."
    )
    assert misfit(GRAPHS["text_to_image_fp8"], stats("RTX 3060 12GB")) == (
        "precision fp8 needs a card of sm_89 or newer and NVIDIA GeForce RTX 3060 is sm_86: choose "
        "auto, bf16, int8."
    )
    assert misfit(LARGE, stats("L40S")) is None


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"devices": []},
        stats("RTX 4060", name="cpu", type="cpu"),
        stats("RTX 4060", name="cuda:0 NVIDIA A100-SXM4-40GB MIG 1g.5gb : native"),
        stats("RTX 4060", name="cuda:0 AMD Radeon RX 7900 XTX : native"),
        stats("RTX 4060", name="mps", type="mps"),
        stats("RTX 4060", vram_total=None),
    ],
)
def test_what_is_no_listed_card_refuses_nothing(answer):
    assert misfit(LARGE, answer) is None


def test_a_graph_of_other_nodes_is_not_judged():
    small = stats("RTX 4060")
    assert misfit({}, small) is None
    stock = copy.deepcopy(LARGE)
    stock["load"] |= {"class_type": "UNETLoader"}
    tiled = copy.deepcopy(LARGE)
    tiled["sample"] |= {"class_type": "BNK_TiledKSampler"}
    linked = changed(
        "text_to_image_2048", size={"batch_size": ["positive", 0], "width": [], "x": 1}
    )
    templates = ("micro_text_to_image", "micro_qwen_image_21")
    assert tuple(GRAPHS[name]["load"]["inputs"]["model"] for name in templates) == MICROS
    micros = [
        changed("text_to_image_2048", load={"model": model}, size={"batch_size": 64})
        for model in MICROS
    ]
    for graph in (stock, tiled, linked, *micros):
        assert misfit(graph, small) is None


def test_qwen_image_21_is_known_by_its_file():
    """Whose blocks are wider and whose weights are fewer: other batches fit."""
    size = {"width": 2048, "height": 2048, "batch_size": 8}
    for model, refused in (
        ("qwen_image_2.1_bf16.safetensors", True),
        ("sub/Qwen-Image-2_1-Turbo.safetensors", True),
        ("qwen_image_2512_bf16.safetensors", False),
        ("qwen_image_2512_style_v2.1.safetensors", False),
        ("qwen_image_edit_2511_bf16.safetensors", False),
    ):
        graph = changed("qwen_image_21", load={"model": model}, size=size)
        assert (misfit(graph, stats("RTX 3060 12GB")) is not None) == refused, model


@pytest.mark.parametrize(
    "node",
    ["QwenL40S_SplitCards", "MultiGPU_WorkUnits", "SelectModelDevice", "ContextWindowsManual"],
)
def test_what_paints_elsewhere_or_in_parts_is_not_judged(node):
    graph = copy.deepcopy(LARGE)
    graph["shift"]["class_type"] = node
    assert ELSEWHERE.search(node)
    assert misfit(graph, stats("RTX 4060")) is None


def test_a_sampler_is_judged_through_guiders_and_earlier_samplers():
    graph = copy.deepcopy(LARGE)
    graph["guide"] = {"class_type": "CFGGuider", "inputs": {"model": ["shift", 0], "cfg": 4.0}}
    graph["again"] = {
        "class_type": "SamplerCustomAdvanced",
        "inputs": {"guider": ["guide", 0], "latent_image": ["sample", 0]},
    }
    graph["sample"]["inputs"]["model"] = ["other", 0]
    assert misfit(graph, stats("RTX 4060")) is None  # nothing reads what it paints
    graph["decode"]["inputs"]["samples"] = ["again", 0]
    assert "batch of 16 of 2048x2048" in misfit(graph, stats("RTX 4060"))


def test_a_loader_without_a_sampler_is_held_to_its_precision():
    graph = changed("save_quantized", model={"precision": "fp8"})
    assert "sm_89" in misfit(graph, stats("RTX 3090"))
    del graph["save_quantized"]
    assert misfit(graph, stats("RTX 3090")) is None


def test_a_graph_that_is_wired_in_a_circle_ends():
    graph = changed("text_to_image_2048", shift={"model": ["optimize", 0]})
    graph["optimize"]["inputs"]["model"] = ["shift", 0]
    assert misfit(graph, stats("RTX 4060")) is None


def test_a_known_answer_takes_less_than_a_millisecond():
    """30 us on a core of an AMD EPYC."""
    small = stats("RTX 4060")
    misfit(LARGE, small)
    start = time.perf_counter()
    for seed in range(100):
        LARGE["sample"]["inputs"]["seed"] = seed
        misfit(LARGE, small)
    assert time.perf_counter() - start < 0.1


def test_it_takes_neither_torch_nor_numpy():
    code = (
        "import json, sys\n"
        "from qwen_l40s.client.graph.fits import misfit\n"
        f"misfit(json.loads({json.dumps(LARGE)!r}), json.loads({json.dumps(stats('L40S'))!r}))\n"
        "print({name.partition('.')[0] for name in sys.modules} & {'torch', 'numpy', 'psutil'})\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"
