"""Fills the modulation table of one ComfyUI model, and knows what its entries hold for.

The table stays in VRAM between runs, so that a second image of the same schedule computes
nothing; it leaves when ComfyUI moves a patcher with `on_detach` off the card.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from comfy.model_patcher import ModelPatcher

from ....families.comfyui import kind_of
from ....families.registry import blocks_of, modulation_of
from ....optimizations.blocks.block_form import query_layer
from ....optimizations.inventory import Inventory, parts_of
from ....optimizations.modulation import Entry, ModulationTable, TableFigures, compute_entries
from ....optimizations.patches import put
from ....spec.formats import format_gib
from ....verdict import Verdict
from ..linear import DENSE_CLASSES, is_mixed
from ..lora.bypass import is_foreign, state_of
from ..record import inner_phase
from .off_card import (
    OffCardLinear,
    OffCardModulation,
    PassFigures,
    compute_off_card,
    off_card_layers,
    plain_tensors,
)

MODULATION_KEY = "qwen_l40s_modulation"
# Of BaseModel.apply_model, behind x and t. ComfyUI passes them by place; a wrapper of another
# extension may pass them on by name.
CALL_ARGUMENTS = ("c_concat", "c_crossattn", "control", "transformer_options")


def by_name(
    args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns an APPLY_MODEL wrapper's arguments behind x and t, by name."""
    given = {**dict(zip(CALL_ARGUMENTS, args, strict=False)), **kwargs}
    return given, given.get("transformer_options") or {}


class Call(NamedTuple):
    t: torch.Tensor  # sigmas as APPLY_MODEL wrappers get them, (batch,)
    # the transformer_options; ComfyUI's samplers put the schedule into them
    options: dict[str, Any]
    given: dict[str, Any]  # all that the call is given behind x and t, by name
    # the model's, as the call began; another extension may exchange one inside of it
    blocks: Sequence[torch.nn.Module]


class _Current(NamedTuple):
    embedding: torch.Tensor
    entry: Entry
    copy: torch.Tensor | None


class _Layers:
    def __init__(self, blocks: Sequence[torch.nn.Module]) -> None:
        self.blocks = blocks
        self._names = tuple(modulation_of(blocks[0]).values()) if blocks else ()
        self._linears: list[torch.nn.Module] = []
        self.unknown: Verdict | None = None  # which of them is not the host's; None where all are
        for index, name in product(range(len(blocks)), self._names):
            module = getattr(blocks[index], name, None)
            if other := _unlike(module, name, type(query_layer(blocks[index]))):
                self.unknown = Verdict(f"{other} of block {index} differs from ComfyUI's own")
                return
            self._linears.append(module._modules["1"])
        given = dict(enumerate(blocks)), (), self._linears, is_foreign
        self._inventory = Inventory(*given, paths=self._names)
        self._marks: list[Any] = []
        self._sample = b""

    @property
    def changed(self) -> bool:
        return self.unknown is not None or self._inventory.changed() is not None

    def change_in_use(self, patcher: ModelPatcher) -> bool:
        """Returns whether somebody changes the weights in use, perhaps by the sigma."""
        for layer in self._linears:
            own = layer.__dict__.get("_linear", layer).__dict__
            functions = *own.get("weight_function", ()), *own.get("bias_function", ())
            if not all(getattr(it, "is_lowvram_patch", False) for it in functions):
                return True
        wrapped = patcher.weight_wrapper_patches
        return any(f".{name}.1." in key for key in wrapped for name in self._names)

    def look_again(self) -> None:
        """Has the weights looked at once more: in inference mode nothing counts their versions."""
        self._marks = []

    def weights(self) -> bytes:
        """Returns a sample of the weights, which changes with them, whoever changes them."""
        tensors = [tensor for layer in self._linears for tensor in plain_tensors(layer)]
        marks = [(it.data_ptr(), 0 if it.is_inference() else it._version) for it in tensors]
        if marks != self._marks:
            self._marks, self._sample = marks, sample_of(tensors)
        return self._sample


def _unlike(module: Any, name: str, beside: type) -> str | None:
    """Names the part of a modulation that may give more than its weights make of a timestep; None
    where it is a SiLU and a linear layer that nobody has changed.
    """
    if type(module) not in (torch.nn.Sequential, OffCardModulation) or len(module) != 2:
        return name
    activation, linear = module._modules.values()
    if type(activation) is not torch.nn.SiLU:
        return f"{name}.0"
    kind = type(linear)
    if not (kind in (*DENSE_CLASSES, OffCardLinear, beside) or is_mixed(kind)):
        return f"{name}.1"
    return next((path for path, part in parts_of(module, (), name) if is_foreign(part)), None)


