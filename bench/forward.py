"""One forward pass of a transformer: its inputs, what is measured of it whichever program computes
it, the pass through diffusers, and the rows of `bench forward`.
"""

from __future__ import annotations

import gc
import itertools
import math
from collections.abc import Callable, Mapping
from functools import partial
from itertools import groupby
from typing import Any

import torch

from ..errors import UnavailableError
from ..spec.formats import GIB
from ..spec.transformer import REFERENCE_SIDE, TransformerShape
from . import measure
from .measure import Fields, by_turns
from .program import Body, ForwardProgram, InputTensors, Measured, random_tensor
from .rows import BASELINE, COMFYUI, BenchSetup, Inputs, Row, rope_axes

DENSE = "bf16"
STEPS = 20
SHIFT = 1.15  # of ComfyUI's Qwen-Image
# The timestep at which outputs are compared, one of the schedule's.
CHECKED = 6
LATENT_SIDE = 8  # pixels to a latent's side
# Of diffusers: the rotation's base, and a token's side.
THETA, PATCH = 10000, 2


def schedule(steps: int = STEPS) -> list[float]:
    """Lists timesteps from 1 down to above 0 as ComfyUI's `simple` scheduler has them.

    Rounded to bf16, in which diffusers takes its timestep, so that every program gets the same.
    """
    moved = math.exp(SHIFT)
    times = [1 - step / steps for step in range(steps)]
    sigmas = [moved * t / (1 + (moved - 1) * t) for t in times]
    return torch.tensor(sigmas).bfloat16().tolist()


def input_tensors(shape: TransformerShape, inputs: Inputs, device: torch.device) -> InputTensors:
    """Draws the same random values in every run on one kind of device."""
    generator = torch.Generator(device).manual_seed(1)
    channels = shape.in_channels // 4

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, device=device)

    side = REFERENCE_SIDE // LATENT_SIDE
    height, width = inputs.height // LATENT_SIDE, inputs.width // LATENT_SIDE
    return InputTensors(
        inputs,
        # In bf16 too, which is what the transformer gets of them.
        latents=random(inputs.batch, channels, 1, height, width).bfloat16().float(),
        text=random(inputs.batch, inputs.text, shape.joint_dim).bfloat16(),
        references=tuple(
            random(inputs.batch, channels, 1, side, side).bfloat16()
            for _ in range(inputs.references)
        ),
        sigmas=tuple(torch.full((inputs.batch,), at, device=device) for at in schedule()),
    )


def measure_forward(
    program: ForwardProgram, setup: BenchSetup, tensors: InputTensors, repeats: int, again: bool
) -> Measured:
    """Times a program, with the schedule's next timestep in each call.

    Returns:
        Times in milliseconds and memory in GiB, and the image stream in fp32 on the CPU; `again`
        only times.

    Raises:
        UnavailableError: The stream holds NaN or infinity.
    """
    device, sigmas = setup.device, itertools.cycle(tensors.sigmas)
    on_card = device.type == "cuda"

    def call() -> None:
        program.call(next(sigmas))

    gc.collect()
    resting = torch.cuda.memory_allocated(device) if on_card else 0
    row: Fields = {"samples_ms": measure.times_ms(call, device, repeats)}
    if again:
        return row, None
    if on_card:
        torch.cuda.empty_cache()  # the memory by which do_bench empties the card's cache
        torch.cuda.reset_peak_memory_stats(device)
        call()
        row["extra_gib"] = (torch.cuda.max_memory_allocated(device) - resting) / GIB
        row["kernel_ms"] = measure.kernel_ms(call, device)
    seen: list[torch.Tensor] = []

    def look(_module: torch.nn.Module, arguments: tuple[Any, ...]) -> None:
        seen.append(arguments[0].float().cpu())

    handle = program.norm_out.register_forward_pre_hook(look)
    try:
        program.call(tensors.sigmas[CHECKED])
    finally:
        handle.remove()
    if not seen[0].isfinite().all():
        raise UnavailableError("the image stream holds NaN or infinity")
    return row | ({"paths": paths} if (paths := program.paths()) else {}), seen[0]


def relative_error(found: torch.Tensor, known: torch.Tensor | None) -> float | None:
    """Returns |found - known| / |known|, the norms in fp64."""
    if known is None:
        return None
    norm = partial(torch.linalg.vector_norm, dtype=torch.float64)
    return float(norm(found - known) / norm(known))


# --- through diffusers


