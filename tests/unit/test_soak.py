"""`bench.soak` with a stand-in for the server: what it counts, and what it calls wrong."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from qwen_l40s.bench import soak

pytestmark = pytest.mark.usefixtures("one_thread")
ARGUMENTS = ["--pictures", "240", "--settings", "20", "--fresh", "2"]
LEAK = 10_000_000  # bytes a round


class Painter:
    """Paints a seed as its colour; `fault` says what goes wrong from the third round on."""

    fault = ""

    def __init__(self, comfyui: Any, python: Any, base: Any, *_: str) -> None:
        self.base, self.process = base, SimpleNamespace(pid=os.getpid())
        (base / "output").mkdir(exist_ok=True)
        self.painted: list[int] = []
        self.interrupted: set[str] = set()

    def __enter__(self) -> Painter:
        return self

    def __exit__(self, *_: Any) -> None: ...

    def ask(self, path: str, data: Any = None) -> Any:
        if path == "/interrupt":
            self.interrupted.add(data["prompt_id"])
        used = {"torch_vram_total": 2e9, "torch_vram_free": 1e9}
        return {"devices": [used]} if path == "/system_stats" else {soak.NODE_OF_21: {}}

    def begin(self, graph: soak.Graph) -> str:
        self.painted.append(graph["sample"]["inputs"]["seed"])
        return f"{len(self.painted)}"

    def end(self, prompt: str) -> dict[str, Any]:
        times = {"execution_start": {"timestamp": 0}, "execution_success": {"timestamp": 1}}
        if prompt in self.interrupted and int(prompt) % 2:
            return {"status": {"messages": [("execution_interrupted", {})]}}
        seed, late = self.painted[-1], len(self.painted) > 60
        colour = seed + 100 * (self.fault == "another picture" and late and seed == 3)
        name = f"{prompt}.png"
        Image.fromarray(np.full((4, 4, 3), colour, np.uint8)).save(self.base / "output" / name)
        image = {"type": "output", "subfolder": "", "filename": name}
        messages = list(times.items())
        return {"outputs": {"save": {"images": [image]}}, "status": {"messages": messages}}


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path, capsys):
    def run(fault: str = "") -> tuple[int, dict[str, str]]:
        reads = iter(range(10**6))
        monkeypatch.setattr(Painter, "fault", fault)
        monkeypatch.setattr(soak, "ComfyUIServer", Painter)
        if fault == "memory":
            monkeypatch.setattr(soak, "resident", lambda _: next(reads) // 20 * LEAK)
        monkeypatch.setenv("COMFYUI_PATH", str(tmp_path))
        code = soak.main(ARGUMENTS)
        lines = [line.rsplit(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
        return code, {name.strip(): value for name, value in lines}

    return run


def test_what_stays_as_it_is_passes(run):
    code, told = run()
    assert code == 0
    assert (told["pictures"], told["settings"]) == ("240", "20")
    assert 1 <= int(told["prompts interrupted"]) <= 24
    assert told["pictures that differ from the first"] == told["on 2 fresh servers"] == "0"


def test_a_picture_that_changes_and_memory_that_grows_are_wrong(run):
    code, told = run("another picture")
    assert code == 1 and int(told["pictures that differ from the first"]) >= 9
    assert told["on 2 fresh servers"] == "0"  # of which none paints as long
    code, told = run("memory")
    assert code == 1 and told["of any"] == f"{11 * LEAK // 10**6}"
