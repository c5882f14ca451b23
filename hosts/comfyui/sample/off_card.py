"""Keeps the weights of modulation layers in system RAM while the model runs.

They hold a third of the parameters and see nothing but the timestep, so that a table of their
outputs stands in for them on the card. ComfyUI moves and counts what a module has as parameters:
these are none. They are in `state_dict()`, by which LoRA keys map and files are written.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any

import comfy.model_management
import torch
from comfy.model_patcher import ModelPatcher
from comfy.quant_ops import QuantizedTensor

from ....families.comfyui import kind_of
from ....families.registry import blocks_of, modulation_of
from ....optimizations.modulation import (
    Entry,
    ModulationLayer,
    compute_entries,
    modulation_layers,
)
from ....optimizations.patches import patched, put
from ....optimizations.stream import WeightStream
from ....planning.phases import LAYERS_ON_CARD
from ....spec.formats import format_gib
from ..prepared import PreparedPatcher
from ..record import running

TENSORS = ("weight", "bias")
FUNCTIONS = ("weight_function", "bias_function")


class OffCardLinear(torch.nn.Module):
    """Stands instead of one of the host's Linear layers and runs it."""

    # By this ComfyUI knows that it has to merge patches while it saves.
    comfy_cast_weights = True

    def __init__(self, linear: torch.nn.Module, key: str, block: int, stream: str) -> None:
        super().__init__()
        # Past Module.__setattr__, which would make it a submodule with parameters.
        self.__dict__["_linear"] = linear
        # As ComfyUI sets it where a layer may be in another dtype than what it is given.
        put(linear, comfy_cast_weights=True)
        self.key, self.block, self.stream = key, block, stream
        self.is_on_card = False
        self.__dict__["modulation"] = lambda: None  # weakly, what has the table

    def __setattr__(self, name: str, value: Any) -> None:
        """Hands weights on: ComfyUI sets them when it takes a patch back."""
        if name in TENSORS:
            put(self._linear, **{name: value})
        else:
            super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        # What ComfyUI reads of a layer by its key: the weights, how a quantized one is patched, and
        # by its functions that it can be trained.
        known = *TENSORS, *FUNCTIONS, "in_features", "out_features", "layout_type"
        if name in known or name.startswith(("set_", "convert_")):
            return getattr(self.__dict__["_linear"], name)
        return super().__getattr__(name)

    def parts(self) -> list[torch.Tensor]:
        return plain_tensors(self._linear)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts())

    @contextmanager
    def on_card(self, parts: list[torch.Tensor], patcher: ModelPatcher | None) -> Iterator[None]:
        """Runs with copies of its tensors, and with the patches that are on them."""
        self.is_on_card = True
        try:
            with patched(self._copies(iter(parts), patcher)):
                yield
        finally:
            self.is_on_card = False

    def _copies(
        self, parts: Iterator[torch.Tensor], patcher: ModelPatcher | None
    ) -> Iterator[tuple[dict[str, Any], str, Any]]:
        own = self._linear.__dict__["_parameters"]
        for name in TENSORS:
            if own.get(name) is not None:
                yield own, name, _rebuilt(own[name], parts)
        for name in TENSORS if patcher is not None else ():
            key = f"{self.key}.{name}"
            yield own, name, _patched(patcher, key, own.get(name))
            # What a node has wrapped it in: ComfyUI calls that on the weight in its last dtype.
            wrappers = list(patcher.weight_wrapper_patches.get(key, ()))
            yield self._linear.__dict__, f"{name}_function", wrappers

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.is_on_card:
            return self._linear(x, *args, **kwargs)
        modulation = self.modulation()
        patcher = None if modulation is None else modulation.patcher
        with self.on_card([part.to(x.device) for part in self.parts()], patcher):
            return self._linear(x, *args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """Returns the state dict of ComfyUI's layer, which names parts of a quantized weight."""
        return self._linear.state_dict(*args, **kwargs)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        linear = self._linear
        if "weight" not in linear._parameters:
            # A layer of a quantized model, or any under dynamic VRAM, which loads itself. The model
            # that ComfyUI also loads without dynamic VRAM takes copies so: its hooks write into
            # weights, and the mapping of a file may then only be read.
            linear._load_from_state_dict(state_dict, prefix, *rest)
            return
        missing = rest[2]
        for name in TENSORS:
            tensor = state_dict.get(f"{prefix}{name}")
            if tensor is None:
                missing.append(f"{prefix}{name}")
                continue
            # Taken over as it is mapped; only another dtype is copied, as the host's loading does.
            own = getattr(linear, name)
            dtype = getattr(linear, f"{name}_comfy_model_dtype", None) if own is None else own.dtype
            tensor = tensor.to(dtype or tensor.dtype)
            put(linear, **{name: torch.nn.Parameter(tensor, requires_grad=False)})


class OffCardModulation(torch.nn.Sequential):
    """A block's `img_mod` or `txt_mod`: SiLU and an OffCardLinear, or the rows of the table."""

    # What the table holds changes from one step to the next.
    @torch.compiler.disable
    def forward(self, embedding: torch.Tensor) -> torch.Tensor:
        linear: Any = self[1]
        table = None if linear.is_on_card else linear.modulation()
        rows = None if table is None else table.rows(linear, embedding)
        return super().forward(embedding) if rows is None else rows


class _OffCard:
    def _load_list(self, *args: Any, **kwargs: Any) -> list[tuple[Any, ...]]:
        found = super()._load_list(*args, **kwargs)  # type: ignore[misc]
        return [entry for entry in found if not any(isinstance(x, OffCardLinear) for x in entry)]

    def clone(self, *args: Any, **kwargs: Any) -> ModelPatcher:
        """Clones; a clone without dynamic VRAM, for torch.compile or hooks, is one of these too."""
        made = super().clone(*args, **kwargs)  # type: ignore[misc]
        if type(made) is ModelPatcher:
            put(made, __class__=OffCardPatcher)
        return made


class OffCardPatcher(_OffCard, ModelPatcher):
    """ComfyUI's ModelPatcher of a model with OffCardLinear layers."""


class OffCardDynamicPatcher(_OffCard, PreparedPatcher):
    """The same under dynamic VRAM."""

    def __new__(cls, model: Any = None, load_device: Any = None, *args: Any, **kwargs: Any) -> Any:
        # ComfyUI has no dynamic VRAM on the CPU.
        if load_device is not None and comfy.model_management.is_device_cpu(load_device):
            return OffCardPatcher(model, load_device, *args, **kwargs)
        return super().__new__(cls, model, load_device, *args, **kwargs)


def take_off_card(model: Any) -> None:
    """Puts OffCardLinear layers into a BaseModel that has no weights yet."""
    stack = kind_of(model).family.stack
    for index, block in enumerate(blocks_of(model.diffusion_model)):
        for stream, name in modulation_of(block).items():
            activation, linear = getattr(block, name)
            key = f"diffusion_model.{stack}.{index}.{name}.1"
            off_card = OffCardLinear(linear, key, index, stream)
            put(block, **{name: OffCardModulation(activation, off_card)})


def off_card_layers(model: torch.nn.Module) -> list[OffCardLinear]:
    """Returns the OffCardLinear layers of a BaseModel or a transformer, in the order of blocks."""
    return [module for module in model.modules() if isinstance(module, OffCardLinear)]


def named_weights(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Returns `named_parameters`, with the weights that are off the card."""
    yield from module.named_parameters()
    for name, layer in module.named_modules():
        if isinstance(layer, OffCardLinear):
            for part in TENSORS:
                tensor = getattr(layer, part)
                if tensor is not None:
                    yield f"{name}.{part}", tensor


def plain_tensors(layer: torch.nn.Module) -> list[torch.Tensor]:
    return plain_parts(getattr(layer, name) for name in TENSORS)


def plain_parts(tensors: Iterable[torch.Tensor | None]) -> list[torch.Tensor]:
    """Returns the tensors, and instead of a quantized one each that it is made of."""
    found = []
    for tensor in tensors:
        if isinstance(tensor, QuantizedTensor):
            found += [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
        elif tensor is not None:
            found.append(tensor.detach())
    return found


def _rebuilt(tensor: torch.Tensor, parts: Iterator[torch.Tensor]) -> torch.Tensor:
    if not isinstance(tensor, QuantizedTensor):
        return next(parts)
    names, about = tensor.__tensor_flatten__()
    found = {name: next(parts) for name in names}
    return type(tensor).__tensor_unflatten__(found, about, tensor.shape, tensor.stride())


def _patched(patcher: ModelPatcher, key: str, tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Patches a weight as ComfyUI does while it loads one to a card, bit for bit."""
    # The patches of hooks are in the weight already.
    if tensor is None or key not in patcher.patches:
        return tensor
    return patcher.patch_weight_to_device(key, device_to=tensor.device, return_weight=True)


# Brings weights that wait in system RAM past the card, and computes the modulation on the way.

logger = logging.getLogger(__name__)


@dataclass
class PassFigures:
    passes: int = 0
    seconds: float = 0.0
    inexact: bool = False
    notes: list[str] = field(default_factory=list)

    def note(self, sentence: str) -> None:
        self.notes.append(sentence)
        logger.warning("Qwen-Image Accelerator, modulation: %s.", sentence)


def compute_off_card(
    blocks: Sequence[torch.nn.Module],
    embeddings: Sequence[torch.Tensor],
    batch: int,
    patcher: ModelPatcher | None,
    figures: PassFigures,
) -> list[Entry]:
    """Computes `compute_entries` of blocks whose modulation is of OffCardLinear layers.

    Where the card has no room for the layers on their way, ComfyUI is asked to make some; where
    that does not help, the CPU computes.
    """
    figures.passes += 1
    modules = [layer.module for layer in modulation_layers(blocks)]
    if not all(isinstance(module, OffCardModulation) for module in modules):
        return compute_entries(
            blocks, embeddings, batch
        )  # another extension's, which run themselves
    layers = [module[1] for module in modules]
    device = embeddings[0].device
    try:
        return _streamed(blocks, layers, embeddings, batch, patcher, figures)
    except torch.OutOfMemoryError:
        pass  # outside of the clause, where the exception holds what is to be freed
    needed = LAYERS_ON_CARD * max(layer.nbytes for layer in layers)
    _make_room(needed, device)
    figures.note(
        f"the GPU had no room for {format_gib(needed)} of weights to upload, so ComfyUI offloaded "
        "other models first"
    )
    try:
        return _streamed(blocks, layers, embeddings, batch, patcher, figures)
    except torch.OutOfMemoryError:
        pass
    figures.note(
        "computed on the CPU, because the GPU has no room for one layer's weights; the CPU rounds "
        "differently, so free VRAM for an exact image"
    )
    figures.inexact = True
    on_cpu = [embedding.cpu() for embedding in embeddings]
    entries = _streamed(blocks, layers, on_cpu, batch, patcher, figures)
    return [Entry(entry.image.to(device), entry.text.to(device)) for entry in entries]


def _streamed(
    blocks: Sequence[torch.nn.Module],
    layers: Sequence[OffCardLinear],
    embeddings: Sequence[torch.Tensor],
    batch: int,
    patcher: ModelPatcher | None,
    figures: PassFigures,
) -> list[Entry]:
    start, device = time.perf_counter(), embeddings[0].device
    stream = WeightStream([layer.parts() for layer in layers], device)
    entries = compute_entries(blocks, embeddings, batch, _walk(blocks, stream, patcher))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        if run := running(patcher):
            run.look()
        # A step has no use for blocks of a layer's size, and would allocate others as well.
        torch.cuda.empty_cache()
    seconds = time.perf_counter() - start
    figures.seconds += seconds
    if stream.note:
        figures.note(stream.note.removesuffix("."))
    logger.info(
        "Qwen-Image Accelerator: the modulation of %d timesteps took %.2f s and uploaded %s of "
        "weights to the GPU.",
        len(embeddings),
        seconds,
        format_gib(stream.bytes),
    )
    return entries


def _walk(
    blocks: Sequence[torch.nn.Module], stream: WeightStream, patcher: ModelPatcher | None
) -> Iterator[ModulationLayer]:
    on_card: Any = iter(stream)
    with closing(on_card):
        for layer, parts in zip(modulation_layers(blocks), on_card, strict=True):
            with layer.module[1].on_card(parts, patcher):
                yield layer


def _make_room(needed: int, device: torch.device) -> None:
    loaded = comfy.model_management.current_loaded_models
    keep = [model for model in loaded if model.currently_used]
    comfy.model_management.free_memory(needed, device, keep_loaded=keep)
    comfy.model_management.soft_empty_cache()


# Without dynamic VRAM ComfyUI reserves a tenth more than the weights it is about to load, 2.5 GiB
# for a transformer in bf16, and besides that twice what it guesses for a step. On a card where
# transformer, text encoder and a step fit by some hundred MiB, a part of the text encoder then
# leaves.

# ComfyUI guesses 1.8, which is 576 MiB for one 1024x1024 image in bf16; the whole step, with the
# workspaces of its kernels, took 0.35 GiB there and 0.58 at 1328x1328 (NVIDIA H200).
STEP_FACTOR = 1.1
RESERVED_SHARE = 0.1


def require_less_memory(model: Any, weights: int, device: torch.device) -> None:
    """Has a BaseModel's `memory_required` leave out what ComfyUI reserves for a step already.

    Only where weights and a step fit what is free: there the tenth is never used. Elsewhere ComfyUI
    gets the whole figure, by which it also decides how much of the model it loads.
    """
    reference = weakref.ref(model)

    def memory_required(*args: Any, **kwargs: Any) -> float:
        model = reference()
        needed = type(model).memory_required(model, *args, **kwargs)
        if model.model_loaded_weight_memory:
            return needed
        free = comfy.model_management.get_free_memory(device)
        fits = weights + needed + comfy.model_management.minimum_inference_memory() <= free
        return max(0.0, needed - RESERVED_SHARE * weights) if fits else needed

    put(model, memory_usage_factor=STEP_FACTOR, memory_required=memory_required)