def build_transformer(
    weights: Mapping[str, torch.Tensor], shape: TransformerShape, edit: bool, *, compiled: bool
) -> torch.nn.Module:
    """Builds diffusers' own model over bf16 tensors that are on the device, without a copy.

    Args:
        compiled: Whether it has cuDNN's attention and compiled blocks, the fastest that diffusers
            documents for bf16.
    """
    from diffusers import QwenImageTransformer2DModel

    axes = rope_axes(shape.head_dim)
    with torch.device("meta"):
        model = QwenImageTransformer2DModel(
            patch_size=PATCH,
            in_channels=shape.in_channels,
            out_channels=shape.packed_out_channels // PATCH**2,
            num_layers=shape.blocks,
            attention_head_dim=shape.head_dim,
            num_attention_heads=shape.heads,
            joint_attention_dim=shape.joint_dim,
            axes_dims_rope=axes,
            zero_cond_t=edit,
        )
    # Its complex tables are plain attributes, which no weights fill.
    model.pos_embed = type(model.pos_embed)(THETA, list(axes), scale_rope=True)
    model.load_state_dict(weights, assign=True)
    if compiled:
        model.set_attention_backend("_native_cudnn")
        model.compile_repeated_blocks(fullgraph=True)
    return model.requires_grad_(False).eval()


@torch.inference_mode()
def in_diffusers(model: torch.nn.Module, tensors: InputTensors, body: Body) -> Measured:
    """Calls `body` with the model's forward pass as a pipeline does."""
    pictures = [tensors.latents.bfloat16(), *tensors.references]
    packed = torch.cat([_pack(picture) for picture in pictures], dim=1)
    sides = [(1, part.shape[-2] // PATCH, part.shape[-1] // PATCH) for part in pictures]

    def call(sigma: torch.Tensor) -> torch.Tensor:
        return model(
            hidden_states=packed,
            encoder_hidden_states=tensors.text,
            encoder_hidden_states_mask=None,
            timestep=sigma.bfloat16(),
            img_shapes=[sides] * tensors.inputs.batch,
            return_dict=False,
        )[0]

    return body(ForwardProgram(call, model.norm_out))


def _pack(latents: torch.Tensor) -> torch.Tensor:
    """Makes (batch, tokens, 4 channels) of (batch, channels, 1, height, width), as pipelines do."""
    batch, channels, _, height, width = latents.shape
    patches = latents.view(batch, channels, height // PATCH, PATCH, width // PATCH, PATCH)
    return patches.permute(0, 2, 4, 1, 3, 5).reshape(batch, -1, channels * PATCH**2)


# --- rows


def measure_row(
    row: Row, setup: BenchSetup, tensors: InputTensors, built: dict[Any, Any], body: Body
) -> Measured:
    """Calls `body` with a row's forward pass; `built` is what rows of the same weights share."""
    if row.weights == DENSE and DENSE not in built:
        sizes = setup.shape.tensors().items()
        built[DENSE] = {name: random_tensor(name, size, setup.device) for name, size in sizes}
    if row.host != COMFYUI:
        if row.host not in built:
            on_card = setup.device.type == "cuda"
            about = setup.shape, setup.edit
            built[row.host] = build_transformer(built[DENSE], *about, compiled=on_card)
        return in_diffusers(built[row.host], tensors, body)
    from ..hosts.comfyui.sample.optimize import OptimizeSettings, optimize
    from .comfyui import in_comfyui, quantized_model, random_model

    if row.host not in built:
        dense = row.weights == DENSE
        build = random_model if dense else quantized_model
        weights = dict(built[DENSE]) if dense else row.weights
        built[row.host] = build(weights, setup.shape, setup.device, setup.edit)
    patcher = built[row.host]
    if row.ours:
        patcher = optimize(patcher, OptimizeSettings(attention=row.attention))
    return in_comfyui(patcher, tensors, body)


def run_forward(setup: BenchSetup, add: Callable[[Fields], None]) -> None:
    """Measures whole passes; errors are relative to stock ComfyUI in bf16."""
    known: dict[Inputs, torch.Tensor] = {}
    tensors = {inputs: input_tensors(setup.shape, inputs, setup.device) for inputs in setup.inputs}

    def one(built: dict[Any, Any], inputs: Inputs, row: Row, repeats: int, again: bool) -> Fields:
        body = partial(
            measure_forward, setup=setup, tensors=tensors[inputs], repeats=repeats, again=again
        )
        fields, stream = measure_row(row, setup, tensors[inputs], built, body)
        if stream is None:
            return {"samples_ms": fields["samples_ms"]}
        if row.name == BASELINE:
            known[inputs] = stream
        return fields | {"rel_error_blocks": relative_error(stream, known.get(inputs))}

    for _, same in groupby(setup.rows, key=lambda row: row.weights):
        built: dict[Any, Any] = {}
        rows = list(same)
        for inputs in setup.inputs:
            torch._dynamo.reset()  # or a second size would be compiled for any size
            for row, fields in by_turns(rows, partial(one, built, inputs), setup):
                add({"name": row.name, "size": inputs.size, "batch": inputs.batch} | fields)
        built.clear()
        torch._dynamo.reset()  # which keeps compiled models
        if COMFYUI in {row.host for row in rows}:
            from comfy.model_management import unload_all_models

            gc.collect()  # ComfyUI fails where a model goes while it unloads others
            unload_all_models()  # whose memory is free once nobody refers to them
        gc.collect()
        if setup.device.type == "cuda":
            torch.cuda.empty_cache()
