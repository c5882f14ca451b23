"""The step cache in diffusers, with the bundled micro model: against the same run without it."""

from types import SimpleNamespace

import pytest
import torch
from PIL import Image

pytest.importorskip("diffusers")

from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    QwenImageControlNetModel,
    QwenImageControlNetPipeline,
    QwenImageEditPlusPipeline,
    QwenImageImg2ImgPipeline,
)
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus as edit_plus

from qwen_l40s.hosts.diffusers.load import LoadedPipeline, load_pipeline
from qwen_l40s.hosts.diffusers.sample import Generation, generate, sample
from qwen_l40s.hosts.diffusers.settings import GenerateSettings
from qwen_l40s.hosts.diffusers.step_cache import cache_steps
from qwen_l40s.loaders.source import bundled_micro_folder
from qwen_l40s.planning.step_cache import PRESETS, computed_steps

pytestmark = pytest.mark.usefixtures("one_thread")

STAR = "a small red star at the top left on a blue background"
CIRCLE = "a large green circle at the top left on a black background"
STEPS = 20
# Smaller ones are too far from what the model was trained at: its forecasts are refused.
SIDE = 128
TOKENS = (SIDE // 16) ** 2


@pytest.fixture(scope="module")
def micro() -> LoadedPipeline:
    return load_pipeline(bundled_micro_folder(), precision="fp32", device="cpu")


@pytest.fixture
def pipe(micro):
    return quiet(micro.to_diffusers())


def quiet(pipe):
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture
def calls(monkeypatch) -> list[tuple[int, ...]]:
    from diffusers import QwenImageTransformer2DModel

    seen = []
    forward = QwenImageTransformer2DModel.forward

    def counted(self, hidden_states, *args, **kwargs):
        seen.append(tuple(hidden_states.shape))
        return forward(self, hidden_states, *args, **kwargs)

    monkeypatch.setattr(QwenImageTransformer2DModel, "forward", counted)
    return seen


def settings(**changes) -> GenerateSettings:
    values = {"prompt": STAR, "width": SIDE, "height": SIDE, "steps": STEPS, "cache": "balanced"}
    return GenerateSettings(**values | changes)


def run(pipeline: LoadedPipeline, callback=None, **changes) -> torch.Tensor:
    return sample(pipeline, settings(**changes), progress=False, callback=callback)


def made(pipeline: LoadedPipeline, **changes) -> Generation:
    return generate(pipeline, **vars(settings(**changes)), progress=False)


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return ((ours.double() - theirs.double()).norm() / theirs.double().norm()).item()


def hung_on(*objects: object) -> list[dict]:
    return [{name: vars(it).get(name) for name in ("forward", "step")} for it in objects]


# --- what is skipped, and how near the picture is ---


def test_computed_steps_alone_call_the_transformer(micro, calls):
    from accelerate.hooks import ModelHook, add_hook_to_module

    fast = load_pipeline(bundled_micro_folder(), precision="fp32", device="cpu", optimized=True)
    for pipeline, cfg, batch, name, hooked in (
        (micro, 1.0, 1, "faithful", False),
        (micro, 4.0, 2, "fast", False),
        (fast, 4.0, 1, "balanced", False),
        (fast, 4.0, 1, "balanced", True),
    ):
        if hooked:  # as whole models are that accelerate moves
            add_hook_to_module(pipeline.transformer, ModelHook())
        del calls[:]
        cached = made(pipeline, cfg=cfg, batch=batch, cache=name).cached
        assert cached.computed == computed_steps(STEPS, name) == STEPS - len(cached.skipped)
        assert calls == [(batch, TOKENS, 64)] * cached.computed * (2 if cfg > 1 else 1)
        assert not cached.forgotten
    assert f"in {2 * computed_steps(STEPS, 'balanced')} forward passes" in fast.optimized.report()


@pytest.mark.slow
def test_latent_is_nearer_than_that_of_as_many_plain_steps(micro):
    uncached = run(micro, cache="off")
    before = 0.0
    for name in PRESETS:
        error = relative(run(micro, cache=name), uncached)
        plain = run(micro, cache="off", steps=computed_steps(STEPS, name))
        assert before < error < min(0.03, 0.7 * relative(plain, uncached))
        before = error
    cached = made(micro).cached
    assert 0 < max(cached.missed) < 0.1
    assert 0 < cached.distance < 0.05


# --- nothing stays ---


def painted(pipe, prompt=STAR, **more) -> torch.Tensor:
    about = {"negative_prompt": " ", "true_cfg_scale": 4.0, "num_inference_steps": STEPS}
    about |= {"width": SIDE, "height": SIDE, "output_type": "latent"}
    generator = torch.Generator().manual_seed(0)
    return pipe(prompt=prompt, generator=generator, **about | more).images


@pytest.mark.slow
def test_no_state_goes_from_run_to_run(pipe):
    before = hung_on(pipe.transformer, pipe.scheduler)
    plain = painted(pipe)

    def stop(_pipe, step, *_call):
        if step == 12:
            raise KeyboardInterrupt
        return {}

    with cache_steps(pipe, "balanced") as cached:
        assert "no run has finished" in cached.report()
        star = painted(pipe)
        with pytest.raises(KeyboardInterrupt):
            painted(pipe, CIRCLE, callback_on_step_end=stop)
        assert cached.figures is None
        circle = painted(pipe, CIRCLE)
        assert "step cache: balanced computes 14 of 20 steps" in cached.report()
    assert hung_on(pipe.transformer, pipe.scheduler) == before
    for prompt, latents in ((STAR, star), (CIRCLE, circle)):
        with cache_steps(pipe, "balanced"):
            assert torch.equal(painted(pipe, prompt), latents)
    with pytest.raises(KeyboardInterrupt), cache_steps(pipe, "balanced"):
        painted(pipe, callback_on_step_end=stop)
    with cache_steps(pipe, "off") as cached:
        assert hung_on(pipe.transformer, pipe.scheduler) == before
        assert torch.equal(painted(pipe), plain)
    assert (cached.report(), cached.figures) == ("step cache: off", None)
    assert hung_on(pipe.transformer, pipe.scheduler) == before
    assert torch.equal(painted(pipe), plain)


def test_prompt_that_a_callback_exchanges_is_computed(micro, pipe):
    after, _ = pipe.encode_prompt(CIRCLE)
    skipped = made(micro).cached.skipped

    def exchange(_pipe, step, *_call):
        return {"prompt_embeds": after} if step == skipped[1] - 1 else {}

    with cache_steps(pipe, "balanced") as cached:
        painted(pipe, callback_on_step_end=exchange)
    assert cached.figures.forgotten == 1
    assert cached.figures.skipped[:2] == [skipped[0], skipped[2]]


# --- other pipelines and schedulers ---


def test_reference_images_behind_the_latent(pipe, calls, monkeypatch):
    for size in ("VAE_IMAGE_SIZE", "CONDITION_IMAGE_SIZE"):
        monkeypatch.setattr(edit_plus, size, SIDE * SIDE)
    stock, parts = pipe, {name: part for name, part in pipe.components.items() if part is not None}
    pipe = quiet(QwenImageEditPlusPipeline(**parts, processor=None))
    given = {"image": Image.new("RGB", (SIDE, SIDE), "red")}
    for name, prompt in (("", STAR), ("negative_", " ")):
        embeds, mask = stock.encode_prompt(prompt)
        given |= {f"{name}prompt_embeds": embeds, f"{name}prompt_embeds_mask": mask}
    plain = painted(pipe, None, negative_prompt=None, **given)
    del calls[:]
    with cache_steps(pipe, "balanced") as cached:
        ours = painted(pipe, None, negative_prompt=None, **given)
    assert calls == [(1, 2 * TOKENS, 64)] * 2 * 14
    assert (cached.figures.computed, cached.figures.forgotten) == (14, 0)
    assert 0 < relative(ours, plain) < 0.03


def test_controlnet_is_skipped_with_the_transformer(micro, pipe, calls):
    net = QwenImageControlNetModel.from_transformer(
        micro.transformer, num_layers=1, attention_head_dim=32, num_attention_heads=4
    ).eval()
    for weight in net.controlnet_blocks.parameters():  # which begin as zeros
        weight.data.fill_(1e-3)
    control = []
    net.register_forward_hook(lambda *call: control.append(len(call[2])))
    pipe = quiet(QwenImageControlNetPipeline(**pipe.components, controlnet=net))
    given = {"control_image": Image.new("RGB", (SIDE, SIDE), "red")}
    before = hung_on(net)
    plain = painted(pipe, **given)
    with cache_steps(pipe, "balanced") as cached:
        ours = painted(pipe, **given)
    assert len(calls) == 2 * (STEPS + cached.figures.computed)
    assert control.count(0) == len(cached.figures.skipped) > 0 == cached.figures.forgotten
    assert 0 < relative(ours, plain) < 0.03
    first = cached.figures.skipped[0]
    with cache_steps(pipe, "balanced") as cached:
        painted(pipe, **given, control_guidance_end=(first + 0.5) / STEPS)
    assert cached.figures.forgotten == 1
    assert first not in cached.figures.skipped
    assert hung_on(net) == before


def test_run_that_begins_in_mid_schedule(pipe):
    pipe = quiet(QwenImageImg2ImgPipeline(**pipe.components))
    given = {"image": Image.new("RGB", (SIDE, SIDE), "blue"), "strength": 0.7}
    plain = painted(pipe, **given, num_inference_steps=30)
    with cache_steps(pipe, "balanced") as cached:
        ours = painted(pipe, **given, num_inference_steps=30)
    assert (cached.figures.steps, cached.figures.forgotten) == (21, 0)
    assert cached.figures.computed < 21
    assert 0 < relative(ours, plain) < 0.03


def test_pass_that_holds_both_branches_of_guidance():
    class Model(torch.nn.Module):
        calls = 0

        def forward(self, hidden_states, encoder_hidden_states, return_dict=True):
            self.calls += 1
            return SimpleNamespace(sample=hidden_states * encoder_hidden_states)

    model, scheduler = Model(), FlowMatchEulerDiscreteScheduler()
    prompts = torch.tensor([0.4, 0.2]).view(2, 1, 1)

    def loop():
        scheduler.set_timesteps(STEPS)
        x = torch.ones(1, 6, 4)
        for time in scheduler.timesteps:
            both = model(hidden_states=torch.cat([x, x]), encoder_hidden_states=prompts).sample
            positive, negative = both.chunk(2)
            velocity = negative + 4 * (positive - negative)
            x = scheduler.step(model_output=velocity, timestep=time, sample=x).prev_sample
        return x

    plain = loop()
    with cache_steps(SimpleNamespace(transformer=model, scheduler=scheduler), "fast") as cached:
        ours = loop()
    assert model.calls == STEPS + cached.figures.computed
    assert cached.figures.computed == STEPS - len(cached.figures.skipped) < STEPS
    assert 0 < relative(ours, plain) < 0.03


def test_a_cache_of_diffusers_has_every_step_computed(pipe, monkeypatch):
    monkeypatch.setattr(pipe.transformer, "_cache_config", object())
    with cache_steps(pipe, "fast") as cached:
        painted(pipe)
    assert cached.figures.computed == cached.figures.steps
    assert cached.report().endswith("a cache of diffusers is on the transformer")
