"""What a transformer block is: whether the executor computes a module, how it computes its layers,
and whether the module still is the host's own.

`BlockSpec` lists the names of its modules, which are the same in ComfyUI and diffusers for the
families that both have; `BlockForm` is what `workspace.Program` is compiled of.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import chain, repeat
from operator import is_
from pathlib import Path
from types import FunctionType
from typing import Any, Literal, NamedTuple

import torch

from ...caches import cached
from ...families.registry import block_specs, modulation_of, spec_of
from ...spec.formats import RowFormat
from ...spec.transformer import SPLIT_SWIGLU, SWIGLU, BlockSpec
from ...verdict import Verdict
from ..fused import unsupported_shape
from ..linear import Gemm

DENSE = "dense"
STREAMS = ("text", "image")
# The layers of a block in the order in which they run, by their stream.
PLACES = ("image",) * 3 + ("text",) * 3 + ("image", "text") * 3
# LoRAs beside the layers: `x @ W.T + (x @ down.T) @ up.T`, the weights untouched. All LoRAs of a
# layer are one pair of matrices, and the layers that read the same rows share the first: one launch
# for both streams multiplies rows by it. The second is in the epilogue of the layer's own product,
# where that is Triton's.


class LowRank(NamedTuple):
    """What all LoRAs of a layer add beside it: `x @ down[start : start + R].T @ up.T`.

    Attributes:
        down: (R or more, K), contiguous: of all layers that read the same rows of one stream.
        start: The layer's first row in it.
        up: (N, R), contiguous.
    """

    down: torch.Tensor
    start: int
    up: torch.Tensor


# The places that read the same rows: of the text and of the image.
Readers = tuple[tuple[range, range], ...]
READERS: Readers = (
    (range(3, 6), range(3)),
    *((range(i + 1, i + 2), range(i, i + 1)) for i in (6, 8, 10)),
)
# The same where gate and up are two layers of the image's rows.
SPLIT_READERS: Readers = (*READERS[:2], (range(0), range(8, 10)), READERS[3])


class LayerForm(NamedTuple):
    """How a linear layer is computed.

    Attributes:
        kind: As `block.Layers.kind`.
        format: Of the rows, where its GEMM takes quantized ones; else None.
        gemm: Of a quantized layer.
        rank: Of the LoRAs beside it; 0 without.
        start, down_rows: Its first row in their first matrix, and how many that has.
    """

    kind: str | RowFormat | None
    format: RowFormat | None = None
    gemm: Gemm | None = None
    rank: int = 0
    start: int = 0
    down_rows: int = 0


def common_format(layers: Sequence[LayerForm]) -> RowFormat | None:
    formats = {layer.format for layer in layers}
    return formats.pop() if len(formats) == 1 else None


class BlockForm(NamedTuple):
    """What blocks have in common that run the same program.

    Attributes:
        spec: The names of their modules.
        layers: In the order of `PLACES`.
        heads: Of attention.
        inner: What the MLP's last layers read, in columns.
        eps, head_eps: Of the LayerNorms, and of the RMSNorms of a head.
    """

    spec: BlockSpec
    layers: tuple[LayerForm, ...]
    heads: int
    inner: int
    eps: float
    head_eps: float

    @property
    def readers(self) -> Readers:
        return SPLIT_READERS if self.spec.activation == SPLIT_SWIGLU else READERS

    @property
    def sends_rows(self) -> bool:
        """Whether other cards can make keys and values of the rows that the first layers read: all
        read one form of them, and nothing besides.
        """
        first = self.layers[:6]
        alone = all(layer.kind is not None and not layer.rank for layer in first)
        return alone and len({layer.format for layer in first}) == 1

    def weight_shape(self, place: int, width: int) -> tuple[int, int]:
        """Gives (rows, columns) of what a layer is multiplied with, by the block's width."""
        first = 2 * self.inner if self.spec.activation == SWIGLU else self.inner
        return (
            (width, width) if place < 8 else (first, width) if place < 10 else (width, self.inner)
        )


