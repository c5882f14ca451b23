"""The shared workflows in a real ComfyUI server, over its HTTP interface, on the CPU."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from comfyui_server import ROOT, Run, Server
from PIL import Image
from waiting import until
from workflow_files import Graph, published_files, small_files

from qwen_l40s.micro.judge import adherence
from qwen_l40s.micro.scene import parse_prompt

FOLDER = ROOT / "workflows" / "api"
SHIPPED = sorted(FOLDER.glob("*.json"))
NODES = "workflow_nodes.py"
SIDE, STEPS = 256, 8
PROMPT = "a large green circle at the bottom right on a white background"


def read(file: Path) -> Graph:
    return json.loads(file.read_text(encoding="utf-8"))


def each(files: list[Path]) -> pytest.MarkDecorator:
    names = ["/".join(file.relative_to(ROOT).with_suffix("").parts[1:]) for file in files]
    return pytest.mark.parametrize("file", files, ids=names)


EDITS = [file for file in SHIPPED if file.stem.startswith(("edit", "inpaint"))]
PAINT = ("text_to_image", "lightning", "lora", "batch", "controlnet")
TEXT_TO_IMAGE = [file for file in SHIPPED if file.stem.startswith(PAINT)]


@pytest.fixture(scope="module")
def known(server: Server) -> dict[str, Any]:
    return server.client.get("/object_info").json()


def runs_here(known: dict[str, Any], file: Path) -> None:
    """Skips a file of Qwen-Image-2.1 where the host is older."""
    if "qwen_image_21" in file.stem and "TextEncodeQwenImage21" not in known:
        pytest.skip("this ComfyUI has no Qwen-Image-2.1: 0.37 or newer has")


@contextmanager
def held_queue(server: Server) -> Iterator[None]:
    """What is posted meanwhile is accepted or refused, and never runs."""
    waits = server.post({"wait": {"class_type": "TestsWait", "inputs": {}}}).json()["prompt_id"]
    try:
        yield
    finally:
        server.client.post("/queue", json={"clear": True})

        def ended() -> bool:
            server.client.post("/interrupt", json={"prompt_id": waits})
            return not _unfinished(server)

        until(ended)


def _unfinished(server: Server) -> list[Any]:
    queue = server.client.get("/queue").json()
    return [*queue["queue_running"], *queue["queue_pending"]]


@each(SHIPPED)
def test_it_is_accepted_as_it_is_shipped(server: Server, known: dict[str, Any], file: Path):
    runs_here(known, file)
    graph = read(file)
    with held_queue(server), published_files(server.base, graph):
        answer = server.post(graph)
        assert answer.status_code == 200, answer.text
        assert answer.json()["node_errors"] == {}, answer.text
        assert answer.json()["prompt_id"] in [entry[1] for entry in _unfinished(server)]


def pictures(server: Server, run: Run, node: str) -> list[Image.Image]:
    found = []
    for entry in run.history["outputs"][node]["images"]:
        answer = server.client.get("/view", params=entry)
        answer.raise_for_status()
        found.append(Image.open(io.BytesIO(answer.content)))
    return found


def shows(image: Image.Image, prompt: str) -> bool:
    return adherence(np.asarray(image.convert("RGB")), parse_prompt(prompt)).score == 1.0


@pytest.mark.parametrize("name", ["micro_text_to_image", "micro_qwen_image_21"])
def test_a_micro_workflow_paints_its_prompt(server: Server, known: dict[str, Any], name: str):
    runs_here(known, FOLDER / f"{name}.json")
    graph = read(FOLDER / f"{name}.json")
    run = server.run(graph)
    assert run.status == "success", run.error
    (image,) = pictures(server, run, "save")
    assert shows(image, graph["positive"]["inputs"]["text"])


def small(file: Path) -> Graph:
    """A workflow for the small models: what people change is changed, and its wires are as shipped.

    What these models do not know is left out of the prompts; other pictures stand in for each of an
    edit; and the picture that is edited is saved too.
    """
    graph = read(file)
    for name, node in graph.items():
        inputs = node["inputs"]
        if node["class_type"] == "EmptySD3LatentImage":
            inputs |= {"width": SIDE, "height": SIDE}
        elif node["class_type"] == "KSampler":
            inputs["steps"] = min(inputs["steps"], STEPS)
        elif node["class_type"] == "LoadImage":
            inputs["image"] = f"{name}.png"
        elif node["class_type"] == "CLIPTextEncode":
            inputs["text"] = PROMPT if name == "positive" else " "
    for scaled in {"scale", "mask_scale"} & graph.keys():
        inputs = {"images": [scaled, 0], "filename_prefix": scaled}
        title = {"title": f"Saved {scaled}"}
        graph[f"saved_{scaled}"] = {"class_type": "SaveImage", "inputs": inputs, "_meta": title}
    return graph


def run_small(server: Server, graph: Graph) -> Run:
    with small_files(server.base, graph):
        run = server.run(graph)
    assert run.status == "success", run.error["exception_message"]
    return run


@each(TEXT_TO_IMAGE)
def test_text_to_image_paints_the_prompt(server: Server, file: Path):
    graph = small(file)
    run = run_small(server, graph)
    images = pictures(server, run, "save")
    assert len(images) == graph["size"]["inputs"]["batch_size"]
    for image in images:
        assert image.size == (SIDE, SIDE)
        assert shows(image, PROMPT)
    load = "model" if "model" in graph else "load"
    asked = graph[load]["inputs"]
    says = asked["model"] if asked["precision"] == "auto" else asked["precision"]
    held = next((name for name in ("fp8", "int8") if name in says), "bf16")
    assert f"\n{held}, " in run.text(load)
    if "lora" in graph:
        assert "8 of 8 keys applied" in run.text("lora")


@each(EDITS)
def test_an_edit_has_the_shape_of_its_first_picture(server: Server, file: Path):
    graph = small(file)
    run = run_small(server, graph)
    (image,), (scaled,) = (pictures(server, run, node) for node in ("save", "saved_scale"))
    assert image.size == scaled.size
    assert "Qwen-Image-Edit-2511" in run.text("load" if "load" in graph else "model")
    found, given = (np.asarray(each.convert("RGB")).astype(int) for each in (image, scaled))
    assert found.std() > 1  # neither black nor of one colour
    changed = np.abs(found - given).max(axis=-1)
    if "lora" in graph:
        assert "8 of 8 keys applied" in run.text("lora")
    if file.stem != "inpaint":
        assert (changed > 8).mean() > 0.5
        return
    (mask,) = pictures(server, run, "saved_mask_scale")
    covered = np.asarray(mask.convert("L"))
    assert 0.01 < (covered == 255).mean() < 0.5
    assert changed[covered == 0].max() == 0
    assert (changed[covered == 255] > 8).mean() > 0.5


@pytest.mark.parametrize(
    ("file", "ids"),
    [
        ("edit_2511_three_references", ("image_1", "image_2", "image_3")),
        ("try_on", ("person", "garment")),
    ],
)
def test_each_reference_counts(server: Server, file: str, ids: tuple[str, ...]):
    graph = small(FOLDER / f"{file}.json")
    graph["sample"]["inputs"]["steps"] = 1
    references = [graph[id]["inputs"] for id in ids]
    names = [inputs["image"] for inputs in references]
    assert len(set(names)) == len(ids)
    seen = []
    for instead in (None, *range(len(ids))):
        for index, (inputs, name) in enumerate(zip(references, names, strict=True)):
            inputs["image"] = "another.png" if index == instead else name
        (image,) = pictures(server, run_small(server, graph), "save")
        seen.append(image.tobytes())
    assert len(set(seen)) == len(ids) + 1


def test_a_try_on_has_either_size(server: Server):
    graph, shipped = small(FOLDER / "try_on.json"), read(FOLDER / "try_on.json")
    for size in ((720, 1280), (480, 720)):
        graph["size"]["inputs"] |= dict(zip(("width", "height"), size, strict=True))
        run = run_small(server, graph)
        (image,) = pictures(server, run, "save")
        assert image.size == size
        assert np.asarray(image).std() > 1
        assert "8 of 8 keys applied" in run.text("lora")
    assert graph["sample"] == shipped["sample"]


def test_a_controlnet_follows_the_picture_optimized_or_not(server: Server):
    graph = small(FOLDER / "controlnet.json")
    graph["sample"]["inputs"]["steps"] = 2
    graph["size"] = read(FOLDER / "controlnet.json")["size"]  # the picture's
    control, picture = graph["control"]["inputs"], graph["image"]["inputs"]

    def painted() -> np.ndarray:
        (image,) = pictures(server, run_small(server, graph), "save")
        assert image.size == (384, 288)
        return np.asarray(image.convert("RGB")).astype(int)

    followed = painted()
    assert "blocks: fused, 24 of 24 in 4 forward passes" in server.tail()
    graph["shift"]["inputs"]["model"] = ["load", 0]
    assert np.abs(painted() - followed).max() <= 2
    for inputs, name, value in ((picture, "image", "another.png"), (control, "strength", 0.0)):
        inputs[name] = value
        assert np.abs(painted() - followed).max() > 8, name


@pytest.mark.parametrize("name", ["estimate", "advise"])
def test_an_estimate_and_advice_are_text_and_picture(server: Server, name: str):
    graph = read(FOLDER / f"{name}.json")
    run = run_small(server, graph)
    assert sorted(run.executed) == sorted(graph)
    assert run.text("text") == run.text(name) and "L40S" in run.text(name)
    (chart,) = pictures(server, run, name)
    assert np.asarray(chart).std() > 1


@pytest.mark.parametrize("name", ["estimate_generate_report", "micro_report"])
def test_the_report_has_predicted_and_measured(server: Server, name: str):
    graph = small(FOLDER / f"{name}.json")
    run = run_small(server, graph)
    assert f"{SIDE}x{SIDE}" in run.text("estimate")
    report = run.text("report")
    assert f"Sampled: {SIDE}x{SIDE}, batch 1, {STEPS} steps" in report
    assert "prediction" in report and "\nsampling " in report and "blocks: fused, " in report
    for node in ("save", "estimate_picture"):
        (image,) = pictures(server, run, node)
        assert node != "save" or shows(image, PROMPT)
    assert run.executed.index("estimate") < run.executed.index("sample")


def test_a_picture_comes_apart_into_layers_with_transparency(server: Server):
    graph = read(FOLDER / "layered.json")
    graph["sample"]["inputs"]["steps"] = 1
    graph["scale"]["inputs"]["largest_size"] = 4 * 128  # a quarter of it: workflow_nodes.py
    run = run_small(server, graph)
    assert "Qwen-Image-Layered" in run.text("load")
    found = pictures(server, run, "save")
    assert len(found) == graph["size"]["inputs"]["layers"]
    assert {image.mode for image in found} == {"RGBA"}
    assert len({image.size for image in found}) == 1


def test_a_quantized_file_is_written_and_chosen(server: Server):
    graph = read(FOLDER / "save_quantized.json")
    run = run_small(server, graph)
    name = graph["save_quantized"]["inputs"]["filename"]
    written = server.base / "models" / "diffusion_models" / name
    assert written.is_file() and "int8" in run.text("save_quantized")
    (choices,) = server.client.get("/object_info/QwenL40S_LoadModel").json().values()
    assert name in choices["input"]["required"]["model"][1]["options"]
    written.unlink()
