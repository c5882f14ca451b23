"""patches.py alone changes objects of ComfyUI, torch, Triton and diffusers.

The syntax tree tells whose an object is: one whose class is the package's or the standard
library's, or that was made in the same function, may be written to. Every other is a host's.
"""

import ast
import functools
import re
import sys
from collections import defaultdict

import pytest
from test_project_text import FILES, ROOT, imports, layer_of, tree_of

from qwen_l40s.patches import ABSENT, CHANGES, patched

NOT_SHIPPED = {"bench", "tools"}
NO_HOST = {"charts", "client", "fleet", "planning", "spec"}  # rooms that import none
HOSTS = {"accelerate", "comfy", "comfy_aimdo", "comfy_kitchen", "diffusers", "torch", "triton"}
ALLOWED = {
    "machine/links.py": "functions that ctypes reads from the CUDA driver",
    "measure/timing.py": "a block that is made of layers to measure it",
    "optimizations/kernels/launch.py": "a function that is written there",
}
# They write on an object, into the namespace of one, or change what a whole process shares.
SETTERS = {"setattr", "delattr", "__setattr__", "__delattr__"}
CHANGING = {"update", "pop", "clear", "setdefault", "popitem", "__setitem__", "__delitem__"}
NAMESPACES = {"__dict__", "_parameters", "_buffers", "_modules"}
SHARED = {
    *("register_layout_class", "reset_peak_memory_stats", "graphsafe_set_state", "prioritize"),
    *("_cuda_endAllocateToPool", "_cuda_releasePool", "register_forward_hook", "Library"),
}
# Kinds of objects that are no class of the package: of the standard library, and made right here.
STANDARD, MADE = "", "()"
FUNCTIONS = ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda
NEUTRAL = {"None", "dict", "list", "tuple", "Sequence", "Iterator", "Iterable", "Mapping"}
NEUTRAL |= {"WeakKeyDictionary", "str", "int", "Hashable", "Any"}  # the keys of a mapping
FIRST_ARGUMENT = {"replace", "next", "iter", "reversed", "sorted", "list", "tuple", "max", "min"}
CONTENTS = {"get", "pop", "values", "setdefault"}


class Package:
    """Whose the attributes and results of a package's classes and functions are."""

    def __init__(self, trees):
        self.bases, self.results = {}, defaultdict(dict)
        # {class: {attribute: annotations, and (assigned expression, scope)}}
        self.attributes = defaultdict(lambda: defaultdict(list))
        self._busy = set()
        for node in (node for tree in trees.values() for node in ast.walk(tree)):
            if isinstance(node, ast.ClassDef):
                bases = [ast.unparse(base).rpartition(".")[2] for base in node.bases]
                self.bases.setdefault(node.name, set()).update(bases)
        self.scopes = {file: Scope(self, tree, None, "") for file, tree in trees.items()}

    def of_type(self, annotation):
        """The classes that an annotation names; None where one is a host's."""
        if annotation is None:
            return None
        text = annotation.value if isinstance(annotation, ast.Constant) else ast.unparse(annotation)
        kinds = set()
        for name in set(re.findall(r"[A-Za-z_][\w.]*", str(text))) - NEUTRAL:
            if name in self.bases:
                kinds.add(name)
            elif name.partition(".")[0] in sys.stdlib_module_names:
                kinds.add(STANDARD)
            elif name != "torch.nn.Module" or "dict[torch.nn.Module," not in text:
                return None
        return kinds or None

    def of_attribute(self, kinds, name, tables):
        """The classes of an attribute, or of a method's result, of these classes."""
        found = set()
        for kind in kinds or {None}:
            known = tables.get(kind, {}).get(name)
            if known is None and self.bases.get(kind, set()) - {kind}:
                more = self.of_attribute(self.bases[kind] - {kind}, name, tables)
            else:
                known = known if isinstance(known, list) else [known]
                more = self._all(known) if known else None
            if more is None:
                return None
            found |= more
        return found

    def _all(self, known):
        if id(known) in self._busy:
            return set()
        self._busy.add(id(known))
        found = [it[1].kinds(it[0]) if isinstance(it, tuple) else self.of_type(it) for it in known]
        self._busy.discard(id(known))
        return None if None in found else set().union(*found)


