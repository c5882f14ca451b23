"""The fit of the constants: on runs that are made up, and on those that are bundled."""

import json
from pathlib import Path

import pytest

pytest.importorskip("scipy")

from qwen_l40s.bench import fit
from qwen_l40s.machine.store import known_cards
from qwen_l40s.planning.cards import find_card
from qwen_l40s.planning.rates import MEASURED, Constants, rates_by
from qwen_l40s.spec.formats import GIB

RESULTS = Path(__file__).resolve().parents[2] / "bench" / "results"


@pytest.fixture(scope="module")
def card():
    return find_card("H200", known_cards())


# --- the bundled file


@pytest.fixture(scope="module")
def bundled():
    return json.loads(MEASURED.read_text())


def test_the_bundled_constants_are_those_of_the_bundled_runs(bundled):
    card = find_card(bundled["conditions"]["card"], known_cards())
    assert fit.fit(bundled, card) == pytest.approx(bundled["constants"], rel=1e-3)
    errors = fit.errors_of(bundled, bundled["constants"], card)
    for half, expected in bundled["fit"].items():
        assert errors[half] == pytest.approx(expected, rel=1e-3, abs=1e-5)


def within_the_promised_errors(run, constants, card):
    """Whether a sampling run's step, weights and memory beside them are as predicted."""
    rates = rates_by(Constants(**constants), card)
    assert fit.seconds_of(run, rates) == pytest.approx(fit.measured_seconds(run), rel=0.1), run[
        "id"
    ]
    assert fit.counted_weights(run) == pytest.approx(run["weights_bytes"], rel=0.01), run["id"]
    held = run["allocated_bytes"] - run["weights_bytes"]
    beside = fit.counted_bytes(run) + constants["workspace"]
    assert abs(beside - held) <= max(0.1 * held, 0.15 * GIB), run["id"]


def test_runs_that_were_not_fitted_are_within_the_promised_errors(bundled):
    card = find_card(bundled["conditions"]["card"], known_cards())
    tested = [run for run in bundled["runs"] if run["half"] == "test" and run["kind"] == "sampling"]
    assert tested
    for run in tested:
        within_the_promised_errors(run, bundled["constants"], card)


def test_the_constants_carry_over_to_a_card_that_was_not_fitted(bundled):
    """An H100 has the H200's arithmetic and 70 % of its bandwidth."""
    other = json.loads((RESULTS / "matrix-h100.json").read_text())
    card = find_card(other["conditions"]["card"], known_cards())
    tested = [run for run in other["runs"] if run["kind"] == "sampling"]
    assert len(tested) == 30
    for run in tested:
        within_the_promised_errors(run, bundled["constants"], card)


def test_prompts_and_images_are_near_what_was_measured(bundled):
    """Beside steps nothing is promised."""
    card = find_card(bundled["conditions"]["card"], known_cards())
    rates = rates_by(Constants(**bundled["constants"]), card)
    for kind, limit in (("text", 0.15), ("decode", 0.1), ("encode", 0.1)):
        for run in (run for run in bundled["runs"] if run["kind"] == kind):
            expected = fit.measured_seconds(run)
            assert fit.seconds_of(run, rates) == pytest.approx(expected, rel=limit), run["id"]
