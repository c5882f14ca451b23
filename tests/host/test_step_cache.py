"""The step cache in ComfyUI's sampling: what it skips, and what it leaves alone."""

import functools
import gc
from collections.abc import Callable
from typing import Any, NamedTuple

import comfy.controlnet
import comfy.hooks
import comfy.samplers
import comfy.sd
import narrow_transformer as narrow
import node_helpers
import pytest
import torch
from comfy.model_management import InterruptProcessingException
from comfy.patcher_extension import WrappersMP
from comfy_extras.nodes_apg import APG
from comfy_extras.nodes_cfg import CFGNorm
from comfy_extras.nodes_differential_diffusion import DifferentialDiffusion
from comfy_extras.nodes_easycache import EasyCacheNode, LazyCacheNode
from comfy_extras.nodes_model_advanced import ModelSamplingAuraFlow, ModelSamplingDiscrete
from comfyui_boot import ROOT

from qwen_l40s.hosts.comfyui.load.text_encoder import load_text_encoder
from qwen_l40s.hosts.comfyui.load.transformer import load_model
from qwen_l40s.hosts.comfyui.sample.cfg_norm import rescale_by_token
from qwen_l40s.hosts.comfyui.sample.optimize import optimize
from qwen_l40s.hosts.comfyui.sample.run import STEP_CACHE_KEY
from qwen_l40s.hosts.comfyui.sample.step_cache import cache_steps
from qwen_l40s.optimizations.step_cache import CachedRun
from qwen_l40s.planning.options import label_of
from qwen_l40s.planning.step_cache import PRESETS, CacheSettings, plan_steps

pytestmark = pytest.mark.usefixtures("inference_mode")
MICRO = ROOT / "models" / "micro"
STEPS = 20
# So far below the size that the micro model was trained at, forecasts with more miss by too much.
CFG = 1.1
BALANCED = PRESETS["balanced"]
# Skips what it can from the first step that may be.
EAGER = CacheSettings(budget=1, head=0, tail=0, longest=8)
AREA = (slice(None), slice(None), slice(None), slice(0, 4))


class Run(NamedTuple):
    """A sampling run: the final latent, the callback's x at each step, which steps called the
    model, how many forward passes they took, and what the cache says.
    """

    latent: torch.Tensor
    path: list[torch.Tensor]
    computed: set[int]
    passes: int
    lines: list[str]

    @property
    def skipped(self) -> set[int]:
        return {*range(len(self.path))} - self.computed


@functools.cache
def model():
    return load_model(MICRO)[0]


def lora():
    weights = model().model.diffusion_model.state_dict()
    return narrow.lora(weights, ["transformer_blocks.0.attn.to_q"])


@functools.cache
def prompt(text: str = "a large green circle at the bottom right on a white background"):
    clip = load_text_encoder(MICRO)[0]
    return clip.encode_from_tokens_scheduled(clip.tokenize(text))


def between(start: float, end: float, conds=None):
    """A prompt, or another one's, for a part of the schedule."""
    values = {"start_percent": start, "end_percent": end}
    return node_helpers.conditioning_set_values(prompt() if conds is None else conds, values)


def schedule(steps: int = STEPS, denoise: float = 1.0, patcher=None) -> torch.Tensor:
    cpu = torch.device("cpu")
    return comfy.samplers.KSampler(patcher or model(), steps, cpu, denoise=denoise).sigmas


def random(seed: int = 3, side: int = 8, batch: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, 16, 1, side, side, generator=generator)


def cached(settings: CacheSettings = BALANCED, patcher=None):
    return cache_steps(patcher or model(), settings)


def sample(
    patcher,
    sigmas: torch.Tensor | None = None,
    *,
    sampler: str = "euler",
    positive: Any = None,
    noise: torch.Tensor | None = None,
    latent: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    at_step: Callable[[int, Any], None] = lambda step, guider: None,
    guider_class: type = comfy.samplers.CFGGuider,
) -> Run:
    """One run, of 20 steps at 64 x 64 unless told; `at_step` is called in each step's callback."""
    counted, passes, path, computed = patcher.clone(), [], [], set()

    def count(executor: Any, *args: Any, **kwargs: Any) -> Any:
        passes.append(len(args[0]))
        computed.add(len(path))
        return executor(*args, **kwargs)

    def callback(step: int, x0: torch.Tensor, x: torch.Tensor, total: int) -> None:
        path.append(x.clone())
        at_step(step, guider)

    counted.add_wrapper_with_key(WrappersMP.APPLY_MODEL, "count", count)
    guider = guider_class(counted)
    # Prompts of different lengths never batch: each evaluation takes two passes.
    guider.set_conds(prompt() if positive is None else positive, prompt(" "))
    guider.set_cfg(CFG)
    noise = random() if noise is None else noise
    found = guider.sample(
        noise,
        torch.zeros_like(noise) if latent is None else latent,
        comfy.samplers.sampler_object(sampler),
        schedule(patcher=patcher) if sigmas is None else sigmas,
        denoise_mask=mask,
        callback=callback,
        disable_pbar=True,
        seed=3,
    )
    cache = counted.get_attachment(STEP_CACHE_KEY)
    return Run(found, path, computed, len(passes), [] if cache is None else cache.lines())


