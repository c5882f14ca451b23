"""The journal of a run, however it ended."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from fake_comfyui import graph

from qwen_l40s.client.ledger import Ledger, keys_of
from qwen_l40s.errors import SettingError


def test_the_last_line_about_a_job_holds(tmp_path: Path):
    (tmp_path / "a.png").write_bytes(b"x")
    with Ledger(tmp_path, "work") as ledger:
        ledger.run("me", "http://host", "work.json")
        ledger.write("k1", "p1", "queued", settings={"prompt": "Grüße"})
        ledger.write("k2", "p2", "queued")
        ledger.write("k1", "p1", "done", seconds=1.5, files=["a.png"], texts={"T": ["t"]})
    with Ledger(tmp_path, "work") as ledger:
        record = ledger.records["k1"]
        assert (record.status, record.seconds, record.texts) == ("done", 1.5, {"T": ["t"]})
        assert record.files == (tmp_path / "a.png",)
        assert record.complete
        assert ledger.records["k2"].status == "queued"
        assert (ledger.client_id, ledger.unfinished) == ("me", 1)


def test_a_job_whose_file_was_moved_is_not_complete(tmp_path: Path):
    with Ledger(tmp_path, "work") as ledger:
        ledger.write("k", "p", "done", files=["a.png"])
    with Ledger(tmp_path, "work") as ledger:
        assert not ledger.records["k"].complete


@pytest.mark.parametrize("cut", range(1, 40, 6))
def test_a_torn_last_line_is_passed_over_and_what_follows_it_is_read(tmp_path: Path, cut: int):
    with Ledger(tmp_path, "work") as ledger:
        ledger.write("k1", "p1", "queued")
        ledger.write("k2", "p2", "queued")
    data = ledger.path.read_bytes()
    ledger.path.write_bytes(data[:-cut])
    with Ledger(tmp_path, "work") as ledger:
        assert "k1" in ledger.records
        ledger.write("k3", "p3", "queued")
    with Ledger(tmp_path, "work") as ledger:
        assert {"k1", "k3"} <= set(ledger.records)


def test_each_line_is_there_as_soon_as_it_is_written(tmp_path: Path):
    with Ledger(tmp_path, "work") as ledger:
        ledger.write("k", "p", "queued")
        assert json.loads(ledger.path.read_text())["prompt_id"] == "p"


def test_a_line_cut_by_a_full_disk_spoils_no_other(tmp_path: Path, monkeypatch):
    class Full:
        def __init__(self, file):
            self.file = file

        def write(self, data):
            return self.file.write(data[:5])

        def close(self):
            self.file.close()

    with Ledger(tmp_path, "work") as ledger:
        file = ledger._file
        ledger._file = Full(file)
        with pytest.raises(OSError, match="No space left"):
            ledger.write("k1", "p1", "queued")
        ledger._file = file
        ledger.write("k2", "p2", "queued")
    with Ledger(tmp_path, "work") as ledger:
        assert list(ledger.records) == ["k2"]


@pytest.mark.parametrize("what", ["file", "below a file"])
def test_a_folder_that_cannot_be_written_to(tmp_path: Path, what: str):
    place = tmp_path / "taken"
    place.write_text("")
    with pytest.raises(SettingError, match="--output cannot be written"):
        Ledger(place if what == "file" else place / "sub", "work")


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is a folder of Linux")
def test_a_folder_without_permission():
    with pytest.raises(SettingError, match="name another folder"):
        Ledger(Path("/proc/nowhere"), "work")


def test_a_key_is_of_what_is_computed_not_of_titles_and_order():
    plain = graph()
    titled = {node: {**content, "_meta": {"title": "X"}} for node, content in plain.items()}
    turned = dict(reversed(titled.items()))
    assert keys_of([plain]) == keys_of([titled]) == keys_of([turned])
    assert keys_of([plain]) != keys_of([graph(seed=1)])


def test_equal_jobs_of_one_run_have_keys_of_their_own():
    keys = keys_of([graph(), graph(seed=1), graph(), graph()])
    assert len(set(keys)) == 4
    assert keys[2:] == [f"{keys[0]}-2", f"{keys[0]}-3"]
