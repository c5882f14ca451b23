"""A workflow in ComfyUI's API form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Graph = dict[str, dict[str, Any]]  # {node id: {class_type, inputs, _meta?}}


def with_inputs(graph: Graph, values: Mapping[tuple[str, str], Any]) -> Graph:
    """A copy in which some inputs hold other values, by (node id, input).

    It shares the nodes that do not change with the graph.
    """
    copy = dict(graph)
    for (node, name), value in values.items():
        copy[node] = {**copy[node], "inputs": {**copy[node]["inputs"], name: value}}
    return copy
