"""Random models of the published sizes, one forward pass of a transformer through any program,
and the rows of `bench forward`. ComfyUI's forward pass is called where `euler` would call it, so
that patches, wrappers and callbacks apply as in a workflow.
"""

from __future__ import annotations

import gc
import itertools
import math
import re
import zlib
from collections.abc import Callable, Mapping
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..errors import UnavailableError
from ..families.protocol import Member
from ..families.qwen_image import MARKER_2511
from ..families.registry import find_member, load
from ..loaders.quantize import layers_to_quantize, quantize_rows, row_format
from ..loaders.source import shapes_of
from ..loaders.stored import StoredLayer
from ..loaders.writer import SafetensorsLayout, write_safetensors
from ..measure.fidelity import relative_error
from ..spec.formats import FORMATS, GIB, RowFormat
from ..spec.transformer import REFERENCE_SIDE, TransformerShape
from . import measure
from .measure import Fields, by_turns
from .rows import BASELINE, COMFYUI, BenchSetup, Inputs, Published, Row

DENSE = "bf16"
STEPS = 20
SHIFT = 1.15  # of ComfyUI's Qwen-Image
# The timestep at which outputs are compared, one of the schedule's.
CHECKED = 6
LATENT_SIDE = 8  # pixels to a latent's side
# Of diffusers: the rotation's base, and a token's side.
THETA, PATCH = 10000, 2
VOCABULARY = 152_064
Tensors = dict[str, torch.Tensor]
Shapes = dict[str, tuple[int, ...]]


# --- random models


