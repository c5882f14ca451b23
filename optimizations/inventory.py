"""Watches the modules of ComfyUI or diffusers that this package computes instead of them.

The block executor, the modulation table and the fused VAE read the weights of a module instead of
calling it. Another extension may change the module at any time: in its class, in one block, inside
of the model's forward pass, in later steps only. Its change would be lost. An `Inventory` lists
everything that a replaced forward stands for, and says what is no longer as the host made it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cache
from itertools import chain, repeat
from operator import is_
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch.nn.modules import module as torch_module

from ..caches import cached
from ..verdict import Verdict
from .patches import ABSENT

TORCH = str(Path(torch.__file__).parent)
# What torch runs around the `forward` of every module.
CALLS = ("__call__", "_call_impl", "_wrapped_call_impl")
HOOKS = ("_forward_pre_hooks", "_forward_hooks")
HOOKED = Verdict("another extension has put a hook on all modules")


class Function(NamedTuple):
    """A function that the code of a host calls by name."""

    place: Any  # the class, or the module
    name: str  # in that place
    own: FunctionType | None  # what is there as long as nobody replaces it; None where somebody had

    @property
    def changed(self) -> bool:
        return self.place.__dict__.get(self.name) is not self.own

    @property
    def label(self) -> str:
        return f"{self.place.__name__}.{self.name}"


class _Kind(NamedTuple):
    # Of a class of modules: its functions, the names by which an instance would hide one of its
    # methods, and those that its code reads.
    functions: tuple[Function, ...]
    methods: frozenset[str]
    names: frozenset[str]


@cached
def _kind(kind: type) -> _Kind:
    functions, methods = [], set()
    for base in kind.__mro__:
        own = vars(base)
        methods |= {it for it, value in own.items() if callable(value) or hasattr(value, "__get__")}
        names = (
            CALLS if base is torch.nn.Module else own if issubclass(base, torch.nn.Module) else ()
        )
        for name in names:
            if isinstance(own.get(name), FunctionType):
                functions.append(Function(base, name, _own(own[name], base.__module__)))
    read = (it.own.__code__.co_names for it in functions if it.own and it.name not in CALLS)
    return _Kind(tuple(functions), frozenset(methods), frozenset().union(*read))


def functions_of(kind: type) -> tuple[Function, ...]:
    """Lists the functions of a class of modules and of its bases."""
    return _kind(kind).functions


@cache  # what is kept was there at the first call: nothing for `forget`
def called_by(name: str) -> tuple[Function, ...]:
    """Lists the functions that a host's module with this name calls by name, its own and others'.

    Of others, what is there at the first call counts as the host's: a host makes it when it is
    imported.
    """
    home = sys.modules[name]
    return tuple(
        Function(home, name, _own(value, name) if value.__module__ == home.__name__ else value)
        for name, value in vars(home).items()
        if isinstance(value, FunctionType)
    )


def _own(function: FunctionType, module: str) -> FunctionType | None:
    """Returns a function that a module has defined; None where another pack has replaced it."""
    home = getattr(sys.modules[module], "__file__", None) if module in sys.modules else None
    file = function.__code__.co_filename
    # torch decorates.
    return function if home in (None, file) or file.startswith(TORCH) else None


def is_changed(module: torch.nn.Module, bound: Collection[str] = ()) -> bool:
    """Tells whether somebody has hooked a module, or put a method of his own into this instance.

    accelerate leaves the class's own `forward` in the module when its hooks come off.

    Args:
        bound: Names of methods that this package itself replaces.
    """
    own = module.__dict__
    if any(map(own.get, HOOKS)):
        return True
    methods = _kind(type(module)).methods
    if methods.isdisjoint(own):
        return False
    return any(
        getattr(own[name], "__func__", None) is not getattr(type(module), name)
        for name in methods & own.keys() - set(bound)
    )


def attributes_of(module: torch.nn.Module) -> dict[str, Any]:
    """Returns what the code of a module's class reads of the instance, without its tensors and
    modules.
    """
    kind, own = type(module), module.__dict__
    return {
        name: own[name]
        for name in _kind(kind).names & own.keys()
        # What stands in the class too is a switch of the host's.
        if not (name.startswith("_") or name == "training" or hasattr(kind, name))
    }


def parts_of(
    root: torch.nn.Module, called: Collection[torch.nn.Module] = (), path: str = ""
) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yields a module and all below it with their paths, without `called` and what they hold."""
    if root in called:
        return
    yield path, root
    for name, child in root._modules.items():
        if child is not None:
            yield from parts_of(child, called, f"{path}.{name}" if path else name)


