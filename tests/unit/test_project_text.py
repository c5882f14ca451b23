"""Rules of the source that no linter knows, read from the syntax tree."""

import ast
from pathlib import Path

import pytest

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
MAY_USE_NETWORK = {"bench", "client"}
# Imports point one way: each layer may import the ones that are listed for it, and itself.
MAY_IMPORT = {
    "planning": set(),
    "machine": {"planning"},
    "charts": {"planning"},
    "client": set(),
    "micro": set(),
    "loaders": {"planning"},
    "optimizations": {"machine", "planning"},
    "hosts": {"charts", "loaders", "machine", "optimizations", "planning"},
    "measure": {"hosts", "loaders", "machine", "optimizations", "planning"},
    "nodes": {"charts", "hosts", "loaders", "machine", "optimizations", "planning"},
    "cli": {"bench", "charts", "client", "hosts", "loaders", "machine", "measure", "micro"}
    | {"optimizations", "planning"},
    "bench": {"charts", "cli", "hosts", "loaders", "machine", "measure", "optimizations"}
    | {"planning"},
    "tools": {"charts", "hosts", "loaders", "machine", "measure", "micro", "optimizations"}
    | {"planning"},
}


def tree_of(file):
    return ast.parse(file.read_text(encoding="utf-8"), str(file))


def imports(tree):
    """(level, dotted module, names) of every import statement, wherever it stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield 0, alias.name, []
        elif isinstance(node, ast.ImportFrom):
            yield node.level, node.module or "", [alias.name for alias in node.names]


def calls(tree):
    """Every call with the called name as it is written: `print`, `torch.load`, `folder.open`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


@pytest.fixture(params=FILES, ids=lambda file: str(file.relative_to(ROOT)))
def source(request):
    return request.param


def test_only_the_command_and_the_tools_print(source):
    if source.relative_to(ROOT).parts[0] in ("bench", "cli", "tools"):
        return
    assert [node.lineno for name, node in calls(tree_of(source)) if name == "print"] == []


def test_nothing_is_unpickled(source):
    tree = tree_of(source)
    imported = {module for level, module, _ in imports(tree) if level == 0}
    assert {module.partition(".")[0] for module in imported} & UNPICKLERS == set()
    assert [node.lineno for name, node in calls(tree) if name == "torch.load"] == []


def test_only_the_client_uses_the_network(source):
    tree = tree_of(source)
    named = {module for level, module, _ in imports(tree) if level == 0}
    named |= {
        f"{module}.{name}" for level, module, names in imports(tree) if not level for name in names
    }
    if source.relative_to(ROOT).parts[0] not in MAY_USE_NETWORK:
        assert named & NETWORK == set()
    for name, node in calls(tree):
        if name.endswith(".from_pretrained"):
            local = {key.arg: ast.unparse(key.value) for key in node.keywords}.get(
                "local_files_only"
            )
            assert local == "True", (
                f"line {node.lineno}: from_pretrained without local_files_only=True"
            )


def test_the_package_is_imported_by_relative_names_only(source):
    """ComfyUI imports the folder under its path: `qwen_l40s` does not exist there."""
    if source.name == "__main__.py":
        return
    absolute = [module for level, module, _ in imports(tree_of(source)) if not level]
    assert [module for module in absolute if module.partition(".")[0] == "qwen_l40s"] == []


def test_imports_point_one_way(source):
    parts = source.relative_to(ROOT).parts
    if len(parts) == 1:
        return
    layer, depth = parts[0], len(parts) - 1
    for level, module, names in imports(tree_of(source)):
        if level <= depth:  # absolute, or inside the layer
            continue
        assert level == depth + 1, f"{'.' * level}{module} points outside the package"
        for target in [module.partition(".")[0]] if module else names:
            if target not in MAY_IMPORT:
                continue
            assert target in MAY_IMPORT[layer], f"{layer} must not import {target}"


def test_every_layer_has_its_rule():
    layers = {file.relative_to(ROOT).parts[0] for file in FILES if file.parent != ROOT}
    assert layers - set(MAY_IMPORT) == set()
