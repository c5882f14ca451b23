"""What a run is recorded and reported as, in the real ComfyUI: tests/comfyui_report.py, one test
for each check, on the processor and, where there is one, on a card; and the node in a server.

Needs a ComfyUI that COMFYUI_PATH names, or one in ~/ComfyUI.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from comfyui_host import MODES, checks_in, comfyui_folder, run_in_comfyui
from comfyui_server import ROOT, Run, Server

SCRIPT = "comfyui_report.py"
CHECKS = checks_in(SCRIPT)
WORKFLOW = ROOT / "workflows" / "api" / "micro_text_to_image.json"


@pytest.fixture(scope="module", params=MODES)
def results(request, tmp_path_factory) -> dict[str, str | None]:
    """{check: None or its traceback}"""
    printed = run_in_comfyui(SCRIPT, tmp_path_factory.mktemp("report"), request.param)
    return json.loads(printed.splitlines()[-1])


@pytest.mark.parametrize("check", CHECKS)
def test_in_comfyui(results, check):
    assert results[check] is None, results[check]


def test_every_check_ran(results):
    assert set(results) >= set(CHECKS)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(comfyui_folder(), tmp_path_factory.mktemp("base"))
    yield server
    server.stop()


def graph(seed: int, prompt: str = "a small red star", **inputs: Any) -> dict[str, Any]:
    """The shared workflow, decoded by our node and reported."""
    nodes = json.loads(WORKFLOW.read_text(encoding="utf-8"))
    nodes["positive"]["inputs"]["text"] = prompt
    nodes["empty"]["inputs"] |= {"width": 64, "height": 64}
    nodes["sample"]["inputs"] |= {"seed": seed, "steps": 2}
    nodes["decode"] = {
        "class_type": "QwenL40S_VAEDecode",
        "inputs": {"samples": ["sample", 0], "vae": ["load", 2]},
    }
    parts = {"model": ["load", 0], "clip": ["load", 1], "vae": ["load", 2]}
    nodes["report"] = {
        "class_type": "QwenL40S_Report",
        "inputs": {"images": ["decode", 0], **parts, **inputs},
    }
    nodes["save"]["inputs"]["images"] = ["report", 0]
    return nodes


@pytest.mark.timeout(300)
def test_the_report_follows_each_run_of_a_server(server: Server):
    runs: dict[str, Run] = {}
    for name, seed, prompt in (
        ("first", 1, "a star"),
        ("seed", 2, "a star"),
        ("again", 2, "a star"),
        ("prompt", 2, "a ring"),
    ):
        runs[name] = server.run(graph(seed, prompt))
        assert runs[name].status == "success", runs[name].error
    texts = {name: run.text("report") for name, run in runs.items()}
    for name, run in runs.items():
        assert texts[name].startswith("sampled: 64x64, batch 1, 2 steps, 4 forward passes, CFG 4")
        assert "Nothing was sampled" not in texts[name], texts[name]
        assert ("report" in run.executed) == (name != "again")
    # Nothing ran, and the report of the run that made the image stays.
    assert texts["again"] == texts["seed"] != texts["first"]
    lines = {name: text.splitlines() for name, text in texts.items()}
    assert any(line.startswith("text encode ") for line in lines["first"])
    assert not any(line.startswith("text encode ") for line in lines["seed"])
    assert "text encode: not in this run" in texts["seed"]
    assert any(line.startswith("text encode ") for line in lines["prompt"])
    assert server.image(runs["first"], "save")


@pytest.mark.timeout(300)
def test_a_report_that_is_added_after_the_run_says_whose_figures_it_has(server: Server):
    nodes = graph(7)
    del nodes["report"]
    nodes["save"]["inputs"]["images"] = ["decode", 0]
    assert server.run(nodes).status == "success"
    nodes["report"] = graph(7)["report"]
    run = server.run(nodes)
    assert run.executed == ["report"]
    assert "Nothing was sampled with this MODEL in this run" in run.text("report")
    assert "sampled: 64x64" in run.text("report")


@pytest.mark.timeout(300)
def test_without_images_it_is_made_in_each_run(server: Server):
    nodes = graph(8)
    nodes["report"]["inputs"].pop("images")
    nodes["save"]["inputs"]["images"] = ["decode", 0]
    assert all("report" in server.run(nodes).executed for _ in range(2))