class ModulationLayer(NamedTuple):
    block: int
    stream: Literal["image", "text"]
    module: torch.nn.Module


def token_layers(block: torch.nn.Module) -> list[torch.nn.Module]:
    """The linear layers of a block that see tokens; none of a block of another form."""
    spec = spec_of(block)
    return [] if spec is None else _parts_named(block, spec.gemms)


def classes_of(block: torch.nn.Module) -> tuple[type, ...]:
    """The classes of a block and of the modules that the executor reads instead of calling; only
    the first of a block of another form.
    """
    spec = spec_of(block)
    names = () if spec is None else (*spec.norms, *spec.read, *spec.head_norms)
    return type(block), *map(type, _parts_named(block, names))


def _parts_named(block: torch.nn.Module, names: Iterable[str]) -> list[torch.nn.Module]:
    # Empty where one is missing.
    try:
        return [part_of(block, name) for name in names]
    except AttributeError:
        return []


def modulated_by(block: torch.nn.Module) -> list[torch.nn.Module]:
    """The linear layers of a block that see the timestep alone."""
    return _parts_named(block, [f"{name}.1" for name in modulation_of(block).values()])


def head_norms(block: torch.nn.Module) -> list[torch.nn.Module]:
    return [part_of(block, name) for name in spec_of(block).head_norms]


def part_of(block: torch.nn.Module, name: str) -> torch.nn.Module:
    # As get_submodule, which takes five times as long: a run asks for 960.
    for child in name.split("."):
        block = block._modules.get(child) or getattr(block, child)
    return block


def heads_of(block: torch.nn.Module) -> int:
    return part_of(block, spec_of(block).attention).heads


def query_layer(block: torch.nn.Module) -> torch.nn.Module:
    """Gives the layer that makes the queries, whose input is as wide as the block."""
    return part_of(block, spec_of(block).places[0])


def modulation_layers(blocks: Sequence[torch.nn.Module]) -> Iterator[ModulationLayer]:
    for index, block in enumerate(blocks):
        for stream, name in modulation_of(block).items():
            yield ModulationLayer(index, stream, getattr(block, name))


def unknown_modulation(blocks: Sequence[torch.nn.Module]) -> Verdict | None:
    """Why there is no modulation of all blocks; None where they agree."""
    if len({tuple(modulation_of(block)) for block in blocks}) > 1:
        return Verdict("another extension has put a block of another form among the others")
    return None


