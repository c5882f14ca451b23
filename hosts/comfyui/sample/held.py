"""Whether the weights of a model's blocks stay where they are, for the length of a forward pass.

Without dynamic VRAM ComfyUI moves weights between two passes, and each way in which it does leaves
a mark on the model. Under dynamic VRAM the weights lie in pages that the driver may take away at
any time: pages that are all there are pinned for the pass, as ComfyUI does for its own graphs.
"""

from __future__ import annotations

import hashlib
import itertools
import operator
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any, ClassVar, NamedTuple

import torch
from comfy.quant_ops import QuantizedTensor
from comfy_aimdo import model_vbar

from ....optimizations.block import DENSE
from ....optimizations.block_form import HEAD_NORMS, token_layers
from ....optimizations.fallback import Fallback

PAGE = 32 << 20  # of dynamic VRAM, in bytes
# What is used of comfy_aimdo.
NEEDED = (
    *("vbar_fault", "vbar_unpin", "vbar_signature_compare"),
    *("ModelVBAR.get_residency", "ModelVBAR.get_watermark", "ModelVBAR.prioritize"),
)
UNKNOWN = Fallback("this comfy_aimdo is unknown", final=True)
PARTIAL = Fallback("some of the weights are in host memory")
HOOKS = Fallback("hooks change the weights between steps")
OWN_WAY = Fallback("some layers run ComfyUI's own way")
ON_THE_WAY = Fallback("weights are changed on their way to their layers")
CAST = Fallback("weights are cast on their way to their layers")
FIRST = Fallback("the first pass of a run reads the weights one by one")
TIGHT = Fallback("with all weights held, memory ran out")

Kind = Callable[[torch.nn.Module], "str | None"]


