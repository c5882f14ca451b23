"""benchmarks/memory.py: what it reads from logs and the driver, and its graphs."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"
sys.path.append(str(BENCHMARKS))

import memory_meter
import memory_nvml
from ballast import GIB, STEP, Ballast
from memory_cases import (
    CASES,
    PROMPTS,
    Settings,
    default_of,
    fit,
    graph_of,
    images_of,
)
from memory_log import findings, kind_of, of_pack, summary
from memory_meter import Meter, Series
from memory_nvml import Nvml, NvmlError, PcieCounters, PcieRates, count_since
from memory_record import Results, on_card, phases_of

# --- the log

LINES = {
    "loaded partially; 5.00 MB usable, 3.00 MB loaded, 7.00 MB offloaded, 1.00 MB buffer "
    "reserved, lowvram patches: 0": "partly loaded",
    "loaded completely; 93.00 MB usable, 70.00 MB loaded, full load: True": None,
    "Unloaded partially: 12.50 MB freed, 3.00 MB remains loaded, 0.00 MB buffer reserved, lowvram "
    "patches: 0": "partly unloaded",
    "Unloaded partially: 0.00 MB freed, 3.00 MB remains loaded, 0.00 MB buffer reserved, lowvram "
    "patches: 0": None,
    "2 models unloaded.": "unloaded",
    "0 models unloaded.": None,
    "Unloading QwenImage": "unloaded",
    "AIMDO free: model=QwenImage device=cuda:0 prevailing_method=vbar methods={'vbar': 1} "
    "requested=all vbar_mb=38900.0 backups_mb=0.0": "freed on demand",
    "AIMDO free: model=QwenImage device=cuda:0 prevailing_method=none methods={'none': 1} "
    "requested=12.0MB vbar_mb=0.0 backups_mb=0.0": None,
    "Warning: Ran out of memory when regular VAE decoding, retrying with tiled VAE decoding.": (
        "tiled"
    ),
    "Got an OOM, unloading all loaded models.": "out of memory",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB.": "out of memory",
    "!!! Exception during processing !!! a sentence": "error",
    "lowvram: loaded module regularly blocks.0 Linear()": None,
    "Using async weight offloading with 2 streams": None,
    "CLIP/text encoder model load device: cuda:0, offload device: cpu, current: cpu": None,
    "Model QwenImage prepared for dynamic VRAM loading. 38966MB Staged. 0 patches attached.": None,
}


@pytest.mark.parametrize("line", LINES)
def test_lines_of_the_log(line):
    assert kind_of(line) == LINES[line]


def test_findings_are_told_once_without_their_time():
    stamp = "[2026-01-01 12:00:0{},000] [DEBUG] "
    lines = [stamp.format(second) + "Unloading QwenImage" for second in range(3)]
    found = findings([*lines, stamp.format(4) + "got prompt"])
    assert found == [{"kind": "unloaded", "line": "Unloading QwenImage", "times": 3}]
    assert summary(found) == "unloaded x3"
    assert summary([]) == "-"


def test_what_the_pack_reports_is_kept_with_all_its_lines():
    stamp = "[2026-01-01 12:00:00,000] [INFO] "
    lines = ["cut off", f"{stamp}Qwen-Image L40S", "blocks: fused", f"{stamp}got prompt", "more"]
    assert of_pack(lines) == ["Qwen-Image L40S\nblocks: fused"]


# --- the driver


class Driver:
    """Stands for NVIDIA's library: one card with counters of 32 bits."""

    def __init__(self, *, counters: bool = True, rates: bool = True) -> None:
        self.used, self.received, self.kib = 5 * GIB, 2**32 - 100, 2**20
        self._counters, self._rates = counters, rates
        self.nvmlErrorString = lambda code: b"Not Supported"

    def nvmlInit_v2(self):
        return 0

    def nvmlDeviceGetHandleByUUID(self, name, card):
        return 0 if name == b"GPU-1234" else 6

    def nvmlDeviceGetHandleByIndex_v2(self, index, card):
        return 0

    def nvmlSystemGetDriverVersion(self, text, size):
        text.value = b"580.1"
        return 0

    def nvmlDeviceGetMemoryInfo(self, card, memory):
        memory._obj.used = self.used
        return 0

    def nvmlDeviceGetFieldValues(self, card, count, values):
        for value in values:
            value.result = 0 if self._counters else 3
            value.value = self.received % 2**32 if value.field == 198 else 0
        return 0

    def nvmlDeviceGetPcieThroughput(self, card, direction, kib):
        kib._obj.value = self.kib if direction == 1 else 0
        return 0 if self._rates else 3