def same(found: Run, known: Run) -> bool:
    """Bit for bit at each step; what is not a number counts as itself."""
    pairs = zip([*found.path, found.latent], [*known.path, known.latent], strict=True)
    return all(torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in pairs)


def error(found: Run, known: Run) -> float:
    return float((found.latent - known.latent).norm() / known.latent.norm())


def test_off_and_with_no_step_to_skip_nothing_changes():
    plain = sample(model())
    assert plain.passes == 2 * STEPS and not plain.lines
    idle = CacheSettings(budget=0)
    for other in (cache_steps(model(), None), cache_steps(cached(), None), cached(idle, cached())):
        assert same(sample(other), plain)
    assert "custom has no effect: no step" in sample(cached(idle)).lines[0]
    assert not cache_steps(cached(), None).wrappers[WrappersMP.PREDICT_NOISE].get("qwen_l40s_steps")


def test_it_is_the_same_up_to_the_first_skip_and_near_after():
    plain = sample(model())
    for name, settings in PRESETS.items():
        run = sample(cached(settings))
        plan = plan_steps(schedule().tolist(), settings)
        assert [step in run.skipped for step in range(STEPS)] == [*plan.skipped], run.lines
        assert run.passes == 2 * plan.computed
        unchanged = [torch.equal(*pair) for pair in zip(run.path, plain.path, strict=True)]
        # A callback has the latent that a step begins with.
        assert unchanged == [step <= min(run.skipped) for step in range(STEPS)], name
        assert 0 < error(run, plain) < error(sample(model(), schedule(plan.computed)), plain)
        assert (
            f"{label_of('cache', name)} computes {plan.computed} of {STEPS} steps" in run.lines[0]
        )


def test_its_place_among_other_nodes_does_not_matter():
    weights = lora()

    def with_lora(patcher):
        return comfy.sd.load_lora_for_models(patcher, None, weights, 1.0, 0)[0]

    def shifted(patcher):
        return ModelSamplingAuraFlow().patch_aura(patcher, 1.5)[0]

    for patch in (optimize, with_lora, rescale_by_token, shifted):
        after, before = sample(cached(patcher=patch(model()))), sample(patch(cached()))
        assert after.skipped and same(after, before), patch
        assert not same(after, sample(cached())) and not same(after, sample(patch(model())))
    faithful = PRESETS["faithful"]
    assert same(sample(cached(faithful, cached())), sample(cached(faithful)))


def test_image_to_image_and_runs_that_are_too_short():
    latent = random(4)
    for steps, denoise in ((40, 0.5), (20, 0.1)):
        sigmas = schedule(steps, denoise)
        run = sample(cached(), sigmas, latent=latent)
        assert run.passes == 2 * plan_steps(sigmas.tolist(), BALANCED).computed < 2 * steps
        assert 0 < error(run, sample(model(), sigmas, latent=latent)) < 0.02
    for steps in (1, 4, 10):
        run = sample(cached(EAGER), schedule(steps))
        assert same(run, sample(model(), schedule(steps)))
        assert "custom has no effect: runs of 10 steps" in run.lines[0]
    plan = plan_steps(torch.linspace(1, 0, 20_001).tolist(), BALANCED)
    assert plan.computed == 20_000 and "more than 250" in plan.reason


def test_inpainting_is_watched_where_it_paints():
    latent, mask = random(4), torch.zeros(1, 1, 8, 8)
    mask[AREA] = 1
    gradient = torch.linspace(0, 1, 8).repeat(8, 1)[None, None]
    differential = DifferentialDiffusion.execute(model()).result[0]
    for patcher, given in ((model(), mask), (differential, gradient)):
        run = sample(cached(patcher=patcher), latent=latent, mask=given)
        assert run.passes == 2 * plan_steps(schedule().tolist(), BALANCED).computed, run.lines
        plain = sample(patcher, latent=latent, mask=given)
        fewer = sample(patcher, schedule(len(run.computed)), latent=latent, mask=given)
        assert 0 < error(run, plain) < error(fewer, plain)
    run = sample(cached(), latent=latent, mask=gradient * 0.9)
    assert same(run, sample(model(), latent=latent, mask=gradient * 0.9))
    assert "the mask has no area" in run.lines[0]


