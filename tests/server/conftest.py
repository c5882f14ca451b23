"""One ComfyUI server for all tests of this folder, which talk to it over HTTP, on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from comfyui_host import comfyui_folder

TESTS = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator:
    from comfyui_server import Server

    base = tmp_path_factory.mktemp("base")
    (base / "custom_nodes").mkdir()
    for name in ("workflow_nodes.py", "saver_nodes.py"):
        (base / "custom_nodes" / name).symlink_to(TESTS / name)
    server = Server(comfyui_folder(), base)
    yield server
    server.stop()


@pytest.fixture(scope="module", autouse=True)
def nothing_cached(server) -> None:
    """ComfyUI keeps what the last prompt's nodes gave: a file begins with nothing of another's."""
    blank = {"width": 16, "height": 16, "batch_size": 1, "color": 0}
    server.run(
        {
            "blank": {"class_type": "EmptyImage", "inputs": blank},
            "show": {"class_type": "PreviewImage", "inputs": {"images": ["blank", 0]}},
        }
    )
