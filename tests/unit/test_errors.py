"""Errors, as they travel to other processes."""

import ast
import copy
import importlib
import inspect
import pickle
import pkgutil
import re
from pathlib import Path

import pytest

import qwen_l40s.client
import qwen_l40s.fleet
from qwen_l40s import errors

for room in (qwen_l40s.client, qwen_l40s.fleet):
    for module in pkgutil.iter_modules(room.__path__):
        importlib.import_module(f"{room.__name__}.{module.name}")


def found(kind=Exception):
    for each in kind.__subclasses__():
        if each.__module__.startswith("qwen_l40s."):
            yield each
        yield from found(each)


def made(kind):
    """An error whose every argument is given."""
    values = {"path": Path("a/b"), "nodes": [{"id": "1"}], "seconds": 1.5, "status": 404}
    _, *given = inspect.signature(kind.__init__).parameters.values()
    given = [each for each in given if each.kind is not inspect.Parameter.VAR_POSITIONAL]
    plain = [values.get(each.name, each.name) for each in given if each.kind < each.KEYWORD_ONLY]
    named = {each.name: True for each in given if each.kind == each.KEYWORD_ONLY}
    return kind(*plain, **named)


@pytest.mark.parametrize("kind", sorted(set(found()), key=str), ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_an_error_comes_out_of_another_process_as_it_was(kind, protocol):
    error = made(kind)
    for other in (pickle.loads(pickle.dumps(error, protocol)), copy.copy(error)):
        assert type(other) is kind
        assert (str(other), other.args, vars(other)) == (str(error), error.args, vars(error))


def test_every_error_of_ours_is_among_them():
    assert {errors.SettingError, errors.DoesNotFitError} < set(found())
    assert {"JobError", "AnswerError", "AwayError", "DiskError"} < {e.__name__ for e in found()}


ROOT = Path(errors.__file__).parent
PUBLIC = {"CheckpointError", "SettingError", "UnavailableError", "DoesNotFitError"}
# Raised for a caller in the same file or for a sentence's first half, and logged with it.
INSIDE = {"loaders/writer.py", "loaders/shards.py", "optimizations/vae/tiles.py"}
# After a fact and a colon, or in a rule that says what is allowed, or in a sentence of its own.
REMEDY = re.compile(r": |\bmust\b|\bat (?:least|most)\b|\. [A-Z]")


def sentences():
    """(where, text) of each sentence of an error that a caller sees, values as NULs."""
    rooms = {path.name for path in ROOT.iterdir()} - {"bench", "tests", "tools", "build", "dist"}
    for file in sorted(ROOT.rglob("*.py")):
        name = file.relative_to(ROOT).as_posix()
        if name.partition("/")[0] not in rooms or name.startswith(".") or name in INSIDE:
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Call) and node.args):
                continue
            parts = getattr(node.args[0], "values", node.args[:1])
            texts = [getattr(part, "value", None) for part in parts]
            if getattr(node.func, "id", "") in PUBLIC and isinstance(node.args[0], ast.JoinedStr):
                yield name, "".join(it if isinstance(it, str) else "\0" for it in texts)
            elif getattr(node.func, "id", "") in PUBLIC and isinstance(texts[0], str):
                yield name, texts[0]


def test_every_error_has_a_fact_and_a_rule_or_remedy():
    found = [*sentences()]
    assert len(found) > 250
    assert [(name, text) for name, text in found if not REMEDY.search(text)] == []
