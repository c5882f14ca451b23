"""`qwen-l40s bench --calibrate`: what it measures, prints and keeps, and how that is read again."""

import json
import logging
import os
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen_l40s import UnavailableError
from qwen_l40s.cli import main
from qwen_l40s.machine import store
from qwen_l40s.machine.store import (
    CALIBRATION,
    Calibration,
    known_cards,
    load_calibration,
    parse,
    with_calibration,
)
from qwen_l40s.planning.cards import card_by_driver
from qwen_l40s.planning.rates import LAUNCHES, Rates
from qwen_l40s.spec.formats import GIB, MULTIPLIED, CardFacts
from qwen_l40s.verdict import Verdict

RATES = Rates(
    gemm={"bf16": 2.2e14, "fp8": 4.1e14},
    attention=1.6e14,
    bandwidth=7e11,
    convolution=6.1e13,
    encoder=5.5e13,
    pcie=2.4e10,
)
MINE = Calibration("NVIDIA L40S", "580.159.04", "2.11.0+cu130", "2026-11-21T10:00:00+00:00", RATES)
CARDS = known_cards()
L40S = CARDS["L40S"]
rates = st.floats(1, 1e18)


@pytest.fixture(autouse=True)
def told_nothing(monkeypatch):
    monkeypatch.setattr(store, "_logged", set())


@pytest.fixture
def folder(set_settings, tmp_path):
    set_settings(cache=str(tmp_path / "cache"))
    return tmp_path / "cache"


def keep(folder, *entries):
    folder.mkdir(exist_ok=True)
    for entry in entries:
        (folder / CALIBRATION).write_text(with_calibration(folder, entry))


# --- the file


@given(
    gemm=st.dictionaries(st.sampled_from(["fp8", "int8"]), rates),
    figures=st.lists(rates, min_size=6, max_size=6),
    block=st.dictionaries(st.sampled_from(MULTIPLIED), st.floats(1e-6, 1)),
    graph=st.sampled_from([LAUNCHES.graph, 0.0123456]),
)
def test_what_is_written_is_read_again(gemm, figures, block, graph):
    launches = replace(LAUNCHES, block={**LAUNCHES.block, **block}, graph=graph)
    measured = Rates({"bf16": figures[0], **gemm}, *figures[1:], launches=launches)
    found = Calibration("card", "1", "2", "3", measured)
    again = parse(json.loads(json.dumps(found.as_dict())))
    assert again.rates.launches.block == pytest.approx(launches.block, rel=1e-3)
    assert again.rates.launches.graph == pytest.approx(graph, rel=1e-3)
    assert replace(again, rates=RATES) == replace(found, rates=RATES)
    assert again.rates.gemm == pytest.approx(dict(found.rates.gemm), rel=1e-3)
    assert again.rates.attention == pytest.approx(found.rates.attention, rel=1e-3)


def test_the_newest_measurement_of_a_card_counts(folder):
    newer = replace(MINE, driver="590", date="2026-12-01", rates=replace(RATES, attention=1e14))
    other = replace(MINE, card="NVIDIA H200", date="2027-01-01")
    keep(folder, newer, MINE, other)
    assert load_calibration(L40S) == newer.rates
    assert load_calibration(CARDS["L40"]) is None


