"""The form of a workflow that POST /prompt takes."""

from __future__ import annotations

from typing import Any

from ... import __version__
from .graph import Link, Node, Workflow


def api_form(workflow: Workflow) -> dict[str, Any]:
    """{node id: {class_type, inputs, _meta}}; ComfyUI itself reads nothing of `_meta`."""
    return {
        node.id: {
            "class_type": node.definition.class_type,
            "inputs": {
                name: [value.node, value.index] if isinstance(value, Link) else value
                for name, value in node.inputs.items()
            },
            "_meta": _meta(node),
        }
        for node in workflow.nodes.values()
    }


def _meta(node: Node) -> dict[str, Any]:
    meta: dict[str, Any] = {"title": node.title}
    if node.definition.is_ours:
        meta["version"] = __version__
    if node.models:
        meta["models"] = [model.link() for model in node.models]
    return meta
