"""Writes the shared workflows.

python -m qwen_l40s.tools.workflows                          both forms of every workflow
python -m qwen_l40s.tools.workflows --check                  only says what would change
python -m qwen_l40s.tools.workflows --definitions FILE       takes nodes from GET /object_info
python -m qwen_l40s.tools.workflows --thumbnail NAME=IMAGE   an image that NAME made
python -m qwen_l40s.tools.workflows --draw                   a drawing for each that made none
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from ... import __version__
from . import definitions, thumbnails, workflows
from .graph import api_form
from .ui_form import ui_form

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "workflows"
FROZEN = ROOT / "tests" / "workflows"


def files() -> dict[Path, str]:
    """What stands in each JSON file, by its path."""
    written = {}
    for workflow in workflows():
        written[FOLDER / f"{workflow.name}.json"] = _text(ui_form(workflow))
        written[FOLDER / "api" / f"{workflow.name}.json"] = _text(api_form(workflow))
    return written


def differences() -> list[str]:
    """One sentence for each file that is not what `files` says."""
    expected = files()
    found = []
    for path, text in expected.items():
        name = path.relative_to(ROOT)
        if not path.is_file():
            found.append(f"{name} is missing.")
        elif path.read_text(encoding="utf-8") != text:
            found.append(f"{name} differs.")
    present = {*FOLDER.glob("*.json"), *FOLDER.glob("api/*.json")}
    found += [f"{path.relative_to(ROOT)} is made by nothing." for path in present - expected.keys()]
    return sorted(found)


def refresh_definitions(answer: Path) -> None:
    """Takes the nodes that `definitions.json` has, or that are ours, from GET /object_info."""
    info = json.loads(answer.read_text(encoding="utf-8"))
    known = json.loads(definitions.FILE.read_text(encoding="utf-8"))
    names = {*known, *(name for name in info if name.startswith(definitions.OURS))}
    definitions.FILE.write_text(_text(definitions.subset(info, names)), encoding="utf-8")


def write_drawings() -> None:
    """For every workflow without a picture of its own."""
    for workflow in workflows():
        path = FOLDER / f"{workflow.name}.jpg"
        made = path.is_file() and thumbnails.comment_of(path) == thumbnails.MADE
        if not made and (draw := thumbnails.DRAWINGS.get(workflow.name)):
            thumbnails.write(path, draw(), thumbnails.DRAWN)


def write_thumbnail(name: str, image: Path) -> None:
    """Takes what a workflow made as its picture."""
    if name not in {workflow.name for workflow in workflows()}:
        raise SystemExit(f"no workflow is called {name!r}")
    title, line = thumbnails.FRAMES.get(name, (name.replace("_", " "), ""))
    with Image.open(image) as picture:
        framed = thumbnails.framed(title, line, picture)
    thumbnails.write(FOLDER / f"{name}.jpg", framed, thumbnails.MADE)


def freeze() -> None:
    """Keeps both forms of this version and the nodes that they were made with, once and for all."""
    folder = FROZEN / __version__
    if folder.exists():
        raise SystemExit(f"{folder.relative_to(ROOT)} is there: a released version stays as it is")
    for path, text in files().items():
        form = "api" if path.parent.name == "api" else "ui"
        (folder / form).mkdir(parents=True, exist_ok=True)
        (folder / form / path.name).write_text(text, encoding="utf-8")
    nodes = json.loads(definitions.FILE.read_text(encoding="utf-8"))
    ours = {name: node for name, node in nodes.items() if name.startswith(definitions.OURS)}
    (folder / "nodes.json").write_text(_text(ours), encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; 1 when `--check` finds a difference."""
    options = _parser().parse_args(arguments)
    if options.definitions:
        refresh_definitions(options.definitions)
        return 0
    if options.draw:
        write_drawings()
        return 0
    if options.freeze:
        freeze()
        return 0
    if options.thumbnail:
        write_thumbnail(options.thumbnail[0], Path(options.thumbnail[1]))
        return 0
    if options.check:
        found = differences()
        print("\n".join(found) or "workflows are up to date")
        return 1 if found else 0
    for path, text in files().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return 0


def _text(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m qwen_l40s.tools.workflows",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--check", action="store_true", help="write nothing; 1 on a difference")
    parser.add_argument("--definitions", type=Path, metavar="FILE", help="of GET /object_info")
    parser.add_argument("--thumbnail", nargs=2, metavar=("NAME", "IMAGE"), help="made by NAME")
    parser.add_argument("--draw", action="store_true", help="draw the missing thumbnails")
    parser.add_argument("--freeze", action="store_true", help="keep this version for the tests")
    return parser


if __name__ == "__main__":
    sys.exit(main())