class Control(comfy.controlnet.ControlBase):
    """A ControlNet that gives nothing."""

    def get_control(self, x_noisy, t, cond, batched_number, transformer_options):
        return {"input": [], "output": []}


def test_steps_around_the_edge_of_a_prompt_or_a_controlnet_are_computed():
    control = Control()
    control.timestep_percent_range = (0.0, 0.5)
    first = Control()
    first.set_previous_controlnet(control)
    both = [*between(0, 0.5), *between(0.5, 1, prompt("a small red square"))]
    for name, positive in (
        ("prompt", both),
        ("control", node_helpers.conditioning_set_values(prompt(), {"control": first})),
    ):
        run = sample(cached(EAGER), positive=positive)
        edge = model().get_model_object("model_sampling").percent_to_sigma(0.5)
        begins = int((schedule() > edge).sum())
        assert {begins, begins + 1} <= run.computed, name
        assert run.skipped & {begins - 2, begins - 1}, run.skipped
        if name == "prompt":
            assert not same(run, sample(cached(EAGER)))
    # The edge is where the MODEL's own shift puts it.
    shifted = ModelSamplingAuraFlow().patch_aura(model(), 9.0)[0]
    run = sample(cached(EAGER, shifted), positive=both)
    edge = shifted.get_model_object("model_sampling").percent_to_sigma(0.5)
    begins = int((schedule(patcher=shifted) > edge).sum())
    assert {begins, begins + 1} <= run.computed and run.skipped & {begins - 2, begins - 1}


def test_what_it_steps_aside_for():
    weights = lora()
    patched, _, hooks = comfy.hooks.load_hook_lora_for_models(model(), None, weights, 1.0, 0.0)
    frames = comfy.hooks.HookKeyframeGroup()
    frames.add(comfy.hooks.HookKeyframe(1.0))
    frames.add(comfy.hooks.HookKeyframe(0.0, start_percent=0.5))
    hooks.set_keyframes_on_hooks(frames)
    hooked = comfy.hooks.set_hooks_for_conditioning(prompt(), hooks)
    easy = EasyCacheNode.execute(model(), 0.2, 0.15, 0.95, False).result[0]
    lazy = LazyCacheNode.execute(model(), 0.2, 0.15, 0.95, False).result[0]
    discrete = ModelSamplingDiscrete().patch(model(), "eps", False)[0]
    sigmas = schedule()
    for patcher, positive, reason in (
        (patched, hooked, "hooks change the weights during the run"),
        (easy, prompt(), "another cache is on the MODEL: easycache"),
        (lazy, prompt(), "another cache is on the MODEL: easycache, lazycache"),
        (discrete, prompt(), "the model is not a rectified flow"),
    ):
        run = sample(cached(EAGER, patcher), sigmas, positive=positive)
        assert same(run, sample(patcher, sigmas, positive=positive)), reason
        assert len(run.lines) == 1 and f"no effect: {reason}" in run.lines[0], run.lines


def test_samplers_that_it_refuses_are_not_changed():
    for sampler, reason in {
        **dict.fromkeys(("heun", "dpm_2", "seeds_2"), "the sampler calls the model at sigma"),
        **dict.fromkeys(("euler_cfg_pp", "dpmpp_2m_cfg_pp"), "uses a step's prompts separately"),
        **dict.fromkeys(
            ("euler_ancestral", "dpmpp_2m_sde", "ddpm", "lcm", "er_sde"), "the sampler adds noise"
        ),
    }.items():
        run, plain = sample(cached(EAGER), sampler=sampler), sample(model(), sampler=sampler)
        assert same(run, plain), sampler
        assert len(run.lines) == 1 and reason in run.lines[0], run.lines
    for sampler in ("ddim", "dpmpp_2m", "res_multistep", "deis", "ipndm"):
        assert sample(cached(), sampler=sampler).skipped, sampler


def test_guidance_that_changes_in_mid_run_begins_anew():
    def change(step, guider):
        if step == 9:
            guider.cfg = 1.3

    run, plain = sample(cached(EAGER), at_step=change), sample(model(), at_step=change)
    assert {10, 11} <= run.computed and {9, 12} <= run.skipped, run.skipped
    assert not same(run, sample(cached(EAGER))) and error(run, plain) < 0.1


