"""The nodes in a real ComfyUI server, over its HTTP interface, on the CPU."""

from __future__ import annotations

import io
import json
import re
import shutil
from typing import Any

import numpy as np
import pytest
from comfyui_server import PACK, ROOT, Server
from PIL import Image
from safetensors.torch import load_file, save_file

from qwen_l40s.micro.judge import adherence
from qwen_l40s.micro.scene import parse_prompt

MICRO = "micro (bundled)"
WORKFLOW = ROOT / "workflows" / "api" / "micro_text_to_image.json"
PROMPT = "a large green circle at the bottom right on a white background"


@pytest.fixture(scope="module", autouse=True)
def copied(server: Server) -> None:
    """The bundled folder among the server's own models, too."""
    shutil.copytree(ROOT / "models" / "micro", server.base / "models" / "diffusers" / "copy")


def graph(prompt: str = PROMPT, *, seed: int = 1, steps: int = 20, **load: Any) -> dict[str, Any]:
    """The shared workflow with other inputs; `load` are those of the loader."""
    nodes = json.loads(WORKFLOW.read_text(encoding="utf-8"))
    nodes["positive"]["inputs"]["text"] = prompt
    nodes["sample"]["inputs"] |= {"seed": seed, "steps": steps}
    nodes["load"]["inputs"] |= load
    return nodes


