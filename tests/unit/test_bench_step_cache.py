"""The rules that bench/step_cache compares, on a toy field of velocities; nothing is painted."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch

from qwen_l40s.bench.step_cache.__main__ import table
from qwen_l40s.bench.step_cache.calibration import calibrate, magcache
from qwen_l40s.bench.step_cache.rules import (
    AdaCache,
    EasyCache,
    HeldResidual,
    LazyCache,
    MeanCache,
    Ours,
    TaylorSeer,
    TeaCache,
    taylorseer_steps,
)
from qwen_l40s.bench.step_cache.run import Found, Rule, sample
from qwen_l40s.step_cache import PRESETS, CacheSettings, plan_steps, usual_sigmas

pytestmark = pytest.mark.usefixtures("one_thread")

ROOT = Path(__file__).resolve().parents[2]
SIGMAS = usual_sigmas(50, 256)
LATENT = (16, 16, 16)
LINE = (1.0, 0.0)


class Toy:
    """Images whose velocities turn at different rates; the residual is what is added to x."""

    def __init__(self, rates):
        self.rates = torch.tensor(rates)
        self.calls = 0

    def compute(self, x, sigma, rows):
        self.calls += 1
        rates = self.rates[rows].view(-1, 1, 1, 1)
        prompt = torch.tanh(x) * torch.cos(rates * sigma) + torch.sin(3 * rates * sigma)
        velocity = torch.stack((prompt, 0.9 * prompt + 0.1 * x), 1)
        residual = (velocity - x[:, None]).flatten(3)
        return Found(velocity, residual, residual[:, 0].clone())

    def finish(self, x, sigma, residual):
        return x[:, None] + residual.unflatten(3, LATENT[1:])

    def modulated(self, x, sigma):
        return (x * (1 + sigma)).flatten(2)


def noise(count):
    return torch.randn(count, *LATENT, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def field():
    return Toy([0.5, 1.0, 4.0])


GATED = {
    "easy": partial(EasyCache, threshold=0.1),
    "lazy": partial(LazyCache, threshold=0.1),
    "tea": partial(TeaCache, threshold=0.1, curve=LINE),
    "ada": partial(AdaCache, threshold=1.0),
    "ours": partial(Ours, settings=PRESETS["fast"]),
}


def test_a_rule_that_skips_nothing_changes_nothing(field):
    exact = sample(field, SIGMAS, noise(3), Rule)
    calls = field.calls
    for make in (
        partial(Ours, settings=CacheSettings(budget=0)),
        HeldResidual,
        partial(EasyCache, threshold=0),
        partial(LazyCache, threshold=0),
        partial(TeaCache, threshold=0, curve=LINE),
        partial(TaylorSeer, skipped=(), order=2),
        partial(AdaCache, threshold=0),
    ):
        field.calls = 0
        found = sample(field, SIGMAS, noise(3), make)
        assert torch.equal(found.x, exact.x)
        assert field.calls == calls == 50


def test_each_image_skips_as_if_it_were_alone(field):
    for name, make in GATED.items():
        together = sample(field, SIGMAS, noise(3), make)
        assert together.computed.max() < 50, name
        for i, rate in enumerate(field.rates.tolist()):
            alone = sample(Toy([rate]), SIGMAS, noise(3)[i : i + 1], make)
            assert alone.computed == together.computed[i], name
            torch.testing.assert_close(alone.x[0], together.x[i])
        if name != "ours":
            assert len(set(together.computed.tolist())) > 1, name


def test_schedules_compute_what_they_are_asked_for(field):
    ratios = calibrate(field, SIGMAS, noise(3)).ratios
    assert len(ratios) == 50
    for steps in (20, 50):
        for settings in PRESETS.values():
            computed = plan_steps(usual_sigmas(steps, 256), settings).computed
            skipped = taylorseer_steps(steps, computed)
            assert len(skipped) == steps - computed
            assert min(skipped) >= 3
            if steps == 50:
                skipped, _ = magcache(ratios, computed)
                assert abs(50 - len(skipped) - computed) <= 1
                assert min(skipped) >= 10
            found = sample(
                Toy([1.0]), usual_sigmas(steps, 256), noise(1), partial(Ours, settings=settings)
            )
            assert found.computed == computed + found.rule.figures()[0].refused
    assert sample(field, SIGMAS, noise(3), MeanCache).computed.tolist() == [25, 25, 25]


def test_a_series_over_steps_is_exact_for_its_order():
    class Polynomial(Toy):
        def compute(self, x, sigma, rows):
            step = round((1 - sigma) * 50)
            residual = torch.full((len(x), 2, 16, 256), 0.1 + 0.02 * step + 1e-3 * step**2)
            velocity = self.finish(x, sigma, residual)
            return Found(velocity, residual, residual[:, 0].clone())

    sigmas = [1 - i / 50 for i in range(51)]
    exact = sample(Polynomial([1.0]), sigmas, noise(1), Rule).x
    errors = [
        (sample(Polynomial([1.0]), sigmas, noise(1), make).x - exact).norm() / exact.norm()
        for make in (
            partial(HeldResidual, skipped=taylorseer_steps(50, 26)),
            partial(TaylorSeer, skipped=taylorseer_steps(50, 26), order=1),
            partial(TaylorSeer, skipped=taylorseer_steps(50, 26), order=2),
        )
    ]
    assert errors[0] > 5 * errors[1] > 5 * errors[2]


def test_the_table_says_where_a_rule_computes_another_number_of_steps():
    row = {"steps": 50, "preset": "fast", "planned": 20, "mean": 0.01234, "worst_decile": 0.1}
    rows = [{"rule": "none", "steps": 50}]
    rows += [
        {**row, "rule": name, "computed": computed}
        for name, computed in (("ours", 20.4), ("TeaCache", 19.4))
    ]
    assert table({"rows": rows}).splitlines() == [
        "| rule | 20 of 50, `fast` |",
        "| --- | --- |",
        "| ours | 1.23 / 10.00 |",
        "| TeaCache | 1.23 / 10.00 (19.4) |",
    ]


@pytest.fixture(scope="module")
def results():
    path = ROOT / "bench" / "results" / "step-cache-micro.json"
    return json.loads(path.read_text(encoding="utf-8"))


def test_docs_hold_the_table_of_the_results(results):
    docs = (ROOT / "docs" / "step_cache.md").read_text(encoding="utf-8")
    assert f"-->\n{table(results)}\n<!--" in docs
    cached = [row for row in results["rows"] if "preset" in row]
    without = {f"{row['right']:.1f}" for row in results["rows"] if row["rule"] == "none"}
    right = [row["right"] for row in cached]
    words = " ".join(docs.split())
    assert f"of 100, {min(right):.1f} to {max(right):.1f} have the" in words
    assert [f"and {share} without a cache" in words for share in without] == [True]
    medians = [row["estimate_by_error"]["median"] for row in cached if row["rule"] == "ours"]
    assert f"{min(medians):.1f} to {max(medians):.1f} times the true one" in words


def test_the_presets_keep_the_latent_as_near_as_was_asked_for(results):
    rows = {(r["steps"], r["preset"], r["rule"]): r for r in results["rows"] if "preset" in r}
    for steps, preset, most, worst in (
        (50, "faithful", 0.004, 0.01),
        (20, "faithful", 0.008, 0.02),
        (50, "balanced", 0.008, 0.02),
    ):
        ours = rows[steps, preset, "ours"]
        assert (ours["mean"] <= most, ours["worst_decile"] <= worst) == (True, True)
        assert abs(ours["change"]) <= 1
    for (steps, preset, rule), row in rows.items():
        if not rule.startswith("ours") and not rule.endswith("our steps"):
            assert rows[steps, preset, "ours"]["mean"] < row["mean"]
