"""`qwen-l40s bench` on the CPU and small, without ComfyUI."""

import json
import re
import sys
from types import SimpleNamespace

import pytest
import torch
import waiting

from qwen_l40s.bench import forward, measure
from qwen_l40s.bench.rows import FORWARD, Inputs, Row
from qwen_l40s.cli import main
from qwen_l40s.errors import UnavailableError
from qwen_l40s.spec.formats import GIB

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


def test_an_image_on_a_card_needs_a_folder(monkeypatch, capsys):
    card = SimpleNamespace(type="cuda")
    monkeypatch.setattr("qwen_l40s.machine.device.card_to_measure", lambda *_: card)
    assert bench("image") == 2
    assert "--models" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch sees a card")
def test_a_machine_without_a_card_is_told_how_to_try(capsys):
    assert bench("forward") == 2
    assert "--device cpu --width small --layers 1" in capsys.readouterr().err


def test_the_memory_that_is_needed_is_told_before_anything_is_built(
    without_comfyui, monkeypatch, capsys
):
    from qwen_l40s.machine import device

    monkeypatch.setattr(device, "available_bytes", lambda _: 2**30)
    assert bench("forward", "--device", "cpu", "--only", "diffusers bf16") == 2
    # 40.9 GB of weights are 38.1 GiB.
    assert "needs 38.1 GiB and 1.0 GiB are free" in capsys.readouterr().err


# --- the parts


def test_every_thing_is_measured_once_before_any_is_measured_again():
    order = []

    def one(thing, repeats, again):
        order.append((thing.name, repeats, again))
        if thing.name == "c":
            raise RuntimeError("no\nmore")
        first = {} if again else {"first": thing.name}
        return {"samples_ms": [float(len(order))] * repeats} | first

    setup, things = SimpleNamespace(repeats=3, debug=False), map(Row, "abc")
    rows = measure.by_turns([*things], Inputs(64, 32), one, setup)
    found = {row["name"]: row for row in rows}
    first = [("a", 1, False), ("b", 1, False), ("c", 1, False)]
    assert order == [*first, ("a", 2, True), ("b", 2, True)]
    assert found["a"]["samples_ms"] == [1, 4, 4] and found["a"]["first"] == "a"
    assert found["c"]["error"] == "RuntimeError: no" and "ms" not in found["c"]


# --- the driver


class FakeNvml(SimpleNamespace):
    """Stands for nvidia-ml-py with one card."""

    used = 5 * GIB

    def nvmlInit(self):
        pass

    def nvmlDeviceGetHandleByIndex(self, index):
        return "card"

    def nvmlDeviceGetMemoryInfo(self, card):
        return self


@pytest.fixture
def nvml(monkeypatch):
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


def test_a_reader_finds_the_peak(nvml):
    reader = measure.PeakReader(measure.used_bytes())
    nvml.used = 7 * GIB
    assert reader.peak_gib() == 2.0
    nvml.used = 9 * GIB
    waiting.until(lambda: max(reader._seen) == nvml.used)
    nvml.used = 6 * GIB
    assert (reader.peak_gib(), reader.peak_gib()) == (4.0, 1.0)


def test_a_missing_package_is_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(UnavailableError, match="run `pip install nvidia-ml-py`"):
        measure.used_bytes()


def test_more_than_is_free_cannot_stay_free(monkeypatch):
    from qwen_l40s.bench.prompt import hold_all_but

    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (20 * GIB, 139 * GIB))
    with pytest.raises(UnavailableError, match=r"44\.4 GiB must stay free.* 20\.0 GiB free"):
        hold_all_but(44.4)
    assert hold_all_but(None) is None
    held = []
    monkeypatch.setattr(torch, "empty", lambda size, **_: held.append(size))
    hold_all_but(4.0)
    assert held == [16 * GIB]
    monkeypatch.undo()


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
