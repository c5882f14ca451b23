"""What a card is expected to do in a second: measured, calibrated or a range."""

import itertools
import json
from dataclasses import replace

import pytest

from qwen_l40s import SettingError, UnavailableError
from qwen_l40s.caches import forget
from qwen_l40s.charts.text import notes_of
from qwen_l40s.machine.store import known_cards
from qwen_l40s.planning import rates as module
from qwen_l40s.planning.cards import find_card, is_named
from qwen_l40s.planning.estimate import basis_within, estimate
from qwen_l40s.planning.rates import (
    Basis,
    Rates,
    attention_share,
    class_of,
    measured,
    rates_of,
)
from qwen_l40s.planning.request import ATTENTIONS, Loras, RunRequest, Setting
from qwen_l40s.spec.formats import MULTIPLIED

VALUES = {"gemm_bf16": 0.6, "gemm_fp8": 0.45, "gemm_int8": 0.42, "attention": 0.65}
VALUES |= {"bandwidth": 0.7, "convolution": 0.19, "workspace": 5e7, "context": 6e8}
CONDITIONS = {"card": "NVIDIA H200", "date": "2026-11-21"}
FIT = {"test": {"step_worst": 0.061}}


@pytest.fixture
def cards():
    return known_cards()


@pytest.fixture
def file(monkeypatch, tmp_path):
    """Puts a file in the place of `measured.json`."""

    def put(contents):
        path = tmp_path / "measured.json"
        path.write_text(json.dumps(contents))
        monkeypatch.setattr(module, "MEASURED", path)
        forget()

    yield put
    monkeypatch.undo()
    forget()


@pytest.fixture
def fitted(file):
    file({"conditions": CONDITIONS, "constants": VALUES, "fit": FIT})


def test_the_card_that_was_measured_has_one_set_of_rates(fitted, cards):
    card = find_card("h200", cards)
    slow, fast, basis = rates_of(card)
    assert slow == fast
    assert slow.gemm["fp8"] == pytest.approx(0.45 * card.dense_flops["fp8"])
    assert slow.bandwidth == pytest.approx(0.7 * card.bandwidth)
    assert slow.encoder == pytest.approx(0.5 * card.dense_flops["fp32"])
    assert slow.pcie == pytest.approx(55.3e9, rel=0.01)
    assert basis.kind == "measured"
    assert "NVIDIA H200 on 2026-11-21" in basis.text
    assert "within 6.1%" in basis.text


def test_every_other_card_gets_a_range_that_is_labelled_predicted(fitted, cards):
    for card in cards.values():
        if card.name == "H200":
            continue
        slow, fast, basis = rates_of(card)
        kind = class_of(card)
        assert basis.kind == "predicted"
        assert card.name in basis.text
        assert slow.gemm.keys() == card.dense_flops.keys() & {"bf16", "fp8", "int8"}
        for name in ("attention", "convolution", "encoder"):
            assert 0 < getattr(slow, name) < getattr(fast, name)
        if kind.within:
            assert "taken as an NVIDIA H200's rates, within 7%" in basis.text
            continue
        assert ("no public figure" in basis.text) == (not kind.source)
        for precision, rate in slow.gemm.items():
            peak, (low, high) = card.dense_flops[precision], kind.gemm[precision]
            assert rate == pytest.approx(low * peak)
            assert fast.gemm[precision] == pytest.approx(high * peak)
        for name in ("bandwidth", "pcie"):
            assert 0 < getattr(slow, name) < getattr(fast, name)
        assert fast.pcie <= card.pcie_bytes_per_second


