"""Gives the steps of a run the same tensors of a prompt, so that no step waits for the one before.

ComfyUI copies a prompt to the card before each forward pass. Its Qwen-Image-2.1 then makes a key of
it, which it compares with the one of its prefix cache. Each of these waits until the card is idle,
which the launches of the next blocks then leave it: 8 to 13 ms of a step at 1024x1024 (H200).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from operator import is_
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch

from ....optimizations.patches import patched
from .prefix import KeptPrefixes, has_known_slot

GIVEN = ("c_crossattn", "ref_latents")
MOST = 8  # prompts that alternate in a run
OWN = "qwen_l40s"  # what begins the keys of this package's wrappers


class _Key(NamedTuple):
    # Tensors by identity: the context and the latents of references.
    tensors: tuple[torch.Tensor, ...]
    rest: Any
    key: torch.Tensor


class Prompts:
    """What one model got in the steps of a run."""

    def __init__(self) -> None:
        self._known: list[tuple[torch.Tensor, torch.Tensor]] = []  # in system RAM, on the card
        self._keys: list[_Key] = []
        self._slots: list[tuple[torch.Tensor, Any, Any]] = []  # key, cache, slot

    def bring(
        self, given: Mapping[str, Any], device: torch.device, dtype: torch.dtype
    ) -> dict[str, Any]:
        """Replaces what a call gets in system RAM by the same on the card, as ComfyUI casts it."""
        changed = {}
        for name in GIVEN:
            value = given.get(name)
            if isinstance(value, list) and all(map(torch.is_tensor, value)):
                changed[name] = [self._there(it, device, dtype) for it in value]
            elif torch.is_tensor(value):
                changed[name] = self._there(value, device, dtype)
        return {**given, **changed}

    def _there(self, tensor: torch.Tensor, device: torch.device, dtype: torch.dtype) -> Any:
        if tensor.device.type != "cpu" or not tensor.is_floating_point():
            return tensor
        for known, there in self._known:
            same = known.shape == tensor.shape and known.dtype == tensor.dtype
            if same and there.dtype == dtype and torch.equal(known, tensor):
                return there
        there = tensor.to(device, dtype)
        self._known = [*self._known[1 - MOST :], (tensor.clone(), there)]
        return there

    @contextmanager
    def lookups(self, transformer: Any) -> Iterator[Callable[..., Any]]:
        """Gives a transformer's forward: of 2.1 one that makes the key of a prompt once, and finds
        the place in the prefix cache by it.
        """
        forward = transformer._forward
        function = getattr(forward, "__func__", None)
        make = getattr(function, "__globals__", {}).get("prefix_cache_key")
        select = getattr(type(transformer), "select_prefix_cache", None)
        if make is None or select is None or "select_prefix_cache" in vars(transformer):
            yield forward
            return

        kept = KeptPrefixes.of(transformer)

        def key(x: torch.Tensor, context: torch.Tensor, refs: Any, slots: Any) -> torch.Tensor:
            kept.text = context
            tensors, rest = (context, *refs), (x.shape, tuple(slots))
            for known in self._keys:
                same = len(known.tensors) == len(tensors) and known.rest == rest
                if same and all(map(is_, known.tensors, tensors)):
                    return known.key
            made = make(x, context, refs, slots)
            if any(context is there for _, there in self._known):
                self._keys = [*self._keys[1 - MOST :], _Key(tensors, rest, made)]
            return made

        def find(key: torch.Tensor, size: int, device: Any, options: Mapping[str, Any]) -> Any:
            cache, blocks = transformer.prefix_cache, len(transformer.transformer_blocks)
            for known, of, slot in self._slots if options.get("device") != "off" else ():
                there = known is key and of is cache and not cache._pending
                if there and any(slot is it for it in cache.slots):
                    cache.slot = slot
                    return cache, cache.filled(blocks)
            if (room := transformer.current_patcher) is not None:
                kept.clear_if_tight(room.get_free_memory(device), size)
            found, filled = select(transformer, key, size, device, options)
            if has_known_slot(found):
                self._slots = [*self._slots[1 - MOST :], (key, found, found.slot)]
            return found, filled

        names = {**function.__globals__, "prefix_cache_key": key}
        own = FunctionType(
            function.__code__,
            names,
            function.__name__,
            function.__defaults__,
            function.__closure__,
        )
        own.__kwdefaults__ = function.__kwdefaults__
        try:
            with patched([(vars(transformer), "select_prefix_cache", find)]):
                yield MethodType(own, transformer)
        finally:
            kept.text = None


def alone(options: Mapping[str, Any]) -> bool:
    """Tells whether no other extension sees what a forward pass gets."""
    wrappers = options.get("wrappers", {})
    kinds = (wrappers.get(kind, {}) for kind in ("apply_model", "diffusion_model"))
    return all(str(key).startswith(OWN) for kind in kinds for key in kind)