def pixels(data: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


def test_the_pack_is_imported_under_a_name_with_a_dash_and_a_dot(server: Server):
    log = server.log.read_text()
    (line,) = [line for line in log.splitlines() if line.endswith(f"/{PACK}")]
    assert "IMPORT FAILED" not in line
    nodes = server.client.get("/object_info").json()
    pages = {page.stem for page in (ROOT / "web" / "docs").glob("*.md")}
    assert {name for name in nodes if name.startswith("QwenL40S_")} == pages


def shows(data: bytes, prompt: str = PROMPT) -> bool:
    return adherence(pixels(data), parse_prompt(prompt)).score == 1.0


def test_a_prompt_becomes_the_image_that_it_describes(server: Server):
    run = server.run(graph())
    assert run.status == "success"
    assert shows(server.image(run, "save"))
    report = run.text("load")
    assert "transformer: Qwen-Image or 2512" in report
    assert "(auto: " in report
    assert "text encoder" in report and "VAE" in report


def test_the_optimized_model_paints_the_same_image(server: Server):
    plain = graph()
    nodes = graph()
    optimize = {"model": ["load", 0], "attention": "auto", "fused_blocks": True}
    nodes["optimize"] = {
        "class_type": "QwenL40S_Optimize",
        # cfg_batching was an input before the first release: ComfyUI passes over it.
        "inputs": {**optimize, "cfg_batching": "off", "tf32": False, "cudnn_benchmark": False},
    }
    split = {"model": ["optimize", 0], "cards": 2}  # of which this server has none
    nodes["split"] = {"class_type": "QwenL40S_SplitCards", "inputs": split}
    nodes["sample"]["inputs"]["model"] = ["split", 0]
    run = server.run(nodes)
    assert run.status == "success"
    assert "fused; the first step compares" in run.text("optimize")
    assert run.text("split").startswith("GPUs: one, ")
    image = server.image(run, "save")
    assert shows(image)
    difference = np.abs(pixels(image).astype(int) - pixels(server.image(server.run(plain), "save")))
    assert difference.max() <= 8, difference.max()
    log = server.log.read_text()
    assert re.search(r"blocks: fused, (\d+) of \1 in 40 forward passes", log)
    assert "modulation: 20 timesteps in a table" in log


def test_fast_attention_still_paints_the_prompt(server: Server):
    nodes = graph(seed=4, precision="int8")
    settings = {"attention": "fast", "fused_blocks": True, "attention_error": 0.02}
    inputs = {"model": ["load", 0], **settings}
    nodes["optimize"] = {"class_type": "QwenL40S_Optimize", "inputs": inputs}
    nodes["sample"]["inputs"]["model"] = ["optimize", 0]
    run = server.run(nodes)
    assert run.status == "success"
    assert shows(server.image(run, "save"))
    assert "8 bits: not kitchen_int8: needs an NVIDIA GPU" in server.log.read_text()


def test_a_second_prompt_reuses_what_is_loaded(server: Server):
    server.run(graph(seed=2))
    run = server.run(graph("a small red star at the top left on a blue background", seed=3))
    assert "load" not in run.executed
    assert "sample" in run.executed
    assert shows(server.image(run, "save"), "a small red star at the top left on a blue background")


@pytest.mark.parametrize("precision", ["int8", "fp8"])
def test_quantized_on_load_it_still_paints_the_prompt(server: Server, precision: str):
    run = server.run(graph(seed=4, precision=precision))
    assert run.status == "success"
    assert shows(server.image(run, "save"))
    form = {"int8": "int8, rotated (ConvRot)"}.get(precision, precision)
    assert f"72 layers were quantized to {form}, with one scale for each row." in run.text("load")


def test_a_file_that_changed_on_disk_is_loaded_again(server: Server):
    before = server.run(graph(seed=7, model="copy/"))  # a folder for all three parts
    assert shows(server.image(before, "save"))
    again = server.run(graph(seed=8, model="copy/"))
    assert "load" not in again.executed
    folder = server.base / "models" / "diffusers" / "copy" / "transformer"
    (file,) = folder.glob("*.safetensors")
    weights = load_file(file)
    changed = {name: weight.clone() for name, weight in weights.items()}
    changed["proj_out.weight"] *= 0.5
    save_file(changed, file)
    after = server.run(graph(seed=7, model="copy/"))
    assert "load" in after.executed
    assert not np.array_equal(
        pixels(server.image(before, "save")), pixels(server.image(after, "save"))
    )
    save_file(weights, file)


def test_a_cancelled_prompt_leaves_the_server_usable(server: Server):
    cancelled = server.run(graph(seed=9, steps=400), cancel_at="sample")
    assert cancelled.messages[-1]["type"] == "execution_interrupted"
    assert shows(server.image(server.run(graph(seed=10)), "save"))


def test_it_works_after_everything_was_unloaded(server: Server):
    before = server.image(server.run(graph(seed=11)), "save")
    for _ in range(20):  # the server's worker does it when it finds the time
        answer = server.client.post("/free", json={"unload_models": True, "free_memory": True})
        assert answer.status_code == 200
        run = server.run(graph(seed=11))
        if "load" in run.executed:
            break
    assert "load" in run.executed
    assert np.array_equal(pixels(server.image(run, "save")), pixels(before))


@pytest.mark.parametrize(
    ("name", "part", "words"),
    [
        ("vae.safetensors", "vae", ("model: a Qwen-Image VAE, not the", "move it to models/vae")),
        ("truncated.safetensors", "transformer", ("model: ", "is truncated")),
        ("missing.safetensors", None, ("'missing.safetensors' is not in", MICRO)),
    ],
)
def test_a_wrong_file_is_refused_before_it_runs(server: Server, name: str, part: str, words: tuple):
    if part:
        (file,) = (ROOT / "models" / "micro" / part).glob("*.safetensors")
        cut = -1000 if name == "truncated.safetensors" else None
        folder = server.base / "models" / "diffusion_models"
        (folder / name).write_bytes(file.read_bytes()[:cut])
    answer = server.post(graph(model=name))
    assert answer.status_code == 400, answer.text
    (error,) = answer.json()["node_errors"]["load"]["errors"]
    assert all(word in error["details"] for word in words), error
    assert server.run(graph(seed=13, steps=1)).status == "success"


def test_nan_in_the_weights_stops_the_first_step_and_not_the_server(server: Server):
    folder = server.base / "models" / "diffusers" / "nan"
    shutil.copytree(ROOT / "models" / "micro", folder)
    (file,) = (folder / "transformer").glob("*.safetensors")
    weights = load_file(file)
    weights["transformer_blocks.1.img_mlp.net.2.weight"][3, 5] = float("nan")
    save_file(weights, file)
    run = server.run(graph(seed=14, model="nan/"))
    assert run.status == "error"
    message = run.error["exception_message"]
    assert "has NaN or infinity" in message
    assert "transformer_blocks.1.img_mlp.net.2.weight" in message
    assert server.run(graph(seed=15, steps=1)).status == "success"


def alone(node: str, **inputs: Any) -> dict[str, Any]:
    """A graph of one node with what the page would send of it."""
    return {"only": {"class_type": f"QwenL40S_{node}", "inputs": inputs}}


ESTIMATE = {
    "card": "L40S",
    "family": "auto",
    "precision": "auto",
    "width": 1328,
    "height": 1328,
    "batch": 1,
    "steps": 20,
    "cfg": "two passes",
    "references": 0,
}


def test_what_contradicts_itself_stops_before_anything_is_loaded(server: Server):
    inputs = {**ESTIMATE, "width": 1000, "model": ["load", 0]}
    run = server.run(
        {"load": graph(seed=99, keep_in_bf16="*.img_mlp.net.2")["load"]}
        | alone("EstimateVRAM", **inputs)
    )
    assert run.status == "error" and "load" not in run.executed
    assert "both sides must be divisible by 16: use 992x1328" in run.error["exception_message"]