# Of each tensor, spread over it so that each of the six parts of a layer's rows has one: whoever
# fuses a LoRA or scales weights changes all of them. Of 120 layers on the card it takes 2 ms.
PIECES, PIECE = 6, 64  # bytes


def sample_of(tensors: Iterable[torch.Tensor]) -> bytes:
    """Takes bytes out of each tensor, which change with it, whoever changes it."""
    found: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        # Other packs' tensors hold what they like.
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.is_meta:
            continue
        data = tensor.detach().contiguous().view(-1).view(torch.uint8)
        step = len(data) // PIECES
        if step >= 2 * PIECE:  # the last piece begins in the middle of its part
            data = data.as_strided((PIECES, PIECE), (step, 1), data.storage_offset() + step // 2)
        found.setdefault(data.device, []).append(data.reshape(-1))
    return b"".join(torch.cat(parts).cpu().numpy().tobytes() for parts in found.values())


class ModelModulation:
    """Gives the blocks of one BaseModel their modulation."""

    def __init__(self, model: Any) -> None:
        # Nothing here may hold the model or a part of it: its memory has to go when it goes.
        self._model = weakref.ref(model)
        self._call: Call | None = None
        self._patcher: Callable[[], ModelPatcher | None] = lambda: None
        layers = off_card_layers(model)
        for layer in layers:
            layer.__dict__["modulation"] = weakref.ref(self)
        self._off_card_bytes = sum(layer.nbytes for layer in layers)
        compute = weakref.WeakMethod(self._compute)
        self.table = ModulationTable(self._blocks, compute=lambda *given: compute()(*given))
        weakref.finalize(model, self.table.drop).atexit = False
        self.figures, self.passes = TableFigures(), PassFigures()
        self._current: _Current | None = None
        # By the model, which this may outlive.
        self._watched: WeakKeyDictionary[Any, _Layers] = WeakKeyDictionary()

    @classmethod
    def of(cls, model: Any) -> ModelModulation:
        found = model.__dict__.get(MODULATION_KEY)
        if found is None:
            found = cls(model)
            put(model, **{MODULATION_KEY: found})
        return found

    @property
    def patcher(self) -> ModelPatcher | None:
        """The patcher whose weights the model has: the one that samples, or the last that did."""
        current = self._model().current_patcher
        if current is not None:
            self._patcher = weakref.ref(current)
        return self._patcher()

    def start_run(self) -> None:
        if self.passes.inexact:
            self.table.drop()
        self.figures, self.passes = TableFigures(), PassFigures()
        for layers in self._watched.values():
            layers.look_again()

    @contextmanager
    def during(self, call: Call) -> Iterator[None]:
        """Knows the schedule for the length of an APPLY_MODEL call."""
        before = self._call, self._current
        self._call, self._current = call, None
        try:
            yield
        finally:
            self._call, self._current = before

    def entry(self, embedding: torch.Tensor) -> Entry:
        """Returns the modulation of all blocks for a timestep embedding, inside of `during`."""
        current = self._current
        if current is not None and current.embedding is embedding:
            return current.entry
        # The step's sigmas, one tensor for both prompts of a guided step, would tell the entry
        # without a wait for the card, but not for certain: a model_function_wrapper may change the
        # timestep of one prompt, and tensors of inference mode do not count their versions.
        batch = len(self._call.t)
        layers = self._layers()
        self.figures.fallback = self._fallback(layers)
        if self.figures.fallback:
            (entry,) = self._compute([embedding], batch)
            self.figures.direct += 1
        else:
            before = self.table.hits, self.table.filled
            schedule = lambda: self._schedule(embedding)  # noqa: E731
            entry = self.table.entry(embedding, batch, self._state(layers), schedule)
            self.figures.add(self.table, before)
        replaced = self._call.options.get("patches_replace", {}).get("dit")
        self._current = _Current(embedding, entry, embedding.clone() if replaced else None)
        return entry

    def rows(self, layer: OffCardLinear, embedding: torch.Tensor) -> torch.Tensor | None:
        """Returns an off-card layer's output from the table; None where it has none.

        ComfyUI's own blocks ask for the image stream with the whole embedding, then for the text
        stream with it or with its first half.
        """
        if self._call is None or torch.is_grad_enabled() or is_foreign(layer):
            return None
        if (layer.block, layer.stream) == (0, "image"):  # a pass through the model begins
            self.entry(embedding)
        if self._current is None:
            return None
        known, entry, copy = self._current
        rows = getattr(entry, layer.stream)[layer.block]
        # The embedding or its first half; another node may have replaced it.
        same = embedding.data_ptr() == known.data_ptr() and embedding.dtype == known.dtype
        if copy is not None:  # or may have written to it
            same = same and torch.equal(embedding, copy[: len(embedding)])
        return rows if same and len(rows) == len(embedding) else None

    @staticmethod
    def apply_model(
        executor: Any, x: torch.Tensor, t: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Runs a model with off-card layers, whose own blocks use the table (APPLY_MODEL)."""
        model, (given, options) = executor.class_obj, by_name(args, kwargs)
        call = Call(t, options, given, blocks_of(model.diffusion_model))
        with ModelModulation.of(model).during(call):
            return executor(x, t, *args, **kwargs)

    @staticmethod
    def outer_sample(executor: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Runs one sampling run of a model with off-card layers (OUTER_SAMPLE)."""
        ModelModulation.of(executor.class_obj.model_patcher.model).start_run()
        return executor(*args, **kwargs)

    @staticmethod
    def on_detach(patcher: ModelPatcher, unpatch_all: bool) -> None:
        """Takes the table off the card with the model (ON_DETACH)."""
        if unpatch_all:
            ModelModulation.of(patcher.model).table.drop()

    def lines(self) -> list[str]:
        passes, lines = self.passes, self.figures.lines()
        patcher = self._patcher()
        on_card = patcher is not None and patcher.load_device.type == "cuda"
        if self._off_card_bytes:
            size = format_gib(self._off_card_bytes)
            moved = "were not needed in this run"
            if passes.passes:
                moved = f"were uploaded to the GPU {passes.passes} times, in {passes.seconds:.2f} s"
            lines.append(f"modulation: {size} of weights stay in system RAM and {moved}")
        elif self.figures.timesteps and on_card and not patcher.is_dynamic():
            lines.append(
                "modulation: its weights stay in VRAM with the table; offload_modulation on in "
                "Load Qwen-Image Model keeps them in system RAM"
            )
        return lines + [f"modulation: {note}" for note in dict.fromkeys(passes.notes)]

    @property
    def _blocks(self) -> Sequence[torch.nn.Module]:
        return self._call.blocks if self._call else blocks_of(self._model().diffusion_model)

    def _fallback(self, layers: _Layers) -> Verdict | None:
        # Without a patcher nobody says when weights change, nor when the table may go.
        if self._model().current_patcher is None:
            return Verdict("no ComfyUI sampler runs the model")
        if torch.is_grad_enabled():
            return Verdict("gradients are recorded")
        if layers.change_in_use(self.patcher):
            return Verdict("another extension changes the weights when they are used")
        return layers.unknown

    def _layers(self) -> _Layers:
        model, blocks = self._model(), tuple(self._blocks)
        found = self._watched.get(model)
        if found is None or found.blocks != blocks or found.changed:
            found = self._watched[model] = _Layers(blocks)
        return found

    def _state(self, layers: _Layers) -> Hashable:
        patcher = self.patcher
        hooks = patcher.current_hooks.hooks if patcher.current_hooks else ()
        return (
            weak_identity(patcher.patches_uuid),
            layers.weights(),
            switches(),
            tuple((weak_identity(hook.hook_ref), hook.strength) for hook in hooks),
            state_of(patcher),
            tuple(
                (name, weak_identity(patch))
                for name, patch in patcher.object_patches.items()
                if name.startswith("diffusion_model")
            ),
        )

    def _schedule(self, embedding: torch.Tensor) -> list[torch.Tensor]:
        """Returns the embeddings of the run's timesteps in order; none where ComfyUI has none."""
        t, options, given, _ = self._call
        sigmas = options.get("sample_sigmas")
        if sigmas is None or len(sigmas) < 3:
            return []
        model = self._model()
        additional = given.get("additional_t_cond")
        if additional is not None:
            additional = additional.to(embedding.device)
        embeddings, embed = [], kind_of(model).embed
        for sigma in sigmas[:-1].to(t):
            timestep = model.model_sampling.timestep(sigma.expand(len(t))).float()
            if len(embedding) == 2 * len(t):
                timestep = torch.cat([timestep, timestep * 0])
            embeddings.append(embed(model.diffusion_model, timestep, embedding, additional))
        return embeddings

    def _compute(self, embeddings: Sequence[torch.Tensor], batch: int) -> list[Entry]:
        if self._off_card_bytes:
            with inner_phase("tables", self.patcher, timesteps=len(embeddings)):
                return compute_off_card(self._blocks, embeddings, batch, self.patcher, self.passes)
        return compute_entries(self._blocks, embeddings, batch)


def switches() -> Hashable:
    """Returns how torch rounds a product."""
    # Once a pack has set torch's newer one of TF32, reading the older one raises.
    matmul = torch.backends.cuda.matmul
    tf32 = getattr(matmul, "fp32_precision", None) or matmul.allow_tf32
    return tf32, getattr(matmul, "allow_fp16_accumulation", None)


def weak_identity(thing: Any) -> Hashable:
    """Tells a thing from others, and keeps it alive only where it cannot be held weakly."""
    try:
        return weakref.ref(thing)
    except TypeError:
        return id(thing)
