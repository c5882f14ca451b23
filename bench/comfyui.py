"""Makes ComfyUI importable for commands, which run outside its server.

Nothing here imports it at the top, so that a command can say that it is not there.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import comfy.ldm.wan.vae
import comfy.model_management
import comfy.model_patcher
import comfy.ops
import comfy.quant_ops
import comfy.sample
import comfy.sd
import comfy.supported_models
import comfy.utils
import torch
from comfy.model_patcher import ModelPatcher

from ..errors import UnavailableError
from ..hosts.comfyui.load.linear import quantized_operations
from ..loaders.quantize import comfy_quant_tensor, quantize_rows
from ..loaders.quantized_file import MARKER_2511
from ..machine.card import first_line
from ..machine.packages import check_comfyui, find_comfyui
from ..measure import timing as measure
from ..planning.work import rope_axes
from ..spec import LARGEST, TransformerShape
from .forward import InputTensors
from .random_weights import quantizable_weights, random_tensor, random_tensors


def import_comfyui(*, cpu: bool, keep_on_card: bool = True) -> str:
    """Imports ComfyUI: one that is importable already, else the one that `doctor` finds.

    As a library it has no dynamic VRAM and reads no command line.

    Args:
        cpu: Whether it is to run on the processor.
        keep_on_card: Whether models are told to stay where they are (its `--highvram`), which
            changes no computation.

    Returns:
        Its version.

    Raises:
        UnavailableError: There is none, it is too old, or a package is missing that it imports.
    """
    started = "comfy.model_management" in sys.modules
    added = None
    if not started and not _importable():
        folder = find_comfyui()
        found = check_comfyui(folder)
        if not found.usable:
            raise UnavailableError(f"ComfyUI: {found.reason}; {found.remedy}")
        added = str(Path(folder).resolve())
        sys.path.insert(0, added)
    try:
        if not started:
            arguments = importlib.import_module("comfy.cli_args").args
            arguments.cpu, arguments.highvram = cpu, keep_on_card and not cpu
        importlib.import_module("comfy.sample")  # which imports all that a run needs
        compatibility = importlib.import_module(".compatibility", __package__)
        version = str(importlib.import_module("comfyui_version").__version__)
    except (ImportError, RuntimeError) as error:
        if added:
            sys.path.remove(added)
        raise UnavailableError(
            f"ComfyUI cannot be imported here ({first_line(error)}): use its own Python"
        ) from error
    if reason := compatibility.what_is_off():
        raise UnavailableError(reason)
    return version


def _importable() -> bool:
    try:
        return importlib.util.find_spec("comfy.model_management") is not None
    except ImportError:
        return False


# Qwen-Image transformers of random weights as ComfyUI models, built on the device they run on.

CORE_FORMATS = {"fp8": "float8_e4m3fn", "int8": "int8_tensorwise"}
Tensors = dict[str, torch.Tensor]


def bf16_model(
    shape: TransformerShape, weights: Mapping[str, torch.Tensor], device: torch.device, edit: bool
) -> comfy.model_patcher.ModelPatcher:
    """ComfyUI's own model over tensors that are on the device already and are not copied.

    Args:
        edit: Whether it is an Edit-2511, which modulates references as at timestep zero.
    """
    return _patcher(shape, dict(weights), device, edit, build_on="meta")


@torch.inference_mode()  # as loader nodes run: quantized tensors cannot enter it later
def quantized_model(
    shape: TransformerShape, precision: str, device: torch.device, edit: bool, *, stock: bool
) -> comfy.model_patcher.ModelPatcher:
    """The same weights in fp8 or int8, made tensor by tensor.

    Args:
        stock: As ComfyUI's own files and operations have it (fp8 and int8 with one scale a tensor);
            else as this package's loader does (one scale a row).
    """
    chosen = quantizable_weights(shape)
    tensors: Tensors = {}
    for name, tensor in random_tensors(shape, device):
        if name not in chosen:
            tensors[name] = tensor
            continue
        layer = name.removesuffix(".weight")
        quantize = _core_quantized if stock else _quantized
        values, scale, marker = quantize(tensor, precision)
        tensors[name] = values
        tensors[f"{layer}.weight_scale"] = scale
        tensors[f"{layer}.comfy_quant"] = marker
    operations = None if stock else quantized_operations(torch.bfloat16)
    return _patcher(shape, tensors, device, edit, build_on=device, operations=operations)


def forget_models() -> None:
    """Makes ComfyUI forget its models; without references of the caller's their memory is free."""
    comfy.model_management.unload_all_models()


def _quantized(weight: torch.Tensor, precision: str) -> tuple[torch.Tensor, ...]:
    return (*quantize_rows(weight, precision), comfy_quant_tensor(precision))


