"""`qwen-l40s submit` against a real ComfyUI server, on the CPU."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from comfyui_host import comfyui_folder
from comfyui_server import Server
from PIL import Image
from safetensors.torch import load_file, save_file
from waiting import SECONDS, until

from qwen_l40s.bench import server as bench_server
from qwen_l40s.client.feeder import UNABLE

ROOT = Path(__file__).resolve().parents[2]
MICRO = ROOT / "workflows" / "api" / "micro_text_to_image.json"
TINY = {
    "blank": {
        "class_type": "EmptyImage",
        "inputs": {"width": 16, "height": 16, "batch_size": 1, "color": 0},
        "_meta": {"title": "Blank"},
    },
    "save": {
        "class_type": "SaveImage",
        "inputs": {"images": ["blank", 0], "filename_prefix": "tiny"},
        "_meta": {"title": "Save"},
    },
}


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(TINY))
    return path


def begin(server: Server, workflow: Path, output: Path, *more: str) -> subprocess.Popen[str]:
    url = f"http://127.0.0.1:{server.port}"
    command = [sys.executable, ROOT, "submit", workflow, "--server", url, "--output", output]
    return subprocess.Popen(
        [*map(str, command), *more, "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
    )


def end(process: subprocess.Popen[str], *, code: int = 0) -> list[dict[str, Any]]:
    out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == code, err
    assert "Traceback" not in err
    (line,) = out.splitlines()
    return json.loads(line)["jobs"]


def submit(server: Server, workflow: Path, output: Path, *more: str, code: int = 0) -> Any:
    return end(begin(server, workflow, output, *more), code=code)


def queue(server: Server) -> tuple[list[str], list[str]]:
    """Returns prompt ids that run, and that wait."""
    found = server.client.get("/queue").json()
    return tuple([item[1] for item in found[f"queue_{kind}"]] for kind in ("running", "pending"))


def pixels(path: str) -> np.ndarray:
    return np.asarray(Image.open(path).convert("RGB"))


def steps(count: int) -> tuple[str, str]:
    return "--set", f"Sample.steps={count}"


def test_a_prompt_with_three_seeds_and_the_same_once_more_from_the_cache(
    server: Server, tmp_path: Path
):
    more = ("--set", "prompt=a large red square", "--set", "seed=1..3", *steps(3))
    jobs = submit(server, MICRO, tmp_path / "first", *more)
    assert [job["status"] for job in jobs] == ["done"] * 3
    assert [job["settings"]["seed"] for job in jobs] == [1, 2, 3]
    images = [pixels(job["files"][0]) for job in jobs]
    assert images[0].shape == (256, 256, 3)
    assert not np.array_equal(images[0], images[1])
    text = Image.open(jobs[2]["files"][0]).text["prompt"]
    assert json.loads(text)["sample"]["inputs"]["seed"] == 3

    last = ("--set", "prompt=a large red square", "--set", "seed=3", *steps(3))
    (again,) = submit(server, MICRO, tmp_path / "again", *last)
    # The server has it in its cache: nothing ran, and its file is the one of before.
    assert Path(again["files"][0]).name == Path(jobs[2]["files"][0]).name
    assert again["seconds"] < 1
    assert np.array_equal(pixels(again["files"][0]), images[2])


def test_images_of_one_name_are_uploaded_side_by_side(server: Server, tmp_path: Path):
    nodes = {
        "load": {
            "class_type": "LoadImage",
            "inputs": {"image": "a/same.png"},
            "_meta": {"title": "Image 1"},
        },
        "invert": {"class_type": "ImageInvert", "inputs": {"image": ["load", 0]}},
        "save": {
            "class_type": "SaveImage",
            "inputs": {"images": ["invert", 0], "filename_prefix": "inverted"},
        },
    }
    path = tmp_path / "invert.json"
    path.write_text(json.dumps(nodes))
    for folder, level in (("a", 10), ("b", 200)):
        (tmp_path / folder).mkdir()
        Image.new("RGB", (8, 8), (level,) * 3).save(tmp_path / folder / "same.png")
    listed = tmp_path / "list.txt"
    listed.write_text("a/same.png\nb/same.png\n")
    jobs = submit(server, path, tmp_path / "out", "--set", f"Image 1=@{listed}")
    assert [pixels(job["files"][0]).mean() for job in jobs] == pytest.approx([245, 55], abs=1)
    # The same again: the server takes the upload for what it has.
    uploads = sorted((server.base / "input").rglob("*.png"))
    submit(server, path, tmp_path / "more", "--set", f"Image 1=@{listed}")
    assert sorted((server.base / "input").rglob("*.png")) == uploads


def test_an_error_of_a_node_fails_its_job_alone(server: Server, tmp_path: Path, tiny: Path):
    names = tmp_path / "names.txt"
    names.write_text("good\n../../outside\n")
    more = ("--set", f"Save.filename_prefix=@{names}", "--set", "color=7..8")
    process = begin(server, tiny, tmp_path / "out", *more)
    jobs = end(process, code=1)
    assert [job["status"] for job in jobs] == ["done", "done", "failed", "failed"]
    (node,) = jobs[2]["error"]["nodes"]
    assert (node["id"], node["title"], node["class_type"]) == ("save", "Save", "SaveImage")
    assert "outside the output folder" in node["message"]


@pytest.mark.parametrize("alone", [True, False])
def test_what_the_server_alone_refuses_is_told_by_node(server: Server, tmp_path: Path, alone: bool):
    """A link of the wrong type, also beside an output that could run."""
    nodes = json.loads(json.dumps(TINY))
    nodes["text"] = {"class_type": "PrimitiveString", "inputs": {"value": "x"}}
    nodes["look"] = {"class_type": "PreviewImage", "inputs": {"images": ["text", 0]}}
    if alone:
        del nodes["save"]
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps(nodes))
    (job,) = submit(server, path, tmp_path / "out", code=1)
    assert job["status"] == "failed"
    assert "PreviewImage (id look)" in job["error"]["message"]
    assert "mismatch" in job["error"]["message"]
    assert queue(server) == ([], [])


def test_a_model_that_the_server_is_too_old_for_is_left_to_other_servers(
    server: Server, tmp_path: Path
):
    """By an error of the type that sends a job to the next server."""
    if "QwenImage21" in (comfyui_folder() / "comfy" / "supported_models.py").read_text():
        pytest.skip("this ComfyUI has Qwen-Image-2.1")
    (job,) = submit(server, MICRO.with_name("micro_qwen_image_21.json"), tmp_path / "out", code=1)
    assert UNABLE.search(job["error"]["type"]), job["error"]["type"]
    assert "needs ComfyUI 0.37 or newer, and this ComfyUI is older" in job["error"]["message"]


def test_ctrl_c_stops_ours_and_leaves_the_jobs_of_others(
    server: Server, tmp_path: Path, tiny: Path
):
    process = begin(server, MICRO, tmp_path / "out", "--set", "seed=51..53", *steps(2000))
    until(lambda: len(queue(server)[1]) == 1)
    other = begin(server, tiny, tmp_path / "other", "--set", "color=99")
    until(lambda: len(queue(server)[1]) == 2)
    process.send_signal(signal.SIGINT)
    jobs = end(process, code=130)
    assert [job["status"] for job in jobs] == ["cancelled"] * 3
    assert [job["status"] for job in end(other)] == ["done"]
    assert queue(server) == ([], [])


def test_resume_after_a_kill(server: Server, tmp_path: Path):
    more = ("--set", "seed=61..64", *steps(30))
    out = tmp_path / "out"
    process = begin(server, MICRO, out, *more)
    until(lambda: list(out.glob("*.png")))
    process.kill()
    process.communicate()
    jobs = submit(server, MICRO, out, *more, "--resume")
    assert [job["status"] for job in jobs] == ["done"] * 4
    assert len(list(out.glob("*.png"))) == 4
    # None of them was queued twice.
    history = server.client.get("/history").json().values()
    seeds = [
        entry["prompt"][2].get("sample", {}).get("inputs", {}).get("seed") for entry in history
    ]
    assert [seeds.count(seed) for seed in (61, 62, 63, 64)] == [1, 1, 1, 1]
    # Nothing is left to do, and nothing is done.
    assert submit(server, MICRO, out, *more, "--resume") == jobs


def test_two_clients_at_one_server_get_what_is_theirs(server: Server, tmp_path: Path):
    one = begin(server, MICRO, tmp_path / "one", "--set", "seed=71..73", *steps(4))
    two = begin(server, MICRO, tmp_path / "two", "--set", "seed=81..83", *steps(4))
    for process, seeds in ((one, [71, 72, 73]), (two, [81, 82, 83])):
        jobs = end(process)
        made = [
            json.loads(Image.open(job["files"][0]).text["prompt"])["sample"]["inputs"]["seed"]
            for job in jobs
        ]
        assert made == seeds


def test_the_server_is_killed_and_started_again_in_the_middle(
    tmp_path: Path, tiny: Path, monkeypatch
):
    server = Server(comfyui_folder(), tmp_path / "base")
    try:
        more = ("--set", "seed=1..4", *steps(30))
        process = begin(server, MICRO, tmp_path / "out", *more)
        until(lambda: list((tmp_path / "out").glob("*.png")))
    finally:
        server.client.close()
        server.process.kill()
        server.process.wait()
    monkeypatch.setattr(bench_server, "free_port", lambda: server.port)
    server = Server(comfyui_folder(), tmp_path / "base")
    try:
        out, err = process.communicate(timeout=SECONDS)
        assert process.returncode == 0, err
        assert [job["status"] for job in json.loads(out)["jobs"]] == ["done"] * 4
        assert " is back" in err
        assert len(list((tmp_path / "out").glob("*.png"))) == 4
        assert httpx.get(f"http://127.0.0.1:{server.port}/queue").json()["queue_pending"] == []
    finally:
        server.stop()


@pytest.mark.parametrize(
    ("kind", "file", "strength"),
    [
        ("QwenL40S_LoadLora", "lora", "strength"),
        ("LoraLoaderModelOnly", "lora_name", "strength_model"),
    ],
)
def test_a_lora_that_is_replaced_under_its_name_gives_new_images(
    server: Server, tmp_path: Path, kind: str, file: str, strength: str
):
    micro = ROOT / "models" / "micro" / "transformer" / "diffusion_pytorch_model.safetensors"
    layer = "transformer_blocks.0.attn.to_q"
    rows, columns = load_file(micro)[f"{layer}.weight"].shape
    lora = server.base / "models" / "loras" / "replaced.safetensors"
    lora.parent.mkdir(parents=True, exist_ok=True)

    def write(value: float) -> None:
        ends = {"lora_A.weight": (4, columns), "lora_B.weight": (rows, 4)}
        save_file({f"{layer}.{end}": torch.full(size, value) for end, size in ends.items()}, lora)

    graph = json.loads(MICRO.read_text())
    graph["lora"] = {
        "class_type": kind,
        "inputs": {"model": ["load", 0], file: lora.name, strength: 1.0},
    }
    graph["sample"]["inputs"] |= {"model": ["lora", 0], "steps": 2}
    workflow = tmp_path / "lora.json"
    workflow.write_text(json.dumps(graph))
    write(0.0)
    (first,) = submit(server, workflow, tmp_path)
    (same,) = submit(server, workflow, tmp_path)
    write(1.0)
    (new,) = submit(server, workflow, tmp_path)
    assert same["files"] == first["files"] != new["files"]
    assert new["key"] == first["key"]
    assert (pixels(first["files"][0]) != pixels(new["files"][0])).any()
    (again,) = submit(server, workflow, tmp_path, "--again")
    assert again["prompt_id"] != new["prompt_id"]
    assert (pixels(again["files"][0]) == pixels(new["files"][0])).all()
