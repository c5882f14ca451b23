"""bench/memory.py: what it reads from logs and the driver, its ballast and its graphs."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch

from qwen_l40s import UnavailableError
from qwen_l40s.bench import memory_record
from qwen_l40s.bench.memory import (
    CASES,
    CUDA_STEP,
    PROMPTS,
    Ballast,
    GraphSettings,
    fill,
    graph_of,
    images_of,
    parse,
)
from qwen_l40s.bench.memory_record import (
    CardMeter,
    DriverCard,
    MemoryResults,
    Series,
    count_since,
    findings,
    kind_of,
    pack_messages,
    phases_of,
    summary,
)
from qwen_l40s.spec.formats import GIB

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


def test_lines_of_the_log():
    assert {line: kind_of(line) for line in LINES} == LINES


def test_findings_are_listed_once_without_their_time():
    stamp = "[2026-01-01 12:00:0{},000] [DEBUG] "
    lines = [stamp.format(second) + "Unloading QwenImage" for second in range(3)]
    found = findings([*lines, stamp.format(4) + "got prompt"])
    assert found == [{"kind": "unloaded", "line": "Unloading QwenImage", "times": 3}]
    assert summary(found) == "unloaded x3"
    assert summary([]) == "-"


def test_the_pack_s_messages_are_kept_with_all_their_lines():
    stamp = "[2026-01-01 12:00:00,000] [INFO] "
    lines = ["cut off", f"{stamp}Qwen-Image L40S", "blocks: fused", f"{stamp}got prompt", "more"]
    assert pack_messages(lines) == ["Qwen-Image L40S\nblocks: fused"]


# --- the driver


class FakeNvml(SimpleNamespace):
    """Stands for nvidia-ml-py: one card with counters of 32 bits."""

    NVMLError = RuntimeError
    NVML_FI_DEV_PCIE_COUNT_RX_BYTES, NVML_FI_DEV_PCIE_COUNT_TX_BYTES = "received", "sent"
    received, status, started = 2**32 - 100, 0, True

    def nvmlInit(self):
        if not self.started:
            raise RuntimeError("Driver Not Loaded")

    def nvmlDeviceGetHandleByIndex(self, index):
        return "card"

    def nvmlSystemGetDriverVersion(self):
        return "580.1"

    def nvmlDeviceGetMemoryInfo(self, card):
        return SimpleNamespace(used=5 * GIB)

    def nvmlDeviceGetFieldValues(self, card, fields):
        counts = {"received": self.received % 2**32, "sent": 0}
        return [
            SimpleNamespace(nvmlReturn=self.status, value=SimpleNamespace(ullVal=counts[name]))
            for name in fields
        ]


@pytest.fixture
def nvml(monkeypatch):
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


@pytest.mark.parametrize(
    ("before", "after", "counted"),
    [(10, 30, 20), (2**32 - 5, 7, 12), (2**32 - 5, 2**32 + 7, 12), (2**40, 2**40 + 1, 1)],
)
def test_a_counter_may_wrap(before, after, counted):
    assert count_since(before, after) == counted


def test_counters_add_up_over_a_wrap(nvml):
    card = DriverCard()
    assert card.moved() == (0, 0)
    for step in (60, 3_000_000_000, 3_000_000_000):
        nvml.received += step
        found = card.moved()
    assert found == (6_000_000_060, 0)
    # 64 GB/s, PCIe 5 with 16 lanes.
    assert memory_record.PCIE_SECONDS * 64e9 < 2**32


def test_the_meter_goes_without_counters(nvml):
    nvml.status = 3
    meter = CardMeter()
    assert meter.used() == 5 * GIB
    assert (meter.about["pcie"], meter.about["pcie_missing"]) == (None, "3")
    found = meter.between(0, 1, 4 * GIB)
    assert found == {"peak_gib": 1.0, "received_gb": None, "sent_gb": None}


def test_a_missing_package_or_driver_is_one_sentence(nvml, monkeypatch):
    nvml.started = False
    with pytest.raises(UnavailableError, match="does not answer: Driver Not Loaded"):
        DriverCard()
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(UnavailableError, match="run `pip install nvidia-ml-py`"):
        DriverCard()


def test_a_series_keeps_changes_and_what_ended_it_and_finds_peaks():
    values = iter([1, 1, 2])
    series = Series(lambda: next(values), 0.001)
    series.join(timeout=60)
    assert series._values == [1, 2]
    assert "StopIteration" in series.failure
    series._times, series._values = [0.0, 1.0, 2.0, 3.0], [5, 9, 2, 4]
    assert series.within(1.5, 2.5) == [9, 2]
    assert series.within(2.1, 2.2) == [2]
    assert series.within(-1, 0.5) == [5]
    assert [series.at(moment) for moment in (-1, 1.0, 9)] == [5, 9, 4]


# --- the ballast


def test_the_ballast_leaves_what_it_should_and_gives_back_what_it_took_last(monkeypatch):
    free = [20 * GIB]

    class Chunk:
        def __init__(self, size, dtype, device):
            self.size = size
            free[0] -= size

        def __del__(self):
            free[0] += self.size

    monkeypatch.setattr(torch, "empty", Chunk)
    for name, function in {
        "init": lambda: None,
        "empty_cache": lambda: None,
        "mem_get_info": lambda: (free[0], 139 * GIB),
    }.items():
        monkeypatch.setattr(torch.cuda, name, function)
    ballast = Ballast()
    for leave in (int(14.4 * GIB), 4 * GIB):
        ballast.hold(leave)
        assert leave <= ballast.free < leave + CUDA_STEP
    ballast.release()
    assert 14.4 * GIB <= ballast.free + 1 < 14.4 * GIB + CUDA_STEP + 1
    with pytest.raises(RuntimeError, match=r"44\.4 GiB are to stay free .* 14\.4 GiB free"):
        ballast.hold(int(44.4 * GIB))
    monkeypatch.undo()


# --- the graphs


def test_every_link_of_every_graph_leads_somewhere():
    for name, case in CASES.items():
        images = images_of(case, [1328, 1024], 512)
        expected = {"images": [1328] * 3 + [1024] * 3, "alone": [1024] * 2, "pressure": [512] * 2}
        assert [image.size for image in images] == expected[case.kind]
        for image in images:
            graph = graph_of(case, GraphSettings(steps=20), image)
            inputs = [value for node in graph.values() for value in node["inputs"].values()]
            assert {value[0] for value in inputs if isinstance(value, list)} <= set(graph), name
            kinds = {node["class_type"] for node in graph.values()}
            assert ("CLIPTextEncode" in kinds) == (case.kind != "alone")
            assert any(kind.startswith("QwenL40S") for kind in kinds) == (case.loader == "ours")
            assert graph["sample"]["inputs"]["steps"] == (4 if case.kind == "pressure" else 20)


def test_the_three_images_differ_in_seed_and_then_in_prompt():
    images = images_of(CASES["stock"], [1024], 512)
    seeds_and_texts = [(1, PROMPTS[0]), (2, PROMPTS[0]), (2, PROMPTS[1])]
    assert [(image.seed, image.text) for image in images] == seeds_and_texts


def test_required_inputs_that_a_graph_leaves_out_get_their_defaults():
    known = {
        "A": {"input": {"required": {"kind": [["a", "b"], {}], "size": ["INT", {"default": 3}]}}},
        "B": {"input": {"required": {"kind": ["COMBO", {"options": ["a"]}]}, "optional": {}}},
    }
    graph = {
        "a": {"class_type": "A", "inputs": {"size": 1}},
        "b": {"class_type": "B", "inputs": {}},
    }
    filled = fill(graph, known)
    assert [node["inputs"] for node in filled.values()] == [{"size": 1, "kind": "a"}, {"kind": "a"}]


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
    results = MemoryResults(path)
    record = {"mode": "legacy", "case": "stock", "size": 1024, "image": "first"}
    models = [
        {"model": "WanVAE", "gib": 0.2, "loaded_gib": 0.2},
        {"model": "QwenImage", "gib": 38.0, "loaded_gib": 20.0},
    ]
    numbers = {"status": "success", "seconds": 1.23456, "peak_gib": 40.5, "models": models}
    results.add(record | numbers)
    results.add({**record, "status": "failed"})
    found = json.loads(path.read_text())["records"]
    assert [one["status"] for one in found] == ["success", "failed"]
    assert found[0]["seconds"] == 1.2346
    head, first, second = results.table().splitlines()
    assert first.split()[:7] == ["legacy", "stock", "1024", "first", "success", "1.2", "40.50"]
    assert "20.0/38.0" in first
    assert "failed" in second and head.startswith("mode")


def test_the_command_line_refuses_unknown_cases(capsys):
    with pytest.raises(SystemExit) as stopped:
        parse(["--cases", "ours-bf17"])
    assert stopped.value.code == 2
    told = capsys.readouterr().err
    assert "ours-bf17" in told and "alone-stock" in told
