"""ComfyUI's page in one browser, in the two forms in which users have it.

A, `classic`: the frontend that this ComfyUI asks for, which draws nodes on a canvas. B, `modern`: a
newer frontend with Nodes 2.0, where a node is an element of the document.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from comfyui_host import comfyui_folder

ROOT = Path(__file__).resolve().parents[2]
NODES_2 = {"Comfy.VueNodes.Enabled": True}
# Where `make test-server` puts it.
MODERN = ROOT / ".venv" / "frontend-1.58.1" / "comfyui_frontend_package" / "static"


def modern_frontend() -> Path:
    """The newer frontend's folder; skips the test, visibly, where there is none."""
    folder = Path(os.environ.get("COMFYUI_FRONTEND_PATH", MODERN))
    if not (folder / "index.html").is_file():
        pytest.skip(
            f"no newer frontend in {folder}: run `make test-server`, or name one with "
            "COMFYUI_FRONTEND_PATH"
        )
    return folder


def start(base: Path, *arguments: str) -> Any:
    """A server with the files that the templates name."""
    from browser_page import PACK, put_files
    from comfyui_server import Server

    (base / "input").mkdir()
    server = Server(comfyui_folder(), base, *arguments, pack=PACK)
    put_files(base)
    return server


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator:
    server = start(tmp_path_factory.mktemp("base"))
    yield server
    server.stop()


@pytest.fixture(scope="session")
def modern_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator:
    frontend = modern_frontend()
    server = start(tmp_path_factory.mktemp("base"), "--front-end-root", str(frontend))
    yield server
    server.stop()


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    from browser_page import chromium, missing

    if missing():
        pytest.skip(missing())
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="session")
def classic_page(browser: Any, server: Any) -> Iterator[Any]:
    from browser_page import ComfyPage

    page = ComfyPage(browser, server)
    yield page
    page.close()


@pytest.fixture(scope="session")
def modern_page(browser: Any, modern_server: Any) -> Iterator[Any]:
    from browser_page import ComfyPage

    page = ComfyPage(browser, modern_server, NODES_2)
    yield page
    page.close()


@pytest.fixture
def classic(classic_page: Any) -> Any:
    """A's page, tidied: a start of the page takes seconds."""
    classic_page.tidy()
    return classic_page


@pytest.fixture
def modern(modern_page: Any) -> Any:
    modern_page.tidy()
    return modern_page


@pytest.fixture(params=["classic", "modern"])
def page(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)
