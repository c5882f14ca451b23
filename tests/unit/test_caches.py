"""What a process remembers is kept where one call forgets it."""

import ast

from conftest import ROOT

from qwen_l40s import caches
from qwen_l40s.caches import cached, forget, remembered

# `called_by` keeps what was there when it was first asked, which is no memory of an answer;
# `_switched` what runs in flight have changed, which their ends undo.
OTHERS = {"called_by", "_switched"}
CACHES = {"cache", "lru_cache"}


def test_forget_empties_functions_and_collections(monkeypatch):
    monkeypatch.setattr(caches, "_clears", [])
    asked, known = [], remembered({1: 2})
    count = cached(lambda x: asked.append(x))
    count(1), count(1)
    assert asked == [1]
    forget()
    count(1)
    assert asked == [1, 1] and known == {}


def test_whatever_a_module_remembers_can_be_forgotten():
    folders = ("bench", "build", "dist", "tests", "tools")
    found, seen = [], 0
    for path in ROOT.rglob("*.py"):
        if path.relative_to(ROOT).parts[0] in folders or path.relative_to(ROOT).parts[0][0] == ".":
            continue
        seen += 1
        found += [f"{path.relative_to(ROOT)}: {name}" for name in caches_of(path.read_text())]
    assert seen > 150
    assert [it for it in found if it.split(": ")[1] not in OTHERS] == []


def caches_of(code):
    """A module's functions under functools' caches, and its collections that functions fill."""
    body = ast.parse(code).body
    functions = [it for it in body if isinstance(it, ast.FunctionDef | ast.ClassDef)]
    filled = {
        node.value.id
        for function in functions
        for node in ast.walk(function)
        if isinstance(node, ast.Subscript)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
    }
    for node in body:
        if isinstance(node, ast.FunctionDef):
            names = {name_of(it) for it in node.decorator_list}
            if CACHES & names and "remembered" not in names:
                yield node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if getattr(target, "id", None) in filled and name_of(node.value) != "remembered":
                yield target.id


def name_of(node):
    node = node.func if isinstance(node, ast.Call) else node
    return getattr(node, "attr", getattr(node, "id", ""))


def test_a_cache_of_a_module_s_own_is_found():
    code = "a = {}\nb = remembered({})\n@functools.cache\ndef c(): b[1] = a[1] = 2\n"
    code += "@remembered\n@lru_cache(maxsize=1)\ndef d(): pass\n"
    assert list(caches_of(code)) == ["a", "c"]
