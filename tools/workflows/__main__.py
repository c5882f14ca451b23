"""Checks the shared workflows, and writes what follows from them.

python -m qwen_l40s.tools.workflows                      what is wrong, and what is to be written
python -m qwen_l40s.tools.workflows --write              figures in notes, API forms, tidied files
python -m qwen_l40s.tools.workflows --definitions FILE   takes nodes from GET /object_info
python -m qwen_l40s.tools.workflows --freeze             keeps this version for the tests
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ... import __version__
from . import definitions, notes
from .check import problems
from .forms import api_form, note_of, tidy

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "workflows"
FROZEN = ROOT / "tests" / "workflows"


def files() -> dict[Path, str]:
    """Returns what is to stand in each JSON file, by its path.

    Raises:
        ValueError: a workflow is wrong; a line for each reason.
    """
    written, wrong = {}, []
    for path in sorted(FOLDER.glob("*.json")):
        api = FOLDER / "api" / path.name
        try:
            graph = tidy(_read(path))
            if found := list(problems(graph)):
                raise ValueError("\n".join(found))
            prompt = api_form(graph, _read(api) if api.is_file() else {})
            note = note_of(graph)
            (text,) = note["widgets_values"]
            text = notes.written(text, path.stem, prompt)
        except ValueError as error:
            wrong += [
                f"{path.relative_to(ROOT)}: {line.rstrip('.')}." for line in str(error).splitlines()
            ]
            continue
        note["widgets_values"], note["widgets_values_named"] = [text], {"text": text}
        written |= {path: _text(graph), api: _text(prompt)}
    if wrong:
        raise ValueError("\n".join(wrong))
    return written


def differences(expected: Mapping[Path, str]) -> list[str]:
    """Names each file that is not what it is to be, in a sentence."""
    present = {*FOLDER.glob("*.json"), *FOLDER.glob("api/*.json")}
    held = {path: path.read_text(encoding="utf-8") for path in present & expected.keys()}
    found = [(path, "is made by nothing") for path in present - expected.keys()]
    found += [(path, "is missing") for path in expected.keys() - present]
    found += [(path, "differs") for path, text in held.items() if text != expected[path]]
    return sorted(f"{path.relative_to(ROOT)} {what}." for path, what in found)


def refresh_definitions(answer: Path) -> None:
    """Takes the nodes that `definitions.json` has, or that are ours, from GET /object_info."""
    info, known = _read(answer), _read(definitions.FILE)
    names = {*known, *(name for name in info if name.startswith(definitions.OURS))}
    definitions.FILE.write_text(_text(definitions.subset(info, names)), encoding="utf-8")


def freeze(files: Mapping[Path, str]) -> None:
    """Keeps both forms of this version and the nodes that they were made with, once and for all."""
    folder = FROZEN / __version__
    if folder.exists():
        raise SystemExit(f"{folder.relative_to(ROOT)} is there: a released version stays as it is")
    for path, text in files.items():
        form = "api" if path.parent.name == "api" else "ui"
        (folder / form).mkdir(parents=True, exist_ok=True)
        (folder / form / path.name).write_text(text, encoding="utf-8")
    nodes = _read(definitions.FILE)
    ours = {name: node for name, node in nodes.items() if name.startswith(definitions.OURS)}
    (folder / "nodes.json").write_text(_text(ours), encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns 1 where a workflow is wrong or, unless written, not up to date."""
    parser = argparse.ArgumentParser(
        prog="python -m qwen_l40s.tools.workflows",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--check", action="store_true", help="what it does without --write")
    parser.add_argument("--write", action="store_true", help="notes' figures and API forms")
    parser.add_argument("--definitions", type=Path, metavar="FILE", help="of GET /object_info")
    parser.add_argument("--freeze", action="store_true", help="keep this version for the tests")
    parser.add_argument("--draw", "--thumbnail", nargs="*", help=argparse.SUPPRESS)  # of 0.1.0
    options = parser.parse_args(arguments)
    if options.draw is not None:
        parser.error("nothing draws thumbnails: put a JPEG of 512x512 at workflows/NAME.jpg")
    if options.definitions:
        refresh_definitions(options.definitions)
        return 0
    try:
        expected = files()
    except ValueError as error:
        print(error)
        return 1
    if options.freeze:
        freeze(expected)
    elif options.write:
        for path, text in expected.items():
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
    else:
        found = differences(expected)
        print("\n".join(found) or "workflows are up to date")
        return 1 if found else 0
    return 0


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _text(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    sys.exit(main())
