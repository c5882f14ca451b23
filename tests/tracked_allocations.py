"""Counts the bytes that torch's operations hold; on meta tensors, without the memory."""

import weakref
from contextlib import contextmanager
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# cuDNN's, by which the counts of `planning.vae_work` equal what was measured.
CONVOLUTION_WORKSPACE = 1.0


class Allocations(TorchDispatchMode):
    """`peak`: the most bytes of tensors made inside that lived at once.

    Args:
        workspace: what a convolution takes beside them, as a share of its input and output.
    """

    def __init__(self, workspace: float) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._workspace = workspace
        self._known: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {id(tensor.untyped_storage()) for tensor in _tensors((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            if id(storage) not in self._known | given:
                self.live += storage.nbytes()
                self._known.add(id(storage))
                weakref.finalize(storage, self._free, id(storage), storage.nbytes())
        beside = 0
        if func is torch.ops.aten.convolution.default:
            beside = int(self._workspace * (args[0].nbytes + result.nbytes))
        self.peak = max(self.peak, self.live + beside)
        return result

    def _free(self, key: int, count: int) -> None:
        self.live -= count
        self._known.remove(key)


def _tensors(tree):
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


@contextmanager
def fused_attention():
    """Attention as a card's kernels do it: no scores, and of 16-bit tensors an fp32 sum beside."""

    def attention(query, key, value, **options):
        out = torch.empty_like(query)
        if query.dtype is not torch.float32:
            torch.empty_like(query, dtype=torch.float32)
        return out

    with mock.patch.object(torch.nn.functional, "scaled_dot_product_attention", attention):
        yield