def test_what_a_calibration_left_out_is_predicted_and_said(fitted, cards):
    mine = Rates({"bf16": 1e12, "fp8": 3e12}, 1e12, 1e9, 1e11, 1e12, 1e9)
    card = cards["L40S"]
    slow, fast, basis = rates_of(card, mine)
    for rates, share in ((slow, 0.45), (fast, 0.75)):
        assert rates.gemm["int8"] == pytest.approx(share * card.dense_flops["int8"])
        assert replace(rates, gemm=mine.gemm) == mine
        assert {name: rates.gemm[name] for name in mine.gemm} == mine.gemm
    assert basis.left_out == ("int8",)
    ampere = cards["A100 80GB SXM"]  # multiplies no fp8
    assert rates_of(ampere, replace(mine, gemm={"bf16": 1e12, "int8": 1e12}))[2].left_out == ()
    nobodys = replace(card, dense_flops={})
    slow, fast, basis = rates_of(nobodys, mine)
    assert slow == fast and slow.gemm["int8"] == 1e12


def test_a_list_below_what_was_measured_on_the_card_is_refused(fitted, cards):
    card = cards["L40S"]
    mine = Rates({"bf16": card.dense_flops["bf16"]}, 1e12, 1e9, 1e11, 1e12, 1e9)
    rates_of(card, mine)
    half = {name: peak / 2 for name, peak in card.dense_flops.items()}
    with pytest.raises(SettingError, match=r"your list gives the L40S .* in bf16, but .* correct"):
        rates_of(replace(card, dense_flops=half, changed=True), mine)


@pytest.mark.parametrize("precision", MULTIPLIED)
def test_plan_and_rates_agree_on_what_a_card_multiplies(fitted, cards, precision):
    """Whether its list gives a peak or not."""
    for card in cards.values():
        for known in (
            card,
            replace(card, dense_flops={"bf16": 1e14, "fp32": 1e13}, changed=True),
            replace(card, capability=(7, 5), changed=True),
        ):
            slow, fast, _ = rates_of(known)
            multiplies = known.facts().multiplies(precision)
            assert (precision in slow.gemm) == (precision in fast.gemm) == multiplies