def _core_quantized(weight: torch.Tensor, precision: str) -> tuple[torch.Tensor, ...]:
    name = CORE_FORMATS[precision]
    marker = torch.tensor(list(json.dumps({"format": name}).encode()), dtype=torch.uint8)
    if precision == "fp8":  # what the published scaled files hold
        scale = weight.abs().amax().float() / LARGEST["fp8"]
        return (weight.float() / scale).to(torch.float8_e4m3fn), scale, marker
    layout = comfy.quant_ops.QUANT_ALGOS[name]["comfy_tensor_layout"]
    stored = comfy.quant_ops.QuantizedTensor.from_float(weight, layout)
    return stored._qdata, stored._params.scale, marker


def _patcher(
    shape: TransformerShape,
    tensors: Tensors,
    device: torch.device,
    edit: bool,
    *,
    build_on: torch.device | str,
    operations: type | None = None,
) -> comfy.model_patcher.ModelPatcher:
    """As `load_diffusion_model_state_dict` in comfy/sd.py, without its way over host memory."""
    if edit:
        tensors[MARKER_2511] = torch.empty(0)
    config = comfy.supported_models.QwenImage(_unet_config(shape, edit))
    config.quant_config = comfy.utils.detect_layer_quantization(tensors, "")
    config.set_inference_dtype(torch.bfloat16, torch.bfloat16 if config.quant_config else None)
    config.custom_operations = operations
    model = config.get_model(tensors, "", device=build_on)
    model.device = device
    model.load_model_weights(tensors, "", assign=build_on == "meta")
    return comfy.model_patcher.CoreModelPatcher(model, load_device=device, offload_device=device)


def _unet_config(shape: TransformerShape, edit: bool) -> dict[str, Any]:
    config: dict[str, Any] = {
        "image_model": "qwen_image",
        "in_channels": shape.in_channels,
        "out_channels": shape.packed_out_channels // 4,
        "num_layers": shape.blocks,
        "num_attention_heads": shape.heads,
        "attention_head_dim": shape.head_dim,
        "joint_attention_dim": shape.joint_dim,
        "axes_dims_rope": rope_axes(shape.head_dim),
    }
    if edit:
        config["default_ref_method"] = "index_timestep_zero"
    return config


# Whole images through ComfyUI's sampler and VAE, of random weights and without a prompt.

CFG = 4.0
# A negative prompt is short, and so ComfyUI computes it in a pass of its own.
NEGATIVE_TOKENS = 20
PUBLISHED_DIM, SMALL_DIM = 96, 8
LATENT_CHANNELS = 16


class ImageTimes(NamedTuple):
    """Milliseconds by the processor's clock, and the latents."""

    sample: float
    decode: float
    latents: torch.Tensor


def random_vae(device: torch.device, *, small: bool) -> comfy.sd.VAE:
    """ComfyUI's VAE of Qwen-Image, or one with a twelfth of its channels."""
    with torch.device("meta"):
        empty = comfy.ldm.wan.vae.WanVAE(
            dim=SMALL_DIM if small else PUBLISHED_DIM,
            z_dim=LATENT_CHANNELS,
            dim_mult=[1, 2, 4, 4],
            num_res_blocks=2,
            attn_scales=[],
            temperal_downsample=[False, True, True],
        )
    tensors = {
        name: random_tensor(name, tuple(tensor.shape), device).cpu()
        for name, tensor in empty.state_dict().items()
    }
    vae = comfy.sd.VAE(sd=tensors)
    vae.throw_exception_if_invalid()
    return vae


@torch.inference_mode()  # as execution.py runs every prompt
def paint(
    patcher: ModelPatcher,
    vae: comfy.sd.VAE,
    tensors: InputTensors,
    steps: int,
    device: torch.device,
) -> ImageTimes:
    """KSampler with euler and simple at a guidance of 4, then VAE Decode."""
    negative = tensors.text[:, : min(NEGATIVE_TOKENS, tensors.inputs.text)]
    extra: dict[str, Any] = {}
    if tensors.references:
        extra["reference_latents"] = list(tensors.references)
    measure.synchronize(device)
    start = time.perf_counter()
    latents = comfy.sample.sample(
        patcher,
        tensors.latents.cpu(),
        steps,
        CFG,
        "euler",
        "simple",
        [[tensors.text, extra]],
        [[negative, dict(extra)]],
        torch.zeros_like(tensors.latents, device="cpu"),
        disable_pbar=True,
        seed=0,
    )
    measure.synchronize(device)
    sampled = time.perf_counter()
    vae.decode(latents)
    measure.synchronize(device)
    decoded = time.perf_counter()
    return ImageTimes((sampled - start) * 1e3, (decoded - sampled) * 1e3, latents.cpu())
