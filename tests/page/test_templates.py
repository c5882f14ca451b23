"""The templates as both pages draw them: readable, nothing over another, nothing cut."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import combinations
from typing import Any

import pytest
from browser_page import ComfyPage, put_files, take_files
from comfyui_server import ROOT, Server
from workflow_files import TITLE, Box, overlap

FOLDER = ROOT / "workflows"
TEMPLATES = sorted(FOLDER.glob("*.json"))
NODES_2 = {"Comfy.VueNodes.Enabled": True}
WINDOW, SMALL = (1600, 1000), (1440, 900)
FEWEST_PIXELS = 9  # of a letter

# Of the one note: how high its text is, and its own height, in the units of the graph.
NOTE_HEIGHTS = """() => {
    const box = document.querySelector('.comfy-markdown-content')
    const { top } = box.getBoundingClientRect()
    const bottoms = [...box.querySelectorAll('*')].map(e => e.getBoundingClientRect().bottom)
    return [(Math.max(...bottoms) - top) / window.app.canvas.ds.scale, box.clientHeight]
}"""
# {title: all that is drawn of a node in pixels, with the bar below it that says what is wrong}
DRAWN = """() => Object.fromEntries(window.app.graph.nodes.map(node => {
    const element = document.querySelector(`[data-node-id="${node.id}"]`)
    if (!element) {
        const { scale, offset } = window.app.canvas.ds, [x, y, ...size] = node.boundingRect
        const place = [x + offset[0], y + offset[1], ...size]
        return [node.title, place.map(value => value * scale)]
    }
    const { x, y, width, bottom } = element.getBoundingClientRect()
    const bar = [...element.querySelectorAll('button')].map(e => e.getBoundingClientRect().bottom)
    return [node.title, [x, y, width, Math.max(bottom, ...bar) - y]]
}))"""
# Widgets' names that are not drawn in full: on the canvas, and in elements.
CUT = """() => [...document.querySelectorAll('[data-testid="node-widget"] label, \
[data-testid="widget-layout-field-label"]')]
    .filter(label => label.scrollWidth > label.clientWidth + 1).map(label => label.innerText)"""


@pytest.fixture(params=["classic", "modern"])
def opened(request: pytest.FixtureRequest, browser: Any) -> Iterator[ComfyPage]:
    """A's page and B's in the window of a laptop, on a server that has none of the files."""
    classic = request.param == "classic"
    server = request.getfixturevalue("server" if classic else "modern_server")
    take_files(server.base)
    page = ComfyPage(browser, server, None if classic else NODES_2, WINDOW)
    yield page
    page.close()
    put_files(server.base)


def overlapping(boxes: dict[str, list[float]]) -> list[tuple[str, str]]:
    """The pairs of which one covers more than a line of the other."""
    found = {title: Box(*map(round, box)) for title, box in boxes.items()}
    return [
        (one, other)
        for one, other in combinations(found, 2)
        if overlap(
            found[one]._replace(height=found[one].height - 2),
            found[other]._replace(y=found[other].y + 2),
        )
    ]


def test_each_opens_readable(opened: ComfyPage):
    for file in TEMPLATES:
        opened.open_as_template(file)
        opened.draw()
        texts = opened.texts()
        assert any(found["text"] == "Read me" for found in texts), file.stem
        smallest = min(texts, key=lambda found: found["px"])
        assert smallest["px"] > FEWEST_PIXELS - 0.01, (file.stem, smallest)
        boxes = opened.page.evaluate(DRAWN)
        assert overlapping(boxes) == [], file.stem
        for title, (x, y, width, height) in boxes.items():
            inside = x > 0 and y > 0 and x + width < WINDOW[0] and y + height < WINDOW[1]
            assert inside, (file.stem, title)
        assert opened.page.evaluate(CUT) == [], file.stem


def test_a_smaller_window_shows_all_of_it_too(browser: Any, server: Server):
    for size in (SMALL, (1024, 700)):
        page = ComfyPage(browser, server, size=size)
        for name in ("edit_2511", "start_here_24gb"):
            page.open_as_template(FOLDER / f"{name}.json")
            page.draw()
            # The page leaves out texts that would be too small.
            assert any(found["text"] == "KSampler" for found in page.texts()), (size, name)
        page.close()


def test_a_saved_graph_opens_where_it_was_left(browser: Any, server: Server):
    page = ComfyPage(browser, server)
    page.open_as_template(FOLDER / "micro_text_to_image.json")
    assert "fit" not in page.page.evaluate("() => JSON.stringify(window.app.graph.extra)")
    page.close()


def test_nodes_2_keep_their_size_and_the_note_fits_its_text(browser: Any, server: Server):
    """Where a node grew, it would cover the next one; the page without Nodes 2.0 draws less."""
    page = ComfyPage(browser, server, NODES_2)
    for file in TEMPLATES:
        page.load(file)
        drawn = {node["title"]: node["box"][2:] for node in page.elements()}
        for node in json.loads(file.read_text(encoding="utf-8"))["nodes"]:
            if node["flags"]:  # folded
                continue
            width, height = node["size"]
            assert drawn[node["title"]] == [width, height + TITLE], (file.stem, node["title"])
        text, room = page.page.evaluate(NOTE_HEIGHTS)
        assert text + 12 < room < text + 80, file.stem
    page.close()
