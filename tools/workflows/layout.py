"""Where the page shows the nodes of a workflow: frames in columns, nodes below one another."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

from .definitions import companions
from .graph import Node, Workflow

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


class Layout(NamedTuple):
    """Boxes by node id and by frame; `note` is the note's."""

    nodes: dict[str, Box]
    frames: dict[str, Box]
    note: Box


def lay_out(workflow: Workflow) -> Layout:
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
            held = [node for node in members if node.group == group]
            if not held:
                continue
            at = top + FRAME_TITLE + TITLE
            for node in held:
                nodes[node.id] = Box(left + MARGIN, at, width, size(node)[1])
                at += size(node)[1] + BETWEEN_NODES + TITLE
            height = at - BETWEEN_NODES - TITLE + MARGIN - top
            frames[group] = Box(left, top, width + 2 * MARGIN, height)
            top += height + BETWEEN_FRAMES
        left += width + 2 * MARGIN + BETWEEN_FRAMES
    return Layout(nodes, frames, note)


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