def test_a_card_is_found_by_all_of_its_names_and_one_that_is_not_listed_by_its_own(folder):
    keep(folder, replace(MINE, card="NVIDIA RTX 6000 Ada Generation"))
    assert load_calibration(CARDS["RTX 6000 Ada"]) == RATES
    assert load_calibration(CARDS["RTX A6000"]) is None
    unheard = card_by_driver(CardFacts("NVIDIA Unheard Of 9999", GIB, (9, 9)), CARDS)
    keep(folder, replace(MINE, card=unheard.name))
    assert load_calibration(unheard) == RATES


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"version": 2, "measured": []}',
        '{"version": 1, "measured": {}}',
        '{"version": 1, "measured": [3]}',
        "[" * 100_000,
        b"\xff\xfe",
    ],
)
def test_a_damaged_file_counts_as_empty_and_is_told_once(folder, caplog, text):
    folder.mkdir()
    (folder / CALIBRATION).write_bytes(text if isinstance(text, bytes) else text.encode())
    with caplog.at_level(logging.WARNING):
        assert load_calibration(L40S) is None
        assert load_calibration(L40S) is None
    assert len(caplog.records) == 1
    assert "bench --calibrate" in caplog.text
    keep(folder, MINE)
    assert load_calibration(L40S) == RATES


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("rates", "attention"), 0),
        (("rates", "attention"), "fast"),
        (("rates", "bandwidth"), True),
        (("rates", "pcie"), float("inf")),
        (("rates", "encoder"), None),
        (("rates", "gemm"), {"fp8": 1e14}),
        (("rates", "gemm"), {"bf16": 1e14, "fp4": 1e14}),
        (("rates", "gemm"), {"bf16": -1}),
        (("rates", "gemm"), []),
        (("rates", "launch_seconds"), None),
        (("rates", "launch_seconds"), {"bf16": 0}),
        (("rates", "launch_seconds"), {"fp4": 1e-4}),
        (("rates", "launch_seconds"), {"graph": "fast"}),
        (("rates",), None),
        (("card",), 3),
        (("date",), None),
    ],
)
def test_a_damaged_entry_is_left_out_and_others_count(folder, path, value):
    entry = replace(MINE, date="2030").as_dict()
    where = entry
    for name in path[:-1]:
        where = where[name]
    where[path[-1]] = value
    assert parse(entry) is None
    folder.mkdir()
    file = {"version": 1, "measured": [entry, MINE.as_dict()]}
    (folder / CALIBRATION).write_text(json.dumps(file))
    assert load_calibration(L40S) == RATES


# --- what is printed


# --- the command


def calibrate(*arguments):
    return main(["bench", "--calibrate", *map(str, arguments)])


@pytest.mark.parametrize(
    ("named", "arguments"),
    [
        ("forward", ["forward"]),
        ("--size", ["--size", "512x512"]),
        ("--repeats", ["--repeats", "3"]),
        ("--only", ["--only", "ours *"]),
        ("--models", ["--models", "models"]),
        ("tpu", ["--device", "tpu"]),
        ("--width small", ["--device", "cpu"]),
        ("file", ["--json", "."]),
    ],
)
def test_a_contradiction_is_refused_before_anything_runs(capsys, named, arguments):
    pytest.importorskip("torch")
    assert calibrate(*arguments) == 2
    assert named in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_on_a_cpu_it_runs_and_keeps_nothing(folder, tmp_path, capsys):
    pytest.importorskip("torch")
    file = tmp_path / "out.json"
    assert calibrate("--device", "cpu", "--width", "small", "--json", file) == 0
    out = capsys.readouterr().out
    assert "nothing is saved" in out
    assert not folder.exists()
    found = json.loads(file.read_text())
    assert json.loads(out.splitlines()[-1]) == found
    assert found["card"] == "CPU"
    assert set(found["rates"]["gemm"]) == {"bf16", "fp8", "int8"}
    assert set(found["rates"]["launch_seconds"]) == {"bf16", "fp8", "int8"}
    assert "CUDA graph left out: cpu has no CUDA graphs" in out
    assert parse(found) is not None


# --- on a card, as the command sees one


class Device:
    type = "cuda"


@pytest.fixture
def on_card(monkeypatch):
    """A card that is not there, and what is measured of it."""
    module = pytest.importorskip("qwen_l40s.measure.calibrate")
    monkeypatch.setattr("qwen_l40s.machine.device.card_to_measure", lambda *_: Device)
    result = [(MINE, {"int8": Verdict("sm_89 fails a trial")})]
    monkeypatch.setattr(module, "calibrate", lambda *_: result[0])


