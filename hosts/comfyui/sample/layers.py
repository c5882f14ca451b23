"""Reads ComfyUI's linear layers for the block executor.

A weight may be on the card, in system RAM, or faulted in under dynamic VRAM; it may be quantized,
patched on its way by a LoRA, or wrapped by another extension. What is known is read through
ComfyUI's own cast context; everything else runs itself.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import comfy.memory_management
import comfy.model_management
import comfy.ops
import comfy_aimdo.torch
import torch
from comfy.model_patcher import ModelPatcher
from comfy.quant_ops import QuantizedTensor
from comfy_aimdo import model_vbar

from ....caches import cached
from ....families.registry import blocks_of
from ....optimizations import patches
from ....optimizations.blocks.block import LayerTensors
from ....optimizations.blocks.block_form import DENSE, LowRank, modulated_by, token_layers
from ....optimizations.linear import Gemm, known_gemm
from ....optimizations.stream import uploads_to
from ....optimizations.warm_up import rehearse, warm_up
from ....spec.formats import RowFormat, is_rotation
from ....verdict import Verdict
from .. import linear as operations
from ..lora.bypass import Beside, is_foreign
from .held import HeldWeights, row_scale, stored, waits
from .off_card import TENSORS, plain_parts

# Made once: every layer is asked in every forward pass.
_row_format = cached(RowFormat)
NOT_YET = Verdict("no fused block has asked for the weights")


class ComfyLayers:
    """Implements `optimizations.blocks.block.Layers` for one pass."""

    def __init__(
        self,
        model: Any,
        shape: torch.Size,
        held: MutableMapping[Any, HeldWeights] | None = None,
    ) -> None:
        # why the pass holds no weights; None where it does, or did
        self.moving: Verdict | None = NOT_YET
        self._model, self._shape = model, shape
        self._held = ({} if held is None else held).setdefault(model, HeldWeights())
        self._holds = False
        self.beside = Beside(model)  # the model's LoRAs as bypass

    @contextmanager
    def hold(self, blocks: Sequence[torch.nn.Module]) -> Iterator[Hashable | None]:
        with self._held.during(self._model, blocks, self, self._shape) as token:
            self.moving, self._holds = self._held.reason, token is not None
            try:
                yield token
            finally:
                self._holds = False

    def kind(self, layer: Any) -> str | RowFormat | None:
        # Every layer is asked in every forward pass, so past Module.__getattr__: a LoRA, or weights
        # that ComfyUI moves off the card, can change the answer at any time.
        own = layer.__dict__
        if is_foreign(layer) or own["_parameters"].get("weight") is None:
            return None
        if self.beside.runs_itself(layer):
            return None
        if type(layer) in operations.DENSE_CLASSES:
            return DENSE
        if (
            not operations.is_mixed(type(layer))
            or own["_parameters"].get("pre_quant_scale") is not None
        ):
            return None
        layout = own.get("layout_type")
        if layout is None:
            return DENSE
        params = getattr(own["_parameters"]["weight"], "_params", None)
        runs_itself = (
            own.get("_full_precision_mm", True)
            or own.get("comfy_force_cast_weights")
            or layer.weight_function
            or layer.bias_function
        )
        if params is None or runs_itself:
            return None
        if layout == operations.INT8_ROWS.packed:
            known = operations.is_packed_int8(params)
            return _row_format("int8", params.convrot_groupsize) if known else None
        storage, rotation = operations.LAYOUTS.get(layout), operations.rotation_of(params)
        if storage is None or (rotation and not is_rotation(rotation, layer.in_features)):
            return None
        return _row_format(storage, rotation)

    def tensors(
        self, layer: torch.nn.Module, like: torch.Tensor
    ) -> AbstractContextManager[LayerTensors]:
        if self._holds:
            return nullcontext(_tensors(*stored(layer), row_scale(layer)))
        return _Cast(layer, like)

    @staticmethod
    def stream(blocks: Sequence[torch.nn.Module], device: torch.device) -> None:
        """Brings the weights that dynamic VRAM has room for, each straight from where it is.

        ComfyUI first copies each into memory that it pins for it, half of the 16 s of an int8
        model's first prompt on an H200's host. Those that have such a copy, or change on their way
        by a LoRA, are left to it.
        """
        layers = [layer for block in blocks for layer in token_layers(block)]
        layers += [layer for block in blocks for layer in modulated_by(block)]
        with uploads_to(device) as put:
            for layer in layers:
                if not _waits_as_it_is(layer):
                    continue
                own = layer.__dict__
                signature = model_vbar.vbar_fault(own["_v"])
                if signature is None:
                    return  # the rest is streamed to the GPU when it is needed
                try:
                    if model_vbar.vbar_signature_compare(signature, own.get("_v_signature")):
                        continue
                    tensors = [*map(layer._parameters.get, TENSORS)]
                    place = comfy_aimdo.torch.aimdo_to_tensor(own["_v"], device)
                    kinds = comfy.memory_management.tensors_to_geometries(tensors)
                    there = comfy.memory_management.interpret_gathered_like(kinds, place)
                    for part, target in zip(*map(plain_parts, (tensors, there)), strict=True):
                        comfy.model_management.mark_mmap_dirty(part.untyped_storage())
                        put(part, target)
                    weight, bias = there
                    kept = {"_v_weight": weight, "_v_bias": bias, "_v_signature": signature}
                    patches.put(layer, **kept)
                finally:
                    model_vbar.vbar_unpin(own["_v"])

    def bring(self, blocks: Sequence[torch.nn.Module], like: torch.Tensor) -> None:
        """Brings what dynamic VRAM brings when a layer is first used, before any is."""
        if not waits(blocks):
            return
        self.stream(blocks, like.device)
        for layer in (layer for block in blocks for layer in token_layers(block)):
            if self.kind(layer) is None:
                layer(like.new_zeros((1, layer.in_features)))
                continue
            with self.tensors(layer, like):
                pass

    def low_rank(self, layer: torch.nn.Module) -> LowRank | None:
        return self.beside.lows.get(layer)

    is_foreign = staticmethod(is_foreign)

    def rounds(self, layer: torch.nn.Module) -> bool:
        return isinstance(self.kind(layer), RowFormat)

    def norm_weight(self, norm: Any, like: torch.Tensor) -> torch.Tensor:
        weight = norm.weight
        if weight.device == like.device and not norm.weight_function:
            return weight
        return comfy.ops.cast_bias_weight(norm, like)[0]

    def gemm(self, format: str, device: torch.device) -> Gemm:
        return known_gemm(format, device)


class _Cast:
    """A layer's tensors where `like` is, through ComfyUI's cast context where they need one."""

    def __init__(self, layer: torch.nn.Module, like: torch.Tensor) -> None:
        self._context: comfy.ops.CastBiasWeightContext | None = None
        parameters = layer._parameters
        weight: Any = parameters["weight"]
        self._as_stored = weight, parameters.get("bias")
        quantized = isinstance(weight, QuantizedTensor)
        # Past QuantizedTensor's own attributes, which are dispatched.
        values = weight._qdata if quantized else weight
        as_it_is = (
            values.device == like.device
            and (quantized or values.dtype == like.dtype)
            and not (layer.weight_function or layer.bias_function)
        )
        if not as_it_is:
            # want_requant: a LoRA that is merged on the way leaves a quantized weight quantized.
            options = {"compute_dtype": like.dtype, "want_requant": True} if quantized else {}
            self._context = comfy.ops.CastBiasWeightContext(
                layer, like, offloadable=True, **options
            )

    def __enter__(self) -> LayerTensors:
        weight, bias = self._as_stored if self._context is None else self._context.__enter__()
        return _tensors(weight, bias)

    def __exit__(self, *error: object) -> None:
        if self._context is not None:
            self._context.__exit__(*error)


def _tensors(
    weight: torch.Tensor, bias: torch.Tensor | None, row_scale: torch.Tensor | None = None
) -> LayerTensors:
    if not isinstance(weight, QuantizedTensor):
        return LayerTensors(weight, None, bias)
    if weight._layout_cls == operations.INT8_ROWS.packed:
        return LayerTensors(*operations.packed_parts(weight), bias)
    scale = weight._params.scale
    rows = weight._qdata.shape[0]
    if scale.numel() == 1 < rows:
        one = scale.reshape(1, 1).expand(rows, 1)
        scale = one.contiguous() if row_scale is None else row_scale
    return LayerTensors(weight._qdata, scale, bias)


def _waits_as_it_is(layer: torch.nn.Module) -> bool:
    """Returns whether a layer in pages has no pinned copy, and goes there unchanged."""
    own = layer.__dict__
    changes = (f"{name}{end}" for name in TENSORS for end in ("_function", "_lowvram_function"))
    if "_v" not in own or any(map(own.get, changes)):
        return False
    if any("pin" in pins for pins in own.get("_pins", {}).values()):
        return False
    tensors = [it for it in map(layer._parameters.get, TENSORS) if it is not None]
    return all(
        it.is_cpu
        and (isinstance(it, QuantizedTensor) or it.dtype == getattr(it, "_model_dtype", it.dtype))
        for it in tensors
    )


def compile_ahead(model: ModelPatcher) -> None:
    device = model.load_device

    def work(inner: Any) -> None:
        layers, blocks = ComfyLayers(inner, torch.Size()), blocks_of(inner.diffusion_model)
        rehearse(layers, blocks, inner.get_dtype_inference(), device)

    warm_up(device, work, model.model)
