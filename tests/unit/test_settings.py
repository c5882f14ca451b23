"""The user's settings: one JSON file, and what is said of one that cannot be used."""

import json
import logging
import os
import sys
import tempfile
from pathlib import Path

import pytest

from qwen_l40s import SettingError
from qwen_l40s.cli import main
from qwen_l40s.cli.doctor import check_settings
from qwen_l40s.machine import settings as module
from qwen_l40s.machine.card import State
from qwen_l40s.machine.settings import (
    NAME,
    Settings,
    default_file,
    read_settings,
    settings_file,
    use_settings,
)
from qwen_l40s.machine.store import (
    ATTENTION,
    CALIBRATION,
    CARDS,
    cache_folder,
    known_cards,
    load_attention,
    read_calibrations,
)

BROKEN = {
    "text": ("{", "not readable JSON"),
    "list": ("[]", "one JSON object"),
    "no version": ('{"cache": "x"}', "one JSON object"),
    "newer": ('{"version": 2, "colour": "red"}', "version 2, but this package reads 1"),
    "unknown": ('{"version": 1, "atention": "fast"}', "no text named 'atention'"),
    "number": ('{"version": 1, "cache": 7}', "no text named 'cache'"),
    "bytes": (b"\xff\xfe", "not readable JSON"),
}


@pytest.fixture
def file(set_settings, tmp_path):
    """A settings file in use, not there yet."""
    path = tmp_path / "设置 file.json"
    use_settings(path)
    return path


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="Windows has no such pipes")
@pytest.mark.parametrize("name", [CALIBRATION, ATTENTION, CARDS, "settings"])
def test_a_pipe_or_a_huge_file_in_a_shared_folder_holds_nobody_up(tmp_path, set_settings, name):
    """A neighbour may put it there: opening the pipe would block for ever."""
    use_settings(Settings(cache=str(tmp_path)))
    path = tmp_path / name
    for make in (os.mkfifo, lambda path: path.touch() or os.truncate(path, 2**40)):
        path.unlink(missing_ok=True)
        make(path)
        if name == "settings":
            with pytest.raises(SettingError, match=r"it is (not a file|larger than 16 MiB)"):
                read_settings(path)
        elif name == CARDS:
            with pytest.raises(SettingError, match=r"is a pipe|is larger than 1 MiB"):
                known_cards()
        else:
            assert read_calibrations(tmp_path) == [] and load_attention("x") is None


def test_a_measurement_of_endless_tokens_is_none(tmp_path, set_settings):
    use_settings(Settings(cache=str(tmp_path)))
    text = '{"version": 1, "measured": {"x": {"tokens": 1e999, "ms": {"sdpa": 1}}}}'
    (tmp_path / ATTENTION).write_text(text)
    assert load_attention("x") is None


def test_what_a_file_sets_is_used(file, tmp_path):
    assert read_settings(file) == Settings()
    file.write_text(json.dumps({"version": 1, "cache": str(tmp_path), "gemm_int8": "triton"}))
    use_settings(file)
    assert module.settings() == Settings(cache=str(tmp_path), gemm_int8="triton")
    assert cache_folder() == tmp_path
    check = check_settings(settings_file())
    assert check.state is State.USABLE
    assert check.why.fact == f"cache {tmp_path}, gemm_int8 triton ({file})"


@pytest.mark.parametrize(("text", "said"), BROKEN.values(), ids=BROKEN)
def test_one_that_cannot_be_used_is_told_and_counts_as_empty(file, caplog, capsys, text, said):
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with caplog.at_level(logging.WARNING):
        assert module.settings() == module.settings() == Settings()
    (record,) = caplog.records
    assert said in record.message and str(file) in record.message
    check = check_settings(settings_file())
    assert check.state is State.LIMITED and said in check.why.fact and check.why.remedy
    with pytest.raises(SettingError, match="settings"):
        read_settings(file)
    assert main(["estimate", "--settings", str(file)]) == 2
    assert said in capsys.readouterr().err


def test_a_file_that_is_named_must_be_there(file, capsys):
    assert main(["inspect", "x", "--settings", str(file)]) == 2
    assert "--settings is not a file" in capsys.readouterr().err


def test_where_the_file_is_by_default(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(sys, "platform", "linux")
    assert default_file() == tmp_path / ".config" / "qwen-l40s.json"
    monkeypatch.setattr(sys, "platform", "win32")
    assert default_file() == tmp_path / "AppData" / "Roaming" / "qwen-l40s.json"
    pack = tmp_path / "我的 ComfyUI" / "custom_nodes" / "a pack"
    monkeypatch.setattr(module, "__file__", str(pack / "machine" / "settings.py"))
    assert default_file() == tmp_path / "我的 ComfyUI" / "user" / "qwen-l40s.json"
    monkeypatch.setitem(sys._xoptions, "qwen_l40s", "/data/mine.json")
    assert default_file() == Path("/data/mine.json")


def test_doctor_reads_those_of_the_comfyui_that_is_named(tmp_path):
    (tmp_path / "user").mkdir()
    (tmp_path / "user" / "qwen-l40s.json").write_text('{"version": 1, "attention": "fast"}')
    assert "attention fast" in check_settings(tmp_path / "user" / module.NAME).why.fact


def test_a_relative_cache_lies_beside_the_settings(file, tmp_path, monkeypatch):
    file.write_text('{"version": 1, "cache": "measured"}')
    monkeypatch.chdir("/")
    assert cache_folder() == tmp_path / "measured"


def test_a_user_without_a_home_has_a_temporary_folder(set_settings, monkeypatch, tmp_path):
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert default_file() == tmp_path / ".config" / NAME
    for name, there in {"": ".cache/qwen-l40s", "~gone/x": "gone/x"}.items():
        set_settings(cache=name)
        assert cache_folder() == tmp_path / there
    assert main(["estimate", "--list-cards"]) == 0
    assert main(["doctor"]) in (0, 1)
