"""Runs in ComfyUI's own Python: prompts of different lengths in one forward pass.

    python comfyui_cfg_batching.py COMFYUI FOLDER cpu|card|dynamic

Every function named `check_...` is one check; prints {check: None or its traceback} as JSON.
"""

from contextlib import contextmanager
from unittest import mock

import comfyui_boot

FOLDER, MODE = comfyui_boot.ARGUMENTS[0], str(comfyui_boot.ARGUMENTS[1])
comfyui_boot.start_on(MODE)

import comfy.model_management
import comfy.sample
import comfy.samplers
import narrow_transformer as narrow
import torch
from comfy.conds import CONDRegular
from comfy.patcher_extension import WrappersMP

from qwen_l40s.errors import SettingError
from qwen_l40s.hosts.comfyui.load.transformer import load_model
from qwen_l40s.hosts.comfyui.sample import cfg_batching
from qwen_l40s.hosts.comfyui.sample import cfg_batching as cfg_trial
from qwen_l40s.hosts.comfyui.sample.cfg_batching import (
    CfgBatching,
    find_merges,
    padded,
)
from qwen_l40s.hosts.comfyui.sample.optimize import Settings, optimize, report_of
from qwen_l40s.optimizations.attention.measure import Cache

torch.set_num_threads(1)
DEVICE = comfy.model_management.get_torch_device()
PATH = narrow.write(FOLDER / "bf16.safetensors", narrow.weights())
STOCK = load_model(PATH, "bf16")[0]
# ComfyUI computes this model in fp32 on a processor and in bf16 on a card.
SAME = 1e-5 if MODE == "cpu" else 2e-2
KEY = "cfg_batching_under_test"


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def prompt(length, batch=1, **conditions):
    """One prompt as a text encoder node gives it."""
    return [random(batch, length, narrow.SHAPE.joint_dim, seed=length), conditions]


def cache() -> Cache:
    """An empty one."""
    path = FOLDER / "cfg_batching.json"
    path.unlink(missing_ok=True)
    return Cache(path)


class Batched:
    """A MODEL with the wrappers, and what its forward passes got."""

    def __init__(self, setting="on", model=None, **arguments):
        self.batching = CfgBatching(setting, **arguments)
        self.model = (model or STOCK).clone()
        self.passes = []  # (prompts, text tokens, whether there is a mask) of each

        def outer_sample(executor, *args, **kwargs):
            self.batching.start_run()
            output = executor(*args, **kwargs)
            self.batching.finish_run()
            return output

        def look(executor, x, t, *args, **kwargs):
            prompts = args[3]["cond_or_uncond"]
            self.passes.append((len(prompts), args[1].shape[1], "attention_mask" in kwargs))
            return executor(x, t, *args, **kwargs)

        for kind, wrapper in (
            (WrappersMP.OUTER_SAMPLE, outer_sample),
            (WrappersMP.CALC_COND_BATCH, self.batching.calc_cond_batch),
            (WrappersMP.APPLY_MODEL, self.batching.apply_model),
            (WrappersMP.APPLY_MODEL, look),
        ):
            self.model.add_wrapper_with_key(kind, KEY, wrapper)

    @property
    def line(self) -> str:
        (line,) = self.batching.lines()
        return line

    def sample(self, *arguments, **options) -> torch.Tensor:
        self.passes.clear()
        return sample(self.model, *arguments, **options)

    def prompts(self) -> list[int]:
        """How many prompts each forward pass took."""
        return [prompts for prompts, *_ in self.passes]


def sample(model, positive=20, negative=7, steps=1, cfg=2.5, batch=1) -> torch.Tensor:
    """Euler steps at 64 x 128 from fixed noise; a length, or whole conditioning, for a prompt."""
    noise = random(batch, 16, 1, 8, 16)
    conds = [[prompt(given)] if isinstance(given, int) else given for given in (positive, negative)]
    with torch.inference_mode():
        return comfy.sample.sample(
            model,
            noise,
            steps,
            cfg,
            "euler",
            "simple",
            *conds,
            torch.zeros_like(noise),
            disable_pbar=True,
            seed=0,
        ).float()


