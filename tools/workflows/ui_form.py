"""The form of a workflow that ComfyUI's page opens and saves (graph version 0.4), laid out.

As the frontend 1.49.6 saves it: inputs are the sockets only, unless a wire comes into a widget;
`widgets_values` are in the order of the widgets, with one that no input stands for behind each seed
and each upload, and `widgets_values_named` says the same by name. Nodes stand in frames, frames in
columns.
"""

from __future__ import annotations

import math
import re
import uuid
from typing import Any, NamedTuple

from ... import __version__
from .definitions import Input, companions
from .graph import Link, Node, Workflow

COMFYUI, FRONTEND = "0.33.0", "1.49.6"
PACK = "comfyui-qwen-image-l40s"
OPTIONAL_SLOT = 7  # the page's shape of a socket that may stay empty
# Of the page, in pixels: what is seen first, and what its bars cover at the left and at the top.
VIEW, COVERED = (1480, 860), (80, 120)
# Dark notes, as in ComfyUI's own templates: code is blue in them, and unreadable on the brown.
FRAME_COLOR, NOTE_COLOR, NOTE_BACKGROUND = "#3f789e", "#222", "#000"
TITLE = 30  # above a node's position, as the page draws it
SLOT, WIDGET = 20, 24
# "Nodes 2.0" draws widgets and the edge of a node larger, and below them a badge on nodes of a pack
# and a button for rare inputs, which it hides: measured.
NEW_EDGE, NEW_WIDGET, NEW_BADGE, NEW_BUTTON = 14, 28, 24, 28
MARGIN, FRAME_TITLE = 20, 44
BETWEEN_NODES, BETWEEN_FRAMES = 24, 30
NARROWEST = 320
# What a text of several lines needs to be read; the page gives it what is left of the node.
TEXT_HEIGHT, RARE_TEXT_HEIGHT = 120, 60
WIDE = 400  # with texts or names of files
# Of nodes that show a picture or a text: how high that is, of their width.
SHOWN = {"SaveImage": 0.85, "LoadImage": 0.55, "PreviewAny": 0.44, "QwenL40S_EstimateVRAM": 0.64}
BADGED = {"FluxKontextMultiReferenceLatentMethod"}  # of ComfyUI's own: with the word BETA
# Of a note in "Nodes 2.0", which draws it taller: the width of a letter, the height of a line, what
# is between two paragraphs, and the rest. Measured, and a tenth more for other fonts.
NOTE_LETTER, NOTE_LINE, NOTE_PARAGRAPH, NOTE_EDGE = 6.0, 14, 11, 56
UNSEEN = re.compile(r"\]\([^)]*\)|[\[*`]")  # of a note: addresses and marks


class Box(NamedTuple):
    """A rectangle of the page, in its units."""

    x: int
    y: int
    width: int
    height: int

    def overlaps(self, other: Box) -> bool:
        """Whether two boxes share area."""
        return (
            self.x < other.x + other.width
            and other.x < self.x + self.width
            and self.y < other.y + other.height
            and other.y < self.y + self.height
        )

    def with_title(self) -> Box:
        """The node of this box as it is drawn."""
        return Box(self.x, self.y - TITLE, self.width, self.height + TITLE)


class PageLayout(NamedTuple):
    """Boxes by node id and by frame; `note` is the note's."""

    nodes: dict[str, Box]
    frames: dict[str, Box]
    note: Box


def lay_out(workflow: Workflow) -> PageLayout:
    """Columns from left to right; the note is above one of them."""
    nodes: dict[str, Box] = {}
    frames: dict[str, Box] = {}
    left = 0
    for index, column in enumerate(workflow.columns):
        members = [node for node in workflow.nodes.values() if node.group in column]
        width = max(size(node)[0] for node in members)
        top = -TITLE
        if index == workflow.note_above:
            note_width = width + 2 * MARGIN
            note = Box(left, 0, note_width, _note_height(workflow.note, note_width))
            top = note.height + BETWEEN_FRAMES
        for group in column:
            framed = [node for node in members if node.group == group]
            if not framed:
                continue
            at = top + FRAME_TITLE + TITLE
            for node in framed:
                nodes[node.id] = Box(left + MARGIN, at, width, size(node)[1])
                at += size(node)[1] + BETWEEN_NODES + TITLE
            height = at - BETWEEN_NODES - TITLE + MARGIN - top
            frames[group] = Box(left, top, width + 2 * MARGIN, height)
            top += height + BETWEEN_FRAMES
        left += width + 2 * MARGIN + BETWEEN_FRAMES
    return PageLayout(nodes, frames, note)


