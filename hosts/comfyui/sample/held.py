"""Finds out whether the weights of a model's blocks stay in place for the length of a forward pass.

Without dynamic VRAM ComfyUI moves weights between two passes, and each way in which it does leaves
a mark on the model. Under dynamic VRAM the weights lie in pages that the driver may take away at
any time. If all pages are there, they are pinned for the pass, as ComfyUI does for its graphs.
"""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from comfy import model_management as management
from comfy.quant_ops import QuantizedTensor
from comfy_aimdo import model_vbar

from ....caches import cached, remembered
from ....families.registry import spec_of
from ....optimizations.blocks.block_form import DENSE, head_norms, query_layer, token_layers
from ....verdict import Verdict
from ..linear import INT8_ROWS, packed_parts
from ..lora.bypass import Beside

PAGE = 32 << 20  # of dynamic VRAM, in bytes
# What is used of comfy_aimdo.
NEEDED = (
    *("vbar_fault", "vbar_unpin", "vbar_signature_compare"),
    *("ModelVBAR.get_residency", "ModelVBAR.get_watermark", "ModelVBAR.prioritize"),
)
UNKNOWN = Verdict("this version of comfy_aimdo is unknown", final=True)
PARTIAL = Verdict("some of the weights are in system RAM")
HOOKS = Verdict("hooks change the weights between steps")
OWN_WAY = Verdict("some layers run ComfyUI's code")
ON_THE_WAY = Verdict("weights are changed when their layers run")
CAST = Verdict("weights are cast when their layers run")
ROOM = Verdict("the first forward pass of a run may need the weights' memory")
TIGHT = Verdict("memory ran out while all weights were kept in VRAM")


