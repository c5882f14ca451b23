"""Where the page shows the nodes of a workflow: frames in columns, nodes below one another."""

from __future__ import annotations

import re
from typing import NamedTuple

from .definitions import OURS, companions
from .graph import Node, Workflow

TITLE = 30  # above a node's position, as the page draws it
SLOT, WIDGET = 20, 24
MARGIN, FRAME_TITLE = 20, 44
BETWEEN_NODES, BETWEEN_FRAMES = 30, 40
NARROWEST = 320
# "Nodes 2.0" draws a badge and a button for rare inputs on nodes of a pack: 36 px more, measured.
PACK_EXTRA = 44
# What a text of several lines needs to be read; the page gives it what is left of the node.
TEXT_HEIGHT, RARE_TEXT_HEIGHT = 160, 60
WIDE = 420  # with texts or names of files
# Width, and height below the widgets, of nodes that show a picture or a text.
SHOWN = {
    "SaveImage": (420, 420),
    "LoadImage": (320, 240),
    "PreviewAny": (420, 400),
    "QwenL40S_EstimateVRAM": (720, 360),
}
NOTE_WIDTH = 460
NOTE_LINE, NOTE_LETTERS = 17, 72  # height of a line, and what fits into one
LINK = re.compile(r"\]\([^)]*\)")  # of which a reader sees nothing


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


class Layout(NamedTuple):
    """Boxes by node id and by frame; `note` is the note's."""

    nodes: dict[str, Box]
    frames: dict[str, Box]
    note: Box


def lay_out(workflow: Workflow) -> Layout:
    """Columns from left to right; the note is above the first."""
    nodes: dict[str, Box] = {}
    frames: dict[str, Box] = {}
    note = Box(0, 0, NOTE_WIDTH, _note_height(workflow.note))
    left, top = MARGIN, note.height + BETWEEN_FRAMES
    for column in workflow.columns:
        members = [node for node in workflow.nodes.values() if node.group in column]
        width = max(size(node)[0] for node in members)
        for group in column:
            at = top + FRAME_TITLE + TITLE
            for node in members:
                if node.group == group:
                    nodes[node.id] = Box(left, at, width, size(node)[1])
                    at += size(node)[1] + _extra(node) + BETWEEN_NODES + TITLE
            height = at - BETWEEN_NODES - TITLE + MARGIN - top
            frames[group] = Box(left - MARGIN, top, width + 2 * MARGIN, height)
            top += height + BETWEEN_FRAMES
        left += width + 2 * MARGIN + BETWEEN_FRAMES
        top = -TITLE
    return Layout(nodes, frames, note)


def size(node: Node) -> tuple[int, int]:
    """Width and height that the page needs for a node, and for what it shows."""
    definition = node.definition
    sockets = sum(not known.widget for known in definition.inputs)
    widgets = [known for known in definition.inputs if known.widget]
    rows = sum(1 + len(companions(known)) for known in widgets)
    texts = [known for known in widgets if known.options.get("multiline")]
    height = max(sockets, len(definition.outputs)) * SLOT + 6
    if widgets:
        height += 8 + (rows - len(texts)) * WIDGET
    for text in texts:
        height += RARE_TEXT_HEIGHT if text.options.get("advanced") else TEXT_HEIGHT
    names_files = any(known.type == "COMBO" and known.choices is None for known in widgets)
    width, shown = SHOWN.get(definition.class_type, (NARROWEST, 0))
    return max(width, node.width, WIDE if texts or names_files else 0), height + shown


def _extra(node: Node) -> int:
    return PACK_EXTRA if node.definition.class_type.startswith(OURS) else 0


def _note_height(text: str) -> int:
    lines = LINK.sub("]", text).splitlines()
    return 80 + NOTE_LINE * sum(1 + len(line) // NOTE_LETTERS for line in lines)
