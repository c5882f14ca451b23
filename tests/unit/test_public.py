"""What others measured, the classes of cards that come from it, and stock ComfyUI."""

import itertools
import json
import re
from dataclasses import replace

import pytest

from qwen_l40s.bench import public as bench
from qwen_l40s.charts.text import estimate_json, estimate_text
from qwen_l40s.machine.store import known_cards
from qwen_l40s.planning.cards import card_by_driver
from qwen_l40s.planning.estimate import estimate
from qwen_l40s.planning.rates import class_of, public, rates_of
from qwen_l40s.planning.request import Loras, RunRequest
from qwen_l40s.planning.times import STOCK_FORMATS
from qwen_l40s.spec.formats import BYTES_PER_WEIGHT, GIB, CardFacts

CARDS = known_cards()
OF_21 = RunRequest(family="qwen-image-2.1", width=1024, height=1024, cfg="off", precision="int8")
MOST_WIDE = 1.6
PARAMETERS = {"qwen-image": 20.4e9, "qwen-image-edit-2511": 20.4e9, "qwen-image-2.1": 7.1e9}


def test_each_figure_has_a_source_a_date_and_a_number():
    found = public()
    assert {figure["source"] for figure in found["figures"]} | {"meshive", "kaggle"} == {
        *found["sources"]
    }
    for source in found["sources"].values():
        assert all(source[name] for name in ("short", "where", "date", "conditions"))
    for figure in found["figures"]:
        assert figure["ms"] > 0 and figure["n"] >= 1, figure
        assert figure["use"] != "test" or figure["card"] in CARDS
    for row in found["classes"]:
        assert row["from"] and (row["source"] in found["sources"] or not row["source"])


def test_a_class_with_a_figure_is_narrow_and_contains_it():
    """Of a step and of the VAE; the last class takes all cards, and keeps the width it had."""
    for figure in public()["figures"]:
        if figure["use"] != "test" or figure["source"].startswith("here"):
            continue
        card = CARDS[figure["card"]]
        row = bench.Row(figure, bench.predicted(figure, card))
        assert row.inside and abs(row.off) < 0.2, row
    for card, precision in itertools.product(CARDS.values(), ("bf16", "int8")):
        if class_of(card).source and card.facts().multiplies(precision):
            low, high = estimate(replace(OF_21, precision=precision), card).step_seconds
            resident = estimate(replace(OF_21, precision=precision), card).option.resident
            assert high / low <= MOST_WIDE or not resident, card.name
    assert public()["classes"][-1]["gemm"]["bf16"] == [0.45, 0.75]


def test_an_h100_is_predicted_from_an_h200():
    rows = [row for row in bench.rows() if row.figure["source"] == "here-h100"]
    ours = [row for row in rows if row.figure["engine"] == bench.OURS]
    assert len(ours) == 9
    for row in ours:
        assert row.inside and abs(row.off) < 0.08, row
        assert row.seconds.high / row.seconds.low < 1.2
    assert all(abs(row.off) < 0.1 for row in rows)


def test_stock_comfyui_on_the_measured_card_is_what_was_measured():
    rows = [figure for figure in public()["figures"] if figure["source"] == "here-h200"]
    assert len(rows) == 13
    for figure in rows:
        row = bench.Row(figure, bench.predicted(figure, CARDS["H200"]))
        assert abs(row.off) < 0.11, row


def test_an_estimate_says_how_much_faster_it_is_than_stock():
    found = estimate(OF_21, CARDS["RTX 4090"])
    assert tuple(found.stock) == tuple(STOCK_FORMATS)
    # Little is left to win over stock int8 there.
    assert 1 < found.faster["int8 ConvRot"].low < found.faster["int8 ConvRot"].high < 1.2
    text = estimate_text(found)
    assert re.search(r"bf16 .* 2\.\d\d to 2\.\d\d times as fast\n", text)
    assert re.search(r"ck-attention .* takes 1\.\d\d to 1\.\d\d times as long\n", text)
    answer = json.loads(json.dumps(estimate_json(found)))["stock"]["bf16"]
    assert answer["times_as_fast"][0] > 2 and 380 < answer["step_ms"][0] < answer["step_ms"][1]


@pytest.mark.parametrize(
    ("changed", "name", "rows"),
    [
        ({"loras": Loras(1, 32, "merge")}, "L40S", 0),
        ({"controlnet_bytes": 10**9}, "L40S", 0),
        ({"family": "qwen-image"}, "RTX 4090", 5),  # 41 GB in bf16
        ({}, "A100 80GB SXM", 4),  # no products in fp8
        ({"references": 1}, "RTX 4060", 5),
    ],
)
def test_stock_is_predicted_where_it_runs_as_it_was_measured(changed, name, rows):
    found = estimate(replace(OF_21, **changed), CARDS[name])
    assert len(found.stock) == rows
    assert ("stock ComfyUI" in estimate_text(found)) == bool(rows)


@pytest.mark.parametrize("name", CARDS)
@pytest.mark.parametrize("family", ["qwen-image", "qwen-image-edit-2511", "qwen-image-2.1"])
def test_stock_is_predicted_where_its_weights_cross_the_link(family, name):
    references = int("edit" in family)
    request = replace(OF_21, family=family, precision="auto", references=references)
    found = estimate(request, CARDS[name])
    formats = (
        how for how in STOCK_FORMATS.values() if CARDS[name].facts().multiplies(how.products)
    )
    assert len(found.stock) == len([*formats])
    roomy = estimate(request, replace(CARDS[name], memory_bytes=200 * GIB)).stock
    for what, (low, high) in found.stock.items():
        lacking = BYTES_PER_WEIGHT[STOCK_FORMATS[what].weights] * PARAMETERS[family]
        lacking -= CARDS[name].memory_bytes
        assert low >= lacking / CARDS[name].pcie_bytes_per_second
        assert low >= roomy[what].low and high >= roomy[what].high
        if lacking > 0:
            assert high > roomy[what].high


def test_a_card_of_no_class_is_told_so():
    odd = replace(CARDS["L40S"], name="Odd 1", also=())
    assert class_of(odd) == class_of(CARDS["L40S"]) and not class_of(odd).source
    assert "all other GPUs: no public figure" in rates_of(odd)[2].text
    laptop = CARDS["RTX 4090 Laptop"]
    assert not class_of(laptop).source
    assert not class_of(CARDS["RTX 5090"]).source


@pytest.mark.parametrize("name", ["RTX 4090", "H200", "L40S"])
def test_a_lower_power_limit_is_said_and_counted(name):
    card = CARDS[name]
    own = CardFacts(card.name, 24 * GIB, card.capability, card.tdp_watts)
    whole = rates_of(card_by_driver(own, CARDS))
    assert "power limit" not in whole[2].text and whole == rates_of(card)
    half = replace(own, limit_watts=card.tdp_watts // 2)
    slow, fast, basis = rates_of(card_by_driver(half, CARDS))
    assert f"power limit is set to {half.limit_watts} of {card.tdp_watts} W" in basis.text
    assert "counted as 50% to 79% of its clock" in basis.text and basis.kind == "predicted"
    factor = class_of(card).within or 1
    assert slow.gemm["int8"] == pytest.approx(whole[0].gemm["int8"] / 2 / factor, rel=1e-6)
    assert fast.attention == pytest.approx(whole[1].attention * 0.5 ** (1 / 3) * factor)
    assert slow.bandwidth == whole[0].bandwidth
