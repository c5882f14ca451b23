"""The form of a workflow that ComfyUI's page opens and saves (graph version 0.4), laid out.

As the frontend 1.49.6 saves it: inputs are the sockets only, unless a wire comes into a widget;
`widgets_values` are in the order of the widgets, with one that no input stands for behind each seed
and each upload, and `widgets_values_named` says the same by name. Nodes stand in frames, frames in
columns.
"""

from __future__ import annotations

import math
import re
import textwrap
import uuid
from collections.abc import Sequence
from typing import Any, NamedTuple

from ... import __version__
from .definitions import Input, companions
from .graph import Link, Node, Workflow

COMFYUI, FRONTEND = "0.33.0", "1.49.6"
PACK = "comfyui-qwen-image-l40s"
OPTIONAL_SLOT = 7  # the page's shape of a socket that may stay empty
# All of a graph is in the first view, which web/templates.js takes; the bars of the page cover the
# rest of its window. In a window of 1600x1000 no letter may have less than 9 pixels: the smallest
# are those of notes and prompts, 10 units. In one of 1024x700 the page without Nodes 2.0 draws text
# of 14 units where it has 8 pixels, else none.
LEFT, TOP, RIGHT, BOTTOM = 66, 92, 8, 8
SMALLEST_LETTER, FEWEST_PIXELS = 10, 9
NODE_LETTER, FEWEST_DRAWN = 14, 8
MOST_WIDTH = math.floor(
    min(
        (1600 - LEFT - RIGHT) * SMALLEST_LETTER / FEWEST_PIXELS,
        (1024 - LEFT - RIGHT) * NODE_LETTER / FEWEST_DRAWN,
    )
)
MOST_HEIGHT = math.floor(
    min(
        (1000 - TOP - BOTTOM) * SMALLEST_LETTER / FEWEST_PIXELS,
        (700 - TOP - BOTTOM) * NODE_LETTER / FEWEST_DRAWN,
    )
)
# Dark notes, as in ComfyUI's own templates: code is blue in them, and unreadable on the brown.
FRAME_COLOR, NOTE_COLOR, NOTE_BACKGROUND = "#3f789e", "#222", "#000"
TITLE = 30  # above a node's position, as the page draws it
SLOT, WIDGET = 20, 24
# "Nodes 2.0" draws widgets and the edge of a node larger, and below them a badge on nodes of a pack
# and a button for rare inputs, which it hides: measured.
NEW_EDGE, NEW_WIDGET, NEW_BADGE, NEW_BUTTON = 14, 28, 24, 28
MARGIN, FRAME_TITLE = 12, 36
BETWEEN_NODES, BETWEEN_FRAMES = 18, 20
NARROWEST = 320
# What a text of several lines needs to be read; the page gives it what is left of the node.
TEXT_HEIGHT, RARE_TEXT_HEIGHT = 120, 60
WIDE = 380  # with texts, or the note alone
WIDER_NOTE = 140
# Of a widget that is no text of several lines: arrows and margins, and a letter.
WIDGET_EDGE, WIDGET_LETTER = 90, 6.4
# Of nodes that show a picture: how high that is at least.
PICTURE = 220
SHOWN = {"QwenL40S_SaveImage": PICTURE, "LoadImage": PICTURE, "QwenL40S_EstimateVRAM": PICTURE}
SHOWN |= {"PreviewImage": PICTURE, "QwenL40S_AdviseGPU": PICTURE, "QwenL40S_Report": PICTURE}
BADGED = {"FluxKontextMultiReferenceLatentMethod"}  # of ComfyUI's own: with the word BETA
# How much a node grows when it says what it did, or below it what is wrong with it.
SAYS, ISSUES = 148, 28
SAYS_NOTHING = {"QwenL40S_SaveImage"}  # unless it fails
READS_FILE = {"LoadImage", "ControlNetLoader"}  # of ComfyUI's own: a file may be missing
# The page says in the upper right corner, over the last column, that files are missing.
CORNER = 105
FOLDED_EDGE, FOLDED_LETTER, FOLDED = 60, 7.5, 225
# Of a note in "Nodes 2.0", which draws it taller: the width of a letter, the height of a line, what
# is between two paragraphs, and the rest. Measured, and a tenth more for other fonts.
NOTE_LETTER, NOTE_LINE, NOTE_PARAGRAPH, NOTE_EDGE = 6.1, 14, 11, 56
UNSEEN = re.compile(r"\]\([^)]*\)|[\[*`]")  # of a note: addresses and marks


class Box(NamedTuple):
    """A rectangle of the page, in its units."""

    x: int
    y: int
    width: int
    height: int

    def lower(self, by: int) -> Box:
        """The same box further down."""
        return self._replace(y=self.y + by)

    def with_title(self) -> Box:
        """The node of this box as it is drawn."""
        return Box(self.x, self.y - TITLE, self.width, self.height + TITLE)


class PageLayout(NamedTuple):
    """Boxes by node id and by frame; `note` is the note's."""

    nodes: dict[str, Box]
    frames: dict[str, Box]
    note: Box


