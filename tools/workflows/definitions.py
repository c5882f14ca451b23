"""Reads what nodes take and give from GET /object_info of a ComfyUI.

A part of that answer lies in `definitions.json`, so that workflows are checked without a ComfyUI:

    curl -s http://127.0.0.1:8188/object_info > object_info.json
    python -m qwen_l40s.tools.workflows --definitions object_info.json

It is that of a ComfyUI with Qwen-Image-2.1, 0.37 or newer. A further node of ComfyUI's is added
there first, as `"Name": {}`.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

FILE = Path(__file__).with_name("definitions.json")
OURS = "QwenL40S_"
# A choice that brings widgets of its own; what those are is not kept, since no workflow sets them.
DYNAMIC_COMBO = "COMFY_DYNAMICCOMBO_V3"
# Sockets that the page adds as wires come; kept are those that workflows use, and one more.
AUTOGROW, GROWN = "COMFY_AUTOGROW_V3", 3
WIDGET_TYPES = {"INT", "FLOAT", "STRING", "BOOLEAN", "COMBO", DYNAMIC_COMBO}
# What of an input's options changes which values and wires fit. Tooltips may change at any time.
KEPT_OPTIONS = ("min", "max", "control_after_generate", "image_upload", "older_name", "older")
# Choices that differ from machine to machine: files, and cards of the user's own list.
OF_THE_MACHINE = {"model", "text_encoder", "vae", "lora", "control_net_name", "image", "card"}
# The page changes a seed after a run, so that the first run generates the image of the file's seed,
# and the next run another image. With "fixed" a second press of Run would do nothing: ComfyUI runs
# no node whose inputs did not change.
AFTER_A_RUN = "randomize"


class Input(NamedTuple):
    name: str
    type: str
    widget: bool  # whether it has one in the page; other inputs are sockets
    optional: bool  # whether a graph may leave it out
    options: Mapping[str, Any]  # what else the node says of it, of `KEPT_OPTIONS`
    choices: Sequence[str] | None = None  # None where they differ from machine to machine


class Output(NamedTuple):
    name: str
    type: str


class Definition(NamedTuple):
    """Describes a node: inputs and outputs in their order, which saved files depend on."""

    class_type: str
    title: str  # of the page's search and its library
    inputs: Sequence[Input]
    outputs: Sequence[Output]

    @property
    def is_ours(self) -> bool:
        return self.class_type.startswith(OURS)


def companions(known: Input) -> dict[str, str]:
    """Returns the widget that the page adds behind an input's: {name: value}."""
    if known.options.get("control_after_generate"):
        return {"control_after_generate": AFTER_A_RUN}
    if known.options.get("image_upload"):
        return {"upload": "image"}
    return {}


def widgets(node: Definition) -> dict[str, str]:
    """Lists {name: type of its input} in the page's order; "" where no input stands for it."""
    found: dict[str, str] = {}
    for known in node.inputs:
        if known.widget:
            found |= {known.name: known.type, **dict.fromkeys(companions(known), "")}
    return found


def subset(object_info: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Keeps of GET /object_info, for `names`, inputs and outputs in their order."""
    return {name: _node(object_info[name]) for name in sorted(names)}


@functools.cache
def definitions() -> dict[str, Definition]:
    return {
        name: Definition(
            name,
            node.get("display_name") or name,
            [Input(**entry) for entry in node["inputs"]],
            [Output(**entry) for entry in node["outputs"]],
        )
        for name, node in json.loads(FILE.read_text(encoding="utf-8")).items()
    }


def _node(info: Mapping[str, Any]) -> dict[str, Any]:
    inputs = [
        entry
        for section in ("required", "optional")
        for input_name in info["input_order"].get(section, [])
        for entry in _inputs(input_name, info["input"][section][input_name], section)
    ]
    named = zip(info["output_name"], info["output"], strict=True)
    outputs = [{"name": name, "type": kind} for name, kind in named]
    return {"display_name": info.get("display_name"), "inputs": inputs, "outputs": outputs}


def _inputs(name: str, entry: list[Any], section: str) -> list[dict[str, Any]]:
    if entry[0] != AUTOGROW:
        return [_input(name, entry, section == "optional")]
    template = entry[1]["template"]
    (grown,) = template["input"]["required"].values()
    return [_input(f"{name}.{each}", grown, True) for each in template["names"][:GROWN]]


def _input(name: str, entry: list[Any], optional: bool) -> dict[str, Any]:
    kind, options = entry[0], entry[1] if len(entry) > 1 else {}
    choices = options.get("options")
    if isinstance(kind, list):  # ComfyUI's older way to say COMBO
        kind, choices = "COMBO", kind
    found: dict[str, Any] = {
        "name": name,
        "type": kind,
        "widget": kind in WIDGET_TYPES and not options.get("forceInput", False),
        "optional": optional,
    }
    if kind == "COMBO" and name not in OF_THE_MACHINE:
        found["choices"] = choices
    if kind == DYNAMIC_COMBO:
        found["choices"] = [option["key"] for option in choices or ()]
    found["options"] = {key: options[key] for key in KEPT_OPTIONS if key in options}
    return found
