"""The names that the package takes from ComfyUI, read from its syntax trees."""

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("comfy", "comfy_aimdo", "comfy_execution", "comfy_kitchen")
FILES = sorted(it for folder in ("hosts/comfyui", "nodes") for it in (ROOT / folder).rglob("*.py"))


class Taken(NamedTuple):
    """A dotted name behind its module; `at_import` where importing the file takes it."""

    module: str
    name: str
    file: str
    at_import: bool


def taken() -> list[Taken]:
    """All names, but for annotations, in the order of files."""
    return [it for file in FILES for it in _of_file(file)]


def _of_file(file: Path) -> Iterator[Taken]:
    tree, known = ast.parse(file.read_text(encoding="utf-8")), {}
    for node, outside in _code(tree, True):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] in PACKAGES:
                    known[alias.asname or alias.name.split(".")[0]] = (
                        alias.name if alias.asname else alias.name.split(".")[0]
                    )
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in PACKAGES:
            for alias in node.names:
                name = known[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                yield from _named(name, file, outside)
    for node, outside in _code(tree, True):
        if isinstance(node, ast.Attribute):
            first, *rest = ast.unparse(node).split(".")
            if first in known and all(map(str.isidentifier, rest)):
                yield from _named(".".join([known[first], *rest]), file, outside)


def _code(node: ast.AST, outside: bool) -> Iterator[tuple[ast.AST, bool]]:
    """What runs: no annotations, nothing for a type checker; and whether it runs at import."""
    yield node, outside
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns") or (
            isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        ):
            continue
        inside = isinstance(node, ast.FunctionDef | ast.Lambda) and field == "body"
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _code(child, outside and not inside)


def _named(dotted: str, file: Path, at_import: bool) -> Iterator[Taken]:
    parts = dotted.split(".")
    count = next((i for i in range(1, len(parts)) if not _is_module(parts[: i + 1])), len(parts))
    if count < len(parts):
        module, name = ".".join(parts[:count]), ".".join(parts[count:])
        yield Taken(module, name, file.relative_to(ROOT).as_posix(), at_import)


def _is_module(parts: list[str]) -> bool:
    try:
        return importlib.util.find_spec(".".join(parts)) is not None
    except (ImportError, ValueError):
        return False
