"""Which steps of a schedule a step cache skips, and its settings."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from qwen_l40s.errors import SettingError
from qwen_l40s.families.schedules import official_sigmas
from qwen_l40s.optimizations.step_cache import CachedRun
from qwen_l40s.planning.step_cache import (
    PRESETS,
    PUBLISHED_CHANGES,
    CacheSettings,
    cache_settings,
    computed_steps,
    ends,
    plan_steps,
)

COMPUTED = {
    "faithful": {20: 15, 40: 27, 50: 34},
    "balanced": {20: 14, 40: 22, 50: 26},
    "fast": {20: 12, 40: 18, 50: 20},
}


def simple(steps, *, flux=None, shift=None):
    """ComfyUI's scheduler `simple`: of ModelSamplingFlux, or of ModelSamplingDiscreteFlow."""
    if shift is None:
        times = [(i + 1) / 10_000 for i in range(10_000)]
        table = [math.exp(flux) / (math.exp(flux) + 1 / t - 1) for t in times]
    else:
        times = [(i + 1) / 1000 for i in range(1000)]
        table = [shift * t / (1 + (shift - 1) * t) for t in times]
    return [*(table[-1 - int(i * len(table) / steps)] for i in range(steps)), 0.0]


def schedules(steps):
    """diffusers', and ComfyUI's with and without ModelSamplingAuraFlow."""
    return official_sigmas(steps), simple(steps, flux=1.15), simple(steps, shift=3.1)


def skipped_steps(sigmas, settings, kept=()):
    return [i for i, skips in enumerate(plan_steps(sigmas, settings, kept).skipped) if skips]


def test_a_preset_computes_the_steps_that_its_tooltip_promises():
    for name, counts in COMPUTED.items():
        for steps, computed in counts.items():
            assert computed_steps(steps, name) == computed
            for sigmas in schedules(steps):
                plan = plan_steps(sigmas, PRESETS[name])
                assert (plan.steps, plan.computed, plan.reason) == (steps, computed, "")
                assert plan_steps(list(sigmas), cache_settings(name)) == plan
    assert computed_steps(50, "off") == 50


def test_no_preset_computes_fewer_than_12_steps():
    for name, settings in PRESETS.items():
        runs = (*range(11, 80), *range(80, 250, 19), 250)
        counts = [plan_steps(official_sigmas(n), settings).computed for n in runs]
        assert counts[0] == 11
        assert min(counts[1:]) == 12
        assert all(a <= b for a, b in itertools.pairwise(counts)), name


def test_runs_that_cannot_be_skipped_say_why():
    fifty = official_sigmas(50)
    rising, again = fifty.copy(), fifty.copy()
    rising[20], again[20] = fifty[18], fifty[19]
    for sigmas, reason in (
        ([], "runs of 10 steps or fewer need every step"),
        ([1.0, 0.0], "runs of 10 steps or fewer need every step"),
        (official_sigmas(10), "runs of 10 steps or fewer need every step"),
        (official_sigmas(11), "no step of 11 may be skipped"),
        (official_sigmas(20_000), "the run has 20000 steps, more than 250"),
        *(
            (odd, "the sigmas do not fall from step to step")
            for odd in (rising, again, [0.0] * 51, [math.inf, *fifty[1:]], [*fifty[:-1], -0.01])
        ),
        ([*fifty[:20], math.nan, *fifty[21:]], "the sigmas do not fall from step to step"),
    ):
        plan = plan_steps(sigmas, PRESETS["fast"])
        assert (plan.reason, any(plan.skipped)) == (reason, False)
        assert plan.steps == max(0, len(sigmas) - 1)
        run = CachedRun(PRESETS["fast"], sigmas)
        assert run.finish().lines() == [f"step cache: fast has no effect: {reason}"]


def cost(sigmas, chosen):
    """Length of each skipped step times the published change since the last computed one."""
    published = official_sigmas(20, 1024)[:-1]
    moved = [0.0, *itertools.accumulate(PUBLISHED_CHANGES)]
    at = np.interp(sigmas, published[::-1], moved[::-1])
    total = 0.0
    for i in chosen:
        computed = max(j for j in range(i) if j not in chosen)
        total += (sigmas[i] - sigmas[i + 1]) * (at[i] - at[computed])
    return total


def allowed(chosen, longest):
    return all(not set(range(i, i + longest + 1)) <= set(chosen) for i in chosen)


@given(data=st.data())
def test_a_plan_is_the_cheapest_within_its_limits(data):
    steps = data.draw(st.integers(11, 60) | st.integers(11, 14))
    # Falls from 1 or less to 0.02 or more, where the trace lies, then to an end of any height.
    parts = data.draw(st.lists(st.integers(1, 1000), min_size=steps + 2, max_size=steps + 2))
    falls = np.cumsum(parts[:-1]) / sum(parts)
    sigmas = [*(1 - 0.98 * falls[:-1]), data.draw(st.sampled_from([0.0, 0.01]))]
    end = st.integers(0, 40).map(lambda percent: percent / 100)
    settings = CacheSettings(
        budget=data.draw(st.floats(0, 1)),
        head=data.draw(end),
        tail=data.draw(end),
        longest=data.draw(st.integers(1, 8)),
    )
    kept = data.draw(st.sets(st.integers(-3, steps + 3), max_size=4))
    skipped = skipped_steps(sigmas, settings, kept)

    first, last = max(3, settings.head * steps), steps - max(2, settings.tail * steps)
    may = [i for i in range(steps) if first - 1e-9 <= i <= last - 1 + 1e-9 and i not in kept]
    assert set(skipped) <= set(may)
    assert len(skipped) <= settings.budget * (steps - 10) + 0.5
    assert allowed(skipped, settings.longest)
    if len(may) > 10:
        return
    most = min(len(may), round(settings.budget * (steps - 10)))
    sets = [
        chosen
        for count in range(most + 1)
        for chosen in itertools.combinations(may, count)
        if allowed(chosen, settings.longest)
    ]
    assert len(skipped) == max(map(len, sets))
    best = min(cost(sigmas, chosen) for chosen in sets if len(chosen) == len(skipped))
    assert cost(sigmas, skipped) == pytest.approx(best, rel=1e-9)


def test_the_ends_are_shares_of_the_steps():
    for percent in range(101):
        head, _ = ends(100, CacheSettings(head=percent / 100))  # 0.07 * 100 is above 7
        assert head == max(3, percent)
    assert ends(11, CacheSettings(head=0, tail=0)) == (3, 9)
    assert ends(21, PRESETS["faithful"]) == (6, 18)


def test_settings_are_checked():
    for name, range_, values in (
        (
            "budget",
            "a number from 0 to 1",
            (-0.1, 1.01, math.nan, math.inf, "0.5", True, None, [1]),
        ),
        ("head", "a number from 0 to 1", (2, math.nan, "")),
        ("tail", "a number from 0 to 1", (2, False)),
        ("gain", "a number from 0 to 1", (1.5, math.nan, 1j)),
        ("longest", "a whole number from 1 to 8", (0, 9, 2.0, math.nan, True, "2")),
    ):
        for value in values:
            with pytest.raises(SettingError) as raised:
                CacheSettings(**{name: value})
            sentence = str(raised.value)
            assert sentence.startswith("The step cache")
            assert name in sentence
            assert repr(value) in sentence
            assert sentence.endswith(f": choose {range_}.")
    for name in ("Fast", "custom", "", None, 3, ["fast"]):
        with pytest.raises(SettingError, match=r": choose off, faithful, balanced, fast\.$"):
            cache_settings(name)
    assert cache_settings("off") is None
