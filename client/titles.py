"""What people call a node: the title it has on the page."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from .graph import Graph


def title(graph: Mapping[str, Any], node: str) -> str:
    """The node's title on the page, such as `Prompt`; its class where the file names none, and its
    id where the graph has no such node, as a server may tell of one.
    """
    if node not in graph:
        return node
    meta = graph[node].get("_meta")
    text = meta.get("title") if isinstance(meta, dict) else None
    if isinstance(text, str) and text.strip():
        return text.strip()
    return graph[node]["class_type"]


def called(graph: Mapping[str, Any], node: str) -> str:
    """The node in a message: `'Prompt' (CLIPTextEncode, id positive)`."""
    if node not in graph:
        return node
    kind = graph[node]["class_type"]
    text = title(graph, node)
    return f"{kind} (id {node})" if text == kind else f"{text!r} ({kind}, id {node})"


def plain(name: str) -> str:
    """A name without what need not be typed right: case, spaces, dashes and underscores."""
    return re.sub(r"[\s_-]+", "", name).casefold()


def nodes_called(graph: Graph, name: str) -> list[str]:
    """The ids of the nodes that a person means by `name`.

    An id written exactly is that node alone. Else every node whose title or id is `name` but for
    case, spaces, dashes and underscores.
    """
    if name in graph:
        return [name]
    wanted = plain(name)
    if not wanted:
        return []
    return [node for node in graph if wanted in (plain(title(graph, node)), plain(node))]


def input_called(graph: Graph, node: str, name: str) -> str:
    """What to type for this node's input: `Prompt.text`, or `6.text` where the title is not the
    node's alone.
    """
    text = title(graph, node)
    return f"{text if nodes_called(graph, text) == [node] else node}.{name}"