def size(node: Node) -> tuple[int, int]:
    """Width and height that the page needs for a node, and for what it shows, drawn either way."""
    definition = node.definition
    widgets = [known for known in definition.inputs if known.widget]
    texts = [known for known in widgets if known.options.get("multiline")]
    names_files = any(known.type == "COMBO" and known.choices is None for known in widgets)
    is_wide = texts or names_files or definition.class_type in SHOWN
    width = node.width or (WIDE if is_wide else NARROWEST)

    sockets = sum(not known.widget for known in definition.inputs)
    slots = max(sockets, len(definition.outputs)) * SLOT
    old = slots + 6 + (8 if widgets else 0)
    new = slots + NEW_EDGE
    if definition.is_ours or definition.class_type in BADGED:
        new += NEW_BADGE
    if any(known.options.get("advanced") for known in widgets):
        new += NEW_BUTTON
    for known in widgets:
        rare = known.options.get("advanced")
        if known in texts:
            tall = RARE_TEXT_HEIGHT if rare else TEXT_HEIGHT
            old, new = old + tall, new + (0 if rare else tall)
        else:
            old += WIDGET * (1 + len(companions(known)))
            new += 0 if rare else NEW_WIDGET
    shown = node.shown or round(width * SHOWN.get(definition.class_type, 0))
    return width, max(old, new) + shown


def _note_height(text: str, width: int) -> int:
    # A file and its folder are one paragraph.
    seen = UNSEEN.sub("", text).replace("\n  in ", " in ")
    paragraphs = [line for line in seen.splitlines() if line]
    lines = sum(math.ceil(len(line) * NOTE_LETTER / width) for line in paragraphs)
    return NOTE_EDGE + NOTE_LINE * lines + NOTE_PARAGRAPH * len(paragraphs)


def ui_form(workflow: Workflow) -> dict[str, Any]:
    """The whole file."""
    layout = lay_out(workflow)
    number = {name: index for index, name in enumerate(workflow.nodes, start=2)}
    links = [
        [index, number[origin.node], origin.index, number[node.id], _slot(node, name), kind]
        for index, (origin, node, name) in enumerate(workflow.links(), start=1)
        for kind in [_given(workflow, origin)]
    ]
    order = {name: index for index, name in enumerate(_execution_order(workflow), start=1)}
    nodes = [_note(workflow, layout.note)]
    nodes += [
        _node(node, number[node.id], layout.nodes[node.id], order[node.id], links)
        for node in workflow.nodes.values()
    ]
    return {
        # Of the name, so that writing the file again changes nothing.
        "id": str(uuid.uuid5(uuid.NAMESPACE_URL, f"{PACK}/{workflow.name}")),
        "revision": 0,
        "last_node_id": len(nodes),
        "last_link_id": len(links),
        "nodes": nodes,
        "links": links,
        "groups": [
            {
                "id": index,
                "title": title,
                "bounding": list(box),
                "color": FRAME_COLOR,
                "flags": {},
            }
            for index, (title, box) in enumerate(layout.frames.items(), start=1)
        ],
        "config": {},
        "extra": {"ds": _view(layout), "frontendVersion": FRONTEND},
        "version": 0.4,
    }


def widget_values(node: Node) -> dict[str, Any]:
    """Values by widget, in the page's order; those that no input stands for as well."""
    values: dict[str, Any] = {}
    for known in node.definition.inputs:
        if known.widget and known.name in node.inputs:
            value = node.inputs[known.name]
            values[known.name] = known.options.get("default") if isinstance(value, Link) else value
            values |= companions(known)
    return values


