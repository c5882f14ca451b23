"""ComfyUI with random weights: its models, one forward pass, and whole model files.

Stock ComfyUI and this package go through the same code and differ in the patcher alone. A forward
pass is called from inside a sampling run: a sampler of our own stands where `euler` would, so that
patches, wrappers and callbacks apply as they do in a workflow.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import comfy.model_management
import comfy.patcher_extension
import comfy.quant_ops
import comfy.samplers
import comfy.sd
import comfy.supported_models
import comfy.utils
import torch
from comfy.model_patcher import CoreModelPatcher, ModelPatcher

from ..families.protocol import Member
from ..families.qwen_image import MARKER_2511
from ..families.registry import find_member, load
from ..hosts.comfyui.linear import quantized_operations
from ..hosts.comfyui.sample.optimize import report_of
from ..hosts.comfyui.sample.run import OPTIMIZATION_KEY
from ..loaders.quantize import layers_to_quantize, quantize_rows, row_format
from ..loaders.source import shapes_of
from ..loaders.stored import StoredLayer
from ..loaders.writer import SafetensorsLayout, write_safetensors
from ..spec.formats import FORMATS, RowFormat
from ..spec.transformer import TransformerShape
from .program import (
    Body,
    ForwardProgram,
    InputTensors,
    Measured,
    random_tensor,
)
from .rows import Published, rope_axes

Tensors = dict[str, torch.Tensor]
Shapes = dict[str, tuple[int, ...]]
VOCABULARY = 152_064


@torch.inference_mode()  # as loader nodes run: quantized tensors cannot enter it later
def quantized_model(
    weights: str, shape: TransformerShape, device: torch.device, edit: bool
) -> ModelPatcher:
    """Makes the random weights in fp8 or int8, tensor by tensor.

    Args:
        weights: "comfyui fp8" or "comfyui int8" as ComfyUI's own files and operations have it (fp8
            with one scale a tensor, int8 as ConvRot); "ours fp8" or "ours int8" as this package's
            loader does (one scale a row).
    """
    tensors = _random_weights(weights, shape, device)
    stock = weights.startswith("comfyui")
    operations = None if stock else quantized_operations(torch.bfloat16)
    return random_model(tensors, shape, device, edit, build_on=device, operations=operations)


def _random_weights(weights: str, shape: TransformerShape, device: torch.device) -> Tensors:
    program, precision = weights.split()
    quantize = _core_quantized if program == "comfyui" else _quantized
    shapes = shape.tensors()
    layers = (name.removesuffix(".weight") for name in shapes if name.endswith(".weight"))
    chosen = layers_to_quantize(layers)
    tensors: Tensors = {}
    for name, size in shapes.items():
        tensor, layer = random_tensor(name, size, device), name.removesuffix(".weight")
        if layer in chosen:
            tensors |= quantize(tensor, row_format(precision, size[1])).tensors(layer)
        else:
            tensors[name] = tensor
    return tensors


def _quantized(weight: torch.Tensor, form: RowFormat) -> StoredLayer:
    values, scale = quantize_rows(weight, form.storage, rotation=form.rotation)
    return StoredLayer.rounded(values, scale, form)


def _core_quantized(weight: torch.Tensor, form: RowFormat) -> StoredLayer:
    if form.storage == "fp8":  # what the published scaled files hold
        scale = weight.abs().amax().float() / FORMATS["fp8"].largest
        return StoredLayer((weight.float() / scale).to(torch.float8_e4m3fn), scale, "fp8")
    stored = comfy.quant_ops.QuantizedTensor.from_float(
        *(weight, FORMATS["int8"].layout),
        per_channel=True,
        convrot=True,
        convrot_groupsize=form.rotation,
    )
    return StoredLayer.rounded(stored._qdata, stored._params.scale, form)


def random_model(
    tensors: Tensors,
    shape: TransformerShape,
    device: torch.device,
    edit: bool,
    *,
    build_on: torch.device | str = "meta",
    operations: type | None = None,
) -> ModelPatcher:
    """Does as `load_diffusion_model_state_dict` in comfy/sd.py, but not over host memory.

    Args:
        tensors: emptied, so that none is held twice.
        build_on: "meta" takes the tensors, which are on the device, without a copy.
    """
    about: dict[str, Any] = {
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
        about["default_ref_method"] = "index_timestep_zero"
        tensors[MARKER_2511] = torch.empty(0)
    config = comfy.supported_models.QwenImage(about)
    config.quant_config = comfy.utils.detect_layer_quantization(tensors, "")
    config.set_inference_dtype(torch.bfloat16, torch.bfloat16 if config.quant_config else None)
    config.custom_operations = operations
    model = config.get_model(tensors, "", device=build_on)
    model.device = device
    model.load_model_weights(tensors, "", assign=build_on == "meta")
    return CoreModelPatcher(model, load_device=device, offload_device=device)


@torch.inference_mode()  # as execution.py runs every prompt
def in_comfyui(patcher: ModelPatcher, tensors: InputTensors, body: Body) -> Measured:
    """Calls `body` with the model's forward pass where a sampler would compute its steps."""
    found: list[Measured] = []

    def paths() -> str:
        optimized = patcher.get_attachment(OPTIMIZATION_KEY) is not None
        return report_of(patcher) if optimized else ""

    def sampler(
        model: Any, x: torch.Tensor, _sigmas: torch.Tensor, extra_args: dict[str, Any], **_: Any
    ) -> torch.Tensor:
        inner = model.inner_model.inner_model
        call = _forward_pass(inner, extra_args["model_options"], tensors)
        found.append(body(ForwardProgram(call, inner.diffusion_model.norm_out, paths)))
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