def random_tensor(name: str, size: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Draws bf16: deviation 0.5 / sqrt(K) for weights [N, K, ...], 0.02 for biases; norms are 1.

    By name and device alone, so that a quantized model can be made tensor by tensor. Activations
    stay finite through 60 blocks.
    """
    tensor = torch.empty(size, dtype=torch.bfloat16, device=device)
    fan_in = math.prod(size[1:])
    if name.endswith("bias"):
        deviation = 0.02
    elif fan_in == 1:
        return tensor.fill_(1.0)
    else:
        deviation = 0.5 / math.sqrt(fan_in)
    generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
    return tensor.normal_(0.0, deviation, generator=generator)


def sizes_of(shape: TransformerShape) -> dict[str, Any]:
    # A head's frame, height and width: 16, 56 and 56 of the published 128.
    frame = shape.head_dim // 8
    side = (shape.head_dim - frame) // 2
    return {
        "in_channels": shape.in_channels,
        "out_channels": shape.packed_out_channels // 4,
        "num_layers": shape.blocks,
        "num_attention_heads": shape.heads,
        "attention_head_dim": shape.head_dim,
        "joint_attention_dim": shape.joint_dim,
        "axes_dims_rope": (frame, side, side),
    }


@torch.inference_mode()  # as loader nodes run: quantized tensors cannot enter it later
def quantized_model(weights: str, shape: TransformerShape, device: torch.device, edit: bool) -> Any:
    """Makes the random weights tensor by tensor: "comfyui fp8" with one scale a tensor, "comfyui
    int8" as ConvRot, "ours fp8" and "ours int8" as our loader does.
    """
    from ..hosts.comfyui.linear import quantized_operations

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
    from comfy.quant_ops import QuantizedTensor

    if form.storage == "fp8":  # what the published scaled files hold
        scale = weight.abs().amax().float() / FORMATS["fp8"].largest
        return StoredLayer((weight.float() / scale).to(torch.float8_e4m3fn), scale, "fp8")
    how = {"per_channel": True, "convrot": True, "convrot_groupsize": form.rotation}
    stored = QuantizedTensor.from_float(weight, FORMATS["int8"].layout, **how)
    return StoredLayer.rounded(stored._qdata, stored._params.scale, form)


def random_model(
    tensors: Tensors,
    shape: TransformerShape,
    device: torch.device,
    edit: bool,
    *,
    build_on: torch.device | str = "meta",
    operations: type | None = None,
) -> Any:
    """Does as `load_diffusion_model_state_dict` in comfy/sd.py without a copy in system RAM. Takes
    the tensors out of their dictionary; built on "meta", the model has them as they are.
    """
    import comfy.supported_models
    import comfy.utils
    from comfy.model_patcher import CoreModelPatcher

    about = {"image_model": "qwen_image", **sizes_of(shape)}
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


def vae_shapes(member: Member) -> Shapes:
    shape = member.vae
    dims = {"dim": shape.encoder_dim or shape.dim}
    with torch.device("meta"):
        made = load(member.family.vae.comfyui).build(dims, {"decoder.head.0.gamma": (shape.dim,)})
    return shapes_of(made)


def random_vae(device: torch.device) -> Any:
    import comfy.sd

    shapes = vae_shapes(find_member("qwen-image")).items()
    vae = comfy.sd.VAE(sd={name: random_tensor(name, size, device).cpu() for name, size in shapes})
    vae.throw_exception_if_invalid()
    return vae


def text_encoder_shapes(member: Member) -> Shapes:
    kind = load(member.text_encoder.comfyui).kind()
    found = shapes_of(kind.model({}, torch.bfloat16, "meta", torch.nn))
    if kind.nested:
        parts = {"model.": "model.language_model.", "visual.": "model.visual."}
        pattern = re.compile("^(model|visual)\\.")
        found = {pattern.sub(lambda it: parts[it[0]], name): found[name] for name in found}
    head = found.pop("model.language_model.lm_head.weight", None)
    return found | {"lm_head.weight": head or (VOCABULARY, member.transformer.joint_dim)}


def write_models(folder: Path, files: Published, int8: bool = False) -> None:
    """Writes random models of the published sizes, unless they are there: 58 GB, 33 of 2.1."""
    from comfy.utils import save_torch_file

    member, device = find_member(files.member), torch.device("cuda")
    models, shape = folder / "diffusion_models", member.transformer
    write_random(models / files.transformer, shape.tensors(), device)
    write_random(folder / "text_encoders" / files.text_encoder, text_encoder_shapes(member), device)
    write_random(folder / "vae" / files.vae, vae_shapes(member), device)
    if int8 and not (models / files.int8).exists():
        weights = _random_weights("comfyui int8", shape, device)
        tensors = {name: tensor.cpu() for name, tensor in weights.items()}
        save_torch_file(tensors, str(models / files.int8))


def write_random(path: Path, shapes: Shapes, device: torch.device) -> None:
    if path.exists():
        return
    specs = {name: ("BF16", shape) for name, shape in shapes.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    with write_safetensors(path, SafetensorsLayout(specs, {"format": "pt"})) as file:
        for name, shape in shapes.items():
            file.write(name, random_tensor(name, shape, device).cpu())


# --- what is measured


class InputTensors(NamedTuple):
    inputs: Inputs
    latents: torch.Tensor  # (batch, channels, 1, height / 8, width / 8), fp32
    text: torch.Tensor  # (batch, text tokens, joint_dim), bf16
    references: tuple[torch.Tensor, ...]  # (batch, channels, 1, 128, 128) each, bf16
    sigmas: tuple[torch.Tensor, ...]  # the timesteps of a schedule, each (batch,), fp32


class ForwardProgram(NamedTuple):
    call: Callable[[torch.Tensor], Any]  # at a timestep (batch,)
    norm_out: torch.nn.Module  # which reads the image stream after the last block
    paths: Callable[[], str] = str  # says afterwards which code ran


# What a row of results has, and the image stream after the last block (batch, tokens, D).
Measured = tuple[Fields, torch.Tensor | None]
Body = Callable[[ForwardProgram], Measured]


def schedule() -> list[float]:
    """Lists timesteps of ComfyUI's `simple` scheduler in bf16, in which diffusers takes them."""
    moved = math.exp(SHIFT)
    times = [1 - step / STEPS for step in range(STEPS)]
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
    """Times a program: (ms and GiB, the image stream in fp32); `again` only times."""
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


# --- through ComfyUI


@torch.inference_mode()  # as execution.py runs every prompt
def in_comfyui(patcher: Any, tensors: InputTensors, body: Body) -> Measured:
    """Calls `body` with the model's forward pass where a sampler would compute its steps."""
    import comfy.samplers

    from ..hosts.comfyui.sample.optimize import report_of
    from ..hosts.comfyui.sample.run import OPTIMIZATION_KEY

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
    from comfy.patcher_extension import merge_nested_dicts

    conditions = {"ref_latents": [*tensors.references]} if tensors.references else {}

    def call(sigma: torch.Tensor) -> torch.Tensor:
        # As `_calc_cond_batch` in comfy/samplers.py.
        model.current_patcher.prepare_state(sigma, model_options)
        options = merge_nested_dicts(
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


# --- through diffusers


def build_transformer(
    weights: Mapping[str, torch.Tensor], shape: TransformerShape, edit: bool, *, compiled: bool
) -> Any:
    """Builds diffusers' model over the device's bf16 tensors; `compiled` is its fastest way."""
    from diffusers import QwenImageTransformer2DModel

    sizes = sizes_of(shape)
    with torch.device("meta"):
        model = QwenImageTransformer2DModel(patch_size=PATCH, **sizes, zero_cond_t=edit)
    # Its complex tables are plain attributes, which no weights fill.
    axes = list(sizes["axes_dims_rope"])
    model.pos_embed = type(model.pos_embed)(THETA, axes, scale_rope=True)
    model.load_state_dict(weights, assign=True)
    if compiled:
        model.set_attention_backend("_native_cudnn")
        model.compile_repeated_blocks(fullgraph=True)
    return model.requires_grad_(False).eval()


@torch.inference_mode()
def in_diffusers(model: Any, tensors: InputTensors, body: Body) -> Measured:
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

    if row.host not in built:
        dense = row.weights == DENSE
        build: Callable[..., Any] = random_model if dense else quantized_model
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
        exact = known.get(inputs)
        error = None if exact is None else relative_error(stream, exact)
        return fields | {"rel_error_blocks": error}

    for _, same in groupby(setup.rows, key=lambda row: row.weights):
        built: dict[Any, Any] = {}
        rows = list(same)
        for inputs in setup.inputs:
            torch._dynamo.reset()  # or a second size would be compiled for any size
            for row in by_turns(rows, inputs, partial(one, built, inputs), setup):
                add(row)
        built.clear()
        torch._dynamo.reset()  # which keeps compiled models
        if COMFYUI in {row.host for row in rows}:
            from comfy.model_management import unload_all_models

            gc.collect()  # ComfyUI fails where a model goes while it unloads others
            unload_all_models()  # whose memory is free once nobody refers to them
        gc.collect()
        if setup.device.type == "cuda":
            torch.cuda.empty_cache()
