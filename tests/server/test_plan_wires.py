"""Estimate and Advise give a plan that wires into the loaders; what is wrong is said once."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from comfyui_server import Server

from qwen_l40s.planning.options import LABELS, labelled

RUN = {"family": "auto", "precision": "auto", "width": 1328, "height": 1328, "batch": 1}
RUN |= {"steps": 50, "cfg": "two passes", "references": 0}
# {class: (inputs, index of the first output of the plan)}
PLANNERS = {
    "QwenL40S_EstimateVRAM": ({**RUN, "card": "L40S"}, 4),
    "QwenL40S_AdviseGPU": ({**RUN, "images_per_hour": 100.0}, 2),
}
MICRO = "micro (bundled)"


def node(kind: str, **inputs: Any) -> dict[str, Any]:
    return {"class_type": kind, "inputs": inputs}


@pytest.mark.parametrize("planner", PLANNERS)
def test_a_plan_wires_into_the_loaders(server: Server, planner: str):
    inputs, first = PLANNERS[planner]
    precision, modulation, placement = (["plan", first + index] for index in range(3))
    model = {"model": MICRO, "precision": precision, "modulation": modulation}
    encoder = {"text_encoder": MICRO, "precision": "auto", "placement": placement}
    run = server.run(
        {
            "plan": node(planner, **inputs),
            "model": node("QwenL40S_LoadModel", **model),
            "encoder": node("QwenL40S_LoadTextEncoder", **encoder),
            "model_text": node("PreviewAny", source=["model", 1]),
            "encoder_text": node("PreviewAny", source=["encoder", 1]),
        }
    )
    assert run.status == "success", run.error
    report = run.text("plan")
    held = run.text("model").splitlines()[1].split(",")[0]
    said = labelled("precision", held)
    assert f"Load Qwen-Image Model: {said}, {LABELS['modulation']} " in report
    encoder = run.text("encoder").splitlines()
    (placed,) = [line for line in encoder if line.startswith(LABELS["placement"])]
    assert f"{placed.split(':')[0]}." in report


def only_error(server: Server, **nodes: dict[str, Any]) -> str:
    """What is wrong with the first of the nodes, which is said once."""
    answer = server.post(nodes).json()
    (error,) = answer["node_errors"][next(iter(nodes))]["errors"]
    return error["details"]


def test_a_lora_that_is_none_is_one_error_before_the_run(server: Server):
    loras = server.base / "models" / "loras"
    loras.mkdir(parents=True, exist_ok=True)
    vae = Path(__file__).resolve().parents[2] / "models" / "micro" / "vae"
    (loras / "vae.safetensors").symlink_to(vae / "diffusion_pytorch_model.safetensors")
    model = node("QwenL40S_LoadModel", model=MICRO, precision="auto")
    shown = node("PreviewAny", source=["lora", 1])
    for name, words in (
        ("vae.safetensors", "This is not a LoRA but Qwen-Image VAE"),
        ("none.safetensors", "'none.safetensors' is not in models/loras"),
    ):
        lora = node("QwenL40S_LoadLora", model=["model", 0], lora=name, strength=1.0, how="merge")
        assert words in only_error(server, lora=lora, model=model, shown=shown)


def test_links_to_nothing_and_pipes_hide_no_node(server: Server):
    def listed() -> set[str]:
        return {it for it in server.client.get("/object_info").json() if it.startswith("QwenL40S_")}

    before, made = listed(), []
    for folder in ("diffusion_models", "text_encoders", "vae", "checkpoints", "loras"):
        for end, make in ((".safetensors", Path.symlink_to), (".gguf", os.mkfifo)):
            path = server.base / "models" / folder / f"qwen{end}"
            path.parent.mkdir(parents=True, exist_ok=True)
            make(path, *["/nowhere"] * (make is Path.symlink_to))
            made.append(path)
    try:
        assert listed() == before
        model = node("QwenL40S_LoadModel", model="qwen.safetensors", precision="auto")
        text = node("PreviewAny", source=["model", 1])
        assert "qwen.safetensors" in only_error(server, model=model, text=text)
    finally:
        for path in made:
            path.unlink()
