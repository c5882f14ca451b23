"""bench/step_cache's EasyCache and LazyCache, beside ComfyUI's own wrappers on a toy model."""

import math
from functools import partial
from itertools import pairwise

import comfy.model_sampling
import torch
from comfy_extras import nodes_easycache

from qwen_l40s.bench.step_cache.rules import EasyCache, LazyCache
from qwen_l40s.bench.step_cache.run import CFG, Found, sample
from qwen_l40s.step_cache import usual_sigmas

SIGMAS = usual_sigmas(50, 256)
THRESHOLDS = (0.02, 0.05, 0.2, 0.5)


class Sampling(comfy.model_sampling.ModelSamplingDiscreteFlow, comfy.model_sampling.CONST):
    pass


def branches(x, sigma):
    prompt = torch.tanh(x) * math.cos(2 * sigma) + math.sin(6 * sigma)
    return prompt, 0.8 * prompt + 0.1 * x


class Toy:
    def compute(self, x, sigma, rows):
        velocity = torch.stack(branches(x, sigma), 1)
        return Found(velocity, velocity, velocity[:, 0])


def noise():
    return torch.randn(1, 16, 32, 32, generator=torch.Generator().manual_seed(0))


def holder(kind, threshold):
    sampling = Sampling()
    sampling.set_parameters(shift=1.15, multiplier=1.0)
    node = kind(threshold, 0.15, 0.95, 8, False, output_channels=16)
    return node.clone().prepare_timesteps(sampling)


def easily(threshold):
    """(latent, computed branches) with EasyCache; both branches have their own call."""
    node, calls, x = holder(nodes_easycache.EasyCacheHolder, threshold), [], noise()
    for sigma, following in pairwise(SIGMAS):
        node.skip_current_step = False
        outputs = []
        for branch in (0, 1):

            def model(x, *_arguments, sigma=sigma, branch=branch):
                calls.append(branch)
                return branches(x, sigma)[branch]

            at = torch.tensor([sigma])
            options = {"easycache": node, "uuids": [branch], "sigmas": at}
            # The wrapper writes into its input.
            outputs.append(nodes_easycache.easycache_forward_wrapper(model, x.clone(), at, options))
        x = x + (following - sigma) * (outputs[1] + CFG * (outputs[0] - outputs[1]))
    return x, len(calls) / 2


def lazily(threshold):
    node, calls, x = holder(nodes_easycache.LazyCacheHolder, threshold), [], noise()
    options = {"transformer_options": {"easycache": node}}
    for sigma, following in pairwise(SIGMAS):

        def model(x, *_arguments, sigma=sigma):
            calls.append(sigma)
            prompt, negative = branches(x, sigma)
            return x - sigma * (negative + CFG * (prompt - negative))

        at = torch.tensor([sigma])
        denoised = nodes_easycache.lazycache_predict_noise_wrapper(model, x, at, options)
        x = x + (following - sigma) * (x - denoised) / sigma
    return x, len(calls)


def test_they_skip_the_same_steps_and_end_at_the_same_latent():
    for theirs, ours in ((easily, EasyCache), (lazily, LazyCache)):
        counts = []
        for threshold in THRESHOLDS:
            latent, computed = theirs(threshold)
            found = sample(Toy(), SIGMAS, noise(), partial(ours, threshold=threshold))
            assert found.computed.item() == computed
            torch.testing.assert_close(found.x, latent, rtol=1e-5, atol=1e-5)
            counts.append(computed)
        assert counts == sorted(set(counts), reverse=True)
        assert counts[-1] <= 24