def assert_same(known, found, most=SAME):
    assert torch.isfinite(found).all()
    difference = float((found - known).norm() / known.norm())
    assert difference <= most, difference


def compare(passes, *prompts, **options) -> Batched:
    """The batched clone of the MODEL, whose picture is ComfyUI's own in these forward passes."""
    batched = Batched()
    assert_same(sample(STOCK, *prompts, **options), batched.sample(*prompts, **options))
    assert batched.prompts() == passes, batched.passes
    return batched


# ----------------------------------------------------------------------------------- what is merged


def check_a_longer_positive_prompt_and_the_reverse():
    for lengths in ((20, 7), (7, 20), (300, 1), (1, 300)):
        batched = compare([2], *lengths)
        assert batched.passes == [(2, max(lengths), True)], batched.passes
        assert batched.line == "cfg: one batched pass, as asked for; not bit-identical"


def check_more_steps_and_more_latents():
    compare([2, 2, 2], 20, 7, steps=3)
    compare([2], 20, 7, batch=2)
    compare([2], [prompt(20, batch=2)], [prompt(7, batch=2)], batch=2)
    compare([2], [prompt(20, batch=2)], 7, batch=2)


def check_combined_prompts():
    batched = compare([3], [prompt(20), prompt(9, strength=0.5)], 7)
    assert batched.passes == [(3, 20, True)]
    # Two of one length would batch without the third.
    compare([3], [prompt(20), [random(1, 20, narrow.SHAPE.joint_dim), {}]], 7)


def check_prompts_with_areas():
    left, right = (8, 8, 0, 0), (8, 8, 0, 8)
    # ComfyUI gives each area its copy of the negative prompt, and computes the whole one as well.
    areas = [prompt(20, area=left), prompt(9, area=right, strength=0.7)]
    batched = compare([4, 1], areas, 7)
    assert batched.passes == [(4, 20, True), (1, 7, False)]
    # Areas of two sizes are two passes.
    compare([2, 2, 1], [prompt(20, area=left), prompt(9, area=(4, 8, 0, 8))], 7)


def check_a_masked_prompt_of_an_image():
    mask = torch.zeros(1, 8, 16)
    mask[..., :8] = 1
    compare([3], [prompt(20, mask=mask), prompt(11, mask=1 - mask, mask_strength=0.8)], 7)


def check_edit_with_references():
    for method in ("index", "negative_index", "offset", "index_timestep_zero"):
        given = {
            "reference_latents": [random(1, 16, 1, 8, 8, seed=3), random(1, 16, 1, 4, 6, seed=4)],
            "reference_latents_method": method,
        }
        compare([2], [prompt(20, **given)], [prompt(7, **given)])
        compare([2], [prompt(20, **given)], [prompt(7, **given)], batch=2)


def check_a_prompt_with_a_mask_of_its_own():
    mask = torch.tensor([[1] * 12 + [0] * 3 + [1] * 5])
    given = [prompt(20, attention_mask=mask)]
    compare([2], given, 7)
    compare([2], given, 30)
    # One length, and a mask for one prompt only: two passes without a mask for the other.
    compare([2], given, [[random(1, 20, narrow.SHAPE.joint_dim), {}]])
    without = sample(STOCK, 20, 7)
    assert float((Batched().sample(given, 7) - without).norm() / without.norm()) > 1e-4


def check_a_prompt_for_a_part_of_the_steps():
    parts = [prompt(20, start_percent=0.0, end_percent=0.5), prompt(9, start_percent=0.5)]
    known = sample(STOCK, parts, 7, steps=4)
    batched = Batched()
    assert_same(known, batched.sample(parts, 7, steps=4))
    assert 1 not in batched.prompts()
    assert {length for _, length, _ in batched.passes} == {9, 20}
    assert batched.line == "cfg: one batched pass, as asked for; not bit-identical"


def check_with_fused_blocks_and_chosen_attention():
    model = optimize(STOCK, Settings())
    batched = Batched(model=model)
    assert_same(sample(STOCK, 20, 7, steps=2), batched.sample(20, 7, steps=2), 2 * SAME)
    assert report_of(batched.model).startswith("blocks: fused, 4 of 4 in 2 forward passes")
    assert batched.prompts() == [2, 2]


# ----------------------------------------------------------------------------------- what is left


