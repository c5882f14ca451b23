"""The templates as the page with Nodes 2.0 draws them."""

from __future__ import annotations

import json
from typing import Any

from browser_page import ComfyPage
from comfyui_server import ROOT, Server

from qwen_l40s.tools.workflows.ui_form import TITLE

FOLDER = ROOT / "workflows"


# Of the one note: how high its text is, and its own height, in the units of the graph.
NOTE_HEIGHTS = """() => {
    const box = document.querySelector('.comfy-markdown-content')
    const { top } = box.getBoundingClientRect()
    const bottoms = [...box.querySelectorAll('*')].map(e => e.getBoundingClientRect().bottom)
    return [(Math.max(...bottoms) - top) / window.app.canvas.ds.scale, box.clientHeight]
}"""


def test_nodes_2_keep_their_size_and_the_note_fits_its_text(browser: Any, server: Server):
    """Where a node grew, it would cover the next one; the page without Nodes 2.0 draws less."""
    page = ComfyPage(browser, server, {"Comfy.VueNodes.Enabled": True})
    for file in sorted(FOLDER.glob("*.json")):
        page.load(file)
        drawn = {node["title"]: node["box"][2:] for node in page.elements()}
        for node in json.loads(file.read_text(encoding="utf-8"))["nodes"]:
            width, height = node["size"]
            assert drawn[node["title"]] == [width, height + TITLE], (file.stem, node["title"])
        text, room = page.page.evaluate(NOTE_HEIGHTS)
        assert text + 12 < room < text + 80, file.stem
    page.close()
