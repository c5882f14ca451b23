"""Runs of the step cache on a velocity that is known, and on a card that is never waited for."""

import gc
import json
import math
import re
import weakref
from dataclasses import asdict
from itertools import pairwise

import pytest

torch = pytest.importorskip("torch")

from test_step_cache import schedules, skipped_steps

from qwen_l40s.families.schedules import official_sigmas
from qwen_l40s.optimizations import step_cache
from qwen_l40s.optimizations.step_cache import MOST_MISSED, CachedRun
from qwen_l40s.planning.step_cache import PRESETS, CacheSettings
from qwen_l40s.verdict import Verdict

SHAPE = (2, 4, 8, 8)
FIFTY = official_sigmas(50)
BALANCED = PRESETS["balanced"]
# Of 50 steps: rows of one or two, with one computed step between them.
ROWS = [8, 10, 11, 13, 14, 16, 17, 19, 20, 22, 23, 25]


def noise(seed=0, shape=SHAPE):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def flow(seed=1, shape=SHAPE):
    """The exact velocity where pictures are normally distributed, each value with its own width."""
    mean, width = noise(seed, shape), noise(seed + 100, shape).abs() / 2 + 0.2

    def velocity(x, sigma):
        spread = sigma**2 + (1 - sigma) ** 2 * width**2
        drift = (sigma - (1 - sigma) * width**2) / spread
        return (drift * (x - (1 - sigma) * mean) - mean).to(x.dtype)

    return velocity


class Card(step_cache.Later):
    """Numbers that a card far behind has only once a later call of the model has been queued."""

    queued = 0

    def __init__(self, step, *numbers):
        super().__init__(step, *numbers)
        self.since = Card.queued

    def read(self):
        assert Card.queued > self.since, f"the host waits for step {self.step}"
        return super().read()


@pytest.fixture(autouse=True)
def card(monkeypatch):
    monkeypatch.setattr(step_cache, "Later", Card)


def euler(x, sigma, following, velocity):
    """As ComfyUI takes a step: by way of the prediction."""
    denoised = x - sigma * velocity
    return x + (x - denoised) / sigma * (following - sigma)


def play(run, sigmas, x, velocity=None, move=euler, keys=None):
    """((step, latent, velocity, whether forecast) of each call, the last latent)."""
    velocity, calls = velocity or flow(), []
    for i, (sigma, following) in enumerate(pairwise(sigmas)):
        key = None if keys is None else keys[i]
        v = run.forecast(x, torch.tensor([sigma, sigma]), key)
        forecast = v is not None
        if v is None:
            Card.queued += 1
            found = velocity(x, sigma)
            run.computed(x, found)
            v = found
        calls.append((i, x, v, forecast))
        x = move(x, sigma, following, v)
    return calls, x


def sample(settings, sigmas=FIFTY, *, velocity=None, move=euler, x=None, keys=None, **others):
    """The figures of a run, and what `play` gives of it."""
    run = CachedRun(settings, sigmas, **others)
    calls, last = play(run, sigmas, noise() if x is None else x, velocity, move, keys)
    Card.queued += 1
    return run.finish(), calls, last


def alone(sigmas=FIFTY, velocity=None, x=None):
    xs, velocity = [noise() if x is None else x], velocity or flow()
    for sigma, following in pairwise(sigmas):
        xs.append(euler(xs[-1], sigma, following, velocity(xs[-1], sigma)))
    return xs


def norm(x):
    return x.double().norm().item()


def test_a_run_is_the_same_bit_for_bit_up_to_its_first_skip():
    expected = alone()
    for settings in (*PRESETS.values(), CacheSettings(budget=0)):
        figures, calls, last = sample(settings)
        assert figures.skipped == skipped_steps(FIFTY, settings)
        assert [i for i, *_, forecast in calls if forecast] == figures.skipped
        first = (figures.skipped or [50])[0]
        latents = [x for _, x, *_ in calls] + [last]
        same = [torch.equal(*pair) for pair in zip(latents, expected, strict=True)]
        assert same == [i <= first for i in range(51)]
    assert figures.lines() == ["step cache: custom has no effect: no step of 50 may be skipped"]
    figures, calls, last = sample(PRESETS["fast"], refusal=Verdict("the model is no flow"))
    assert torch.equal(last, expected[-1])
    assert figures.lines() == ["step cache: fast has no effect: the model is no flow"]