def unsupported_block(block: torch.nn.Module, dtype: torch.dtype) -> Verdict | None:
    """Why the executor does not compute a block; None when it does.

    Args:
        dtype: Of the activations.
    """
    spec = spec_of(block)
    if spec is None:
        known = ", ".join(spec.told_by for spec in block_specs())
        return Verdict(f"its form is unknown: it has none of {known}")
    names = *spec.norms, *spec.read, *spec.head_norms
    try:
        modules = {name: part_of(block, name) for name in names}
        dim, heads = query_layer(block).in_features, heads_of(block)
        layers = [part_of(block, name) for name in spec.places]
        changed = [name for name, module in modules.items() if is_changed(module)]
    except AttributeError as error:
        return Verdict(f"its form is unknown: {error}")
    if changed:
        return Verdict(f"{changed[0]} has been changed by another extension")
    norms = [modules[name] for name in spec.norms]
    if any(norm.weight is not None for norm in norms):
        return Verdict("its LayerNorms have weights")
    heads_norms = [modules[name] for name in spec.head_norms]
    if any(norm.weight is None for norm in heads_norms):
        return Verdict("its heads are not normalized")
    widths = {layer.out_features for layer in layers[8:10]}
    eps, head_eps = ({norm.eps for norm in found} for found in (norms, heads_norms))
    if None in eps | head_eps:
        return Verdict("a norm of it takes its eps from the dtype")
    if len(eps) > 1 or len(head_eps) > 1 or len(widths) > 1:
        return Verdict("its streams differ in form")
    if any(modules[name].approximate != "tanh" for name in spec.gelus):
        return Verdict("its GELU is not the tanh form")
    return unsupported_shape(dim, dim // heads, dtype)


def is_changed(module: torch.nn.Module) -> bool:
    """Whether somebody has wrapped a module's `forward` or hooked it.

    accelerate leaves the class's own `forward` in the module when its hooks come off.
    """
    own = module.__dict__
    if own["_forward_hooks"] or own["_forward_pre_hooks"]:
        return True
    wrapped = own.get("forward")
    return wrapped is not None and getattr(wrapped, "__func__", None) is not type(module).forward


# Whether a host's blocks still are the host's own. The executor computes attention, norms and MLPs
# itself instead of calling the host's modules, so that what another extension does to one of them
# would be lost. Extensions do it at any time: inside of the model's forward, only in later steps,
# in some blocks, in a class.

TORCH = str(Path(torch.__file__).parent)


class OwnCode:
    """Watches the modules of fused blocks, and the functions of their classes.

    Args:
        blocks: That run fused, by their index in the model.
        layers: Of these blocks, the linear layers that the executor multiplies with.
        foreign: Whether somebody has changed one of these layers, of those with hooks or a
            `forward` of their own; of the host.
    """

    def __init__(
        self,
        blocks: Mapping[int, torch.nn.Module],
        layers: Iterable[torch.nn.Module],
        foreign: Callable[[Sequence[torch.nn.Module]], bool],
    ) -> None:
        multiplied = set(layers)
        self._foreign = foreign
        self._parts = {index: _parts(block, multiplied) for index, block in blocks.items()}
        homes = {type(block).__module__ for block in blocks.values()}
        modules = chain(*(parts.modules for parts in self._parts.values()))
        found = (functions_of(kind) for kind in dict.fromkeys(map(type, modules)))
        called = (called_by(home) for home in homes)
        self._functions = tuple(dict.fromkeys(chain(*found, *called)))

    def changed(self) -> Verdict | None:
        """What another extension has changed in any of the blocks; None for nothing.

        Takes 0.5 ms of 60 blocks, which have left the processor's caches since the last look.
        """
        return self.replaced() or next(filter(None, map(self.changed_in, self._parts)), None)

    def replaced(self) -> Verdict | None:
        """Which function another extension has replaced; None for none."""
        for function in self._functions:
            if function.changed:
                return Verdict(f"another extension has changed {function.label}")
        return None

    def changed_in(self, index: int) -> Verdict | None:
        """What another extension has changed in the modules of one block; None for nothing."""
        parts = self._parts.get(index)
        if parts is None or parts.untouched:
            return None
        name = parts.changed(self._foreign)
        return name and Verdict(f"another extension has changed {name} of block {index}")


class _Function(NamedTuple):
    """A function that the host's code calls by name.

    Attributes:
        place: The class, or the module.
        name: In that place.
        own: What is there as long as nobody replaces it; None where somebody had.
    """

    place: Any
    name: str
    own: FunctionType | None

    @property
    def changed(self) -> bool:
        return self.place.__dict__.get(self.name) is not self.own

    @property
    def label(self) -> str:
        return f"{self.place.__name__}.{self.name}"


@cached
def functions_of(kind: type) -> tuple[_Function, ...]:
    found = []
    for base in kind.__mro__[: kind.__mro__.index(torch.nn.Module)]:
        for name, value in vars(base).items():
            if isinstance(value, FunctionType):
                found.append(_Function(base, name, _own(value, base.__module__)))
    return tuple(found)


@cache  # what is kept was there at the first call: nothing for `forget`
def called_by(name: str) -> tuple[_Function, ...]:
    """The functions that a host's module with this name calls by name, its own and others'.

    Of others, what is there at the first call counts as the host's: a host makes it when it is
    imported.
    """
    home = sys.modules[name]
    return tuple(
        _Function(home, name, _own(value, name) if value.__module__ == home.__name__ else value)
        for name, value in vars(home).items()
        if isinstance(value, FunctionType)
    )


def _own(function: FunctionType, module: str) -> FunctionType | None:
    """A function that a module has defined; None where a pack that was imported before this one has
    replaced it.
    """
    home = getattr(sys.modules[module], "__file__", None) if module in sys.modules else None
    file = function.__code__.co_filename
    # torch decorates.
    return function if home in (None, file) or file.startswith(TORCH) else None


class _Parts(NamedTuple):
    """Modules, as what is asked of them in one go, past Module.__getattr__.

    Attributes:
        modules: Whose `forward` and hooks nobody may change.
        classes: Theirs.
        names: Of these modules in their block.
        multiplied: Of each, whether it is a layer that the executor multiplies with.
        owns: Their `__dict__`s; of a block an empty one, since a pass replaces its `forward`.
        hooks: Theirs.
        parents, keys, children: `parents[i][keys[i]] is children[i]`.
        paths: Of the children in their block.
    """

    modules: list[torch.nn.Module]
    classes: list[type]
    names: list[str]
    multiplied: list[bool]
    owns: list[dict[str, Any]]
    hooks: list[dict[int, Any]]
    parents: list[dict[str, torch.nn.Module]]
    keys: list[str]
    children: list[torch.nn.Module]
    paths: list[str]

    @classmethod
    def none(cls) -> _Parts:
        return cls(*([] for _ in cls._fields))

    @property
    def untouched(self) -> bool:
        """Whether no module has hooks, a `forward` of its own or another class, or is another."""
        return (
            not any(self.hooks)
            and not any(map(dict.__contains__, self.owns, repeat("forward")))
            and all(map(is_, map(type, self.modules), self.classes))
            and all(map(is_, map(dict.get, self.parents, self.keys), self.children))
        )

    def changed(self, foreign: Callable[[Sequence[torch.nn.Module]], bool]) -> str | None:
        """The name of a module that somebody has changed; None where nobody has.

        accelerate and LoRAs beside a layer leave a `forward` that changes nothing here.
        """
        steps = zip(self.parents, self.keys, self.children, self.paths, strict=True)
        for parent, key, child, path in steps:
            if parent.get(key) is not child:
                return path
        for module, kind, name in zip(self.modules, self.classes, self.names, strict=True):
            if type(module) is not kind:
                return name or "the class"
        layers = []
        found = zip(self.names, self.modules, self.multiplied, self.owns, strict=True)
        for name, module, multiplied, own in found:
            if multiplied:
                layers.append(module)
            elif is_changed(module) and (own or module._forward_hooks or module._forward_pre_hooks):
                return name or "its hooks"
        return "a linear layer" if foreign(layers) else None


def _parts(block: torch.nn.Module, multiplied: set[torch.nn.Module]) -> _Parts:
    spec, parts = spec_of(block), _Parts.none()
    modulation = spec.modulation.values()
    names = *spec.norms, *spec.read, *spec.head_norms, *modulation
    names = *names, *(f"{name}.0" for name in modulation)  # SiLU, whose result the table holds
    layers = (name for name in spec.places if part_of(block, name) in multiplied)
    names = "", *dict.fromkeys((*names, *layers))
    # One step of several paths is looked at once.
    for parent, key, child, path in dict.fromkeys(chain(*(_path(block, name) for name in names))):
        parts.parents.append(parent._modules)
        parts.keys.append(key)
        parts.children.append(child)
        parts.paths.append(path)
    for name in names:
        module = part_of(block, name) if name else block
        parts.modules.append(module)
        parts.classes.append(type(module))
        parts.names.append(name)
        parts.multiplied.append(module in multiplied)
        parts.owns.append(module.__dict__ if name else {})
        parts.hooks.extend((module._forward_hooks, module._forward_pre_hooks))
    return parts


def _path(
    block: torch.nn.Module, name: str
) -> Iterator[tuple[torch.nn.Module, str, torch.nn.Module, str]]:
    """Yields a parent, a key and a child with its path for each step to a submodule."""
    parent, path = block, ""
    for key in filter(None, name.split(".")):
        child = part_of(parent, key)
        path = f"{path}.{key}" if path else key
        yield parent, key, child, path
        parent = child