@pytest.fixture
def driver(monkeypatch):
    def install(**features):
        made = Driver(**features)
        monkeypatch.setattr(ctypes, "CDLL", lambda name: made)
        return made

    return install


def test_the_structure_has_the_size_of_nvmls():
    assert ctypes.sizeof(memory_nvml._FieldValue) == 40
    assert memory_nvml._FieldValue.value.offset == 32


def test_memory_and_driver(driver):
    driver()
    nvml = Nvml("1234")
    assert (nvml.used(), nvml.driver()) == (5 * GIB, "580.1")


@pytest.mark.parametrize(
    ("before", "after", "counted"),
    [(10, 30, 20), (2**32 - 5, 7, 12), (2**32 - 5, 2**32 + 7, 12), (2**40, 2**40 + 1, 1)],
)
def test_a_counter_may_wrap(before, after, counted):
    assert count_since(before, after) == counted


def test_counters_add_up_over_a_wrap(driver):
    card = driver()
    total = PcieCounters(Nvml())
    for step in (60, 3_000_000_000, 3_000_000_000):
        card.received += step
        found = total()
    assert found == (6_000_000_060, 0)


def test_rates_are_integrated(driver, monkeypatch):
    driver()
    moments = iter([100.0, 100.5, 102.0])
    monkeypatch.setattr(memory_nvml.time, "monotonic", lambda: next(moments))
    total = PcieRates(Nvml())
    assert [total(), total()] == [(GIB // 2, 0), (2 * GIB, 0)]


def test_the_meter_takes_rates_where_there_are_no_counters(driver):
    driver(counters=False)
    meter = Meter(lambda: 0, "1234")
    meter.stop()
    assert "rates" in meter.about["pcie"]


def test_the_meter_says_why_nothing_counts_what_moves(driver):
    driver(counters=False, rates=False)
    meter = Meter(lambda: 0, "1234")
    meter.stop()
    assert meter.about["pcie"] is None
    assert "Not Supported" in meter.about["pcie_missing"]
    assert meter.moved(0, 1) is None


def test_the_meter_asks_the_ballast_where_there_is_no_driver(monkeypatch):
    def missing(name):
        raise OSError("no such library")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(NvmlError, match="no such library"):
        Nvml()
    meter = Meter(lambda: 7, "1234")
    meter.stop()
    assert meter.used() == 7
    assert "no such library" in meter.about["memory"]


def test_a_peak_is_found_between_and_at_the_start(monkeypatch):
    series = Series(lambda: 0, 60)
    series.stop()
    series._times, series._values = [0.0, 1.0, 2.0, 3.0], [5, 9, 2, 4]
    assert series.within(1.5, 2.5) == [9, 2]
    assert series.within(2.1, 2.2) == [2]
    assert series.within(-1, 0.5) == [5]
    assert [series.at(moment) for moment in (-1, 1.0, 9)] == [5, 9, 4]


def test_a_series_keeps_changes_and_says_what_ended_it():
    values = iter([1, 1, 2])
    series = Series(lambda: next(values), 0.001)
    series.join(timeout=5)
    assert series._values == [1, 2]
    assert "StopIteration" in series.failure


# --- the ballast

FAKE_TORCH = """
import types
free, total = {free}, 139 * 2**30
uint8 = None
def mem_get_info():
    return free, total
class Chunk:
    def __init__(self, size, dtype, device):
        global free
        free -= size
        self.size = size
    def numel(self):
        return self.size
empty = Chunk
__version__ = "0"
card = types.SimpleNamespace(name="card", uuid="1234")
cuda = types.SimpleNamespace(init=lambda: None, mem_get_info=mem_get_info,
    current_device=lambda: 0, get_device_properties=lambda index: card)
"""


@pytest.fixture
def card(tmp_path, monkeypatch):
    """A torch that counts instead of allocating."""

    def free(gib):
        (tmp_path / "torch.py").write_text(FAKE_TORCH.format(free=int(gib * GIB)))
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    return free


@pytest.mark.parametrize(
    ("arguments", "left"), [(("--free-gib", "44.4"), 44.4), (("--share", "0.5"), 69.15)]
)
def test_the_ballast_leaves_what_it_should(card, arguments, left):
    card(138.3)
    with Ballast(sys.executable, *arguments) as ballast:
        assert left * GIB <= ballast.facts["free_gib"] * GIB + 1 < left * GIB + STEP + 1
        assert ballast.used() == pytest.approx((139 - ballast.facts["free_gib"]) * GIB)
        process = ballast._process
        assert process.poll() is None
    assert process.returncode == 0


def test_the_ballast_ends_with_the_process_that_started_it(card):
    card(20)
    code = (
        f"import sys; sys.path.append({str(BENCHMARKS)!r})\n"
        "from ballast import Ballast\n"
        "import os\n"
        "held = Ballast(sys.executable, '--free-gib', '4')\n"
        "print(held._process.pid, flush=True)\n"
        "os._exit(0)\n"
    )
    pid = int(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)
    deadline = time.monotonic() + 10
    while _runs(pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2][:3]
    except FileNotFoundError:
        return False


def test_the_ballast_refuses_to_leave_more_than_there_is(card):
    card(20)
    with pytest.raises(RuntimeError, match=r"44\.4 GiB are to stay free .* 20\.0 GiB free"):
        Ballast(sys.executable, "--free-gib", "44.4")


# --- the graphs


def linked(graph):
    return {
        value[0]
        for node in graph.values()
        for value in node["inputs"].values()
        if isinstance(value, list)
    }


@pytest.mark.parametrize("name", CASES)
def test_every_link_of_every_graph_leads_somewhere(name):
    case = CASES[name]
    images = images_of(case, [1328, 1024], 512)
    expected = {"images": [1328] * 3 + [1024] * 3, "alone": [1024] * 2, "pressure": [512] * 2}
    assert [image.size for image in images] == expected[case.kind]
    for image in images:
        graph = graph_of(case, Settings(steps=20), image)
        assert linked(graph) <= set(graph)
        kinds = {node["class_type"] for node in graph.values()}
        assert ("CLIPTextEncode" in kinds) == (case.kind != "alone")
        assert any(kind.startswith("QwenL40S") for kind in kinds) == (case.loader == "ours")
        assert graph["sample"]["inputs"]["steps"] == (4 if case.kind == "pressure" else 20)


def test_the_three_images_differ_in_seed_and_then_in_prompt():
    images = images_of(CASES["stock"], [1024], 512)
    assert [(image.seed, image.text) for image in images] == [
        (1, PROMPTS[0]),
        (2, PROMPTS[0]),
        (2, PROMPTS[1]),
    ]


KNOWN = {
    "VAEDecode": {"input": {"required": {"samples": ["LATENT"], "vae": ["VAE"]}}},
    "Old": {"input": {"required": {"kind": [["a", "b"], {}], "size": ["INT", {"default": 3}]}}},
    "New": {"input": {"required": {}, "optional": {"kind": ["COMBO", {"options": ["a"]}]}}},
}


def test_a_graph_is_fitted_to_what_the_server_has():
    graph = {
        "decode": {
            "class_type": "QwenL40S_VAEDecode",
            "inputs": {"samples": ["x", 0], "vae": ["y", 0], "tiles": 0},
        },
        "old": {"class_type": "Old", "inputs": {"other": 1}},
        "new": {"class_type": "New", "inputs": {"kind": "a"}},
    }
    fitted = fit(graph, KNOWN)
    assert fitted.graph == {
        "decode": {"class_type": "VAEDecode", "inputs": {"samples": ["x", 0], "vae": ["y", 0]}},
        "old": {"class_type": "Old", "inputs": {"kind": "a", "size": 3}},
        "new": {"class_type": "New", "inputs": {"kind": "a"}},
    }
    assert len(fitted.notes) == 3
    assert fitted.notes[0] == "QwenL40S_VAEDecode is not there: VAEDecode in its place"


def test_a_node_that_nothing_replaces_is_an_error():
    with pytest.raises(LookupError, match="no node Missing"):
        fit({"a": {"class_type": "Missing", "inputs": {}}}, KNOWN)
    with pytest.raises(LookupError, match="MODEL has no default"):
        default_of(["MODEL"])


# --- the records


def test_phases_add_seconds_and_take_the_highest_peak():
    nodes = [
        {"class": "CLIPTextEncode", "seconds": 1.0, "peak_gib": 9.0, "received_gb": 1.0},
        {"class": "CLIPTextEncode", "seconds": 2.0, "peak_gib": 7.0, "received_gb": 0.5},
        {"class": "Unheard", "seconds": 3.0, "peak_gib": None, "received_gb": None},
    ]
    phases = phases_of(nodes)
    assert phases["encode"]["seconds"] == 3.0
    assert (phases["encode"]["peak_gib"], phases["encode"]["received_gb"]) == (9.0, 1.5)
    assert phases["other"]["peak_gib"] is None


def test_results_are_on_the_disk_after_each_record(tmp_path):
    path = tmp_path / "out.json"
    results = Results(path)
    record = {
        "mode": "legacy",
        "case": "stock",
        "size": 1024,
        "image": "first",
        "status": "success",
    }
    models = [
        {"model": "WanVAE", "gib": 0.2, "loaded_gib": 0.2},
        {"model": "QwenImage", "gib": 38.0, "loaded_gib": 20.0},
    ]
    results.add(record | {"seconds": 1.23456, "peak_gib": 40.5, "models": models})
    results.add({**record, "status": "failed"})
    found = json.loads(path.read_text())["records"]
    assert [one["status"] for one in found] == ["success", "failed"]
    assert found[0]["seconds"] == 1.2346
    head, first, second = results.table().splitlines()
    assert first.split()[:7] == ["legacy", "stock", "1024", "first", "success", "1.2", "40.50"]
    assert on_card(results.records[0]) == "20.0/38.0"
    assert "failed" in second and head.startswith("mode")


# --- the weights and the command line


def test_random_weights_are_written_once(tmp_path):
    torch = pytest.importorskip("torch")
    from memory_weights import write
    from safetensors.torch import load_file

    shapes = {"a.weight": (64, 256), "a.bias": (64,), "norm.weight": (8,), "b.gamma": (4, 1, 1, 1)}
    path = tmp_path / "models" / "file.safetensors"
    write(path, shapes, "cpu")
    found = load_file(path)
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == shapes
    assert found["a.weight"].float().std().item() == pytest.approx(0.5 / 16, rel=0.05)
    assert found["a.bias"].abs().max() > 0
    assert all(torch.equal(found[n], torch.ones_like(found[n])) for n in ("norm.weight", "b.gamma"))
    before = path.stat().st_mtime_ns
    write(path, shapes, "cpu")
    assert path.stat().st_mtime_ns == before


def test_the_command_line_refuses_unknown_cases():
    command = [sys.executable, str(BENCHMARKS / "memory.py"), "--cases", "ours-bf17"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "ours-bf17" in done.stderr and "alone-stock" in done.stderr


def test_the_intervals_keep_a_32_bit_counter_from_wrapping_twice():
    # 64 GB/s, PCIe 5 with 16 lanes.
    assert memory_meter.PCIE_SECONDS * 64e9 < 2**32