def functions_behind(modules: Iterable[torch.nn.Module], homes: Iterable[str]) -> list[Function]:
    """Lists what the code of some modules calls by name: functions of their classes, and of the
    host's Python modules with these names.
    """
    found = [functions_of(kind) for kind in dict.fromkeys(map(type, modules))]
    found += map(called_by, dict.fromkeys(homes))
    return list(dict.fromkeys(chain(*found)))


def replaced(functions: Iterable[Function]) -> Verdict | None:
    """Says which function another extension has replaced; None for none."""
    if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
        return HOOKED
    for function in functions:
        if function.changed:
            return Verdict(f"another extension has changed {function.label}")
    return None


Blueprint = dict[str, tuple[type, dict[str, Any]]]


def blueprint(made: torch.nn.Module) -> Blueprint:
    """Returns {path: (class, attributes)} of a module that the host has just made and its parts."""
    return {path: (type(part), attributes_of(part)) for path, part in parts_of(made)}


def difference(module: torch.nn.Module, made: Blueprint) -> str | None:
    """Names what differs in a module from one of the same sizes as the host makes it: a part, its
    class, a hook, a method, or an attribute that its code reads; None for nothing.
    """
    parts = dict(parts_of(module))
    for path, (kind, attributes) in made.items():
        part, name = parts.pop(path, None), path or kind.__name__
        if type(part) is not kind or is_changed(part):
            return name
        own = part.__dict__
        for attribute, value in attributes.items():
            if not _is_equal(own.get(attribute, ABSENT), value):
                return f"{attribute} of {name}"
    return next(iter(parts), None)


def _is_equal(value: Any, other: Any) -> bool:
    return value is other or (type(value) is type(other) and bool(value == other))


class Inventory:
    """Everything that replaced forwards stand for, as it was when this was made.

    Args:
        called: Modules that run themselves: of these it matters that they are there.
        multiplied: Modules whose attributes do not matter: somebody else judges how their weights
            are read.
        bound: Names of the methods that a pass itself replaces in the blocks.
        paths: Of the modules in a block that are read, with all below them.
    """

    def __init__(
        self,
        blocks: Mapping[int, torch.nn.Module],
        called: Iterable[torch.nn.Module] = (),
        multiplied: Iterable[torch.nn.Module] = (),
        foreign: Callable[[torch.nn.Module], bool] = is_changed,
        bound: Collection[str] = (),
        paths: Collection[str] = ("",),
    ) -> None:
        watched = set(called), set(multiplied), foreign, frozenset(bound), paths
        self._looks = {index: _Look(block, *watched) for index, block in blocks.items()}
        modules = chain(*(look.modules for look in self._looks.values()))
        self._functions = functions_behind(modules, (type(it).__module__ for it in blocks.values()))

    def changed(self) -> Verdict | None:
        """Says what another extension has changed in any block; None for nothing."""
        return self.replaced() or next(filter(None, map(self.changed_in, self._looks)), None)

    def replaced(self) -> Verdict | None:
        return replaced(self._functions)

    def changed_in(self, index: int) -> Verdict | None:
        """Says what another extension has changed in one block; None for nothing.

        Takes 10 us of a block that has left the CPU's caches since the last look.
        """
        look = self._looks.get(index)
        name = look and look.changed()
        return Verdict(f"another extension has changed {name} of block {index}") if name else None


