"""A prompt that all steps get as the same tensors, against what ComfyUI gives each step."""

from unittest import mock

import comfy.sample
import narrow_21
import narrow_transformer as narrow
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from qwen_l40s.hosts.comfyui.sample import run
from qwen_l40s.hosts.comfyui.sample.optimize import OptimizeSettings, optimize

pytestmark = [pytest.mark.usefixtures("inference_mode"), pytest.mark.each_device]
NEWER = pytest.mark.host_has("comfy.model_base.QwenImage21")


def prompt(width, tokens, seed, refs=0):
    generator = torch.Generator().manual_seed(seed)
    text = torch.randn(1, tokens, width, generator=generator)
    if not refs:
        return [[text, {}]]
    latents = [torch.randn(1, 64, 4, 4, generator=generator) for _ in range(refs)]
    return [
        [text, {"reference_latents": latents, "image_slots": [3 * (it + 1) for it in range(refs)]}]
    ]


def sample(model, positive, negative, channels=64, cfg=4.0, steps=4):
    latent = torch.zeros(1, channels, *(() if channels == 64 else (1,)), 4, 4)
    noise = comfy.sample.prepare_noise(latent, 3)
    given = noise, steps, cfg, "euler", "simple", positive, negative, latent
    return comfy.sample.sample(model, *given, denoise=1.0, seed=3, disable_pbar=True)


def as_comfyui(*given, **named):
    with mock.patch.object(run, "alone", lambda options: False):
        return sample(*given, **named)


class Lookups(TorchDispatchMode):
    """Counts how often a key of ComfyUI's prefix cache is compared with one that is kept."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten.equal.default and args[0].dim() == 2
        return function(*args, **kwargs or {})


@NEWER
@pytest.mark.parametrize("refs", [0, 2])
@pytest.mark.parametrize("tokens", [7, 9], ids=["of one length", "of two lengths"])
def test_a_prompt_is_looked_up_once(refs, tokens):
    model = optimize(narrow_21.model_21(), OptimizeSettings())
    prompts = prompt(96, 7, 1, refs), prompt(96, tokens, 2, refs)
    sample(model, *prompts)
    with Lookups() as theirs:
        exact = as_comfyui(model, *prompts)
    with Lookups() as ours:
        assert torch.equal(sample(model, *prompts), exact)
    assert theirs.count >= 3 and ours.count <= 1
    # Another prompt in the next run has another key.
    other = prompt(96, 7, 5, refs), prompts[1]
    found = sample(model, *other)
    assert torch.equal(found, as_comfyui(model, *other)) and not torch.equal(found, exact)


def test_steps_of_qwen_image_get_the_same_text():
    model = optimize(narrow.stock(narrow.weights()), OptimizeSettings())
    prompts = prompt(64, 7, 1), prompt(64, 9, 2)
    seen, transformer = [], type(model.model.diffusion_model)
    own = transformer.forward

    def forward(self, x, timesteps, context, *given, **named):
        seen.append(context)
        return own(self, x, timesteps, context, *given, **named)

    exact = as_comfyui(model, *prompts, channels=16)
    with mock.patch.object(transformer, "forward", forward):
        assert torch.equal(sample(model, *prompts, channels=16), exact)
    assert len({id(it) for it in seen}) < len(seen)


@NEWER
def test_a_pack_that_changes_what_a_step_gets_is_heard():
    model = optimize(narrow_21.model_21(), OptimizeSettings()).clone()
    prompts = prompt(96, 7, 1), prompt(96, 7, 2)
    plain = sample(model, *prompts)

    def later(executor, x, t, context, *given, **named):
        context.mul_(1.5)  # in place, each step
        return executor(x, t, context, *given, **named)

    model.add_wrapper_with_key("diffusion_model", "another pack", later)
    changed = sample(model, *prompts)
    assert torch.equal(changed, as_comfyui(model, *prompts))
    assert not torch.equal(changed, plain)
    model.remove_wrappers_with_key("diffusion_model", "another pack")
    assert torch.equal(sample(model, *prompts), plain)