def _forward_pass(model: Any, model_options: dict[str, Any], tensors: InputTensors) -> Any:
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
        return model.apply_model(
            tensors.latents,
            sigma,
            c_crossattn=tensors.text,
            transformer_options=options,
            **conditions,
        )

    return call


def vae_shapes(member: Member) -> Shapes:
    """Lists the tensors of the published VAE, from ComfyUI's class."""
    shape = member.vae
    dims = {"dim": shape.encoder_dim or shape.dim}
    with torch.device("meta"):
        made = load(member.family.vae.comfyui).build(dims, {"decoder.head.0.gamma": (shape.dim,)})
    return shapes_of(made)


def random_vae(device: torch.device) -> comfy.sd.VAE:
    shapes = vae_shapes(find_member("qwen-image")).items()
    vae = comfy.sd.VAE(sd={name: random_tensor(name, size, device).cpu() for name, size in shapes})
    vae.throw_exception_if_invalid()
    return vae


def text_encoder_shapes(member: Member) -> Shapes:
    """Lists the tensors of the published text encoder, in its file's names."""
    kind = load(member.text_encoder.comfyui).kind()
    found = shapes_of(kind.model({}, torch.bfloat16, "meta", torch.nn))
    if kind.nested:
        parts = {"model.": "model.language_model.", "visual.": "model.visual."}
        pattern = re.compile("^(model|visual)\\.")
        found = {pattern.sub(lambda it: parts[it[0]], name): found[name] for name in found}
    head = found.pop("model.language_model.lm_head.weight", None)
    return found | {"lm_head.weight": head or (VOCABULARY, member.transformer.joint_dim)}


def write_models(folder: Path, files: Published, int8: bool = False) -> None:
    """Writes a model of the published sizes with random weights, made on the card.

    The folder gets diffusion_models, text_encoders and vae, each with one file in bf16 and in
    ComfyUI's names: 58 GB of Qwen-Image, 33 of 2.1. A file that is there is left alone.

    Args:
        int8: also writes the transformer as ComfyUI's int8 ConvRot.
    """
    member, device = find_member(files.member), torch.device("cuda")
    models, shape = folder / "diffusion_models", member.transformer
    write_random(models / files.transformer, shape.tensors(), device)
    write_random(folder / "text_encoders" / files.text_encoder, text_encoder_shapes(member), device)
    write_random(folder / "vae" / files.vae, vae_shapes(member), device)
    if int8 and not (models / files.int8).exists():
        weights = _random_weights("comfyui int8", shape, device)
        tensors = {name: tensor.cpu() for name, tensor in weights.items()}
        comfy.utils.save_torch_file(tensors, str(models / files.int8))


def write_random(path: Path, shapes: Shapes, device: torch.device) -> None:
    """Writes random weights of these shapes, unless the file is there."""
    if path.exists():
        return
    specs = {name: ("BF16", shape) for name, shape in shapes.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    with write_safetensors(path, SafetensorsLayout(specs, {"format": "pt"})) as file:
        for name, shape in shapes.items():
            file.write(name, random_tensor(name, shape, device).cpu())
