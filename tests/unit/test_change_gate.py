"""The adaptive step cache: its gate on a published trace, its curves, and where they are kept."""

import json
import logging
import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from qwen_l40s.machine import store
from qwen_l40s.machine.store import CURVES, load_curve, with_curve
from qwen_l40s.optimizations.change_gate import (
    ChangeGate,
    checkpoint_id,
    curve_for,
    relative_change,
)
from qwen_l40s.optimizations.step_cache import CachedRun
from qwen_l40s.step_cache import (
    ADAPTIVE,
    PUBLISHED_CURVES,
    CacheSettings,
    Curve,
    published_curve,
    usual_sigmas,
)

# Signal A of the first prompt in IonDen/mlx-teacache, scripts/_calibration_qwen.json.
TRACE = (
    *(0.784, 0.217, 0.192, 0.126, 0.127, 0.105, 0.102, 0.099, 0.094, 0.094),
    *(0.108, 0.110, 0.108, 0.142, 0.142, 0.178, 0.203, 0.290, 0.473),
)
WIDE = CacheSettings(budget=1, head=0, tail=0, longest=8, method=ADAPTIVE)
USUAL = CacheSettings(method=ADAPTIVE)
FITTED = Curve((1.0, 0.5, 0.0), 0.01, 0.9, 50, "bf16", "")


def replayed(settings, changes=TRACE, kept=()):
    """The figures of a run whose first block's input changes so, with Euler's steps."""
    sizes = torch.tensor([1.0, *changes], dtype=torch.float64)
    sizes[1:] += 1
    sigmas = usual_sigmas(len(sizes), 1024)
    inputs = dict(zip(sigmas, sizes.cumprod(0).float().reshape(-1, 1, 1, 1), strict=False))
    gate = ChangeGate(lambda x, sigma: inputs[sigma], published_curve(len(sizes)))
    run = CachedRun(settings, sigmas, kept=kept, gate=gate)
    x = torch.ones(1, 4)
    for sigma, after in pairwise(sigmas):
        velocity = run.forecast(x, torch.tensor([sigma]))
        if velocity is None:
            velocity = torch.full_like(x, 1 + sigma)
            run.computed(x, velocity)
        x = x + (after - sigma) * velocity
    return run.finish()


def test_the_published_trace_skips_the_cheap_steps():
    # As its authors' gate does, which also counts from 0 after each computed step.
    assert replayed(USUAL).skipped == [4, 6, 8, 10, 12]
    for threshold, count in ((0, 0), (0.2, 5), (0.25, 6), (0.4, 10)):
        assert len(replayed(replace(WIDE, threshold=threshold)).skipped) == count
    assert replayed(replace(USUAL, threshold=0)).lines() == [
        "step cache: custom has no effect: no step is skipped",
        "step cache: chooses its steps by the curve published for 20 steps of Qwen-Image",
    ]


def test_the_settings_limit_what_the_gate_skips():
    loose = replace(WIDE, threshold=10)
    for settings, skipped in (
        (replace(loose, longest=2), [3, 4, 6, 7, 9, 10, 12, 13, 15, 16]),
        (replace(loose, budget=0.4), [3, 4, 5, 6]),
        (replace(loose, head=0.5, tail=0.25), [10, 11, 12, 13, 14]),
        # A preset computes 12 steps.
        (replace(loose, name="fast"), [3, 4, 5, 6, 7, 8, 9, 10]),
    ):
        assert replayed(settings).skipped == skipped
    assert replayed(replace(loose, longest=1), kept={4, 6}).skipped[:4] == [3, 5, 7, 9]
    none = replayed(replace(loose, head=1))
    assert none.lines()[0] == "step cache: custom has no effect: of 20 steps none may be skipped"


def test_a_change_that_the_curve_has_not_seen_is_computed():
    changes = list(TRACE)
    for odd in (0.9, 1e30, math.nan):
        changes[7] = odd
        assert 8 not in replayed(replace(USUAL, threshold=10), changes).skipped
    assert 8 in replayed(replace(USUAL, threshold=10)).skipped