def lay_out(workflow: Workflow) -> PageLayout:
    """Columns from left to right; the note, which is read first, gets the width that is left."""
    widths = [_column_width(workflow, column) for column in workflow.columns]
    spare = MOST_WIDTH - sum(widths) - BETWEEN_FRAMES * (len(widths) - 1)
    widths[0] += max(0, min(spare, WIDER_NOTE))
    note = Box(0, 0, widths[0], _note_height(workflow.note, widths[0]))
    nodes: dict[str, Box] = {}
    frames: dict[str, Box] = {}
    left = 0
    for column, width in zip(workflow.columns, widths, strict=True):
        top = -TITLE if left else note.height + BETWEEN_FRAMES
        for group in column:
            members = _members(workflow, group)
            # A frame around one node would say its title twice.
            framed = len(members) > 1
            margin, at = (MARGIN, top + FRAME_TITLE) if framed else (0, top)
            for node in members:
                y = at + TITLE
                node_width, height = size(node)
                if not node.folded:
                    node_width = width - 2 * margin
                nodes[node.id] = Box(left + margin, y, node_width, height)
                at = y + height + room_below(node) + BETWEEN_NODES
            if not members:
                continue
            bottom = at - BETWEEN_NODES + margin
            if framed:
                frames[group] = Box(left, top, width, bottom - top)
            top = bottom + BETWEEN_FRAMES
        left += width + BETWEEN_FRAMES
    return _lowered(PageLayout(nodes, frames, note), workflow.columns[-1], workflow)


def _lowered(layout: PageLayout, column: Sequence[str], workflow: Workflow) -> PageLayout:
    """With the last column below the page's corner, where there is room."""
    ids = [node.id for group in column for node in _members(workflow, group)]
    lowest = max(layout.nodes[id].y + layout.nodes[id].height for id in ids)
    if lowest + SAYS + TITLE + CORNER > MOST_HEIGHT:
        return layout
    nodes = {id: box.lower(CORNER if id in ids else 0) for id, box in layout.nodes.items()}
    frames = {
        name: box.lower(CORNER if name in column else 0) for name, box in layout.frames.items()
    }
    return PageLayout(nodes, frames, layout.note)


def _members(workflow: Workflow, group: str) -> list[Node]:
    return [node for node in workflow.nodes.values() if node.group == group]


def _column_width(workflow: Workflow, column: Sequence[str]) -> int:
    members = [node for group in column for node in _members(workflow, group)]
    return max([size(node)[0] + 2 * MARGIN for node in members], default=WIDE)


def room_below(node: Node) -> int:
    """What stays free below a node, into which it grows."""
    if node.folded:
        return 0
    if node.definition.is_ours and node.definition.class_type not in SAYS_NOTHING:
        return SAYS
    return ISSUES if node.definition.class_type in READS_FILE else 0


def size(node: Node) -> tuple[int, int]:
    """Width and height that the page needs for a node, and for what it shows, drawn either way."""
    if node.folded:
        return max(FOLDED, round(len(node.title) * FOLDED_LETTER) + FOLDED_EDGE), 0
    return _open_size(node)


def _open_size(node: Node) -> tuple[int, int]:
    definition = node.definition
    widgets = [known for known in definition.inputs if known.widget]
    texts = [known for known in widgets if known.options.get("multiline")]
    longest = max(
        (
            len(known.name) + len(str(node.inputs.get(known.name, "")))
            for known in widgets
            if known not in texts
        ),
        default=0,
    )
    least = WIDE if texts else NARROWEST
    width = node.width or max(least, math.ceil(longest * WIDGET_LETTER) + WIDGET_EDGE)

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
    shown = node.shown or SHOWN.get(definition.class_type, 0)
    return width, max(old, new) + shown


def _note_height(text: str, width: int) -> int:
    # A file and its folder are one paragraph.
    seen = UNSEEN.sub("", text).replace("\n  in ", " in ")
    paragraphs = [line for line in seen.splitlines() if line]
    letters = int(width / NOTE_LETTER)
    lines = sum(len(textwrap.wrap(line, letters)) for line in paragraphs)
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
        "extra": {"qwen_l40s": {"fit": True}, "ds": _view(layout), "frontendVersion": FRONTEND},
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
        "size": list(_open_size(node) if node.folded else box[2:]),
        "flags": {"collapsed": True} if node.folded else {},
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
    group, _, label = known.name.rpartition(".")
    if group:  # the page writes only the last part of an input that grows
        entry["label"] = label
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


def extent(layout: PageLayout) -> Box:
    """All that is drawn."""
    boxes = [layout.note, *layout.nodes.values()]
    boxes = [*(box.with_title() for box in boxes), *layout.frames.values()]
    left, top = min(box.x for box in boxes), min(box.y for box in boxes)
    width = max(box.x + box.width for box in boxes) - left
    height = max(box.y + box.height for box in boxes) - top
    return Box(left, top, width, height)


def _view(layout: PageLayout) -> dict[str, Any]:
    """All of the graph in the first view."""
    left, top, width, height = extent(layout)
    scale = round(min(1.0, (1600 - LEFT - RIGHT) / width, (1000 - TOP - BOTTOM) / height), 2)
    return {"scale": scale, "offset": [round(LEFT / scale) - left, round(TOP / scale) - top]}
