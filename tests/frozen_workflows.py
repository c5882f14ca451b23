"""What of today's nodes would break workflow files that were released: sentences, none if nothing.

Nodes are as `tools/workflows/definitions.py` keeps them: inputs and outputs in their order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from qwen_l40s.tools.workflows.definitions import (
    OURS,
    Definition,
    Input,
    companions,
    parse,
    widgets,
)

Nodes = Mapping[str, Mapping[str, Any]]
Replacements = Mapping[str, Sequence[Mapping[str, Any]]]
NOTES = {"MarkdownNote"}  # the page's own, of which a server knows nothing


def node_changes(frozen: Nodes, today: Nodes) -> list[str]:
    """Inputs and outputs may only be appended, and what is appended must be optional. An input and
    its choices may have new names where it takes those that it had.

    A node that is gone is for `replacement_changes`.
    """
    before, now = _ours(frozen), parse(today)
    found = []
    for name in (name for name in before if name in now):
        found += [f"{name}: {sentence}" for sentence in _inputs(before[name], now[name])]
        found += [f"{name}: {sentence}" for sentence in _outputs(before[name], now[name])]
    return found


def replacement_changes(frozen: Nodes, today: Nodes, replacements: Replacements) -> list[str]:
    """A node that is gone has a replacement, which takes over each of its inputs and outputs.

    Args:
        replacements: the answer of GET /node_replacements; ComfyUI uses the first of a class.
    """
    before, now = _ours(frozen), parse(today)
    found = []
    for name in (name for name in before if name not in now):
        if not replacements.get(name):
            found.append(f"{name} is gone and has no replacement")
            continue
        rules = replacements[name][0]
        new = now.get(rules["new_node_id"])
        if new is None:
            found.append(f"{name}: its replacement {rules['new_node_id']} is not there")
            continue
        found += [f"{name}: {sentence}" for sentence in _replaced(before[name], new, rules)]
    return found


def file_changes(graph: Mapping[str, Any], today: Nodes) -> list[str]:
    """Each positional value of a file in UI form lands where it was saved; each wire still fits.

    A node of ComfyUI's own that is gone is found too; ours are for `replacement_changes`.
    """
    now = parse(today)
    found = []
    nodes = {node["id"]: node for node in graph["nodes"] if node["type"] not in NOTES}
    for node in nodes.values():
        where = f"{node['title']} ({node['type']})"
        if node["type"] not in now:
            if not node["type"].startswith(OURS):
                found.append(f"{where} is gone")
            continue
        saved = list(node.get("widgets_values_named", {}))
        assert len(saved) == len(node.get("widgets_values", [])), where
        older = _older_names(now[node["type"]])
        landed = list(widgets(now[node["type"]]))[: len(saved)]
        found += [
            f"{where}: the value of {name} lands on {other}"
            for name, other in zip(saved, landed + ["nothing"] * len(saved), strict=False)
            if other not in (name, older.get(name))
        ]
    for _, origin, output, target, slot, kind in graph["links"]:
        ends = nodes[origin]["type"], nodes[target]["type"]
        if any(end not in now for end in ends):
            continue
        outputs = now[ends[0]].outputs
        given = outputs[output].type if output < len(outputs) else "nothing"
        name = nodes[target]["inputs"][slot]["name"]
        name = _older_names(now[ends[1]]).get(name, name)
        taken = {each.name: each.type for each in now[ends[1]].inputs}.get(name, "nothing")
        if given != kind or taken not in (kind, "*"):
            found.append(f"{ends[0]} {output} -> {ends[1]}.{name}: {given} into {taken}")
    return found


def _ours(frozen: Nodes) -> dict[str, Definition]:
    return {name: node for name, node in parse(frozen).items() if node.is_ours}


def _inputs(before: Definition, now: Definition) -> list[str]:
    found = []
    for index, old in enumerate(before.inputs):
        if index >= len(now.inputs):
            found.append(f"input {old.name} is gone")
            continue
        new = now.inputs[index]
        renamed = old.name == new.options.get("older_name") and new.optional
        same_name = renamed or old.name == new.name
        if not same_name or (old.type, old.widget) != (new.type, new.widget):
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
        older = new.options.get("older", {})
        gone = [name for name in old.choices or () if older.get(name, name) not in new.choices]
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


def _replaced(old: Definition, new: Definition, rules: Mapping[str, Any]) -> list[str]:
    """What a replacement loses; without a mapping of inputs it loses all of them."""
    found = []
    # The page finds a saved value by its place in this list.
    if (rules["old_widget_ids"] or []) != list(widgets(old)):
        found.append(f"old_widget_ids must be {list(widgets(old))}")
    mapping = rules["input_mapping"] or []
    taken = {each["old_id"]: each["new_id"] for each in mapping if "old_id" in each}
    known = {each.name: each for each in new.inputs}
    for each in old.inputs:
        to = known.get(taken.get(each.name, ""))
        if to is None or to.type not in (each.type, "*"):
            found.append(f"input {each.name} ({each.type}) goes to no input of {new.class_type}")
        else:
            found += _narrowed(each, to)
    filled = {each["new_id"] for each in mapping}
    found += [
        f"input {each.name} of {new.class_type} gets nothing"
        for each in new.inputs
        if not each.optional and each.name not in filled
    ]
    moved = {each["old_idx"]: each["new_idx"] for each in rules["output_mapping"] or []}
    for index, each in enumerate(old.outputs):
        place = moved.get(index, len(new.outputs))
        if place >= len(new.outputs) or new.outputs[place].type != each.type:
            found.append(f"output {index} ({each.type}) comes from no output of {new.class_type}")
    return found


def _older_names(node: Definition) -> dict[str, str]:
    older = {known.options.get("older_name"): known.name for known in node.inputs}
    return {name: today for name, today in older.items() if name}
