"""Files and texts of a finished prompt."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path

import pytest
from fake_comfyui import fake_comfyui, graph

from qwen_l40s.client import files as results
from qwen_l40s.client import transport
from qwen_l40s.client.files import download, files_of, texts_of
from qwen_l40s.client.server import Server
from qwen_l40s.client.transport import AnswerError


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(transport, "FIRST_PAUSE", 0.01)


def image(name: str = "a.png", subfolder: str = "", kind: str = "output") -> dict[str, str]:
    return {"filename": name, "subfolder": subfolder, "type": kind}


def fetch(folder: Path, item: dict[str, str], data: bytes = b"data", **faults: object) -> Path:
    async def run(url: str) -> Path:
        async with Server(url, wait=5) as server:
            return await download(server, item, folder)

    with fake_comfyui(**faults) as fake:
        fake.files[item["filename"]] = data
        return asyncio.run(run(fake.url))


def names(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.*"))


def test_previews_count_only_where_nothing_else_was_made():
    preview, saved = image("p.png", kind="temp"), image()
    both = {"outputs": {"1": {"images": [preview]}, "2": {"images": [saved]}}}
    assert files_of(both) == [saved]
    assert files_of({"outputs": {"1": {"images": [preview]}}}) == [preview]


def test_every_kind_of_file_counts_once_and_other_outputs_do_not():
    clip = image("a.mp4")
    outputs = {
        "1": {"images": [image(), image()], "animated": [False], "text": ["hello"]},
        "2": {"video": [clip], "audio": None, "size": 7},
    }
    assert files_of({"outputs": outputs}) == [image(), clip]


def test_texts_stand_under_the_titles_of_their_nodes():
    nodes = graph()
    entry = {
        "outputs": {
            "draw": {"text": ["one", "two"]},
            "save": {"text": "three"},
            "gone": {"text": [""]},
            "made by another": {"text": ["four"]},
        }
    }
    assert texts_of(entry, nodes) == {
        "Prompt": ["one", "two"],
        "Save": ["three"],
        "made by another": ["four"],
    }


def test_a_file_of_another_content_is_never_replaced(tmp_path: Path):
    assert fetch(tmp_path, image(), b"one") == tmp_path / "a.png"
    assert fetch(tmp_path, image(), b"two") == tmp_path / "a-2.png"
    assert fetch(tmp_path, image(), b"three") == tmp_path / "a-3.png"
    assert fetch(tmp_path, image(), b"two") == tmp_path / "a-2.png"  # the same file
    assert names(tmp_path) == ["a-2.png", "a-3.png", "a.png"]
    assert (tmp_path / "a.png").read_bytes() == b"one"


def test_nor_where_the_file_system_has_no_links(tmp_path: Path, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "not supported")

    monkeypatch.setattr(os, "link", refuse)
    assert fetch(tmp_path, image(), b"one") == tmp_path / "a.png"
    assert fetch(tmp_path, image(), b"two") == tmp_path / "a-2.png"
    assert names(tmp_path) == ["a-2.png", "a.png"]


@pytest.mark.parametrize(
    ("subfolder", "name", "path"),
    [
        ("day/one", "a.png", "day/one/a.png"),
        ("day\\one", "a.png", "day/one/a.png"),
        ("../..", "a.png", "a.png"),
        ("/etc", "a.png", "etc/a.png"),
        ("C:\\x", "a.png", "C_/x/a.png"),
        ("", "../../a.png", "a.png"),
        ("", "a:b?.png", "a_b_.png"),
        ("", "grüße 猫.png", "grüße 猫.png"),
    ],
)
def test_a_subfolder_is_kept_and_never_leads_out(tmp_path: Path, subfolder, name, path):
    assert fetch(tmp_path, image(name, subfolder)) == tmp_path / path
    assert names(tmp_path) == [path]


def test_a_cut_download_is_tried_again_and_leaves_nothing_else(tmp_path: Path):
    data = bytes(1000)
    assert fetch(tmp_path, image(), data, cut_file=2).read_bytes() == data
    assert names(tmp_path) == ["a.png"]


def test_a_file_that_the_server_no_longer_has(tmp_path: Path):
    with pytest.raises(AnswerError, match="answered 404 to GET /view"):
        fetch(tmp_path, image(), no_file=1)
    assert names(tmp_path) == []


def test_a_full_disk_leaves_no_half_file(tmp_path: Path, monkeypatch):
    def full(part: Path, target: Path) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(results, "_placed", full)
    with pytest.raises(OSError, match="No space left"):
        fetch(tmp_path, image())
    assert names(tmp_path) == []
