"""One forward pass through diffusers' transformer, as its pipelines call it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers import QwenImageTransformer2DModel

from ..hosts.diffusers.patch import optimize
from ..spec.transformer import TransformerShape
from .forward import CHECKED, ForwardOutput, ForwardProgram, InputTensors, Repeats, measure_forward
from .inputs import rope_axes

THETA = 10000
TIMESTEPS = 1000  # the scheduler's for a sigma of 1
PATCH = 2  # a token is a patch of 2 x 2 latents


def build_transformer(
    shape: TransformerShape,
    weights: Mapping[str, torch.Tensor],
    edit: bool,
) -> QwenImageTransformer2DModel:
    """diffusers' own model over bf16 tensors that are on the device already and are not copied.

    Args:
        edit: Whether it is an Edit-2511, which modulates references as at timestep zero.
    """
    config = {
        "patch_size": PATCH,
        "in_channels": shape.in_channels,
        "out_channels": shape.packed_out_channels // PATCH**2,
        "num_layers": shape.blocks,
        "attention_head_dim": shape.head_dim,
        "num_attention_heads": shape.heads,
        "joint_attention_dim": shape.joint_dim,
        "axes_dims_rope": rope_axes(shape.head_dim),
        "zero_cond_t": edit,
    }
    with torch.device("meta"):
        model = QwenImageTransformer2DModel(**config)
    # Its complex tables are plain attributes, which no weights fill.
    rotation = type(model.pos_embed)
    model.pos_embed = rotation(THETA, list(config["axes_dims_rope"]), scale_rope=True)
    model.load_state_dict(weights, assign=True)
    return model.requires_grad_(False).eval()


def compile_blocks(model: QwenImageTransformer2DModel) -> None:
    """cuDNN's attention and compiled blocks: the fastest that diffusers documents for bf16."""
    torch._dynamo.reset()
    model.set_attention_backend("_native_cudnn")
    model.compile_repeated_blocks(fullgraph=True)


def forget_compiled() -> None:
    """Lets the next size be compiled for itself: a second one would be compiled for any size."""
    torch._dynamo.reset()


@torch.inference_mode()
def measure_pass(
    model: QwenImageTransformer2DModel,
    tensors: InputTensors,
    repeats: Repeats,
    device: torch.device,
) -> tuple[dict[str, Any], ForwardOutput]:
    """Times the model; arguments and result as of `forward.measure_forward`."""
    program = _forward_program(model, tensors)
    return measure_forward(program, tensors.sigmas, device, repeats, tensors.sigmas[CHECKED])


@torch.inference_mode()
def measure_ours(
    model: QwenImageTransformer2DModel,
    tensors: InputTensors,
    repeats: Repeats,
    device: torch.device,
) -> tuple[dict[str, Any], ForwardOutput]:
    """As `measure_pass`, with what `generate` does to a transformer; it is undone afterwards."""
    timesteps = [sigma[0] * TIMESTEPS for sigma in tensors.sigmas]
    with optimize(model) as optimized, optimized.run(lambda: timesteps):
        program = _forward_program(model, tensors)._replace(paths=optimized.report)
        return measure_forward(program, tensors.sigmas, device, repeats, tensors.sigmas[CHECKED])


def _forward_program(model: QwenImageTransformer2DModel, tensors: InputTensors) -> ForwardProgram:
    inputs, latents = tensors.inputs, tensors.latents
    pictures = [latents.bfloat16(), *tensors.references]
    packed = torch.cat([_pack(picture) for picture in pictures], dim=1)
    sides = [(1, part.shape[-2] // PATCH, part.shape[-1] // PATCH) for part in pictures]

    def call(sigma: torch.Tensor) -> torch.Tensor:
        return model(
            hidden_states=packed,
            encoder_hidden_states=tensors.text,
            encoder_hidden_states_mask=None,
            timestep=sigma.bfloat16(),
            img_shapes=[sides] * inputs.batch,
            return_dict=False,
        )[0]

    def prediction(tokens: torch.Tensor, _sigma: torch.Tensor) -> torch.Tensor:
        return _unpack(tokens[:, : inputs.image_tokens], latents)

    return ForwardProgram(call, prediction, model.norm_out)


def _pack(latents: torch.Tensor) -> torch.Tensor:
    """(batch, channels, 1, height, width) to (batch, tokens, 4 channels), as the pipelines do."""
    batch, channels, _, height, width = latents.shape
    patches = latents.view(batch, channels, height // PATCH, PATCH, width // PATCH, PATCH)
    return patches.permute(0, 2, 4, 1, 3, 5).reshape(batch, -1, channels * PATCH**2)


def _unpack(tokens: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    batch, _, _, height, width = like.shape
    patches = tokens.view(batch, height // PATCH, width // PATCH, -1, PATCH, PATCH)
    return patches.permute(0, 3, 1, 4, 2, 5).reshape(batch, -1, 1, height, width)