class Scope:
    """The names that a function or a module sees, and what it writes."""

    def __init__(self, package, node, outer, owner):
        self.package, self.outer, self.owner = package, outer, owner
        self.bound, self.inner, self.nodes = defaultdict(list), [], []
        self._busy = set()
        self._arguments(node)
        body = node.body if isinstance(node.body, list) else [node.body]
        stack = [(it, "") for it in body]
        while stack:
            it, owner = stack.pop()
            if isinstance(it, ast.ClassDef):
                stack += [(each, it.name) for each in it.body]
                continue
            if isinstance(it, FUNCTIONS):
                self.inner.append(Scope(package, it, self, owner))
                continue
            self.nodes.append(it)
            if owner and isinstance(it, ast.AnnAssign):
                package.attributes[owner][it.target.id].append(it.annotation)
            else:
                self._bind(it)
            stack += [(each, "") for each in ast.iter_child_nodes(it)]

    def _arguments(self, node):
        if not isinstance(node, FUNCTIONS):
            return
        marks = [ast.unparse(it) for it in getattr(node, "decorator_list", ())]
        its = node.args
        for place, it in enumerate((*its.posonlyargs, *its.args, *its.kwonlyargs)):
            own = self.owner and not place and "staticmethod" not in marks
            self.bound[it.arg].append({self.owner} if own else self.package.of_type(it.annotation))
        for it in filter(None, (its.vararg, its.kwarg)):
            self.bound[it.arg].append(self.package.of_type(it.annotation))
        if isinstance(node, FUNCTIONS[:2]):
            table = self.package.results
            if any(it.endswith("property") for it in marks):
                table = self.package.attributes
            table[self.owner][node.name] = [node.returns]

    def _bind(self, node):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                self._to(target, node.value)
        elif isinstance(node, ast.AnnAssign):
            self._to(node.target, self.package.of_type(node.annotation))
        elif isinstance(node, ast.NamedExpr):
            self._to(node.target, node.value)
        elif isinstance(node, (ast.For, ast.comprehension)):
            self._to(node.target, node.iter)
        elif isinstance(node, ast.withitem) and node.optional_vars is not None:
            self._to(node.optional_vars, node.context_expr)
        elif isinstance(node, ast.ExceptHandler) and node.name:
            self.bound[node.name].append(self.package.of_type(node.type))

    def _to(self, target, value):
        if isinstance(target, ast.Name):
            self.bound[target.id].append(value)
        elif isinstance(target, ast.Attribute):
            none = isinstance(value, ast.Constant) and value.value is None
            if ast.unparse(target.value) == "self" and self.owner and not none:
                known = self.package.attributes[self.owner][target.attr]
                known.append((value, self))
        elif isinstance(target, (ast.Tuple, ast.List)):
            values = [value] * len(target.elts)
            if isinstance(value, (ast.Tuple, ast.List)) and len(value.elts) == len(values):
                values = value.elts
            elif isinstance(value, ast.Call) and value.args:
                if ast.unparse(value.func) == "zip":
                    values = (*value.args, *values)[: len(values)]
                elif ast.unparse(value.func) == "enumerate":
                    values = [None, value.args[0]]
            for one, its in zip(target.elts, values, strict=True):
                self._to(one, its)

    def kinds(self, it):
        """The classes that an expression may be of; None where it may be a host's."""
        if it is None or isinstance(it, set):
            return it
        if isinstance(it, ast.Name):
            return self._of_name(it.id)
        if isinstance(it, ast.Attribute):
            owners = self.kinds(it.value)
            return owners and self.package.of_attribute(owners, it.attr, self.package.attributes)
        if isinstance(it, (ast.Subscript, ast.Starred, ast.NamedExpr, ast.Await)):
            return self.kinds(it.value)
        if isinstance(it, ast.Call):
            return self._of_call(it)
        if isinstance(it, ast.Constant) and it.value is None:
            return set()
        parts = ()
        if isinstance(it, ast.IfExp):
            parts = it.body, it.orelse
        elif isinstance(it, (ast.BoolOp, ast.Tuple, ast.List)):
            parts = getattr(it, "values", None) or it.elts
        elif isinstance(it, (ast.ListComp, ast.GeneratorExp)):
            parts = (it.elt,)
        found = [self.kinds(part) for part in parts]
        return set().union(*found) if found and None not in found else None

    def _of_name(self, name):
        if name in self.bound:
            if name in self._busy:  # `x = x or ...`
                return set()
            self._busy.add(name)
            found = [self.kinds(it) for it in self.bound[name]]
            self._busy.discard(name)
            return None if None in found else set().union(*found)
        if self.outer is not None:
            return self.outer._of_name(name)
        standard = {STANDARD} if name in sys.stdlib_module_names else None
        return {name} if name in self.package.bases else standard

    def _of_call(self, call):
        function = call.func
        name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        if name in self.package.bases:
            return {name}
        if name == "cls" or name.lstrip("_")[:1].isupper():
            return {MADE}
        if ast.unparse(function).partition(".")[0] in sys.stdlib_module_names:
            return {STANDARD}
        if name in FIRST_ARGUMENT and call.args:
            return self.kinds(call.args[0])
        if isinstance(function, ast.Name):
            return self.package.of_attribute({""}, name, self.package.results)
        owners = self.kinds(function.value)
        if owners is None or name in CONTENTS:
            return owners
        return self.package.of_attribute(owners, name, self.package.results)

    def owner_of(self, namespace):
        """Whose namespace an expression is, `x.__dict__` or `vars(x)`; None of another thing."""
        if isinstance(namespace, ast.Attribute) and namespace.attr in NAMESPACES:
            return namespace.value
        if isinstance(namespace, ast.Subscript):  # `x.__dict__["_parameters"]`
            return self.owner_of(namespace.value)
        if isinstance(namespace, ast.Call) and ast.unparse(namespace.func) == "vars":
            return namespace.args[0]
        if isinstance(namespace, ast.Name):
            values = (it for it in self.bound.get(namespace.id, ()) if isinstance(it, ast.AST))
            owners = (self.owner_of(it) for it in values if not isinstance(it, ast.Name))
            return next((it for it in owners if it is not None), None)
        return None

    def written(self, node):
        """Each object that a node writes on; None for what a process shares."""
        targets = []
        if isinstance(node, (ast.Assign, ast.Delete)):
            targets = list(node.targets)
        elif isinstance(node, (ast.AugAssign, ast.AnnAssign, ast.For, ast.comprehension)):
            targets = [node.target]
        elif isinstance(node, ast.withitem):
            targets = [node.optional_vars]
        for it in targets:
            if isinstance(it, (ast.Tuple, ast.List, ast.Starred)):
                targets += getattr(it, "elts", None) or [it.value]
            elif isinstance(it, ast.Attribute):
                yield it.value
            elif isinstance(it, ast.Subscript):
                yield self.owner_of(it.value) or {STANDARD}
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", None) or getattr(node.func, "id", "")
            if name in SHARED:
                yield None
            elif name in SETTERS:
                yield {self.owner} if "super()" in ast.unparse(node.func) else node.args[0]
            elif name in CHANGING and isinstance(node.func, ast.Attribute):
                yield self.owner_of(node.func.value) or {STANDARD}

    def foreign_writes(self):
        """The lines that write on what may be a host's."""
        for node in self.nodes:
            line = getattr(node, "lineno", 0)
            yield from (line for it in self.written(node) if self.kinds(it) is None)
        for scope in self.inner:
            yield from scope.foreign_writes()


