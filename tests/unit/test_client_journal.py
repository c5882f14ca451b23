"""The journal of a run, however it ended."""

from __future__ import annotations

import errno
import json
import os
import tracemalloc
from pathlib import Path
from unittest import mock

import pytest
from fake_comfyui import graph

from qwen_l40s.client.journal import LONGEST_LINE, Attempt, Journal, file_state
from qwen_l40s.client.workflow import key_of
from qwen_l40s.errors import SettingError


def queue(journal: Journal, key: str, prompt_id: str = "p", server: str = "http://a") -> None:
    journal.queued(key, Attempt(prompt_id, server, "boot"))


def test_a_job_is_done_while_its_files_are_here(tmp_path: Path):
    (tmp_path / "a.png").write_bytes(b"x")
    with Journal(tmp_path, "work") as journal:
        journal.begin("work.json", ["http://a"])
        queue(journal, "k1", "p1")
        queue(journal, "k2", "p2")
        journal.ended(
            "done", "k1", "p1", server="http://a", seconds=1.5, files=["a.png"], sizes=[1]
        )
    with Journal(tmp_path, "work") as journal:
        record = journal.finished("k1")
        assert (record.prompt_id, record.server, record.seconds) == ("p1", "http://a", 1.5)
        assert journal.finished("k2") is None
        assert journal.attempts("k2") == [Attempt("p2", "http://a", "boot")]
        (tmp_path / "a.png").unlink()
        assert journal.finished("k1") is None
        assert journal.attempts("k1") == [Attempt("p1", "http://a")]
        assert journal.attempts("k3") == []


@pytest.mark.parametrize("event", ["late", "refused", "failed"])
def test_a_late_result_changes_nothing_and_leaves_no_attempt_open(tmp_path: Path, event: str):
    (tmp_path / "a.png").write_bytes(b"x")
    with Journal(tmp_path, "work") as journal:
        queue(journal, "k", "p1", "http://a")
        queue(journal, "k", "p2", "http://b")
        journal.ended("done", "k", "p2", server="http://b", files=["a.png"], sizes=[1])
        journal.ended(event, "k", "p1", server="http://a")
    with Journal(tmp_path, "work") as journal:
        assert journal.finished("k").server == "http://b"
        assert not journal.records["k"].open


def test_a_job_that_is_forgotten_runs_again_however_its_run_ends(tmp_path: Path):
    (tmp_path / "a.png").write_bytes(b"x")
    with Journal(tmp_path, "work") as journal:
        for key in ("k1", "k2"):
            queue(journal, key, "p1")
            journal.ended("done", key, "p1", server="http://a", files=["a.png"], sizes=[1])
        queue(journal, "k1", "p2")  # and the server still has it
    with Journal(tmp_path, "work") as journal:
        journal.forget("k1")
        assert list(journal.forget("k3")) == []  # which nobody has
    with Journal(tmp_path, "work", resume=True) as journal:
        assert (journal.finished("k1"), journal.attempts("k1")) == (None, [])
        assert journal.finished("k2") is not None
        queue(journal, "k1", "p3")
        journal.ended("done", "k1", "p3", server="http://a", files=["a.png"], sizes=[1])
    with Journal(tmp_path, "work") as journal:
        assert journal.finished("k1").prompt_id == "p3"


def test_a_local_file_of_a_job_changes_by_its_size_or_time_and_not_by_its_absence(tmp_path: Path):
    lora, key = tmp_path / "lora.safetensors", "k"
    lora.write_bytes(b"old")
    size, changed = file_state(lora)
    with Journal(tmp_path, "work") as journal:
        journal.queued(key, Attempt("p1", "http://a", "boot", {str(lora): [size, changed]}))
    for ended in (False, True):
        with Journal(tmp_path, "work") as journal:
            assert journal.changed(key) == journal.changed("another") == set()
            lora.write_bytes(b"larger")
            os.utime(lora, ns=(0, changed))
            assert journal.changed(key) == {str(lora)}
            lora.write_bytes(b"new")
            os.utime(lora, ns=(0, changed + 1))
            assert journal.changed(key) == {str(lora)}
            lora.unlink()  # as on another machine
            assert journal.changed(key) == set()
            lora.write_bytes(b"old")
            os.utime(lora, ns=(0, changed))
            if not ended:
                journal.ended("done", key, "p1", server="http://a")


def test_a_journal_of_a_newer_version_is_left_alone(tmp_path: Path):
    path = tmp_path / "work.submit.jsonl"
    path.write_text('{"event": "run", "version": 3}\n')
    with pytest.raises(SettingError, match="a newer version of Qwen-Image"):
        Journal(tmp_path, "work")
    assert path.read_text() == '{"event": "run", "version": 3}\n'


def test_a_second_run_is_refused_while_the_first_one_writes(tmp_path: Path):
    with Journal(tmp_path, "work"):
        with pytest.raises(SettingError, match="another run writes this journal"):
            Journal(tmp_path, "work")
        Journal(tmp_path, "other").__exit__()
    Journal(tmp_path, "work").__exit__()


def test_a_disk_that_locks_no_files_is_refused(tmp_path: Path, monkeypatch):
    fcntl = pytest.importorskip("fcntl")

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(SettingError, match="--output"):
        Journal(tmp_path, "work")


