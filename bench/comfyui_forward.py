"""One forward pass through ComfyUI, called from inside a sampling run as its samplers call it.

A sampler of our own stands where `euler` would: everything around it is ComfyUI's, so that patches,
wrappers and callbacks of a patcher apply as they do in a workflow. Stock ComfyUI and this package
go through the same code and differ in the patcher alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import comfy.patcher_extension
import comfy.samplers
import torch
import torch.nn.functional as F
from comfy.model_patcher import ModelPatcher
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..hosts.comfyui.sample.attention import SLOT
from ..hosts.comfyui.sample.optimize import Settings, optimize, report_of
from ..hosts.comfyui.sample.run import KEY
from ..measure.timing import time_calls
from ..optimizations.modulation import ModulationTable
from .forward import (
    CHECKED,
    InputTensors,
    Output,
    Program,
    Repeats,
    kernel_fields,
    measure_forward,
    timing_fields,
)

Found = TypeVar("Found")
# (BaseModel, model_options with the wrappers of the run) -> anything
Body = Callable[[Any, dict[str, Any]], Found]


def stock(patcher: ModelPatcher) -> ModelPatcher:
    """ComfyUI as it is."""
    return patcher


def stock_cudnn(patcher: ModelPatcher) -> ModelPatcher:
    """ComfyUI with cuDNN's attention, through its own slot."""
    clone = patcher.clone()
    clone.model_options["transformer_options"][SLOT] = _cudnn_attention
    return clone


def ours(patcher: ModelPatcher) -> ModelPatcher:
    """What the node Optimize makes of a model."""
    return optimize(patcher, Settings())


def ours_attention(patcher: ModelPatcher) -> ModelPatcher:
    """The choice of attention alone; the blocks are ComfyUI's."""
    return optimize(patcher, Settings(blocks=False))


def measure_pass(
    patcher: ModelPatcher,
    tensors: InputTensors,
    repeats: Repeats,
    device: torch.device,
    *,
    scheduled: bool = True,
) -> tuple[dict[str, Any], Output]:
    """Times a patcher; arguments and result as of `optimizations.measure_forward`.

    Args:
        scheduled: Whether timesteps are those of the run's schedule; else each is a new one that
            nobody has announced.
    """

    def body(model: Any, model_options: dict[str, Any]) -> tuple[dict[str, Any], Output]:
        program = _program(patcher, model, model_options, tensors, scheduled)
        sigmas = tensors.sigmas if scheduled else tensors.between
        return measure_forward(program, sigmas, device, repeats, tensors.sigmas[CHECKED])

    return in_sampling_run(patcher, tensors, body)


def measure_table(
    patcher: ModelPatcher, tensors: InputTensors, repeats: Repeats, device: torch.device
) -> dict[str, Any]:
    """Times the modulation table of one schedule, with its timesteps' embeddings."""
    batch, edit = tensors.inputs.batch, bool(tensors.references)

    def body(model: Any, _options: dict[str, Any]) -> dict[str, Any]:
        transformer = model.diffusion_model

        def build() -> None:
            embeddings = []
            for sigma in tensors.sigmas:
                timestep = model.model_sampling.timestep(sigma).float()
                if edit:
                    timestep = torch.cat([timestep, timestep * 0])
                embeddings.append(transformer.time_text_embed(timestep, tensors.text))
            ModulationTable(transformer.transformer_blocks).fill(embeddings, batch)

        for _ in range(repeats.warmup):
            build()
        fields = timing_fields(time_calls(build, device, repeats.repeats))
        return {
            **fields,
            "steps": len(tensors.sigmas),
            **kernel_fields(build, device, repeats.kernels),
        }

    return in_sampling_run(patcher, tensors, body)


def paths_of(patcher: ModelPatcher) -> str:
    """Which path every part of an optimized model took; empty of another model."""
    return "" if patcher.get_attachment(KEY) is None else report_of(patcher)


@torch.inference_mode()  # as execution.py runs every prompt
def in_sampling_run(patcher: ModelPatcher, tensors: InputTensors, body: Body[Found]) -> Found:
    """Calls `body` where a sampler would compute its steps, and returns what it returns."""
    found: list[Found] = []

    def sampler(
        model: Any, x: torch.Tensor, _sigmas: torch.Tensor, extra_args: dict[str, Any], **_: Any
    ) -> torch.Tensor:
        found.append(body(model.inner_model.inner_model, extra_args["model_options"]))
        return x

    guider = comfy.samplers.CFGGuider(patcher)
    guider.inner_set_conds({"positive": [[tensors.text, {}]]})
    sigmas = torch.stack([*(sigma[0] for sigma in tensors.sigmas), tensors.sigmas[0][0] * 0])
    guider.sample(
        tensors.latents,
        torch.zeros_like(tensors.latents),
        comfy.samplers.KSAMPLER(sampler),
        sigmas,
        disable_pbar=True,
    )
    return found[0]


def _program(
    patcher: ModelPatcher,
    model: Any,
    model_options: dict[str, Any],
    tensors: InputTensors,
    scheduled: bool,
) -> Program:
    x, text = tensors.latents, tensors.text
    conditions: dict[str, Sequence[torch.Tensor]] = {}
    if tensors.references:
        conditions["ref_latents"] = list(tensors.references)

    def call(sigma: torch.Tensor) -> torch.Tensor:
        # As `_calc_cond_batch` in comfy/samplers.py.
        model.current_patcher.prepare_state(sigma, model_options)
        options = comfy.patcher_extension.merge_nested_dicts(
            model.current_patcher.apply_hooks(hooks=None),
            model_options["transformer_options"],
            copy_dict1=False,
        )
        options["cond_or_uncond"], options["uuids"], options["sigmas"] = [0], [0], sigma
        if not scheduled:
            del options["sample_sigmas"]
        return model.apply_model(
            x, sigma, c_crossattn=text, transformer_options=options, **conditions
        )

    def prediction(denoised: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        return (x - denoised) / sigma.view(-1, 1, 1, 1, 1)

    norm_out = model.diffusion_model.norm_out
    return Program(call, prediction, norm_out, lambda: paths_of(patcher))


def _cudnn_attention(
    _default: Callable[..., torch.Tensor],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    heads: int,
    mask: torch.Tensor | None = None,
    **_others: Any,
) -> torch.Tensor:
    """q, k, v: (batch, heads, tokens, head_dim), as Qwen-Image hands them over."""
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return out.transpose(1, 2).reshape(q.shape[0], -1, heads * q.shape[-1])