def test_forecasts_and_misses_are_those_of_their_formulas():
    wide = CacheSettings(budget=1, head=0, tail=0, longest=8, gain=1)
    clipped = 0
    for settings in (*PRESETS.values(), CacheSettings(gain=0), wide):
        figures, calls, _ = sample(settings)
        known, missed, since = [], [], False
        for i, _, v, forecast in calls:
            if len(known) > 1:
                (_, s2, v2), (_, s1, v1) = known[-2:]
                factor = settings.gain * (FIFTY[i] - s1) / (s1 - s2)
                clipped += forecast and factor > 1
                guess = v1 + min(factor, 1) * (v1 - v2)
                if forecast:
                    torch.testing.assert_close(v.double(), guess, atol=1e-6, rtol=1e-6)
            if forecast:
                since = True
                continue
            if since:
                missed.append(norm(guess - v.double()) / norm(v))
            since = False
            known.append((i, FIFTY[i], v.double()))
        assert figures.missed == pytest.approx(missed, rel=1e-3)
    assert clipped > 10


def test_the_estimate_is_near_the_true_distance():
    for steps in (20, 50):
        for sigmas in schedules(steps):
            true_last = alone(sigmas)[-1]
            for settings in PRESETS.values():
                figures, _, last = sample(settings, sigmas)
                true = norm(last - true_last) / norm(true_last)
                assert figures.distance == pytest.approx(true, rel=0.15)
    # A run that another sampler finishes.
    figures, _, last = sample(BALANCED, FIFTY[:36])
    true_last = alone(FIFTY[:36])[-1]
    assert figures.distance == pytest.approx(norm(last - true_last) / norm(true_last), rel=0.15)


def switched(step):
    before, after = flow(1), flow(7)
    return lambda x, sigma: (before if sigma > FIFTY[step] else after)(x, sigma)


def test_after_a_miss_the_next_row_that_can_know_is_computed():
    figures, _, _ = sample(BALANCED, velocity=switched(18))
    usual, _, _ = sample(BALANCED)
    assert usual.skipped == skipped_steps(FIFTY, BALANCED)
    assert usual.skipped[: len(ROWS)] == ROWS
    assert max(usual.missed) < MOST_MISSED < max(figures.missed)
    assert re.search(r" off by \d\d % on average and 1\d\d % at most", figures.lines()[1])
    # Computed in step 18, the miss is read in step 22; that of 21 in step 25.
    assert set(usual.skipped) - set(figures.skipped) == {22, 23, 25, 26}
    assert (figures.refused, figures.reason) == (4, None)
    assert figures.lines()[-1] == (
        "step cache: 4 more steps are computed, because a forecast was off by more than 15 %"
    )
    # With a computed step to spare it is read before the row after it.
    kept = (18, 19)
    figures, _, _ = sample(BALANCED, velocity=switched(18), kept=kept)
    assert set(skipped_steps(FIFTY, BALANCED, kept)) - set(figures.skipped) == {20, 21}


def ancestral(x, sigma, following, velocity):
    """ComfyUI's sample_euler_ancestral_RF."""
    if not following:
        return x - sigma * velocity
    down = following * following / sigma
    alpha, alpha_down = 1 - following, 1 - down
    renoise = max(0.0, following**2 - (down * alpha / alpha_down) ** 2) ** 0.5
    moved = euler(x, sigma, down, velocity)
    return alpha / alpha_down * moved + renoise * noise(int(sigma * 1e6))


def test_noise_between_steps_stops_it_before_the_first_skip():
    for sigmas in schedules(20) + schedules(50):
        figures, _, _ = sample(PRESETS["fast"], sigmas, move=ancestral)
        assert figures.skipped == []
        (line,) = figures.lines()
        assert "away from the prediction: the sampler adds noise" in line


def test_calls_that_the_schedule_lacks():
    twice = [sigma for sigma in FIFTY[:-1] for _ in range(2)]
    heun = [sigma for pair in pairwise(FIFTY[:-1]) for sigma in pair]
    for asked in (twice, heun, [sigma * 1.01 for sigma in FIFTY[:-1]]):
        run = CachedRun(PRESETS["fast"], FIFTY)
        calls, _ = play(run, asked, noise())
        assert not any(forecast for *_, forecast in calls)
        assert "the sampler calls the model at sigma" in run.finish().lines()[0]

    run = CachedRun(PRESETS["fast"], FIFTY[:21])
    calls, x = play(run, FIFTY[:21], noise())
    v = calls[-1][2]
    for _ in range(3):
        assert run.forecast(x, torch.tensor([FIFTY[20]])) is None
        Card.queued += 1
        run.computed(x, v)
    figures = run.finish()
    assert len(figures.skipped) == 8
    assert figures.lines()[-1].endswith(": the sampler calls the model more than once a step")