class CountingGuider(comfy.samplers.CFGGuider):
    """Counts its steps, as other packs' guiders do that change something in a later one."""

    def __init__(self, patcher):
        super().__init__(patcher)
        self.step = 0

    def __call__(self, *args, **kwargs):
        self.step += 1
        return super().__call__(*args, **kwargs)


def test_a_guider_that_counts_its_steps_is_no_other_guidance():
    counters = []
    run = sample(
        cached(),
        guider_class=CountingGuider,
        at_step=lambda step, guider: counters.append(guider.step),
    )
    assert counters == [*range(1, STEPS + 1)]
    assert run.skipped and same(run, sample(cached())), run.lines


def with_apg(momentum):
    return APG.execute(model(), 1.0, 5.0, momentum).result[0]


def with_function(add, function):
    patcher = model().clone()
    getattr(patcher, add)(function)
    return patcher


def test_it_steps_aside_for_guidance_that_remembers_earlier_steps():
    """A step that is skipped would not come into its average."""
    average, options = {}, "set_model_sampler_post_cfg_function"

    def averaged(args):
        average["of all"] = (average.get("of all", 0) + args["denoised"]) / 2
        return average["of all"]

    for make in (lambda: with_apg(0.3), lambda: with_function(options, averaged)):
        average.clear()
        plain = sample(make())
        average.clear()
        run = sample(cached(patcher=make()))
        assert same(run, plain)
        assert "balanced has no effect: guidance uses earlier steps" in run.lines[0]

    kept_once = []

    def logged(args):
        logged.sigma = args["sigma"]
        if not kept_once:
            kept_once.append(torch.ones_like(args["denoised"]))
        return args["denoised"] * kept_once[0]

    others = CFGNorm.execute(model(), 0.9).result[0], with_function(options, logged)
    for patcher in (with_apg(0.0), *others):
        run = sample(cached(patcher=patcher))
        assert run.skipped and "estimated difference" in "\n".join(run.lines), run.lines


def test_of_prompts_that_are_combined_nothing_is_estimated():
    other = prompt("a small red star at the top left on a blue background")
    for positive, told in (
        ([*prompt(), *other], True),
        ([*between(0, 0.6), *between(0.4, 1, other)], True),
        ([*between(0, 0.5), *between(0.5, 1, other)], False),
    ):
        run = sample(cached(), positive=positive)
        assert run.skipped and ("estimated difference" in "\n".join(run.lines)) != told


def test_no_run_knows_of_another():
    """Of another prompt, size or batch, of one that was aborted, and of one that runs inside."""
    patcher, other = cached(), prompt("a small red square")
    first, second = sample(patcher), sample(patcher, positive=other)
    assert same(first, sample(cached())) and same(second, sample(cached(), positive=other))
    inside = []

    def abort(step, guider):
        if step == 10:
            raise InterruptProcessingException

    def nested(step, guider):
        if step == 10:
            owner = model().model.current_patcher
            inside.append(sample(patcher, positive=other))
            model().model.current_patcher = owner  # which ComfyUI forgets

    with pytest.raises(InterruptProcessingException):
        sample(patcher, positive=other, at_step=abort)
    assert same(sample(patcher), first)
    assert same(sample(patcher, at_step=nested), first) and same(inside[0], second)
    large = sample(patcher, noise=random(side=12))
    assert large.skipped and same(large, sample(cached(), noise=random(side=12)))
    pair = sample(patcher, noise=random(batch=2))
    assert pair.skipped == first.skipped and pair.passes == first.passes
    alone = sample(patcher, noise=random(batch=2)[1:])
    assert float((pair.latent[1:] - alone.latent).norm() / alone.latent.norm()) < 1e-3
    assert same(sample(patcher.clone(force_deepcopy=True)), first)
    assert same(sample(patcher.deepclone_multigpu(torch.device("cpu"))), first)


def test_nothing_is_left_after_a_run():
    def runs():
        gc.collect()
        return [item for item in gc.get_objects() if type(item) is CachedRun]

    patcher, within = cached(), []
    sample(patcher, at_step=lambda step, guider: step == 9 and within.append(len(runs())))
    assert within == [1] and not runs()
    with pytest.raises(ZeroDivisionError):
        sample(patcher, at_step=lambda step, guider: 1 / (9 - step))
    assert not runs()
