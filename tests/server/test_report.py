"""The report of a run in a real ComfyUI server."""

from __future__ import annotations

import json
from typing import Any

from comfyui_server import ROOT, Run, Server

WORKFLOW = ROOT / "workflows" / "api" / "micro_text_to_image.json"


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
        assert "\nSampled: 64x64, batch 1, 2 steps, 4 forward passes, CFG 4" in texts[name]
        assert "so this run did not sample" not in texts[name], texts[name]
        assert ("report" in run.executed) == (name != "again")
    # Nothing ran, and the report of the run that made the image stays.
    assert texts["again"] == texts["seed"] != texts["first"]
    lines = {name: text.splitlines() for name, text in texts.items()}
    assert any(line.startswith("text encode (2 times) ") for line in lines["first"])
    assert not any(line.startswith("text encode ") for line in lines["seed"])
    assert "No text encoding was measured" in texts["seed"]
    assert any(line.startswith("text encode ") for line in lines["prompt"])
    assert server.image(runs["first"], "save")


def test_a_report_that_is_added_after_the_run_asks_for_another(server: Server):
    nodes = graph(7)
    del nodes["report"]
    nodes["save"]["inputs"]["images"] = ["decode", 0]
    assert server.run(nodes).status == "success"
    nodes["report"] = graph(7)["report"]
    run = server.run(nodes)
    assert run.executed == ["report"]
    assert "was not measured: this node was missing" in run.text("report")
    assert "Sampled: 64x64" in server.run(graph(9)).text("report")