def check_what_comfyui_batches_itself_stays_bit_identical():
    batched = Batched()
    negative = [[random(1, 20, narrow.SHAPE.joint_dim), {}]]
    assert torch.equal(sample(STOCK, 20, negative), batched.sample(20, negative))
    assert batched.passes == [(2, 20, False)]
    assert batched.line == f"{cfg_batching.OWN}: there was nothing that padding would merge"


def check_a_single_prompt_stays_bit_identical():
    batched = Batched()
    assert torch.equal(sample(STOCK, cfg=1.0), batched.sample(cfg=1.0))
    assert batched.passes == [(1, 20, False)]


def check_references_of_two_sizes_stay_apart():
    positive = [prompt(20, reference_latents=[random(1, 16, 1, 8, 8)])]
    for negative in ([prompt(7, reference_latents=[random(1, 16, 1, 4, 6)])], [prompt(7)]):
        batched = Batched()
        assert torch.equal(sample(STOCK, positive, negative), batched.sample(positive, negative))
        assert sorted(batched.passes) == [(1, 7, False), (1, 20, False)]


def check_a_mask_that_is_added_to_the_scores_stays():
    added = torch.zeros(1, 20)
    added[:, 12:15] = -4
    batched = Batched()
    positive = [prompt(20, attention_mask=added)]
    assert torch.equal(sample(STOCK, positive), batched.sample(positive))
    assert sorted(batched.passes) == [(1, 7, False), (1, 20, True)]


def entry(length, **more):
    """One prompt as ComfyUI's sampler has it."""
    text = CONDRegular(random(1, length, narrow.SHAPE.joint_dim))
    return {"model_conds": {"c_crossattn": text}, "uuid": length, **more}


def merged(*entries) -> list[tuple[int, ...]]:
    found = find_merges([list(entries), None], random(1, 16, 1, 8, 8), torch.ones(1))
    return [merge.lengths for merge in found]


def check_prompts_that_something_else_reads():
    control, hooks = object(), object()
    assert merged(entry(20), entry(7)) == [(20, 7)]
    assert merged(entry(20, control=control), entry(7, control=control)) == []
    assert merged(entry(20), entry(7, default=True)) == []
    assert merged(entry(20, hooks=hooks), entry(7)) == []
    assert merged(entry(20, hooks=hooks), entry(7, hooks=hooks)) == [(20, 7)]
    assert merged(entry(20, gligen=("position", None, [])), entry(7)) == []
    assert merged(
        entry(20), entry(20), entry(5, area=(4, 4, 0, 0)), entry(6, area=(4, 4, 0, 2))
    ) == [(5, 6)]
    other = entry(7)
    other["model_conds"]["c_crossattn"] = comfy.conds.CONDCrossAttn(random(1, 7, 64))
    assert merged(entry(20), other) == []


def check_the_callers_prompts_stay_as_they_are():
    conds = [[entry(20)], [entry(7)], None]
    before = [
        entries and [(id(given), dict(given), dict(given["model_conds"])) for given in entries]
        for entries in conds
    ]
    found = find_merges(conds, random(1, 16, 1, 8, 8), torch.ones(1))
    changed = padded(conds, found)
    assert changed[2] is None
    sizes = [given[0]["model_conds"]["c_crossattn"].size() for given in changed[:2]]
    assert sizes == [[1, 20, 64], [1, 20, 64]]
    short = changed[1][0]["model_conds"]
    assert short["attention_mask"].cond.tolist() == [[1] * 7 + [0] * 13]
    assert not short["c_crossattn"].cond[:, 7:].any()
    after = [
        entries and [(id(given), dict(given), dict(given["model_conds"])) for given in entries]
        for entries in conds
    ]
    assert before == after
    assert conds[1][0]["model_conds"]["c_crossattn"].size() == [1, 7, 64]