class Pages(NamedTuple):
    """A stretch of dynamic VRAM, as comfy_aimdo takes it; `address` and `size` in bytes."""

    vbar: Any
    address: int
    size: int

    @property
    def numbers(self) -> range:
        start = self.address - self.vbar.base_addr
        return range(start // PAGE, -(-(start + self.size) // PAGE))


class HeldWeights:
    """Holds the weights of one model's blocks, pass by pass, run by run; keeps none."""

    def __init__(self) -> None:
        self.reason: Verdict | None = None
        self._marks: _Marks | None = None
        self._stores: list[dict[str, Any]] = []  # of the layers' parameters
        self._places = 0  # where all tensors were as the run began
        self._token: Hashable = None  # None until the layers have been looked at
        self._pages: list[Pages] = []
        self._signatures: list[bytes] = []
        self._found: tuple[Any, _Found] = None, {}  # in these pages, with these patches
        self._tight = False

    def start_run(self) -> None:
        """Keeps the token where nothing moves; under dynamic VRAM a run may find less room."""
        self._stores, self._tight = [], False
        if self._pages or isinstance(self._token, Verdict):
            self._marks = None

    @contextmanager
    def during(
        self, model: Any, blocks: Sequence[torch.nn.Module], read: Any, shape: torch.Size
    ) -> Iterator[Hashable | None]:
        """Holds the weights for one pass: a token of where they are; None where they may move."""
        with ExitStack() as pins:
            found = self._hold(model, blocks, read, shape, pins)
            self.reason = found if isinstance(found, Verdict) else None
            try:
                yield None if self.reason else found
            except torch.OutOfMemoryError:
                # Pinned weights do not make room, which they would have without.
                self._tight |= bool(self._pages) and not self.reason
                raise

    def _hold(
        self,
        model: Any,
        blocks: Sequence[torch.nn.Module],
        read: Any,
        shape: torch.Size,
        pins: ExitStack,
    ) -> Hashable | Verdict:
        patcher = model.current_patcher
        dynamic = "dynamic_vbars" in model.__dict__ or (
            patcher is not None and patcher.is_dynamic()
        )
        if patcher is not None and patcher.hook_patches:
            return HOOKS
        if getattr(model, "model_lowvram", False):
            return PARTIAL
        if dynamic and not _knows_pages():
            return UNKNOWN
        try:
            if not self._stores:
                layers = (layer for block in blocks for layer in token_layers(block))
                self._stores = [layer._parameters for layer in layers]
                places = _places(blocks, [] if dynamic else self._stores, read.beside)
                if places != self._places:
                    self._places, self._marks = places, None
            marks = _marks(model, blocks, [] if dynamic else self._stores, read.beside)
        except (AttributeError, KeyError):
            return OWN_WAY
        if self._marks is None or not _are_same(marks, self._marks):
            self._marks, self._token, self._pages = marks, None, []
            if dynamic and not _has_room(model, shape):
                return ROOM  # which pinned weights would not make
        if isinstance(self._token, Verdict):
            return self._token
        if self._tight:
            return TIGHT
        known = self._token is not None
        if dynamic and not known:
            self._pages = _pages(blocks)
            if not _all_resident(self._pages):
                read.stream(blocks, model.device)
                return PARTIAL
        signatures = self._pin(pins)
        if signatures is None or (known and signatures != self._signatures):
            found: Hashable = PARTIAL
        elif known:
            return self._token
        else:
            key = signatures, marks[0], self._places
            if self._found[0] != key:
                self._found = key, {}
            found = _look(model, blocks, read, self._found[1])
            self._signatures = signatures
        moves = found is PARTIAL and dynamic  # what is read in this pass is there in the next
        self._token = None if moves else found
        if isinstance(found, Verdict):
            pins.close()
        return found

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


def waits(blocks: Sequence[torch.nn.Module]) -> bool:
    """Returns whether dynamic VRAM has yet to bring a layer's weights to the card."""
    pages = _pages(blocks)
    return bool(pages) and not _all_resident(pages)


# A layer's scale for each row, where its weight has one for all: in one place as long as the model
# is on the card, so that a token holds from run to run.
_row_scales: WeakKeyDictionary[torch.nn.Module, torch.Tensor] = remembered(WeakKeyDictionary())


def drop_row_scales(blocks: Sequence[torch.nn.Module]) -> None:
    """Drops what was made for the weights of blocks, which leaves the card with them."""
    for block in blocks:
        for layer in token_layers(block):
            _row_scales.pop(layer, None)


def row_scale(layer: torch.nn.Module) -> torch.Tensor | None:
    """Returns the scale of a held layer's rows, (N, 1), where its weight has one for all."""
    return _row_scales.get(layer)


def stored(layer: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns weight and bias of a layer that is held, where they are."""
    own = layer.__dict__
    if "_v" in own:
        return own["_v_weight"], own["_v_bias"]
    return own["_parameters"]["weight"], own["_parameters"].get("bias")


# By layer, the places of its tensors in pages, behind what they follow from.
_Found = dict[torch.nn.Module, tuple[Any, ...]]


def _look(
    model: Any, blocks: Sequence[torch.nn.Module], read: Any, known: _Found
) -> Hashable | Verdict:
    """Looks at every layer: returns a token of the addresses and layouts of all tensors.

    Takes 34 ms (an H200's host, dynamic VRAM) without what is `known` of the same pages.
    """
    layers = [token_layers(block) for block in blocks]
    if not all(layers):
        return OWN_WAY
    dtype = model.get_dtype_inference()
    norms = [norm for block in blocks for norm in head_norms(block)]
    device = norms[0].weight.device
    places: list[Any] = [model.current_weight_patches_uuid]
    for norm in norms:
        if norm.weight_function or norm.bias_function:
            return ON_THE_WAY
        if norm.weight.device != device:
            return PARTIAL
        places += _place(norm.weight)
    for layer in itertools.chain.from_iterable(layers):
        form = read.kind(layer)
        if form is None:  # it runs itself, with weights that it reads itself
            places.append(id(layer))
            continue
        if layer.weight_function or layer.bias_function:
            return ON_THE_WAY
        own = layer.__dict__
        here = form, *map(own.get, ("_v_signature", "_v_weight", "_v_bias")), dtype
        *before, places_of = known.get(layer, (None,))
        if before and all(map(operator.is_, before, here)):
            places.append(places_of)
            continue
        if not _is_resident(layer):
            return PARTIAL
        weight, bias = stored(layer)
        if isinstance(weight, QuantizedTensor) == (form == DENSE):
            return CAST
        found: list[Any] = []
        for part in (weight, bias) if form == DENSE else (*_quantized_parts(layer, weight), bias):
            if part is not None and part.device != device:
                return PARTIAL
            found += (None,) if part is None else _place(part)
        if low := read.beside.lows.get(layer):
            found += (*_place(low.down), low.start, *_place(low.up))
        used = (bias,) if form != DENSE and "_v" not in own else (weight, bias)
        if any(part is not None and part.dtype != dtype for part in used):
            return CAST
        places.append(tuple(found))
        if "_v" in own:
            known[layer] = *here, places[-1]
    return hash(tuple(places))


def _quantized_parts(layer: torch.nn.Module, weight: QuantizedTensor) -> Sequence[torch.Tensor]:
    values, scale = weight._qdata, weight._params.scale
    if weight._layout_cls == INT8_ROWS.packed:
        packed, row_scale = packed_parts(weight)
        return [part for part in (*packed[:3], row_scale) if part is not None]
    rows = len(values)
    if scale.numel() > 1 or rows == 1 or scale.device != values.device:
        return values, scale
    kept = _row_scales.get(layer)
    with torch.inference_mode():
        if kept is None or (kept.device, len(kept)) != (scale.device, rows):
            kept = _row_scales[layer] = scale.new_empty((rows, 1))
        kept.copy_(scale.reshape(1, 1).expand(rows, 1))
    return values, kept


@cached
def _knows_pages() -> bool:
    try:
        operator.attrgetter(*NEEDED)(model_vbar)
    except AttributeError:
        return False
    return True


def _has_room(model: Any, shape: torch.Size) -> bool:
    # Past the instance, where the loader of this package leaves a part out.
    needed = type(model).memory_required(model, shape) + management.extra_reserved_memory()
    free = management.get_free_memory(model.device)
    return free >= max(needed, management.minimum_inference_memory())


# What changes with every way in which ComfyUI moves weights, whichever clone does it: values that
# are compared, and objects that another one replaces.
_Marks = tuple[tuple[Any, ...], list[Any]]


def _marks(
    model: Any, blocks: Sequence[torch.nn.Module], stores: list[dict[str, Any]], beside: Beside
) -> _Marks:
    path = spec_of(blocks[0]).query.split(".")
    values: tuple[Any, ...] = (
        model.device,
        model.current_weight_patches_uuid,
        model.model_loaded_weight_memory,
        beside.place,
    )
    if stores:  # another extension may move a block on its own
        values += tuple(_address_of(block, path) for block in blocks)
    # `load` makes a new list of functions; wherever dynamic VRAM loads or unloads, a norm has a new
    # weight. Of one object there is one reference.
    weights = (head_norms(blocks[0])[0].weight, *(store["weight"] for store in stores))
    return values, [query_layer(blocks[0]).weight_function, *map(weakref.ref, weights)]


def _are_same(marks: _Marks, others: _Marks) -> bool:
    return marks[0] == others[0] and all(map(operator.is_, marks[1], others[1]))


def _address_of(layer: torch.nn.Module, path: Sequence[str]) -> int:
    # Past Module.__getattr__, which would take most of the time of a pass here.
    for name in path:
        layer = layer._modules[name]
    return _plain(layer._parameters["weight"]).data_ptr()


def _places(blocks: Sequence[torch.nn.Module], stores: list[dict[str, Any]], beside: Beside) -> int:
    """Returns a hash of where all tensors are; takes 1 ms, so that only a run asks.

    Between two runs another extension may exchange any of them, which leaves no mark.
    """
    norms = (norm._parameters for block in blocks for norm in head_norms(block))
    lows = ((low.down, low.up) for low in beside.lows.values() if low)
    parts = itertools.chain(*(store.values() for store in (*norms, *stores)), *lows)
    return hash(tuple(part if part is None else _plain(part).data_ptr() for part in parts))


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._qdata if isinstance(tensor, QuantizedTensor) else tensor


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    tensor = _plain(tensor)
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def _pages(blocks: Sequence[torch.nn.Module]) -> list[Pages]:
    """Returns the pages of all layers, each stretch of neighbours as one."""
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
    states = {id(pages.vbar): pages.vbar.get_residency() for pages in stretches}
    return all(
        number < len(states[id(pages.vbar)]) and states[id(pages.vbar)][number] & 1
        for pages in stretches
        for number in pages.numbers
    )


def _is_resident(layer: torch.nn.Module) -> bool:
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
