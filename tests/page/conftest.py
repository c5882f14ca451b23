"""One ComfyUI server and one browser that shows its page, for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from comfyui_host import comfyui_folder


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator:
    from browser_page import PACK, put_files
    from comfyui_server import Server

    base = tmp_path_factory.mktemp("base")
    (base / "input").mkdir()
    server = Server(comfyui_folder(), base, pack=PACK)
    put_files(base)
    yield server
    server.stop()


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    from browser_page import chromium, missing

    if missing():
        pytest.skip(missing())
    with chromium() as browser:
        yield browser
