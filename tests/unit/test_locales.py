"""The Chinese words of the nodes: each node, input and output of ours, and nothing else.

The names are those of `definitions.json`, which test_workflows.py holds against a real ComfyUI.
"""

import json
import re
from pathlib import Path

import pytest

from qwen_l40s.tools.workflows import definitions

FILE = Path(__file__).resolve().parents[2] / "locales" / "zh" / "nodeDefs.json"
WORDS = json.loads(FILE.read_text(encoding="utf-8"))
SCHEMA = json.loads(definitions.FILE.read_text(encoding="utf-8"))
NODES = {name: node for name, node in SCHEMA.items() if name.startswith("QwenL40S")}
# Names that are the same in both languages.
SAME = {"VAE", "CLIP", "LoRA", "CFG", "TF32", "Latent", "JSON", "Sigmas"}
# The same in both languages, as a cell "12 GB (RTX 3060)".
NAMES = re.compile(r"\d+ GB \(.*\)|\s*|NAG|Canny|EmptySD3LatentImage")


def is_chinese(text: str) -> bool:
    return any("一" <= letter <= "鿿" for letter in text)


def test_each_node_has_its_words():
    assert WORDS.keys() == NODES.keys()


@pytest.mark.parametrize("name", NODES)
def test_each_input_and_output_has_its_words(name):
    words, node = WORDS[name], NODES[name]
    assert words.keys() == {"display_name", "description", "inputs", "outputs"}
    assert words["display_name"] and is_chinese(words["description"])
    assert list(words["inputs"]) == [each["name"] for each in node["inputs"]]
    assert list(words["outputs"]) == [str(place) for place in range(len(node["outputs"]))]
    for each in (*words["inputs"].values(), *words["outputs"].values()):
        assert each.keys() == {"name", "tooltip"}
        assert each["name"] in SAME or is_chinese(each["name"]), each
        assert is_chinese(each["tooltip"]) and each["tooltip"].endswith("。"), each


def test_templates_and_buttons_have_their_words():
    """As web/qwen_l40s.js reads them: line by line of a note, and part by part of a line."""
    words = json.loads((FILE.parent / "main.json").read_text(encoding="utf-8"))["qwenL40S"]
    unused, missing = {*words} - {"Details", "Close", "does not fit"}, []

    def say(text):
        key = text if text in words else re.sub(r"\d[\d.]*", "#", text)
        unused.discard(key)
        if key not in words and not NAMES.fullmatch(text):
            missing.append(text)

    for file in (FILE.parents[2] / "workflows").glob("*.json"):
        graph = json.loads(file.read_text(encoding="utf-8"))
        for each in graph["groups"]:
            say(each["title"])
        for node in graph["nodes"]:
            note = node["type"] == "MarkdownNote"
            detail = re.search(r" \((.*)\)$", node["title"])
            if note or node["flags"].get("collapsed"):
                say(node["title"])
            elif detail and not node["type"].startswith("QwenL40S"):
                say(detail[1])
            for line in node["widgets_values"][0].splitlines() if note else ():
                if line and not line.startswith("- ["):
                    [say(part) for part in re.sub(r"^(## |- )|\\$", "", line).split(" · ")]
    assert missing == [] and unused == set()
