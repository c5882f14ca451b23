"""`qwen-l40s bench` on the CPU and small, without ComfyUI."""

import json
import re
import sys
from types import SimpleNamespace

import pytest
import torch
import waiting

from qwen_l40s.bench import forward, measure
from qwen_l40s.bench.rows import FORWARD
from qwen_l40s.cli import main
from qwen_l40s.errors import UnavailableError
from qwen_l40s.spec.formats import GIB

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
SMALL_RUN = ["--device", "cpu", "--width", "small", "--layers", "1", "--size", "64x32"]
SMALL_RUN += ["--text", "5", "--repeats", "2", "--warm-up", "1"]


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
    assert "diffusers bf16 compiled (needs an NVIDIA card)" in left_out
    assert cpu.startswith("These are CPU figures")
    results = json.loads(lines[-1])
    assert json.loads(file.read_text()) == results
    rows = {row["name"]: row for row in results["rows"]}
    assert set(rows) == {"diffusers bf16 eager", "ours bf16 in diffusers"}
    for row in rows.values():
        assert row["ms"] > 0
        assert row["rel_error_blocks"] is None  # without stock ComfyUI
    assert "blocks: fused" in rows["ours bf16 in diffusers"]["paths"]
    assert len(results["conditions"]["left_out"]) == len(FORWARD) - 2


def test_operations_are_measured_or_left_out_with_a_reason(without_comfyui, capsys):
    assert bench("ops", *SMALL_RUN, "--only", "*torch", "gemm 128x512*", "attention *") == 0
    rows = {row["name"]: row for row in last_line(capsys)["rows"]}
    assert rows["gemm 128x512 bf16"]["tflops"] > 0
    assert rows["residual+norm+modulate ours torch"]["gbs"] > 0
    assert rows["residual+norm+modulate ours torch"]["tflops"] is None
    assert rows["copy torch"]["gbs"] > 0
    assert rows["attention math"]["ms"] > 0
    assert "needs an NVIDIA card" in rows["attention sdpa_cudnn"]["left_out"]
    assert all(("ms" in row) != ("left_out" in row) for row in rows.values())


def test_a_row_that_fails_is_one_line_and_the_others_go_on(without_comfyui, capsys, monkeypatch):
    def broken(*_arguments):
        raise RuntimeError("out of order\nmore")

    monkeypatch.setattr(forward, "measure_row", broken)
    arguments = ["forward", *SMALL_RUN, "--size", "32x32", "--only", "diffusers bf16 eager"]
    assert bench(*arguments) == 1
    output = capsys.readouterr().out
    assert output.count("error RuntimeError: out of order\n") == 2
    rows = json.loads(output.splitlines()[-1])["rows"]
    assert [(row["size"], row["error"]) for row in rows] == [
        ("64x32", "RuntimeError: out of order"),
        ("32x32", "RuntimeError: out of order"),
    ]


# --- what is refused


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--size", "1000x1024"], "--size 1000x1024: both sides must be divisible by 16: use 992x"),
        (["--size", "0x16"], "divisible by 16"),
        (["--layers", "0"], "--layers must be 1 to 60, which the published models have, got 0"),
        (["--layers", "61"], "got 61"),
        (["--width", "wide"], "--width 'wide' is unknown: choose full or small"),
        (["--batch", "0"], "--batch must be at least 1, got 0"),
        (["--text", "0"], "--text must be at least 1"),
        (["--references", "-1"], "--references must be at least 0"),
        (["--repeats", "0"], "--repeats must be at least 1"),
        (["--only", "ours fp4"], "--only 'ours fp4' names no row: choose from 'comfyui bf16', "),
        (["--json", "nowhere/results.json"], "(nowhere)"),
        (["--json", "."], "--json names a folder"),
        (["--plot", "chart.png"], "--plot is gone: the table shows the figures, and --json FILE"),
        (["--profile"], "--profile is gone: `kernel_ms` sums the kernels up"),
        (["--device", "tpu"], "device 'tpu' is unknown"),
        (["--models", "models"], "--models goes with `image` alone"),
        (["--free-gib", "44.4"], "--free-gib goes with `image` alone"),
        (["--only", "comfyui bf16"], "nothing can be measured here: comfyui bf16 ("),
    ],
)
def test_bad_input_is_one_sentence(
    without_comfyui, monkeypatch, tmp_path, capsys, arguments, sentence
):
    monkeypatch.chdir(tmp_path)
    assert bench("forward", "--device", "cpu", "--width", "small", *arguments) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert sentence in output.err
    assert len(output.err.splitlines()) == 1


def test_a_size_without_two_sides_is_refused(capsys):
    with pytest.raises(SystemExit) as ended:
        bench("forward", "--size", "big")
    error = capsys.readouterr().err
    assert (ended.value.code, len(error.splitlines())) == (2, 1)
    assert "must be WIDTHxHEIGHT in pixels" in error