class Pages(NamedTuple):
    """A stretch of dynamic VRAM, as comfy_aimdo takes it; `address` and `size` in bytes."""

    vbar: Any
    address: int
    size: int

    @property
    def numbers(self) -> range:
        """The pages that it lies in."""
        start = self.address - self.vbar.base_addr
        return range(start // PAGE, -(-(start + self.size) // PAGE))


class HeldWeights:
    """Holds the weights of one model's blocks pass by pass, over its runs.

    Attributes:
        reason: Why the last pass held none; None where it did.
    """

    _of: ClassVar[weakref.WeakKeyDictionary[Any, HeldWeights]] = weakref.WeakKeyDictionary()
    _serials = itertools.count()

    def __init__(self) -> None:
        # No module: a model's memory has to go when it goes.
        self.reason: Fallback | None = None
        self._serial = next(self._serials)
        self._run: object = None
        self._marks: _Marks | None = None
        self._token: Hashable = None  # None until the layers have been looked at
        self._pages: list[Pages] = []
        self._signatures: list[bytes] = []
        self._tight: object = None  # the run in which memory ran out
        self._row_scales: weakref.WeakKeyDictionary[torch.nn.Module, torch.Tensor]
        self._row_scales = weakref.WeakKeyDictionary()

    @classmethod
    def of(cls, model: Any) -> HeldWeights:
        """The one of a BaseModel, made on first use."""
        return cls._of.setdefault(model, cls())

    @staticmethod
    def on_detach(patcher: Any, unpatch_all: bool) -> None:
        """ON_DETACH callback: nothing of it stays on the card without the model."""
        if unpatch_all:
            HeldWeights.of(patcher.model)._row_scales.clear()

    @contextmanager
    def during(
        self, model: Any, blocks: Sequence[torch.nn.Module], run: object, kind: Kind
    ) -> Iterator[Hashable | None]:
        """For one pass: a token of where the weights are, or None where they may move.

        Args:
            model: ComfyUI's BaseModel.
            run: Stands for the sampling run; None outside of one.
            kind: As `Layers.kind`.
        """
        with ExitStack() as pins:
            found = self._hold(model, blocks, run, kind, pins)
            self.reason = found if isinstance(found, Fallback) else None
            try:
                yield None if self.reason else found
            except torch.OutOfMemoryError:
                # Pinned weights do not make room, which they would have without.
                self._tight = run if self._pages and not self.reason else self._tight
                raise

    def row_scale(self, layer: torch.nn.Module) -> torch.Tensor | None:
        """The scale of a layer's rows, (N, 1), where the weight has one scale for all."""
        return self._row_scales.get(layer)

    def _hold(
        self,
        model: Any,
        blocks: Sequence[torch.nn.Module],
        run: object,
        kind: Kind,
        pins: ExitStack,
    ) -> Hashable | Fallback:
        patcher = model.current_patcher
        dynamic = patcher is not None and patcher.is_dynamic()
        if patcher is not None and patcher.hook_patches:
            return HOOKS
        if getattr(model, "model_lowvram", False):
            return PARTIAL
        if dynamic and not _knows_pages():
            return UNKNOWN
        try:
            marks = _Marks.of(model, blocks, dynamic)
        except (AttributeError, KeyError):
            return OWN_WAY
        if run is None or run is not self._run or not marks.same(self._marks):
            self._run, self._marks, self._token, self._pages = run, marks, None, []
            if dynamic:
                # It may need more memory than the last one, which pinned weights would not yield.
                return FIRST
        if isinstance(self._token, Fallback):
            return self._token
        if dynamic and run is self._tight:
            return TIGHT
        if self._token is None:
            self._pages = _pages(blocks)
            if not _all_resident(self._pages):
                return PARTIAL
            self._signatures = []
        signatures = self._pin(pins)
        if signatures is None or (self._token is not None and signatures != self._signatures):
            pins.close()
            self._token = None
            return PARTIAL
        if self._token is None:
            found = self._look(model, blocks, kind)
            if isinstance(found, Fallback):
                pins.close()
                self._token = None if found is PARTIAL and dynamic else found
                return found
            self._token, self._signatures = found, signatures
        return self._token

    def _pin(self, pins: ExitStack) -> list[bytes] | None:
        """Pins the pages until `pins` closes; what they say of their contents, None for absent."""
        signatures = []
        for pages in self._pages:
            signature = model_vbar.vbar_fault(pages)
            if signature is None:
                return None
            pins.callback(model_vbar.vbar_unpin, pages)
            signatures.append(bytes(signature))
        if self._pages:
            pins.callback(_lift_watermark, self._pages[-1])
        return signatures

    def _look(
        self, model: Any, blocks: Sequence[torch.nn.Module], kind: Kind
    ) -> Hashable | Fallback:
        """At every layer: a token of the addresses and layouts of all tensors."""
        if not all(map(token_layers, blocks)):
            return OWN_WAY
        dtype = model.get_dtype_inference()
        norms = [block.get_submodule(name) for block in blocks for name in HEAD_NORMS]
        layers = [layer for block in blocks for layer in token_layers(block)]
        device = norms[0].weight.device
        places: list[Any] = [self._serial, model.current_weight_patches_uuid]
        for module in (*norms, *layers):
            if getattr(module, "weight_function", None) or getattr(module, "bias_function", None):
                return ON_THE_WAY
        for norm in norms:
            if norm.weight.device != device:
                return PARTIAL
            places.append(_place(norm.weight))
        for layer in layers:
            form = kind(layer)
            if form is None:
                return OWN_WAY
            if not _is_resident(layer):
                return PARTIAL
            weight, bias = stored(layer)
            if isinstance(weight, QuantizedTensor) == (form == DENSE):
                return CAST
            parts = [weight, bias] if form == DENSE else self._parts(layer, weight, bias)
            for part in parts:
                if part is not None and part.device != device:
                    return PARTIAL
                places.append(part if part is None else _place(part))
            used = [bias] if form != DENSE and "_v" not in layer.__dict__ else [weight, bias]
            if any(part is not None and part.dtype != dtype for part in used):
                return CAST
        return hashlib.blake2b(repr(places).encode(), digest_size=16).digest()

    def _parts(
        self, layer: torch.nn.Module, weight: QuantizedTensor, bias: torch.Tensor | None
    ) -> list[torch.Tensor | None]:
        values, scale = weight._qdata, weight._params.scale
        rows = len(values)
        if scale.numel() == 1 < rows and scale.device == values.device:
            # One tensor as long as the model is on the card, with the value of today.
            kept = self._row_scales.get(layer)
            with torch.inference_mode():
                if kept is None or (kept.device, len(kept)) != (scale.device, rows):
                    kept = self._row_scales[layer] = scale.new_empty((rows, 1))
                kept.copy_(scale.reshape(1, 1).expand(rows, 1))
            scale = kept
        return [values, scale, bias]


def stored(layer: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weight and bias of a layer that is held, where they are."""
    own = layer.__dict__
    if "_v" in own:
        return own["_v_weight"], own["_v_bias"]
    return own["_parameters"]["weight"], own["_parameters"]["bias"]


@cache
def _knows_pages() -> bool:
    try:
        operator.attrgetter(*NEEDED)(model_vbar)
    except AttributeError:
        return False
    return True


class _Marks(NamedTuple):
    """What changes with every way in which ComfyUI moves weights, whichever clone does it.

    Attributes:
        functions: Of a layer; `load` makes a new list.
        norm: Of a norm, whose weight is a new parameter wherever dynamic VRAM loads or unloads.
        values: That are compared.
    """

    functions: list[Any]
    norm: Callable[[], torch.Tensor | None]
    values: tuple[Any, ...]

    @classmethod
    def of(cls, model: Any, blocks: Sequence[torch.nn.Module], dynamic: bool) -> _Marks:
        """The model's now.

        Raises:
            AttributeError, KeyError: Its blocks have another form.
        """
        attn = blocks[0].attn
        values = (
            model.device,
            model.current_weight_patches_uuid,
            model.model_loaded_weight_memory,
        )
        if not dynamic:  # another extension may move a block on its own
            values += tuple(_address_of(block) for block in blocks)
        return cls(attn.to_q.weight_function, weakref.ref(attn.norm_q.weight), values)

    def same(self, other: _Marks) -> bool:
        """Whether nothing has moved between them."""
        return (
            self.functions is other.functions
            and self.norm() is other.norm()
            and self.values == other.values
        )


def _address_of(block: torch.nn.Module) -> int:
    # Past Module.__getattr__: it is asked of every block in every pass.
    layer = block._modules["attn"]._modules["to_q"]
    return _plain(layer._parameters["weight"]).data_ptr()


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._qdata if isinstance(tensor, QuantizedTensor) else tensor


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    tensor = _plain(tensor)
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def _pages(blocks: Sequence[torch.nn.Module]) -> list[Pages]:
    """The pages of all layers, each stretch of neighbours as one; none of a model without."""
    layers = (layer.__dict__ for block in blocks for layer in token_layers(block))
    found: list[Pages] = []
    for part in sorted((Pages(*own["_v"]) for own in layers if "_v" in own), key=lambda it: it[1]):
        if found and found[-1].vbar is part.vbar and part.numbers.start <= found[-1].numbers.stop:
            end = max(found[-1].address + found[-1].size, part.address + part.size)
            found[-1] = found[-1]._replace(size=end - found[-1].address)
        else:
            found.append(part)
    return found


def _all_resident(stretches: Sequence[Pages]) -> bool:
    """Whether all pages are there; asks for none."""
    states = {id(pages.vbar): pages.vbar.get_residency() for pages in stretches}
    return all(
        number < len(states[id(pages.vbar)]) and states[id(pages.vbar)][number] & 1
        for pages in stretches
        for number in pages.numbers
    )


def _is_resident(layer: torch.nn.Module) -> bool:
    """Whether a layer's pages, where it has any, still hold what it has put into them."""
    own = layer.__dict__
    if "_v" not in own:
        return True
    signature = model_vbar.vbar_fault(own["_v"])
    if signature is None:
        return False
    model_vbar.vbar_unpin(own["_v"])
    return model_vbar.vbar_signature_compare(signature, own.get("_v_signature"))


def _lift_watermark(last: Pages) -> None:
    """Undoes that memory which was short in a pass has marked the pinned pages as too many.

    They are taken away from the top down, and the search passes over those that are pinned: to
    the bottom. Once they are no longer pinned, as many go as are needed.
    """
    if last.vbar.get_watermark() < last.numbers.stop:
        last.vbar.prioritize()
