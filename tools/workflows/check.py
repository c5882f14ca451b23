"""Finds what keeps a workflow from opening or running: values, wires, files that do not fit."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from .definitions import DYNAMIC_COMBO, Definition, Input, companions, widgets
from .forms import Graph, nodes_that_run
from .notes import published

MODEL_FILE = re.compile(r"\.(safetensors|sft|ckpt|pt|gguf)$")
WRITTEN = "filename"  # names a file that the node writes
RUNS = 0  # a node's mode: neither muted nor bypassed
# Numbers of a widget's type; bool is an int to Python and none to ComfyUI.
FITS = {
    "INT": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "FLOAT": lambda value: isinstance(value, (int, float)) and not isinstance(value, bool),
    "STRING": lambda value: isinstance(value, str),
    "BOOLEAN": lambda value: isinstance(value, bool),
    "COMBO": lambda value: isinstance(value, str),
    DYNAMIC_COMBO: lambda value: isinstance(value, str),
}


def problems(graph: Graph) -> Iterator[str]:
    """Yields a sentence for each, of a graph that `forms.tidy` gave."""
    titles = Counter(node["title"] for node, _ in nodes_that_run(graph))
    yield from (
        f"{title}: {count} nodes are called so" for title, count in titles.items() if count > 1
    )
    for node, definition in nodes_that_run(graph):
        for sentence in _values(node, definition):
            yield f"{node['title']}{sentence}"
    yield from _wires(graph)


def _values(node: Graph, definition: Definition) -> Iterator[str]:
    shown = definition.title.partition(" (")[0]
    if node["title"].partition(" (")[0] != shown:
        yield f": call it {shown}, as the search does, with what tells it from others in (...)"
    if node["mode"] != RUNS:
        yield " is muted or bypassed"
    values = node.get("widgets_values_named", {})
    wired = {socket["name"] for socket in node["inputs"] if socket["link"] is not None}
    names, count = list(widgets(definition)), len(node.get("widgets_values", ()))
    if count != len(names):
        yield f" has {count} values for {', '.join(names)}"
        return
    for known in definition.inputs:
        if known.name in wired:
            continue
        if known.widget:
            yield from _value(known, values)
        elif not known.optional:
            yield f".{known.name} is missing"


def _value(known: Input, values: Graph) -> Iterator[str]:
    value = values[known.name]
    if not FITS[known.type](value):
        yield f".{known.name} takes {known.type}, got {value!r}"
    elif known.choices is not None and value not in known.choices:
        yield f".{known.name}: {value!r} is none of {', '.join(known.choices)}"
    elif known.name != WRITTEN and MODEL_FILE.search(str(value)) and value not in published():
        yield f".{known.name}: {value} has no row in docs/models.md"
    for name, expected in companions(known).items():
        if values[name] != expected:
            yield f".{name} must be {expected!r}, got {values[name]!r}"


def _wires(graph: Graph) -> Iterator[str]:
    nodes = {node["id"]: (node, definition) for node, definition in nodes_that_run(graph)}
    given = {
        link: (id, slot)
        for id, (node, _) in nodes.items()
        for slot, socket in enumerate(node["outputs"])
        for link in socket["links"] or ()
    }
    taken = {
        socket["link"]: (id, slot)
        for id, (node, _) in nodes.items()
        for slot, socket in enumerate(node["inputs"])
        if socket["link"] is not None
    }
    for link, origin, output, target, slot, kind in graph["links"]:
        ends = given.pop(link, None), taken.pop(link, None)
        if ends != ((origin, output), (target, slot)):
            yield f"wire {link} is not listed at both ends"
            continue
        (_, giver), (node, taker) = nodes[origin], nodes[target]
        name = node["inputs"][slot]["name"]
        got = [*(each.type for each in giver.outputs[output:]), "nothing"][0]
        takes = {each.name: each.type for each in taker.inputs}.get(name, "nothing")
        if got != kind or takes not in (kind, "*"):
            yield f"{node['title']}.{name} takes {takes}, got {got}"
    yield from (f"there is no wire {link}" for link in sorted({*given, *taken}))
