"""Checks, before anything is queued, what a server would not say of a graph, or not so well.

What POST /prompt refuses with the input's name is left to it: missing inputs, numbers out of their
bounds, values of a list, links of the wrong type.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ...errors import SettingError
from .inputs import NodeInput, listed, nearest, node_inputs, shortened
from .workflow import Graph, called, input_called, is_link, meta, source

OURS = "QwenL40S_"
PACK = "Qwen-Image L40S"


class Checker:
    """Checks graphs for one server, or for all that give the same object_info.

    What inputs a class has is worked out once for thousands of jobs.
    """

    def __init__(self, object_info: Mapping[str, Any]) -> None:
        self._info = object_info
        self._known: dict[str, dict[str, NodeInput] | None] = {}

    def check(self, graph: Graph) -> None:
        """Finds what the server lacks or ignores: nodes, files, ends of links, inputs of ours.

        As the server does, it looks at the nodes that lead to an output, and at the class of every
        one. The values in nodes of other packs are left to the server: they may have rules of their
        own, which object_info does not show.

        Raises:
            SettingError: something is wrong; one sentence for each problem, on lines of their own.
        """
        problems = [
            self._missing(graph, node)
            for node in graph
            if graph[node]["class_type"] not in self._info
        ]
        outputs = [
            node
            for node, described in graph.items()
            if self._info.get(described["class_type"], {}).get("output_node")
        ]
        for node, known in self._needed(graph, outputs):
            problems += self._problems(graph, node, known)
        if problems:
            raise SettingError("\n".join(problems))

    def _inputs(self, node: Mapping[str, Any]) -> dict[str, NodeInput] | None:
        kind = node["class_type"]
        if kind in self._known:
            return self._known[kind]
        found = node_inputs(self._info, node)
        if not found or not any(spec.opens for spec in found.values()):
            self._known[kind] = found
        return found

    def _missing(self, graph: Graph, node: str) -> str:
        who = called(graph, node)
        if not graph[node]["class_type"].startswith(OURS):
            return (
                f"{who} is missing on the server: install the pack that has it, or update ComfyUI "
                "there."
            )
        if any(name.startswith(OURS) for name in self._info):
            return f"{who} is missing on the server: {_update(graph[node])}."
        return f"{who} needs {PACK}, which the server lacks: install it there."

    def _needed(
        self, graph: Graph, outputs: Iterable[str]
    ) -> list[tuple[str, dict[str, NodeInput]]]:
        """The nodes that lead to an output, with their inputs, in the file's order."""
        found = {}
        waiting = list(outputs)
        while waiting:
            node = waiting.pop()
            if node in found:
                continue
            found[node] = known = self._inputs(graph[node]) or {}
            for name, value in graph[node]["inputs"].items():
                feeder = source(graph, value)
                if feeder is not None and name in known:
                    waiting.append(feeder)
        return [
            (node, found[node])
            for node in graph
            if node in found and graph[node]["class_type"] in self._info
        ]

    def _problems(self, graph: Graph, node: str, known: Mapping[str, NodeInput]) -> Iterator[str]:
        described = graph[node]
        ours = described["class_type"].startswith(OURS)
        module = str(self._info[described["class_type"]].get("python_module"))
        judged = ours or not module.startswith("custom_nodes.")
        for name, value in described["inputs"].items():
            if name not in known:
                if ours:
                    yield (
                        f"{called(graph, node)} has an input {name!r} that the server does not "
                        f"know: {_update(described)}."
                    )
            elif is_link(value):
                if source(graph, value) is None:
                    yield (
                        f"{name!r} of {called(graph, node)} is wired to a node that is not there "
                        f"({value}): wire it again."
                    )
            elif judged and (problem := _value_problem(graph, node, name, value, known[name])):
                yield problem


def _update(node: Mapping[str, Any]) -> str:
    version = meta(node).get("version")
    made = f" (the workflow was made with {version})" if version else ""
    return f"update {PACK} there{made}"


def _value_problem(graph: Graph, node: str, name: str, value: Any, spec: NodeInput) -> str | None:
    if spec.kind == "FLOAT" and _is_nan(value):  # which passes the server's bounds
        return f"{name!r} of {called(graph, node)} is nan and must be a number."
    if spec.kind == "COMBO" and spec.closed and not _takes(spec, value):
        return _not_listed(graph, node, name, value, spec)
    return None


def _is_nan(value: Any) -> bool:
    try:
        return math.isnan(float(value))
    except (TypeError, ValueError, OverflowError):
        return False


def _takes(spec: NodeInput, value: Any) -> bool:
    if isinstance(value, dict) and "__value__" in value:
        value = value["__value__"]
    several = value if spec.rules.get("multiselect") and isinstance(value, list) else [value]
    return all(each in spec.choices for each in several)


def _not_listed(graph: Graph, node: str, name: str, value: Any, spec: NodeInput) -> str | None:
    """Where to get a file that is not listed; other values the server names itself."""
    where = input_called(graph, node, name)
    for choice in map(str, spec.choices):
        if _file_name(choice) == _file_name(str(value)):
            return (
                f"{where} is {value!r}, which the server has as {choice!r}: add --set "
                f'"{where}={choice}".'
            )
    models = meta(graph[node]).get("models")
    for model in models if isinstance(models, list) else ():
        if isinstance(model, dict) and value == model.get("name"):
            return (
                f"{where} is {value!r}, which the server does not have: download it from "
                f"{model.get('url')} to models/{model.get('directory')} there."
            )
    if not spec.choices:
        return (
            f"{where} is {shortened(str(value))}, but the server has no file for it: put one there."
        )
    if not spec.opens:
        return None
    # Which the server finds only when the node runs, as inputs that are missing.
    names = nearest(str(value), map(str, spec.choices))
    return f"{where} is {shortened(str(value))} and must be one of {listed(names)}."


def _file_name(choice: str) -> str:
    return re.split(r"[/\\]", choice)[-1]