@pytest.mark.parametrize(
    ("what", "arguments", "sentence"),
    [
        ("ops", ["--only", "gemm 1x1"], "'gemm 128x128 bf16'"),
        ("block", [], "bench block is gone: `bench forward --layers 1` and `--layers 2`"),
        ("image", ["--references", "1"], "--references goes with `forward`"),
        ("image", ["--free-gib", "0"], "--free-gib must be at least 1"),
        ("image", ["--free-gib", "8"], "--free-gib is of a card's memory"),
    ],
)
def test_what_another_benchmark_takes_is_refused(capsys, what, arguments, sentence):
    assert bench(what, *SMALL_RUN, *arguments) == 2
    output = capsys.readouterr()
    assert output.out == "" and sentence in output.err and len(output.err.splitlines()) == 1


def test_an_image_on_a_card_needs_a_folder(monkeypatch, capsys):
    from qwen_l40s.bench import command

    monkeypatch.setattr(command, "torch_device", lambda *_: SimpleNamespace(type="cuda"))
    assert bench("image") == 2
    assert "name a folder for random models of 58 GB with --models" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch sees a card")
def test_a_machine_without_a_card_is_told_how_to_try(capsys):
    assert bench("forward") == 2
    assert "--device cpu --width small --layers 1" in capsys.readouterr().err


def test_the_memory_that_is_needed_is_told_before_anything_is_built(
    without_comfyui, monkeypatch, capsys
):
    from qwen_l40s.machine import device

    monkeypatch.setattr(device, "available_bytes", lambda _: 2**30)
    assert bench("forward", "--device", "cpu", "--only", "diffusers bf16 eager") == 2
    # 40.9 GB of weights are 38.1 GiB.
    assert "needs 38.1 GiB and 1.0 GiB are free" in capsys.readouterr().err


# --- the parts


def test_every_thing_is_measured_once_before_any_is_measured_again():
    order = []

    def one(thing, repeats, again):
        order.append((thing, repeats, again))
        if thing == "c":
            raise RuntimeError("no\nmore")
        return {"samples_ms": [float(len(order))] * repeats} | ({} if again else {"first": thing})

    setup = SimpleNamespace(repeats=3, debug=False)
    found = dict(measure.by_turns("abc", one, setup))
    first = [("a", 1, False), ("b", 1, False), ("c", 1, False)]
    assert order == [*first, ("a", 2, True), ("b", 2, True)]
    assert found["a"]["samples_ms"] == [1, 4, 4] and found["a"]["first"] == "a"
    assert found["c"] == {"error": "RuntimeError: no"}


# --- the driver


class FakeNvml(SimpleNamespace):
    """Stands for nvidia-ml-py with one card."""

    NVMLError = RuntimeError
    used, started = 5 * GIB, True

    def nvmlInit(self):
        if not self.started:
            raise RuntimeError("Driver Not Loaded")

    def nvmlDeviceGetHandleByIndex(self, index):
        return "card"

    def nvmlDeviceGetMemoryInfo(self, card):
        if self.used is None:
            raise RuntimeError("GPU is lost")
        return SimpleNamespace(used=self.used)


@pytest.fixture
def nvml(monkeypatch):
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


def test_a_reader_finds_the_peak_and_tells_when_the_driver_is_gone(nvml):
    reader = measure.PeakReader(measure.NvmlCard())
    nvml.used = 7 * GIB
    assert reader.peak_gib() == 2.0
    nvml.used = 9 * GIB
    waiting.until(lambda: max(reader._seen) == nvml.used)
    nvml.used = 6 * GIB
    assert (reader.peak_gib(), reader.peak_gib()) == (4.0, 1.0)
    nvml.used = None
    reader.join(timeout=60)
    with pytest.raises(UnavailableError, match="stopped answering: GPU is lost"):
        reader.peak_gib()


def test_a_missing_package_or_driver_is_one_sentence(nvml, monkeypatch):
    nvml.started = False
    with pytest.raises(UnavailableError, match="does not answer: Driver Not Loaded"):
        measure.NvmlCard()
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(UnavailableError, match="run `pip install nvidia-ml-py`"):
        measure.NvmlCard()


def test_more_than_is_free_cannot_stay_free(monkeypatch):
    from qwen_l40s.bench.prompt import hold_all_but

    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (20 * GIB, 139 * GIB))
    with pytest.raises(UnavailableError, match=r"44\.4 GiB are to stay free .* 20\.0 GiB free"):
        hold_all_but(44.4)
    assert hold_all_but(None) is None
    held = []
    monkeypatch.setattr(torch, "empty", lambda size, **_: held.append(size))
    hold_all_but(4.0)
    assert held == [16 * GIB]
    monkeypatch.undo()


@pytest.mark.cuda
def test_a_card_s_kernels_and_memory_are_seen(without_comfyui, capsys):
    arguments = ["forward", "--layers", "2", "--size", "256x256", "--only", "diffusers bf16 eager"]
    assert bench(*arguments) == 0
    (row,) = last_line(capsys)["rows"]
    assert 0 < row["kernel_ms"] <= 1.2 * row["ms"]
    assert row["peak_gib"] > row["extra_gib"] > 0