def check_what_the_wrapper_does_not_know_is_passed_on():
    calls = []

    def executor(*arguments, **options):
        calls.append((arguments, options))
        return []

    model, x, sigma = object(), random(1, 16, 1, 8, 8), torch.ones(1)
    conds = [[entry(20)], [entry(7)]]
    batching = CfgBatching("on")
    batching.calc_cond_batch(executor, model, conds, x, sigma, {}, 1, further=2)
    (arguments, options) = calls.pop()
    assert arguments[0] is model and arguments[1] is not conds and arguments[5:] == (1,)
    assert options == {"further": 2}
    several = {"multigpu_clones": {}}
    batching.calc_cond_batch(executor, model, conds, x, sigma, several)
    assert calls.pop()[0][1] is conds
    assert "several cards" in batching.lines()[0]
    off = CfgBatching("off")
    off.calc_cond_batch(executor, model, conds, x, sigma, {})
    assert calls.pop()[0][1] is conds
    assert off.lines() == [cfg_batching.OWN]


def check_a_wrong_setting():
    try:
        CfgBatching("yes")
    except SettingError as error:
        assert "off or on or auto" in str(error)
    else:
        raise AssertionError("a setting that is none has been taken")


# -------------------------------------------------------------------------------- too little memory


@contextmanager
def little_memory():
    """ComfyUI finds room for one prompt in a forward pass."""
    own = STOCK.model.memory_required

    def required(shape, *arguments, **options):
        return 1e30 if shape[0] > 1 else own(shape, *arguments, **options)

    with (
        mock.patch.object(STOCK.model, "memory_required", required),
        # Loading a model asks the same question for two prompts.
        mock.patch("comfy.sampler_helpers.estimate_memory", lambda *_: (0, 0)),
    ):
        yield


def check_a_batch_that_comfyui_splits_is_given_up():
    batched = Batched()
    known = sample(STOCK, steps=3)
    with little_memory():
        assert_same(known, batched.sample(steps=3))
    # The first step's two passes are padded.
    assert batched.passes[:2] == [(1, 20, True)] * 2
    assert sorted(batched.passes[2:]) == [(1, 7, False)] * 2 + [(1, 20, False)] * 2
    assert "too little free memory" in batched.line
    assert_same(known, batched.sample(steps=3))
    assert batched.prompts() == [2, 2, 2]


def check_a_batch_that_memory_has_no_room_for_is_given_up():
    batched = Batched()

    def full(executor, x, t, *args, **kwargs):
        if len(args[3]["cond_or_uncond"]) > 1:
            raise torch.OutOfMemoryError("as if")
        return executor(x, t, *args, **kwargs)

    batched.model.add_wrapper_with_key(WrappersMP.APPLY_MODEL, "full", full)
    assert torch.equal(sample(STOCK, steps=3), batched.sample(steps=3))
    assert batched.prompts() == [2] + [1] * 6
    assert "memory ran out" in batched.line


# --------------------------------------------------------------------------------------------- auto


@contextmanager
def fake_card(*ms):
    """Steps that take these times, in the order in which they are timed, on a card of no name."""
    times = iter(ms)

    class Span:
        def __init__(self, device):
            self._ms = next(times)

        def end(self):
            pass

        def ms(self):
            return self._ms

    with (
        mock.patch.object(cfg_batching, "Span", Span),
        mock.patch.object(cfg_batching, "why_not_measured", lambda device: ""),
        mock.patch.object(cfg_trial, "measurement_key", lambda request: "a machine"),
    ):
        yield


MEASURED = [1, 1, 1, 1, 2, 2, 1, 1, 2]  # the prompts of the forward passes of the six steps


def check_auto_takes_what_was_faster_and_remembers():
    known = sample(STOCK, steps=8)
    store = cache()
    batched = Batched("auto", cache=store)
    # Separate, batched, separate, batched.
    with fake_card(100.0, 91.0, 101.0, 90.0):
        assert_same(known, batched.sample(steps=8))
    assert batched.prompts() == [*MEASURED, 2, 2]
    assert batched.line == (
        "cfg: one batched pass: 10.0 % less time on this card (90.0 ms against 100.0 ms); "
        "not bit-identical; measured in this run, 3 steps of it batched"
    )
    again = Batched("auto", cache=Cache(store.path))
    for model in (batched, again):
        with fake_card():
            assert_same(sample(STOCK, steps=2), model.sample(steps=2))
        assert model.prompts() == [2, 2]
        assert model.line.endswith("(90.0 ms against 100.0 ms); not bit-identical")
    # Texts of another length class, or another attention, are measured anew.
    elsewhere = Batched("auto", path="another attention", cache=store)
    for other, lengths in ((again, (20, 90)), (elsewhere, (20, 7))):
        with fake_card():
            other.sample(*lengths, steps=2)
        assert other.prompts() == [1] * 4
        assert "2 steps are too few" in other.line