def test_what_was_measured_is_kept_for_estimates(on_card, folder, capsys):
    assert calibrate() == 0
    out = capsys.readouterr().out
    assert f"saved in {folder / CALIBRATION}" in out
    assert "int8 left out: sm_89 fails a trial" in out
    rows = {line.split(" | ")[0]: line for line in out.splitlines() if line.startswith("| ")}
    assert f"| {MINE.card}, driver {MINE.driver}, torch {MINE.torch}, " in out
    bf16, peak = RATES.gemm["bf16"], L40S.dense_flops["bf16"]
    assert rows["| bf16 products, TFLOP/s"].split(" | ")[1:] == [
        *(f"{bf16 / 1e12:.4g}", f"{0.45 * peak / 1e12:.4g} to {0.75 * peak / 1e12:.4g}"),
        f"{bf16 / (0.6 * peak) - 1:+.0%} |",
    ]
    assert "| int8 products, TFLOP/s" not in rows and "| memory, GB/s" in rows
    assert load_calibration(L40S) == RATES
    assert os.listdir(folder) == [CALIBRATION]


def test_a_folder_that_keeps_nothing_is_told_before_anything_is_measured(
    on_card, set_settings, tmp_path, capsys
):
    (tmp_path / "file").touch()
    set_settings(cache=str(tmp_path / "file" / "cache"))
    assert calibrate() == 2
    out, err = capsys.readouterr()
    assert "cannot write" in err and not out


def test_a_small_run_on_a_card_is_not_kept(on_card, folder):
    assert calibrate("--width", "small") == 0
    assert not folder.exists()


# --- the measurement


@pytest.fixture
def module():
    pytest.importorskip("torch")
    from qwen_l40s.measure import calibrate

    return calibrate


def test_a_card_is_timed_by_its_events_and_never_far_behind(module, monkeypatch):
    """A card that runs what is launched one after another; launching takes no time."""
    import torch

    from qwen_l40s.measure import timing

    card, processor, ahead = [0.0], [0.0], []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = card[0]

        def elapsed_time(self, end):
            return 1e3 * (end.at - self.at)

        def synchronize(self):
            ahead.append(card[0] - processor[0])
            processor[0] = max(processor[0], self.at)

    def call(seconds):
        card[0] = max(card[0], processor[0]) + seconds

    monkeypatch.setattr(timing.time, "perf_counter", lambda: processor[0])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    parts = [
        timing.MixPart("a", lambda: call(0.001), 5),
        timing.MixPart("b", lambda: call(0.003), 6),
    ]
    sums = timing.run_mix(parts, torch.device("cuda", 0), 2)
    assert sums["a"].rate == pytest.approx(5000, rel=0.01)
    assert sums["b"].rate == pytest.approx(2000, rel=0.01)
    # What came before the settling, 0.3 of the time, is not among it.
    assert sums["a"].seconds + sums["b"].seconds == pytest.approx(1.4, abs=0.3)
    assert max(ahead) < 5 * 0.004


def test_a_card_that_is_full_is_told(module, monkeypatch):
    import torch

    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(module, "_calibrate", full)
    with pytest.raises(UnavailableError, match="end other programs"):
        module.calibrate(torch.device("cpu"), None, print)


def test_a_precision_that_the_card_does_not_multiply_is_left_out(module, monkeypatch):
    import torch

    from qwen_l40s.families.qwen_image import SMALL
    from qwen_l40s.optimizations.linear import Gemm

    gemm = Gemm("fp8", "dequantize", "sm_80, needs sm_89")
    monkeypatch.setattr(module, "choose_gemm", lambda *_: gemm)
    work = module.small_sizes(SMALL).work
    assert module._products(work, "fp8", torch.device("meta")) == Verdict("sm_80, needs sm_89")
    assert len(module._products(work, "bf16", torch.device("cpu"))) == 12


def test_a_graph_counts_as_its_slowest_and_what_was_not_timed_as_elsewhere(module):
    from qwen_l40s.measure.timing import Launched, launches_of

    found = launches_of({"bf16": Launched(1e-4, 5e-4), "int8": Launched(2e-4, Verdict("no graph"))})
    block = {"bf16": 1e-4, "int8": 2e-4, "fp8": LAUNCHES.block["fp8"]}
    assert found == replace(LAUNCHES, block=block, graph=5e-4)
    assert launches_of({}) == LAUNCHES
