"""Rules of the source that no linter knows, read from the syntax tree."""

import ast
import functools
import re
from collections import defaultdict
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path

import pytest

from qwen_l40s.planning.options import CHOICE_LABELS, LABELS

ROOT = Path(__file__).resolve().parents[2]
NOT_PACKAGE = {"tests", "docs", "build", "dist", "out"}
FILES = sorted(
    file
    for file in ROOT.rglob("*.py")
    if file.relative_to(ROOT).parts[0] not in NOT_PACKAGE
    and not any(part.startswith(".") for part in file.relative_to(ROOT).parts)
)
# Reading any of these formats can run code that the file brings.
UNPICKLERS = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
NETWORK = {
    *("urllib.request", "http.client", "requests", "httpx", "socket", "ftplib"),
    *("aiohttp", "websockets"),
}
# What talks to a server that the user names; nothing else of the package does.
MAY_USE_NETWORK = {"bench", "client", "fleet"}
# Imports point one way: each layer may import the ones that are listed for it, itself, and FACTS,
# of which `spec` is below `families`.
FACTS = {"families", "spec"}
MAY_IMPORT = {
    "families": set(),
    "spec": set(),
    "planning": set(),
    "machine": {"planning"},
    "charts": {"planning"},
    "client": set(),
    "fleet": {"client", "machine"},
    "micro": set(),
    "optimizations": {"machine", "planning"},
    "loaders": {"optimizations", "planning"},
    "hosts": {"charts", "loaders", "machine", "optimizations", "planning"},
    "measure": {"hosts", "loaders", "machine", "optimizations", "planning"},
    "nodes": {"charts", "hosts", "loaders", "machine", "optimizations", "planning"},
    "cli": {"bench", "charts", "client", "fleet", "hosts", "loaders", "machine", "measure", "micro"}
    | {"optimizations", "planning"},
    "bench": {"charts", "hosts", "loaders", "machine", "measure", "micro", "optimizations"}
    | {"planning"},
    "tools": {"charts", "cli", "client", "hosts", "loaders", "machine", "measure", "micro"}
    | {"optimizations", "planning"},
}

# Why an import may be late: the package runs without, or with another version that lacks a name;
OPTIONAL = {"PIL", "accelerate", "aiohttp", "diffusers", "huggingface_hub", "isal", "lpips"}
OPTIONAL |= {"numpy", "psutil", "pynvml", "ray", "safetensors", "scipy", "torchvision", "tqdm"}
OPTIONAL |= {"transformers", "triton", "yaml"}
# outside ComfyUI it is not there, and a ComfyUI that lacks a name of it loses one node, not all;
OF_COMFYUI = {"comfy", "comfy_aimdo", "comfy_execution", "comfy_extras", "comfy_kitchen"}
OF_COMFYUI |= {"folder_paths", "nodes", "server"}
# other systems have none;
OF_ONE_SYSTEM = {"fcntl", "msvcrt"}
# it takes seconds;
SLOW = {"torch"}
# or these start sooner, whatever a command or a node imports once it runs.
STARTED = {"cli", "nodes"}


@functools.cache
def tree_of(file):
    return ast.parse(file.read_text(encoding="utf-8"), str(file))


@functools.cache
def nodes_of(tree):
    return list(ast.walk(tree))