@pytest.mark.parametrize(
    "changed",
    [
        {"bandwidth_gb_per_second": 1000},
        {"pcie_lanes": 1},
        {"dense_tflops": {"bf16": 100, "fp8": 200, "int8": 200, "fp32": 10}},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_a_measured_card_with_other_figures_is_predicted(fitted, cards, changed, tmp_path):
    own = tmp_path / "cards.json"
    own.write_text(json.dumps({"cards": {"H200": changed}}))
    slow, fast, basis = rates_of(known_cards(own)["H200"])
    assert slow.attention < fast.attention
    assert (basis.kind, basis.origin) == ("predicted", "")
    assert "no H200 with the figures of your list was measured" in basis.text
    part = replace(cards["H200"], memory_bytes=30 * 2**30)
    assert rates_of(part)[2].kind == "measured"


# --- what the measured runs cover

MEASURED = Basis("measured", "measured here; within 5%", "measured here")


@pytest.mark.parametrize(
    ("asked", "setting", "measured"),
    [
        (RunRequest(), Setting(), True),
        (RunRequest(width=2048, height=2048, batch=2), Setting("int8"), True),
        (RunRequest(loras=Loras(3, 32, "merge")), Setting("fp8", "off card"), True),
        (RunRequest(batch=1, cfg="one pass"), Setting(), True),
        (RunRequest(), Setting(resident=False), False),
        (RunRequest(), Setting("fp8", weight_only=True), False),
        (RunRequest(), Setting(text_encoder_place="cpu"), False),
        (RunRequest(), Setting(text_encoder_place="drop after encoding"), False),
        (RunRequest(loras=Loras(1, 32, "bypass")), Setting(), False),
        (RunRequest(), Setting(attention="int8"), False),
        (RunRequest(controlnet_bytes=10**9), Setting(), False),
        (RunRequest(family="qwen-image-layered", layers=2), Setting(), False),
        (RunRequest(family="qwen-image-2.1", width=1024, height=1024), Setting(), False),
        (RunRequest(width=2064), Setting(), False),
        (RunRequest(batch=3), Setting(), False),
        (RunRequest(batch=2, cfg="one pass"), Setting(), False),
    ],
)
def test_measured_is_said_of_what_was_measured_alone(asked, setting, measured):
    basis = basis_within(MEASURED, asked, setting)
    assert (basis.kind == "measured") == measured
    assert measured == (basis == MEASURED) and basis.origin == MEASURED.origin


def test_attention_in_8_bits_takes_a_share_of_exact_attentions_time(cards):
    """On Ada both products in int8 take half of their time; on GeForce a quarter."""
    for name, share in {"L40S": (0.5, 0.58), "RTX 4090": (0.25, 0.36)}.items():
        assert attention_share(cards[name], "kitchen_int8") == pytest.approx(share, abs=0.01)
    for card in cards.values():
        if card.facts().multiplies("int8"):
            best, worst = attention_share(card, "kitchen_int8")
            # cuDNN's exact attention is faster on Hopper and the B200.
            assert 0.2 < best <= worst < 1.5
            assert (worst > 1) == (card.capability[0] in (9, 10)), card.name
    assert attention_share(cards["L40S"], "exact") == (1, 1)


def test_times_follow_the_attention_that_a_request_names(cards):
    step, seen = {}, {}
    names = "L40S", "H200", "A100 80GB SXM", "RTX 4090", "RTX 3090"
    for attention, name in itertools.product(ATTENTIONS, names):
        request = RunRequest(precision="int8", width=2048, height=2048, attention=attention)
        found = estimate(request, cards[name])
        step[attention, name], seen[attention, name] = found.step_seconds, found
        said = [note for note in notes_of(found) if note.startswith("Attention")]
        assert len(said) == (attention != "exact")
        predicted = found.option.setting.attention != "exact" or name != "H200"
        assert found.basis.kind == ("predicted" if predicted else "measured")
    for name in set(names) - {"H200"}:
        assert step["fast", name] == step["kitchen_int8", name]
        for ours, exact in zip(step["fast", name], step["exact", name], strict=True):
            assert ours < 0.8 * exact, name
    assert step["fast", "H200"] == step["exact", "H200"] < step["kitchen_int8", "H200"]
    note = next(note for note in notes_of(seen["fast", "L40S"]) if "Attention" in note)
    assert note.startswith("Attention fast counts as kitchen_int8: predicted at 49% to 57% of the")
    with pytest.raises(UnavailableError, match="kitchen_int8 needs a GPU of sm_80"):
        estimate(RunRequest(attention="kitchen_int8"), cards["T4"])


def test_guided_attention_is_exact(cards):
    """Qwen-Image NAG's, whatever attention is chosen."""
    for attention in ATTENTIONS:
        asked = RunRequest(precision="int8", cfg="off", nag_tokens=60, attention=attention)
        found = estimate(asked, cards["L40S"])
        assert found.option.setting.attention == "exact"
        assert not [note for note in notes_of(found) if note.startswith("Attention")]


def test_a_precision_without_a_measured_rate_is_predicted():
    part = replace(MEASURED, left_out=("int8",))
    assert basis_within(part, RunRequest(), Setting("bf16")).kind == "measured"
    assert basis_within(part, RunRequest(), Setting("int8")) == replace(part, kind="predicted")


def test_the_runs_that_were_measured_are_within():
    for run in measured()["runs"]:
        if run["kind"] == "sampling":
            request = RunRequest(
                family=run["family"],
                width=run["width"],
                height=run["height"],
                batch=run["batch"],
                references=run["references"],
                cfg=run["cfg"],
            )
            setting = Setting(run["precision"], run["modulation"])
            assert basis_within(MEASURED, request, setting) == MEASURED


def test_cards_are_known_by_the_drivers_name_and_not_by_a_part_of_it(cards):
    h200 = cards["H200"]
    assert is_named(h200, "NVIDIA H200") and is_named(h200, "h200")
    assert not is_named(replace(h200, name="H200 NVL", also=()), "NVIDIA H200")
