"""Files and texts of a finished prompt."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
from pathlib import Path

import pytest
from fake_comfyui import fake_comfyui, graph

from qwen_l40s.client import transport
from qwen_l40s.client.journal import DiskError
from qwen_l40s.client.results import Fetched, fetch, place
from qwen_l40s.client.server import Server, files_of, texts_of
from qwen_l40s.client.transport import Address, AnswerError, ServerError


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(transport, "FIRST_PAUSE", 0.01)


def image(name: str = "a.png", subfolder: str = "", kind: str = "output") -> dict[str, str]:
    return {"filename": name, "subfolder": subfolder, "type": kind}


def png(data: bytes) -> bytes:
    return b"\x89PNG\r\n\x1a\n" + data + b"IEND\xaeB`\x82"


def fetched(
    folder: Path, *items: dict[str, str], data: bytes = b"data", **faults: object
) -> list[Path]:
    """Fetches the files of a prompt, and gives them the names of the job "key"."""

    async def run(url: str) -> list[Path]:
        options = {"headers": {}, "wait": 5, "notify": lambda line: None}
        async with Server(Address.parse(url), **options) as server:
            found = Fetched()
            status = {"status_str": "success", "messages": []}
            entry = {"outputs": {"1": {"images": list(items)}}, "status": status}
            part = iter(folder / f".{number}.part" for number in range(9)).__next__
            try:
                limits = {"most": 1 << 20, "owns": lambda item, path: True}
                await fetch(server, {}, entry, part, found, **limits)
                return place(found.parts, folder, "key", lambda paths: None)
            finally:
                found.discard()

    with fake_comfyui(**faults) as fake:
        files = {item["filename"]: data for item in items}
        fake.files.update({name: png(data) if "png" in name else data for name in files})
        return asyncio.run(run(fake.url))


def names(folder: Path) -> list[str]:
    return sorted(
        path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()
    )


def test_previews_count_only_where_nothing_else_was_made():
    preview, saved = image("p.png", kind="temp"), image()
    both = {"outputs": {"1": {"images": [preview]}, "2": {"images": [saved]}}}
    assert files_of(both, {}) == [saved]
    assert files_of({"outputs": {"1": {"images": [preview]}}}, {}) == [preview]


def test_every_kind_of_file_counts_once_and_other_outputs_do_not():
    clip = image("a.mp4")
    outputs = {
        "1": {"images": [image(), image()], "animated": [False], "text": ["hello"]},
        "2": {"video": [clip], "audio": None, "size": 7},
    }
    assert files_of({"outputs": outputs}, {}) == [image(), clip]


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


def test_files_are_numbered_under_the_key_of_their_job_and_keep_their_kind(tmp_path: Path):
    found = fetched(tmp_path, image("b.png"), image("a.xyz"), image("c"), image("d.p/ng"))
    assert [path.name for path in found] == ["key_1.png", "key_2.xyz", "key_3", "key_4"]
    assert names(tmp_path) == ["key_1.png", "key_2.xyz", "key_3", "key_4"]


@pytest.mark.parametrize("links", [True, False])
def test_a_file_of_another_content_is_never_replaced(tmp_path: Path, monkeypatch, links: bool):
    def refuse(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "not supported")

    if not links:
        monkeypatch.setattr(os, "link", refuse)
    for data, name in ((b"one", "key_1.png"), (b"two", "key_2.png"), (b"two", "key_2.png")):
        assert fetched(tmp_path, image(), data=data) == [tmp_path / name]
    assert names(tmp_path) == ["key_1.png", "key_2.png"]
    assert (tmp_path / "key_1.png").read_bytes() == png(b"one")


def test_a_name_of_the_server_never_leads_out_of_the_folder(tmp_path: Path):
    (tmp_path / "out").mkdir()
    fetched(tmp_path / "out", image("../../a.png", "/etc"), image("C:\\x.png", ".."))
    assert names(tmp_path) == ["out/key_1.png", "out/key_2.png"]


def test_a_file_is_synced_while_it_is_open_for_writing(tmp_path: Path, monkeypatch):
    modes = []
    monkeypatch.setattr(os, "fsync", lambda file: modes.append(fcntl.fcntl(file, fcntl.F_GETFL)))
    fetched(tmp_path, image())
    assert [mode & os.O_ACCMODE for mode in modes] == [os.O_RDWR]


def test_a_cut_download_leaves_nothing(tmp_path: Path):
    with pytest.raises(ServerError, match=r"does not send a file \(connection lost\)"):
        fetched(tmp_path, image(), data=bytes(1000), cut_file=1)
    assert names(tmp_path) == []


def test_a_file_that_the_server_no_longer_has(tmp_path: Path):
    with pytest.raises(AnswerError, match="answered 404 to GET /view"):
        fetched(tmp_path, image("a.png"), image("b.png"), no_file=1)
    assert names(tmp_path) == []


@pytest.mark.parametrize("step", ["download", "link"])
def test_a_full_disk_leaves_no_half_file(tmp_path: Path, monkeypatch, step: str):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    async def half(server: Server, item: object, target: Path, most: int) -> None:
        target.write_bytes(b"half")
        full()

    if step == "download":
        monkeypatch.setattr(Server, "download", half)
    else:
        monkeypatch.setattr(os, "link", full)
    with pytest.raises(DiskError, match="No space left"):
        fetched(tmp_path, image())
    assert names(tmp_path) == []


def wav(length: int) -> bytes:
    return b"RIFF" + length.to_bytes(4, "little") + b"WAVEfmt " + bytes(40)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        *(("a.wav", wav(told)) for told in (48, 0, 0xFFFFFFFF)),  # the last two of a streamed one
        *((name, b"") for name in ("a.txt", "a.json")),
    ],
)
def test_a_streamed_sound_and_an_empty_text_are_whole(tmp_path: Path, name: str, data: bytes):
    [path] = fetched(tmp_path, image(name), data=data)
    assert path.read_bytes() == data


@pytest.mark.parametrize(("name", "data"), [("a.wav", wav(49)), ("a.mid", b""), ("a.log", b"")])
def test_a_sound_that_is_cut_and_an_empty_file_are_not(tmp_path: Path, name: str, data: bytes):
    with pytest.raises(ServerError, match=r"is cut off|is empty"):
        fetched(tmp_path, image(name), data=data)
