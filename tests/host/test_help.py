"""What ComfyUI tells its page of every node, and what the node's help page says."""

import re

import pytest
from comfyui_boot import ROOT

from qwen_l40s.nodes import NODES as CLASSES

DOCS = ROOT / "web" / "docs"
PAGES = {page.stem: page.read_text(encoding="utf-8") for page in sorted(DOCS.glob("*.md"))}
# Choices that are not the node's own: files on a disk, cards in a list.
LISTS = {"model", "clip", "vae", "lora", "gpu"}
ENTRIES = {entry["name"]: entry for entry in (node.GET_NODE_INFO_V1() for node in CLASSES)}
NODES = sorted(ENTRIES)


def section(page: str, heading: str) -> str:
    found = re.search(rf"^## {heading}\n(.*?)(?=^## |\Z)", page, re.M | re.S)
    return found[1] if found else ""


def inputs_on(page: str) -> list[tuple[list[str], str]]:
    lines = re.findall(r"^- ((?:\*\*`\w+`\*\*(?:, )?)+)(.+)$", section(page, "Choose"), re.M)
    return [(re.findall(r"`(\w+)`", names), words) for names, words in lines]


def outputs_on(page: str) -> list[str]:
    return re.findall(r"^\| `([^`]+)` \|", section(page, "Outputs"), re.M)


@pytest.fixture(params=NODES)
def node(request):
    return ENTRIES[request.param]


def inputs_of(node: dict) -> dict[str, list]:
    return {**node["input"].get("required", {}), **node["input"].get("optional", {})}


def labelled_inputs_of(node: dict) -> dict[str, list]:
    return {entry[1].get("display_name", name): entry for name, entry in inputs_of(node).items()}


def test_everything_of_a_node_is_explained(node):
    assert node["description"].endswith(".")
    aliases = node["search_aliases"]
    assert len(aliases) >= 4 and len(set(aliases)) == len(aliases)
    assert all(alias == alias.lower().strip() for alias in aliases)
    tooltips = {name: entry[1].get("tooltip") for name, entry in inputs_of(node).items()}
    assert [name for name, tooltip in tooltips.items() if not tooltip] == []
    outputs = dict(zip(node["output_name"], node["output_tooltips"], strict=True))
    assert [name for name, tooltip in outputs.items() if not tooltip] == []


def test_a_page_names_every_input_in_order_and_no_other(node):
    shown = [name for names, _ in inputs_on(PAGES[node["name"]]) for name in names]
    assert shown == list(labelled_inputs_of(node))


def test_a_page_names_every_output_in_order_and_no_other(node):
    assert outputs_on(PAGES[node["name"]]) == node["output_name"]


def test_a_page_names_every_choice(node):
    for names, words in inputs_on(PAGES[node["name"]]):
        for name in names:
            kind, settings = labelled_inputs_of(node)[name]
            if name in LISTS or is_list_of_files(node, name):
                continue
            choices = settings["options"] if kind == "COMBO" else brought_by(settings)
            labels = settings.get("labels", {})
            missing = [each for each in choices if f"`{labels.get(each, each)}`" not in words]
            assert missing == [], name


def test_a_page_names_every_input_that_a_choice_brings(node):
    for _, settings in inputs_of(node).values():
        for inputs in brought_by(settings).values():
            for name, (kind, rules) in inputs.items():
                named = [
                    rules.get("display_name", name),
                    *(rules["options"] if kind == "COMBO" else ()),
                ]
                explained = section(PAGES[node["name"]], "Choose")
                assert [word for word in named if f"`{word}`" not in explained] == []
                assert rules["tooltip"].endswith("."), name


def brought_by(settings: dict) -> dict[str, dict[str, list]]:
    """{choice: its own inputs} of an input whose choice brings inputs; of another none."""
    options = [option for option in settings.get("options", ()) if isinstance(option, dict)]
    return {option["key"]: shown_of(option["inputs"]) for option in options}


def shown_of(groups: dict[str, dict[str, list]]) -> dict[str, list]:
    inputs = {name: entry for group in groups.values() for name, entry in group.items()}
    return {name: entry for name, entry in inputs.items() if not entry[1].get("hidden")}


def is_list_of_files(node: dict, name: str) -> bool:
    return name == "text_encoder" and "Load" in node["name"]
