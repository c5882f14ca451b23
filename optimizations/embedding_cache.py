"""The last results of a text encoder, so that an unchanged prompt neither moves nor runs it."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

LIMIT_BYTES = 64 * 2**20
# Written by their own text after their type's name; `repr` of a float is exact.
SCALARS = (bool, int, float, str, bytes, type(None))


class EmbeddingCache:
    """Results by what decided them; those that were not asked for longest go first.

    A prompt of 100 tokens takes 1.4 MB of the full-size encoder, one with a picture of a megapixel
    about 20 MB.

    Args:
        limit: Bytes of host memory that all tensors together may take.
    """

    def __init__(self, limit: int = LIMIT_BYTES) -> None:
        self.limit = limit
        self._entries: OrderedDict[bytes, tuple[Any, int]] = OrderedDict()

    @property
    def bytes(self) -> int:
        """What is held now."""
        return sum(size for _, size in self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)

    def recall(self, key: bytes | None) -> Any | None:
        """A copy of what was kept, its tensors on the devices where they had been; None without.

        A copy, because callers take entries out of the result and change its tensors in place.
        """
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        return _mapped(entry[0], _restored)

    def keep(self, key: bytes | None, result: Any) -> None:
        """Keeps a copy of a result in host memory.

        Nothing is kept without a key, of a result that is larger than the limit, that gradients
        flow through, or that holds more than containers, scalars and plain tensors.

        Args:
            result: Tensors, also in dicts, lists and tuples.
        """
        if key is None:
            return
        leaves = list(_leaves(result))
        if not all(_is_plain(leaf) for leaf in leaves):
            return
        size = sum(leaf.nbytes for leaf in leaves if torch.is_tensor(leaf))
        if size > self.limit:
            return
        self._entries.pop(key, None)
        while self._entries and self.bytes + size > self.limit:
            self._entries.popitem(last=False)
        self._entries[key] = _mapped(result, _kept), size

    def clear(self) -> None:
        """Forgets everything."""
        self._entries.clear()


class _Kept(NamedTuple):
    """A tensor in host memory and where it had been."""

    values: torch.Tensor
    device: torch.device


def content_key(value: Any) -> bytes | None:
    """A digest of containers, scalars and the values in tensors, with types and shapes.

    A prompt with a picture of a megapixel is 12 MB to go through.

    Returns:
        None where something else is inside, whose content nothing here knows.
    """
    digest = hashlib.blake2b(digest_size=32)
    try:
        _write(digest.update, value)
    except _UnknownError:
        return None
    return digest.digest()


class _UnknownError(Exception):
    """A value that `content_key` cannot go into."""


def _write(put: Callable[[Any], None], value: Any) -> None:
    """Puts a value with its kind and its length before it, so that no two values read the same."""
    if type(value) in SCALARS:
        text = repr(value).encode(errors="surrogatepass")
        put(f"{type(value).__name__} {len(text)} ".encode())
        put(text)
    elif isinstance(value, Mapping):
        put(f"mapping {len(value)} ".encode())
        for name, item in value.items():
            _write(put, name)
            _write(put, item)
    elif isinstance(value, list | tuple):
        put(f"sequence {len(value)} ".encode())
        for item in value:
            _write(put, item)
    elif torch.is_tensor(value) and _is_plain(value):
        put(f"tensor {value.dtype} {tuple(value.shape)} ".encode())
        put(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    else:
        raise _UnknownError


def _is_plain(value: Any) -> bool:
    if not torch.is_tensor(value):
        return type(value) in SCALARS
    known = type(value) in (torch.Tensor, torch.nn.Parameter)
    return known and value.layout == torch.strided and not value.requires_grad


def _leaves(value: Any) -> Iterator[Any]:
    if type(value) in (dict, list, tuple):
        for item in value.values() if type(value) is dict else value:
            yield from _leaves(item)
    else:
        yield value


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """The same containers anew, with every leaf changed."""
    if type(value) is dict:
        return {name: _mapped(item, change) for name, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_mapped(item, change) for item in value)
    return change(value)


def _kept(leaf: Any) -> Any:
    if not torch.is_tensor(leaf):
        return leaf
    return _Kept(leaf.detach().to("cpu", copy=True), leaf.device)


def _restored(leaf: Any) -> Any:
    return leaf.values.to(leaf.device, copy=True) if isinstance(leaf, _Kept) else leaf
