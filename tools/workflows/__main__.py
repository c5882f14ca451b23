"""Checks the shared workflows, and writes what follows from them.

python -m qwen_l40s.tools.workflows                      what is wrong, and what is to be written
python -m qwen_l40s.tools.workflows --write              figures in notes, API forms, tidied files
python -m qwen_l40s.tools.workflows --definitions FILE   takes nodes from GET /object_info

That values and wires are of the right types is left to ComfyUI: its page makes the files, and
tests/server posts them to a server.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from . import definitions, notes
from .forms import Graph, api_form, nodes_that_run, note_of, tidy

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "workflows"
MODEL_FILE = re.compile(r"\.(safetensors|sft|ckpt|pt|gguf)$")
WRITTEN = "filename"  # names a file that the node writes
RUNS = 0  # a node's mode: neither muted nor bypassed
FOLDED_TITLE = 20  # letters that the page draws of a folded node


def files() -> dict[Path, str]:
    """Returns what is to stand in each JSON file; raises ValueError with a line for each fault."""
    written: dict[Path, str] = {}
    wrong: list[str] = []
    for path in sorted(FOLDER.glob("*.json")):
        api = FOLDER / "api" / path.name
        try:
            graph = tidy(_read(path))
            if found := list(problems(graph)):
                raise ValueError("\n".join(found))
            prompt = api_form(graph, _read(api) if api.is_file() else {})
            note = note_of(graph)
            (text,) = note["widgets_values"]
            text = notes.written(text, prompt)
        except ValueError as error:
            name = path.relative_to(ROOT)
            wrong += [f"{name}: {line.rstrip('.')}." for line in str(error).splitlines()]
            continue
        note["widgets_values"], note["widgets_values_named"] = [text], {"text": text}
        notes.place(graph, note)
        written |= {path: _text(graph), api: _text(prompt)}
    if wrong:
        raise ValueError("\n".join(wrong))
    return written


def problems(graph: Graph) -> Iterator[str]:
    """Yields a sentence for what keeps a graph that `tidy` gave from opening or running."""
    nodes = {node["id"]: (node, definition) for node, definition in nodes_that_run(graph)}
    titles = Counter(node["title"] for node, _ in nodes.values())
    yield from (
        f"{title}: {count} nodes are called so" for title, count in titles.items() if count > 1
    )
    wires = {link for link, origin, *_ in graph["links"] if origin in nodes}
    for node, definition in nodes.values():
        title, shown = node["title"], definition.title.partition(" (")[0]
        if node["flags"].get("collapsed"):
            if len(title) > FOLDED_TITLE:
                yield f"{title}: the page cuts a folded node's title after {FOLDED_TITLE} letters"
        elif title.partition(" (")[0] != shown:
            yield f"{title}: call it {shown}, as the search does, with what tells it apart in (...)"
        if node["mode"] != RUNS:
            yield f"{title} is muted or bypassed"
        wired = {each["name"]: each["link"] for each in node["inputs"] if each["link"] is not None}
        yield from (f"{title}: there is no wire {link}" for link in {*wired.values()} - wires)
        for known in definition.inputs:
            if known.name not in wired:
                yield from (f"{title}.{what}" for what in _unwired(known, node))


def _unwired(known: definitions.Input, node: Graph) -> Iterator[str]:
    if not known.widget:
        if not known.optional:
            yield f"{known.name} is missing"
        return
    values = node["widgets_values_named"]
    value = values[known.name]
    if known.choices is not None and value not in known.choices:
        yield f"{known.name}: {value!r} is none of {', '.join(known.choices)}"
    if known.name != WRITTEN and MODEL_FILE.search(str(value)) and value not in notes.published():
        yield f"{known.name}: {value} has no row in docs/models.md"
    for name, expected in definitions.companions(known).items():
        if values[name] != expected:
            yield f"{name} must be {expected!r}, got {values[name]!r}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns 1 where a workflow is wrong or, unless written, not up to date."""
    parser = argparse.ArgumentParser(
        prog="python -m qwen_l40s.tools.workflows",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--write", action="store_true", help="notes' figures and API forms")
    parser.add_argument("--definitions", type=Path, metavar="FILE", help="of GET /object_info")
    options = parser.parse_args(arguments)
    if options.definitions:  # of the nodes that stand there, and of ours
        info, known = _read(options.definitions), _read(definitions.FILE)
        names = {*known, *(name for name in info if name.startswith(definitions.OURS))}
        definitions.FILE.write_text(_text(definitions.subset(info, names)), encoding="utf-8")
        return 0
    try:
        expected = files()
    except ValueError as error:
        print(error)
        return 1
    stale = {
        path: text
        for path, text in expected.items()
        if not path.is_file() or path.read_text(encoding="utf-8") != text
    }
    for path, text in stale.items():
        if options.write:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        else:
            print(f"{path.relative_to(ROOT)} differs.")
    return int(bool(stale) and not options.write)


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _text(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    sys.exit(main())
