"""What of today's nodes would break workflow files that were released: sentences, none if nothing.

Nodes are as `tools/workflows/definitions.py` keeps them: inputs and outputs in their order.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from qwen_l40s.tools.workflows.definitions import Definition, Input, companions, parse

Nodes = Mapping[str, Mapping[str, Any]]
NOTES = {"MarkdownNote"}  # the page's own, of which a server knows nothing


def node_changes(frozen: Nodes, today: Nodes, replaced: Collection[str] = ()) -> list[str]:
    """Inputs and outputs may only be appended, and what is appended must be optional.

    Args:
        replaced: nodes for which the server has a replacement.
    """
    before, now = parse(frozen), parse(today)
    found = []
    for name, node in before.items():
        if name in now:
            found += [f"{name}: {sentence}" for sentence in _inputs(node, now[name])]
            found += [f"{name}: {sentence}" for sentence in _outputs(node, now[name])]
        elif name not in replaced:
            found.append(f"{name} is gone and has no replacement")
    return found


def file_changes(
    graph: Mapping[str, Any], today: Nodes, replaced: Collection[str] = ()
) -> list[str]:
    """Each positional value of a file in UI form lands where it was saved; each wire still fits."""
    now = parse(today)
    found = []
    nodes = {node["id"]: node for node in graph["nodes"] if node["type"] not in NOTES}
    for node in nodes.values():
        where = f"{node['title']} ({node['type']})"
        if node["type"] not in now:
            if node["type"] not in replaced:
                found.append(f"{where} is gone and has no replacement")
            continue
        saved = list(node.get("widgets_values_named", {}))
        assert len(saved) == len(node.get("widgets_values", [])), where
        landed = _widgets(now[node["type"]])[: len(saved)]
        found += [
            f"{where}: the value of {name} lands on {other}"
            for name, other in zip(saved, landed + ["nothing"] * len(saved), strict=False)
            if name != other
        ]
    for _, origin, output, target, slot, kind in graph["links"]:
        ends = nodes[origin]["type"], nodes[target]["type"]
        if any(end not in now for end in ends):
            continue
        outputs = now[ends[0]].outputs
        given = outputs[output].type if output < len(outputs) else "nothing"
        name = nodes[target]["inputs"][slot]["name"]
        taken = {each.name: each.type for each in now[ends[1]].inputs}.get(name, "nothing")
        if given != kind or taken not in (kind, "*"):
            found.append(f"{ends[0]} {output} -> {ends[1]}.{name}: {given} into {taken}")
    return found


def _inputs(before: Definition, now: Definition) -> list[str]:
    found = []
    for index, old in enumerate(before.inputs):
        if index >= len(now.inputs):
            found.append(f"input {old.name} is gone")
            continue
        new = now.inputs[index]
        if (old.name, old.type, old.widget) != (new.name, new.type, new.widget):
            found.append(f"input {index} was {old.name} ({old.type}), is {new.name} ({new.type})")
            continue
        found += _narrowed(old, new)
    found += [
        f"input {new.name} is new and not optional"
        for new in now.inputs[len(before.inputs) :]
        if not new.optional
    ]
    return found


def _narrowed(old: Input, new: Input) -> list[str]:
    """What a saved value could be and now cannot."""
    found = []
    if old.optional and not new.optional:
        found.append(f"input {old.name} was optional")
    if companions(old) != companions(new):
        found.append(f"input {old.name} had other widgets behind it")
    if new.choices is not None:
        gone = [choice for choice in old.choices or () if choice not in new.choices]
        found += [f"input {old.name} lost the choice {choice!r}" for choice in gone]
    for bound, lost in (("min", lambda was, is_: is_ > was), ("max", lambda was, is_: is_ < was)):
        if bound in new.options and (
            bound not in old.options or lost(old.options[bound], new.options[bound])
        ):
            found.append(f"input {old.name} has a narrower {bound}")
    return found


def _outputs(before: Definition, now: Definition) -> list[str]:
    return [
        f"output {index} was {old.name} ({old.type})"
        for index, old in enumerate(before.outputs)
        if index >= len(now.outputs) or now.outputs[index] != old
    ]


def _widgets(node: Definition) -> list[str]:
    """Widgets in the page's order, with those that no input stands for."""
    return [
        name for known in node.inputs if known.widget for name in (known.name, *companions(known))
    ]