PLANTED = (
    "def f(model): model.size = 1",
    "def f(model): model.a.b += 1",
    "def f(model: torch.nn.Module): del model.forward",
    "def f(model): model.__class__ = int",
    "def f(model): setattr(model, 'size', 1)",
    "def f(model): object.__setattr__(model, 'size', 1)",
    "def f(model): vars(model)['size'] = 1",
    "def f(model): model.__dict__.update(size=1)",
    "def f(model):\n    own = model.__dict__\n    own.pop('forward')",
    "def f(model): model._parameters['weight'] = None",
    "def f(models):\n    for model in models: model.size = 1",
    "def f(models):\n    for models[0].size in (1, 2): pass",
    "def f(model):\n    with model as model.inner: pass",
    "import comfy.ops\ncomfy.ops.cast_bias_weight = None",
    "import torch\ntorch.nn.Linear.forward = None",
    "import torch\ntorch.backends.cudnn.benchmark = True",
    "class New:\n    def f(self, model):\n        self.model = model\n        self.model.size = 1",
    "def f(model):\n    new = Verdict('') if model else model\n    new.fact = ''",
    "def f():\n    register_layout_class('name', int)",
)
OWN = (
    "class New:\n    def f(self): self.size = 1",
    "class New:\n    figures: PassFigures\n    def f(self): self.figures.passes += 1",
    "def f(figures: PassFigures | None): figures.passes += 1",
    "def f(all: list[PassFigures]):\n    for it in all: it.passes += 1",
    "def f():\n    linear = torch.nn.Linear(1, 1)\n    linear.weight = None",
    "def f(parser: argparse.ArgumentParser): parser.epilog = ''",
)


