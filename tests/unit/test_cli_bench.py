"""`qwen-l40s bench` on the CPU and small, without ComfyUI."""

import json
import re

import pytest
import torch

from qwen_l40s.bench import forward
from qwen_l40s.bench.rows import FORWARD
from qwen_l40s.cli import main

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
SMALL_RUN = ["--device", "cpu", "--width", "small", "--layers", "1", "--size", "64x32"]
SMALL_RUN += ["--text", "5", "--repeats", "2"]


@pytest.fixture
def without_comfyui(monkeypatch, tmp_path):
    """Keeps this process from importing one."""
    monkeypatch.setenv("COMFYUI_PATH", str(tmp_path / "nowhere"))


def bench(*arguments):
    return main(["bench", *map(str, arguments)])


def last_line(capsys):
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_what_cannot_run_is_left_out_in_one_line(without_comfyui, capsys, tmp_path):
    file = tmp_path / "results.json"
    assert bench("forward", *SMALL_RUN, "--json", file) == 0
    lines = capsys.readouterr().out.splitlines()
    left_out, _, cpu = lines[:3]
    assert re.match(r"Left out: comfyui bf16, .*\(ComfyUI: .*; set COMFYUI_PATH", left_out)
    assert cpu.startswith("These are CPU figures")
    results = json.loads(lines[-1])
    assert json.loads(file.read_text()) == results
    rows = {row["name"]: row for row in results["rows"]}
    assert set(rows) == {"diffusers bf16"}
    assert rows["diffusers bf16"]["ms"] > 0
    assert rows["diffusers bf16"]["rel_error_blocks"] is None  # without stock ComfyUI
    assert len(results["conditions"]["left_out"]) == len(FORWARD) - 1


def test_operations_are_measured_or_left_out_with_a_reason(without_comfyui, capsys):
    assert bench("ops", *SMALL_RUN, "--only", "* ours", "copy *", "gemm 128x512*", "att*") == 0
    rows = {row["name"]: row for row in last_line(capsys)["rows"]}
    assert rows["gemm 128x512 bf16"]["tflops"] > 0
    assert rows["residual+norm+modulate ours"]["gbs"] > 0
    assert "tflops" not in rows["residual+norm+modulate ours"]
    assert rows["copy torch"]["gbs"] > 0
    assert rows["attention math"]["ms"] > 0
    assert "needs an NVIDIA GPU" in rows["attention sdpa_cudnn"]["left_out"]
    assert all(("ms" in row) != ("left_out" in row) for row in rows.values())


def test_a_row_that_fails_is_one_line_and_the_others_go_on(without_comfyui, capsys, monkeypatch):
    def broken(*_arguments):
        raise RuntimeError("out of order\nmore")

    monkeypatch.setattr(forward, "measure_row", broken)
    arguments = ["forward", *SMALL_RUN, "--size", "32x32", "--only", "diffusers bf16"]
    assert bench(*arguments) == 1
    output = capsys.readouterr().out
    assert output.count("error RuntimeError: out of order\n") == 2
    rows = json.loads(output.splitlines()[-1])["rows"]
    assert [(row["size"], row["error"]) for row in rows] == [
        ("64x32", "RuntimeError: out of order"),
        ("32x32", "RuntimeError: out of order"),
    ]


# --- what is refused


REFUSED = """
--layers: forward --layers 61
ours fp4: forward --only ours-fp4
(nowhere): forward --json nowhere/results.json
--json: forward --json .
tpu: forward --device tpu
--models: forward --models models
--free-gib: forward --free-gib 44.4
comfyui bf16: forward --only comfyui-bf16
gemm 128x128 bf16: ops --only gemm-1x1
--references and --family: image --references 1
--family: forward --family 2.1
--free-gib: image --free-gib 8
--size: forward --size big
992x1024: forward --size 1000x1024
0x16: forward --size 0x16
--layers: forward --layers 0
--batch: forward --batch 0
--text: forward --text none
--repeats: forward --repeats -1
--references: forward --references 4
--width: forward --width wide
"""


@pytest.mark.parametrize("line", REFUSED.strip().splitlines())
def test_bad_input_is_one_sentence(without_comfyui, monkeypatch, tmp_path, capsys, line):
    named, _, words = line.partition(": ")
    what, option, value = words.split()
    value = value.replace("-", " ") if option == "--only" else value
    monkeypatch.chdir(tmp_path)
    try:
        code = bench(what, "--device", "cpu", "--width", "small", option, value)
    except SystemExit as ended:  # of the parser
        code = ended.code
    output = capsys.readouterr()
    assert (code, output.out, len(output.err.splitlines())) == (2, "", 1)
    assert named in output.err


# --- the parts


# --- the driver


@pytest.mark.cuda
def test_a_card_s_kernels_and_memory_are_seen(without_comfyui, capsys, monkeypatch):
    # A model's choice is diffusers' for the whole process.
    registry = pytest.importorskip("diffusers.models.attention_dispatch")._AttentionBackendRegistry
    monkeypatch.setattr(registry, "_active_backend", registry._active_backend)
    arguments = ["forward", "--layers", "2", "--size", "256x256", "--only", "diffusers bf16"]
    assert bench(*arguments) == 0
    (row,) = last_line(capsys)["rows"]
    assert 0 < row["kernel_ms"] <= 1.2 * row["ms"]
    assert row["extra_gib"] > 0
