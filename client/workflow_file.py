"""Workflow files in ComfyUI's API form, as POST /prompt takes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..errors import SettingError
from .graph import Graph
from .image_files import png_text

PNG_START = b"\x89PNG\r\n\x1a\n"
EXPORT = "export it on ComfyUI's page with File > Export (API)"


def read_workflow(path: Path) -> Graph:
    """The graph of a workflow file.

    Args:
        path: a .json in API form, the body of a POST /prompt, or a PNG that ComfyUI saved.

    Returns:
        {node id: {class_type, inputs, _meta?}}; whatever else the file says of a node is left out.

    Raises:
        SettingError: the file is missing, or holds no workflow in API form.
    """
    try:
        data = path.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        reason = getattr(error, "strerror", None) or error
        raise SettingError(
            f"cannot read the workflow {path} ({reason}): give a workflow file in API form."
        ) from error
    if data.startswith(PNG_START):
        return _graph(path, _parsed(path, _prompt_chunk(path)))
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise SettingError(
            f"{path} is neither UTF-8 text nor a PNG: give a workflow in API form, or {EXPORT}."
        ) from error
    return _graph(path, _parsed(path, text))


def _prompt_chunk(path: Path) -> str:
    text = png_text(path, "prompt")
    if text is None:
        only = "only the form that the page opens" if png_text(path, "workflow") else "no workflow"
        raise SettingError(
            f"{path} holds {only}: give an image that ComfyUI saved with its metadata, or open the "
            f"workflow and {EXPORT}."
        )
    return text


def _parsed(path: Path, text: str) -> Any:
    if not text.strip():
        raise SettingError(f"{path} is empty: {EXPORT}.")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SettingError(f"{path} is not JSON ({error}): {EXPORT} again.") from error


def _graph(path: Path, data: Any) -> Graph:
    if isinstance(data, dict):
        body = data.get("prompt")
        if isinstance(body, dict) and "class_type" not in body:  # else a node of that id
            data = body
    if isinstance(data, dict) and isinstance(data.get("nodes"), list):
        raise SettingError(_page_form(path))
    if not isinstance(data, dict) or not data:
        raise SettingError(f"{path} holds no nodes and must hold a workflow in API form: {EXPORT}.")
    return {node: _node(path, node, described) for node, described in data.items()}


def _page_form(path: Path) -> str:
    sibling = path.parent / "api" / path.name
    other = f", or give {sibling}, which is there" if sibling.is_file() else ""
    return (
        f"{path} is in the form that ComfyUI's page opens, and a server takes the API form: "
        f"{EXPORT}{other}."
    )


def _node(path: Path, node: str, described: Any) -> dict[str, Any]:
    kind = described.get("class_type") if isinstance(described, dict) else None
    if not isinstance(kind, str) or not kind:
        raise SettingError(
            f"{path} gives no class_type for its node {node!r}, so it is damaged or was exported "
            f"where a node pack was missing: install the pack, open the workflow and {EXPORT}."
        )
    if not isinstance(described.get("inputs"), dict):
        raise SettingError(
            f"{path} gives no inputs for its node {node!r} ({kind}), so it is damaged: {EXPORT} "
            "again."
        )
    # Images of older servers say `is_changed` too, which would make equal graphs differ.
    return {key: described[key] for key in ("class_type", "inputs", "_meta") if key in described}