def check_auto_stays_separate_where_little_is_gained():
    store = cache()
    for batched_ms, words in ((98.0, "2.0 % less"), (105.0, "5.0 % more")):
        store.path.unlink(missing_ok=True)
        batched = Batched("auto", cache=store)
        with fake_card(100.0, batched_ms, 100.0, batched_ms):
            batched.sample(steps=8)
        assert batched.prompts() == [*MEASURED, 1, 1, 1, 1]
        assert f"one batched pass takes {words} time on this card" in batched.line
        assert "has to save 3 %" in batched.line
        with fake_card():
            assert torch.equal(sample(STOCK, steps=2), batched.sample(steps=2))


def check_auto_decides_at_the_end_of_a_run_that_was_just_long_enough():
    batched = Batched("auto", cache=cache())
    with fake_card(100.0, 80.0, 100.0, 80.0):
        batched.sample(steps=6)
    assert batched.prompts() == MEASURED
    assert "20.0 % less time" in batched.line
    with fake_card():
        batched.sample(steps=2)
    assert batched.prompts() == [2, 2]


def check_auto_decides_nothing_from_times_that_vary():
    batched = Batched("auto", cache=cache())
    for _ in range(2):
        with fake_card(100.0, 80.0, 120.0, 80.0):
            batched.sample(steps=8)
        assert batched.prompts() == [*MEASURED, 1, 1, 1, 1]
        assert "differ by 20 %" in batched.line


def check_auto_stays_separate_in_a_short_run():
    batched = Batched("auto", cache=cache())
    with fake_card():
        assert torch.equal(sample(STOCK, steps=5), batched.sample(steps=5))
    assert "5 steps are too few to measure in, which takes 6" in batched.line


def check_steps_that_another_node_answers_are_not_timed():
    batched = Batched("auto", cache=cache())
    steps = []

    def lazy(executor, model, conds, x, *args, **kwargs):
        steps.append(1)
        if len(steps) % 2 == 0:
            return [torch.zeros_like(x) for _ in conds]
        return executor(model, conds, x, *args, **kwargs)

    batched.model.add_wrapper_with_key(WrappersMP.CALC_COND_BATCH, "lazy", lazy)
    with fake_card(*[100.0] * 12):
        batched.sample(steps=8)
    assert batched.prompts() == [1, 1, 1, 1, 2, 2]
    assert "ended before separate and batched passes were timed" in batched.line


def check_a_split_batch_ends_the_measurement():
    batched = Batched("auto", cache=cache())
    with fake_card(100.0), little_memory():
        batched.sample(steps=8)
    assert batched.prompts() == [1] * 16
    assert "too little free memory" in batched.line
    assert not (FOLDER / "cfg_batching.json").exists()


def check_auto_under_torch_compile():
    from comfy_api.torch_helpers import set_torch_compile_wrapper

    batched = Batched("auto", cache=cache())
    batched.model = batched.model.clone(disable_dynamic=True)
    key = "diffusion_model.transformer_blocks.1"
    set_torch_compile_wrapper(batched.model, backend="eager", keys=[key])
    with fake_card():
        batched.sample(steps=8)
    assert "torch.compile" in batched.line
    assert set(batched.prompts()) == {1}


def check_auto_here():
    """Without stand-ins: off on a processor, a decision on a card."""
    batched = Batched("auto", cache=cache())
    assert batched.line == ("cfg: prompts of different lengths are batched where that is faster")
    assert_same(sample(STOCK, steps=8), batched.sample(steps=8))
    if MODE == "cpu":
        assert batched.line == f"{cfg_batching.OWN}: nothing is measured on cpu"
        assert batched.prompts() == [1] * 16
    else:
        assert batched.prompts()[:9] == MEASURED, batched.prompts()
        assert "time on this card" in batched.line or "differ by" in batched.line, batched.line


comfyui_boot.run_checks(globals())
