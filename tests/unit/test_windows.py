"""What Windows does otherwise, as far as it can be faked: locks, writes, paths and consoles."""

import errno
import io
import os
import sys
from types import SimpleNamespace

import pytest

from qwen_l40s import SettingError, UnavailableError
from qwen_l40s.client.journal import Journal
from qwen_l40s.errors import plain_write_errors
from qwen_l40s.files import print_text, write_whole


@pytest.fixture
def locks(monkeypatch):
    """msvcrt's locks: of a byte at the position of a file, until the test ends."""
    held = {}

    def locking(number, mode, count):
        place = os.fstat(number).st_ino, os.lseek(number, 0, os.SEEK_CUR)
        assert (mode, count) == (2, 1) and place[1] < 2**31 - 1
        if place in held:
            raise OSError(errno.EACCES, "Permission denied")
        held[place] = number

    monkeypatch.setitem(sys.modules, "fcntl", None)
    monkeypatch.setitem(sys.modules, "msvcrt", SimpleNamespace(LK_NBLCK=2, locking=locking))
    return held


def test_two_runs_never_write_one_journal(locks, tmp_path):
    with Journal(tmp_path, "run") as journal:
        journal.ended("done", "a", "1", server="http://a")
        (place,) = locks
        assert place[1] > journal.path.stat().st_size  # others may read all that is written
        with pytest.raises(SettingError, match="another run writes this journal"):
            Journal(tmp_path, "run", resume=True)
        journal.ended("done", "b", "2", server="http://a")
        assert journal.path.read_text().count("done") == 2


@pytest.mark.parametrize(
    ("error", "length", "remedy"),
    [
        (
            PermissionError(13, "Permission denied"),
            10,
            "close the program that has the file open, or create",
        ),
        (FileNotFoundError(2, "No such file or directory"), 300, "at most 259 characters"),
        (OSError(28, "No space left on device"), 10, "create the folder"),
    ],
    ids=str,
)
def test_what_it_says_of_a_write(monkeypatch, tmp_path, error, length, remedy):
    monkeypatch.setattr(sys, "platform", "win32")
    with (
        pytest.raises(UnavailableError, match=remedy),
        plain_write_errors(tmp_path / ("a" * length)),
    ):
        raise error


def test_a_file_that_another_program_has_open_stays(monkeypatch, tmp_path):
    def refuse(*_):
        raise PermissionError(13, "Access is denied")

    file = tmp_path / "a.json"
    file.write_bytes(b"old")
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr("pathlib.Path.replace", refuse)
    with pytest.raises(UnavailableError, match="close the program"):
        write_whole(file, b"new")
    assert [it.name for it in tmp_path.iterdir()] == ["a.json"] and file.read_bytes() == b"old"


@pytest.mark.parametrize("encoding", ["cp1252", "cp936", "cp437"])
def test_a_console_of_another_encoding(encoding):
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    print_text("画 \N{RIGHTWARDS ARROW} 1 × 2, \x1b[31mred", stream)
    stream.flush()
    assert b"x1b[31mred" in stream.buffer.getvalue().replace(b"\\", b"")