class _Look:
    """Modules of a block as what is asked of them in one go, past Module.__getattr__."""

    modules: list[torch.nn.Module]

    def __init__(
        self,
        block: torch.nn.Module,
        called: set[torch.nn.Module],
        multiplied: set[torch.nn.Module],
        foreign: Callable[[torch.nn.Module], bool],
        bound: frozenset[str],
        paths: Collection[str],
    ) -> None:
        self._foreign, self._bound = foreign, bound
        roots = [(path, getattr(block, path) if path else block) for path in paths]
        parts = [part for path, root in roots for part in parts_of(root, called, path)]
        self._paths, self.modules = map(list, zip(*parts, strict=True))
        # Of the block a pass itself replaces methods.
        own = block if bound else None
        self._roots = [place for place, module in enumerate(self.modules) if module is own]
        self._others = [it.__dict__ for it in self.modules if it is not own]
        self._kinds = list(map(type, self.modules))
        self._owns = [module.__dict__ for module in self.modules]
        self._hooks = [own[name] for own in self._owns for name in HOOKS]
        self._children = [own["_modules"] for own in self._owns]
        self._counts = list(map(len, self._children))
        edges = [
            (own, name, child, f"{path}.{name}" if path else name)
            for own, path in zip(self._children, self._paths, strict=True)
            for name, child in own.items()
        ]
        # torch.compile's module hands a block's attributes on.
        edges += [(block._modules, it, root, it) for it, root in roots if it in block._modules]
        self._parents, self._keys, self._there, self._edges = _columns(edges)
        self._places, self._names, self._values, self._homes = _columns(
            (module.__dict__, name, value, path)
            for path, module in parts
            if module not in multiplied
            for name, value in attributes_of(module).items()
        )
        self._sizes = self._measure()

    def _measure(self) -> list[int]:
        """Measures an instance's __dict__, which grows with whatever is put into it."""
        sizes = list(map(len, self._owns))
        for place in self._roots:
            sizes[place] -= sum(name in self._owns[place] for name in self._bound)
        return sizes

    def changed(self) -> str | None:
        """Names what somebody has changed; None for nothing."""
        sizes = self._measure()
        as_it_was = (
            sizes == self._sizes
            and not any(self._hooks)
            # One `forward` may have been exchanged for another.
            and not any(map(dict.__contains__, self._others, repeat("forward")))
            and all(map(is_, map(type, self.modules), self._kinds))
            and all(map(is_, map(dict.get, self._parents, self._keys), self._there))
            and list(map(len, self._children)) == self._counts
            and all(map(is_, map(dict.get, self._places, self._names), self._values))
        )
        return None if as_it_was else self._find(sizes)

    def _find(self, sizes: list[int]) -> str | None:
        edges = zip(self._parents, self._keys, self._there, self._edges, strict=True)
        for parent, name, child, path in edges:
            if parent.get(name) is not child:
                return path
        for place, module in enumerate(self.modules):
            own, path = self._owns[place], self._paths[place]
            if type(module) is not self._kinds[place]:
                return path or "the class"
            if len(self._children[place]) != self._counts[place]:
                return path or "the parts"
            if place in self._roots:
                changed = is_changed(module, self._bound)
            else:
                new = sizes[place] != self._sizes[place] or "forward" in own
                changed = (new or any(map(own.get, HOOKS))) and self._foreign(module)
            if changed:
                return path or "its hooks"
        values = zip(self._places, self._names, self._values, self._homes, strict=True)
        for place, (own, name, value, path) in enumerate(values):
            if not _is_equal(own.get(name, ABSENT), value):
                return f"{name} of {path or 'the block'}"
            self._values[place] = own[name]
        self._sizes = sizes
        return None


def _columns(rows: Iterable[tuple[Any, Any, Any, Any]]) -> tuple[list[Any], ...]:
    found = list(rows)
    return tuple(map(list, zip(*found, strict=True))) if found else ([], [], [], [])