def _execution_order(workflow: Workflow) -> list[str]:
    """Nodes as the page orders them: those that wait for none, then what becomes free of each."""
    waits = {
        name: [value.node for value in node.inputs.values() if isinstance(value, Link)]
        for name, node in workflow.nodes.items()
    }
    ready = [name for name, origins in waits.items() if not origins]
    for done in ready:  # grows while it is read
        for link, node, _ in sorted(workflow.links(), key=lambda wire: wire[0].index):
            if link.node == done:
                waits[node.id].remove(done)
                if not waits[node.id]:
                    ready.append(node.id)
    return ready


def _slots(node: Node) -> list[Input]:
    """The inputs that a saved file lists: sockets, then widgets with a wire."""
    known = node.definition.inputs
    wired = [each for each in known if each.widget and isinstance(node.inputs.get(each.name), Link)]
    return [each for each in known if not each.widget] + wired


def _slot(node: Node, name: str) -> int:
    return [each.name for each in _slots(node)].index(name)


def _given(workflow: Workflow, origin: Link) -> str:
    return workflow.nodes[origin.node].definition.outputs[origin.index].type


def _node(node: Node, number: int, box: Box, order: int, links: list[list[Any]]) -> dict[str, Any]:
    definition = node.definition
    into = {link[4]: link[0] for link in links if link[3] == number}
    out: dict[int, list[int]] = {}
    for link in links:
        if link[1] == number:
            out.setdefault(link[2], []).append(link[0])
    written: dict[str, Any] = {
        "id": number,
        "type": definition.class_type,
        "pos": [box.x, box.y],
        "size": [box.width, box.height],
        "flags": {},
        "order": order,
        "mode": 0,
        "inputs": [_input(each, into.get(slot)) for slot, each in enumerate(_slots(node))],
        "outputs": [
            {"name": each.name, "type": each.type, "links": out.get(slot)}
            for slot, each in enumerate(definition.outputs)
        ],
        "title": node.title,
        "properties": _properties(node),
    }
    values = widget_values(node)
    if values:
        written["widgets_values"] = list(values.values())
        written["widgets_values_named"] = values
    return written


def _input(known: Input, link: int | None) -> dict[str, Any]:
    entry: dict[str, Any] = {"name": known.name}
    if known.optional:
        entry["shape"] = OPTIONAL_SLOT
    entry["type"] = known.type
    if known.widget:
        entry["widget"] = {"name": known.name}
    entry["link"] = link
    return entry


def _properties(node: Node) -> dict[str, Any]:
    ours = node.definition.is_ours
    properties: dict[str, Any] = {
        "cnr_id": PACK if ours else "comfy-core",
        "ver": __version__ if ours else COMFYUI,
        "Node name for S&R": node.definition.class_type,
    }
    if node.models:
        properties["models"] = [model.link() for model in node.models]
    return properties


def _note(workflow: Workflow, box: Box) -> dict[str, Any]:
    return {
        "id": 1,
        "type": "MarkdownNote",
        "pos": [box.x, box.y],
        "size": [box.width, box.height],
        "flags": {},
        "order": 0,
        "mode": 0,
        "inputs": [],
        "outputs": [],
        "title": "Read me",
        "properties": {},
        "widgets_values": [workflow.note],
        "widgets_values_named": {"text": workflow.note},
        "color": NOTE_COLOR,
        "bgcolor": NOTE_BACKGROUND,
    }


def _view(layout: PageLayout) -> dict[str, Any]:
    """All of the graph in the first view."""
    boxes = [layout.note.with_title(), *layout.frames.values()]
    left, top = min(box.x for box in boxes), min(box.y for box in boxes)
    width = max(box.x + box.width for box in boxes) - left
    height = max(box.y + box.height for box in boxes) - top
    scale = round(min(1.0, VIEW[0] / width, VIEW[1] / height), 2)
    offset = [round(COVERED[0] / scale) - left, round(COVERED[1] / scale) - top]
    return {"scale": scale, "offset": offset}
