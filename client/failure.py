"""Why a job failed, from what the server says, in one shape.

{"type": ..., "message": one text for people,
 "nodes": [{"id", "title", "class_type", "message"}, ...]}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .titles import called, title


def failure(kind: str, message: str) -> dict[str, Any]:
    """One that no node caused."""
    return {"type": kind, "message": message, "nodes": []}


def of_validation(graph: Mapping[str, Any], body: Any) -> dict[str, Any]:
    """Of the answer to POST /prompt: a 400, or a 200 that leaves nodes out (server.py)."""
    if not isinstance(body, Mapping):
        return failure("refused", f"the server refuses the workflow: {body}")
    nodes = [
        _node(graph, node, " ".join(_sentence(error) for error in found.get("errors", ())))
        for node, found in (body.get("node_errors") or {}).items()
    ]
    error = body.get("error")
    if nodes:
        kind = error.get("type", "refused") if isinstance(error, Mapping) else "node_errors"
        return {"type": kind, "message": _lines(graph, nodes), "nodes": nodes}
    if isinstance(error, Mapping):
        return failure(error.get("type", "refused"), _sentence(error))
    return failure("refused", f"the server refuses the workflow: {error}")


def of_execution(graph: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, Any]:
    """Of the message execution_error (execution.py, handle_execution_error)."""
    message = str(data.get("exception_message", "")).strip() or "it gave no reason"
    node = _node(graph, str(data.get("node_id")), message)
    node["class_type"] = data.get("node_type", node["class_type"])
    kind = data.get("exception_type", "execution_error")
    return {"type": kind, "message": _lines(graph, [node]), "nodes": [node]}


def _node(graph: Mapping[str, Any], node: str, message: str) -> dict[str, Any]:
    return {
        "id": node,
        "title": title(graph, node),
        "class_type": graph[node]["class_type"] if node in graph else None,
        "message": message,
    }


def _lines(graph: Mapping[str, Any], nodes: list[dict[str, Any]]) -> str:
    return "\n".join(f"{called(graph, node['id'])}: {node['message']}" for node in nodes)


def _sentence(error: Mapping[str, Any]) -> str:
    """ComfyUI puts the rule in `message` and the input in `details`."""
    message, details = str(error.get("message", "")), str(error.get("details") or "")
    return f"{message}: {details}." if details else f"{message}."
