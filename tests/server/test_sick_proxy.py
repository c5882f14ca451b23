"""Results of a real ComfyUI through a proxy that spoils them."""

from __future__ import annotations

import asyncio
import io
import json
from collections import Counter
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from comfyui_server import Server
from fake_comfyui import fake_comfyui, hurry
from PIL import Image

from qwen_l40s.client import results, transport
from qwen_l40s.client.submit import SubmitOutcome, SubmitRequest, submit

COLOURED = {
    "blank": {
        "class_type": "EmptyImage",
        "inputs": {"width": 16, "height": 16, "batch_size": 1, "color": 0},
    },
    "save": {
        "class_type": "SaveImage",
        "inputs": {"images": ["blank", 0], "filename_prefix": "sub/spoiled"},
    },
}


def run(folder: Path, url: str, **more: object) -> SubmitOutcome:
    workflow = folder / "work.json"
    workflow.write_text(json.dumps(COLOURED))
    settings = ["color=1..4"]
    request = SubmitRequest(workflow, folder / "out", [url], settings=settings, wait=5.0, **more)
    return asyncio.run(submit(request, io.StringIO(), lambda job: None))


@pytest.fixture
def executed(server: Server):
    """Counts how often the server ran the jobs of this test, by the colour that they paint."""
    before = set(server.client.get("/history").json())

    def count() -> Counter[int]:
        history = server.client.get("/history").json()
        new = [entry["prompt"][2] for prompt, entry in history.items() if prompt not in before]
        return Counter(graph["blank"]["inputs"]["color"] for graph in new)

    return count


@pytest.mark.parametrize("fault", ["302", "cut", "long", "another", "no output"])
def test_no_spoiled_result_counts_and_no_job_runs_more_than_thrice(
    server: Server, tmp_path: Path, monkeypatch, executed, fault: str
):
    hurry(monkeypatch)
    monkeypatch.setattr(results, "FETCHES", 3)
    monkeypatch.setattr(transport, "STALL_SECONDS", 2.0)
    spoils = [True]
    with fake_comfyui() as proxy:

        async def forward(request: web.Request) -> web.StreamResponse:
            if request.path == "/ws":
                return web.Response(status=403)
            url = f"http://127.0.0.1:{server.port}{request.path_qs}"
            body = {"data": await request.read(), "headers": {"Content-Type": "application/json"}}
            async with (
                aiohttp.ClientSession() as session,
                session.request(request.method, url, **body) as answer,
            ):
                data = await answer.read()
            if request.path == "/view" and spoils[0] and fault != "no output":
                proxy.files.setdefault(request.query["filename"], data)
                proxy.faults.view = fault
                return await proxy._sick_view(request, data)
            if "/history/" in request.path and spoils[0] and fault == "no output":
                data = json.dumps(
                    {name: entry | {"outputs": {}} for name, entry in json.loads(data).items()}
                ).encode()
            return web.Response(body=data, status=answer.status, content_type=answer.content_type)

        proxy.faults.answer = forward
        outcome = run(tmp_path, proxy.url)
        assert max(executed().values()) <= 3
        spoils[0] = False
        again = run(tmp_path, proxy.url, resume=True)
    done = 1 if fault == "another" else 0
    assert Counter(job.status for job in outcome.jobs)["done"] == done
    kinds = {job.error["type"] for job in outcome.jobs if job.error}
    assert kinds == {"no output" if fault == "no output" else "download"}
    assert [job.status for job in again.jobs] == ["done"] * 4
    for job in again.jobs:
        [path] = job.files
        with Image.open(path) as image:
            assert image.convert("RGB").getpixel((0, 0))[2] == job.settings["color"]
    assert len(list((tmp_path / "out").glob("*.png"))) == 4


def test_names_on_a_server_are_the_users_and_carry_the_job(server: Server, tmp_path: Path):
    first = run(tmp_path, f"http://127.0.0.1:{server.port}")
    names = {path.name for path in (server.base / "output" / "sub").iterdir()}
    assert {f"spoiled_job-{job.key[:12]}_00001_.png" for job in first.jobs} <= names
