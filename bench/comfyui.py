"""ComfyUI with random weights: its models, one forward pass, and whole images.

Stock ComfyUI and this package go through the same code and differ in the patcher alone. A forward
pass is called from inside a sampling run: a sampler of our own stands where `euler` would, so that
patches, wrappers and callbacks apply as they do in a workflow.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import comfy.model_management
import comfy.model_patcher
import comfy.ops
import comfy.patcher_extension
import comfy.quant_ops
import comfy.sample
import comfy.samplers
import comfy.sd
import comfy.supported_models
import comfy.utils
import torch
import torch.nn.functional as F
from comfy.model_patcher import ModelPatcher
from comfy.text_encoders.llama import Qwen25_7BVLI
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..hosts.comfyui.load.linear import quantized_operations
from ..hosts.comfyui.load.vae import vae_shapes
from ..hosts.comfyui.lora.bypass import Matrices, add_bypass
from ..hosts.comfyui.sample.attention import SLOT
from ..hosts.comfyui.sample.optimize import OptimizeSettings, optimize, report_of
from ..hosts.comfyui.sample.run import OPTIMIZATION_KEY
from ..loaders.convert import shapes_of
from ..loaders.quantize import layers_to_quantize, quantize_rows, row_format
from ..loaders.quantized_file import MARKER_2511
from ..loaders.stored import StoredLayer
from ..loaders.writer import SafetensorsLayout, write_safetensors
from ..optimizations.modulation import ModulationTable
from ..spec.formats import LARGEST, RowFormat
from ..spec.transformer import FULL_SIZE, TransformerShape
from . import timing as measure
from .forward import (
    CHECKED,
    ForwardOutput,
    ForwardProgram,
    InputTensors,
    Repeats,
    kernel_fields,
    measure_forward,
    quantizable_weights,
    random_tensor,
    random_tensors,
    timing_fields,
)
from .inputs import rope_axes
from .memory import TEXT_ENCODER, TEXT_WIDTH, TRANSFORMER, VAE
from .timing import time_calls

if TYPE_CHECKING:
    from .rows import Row

LORA_RANK = 64
Tensors = dict[str, torch.Tensor]
Shapes = dict[str, tuple[int, ...]]
VOCABULARY = 152_064
CFG = 4.0
# A negative prompt is short, and so ComfyUI computes it in a pass of its own.
NEGATIVE_TOKENS = 20
PUBLISHED_DIM, SMALL_DIM = 96, 8
Found = TypeVar("Found")
# (BaseModel, model_options with the wrappers of the run) -> anything
Body = Callable[[Any, dict[str, Any]], Found]


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
    shape: TransformerShape,
    precision: str,
    device: torch.device,
    edit: bool,
    *,
    stock: bool,
    rotate: bool = True,
) -> comfy.model_patcher.ModelPatcher:
    """The same weights in fp8 or int8, made tensor by tensor.

    Args:
        stock: As ComfyUI's own files and operations have it (fp8 with one scale a tensor, int8 as
            ConvRot); else as this package's loader does (one scale a row).
        rotate: Whether this package's int8 is rotated.
    """
    chosen = quantizable_weights(shape)
    tensors: Tensors = {}
    for name, tensor in random_tensors(shape, device):
        if name not in chosen:
            tensors[name] = tensor
            continue
        form = row_format(precision, tensor.shape[1]) if rotate else RowFormat(precision)
        quantize = _core_quantized if stock else _quantized
        tensors |= quantize(tensor, form).tensors(name.removesuffix(".weight"))
    operations = None if stock else quantized_operations(torch.bfloat16)
    return _patcher(shape, tensors, device, edit, build_on=device, operations=operations)


def forget_models() -> None:
    """Makes ComfyUI forget its models; without references of the caller's their memory is free."""
    comfy.model_management.unload_all_models()


def _quantized(weight: torch.Tensor, form: RowFormat) -> StoredLayer:
    values, scale = quantize_rows(weight, form.storage, rotation=form.rotation)
    return StoredLayer.rounded(values, scale, form)


def _core_quantized(weight: torch.Tensor, form: RowFormat) -> StoredLayer:
    if form.storage == "fp8":  # what the published scaled files hold
        scale = weight.abs().amax().float() / LARGEST["fp8"]
        return StoredLayer((weight.float() / scale).to(torch.float8_e4m3fn), scale, "fp8")
    stored = comfy.quant_ops.QuantizedTensor.from_float(
        *(weight, "TensorWiseINT8Layout"),
        per_channel=True,
        convrot=True,
        convrot_groupsize=form.rotation,
    )
    return StoredLayer.rounded(stored._qdata, stored._params.scale, form)


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