def test_a_prediction_that_is_not_finite_ends_it():
    def broken(x, sigma):
        v = flow()(x, sigma)
        return v * math.nan if sigma == FIFTY[18] else v

    figures, _, last = sample(BALANCED, velocity=broken)
    assert last.isnan().all()
    assert figures.skipped == [step for step in ROWS if step <= 20]
    assert figures.reason.fact == "the model's prediction of step 19 is not finite"
    assert figures.distance is None
    assert all(map(math.isfinite, figures.missed))
    json.dumps(asdict(figures), allow_nan=False)
    # In the last step nothing is asked any more.
    figures, _, _ = sample(
        BALANCED, velocity=lambda x, s: flow()(x, s) * (math.nan if s == FIFTY[49] else 1)
    )
    assert figures.distance is None
    assert figures.skipped == skipped_steps(FIFTY, BALANCED)
    json.dumps([asdict(figures), figures.lines()], allow_nan=False)


def test_another_size_type_or_guidance_shares_no_forecast():
    def other(change):
        def move(x, sigma, following, velocity):
            x = euler(x, sigma, following, velocity)
            return change(x) if sigma == FIFTY[18] else x

        return move

    planned = skipped_steps(FIFTY, BALANCED)
    for others in (
        {"keys": [4.0] * 19 + [3.0] * 31},
        {"move": other(lambda x: x.repeat(2, 1, 1, 1)), "velocity": lambda x, s: x - s},
        {"move": other(lambda x: x.bfloat16())},
    ):
        figures, _, _ = sample(BALANCED, **others)
        assert figures.skipped == [step for step in planned if step not in (19, 20)]
        assert (figures.forgotten, figures.reason) == (1, None)
        assert figures.lines()[-1] == (
            "step cache: starts over: size, type, device or CFG changed during the run"
        )
    # Neither does a miss of before have a row computed.
    keys = [0] * 19 + [1] * 31
    figures, _, _ = sample(BALANCED, keys=keys, velocity=switched(18))
    assert figures.skipped == [step for step in planned if step not in (19, 20)]
    assert max(figures.missed) > MOST_MISSED
    figures, _, _ = sample(BALANCED, keys=range(50))
    assert figures.lines() == [
        "step cache: balanced has no effect: size, type, device or CFG changed during the run"
    ]


def test_a_half_painted_mask_is_no_other_direction():
    kept = torch.zeros(1, 1, 8, 8)
    kept[..., :4] = 1
    original, start = noise(5), noise()

    def inpaint(x, sigma, following, velocity):
        x = euler(x, sigma, following, velocity)
        return x * kept + (following * start + (1 - following) * original) * (1 - kept)

    figures, _, _ = sample(BALANCED, move=inpaint, followed=kept)
    assert figures.skipped == skipped_steps(FIFTY, BALANCED)
    assert figures.reason is None
    # Where nothing is followed, or the velocity is 0, nothing is divided by 0.
    for others in ({"followed": kept * 0}, {"velocity": lambda x, s: x * 0}):
        figures, _, _ = sample(BALANCED, x=noise() * 0, **others)
        assert figures.skipped == skipped_steps(FIFTY, BALANCED)
        assert (set(figures.missed), figures.distance, figures.reason) == ({0.0}, 0.0, None)


def test_rounded_latents_are_no_other_direction():
    for dtype in (torch.bfloat16, torch.float16):
        for sigmas in schedules(50) + schedules(250):
            figures, _, _ = sample(BALANCED, sigmas, x=noise().to(dtype))
            assert figures.skipped == skipped_steps(sigmas, BALANCED)
            assert figures.reason is None


def test_nothing_is_kept_of_a_run():
    held = []

    def remembered(x, sigma):
        v = flow()(x, sigma)
        held.append(weakref.ref(v))
        held.append(weakref.ref(x))
        return v

    run = CachedRun(CacheSettings(), FIFTY, followed=torch.ones(SHAPE))
    held.append(weakref.ref(run._followed))
    x = noise()
    for sigma, following in pairwise(FIFTY):
        v = run.forecast(x, torch.tensor([sigma]))
        if v is None:
            Card.queued += 1
            v = remembered(x, sigma)
            run.computed(x, v)
        x = euler(x, sigma, following, v)
    del x, v
    gc.collect()
    assert sum(ref() is not None for ref in held) <= 3  # two velocities and the mask
    Card.queued += 1
    figures = run.finish()
    gc.collect()
    assert [ref() for ref in held] == [None] * len(held)
    assert figures.skipped
    first, lines = asdict(figures), figures.lines()
    again = run.finish()
    assert (asdict(again), again.lines()) == (first, lines)
    assert run.forecast(noise(), torch.tensor([1.0])) is None
    run.computed(noise(), noise())
    assert asdict(run.finish()) == first
