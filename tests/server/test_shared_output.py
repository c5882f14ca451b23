"""Two ComfyUI servers with one output folder: no job gets another's file, whatever a node saves."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from comfyui_host import comfyui_folder
from comfyui_server import Server
from safetensors import safe_open

from qwen_l40s.client.submit import SubmitRequest, submit
from qwen_l40s.client.workflow import file_input, job_id, with_job_id

JOBS = 12
TEXT = {"class_type": "PrimitiveString", "inputs": {"value": "x"}}
LATENT = {"class_type": "EmptyLatentImage", "inputs": {"width": 64, "height": 64, "batch_size": 1}}
# Nodes that write no file of their own, but for the data set, whose folder people name.
NAMELESS = {
    *("CreateBoundingBoxes", "ImageCompare", "ImageCompositor", "MaskPreview", "SAM3_TrackPreview"),
    *("Preview3D", "Preview3DAdvanced", "PreviewAny", "PreviewAudio", "PreviewGaussianSplat"),
    *("PreviewImage", "PreviewPointCloud", "SaveTrainingDataset", "TestsWait"),
    *("QwenL40S_AdviseGPU", "QwenL40S_EstimateVRAM", "QwenL40S_Report", "QwenL40S_SaveQuantized"),
    *("TestsSaver_output_path", "TestsSaver_output_file", "TestsSaver_fixed"),
}


@pytest.fixture(scope="module")
def servers(server: Server) -> Iterator[list[str]]:
    other = Server(comfyui_folder(), server.base)
    yield [f"http://127.0.0.1:{each.port}" for each in (server, other)]
    other.stop()


def test_every_node_that_saves_names_its_files_by_the_job(server: Server):
    info = server.client.get("/object_info").json()
    nameless = set()
    for kind, described in info.items():
        if not described["output_node"]:
            continue
        name = file_input(info, kind)
        graph = {"save": {"class_type": kind, "inputs": {name: "a"} if name else {}}}
        carried = job_id("0" * 16) in json.dumps(with_job_id(graph, info, "0" * 16))
        if not (carried or described["python_module"].startswith("comfy_api_nodes.")):
            nameless.add(kind)
    assert nameless == NAMELESS & info.keys()


def saved(kind: str, **inputs: str | list[Any]) -> dict[str, Any]:
    return {"text": TEXT, "save": {"class_type": kind, "inputs": {"text": ["text", 0]} | inputs}}


def latent_width(file: Path) -> str:
    return str(8 * safe_open(file, "pt").get_slice("latent_tensor").get_shape()[-1])


WIRED = {"wired": {"class_type": "PrimitiveString", "inputs": {"value": "wired"}}}
SAVERS = {
    "a text": saved("SaveText", filename_prefix="t/a", format="txt"),
    "a long name": saved("SaveText", filename_prefix="漢" * 80, format="txt"),
    "a wired name": WIRED | saved("SaveText", filename_prefix=["wired", 0], format="md"),
    "a latent": {
        "text": LATENT,
        "save": {
            "class_type": "SaveLatent",
            "inputs": {"samples": ["text", 0], "filename_prefix": "l/a"},
        },
    },
    **{
        name or "no name": saved(f"TestsSaver_{name or 'fixed'}", **({name: value} if name else {}))
        for name, value in {
            "prefix": "p",
            "save_file_prefix": "s",
            "file_name": "a.txt",
            "output_path": "a/b",
            "output_file": "a/c.txt",
            "": "",
        }.items()
    },
}


@pytest.mark.parametrize("saver", SAVERS)
def test_each_job_gets_the_file_that_it_saved(tmp_path: Path, servers: list[str], saver: str):
    workflow = tmp_path / "work.json"
    workflow.write_text(json.dumps(SAVERS[saver]))
    latent = saver == "a latent"
    values = [str(64 + 8 * job) if latent else f"text {job}" for job in range(JOBS)]
    (tmp_path / "values.txt").write_text("\n".join(values))
    key = f"text.{'width' if latent else 'value'}"
    for run in ("first", "second"):  # which finds files of the first one's names
        request = SubmitRequest(
            workflow, tmp_path / run, servers, settings=[f"{key}=@{tmp_path / 'values.txt'}"]
        )
        outcome = asyncio.run(submit(request, io.StringIO(), lambda job: None))
        assert outcome.exit_code == 0
        read = latent_width if latent else Path.read_text
        assert [read(path) for job in outcome.jobs for path in job.files] == values
