"""Checks, before anything is queued, whether a server can run a graph."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from ...errors import SettingError
from .inputs import NodeInput, check_bounds, is_link, listed, nearest, node_inputs, shortened
from .workflow import Graph, called, input_called

OURS = "QwenL40S_"
PACK = "Qwen-Image L40S"


def check_graph(graph: Graph, object_info: Mapping[str, Any]) -> None:
    """Finds what the server would refuse, and what it would silently ignore of our own nodes.

    As the server does, it looks at the nodes that lead to an output, and at the class of every one.
    What values the nodes of other packs take is left to the server: they may have rules of their
    own, which object_info does not show.

    Raises:
        SettingError: something is wrong; one sentence for each problem, on lines of their own.
    """
    problems = list(_missing_classes(graph, object_info))
    outputs = [
        node
        for node, described in graph.items()
        if object_info.get(described["class_type"], {}).get("output_node")
    ]
    if not outputs and not problems:
        problems.append("the workflow saves and shows nothing: add a node such as Save Image.")
    for node in _needed(graph, object_info, outputs):
        problems += _node_problems(graph, node, object_info)
    if problems:
        raise SettingError("\n".join(problems))


def _missing_classes(graph: Graph, object_info: Mapping[str, Any]) -> Iterator[str]:
    for node, described in graph.items():
        kind = described["class_type"]
        if kind in object_info:
            continue
        if not kind.startswith(OURS):
            yield (
                f"{called(graph, node)} is missing on the server: install the pack that has it, or "
                "update ComfyUI there."
            )
        elif any(name.startswith(OURS) for name in object_info):
            yield f"{called(graph, node)} is missing on the server: {_update(described)}."
        else:
            yield f"{called(graph, node)} needs {PACK}, which the server lacks: install it there."


def _update(described: Mapping[str, Any]) -> str:
    meta = described.get("_meta")
    version = meta.get("version") if isinstance(meta, dict) else None
    made = f" (the workflow was made with {version})" if version else ""
    return f"update {PACK} there{made}"


def _needed(graph: Graph, object_info: Mapping[str, Any], outputs: list[str]) -> list[str]:
    """The nodes that lead to an output, in the file's order."""
    found = set()
    waiting = list(outputs)
    while waiting:
        node = waiting.pop()
        if node in found:
            continue
        found.add(node)
        known = node_inputs(object_info, graph[node]) or {}
        for name, value in graph[node]["inputs"].items():
            if name in known and _source(graph, value) is not None:
                waiting.append(value[0])
    return [node for node in graph if node in found]


def _source(graph: Graph, value: Any) -> str | None:
    """The node that a link comes from; None for a value, and for a link to nowhere."""
    if is_link(value) and len(value) == 2 and isinstance(value[0], str) and value[0] in graph:
        return value[0]
    return None


def _node_problems(graph: Graph, node: str, object_info: Mapping[str, Any]) -> Iterator[str]:
    described = graph[node]
    known = node_inputs(object_info, described)
    if known is None:
        return
    inputs = described["inputs"]
    kind = described["class_type"]
    for name, value in inputs.items():
        if name not in known:
            if kind.startswith(OURS):
                yield (
                    f"{called(graph, node)} has an input {name!r} that the server does not know: "
                    f"{_update(described)}."
                )
        elif is_link(value):
            if _source(graph, value) is None:
                yield (
                    f"{name!r} of {called(graph, node)} is wired to a node that is not there "
                    f"({value}): wire it again."
                )
        elif kind.startswith(OURS) or not _of_a_pack(object_info[kind]):
            yield from _value_problems(graph, node, name, value, known[name])
    for name, spec in known.items():
        if spec.required and name not in inputs:
            yield f"{called(graph, node)} lacks its input {name!r}: wire it or give it a value."


def _of_a_pack(described: Mapping[str, Any]) -> bool:
    return str(described.get("python_module")).startswith("custom_nodes.")


def _value_problems(
    graph: Graph, node: str, name: str, value: Any, spec: NodeInput
) -> Iterator[str]:
    where = f"{name!r} of {called(graph, node)}"
    if spec.kind in ("INT", "FLOAT"):
        try:
            number = (int if spec.kind == "INT" else float)(value)
            check_bounds(number, spec, where)
        except SettingError as error:
            yield str(error)
        except (TypeError, ValueError, OverflowError):
            yield f"{where} is {shortened(str(value))} and must be a number."
    elif spec.kind == "COMBO" and spec.closed and not _takes(spec, value):
        yield _not_listed(graph, node, name, value, spec)


def _takes(spec: NodeInput, value: Any) -> bool:
    if isinstance(value, dict) and "__value__" in value:
        value = value["__value__"]
    several = value if spec.rules.get("multiselect") and isinstance(value, list) else [value]
    return all(each in spec.choices for each in several)


def _not_listed(graph: Graph, node: str, name: str, value: Any, spec: NodeInput) -> str:
    where = input_called(graph, node, name)
    for choice in map(str, spec.choices):
        if _file_name(choice) == _file_name(str(value)):
            return (
                f"{where} is {value!r}, which the server has as {choice!r}: add --set "
                f'"{where}={choice}".'
            )
    for model in _models(graph[node]):
        if value == model.get("name"):
            return (
                f"{where} is {value!r}, which the server does not have: download it from "
                f"{model.get('url')} to models/{model.get('directory')} there."
            )
    if not spec.choices:
        return (
            f"{where} is {shortened(str(value))}, but the server has no file for it: put one there."
        )
    names = nearest(str(value), map(str, spec.choices))
    return f"{where} is {shortened(str(value))} and must be one of {listed(names)}."


def _file_name(choice: str) -> str:
    return re.split(r"[/\\]", choice)[-1]


def _models(described: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    meta = described.get("_meta")
    models = meta.get("models") if isinstance(meta, dict) else None
    return [model for model in models or () if isinstance(model, dict)]
