"""`qwen-l40s doctor`: every line carries its reason, the exit code whether anything runs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from qwen_l40s.cli import main

ROOT = Path(__file__).resolve().parent.parent


def test_json_gives_a_state_and_a_reason_for_every_check(capsys):
    pytest.importorskip("diffusers")
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["can_generate"] is True
    assert found["device"] in ("cuda", "cpu")
    assert found["remedy"] == ""
    names = [check["name"] for check in found["checks"]]
    for name in (
        "Python",
        "driver",
        "fp8 tensor cores",
        "torch",
        "triton",
        "comfy-kitchen",
        "ComfyUI",
    ):
        assert name in names
    for check in found["checks"]:
        assert check["state"] in ("usable", "limited", "not usable")
        assert check["reason"]


def test_table_ends_with_the_verdict(capsys):
    pytest.importorskip("diffusers")
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("usable      Python: 3.")
    assert lines[-1].startswith("Generation can run here")


def test_without_any_package_it_says_what_to_install_and_exits_1():
    # -S leaves site-packages out, where torch and all the others are.
    command = [sys.executable, "-S", str(ROOT), "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert found["can_generate"] is False
    assert found["device"] is None
    assert found["remedy"].startswith('pip install "torch>=2.4" "diffusers>=0.36" "transformers>=')


def test_cuda_is_not_started_on_a_machine_without_a_card():
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this machine has a card")
    code = (
        "from qwen_l40s.cli.doctor import diagnose\n"
        "diagnose()\n"
        "import torch\n"
        "assert not torch.cuda.is_initialized()\n"
    )
    path = {"QWEN_ROOT": str(ROOT), **os.environ}
    preamble = (
        "import importlib.util as u, os, sys\n"
        "root = os.environ['QWEN_ROOT']\n"
        "spec = u.spec_from_file_location('qwen_l40s', root + '/__init__.py')\n"
        "sys.modules['qwen_l40s'] = module = u.module_from_spec(spec)\n"
        "spec.loader.exec_module(module)\n"
    )
    command = [sys.executable, "-c", preamble + code]
    done = subprocess.run(command, capture_output=True, text=True, env=path, check=False)
    assert done.returncode == 0, done.stderr


def test_a_models_folder_that_is_not_there_is_refused(tmp_path, capsys):
    assert main(["doctor", "--models", str(tmp_path / "none")]) == 2
    message = capsys.readouterr().err
    assert str(tmp_path / "none") in message
    assert "Traceback" not in message