def test_what_a_killed_run_left_half_is_removed_and_nothing_else(tmp_path: Path):
    with Journal(tmp_path, "work") as journal, Journal(tmp_path, "work.v2") as other:
        left, kept = journal.part(), other.part()
        left.touch(), kept.touch()
    with Journal(tmp_path, "work"):
        assert (left.exists(), kept.exists()) == (False, True)


def test_there_has_to_be_a_run_to_resume(tmp_path: Path):
    with pytest.raises(SettingError, match="no run to resume here"):
        Journal(tmp_path / "out", "work", resume=True)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("cut", range(1, 40, 6))
def test_a_torn_last_line_is_passed_over_and_what_follows_it_is_read(tmp_path: Path, cut: int):
    with Journal(tmp_path, "work") as journal:
        queue(journal, "k1", "p1")
        queue(journal, "k2", "p2")
    data = journal.path.read_bytes()
    journal.path.write_bytes(data[:-cut])
    with Journal(tmp_path, "work") as journal:
        assert "k1" in journal.records
        queue(journal, "k3", "p3")
    with Journal(tmp_path, "work") as journal:
        assert {"k1", "k3"} <= set(journal.records)


@pytest.mark.parametrize(
    "facts",
    [
        {"files": [1]},
        {"files": ["/etc/passwd"], "sizes": [1]},
        {"files": ["../a.png"], "sizes": [1]},
        {"texts": [1, 2]},
        {"server": 5},
        {"sizes": "a", "files": ["a.png"]},
        {"key": []},
    ],
    ids=str,
)
def test_a_line_that_no_run_wrote_is_passed_over(tmp_path: Path, facts: dict[str, object]):
    line = {"event": "done", "key": "k", "prompt_id": "p", "server": "http://a"} | facts
    text = f"{json.dumps(line)}\n{'[' * 200_000}\n5\nnull\n"
    (tmp_path / "work.submit.jsonl").write_text(text)
    with Journal(tmp_path, "work", resume=True) as journal:
        assert journal.finished("k") is None or "server" in facts
        for attempt in journal.attempts("k"):
            assert isinstance(attempt.server, str)


@pytest.mark.parametrize(
    "seconds", ["7", [7], 10**400, None, 7], ids=["text", "list", "long", "none", "7"]
)
def test_a_time_is_a_number(tmp_path: Path, seconds: object):
    """Which the command prints beside the names of files that are there."""
    line = {"event": "done", "key": "k", "prompt_id": "p", "server": "a", "seconds": seconds}
    (tmp_path / "work.submit.jsonl").write_text(f"{json.dumps(line)}\n")
    with Journal(tmp_path, "work") as journal:
        assert journal.finished("k").seconds == (7 if seconds == 7 else None)


def test_a_line_without_an_end_is_read_in_pieces(tmp_path: Path):
    """As where the system has put zeros in the place of what it had not written."""
    with Journal(tmp_path, "work") as journal:
        queue(journal, "k", "p1")
    os.truncate(journal.path, 2**30)
    tracemalloc.start()
    with (
        mock.patch("qwen_l40s.client.journal.json.loads", wraps=json.loads) as parsed,
        Journal(tmp_path, "work") as journal,
    ):
        assert journal.attempts("k")
    assert max(len(call.args[0]) for call in parsed.mock_calls) < LONGEST_LINE  # seconds a GiB
    assert tracemalloc.get_traced_memory()[1] < 2**28
    tracemalloc.stop()


def test_such_a_line_leaves_what_is_known_of_a_job(tmp_path: Path):
    (tmp_path / "a.png").write_bytes(b"x")
    with Journal(tmp_path, "work") as journal:
        queue(journal, "k")
        journal.ended("done", "k", "p", server="http://a", files=["a.png"], sizes=[1])
    with journal.path.open("a") as lines:
        lines.write('{"event": "done", "key": "k", "prompt_id": "p", "files": [1]}\n')
    with Journal(tmp_path, "work") as journal:
        assert journal.finished("k").files == ("a.png",)


def test_a_file_of_another_size_is_not_done(tmp_path: Path):
    (tmp_path / "a.png").write_bytes(b"whole")
    with Journal(tmp_path, "work") as journal:
        assert journal.path.stat().st_mode & 0o777 == 0o600
        queue(journal, "k", "p1")
        journal.ended("done", "k", "p1", server="http://a", files=["a.png"], sizes=[5])
    for data in (b"", b"who"):
        with Journal(tmp_path, "work") as journal:
            assert journal.finished("k") is not None
            (tmp_path / "a.png").write_bytes(data)
            assert journal.finished("k") is None
            assert journal.attempts("k") == [Attempt("p1", "http://a")]
        (tmp_path / "a.png").write_bytes(b"whole")


@pytest.mark.parametrize("place", ["taken", "taken/sub", "/proc/nowhere"])
def test_a_folder_that_cannot_be_written_to(tmp_path: Path, place: str):
    (tmp_path / "taken").write_text("")
    with pytest.raises(SettingError, match=r"--output cannot be written .* name another folder"):
        Journal(tmp_path / place, "work")


def test_a_key_is_of_what_is_computed_not_of_titles_and_order():
    plain = graph()
    titled = {node: {**content, "_meta": {"title": "X"}} for node, content in plain.items()}
    turned = dict(reversed(titled.items()))
    assert key_of(plain) == key_of(titled) == key_of(turned)
    assert key_of(plain) != key_of(graph(seed=1))
