"""Makes a ComfyUI MODEL of Qwen-Image fast, with fused blocks, modulation tables and a chosen
attention.

Everything hangs on a clone of the patcher, in ComfyUI's own hooks: a wrapper around each forward
pass, one around each sampling run, and the attention slot. Without them ComfyUI's own code runs,
bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import CallbacksMP, WrappersMP

from ....errors import SettingError
from ....families.comfyui import kind_of
from ....families.registry import blocks_of, spec_of
from ....optimizations.attention import MOST_ERROR, is_lossy
from ....optimizations.blocks.block_form import heads_of, query_layer
from ....optimizations.patches import ABSENT, swap
from ....verdict import read_or
from ..contract import unsupported_model
from ..lora.bypass import compute_loras
from ..prepared import prepare_once
from .attention import SLOT, SlotAttention
from .layers import compile_ahead
from .measure import record_runs
from .run import OPTIMIZATION_KEY, PARTS_KEY, ComfyOptimization, check_parts

# ComfyUI's own attention, and with it whatever another node has put into the slot.
HOST_ATTENTION = "comfyui"


@dataclass(frozen=True)
class OptimizeSettings:
    """The switches of `optimize`."""

    blocks: bool = True  # fused blocks with modulation tables
    # "auto" for what the model file says, else for the fastest exact backend; the name of a
    # backend; "fast"; or "comfyui"
    attention: str = "auto"
    # whether fp32 products are rounded to TF32 during a run; bf16 models have next to none
    tf32: bool = False
    cudnn_benchmark: bool = False  # whether cuDNN tries out its convolutions during a run
    attention_error: float = MOST_ERROR  # the largest relative error that "fast" allows

    def __post_init__(self) -> None:
        if not 0 < self.attention_error <= 1:
            raise SettingError(
                f"max_8bit_error (attention_error) is {self.attention_error!r}, but must be "
                f"above 0 and at most 1: use {MOST_ERROR}."
            )


def optimize(model: ModelPatcher, settings: OptimizeSettings | None = None) -> ModelPatcher:
    """Returns a clone that runs fast, or the same patcher for a model that is not Qwen-Image.

    Optimizing a second time replaces what the first time did.

    Raises:
        SettingError: There is no attention backend of that name.
        UnavailableError: The attention that was asked for by name cannot run here.
    """
    if unsupported_model(model):
        return model
    settings = settings or OptimizeSettings()
    clone = restore(model)
    prepare_once(clone)
    options = clone.model_options["transformer_options"]
    others = options.get(SLOT)
    attention = None
    if settings.attention != HOST_ATTENTION and not (others and settings.attention == "auto"):
        shape = kind_of(model.model).family.members[0].transformer
        heads = read_or((shape.heads, shape.head_dim), _heads, model.model)
        form = model.load_device, model.model.get_dtype_inference(), *heads
        lossy = is_lossy(settings.attention, *form)
        attention = SlotAttention(settings.attention, lossy, others, settings.attention_error)
        swap(options, SLOT, attention)
    optimization = ComfyOptimization(
        settings.blocks, attention, settings.tf32, settings.cudnn_benchmark
    )
    optimization.read_file(model.model, options)
    clone.set_attachments(OPTIMIZATION_KEY, optimization)
    record_runs(clone, OPTIMIZATION_KEY)
    if not clone.get_wrappers(WrappersMP.OUTER_SAMPLE, PARTS_KEY):  # of our loader's
        clone.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, OPTIMIZATION_KEY, check_parts)
    if settings.blocks:
        compute_loras(clone, OPTIMIZATION_KEY)
    if settings.blocks or attention is not None:
        clone.add_wrapper_with_key(
            WrappersMP.APPLY_MODEL, OPTIMIZATION_KEY, optimization.apply_model
        )
    clone.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, OPTIMIZATION_KEY, optimization.outer_sample)
    clone.add_callback_with_key(CallbacksMP.ON_DETACH, OPTIMIZATION_KEY, optimization.on_detach)
    if settings.blocks:
        compile_ahead(model)
    return clone


def _heads(model: Any) -> tuple[int, int]:
    # Their number and their width, where another pack has not put in other blocks.
    block = next(filter(spec_of, blocks_of(model.diffusion_model)))
    heads = heads_of(block)
    return heads, query_layer(block).in_features // heads


def restore(model: ModelPatcher) -> ModelPatcher:
    """Returns a clone without anything that `optimize` has added."""
    clone = model.clone()
    for kind in (WrappersMP.OUTER_SAMPLE, WrappersMP.APPLY_MODEL):
        clone.remove_wrappers_with_key(kind, OPTIMIZATION_KEY)
    clone.remove_callbacks_with_key(CallbacksMP.ON_DETACH, OPTIMIZATION_KEY)
    clone.remove_attachments(OPTIMIZATION_KEY)
    options = clone.model_options["transformer_options"]
    filled = options.get(SLOT)
    if isinstance(filled, SlotAttention):
        swap(options, SLOT, ABSENT if filled.before is None else filled.before)
    return clone


def report_of(model: ModelPatcher) -> str:
    optimization = model.get_attachment(OPTIMIZATION_KEY)
    return str(unsupported_model(model) or "") if optimization is None else optimization.report()
