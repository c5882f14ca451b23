"""The fit of the constants: on runs that are made up, and on those that are bundled."""

import copy
import json
from pathlib import Path

import pytest

pytest.importorskip("scipy")

from qwen_l40s import SettingError
from qwen_l40s.bench import fit
from qwen_l40s.machine.store import known_cards, parse
from qwen_l40s.planning.cards import find_card
from qwen_l40s.planning.rates import CONSTANT_NAMES, MEASURED, Constants, rates_by
from qwen_l40s.spec.formats import GIB

RESULTS = Path(__file__).resolve().parents[2] / "bench" / "results"
TRUE = {"gemm_bf16": 0.62, "gemm_fp8": 0.44, "gemm_int8": 0.41, "attention": 0.58}
TRUE |= {"bandwidth": 0.72, "convolution": 0.2, "workspace": 60e6, "context": 550e6}
SIDES = (1024, 1328, 2048)


@pytest.fixture(scope="module")
def card():
    return find_card("H200", known_cards())


@pytest.fixture(scope="module")
def made_up(card):
    """Runs that are exactly what the arithmetic says with `TRUE`."""
    rates = rates_by(Constants(**TRUE), card)
    runs = []
    for precision in ("bf16", "fp8", "int8"):
        for index, side in enumerate(SIDES):
            run = {"kind": "sampling", "precision": precision, "modulation": "off card"}
            run |= {"family": "qwen-image-edit-2511", "width": side, "height": side, "steps": 5}
            run |= {"batch": 1 + index % 2, "references": index, "text_tokens": 200 + 196 * index}
            run["cfg"] = "two passes" if index == 1 else "off"
            run["weights_bytes"] = fit.counted_weights(run)
            beside = fit.counted_bytes(run) + TRUE["workspace"]
            run["allocated_bytes"] = run["weights_bytes"] + beside
            run["reserved_bytes"] = run["allocated_bytes"] + 10**8
            run["card_bytes"] = run["reserved_bytes"] + TRUE["context"]
            run["step_ms"] = 1e3 * fit.seconds_of(run, rates)
            runs += [{**run, "half": half} for half in ("fit", "test")]
    for kind in ("decode", "encode"):
        for tiles in (1, 4):
            run = {"kind": kind, "width": 1328, "height": 1024, "batch": 1, "tiles": tiles}
            run["ms"] = 1e3 * fit.seconds_of(run, rates)
            runs += [{**run, "half": half} for half in ("fit", "test")]
    run = {"kind": "text", "precision": "fp8", "text_tokens": 200, "references": 0}
    run["half"] = "test"
    runs.append({**run, "ms": 1e3 * fit.seconds_of(run, rates)})
    kernels = [{"task": "norm", "size": "", "gb_s": TRUE["bandwidth"] * card.bandwidth / 1e9}]
    return {"conditions": {"card": "NVIDIA H200"}, "kernels": kernels, "runs": runs}


def test_what_the_runs_were_made_with_is_found_again(card, made_up):
    found = fit.fit(made_up, card)
    assert found == pytest.approx(TRUE, rel=0.01)
    assert tuple(found) == CONSTANT_NAMES
    for half in fit.errors_of(made_up, found, card).values():
        assert half["steps"] == 9
        assert max(value for name, value in half.items() if name != "steps") < 0.01


def test_only_the_fit_half_is_fitted(card, made_up):
    other = copy.deepcopy(made_up)
    for run in other["runs"]:
        if run["half"] == "test" and run["kind"] == "sampling":
            run["step_ms"] *= 1.5
            run["weights_bytes"] *= 1.1
    assert fit.fit(other, card) == fit.fit(made_up, card)
    errors = fit.errors_of(other, fit.fit(other, card), card)
    assert errors["fit"]["step_worst"] < 0.01
    assert errors["test"]["step_worst"] == pytest.approx(1 / 3, abs=0.01)
    assert errors["test"]["weights_worst"] == pytest.approx(1 / 11, abs=0.01)


@pytest.mark.parametrize(
    ("keep", "words"),
    [
        (lambda run: run["kind"] != "sampling", "steps in bf16, fp8, int8"),
        (lambda run: run.get("precision") != "fp8", "steps in fp8"),
        (lambda run: run["kind"] == "sampling", "VAE"),
    ],
)
def test_a_matrix_with_a_hole_is_refused(card, made_up, keep, words):
    holed = {**made_up, "runs": list(filter(keep, made_up["runs"]))}
    with pytest.raises(SettingError, match=f"no {words}.*measure the whole matrix"):
        fit.fit(holed, card)


def test_the_command_rewrites_the_file_with_constants_and_errors(made_up, tmp_path, capsys):
    path, kernels = tmp_path / "measured.json", tmp_path / "kernels.json"
    path.write_text(json.dumps({**made_up, "kernels": [], "loads": [1]}))
    names = ("norm ours", "gemm 128x128 bf16")
    rows = [{"name": name, "size": "1024x1024", "gbs": 3456} for name in names]
    kernels.write_text(json.dumps({"rows": rows}))
    arguments = ["--file", str(path)]
    assert fit.main(arguments) == 2
    assert "VAE or kernels" in capsys.readouterr().err
    assert fit.main([*arguments, "--kernels", str(kernels)]) == 0
    found = json.loads(path.read_text())
    assert found["constants"]["bandwidth"] == 0.72
    assert found["kernels"] == [{"task": "norm", "size": "1024x1024", "gb_s": 3456}]
    assert found["loads"] == [1] and found["runs"] == made_up["runs"]
    assert list(found)[:3] == ["conditions", "constants", "fit"]
    assert json.loads(capsys.readouterr().out)["fit"] == found["fit"]


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


def test_what_a_calibration_measured_predicts_the_steps_too(bundled):
    """No constant is fitted for it: `bench --calibrate` ran for half a minute on the same card."""
    rates = parse(bundled["calibration"]).rates
    errors = [
        fit.seconds_of(run, rates) / fit.measured_seconds(run) - 1
        for run in bundled["runs"]
        if run["kind"] == "sampling"
    ]
    assert min(errors) > -0.1
    assert max(errors) < 0.15
