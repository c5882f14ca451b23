"""Which ComfyUI `doctor` finds, and the folders of its models."""

import subprocess
import sys
from pathlib import Path

import pytest

from qwen_l40s.machine import packages as software
from qwen_l40s.machine.card import State


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ('__version__ = "0.33.0"\n', State.USABLE),
        ("# made by the build\n__version__ = '0.100.1'\n", State.USABLE),
        ('__version__ = "0.32.9"\n', State.NOT_USABLE),
        ("raise AssertionError('imported')\n", State.NOT_USABLE),
    ],
)
def test_comfyui_is_read_as_text_and_has_a_floor(tmp_path, text, state):
    (tmp_path / "comfyui_version.py").write_text(text)
    check = software.check_comfyui(tmp_path)
    assert check.state is state
    assert str(tmp_path) in check.why.fact
    assert ("newer than tested (0.33.0" in check.why.fact) == ("0.100.1" in text)


@pytest.fixture
def machine(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "python"))
    monkeypatch.chdir(tmp_path)

    def make(name):
        (tmp_path / name).mkdir()
        (tmp_path / name / "comfyui_version.py").write_text('__version__ = "0.33.0"\n')
        return tmp_path / name

    return make


def pack_in(folder, monkeypatch):
    pack = folder / "custom_nodes" / "my-pack.v2"
    monkeypatch.setattr(software, "__file__", str(pack / "machine" / "packages.py"))


def test_without_one_nothing_is_found(machine):
    assert software.find_comfyui() is None
    assert software.models_folder(None) is None
    assert software.check_comfyui(None).why.fact == "not found"


def test_the_one_around_the_pack_comes_before_the_one_at_home(machine, monkeypatch):
    home, other = machine("ComfyUI"), machine("other")
    assert (software.find_comfyui(), software.models_folder(home)) == (home, home / "models")
    pack_in(other, monkeypatch)
    assert (software.find_comfyui(), software.models_folder(other)) == (other, other / "models")


@pytest.mark.parametrize("by", ["Python in it", "portable Python", "current folder", "sys.path"])
def test_with_a_base_directory_the_code_is_elsewhere(machine, tmp_path, monkeypatch, by):
    base, code = tmp_path / "base", machine("0 编码" if by != "portable Python" else "ComfyUI")
    monkeypatch.setenv("HOME", "/nowhere")
    pack_in(base, monkeypatch)
    assert software.find_comfyui() is None or by == "portable Python"
    if by == "Python in it":
        monkeypatch.setattr(sys, "prefix", str(code / ".venv"))
    elif by == "portable Python":
        monkeypatch.setattr(sys, "prefix", str(tmp_path / "python_embeded"))
    elif by == "current folder":
        (code / "input").mkdir()
        monkeypatch.chdir(code / "input")
    else:
        monkeypatch.setattr(sys, "path", [str(code)])
    assert (software.find_comfyui(), software.models_folder(code)) == (code, base / "models")


@pytest.mark.skipif(sys.platform == "win32", reason="links need a right there")
def test_a_link_in_custom_nodes_belongs_to_that_comfyui(tmp_path):
    pack = tmp_path / "custom_nodes" / "猫 pack"
    pack.parent.mkdir()
    pack.symlink_to(Path(__file__).resolve().parents[2], target_is_directory=True)
    code = "from qwen_l40s.machine.packages import models_folder as m; print(m(None))"
    main = f"import sys, runpy; sys.argv = ['x', '--version']; sys.path.insert(0, '{pack}')\n"
    main += f"try: runpy.run_path({str(pack)!r}, run_name='__main__')\n"
    main += f"except SystemExit: {code}\n"
    done = subprocess.run(
        [sys.executable, "-S", "-c", main],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.splitlines()[-1:] == [str(tmp_path / "models")], done.stderr