@functools.cache
def scopes():
    """{file, or text: what it writes} of the shipped files, of PLANTED and of OWN."""
    trees = {
        str(file.relative_to(ROOT)): tree_of(file)
        for file in FILES
        if layer_of(file) not in NOT_SHIPPED | NO_HOST and file.name != "patches.py"
    }
    return Package(trees | {text: ast.parse(text) for text in PLANTED + OWN}).scopes


def test_nothing_else_changes_an_object_of_a_host():
    shipped = {it: scope for it, scope in scopes().items() if it.endswith(".py")}
    found = {file: sorted(scope.foreign_writes()) for file, scope in shipped.items()}
    assert {it: lines for it, lines in found.items() if lines and it not in ALLOWED} == {}
    assert {file for file in ALLOWED if found[file]} == ALLOWED.keys()


def test_rooms_that_import_no_host_are_those():
    found = {
        layer_of(file)
        for file in FILES
        for level, module, _ in imports(tree_of(file))
        if not level and module.partition(".")[0] in HOSTS
    }
    assert found & NO_HOST == set()


@pytest.mark.parametrize("texts, writes", [(PLANTED, True), (OWN, False)])
def test_a_write_is_found_where_the_object_may_be_a_hosts(texts, writes):
    assert [it for it in texts if bool(list(scopes()[it].foreign_writes())) is not writes] == []


def test_each_change_is_named_where_it_is_made_and_stands_in_the_table():
    calls = [
        node for file in FILES for node in ast.walk(tree_of(file)) if isinstance(node, ast.Call)
    ]
    names = {"call", "patched", "put", "swap", "switched"}
    made = {
        it.args[0].value
        for it in calls
        if ast.unparse(it.func).removeprefix("patches.") in names
        and it.args
        and isinstance(it.args[0], ast.Constant)
    }
    assert made == CHANGES.keys()
    assert all(it.why and it.checked for it in CHANGES.values())


class Wrapped:
    over = False

    def leave(self):
        self.over = True


def test_values_leave_in_turn_and_what_wraps_one_stays():
    first, second, alone, own = Wrapped(), Wrapped(), Wrapped(), {"forward": 1}
    pair = [(own, "forward", first), (own, "forward", second)]
    with pytest.raises(ZeroDivisionError), patched("block", pair):
        assert own["forward"] is second
        raise ZeroDivisionError
    assert own == {"forward": 1} and first.over and second.over
    with patched("block", ((own, name, alone) for name in ("forward", "new"))):
        own["forward"] = "of another extension"
    assert own == {"forward": "of another extension"} and alone.over
    assert ABSENT not in own.values()
