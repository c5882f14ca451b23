"""What a card is expected to do in a second: measured, calibrated or a range."""

import json
from dataclasses import replace

import pytest

from qwen_l40s import UnavailableError
from qwen_l40s.planning import constants as module
from qwen_l40s.planning import rates as rates_module
from qwen_l40s.planning.cards import find_card, known_cards
from qwen_l40s.planning.constants import NAMES, Constants, constants, measured
from qwen_l40s.planning.rates import Rates, is_named, plain_name, rates_of

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
        path.write_text(contents if isinstance(contents, str) else json.dumps(contents))
        monkeypatch.setattr(module, "MEASURED", path)
        measured.cache_clear()
        constants.cache_clear()

    yield put
    monkeypatch.undo()
    measured.cache_clear()
    constants.cache_clear()


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
        assert basis.kind == "predicted"
        assert card.name in basis.text
        assert "45% to 75%" in basis.text
        assert slow.gemm.keys() == card.dense_flops.keys() & {"bf16", "fp8", "int8"}
        for precision, rate in slow.gemm.items():
            peak = card.dense_flops[precision]
            assert rate == pytest.approx(0.45 * peak)
            assert fast.gemm[precision] == pytest.approx(0.75 * peak)
        for name in ("attention", "bandwidth", "convolution", "encoder", "pcie"):
            assert 0 < getattr(slow, name) < getattr(fast, name)
        assert fast.bandwidth <= card.bandwidth and fast.pcie <= card.pcie_bytes_per_second


def test_a_card_without_fp8_has_no_rate_for_it(fitted, cards):
    slow, _, _ = rates_of(find_card("A100 80GB SXM", cards))
    assert set(slow.gemm) == {"bf16", "int8"}


def test_a_calibration_stands_above_all(fitted, cards):
    mine = Rates({"bf16": 1e12}, 1e12, 1e9, 1e11, 1e12, 1e9)
    for name in ("L40S", "H200"):
        slow, fast, basis = rates_of(cards[name], mine)
        assert slow is mine and fast is mine
        assert basis.kind == "measured"
        assert f"this {name}" in basis.text


def test_cards_are_known_by_the_drivers_name_and_not_by_a_part_of_it(cards):
    h200 = cards["H200"]
    assert is_named(h200, "NVIDIA H200") and is_named(h200, "h200")
    assert not is_named(replace(h200, name="H200 NVL", also=()), "NVIDIA H200")
    assert plain_name("NVIDIA RTX 6000 Ada") == plain_name("rtx6000 ada")


def test_constants_are_read_from_the_file(fitted):
    assert constants() == Constants(**VALUES)
    assert constants().gemm("int8") == 0.42
    assert len(NAMES) == 8


@pytest.mark.parametrize(
    ("contents", "words"),
    [
        ("{", "cannot be read"),
        ("[1]", "cannot be read"),
        ({"conditions": CONDITIONS}, "no constant gemm_bf16"),
        ({"constants": {**VALUES, "context": "much"}}, "no constant context"),
        ({"constants": {**VALUES, "context": True}}, "no constant context"),
        ({"constants": {**VALUES, "attention": -1}}, "no constant attention"),
    ],
)
def test_a_damaged_file_is_an_error_with_the_remedy(file, contents, words):
    file(contents)
    with pytest.raises(UnavailableError, match=f"{words}.*install the package again"):
        constants()


def test_nothing_is_read_when_the_module_is_imported():
    assert rates_module.constants is constants
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MEASURED", module.MEASURED.with_name("nowhere.json"))
        measured.cache_clear()
        constants.cache_clear()
        with pytest.raises(UnavailableError, match=r"nowhere\.json"):
            constants()
    measured.cache_clear()
    constants.cache_clear()