def test_published_curves():
    for curve in PUBLISHED_CURVES:
        for change in (curve.least, 0.1, 0.2, 0.45, curve.most):
            assert curve(change) == pytest.approx(np.polyval(curve.coefficients, change))
            assert curve(change) > 0
        assert curve(0) == curve(curve.least)
        assert curve(curve.most * 1.001) == curve(math.nan) == math.inf
        assert published_curve(curve.steps) is curve
    assert PUBLISHED_CURVES[1](0) == pytest.approx(0.067, abs=5e-4)
    assert Curve((-1.0, 0.0), 0.1, 1, 20, "", "")(0.5) == 0
    for steps in (8, 25, 35, 80):
        curve = published_curve(steps)
        assert "uncalibrated" in curve.source and f" {steps} steps" in curve.source
        assert 0 < curve.least < curve.most
    for few, many in ((8, 16), (60, 120)):  # half the change in each step, and half the answer
        assert published_curve(few)(0.2) == pytest.approx(2 * published_curve(many)(0.1))
    between = [published_curve(steps)(0.1) for steps in range(20, 51)]
    assert min(between) >= 0.13 and max(between) <= 0.152


def test_a_gate_compares_with_the_step_before():
    shapes = iter([torch.ones(1, 2, 3), torch.full((1, 2, 3), 1.25), torch.ones(1, 4, 3)])
    gate = ChangeGate(lambda x, sigma: next(shapes), FITTED)
    changes = [gate.change(torch.zeros(1), 1.0) for _ in range(3)]
    assert changes == pytest.approx([0, FITTED(0.25), 0])
    now = torch.tensor([1.0, -2.0, 4.0], dtype=torch.bfloat16)
    assert relative_change(now, now * 2).item() == 0.5


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.setattr(store, "_logged", set())
    monkeypatch.setenv("QWEN_L40S_CACHE", str(tmp_path))
    return tmp_path


def test_a_stored_curve_is_that_of_its_checkpoint_precision_and_steps(folder):
    others = [replace(FITTED, precision="fp32"), replace(FITTED, steps=20)]
    for curve in (replace(FITTED, least=0.02), *others, FITTED):
        (folder / CURVES).write_text(with_curve(folder, "abc", curve))
    assert len(json.loads((folder / CURVES).read_text())["measured"]) == 3
    found = curve_for(50, "abc", "bf16")
    assert replace(found, source="") == FITTED
    assert found.source == "the curve that calibrate-cache fitted on this checkpoint in bf16"
    for checkpoint, precision, steps in (("abd", "bf16", 50), ("abc", "int8", 50)):
        assert curve_for(steps, checkpoint, precision) is PUBLISHED_CURVES[1]
    assert curve_for(40, "abc", "bf16") == published_curve(40)
    (folder / CURVES).write_text(with_curve(folder, "", FITTED))
    assert curve_for(50, "", "bf16") is PUBLISHED_CURVES[1]


def test_a_damaged_file_counts_as_empty_and_is_told_once(folder, caplog):
    entry = json.loads(with_curve(folder, "abc", FITTED))["measured"][0]
    good = dict(entry, checkpoint="good")
    wrong = [
        *({"coefficients": bad} for bad in ([], [1, "2"], [math.nan], [True], 3, None, "12")),
        *({"least": bad} for bad in (0, -1, math.inf, "a", None, 0.95)),
        *({"steps": bad} for bad in (0, 2.5, "50", True)),
        *({"precision": 3}, {"checkpoint": None}),
    ]
    for change in wrong:
        text = json.dumps({"version": 1, "measured": [{**entry, **change}, good]})
        (folder / CURVES).write_text(text)
        assert load_curve("abc", "bf16", 50) is None, change
        assert load_curve("good", "bf16", 50) is not None, change
    for text in ("{", "[]", '{"version": 2, "measured": []}', '{"version": 1, "measured": {}}'):
        store._logged.clear()
        caplog.clear()
        (folder / CURVES).write_text(text)
        with caplog.at_level(logging.WARNING):
            assert curve_for(20, "abc", "bf16") is curve_for(20, "good", "bf16")
        (record,) = caplog.records
        assert "qwen-l40s calibrate-cache" in record.message


def test_a_checkpoint_is_known_by_its_values():
    weights = [torch.randn(8, 4), torch.randn(8)]
    stored = [weight.bfloat16() for weight in weights]
    found = checkpoint_id(weights)
    assert len(found) == 12 and found == checkpoint_id(stored)
    assert found == checkpoint_id(weight.float().t().contiguous().t() for weight in stored)
    assert found != checkpoint_id([weights[0], weights[1] * 1.02])