def prepared(patcher: ModelPatcher, row: Row) -> ModelPatcher:
    """A model as a row runs it; the model itself stays as it is.

    Raises:
        UnavailableError: The row's attention cannot run here.
    """
    if row.variant == "stock":
        return patcher
    clone = patcher.clone()
    if row.variant == "stock_cudnn":  # through ComfyUI's own slot
        clone.model_options["transformer_options"][SLOT] = _cudnn_attention
        return clone
    for number in range(row.loras):
        add_bypass(clone, _random_lora(clone, number).items())
    settings = OptimizeSettings(blocks=row.variant != "attention", attention=row.attention)
    return optimize(clone, settings)


def _random_lora(patcher: ModelPatcher, number: int) -> dict[str, Matrices]:
    """Beside each layer of attention and MLP, a twentieth as large as what the layer gives."""
    changes = {}
    transformer = patcher.model.diffusion_model
    names = (name for name, part in transformer.named_modules() if hasattr(part, "in_features"))
    for name in sorted(layers_to_quantize(names)):
        layer = transformer.get_submodule(name)
        sizes = {"up": (layer.out_features, LORA_RANK), "down": (LORA_RANK, layer.in_features)}
        up, down = (
            random_tensor(f"{name}.{number}.{part}", size, patcher.load_device).cpu()
            for part, size in sizes.items()
        )
        changes[f"diffusion_model.{name}"] = Matrices(up * 0.1, down)
    return changes


def measure_pass(
    patcher: ModelPatcher,
    tensors: InputTensors,
    repeats: Repeats,
    device: torch.device,
    *,
    scheduled: bool = True,
) -> tuple[dict[str, Any], ForwardOutput]:
    """Times a patcher; arguments and result as of `forward.measure_forward`.

    Args:
        scheduled: Whether timesteps are those of the run's schedule; else each is a new one that
            nobody has announced.
    """

    def body(model: Any, model_options: dict[str, Any]) -> tuple[dict[str, Any], ForwardOutput]:
        program = _forward_program(patcher, model, model_options, tensors, scheduled)
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
            table = ModulationTable(transformer.transformer_blocks)
            table.entry(embeddings[0], batch, schedule=lambda: embeddings)

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
    return "" if patcher.get_attachment(OPTIMIZATION_KEY) is None else report_of(patcher)


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


def _forward_program(
    patcher: ModelPatcher,
    model: Any,
    model_options: dict[str, Any],
    tensors: InputTensors,
    scheduled: bool,
) -> ForwardProgram:
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
    return ForwardProgram(call, prediction, norm_out, lambda: paths_of(patcher))


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


class ImageTimes(NamedTuple):
    """Milliseconds by the processor's clock, and the latents."""

    sample: float
    decode: float
    latents: torch.Tensor


def random_vae(device: torch.device, *, small: bool) -> comfy.sd.VAE:
    """ComfyUI's VAE of Qwen-Image, or one with a twelfth of its channels."""
    tensors = {
        name: random_tensor(name, size, device).cpu()
        for name, size in vae_shapes(SMALL_DIM if small else PUBLISHED_DIM).items()
    }
    vae = comfy.sd.VAE(sd=tensors)
    vae.throw_exception_if_invalid()
    return vae


def text_encoder_shapes() -> Shapes:
    """Of ComfyUI's class; the published file holds the language model's head too."""
    model = Qwen25_7BVLI({}, torch.bfloat16, "meta", torch.nn)
    return shapes_of(model) | {"lm_head.weight": (VOCABULARY, TEXT_WIDTH)}


def write_models(folder: Path, device: torch.device | None = None) -> None:
    """Writes a Qwen-Image of the published sizes with random weights: 58 GB, made on the card.

    The folder gets diffusion_models, text_encoders and vae, each with one file in bf16 and in
    ComfyUI's names. A file that is there is left alone.
    """
    for path, shapes in (
        (folder / "diffusion_models" / TRANSFORMER, FULL_SIZE.tensors()),
        (folder / "text_encoders" / TEXT_ENCODER, text_encoder_shapes()),
        (folder / "vae" / VAE, vae_shapes(PUBLISHED_DIM)),
    ):
        write_random(path, shapes, device or torch.device("cuda"))


def write_random(path: Path, shapes: Shapes, device: torch.device) -> None:
    """Writes random weights of these shapes, unless the file is there."""
    if path.exists():
        return
    specs = {name: ("BF16", shape) for name, shape in shapes.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    with write_safetensors(path, SafetensorsLayout(specs, {"format": "pt"})) as file:
        for name, shape in shapes.items():
            file.write(name, random_tensor(name, shape, device).cpu())


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