def imports(tree):
    """(level, dotted module, names) of every import statement, wherever it stands."""
    for node in nodes_of(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield 0, alias.name, []
        elif isinstance(node, ast.ImportFrom):
            yield node.level, node.module or "", [alias.name for alias in node.names]


@functools.cache
def calls(tree):
    """Every call with the called name as it is written: `print`, `torch.load`, `folder.open`."""
    return [(ast.unparse(it.func), it) for it in nodes_of(tree) if isinstance(it, ast.Call)]


def layer_of(file):
    """The folder under the root; "" of what lies there itself."""
    return file.relative_to(ROOT).parts[0] if file.parent != ROOT else ""


def offences(lines_of):
    """{file: what `lines_of(file)` finds wrong} of all files in which it finds something."""
    found = {str(file.relative_to(ROOT)): list(lines_of(file)) for file in FILES}
    return {file: lines for file, lines in found.items() if lines}


def test_only_the_command_and_the_tools_print():
    def printing(file):
        if layer_of(file) not in ("bench", "cli", "tools"):
            yield from (node.lineno for name, node in calls(tree_of(file)) if name == "print")

    assert offences(printing) == {}


def test_nothing_is_unpickled():
    def unpickling(file):
        tree = tree_of(file)
        imported = {module.partition(".")[0] for level, module, _ in imports(tree) if level == 0}
        yield from imported & UNPICKLERS
        yield from (node.lineno for name, node in calls(tree) if name == "torch.load")

    assert offences(unpickling) == {}


def test_only_the_client_uses_the_network():
    def networking(file):
        if layer_of(file) in MAY_USE_NETWORK:
            return
        for level, module, names in imports(tree_of(file)):
            if level == 0:
                yield from NETWORK & {module, *(f"{module}.{name}" for name in names)}

    assert offences(networking) == {}


def test_nothing_is_downloaded():
    def downloading(file):
        for name, node in calls(tree_of(file)):
            given = {key.arg: ast.unparse(key.value) for key in node.keywords}
            if name.endswith(".from_pretrained") and given.get("local_files_only") != "True":
                yield f"line {node.lineno}: from_pretrained without local_files_only=True"

    assert offences(downloading) == {}


def test_the_package_is_imported_by_relative_names_only():
    """ComfyUI imports the folder under its path: `qwen_l40s` does not exist there."""

    def absolute(file):
        if file.name != "__main__.py":
            names = (module for level, module, _ in imports(tree_of(file)) if not level)
            yield from (name for name in names if name.partition(".")[0] == "qwen_l40s")

    assert offences(absolute) == {}


# What only API files and the command line say, where no other word is meant.
IDS = {*LABELS, *(it for choices in CHOICE_LABELS.values() for it in choices)}
PLAIN = "|".join(it for it in IDS if re.search("[_ ]", it))
# Not in brackets behind the label, nor before a colon, where nodes put the label.
UNLABELLED = re.compile(rf"(?<![\w(.])(?:{PLAIN})\b(?!:)")


def test_sentences_call_inputs_what_the_page_calls_them():
    def ids(file):
        nodes = nodes_of(tree_of(file))
        docstrings = {id(it.value) for it in nodes if isinstance(it, ast.Expr)}
        for node in nodes:
            text = getattr(node, "value", None)
            if isinstance(text, str) and id(node) not in docstrings and text not in IDS:
                yield from UNLABELLED.findall(text)

    assert offences(ids) == {}


def test_pages_call_inputs_what_the_page_calls_them():
    single = {it for it in LABELS if it not in LABELS.values()}
    for page in (*ROOT.glob("README*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("web/docs/*.md")):
        text = page.read_text(encoding="utf-8").split("### Names in API files")
        text = text[0] + text[-1].partition("\n## ")[2] * (len(text) > 1)
        text = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
        assert not single & {*re.findall(r"`(\w+)`", text)}, page
        assert UNLABELLED.findall(text) == [], page


def test_imports_point_one_way():
    def wrong_way(file):
        layer, depth = layer_of(file), len(file.relative_to(ROOT).parts) - 1
        facts = FACTS - ({"families"} if layer == "spec" else set())
        for level, module, names in imports(tree_of(file)) if layer else ():
            if level > depth + 1:
                yield f"{'.' * level}{module} points outside the package"
            if level == depth + 1:
                targets = {module.partition(".")[0]} if module else set(names)
                yield from targets & MAY_IMPORT.keys() - MAY_IMPORT[layer] - facts

    assert offences(wrong_way) == {}


def test_every_layer_has_its_rule():
    assert {layer_of(file) for file in FILES} - {""} == set(MAY_IMPORT)


@functools.cache
def imported(file):
    """(line, whether late, what) of each import: late in a function or for types alone; a file of
    the package, or the first name of another module.
    """

    def within(node, late):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ImportFrom) and child.level:
                base = file.parents[child.level - 1].joinpath(*(child.module or "").split("."))
                for alias in child.names:
                    places = (
                        base / f"{alias.name}.py",
                        base.with_suffix(".py"),
                        base / "__init__.py",
                    )
                    yield child.lineno, late, next(place for place in places if place.is_file())
            elif isinstance(child, ast.Import | ast.ImportFrom):
                for alias in child.names:
                    name = alias.name if isinstance(child, ast.Import) else child.module
                    yield child.lineno, late, name.partition(".")[0]
            function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            types = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            yield from within(child, late or function or types)

    return list(within(tree_of(file), False))


@functools.cache
def brought(file):
    """All files and modules that come with the import of a file."""
    found, waiting = set(), [file]
    while waiting:
        one = waiting.pop()
        if one not in found and isinstance(one, Path):
            waiting += [target for _, late, target in imported(one) if not late]
        found.add(one)
    return found


def test_imports_go_in_no_circle():
    graph = {file: {to for *_, to in imported(file) if isinstance(to, Path)} for file in FILES}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        circle = " -> ".join(str(file.relative_to(ROOT)) for file in error.args[1])
        raise AssertionError(circle) from None


def test_only_what_has_a_reason_is_imported_late():
    reasons = OPTIONAL | OF_COMFYUI | OF_ONE_SYSTEM | SLOW

    def late_without_reason(file):
        here = brought(file)
        for line, late, target in imported(file):
            ours = isinstance(target, Path)
            new = brought(target) - here if ours else {target} - (here & SLOW)
            if late and not (new & reasons or (ours and new and layer_of(file) in STARTED)):
                yield f"line {line}: {target}"

    assert offences(late_without_reason) == {}


def circle_of_rooms(root, known=frozenset()):
    """The folders and files in `root` that import each other, late and for types too."""
    found = defaultdict(set)

    def room(path):
        return path.relative_to(root).parts[0].removesuffix(".py")

    files = [file for file in FILES if root in file.parents and file != root / "__init__.py"]
    for file in files:
        for level, module, names in imports(tree_of(file)):
            base = file.parents[level - 1].joinpath(*module.split(".")) if level else Path()
            for target in [base / name for name in names] if base == root else [base]:
                if root in target.parents and room(target) != room(file):
                    found[room(file), room(target)].add(str(file.relative_to(root)))
    rooms = {room(file) for file in files}
    graph = {one: {end for start, end in found.keys() - known if start == one} for one in rooms}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        ends = [(start, end) for end, start in pairwise(error.args[1])]
        return [f"{start} imports {end}: {sorted(found[start, end])}" for start, end in ends]


def test_rooms_import_one_way():
    assert circle_of_rooms(ROOT, known={("spec", "families")}) is None


@pytest.mark.parametrize("folder", ["hosts", "hosts/comfyui", "optimizations"])
def test_rooms_of_a_folder_import_one_way(folder):
    assert circle_of_rooms(ROOT / folder) is None
