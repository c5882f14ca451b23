"""Workflow files as they were released keep working: nothing of today's nodes may break them.

Files and nodes of each release are in tests/workflows/<version>; nothing there is ever changed.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from comfyui_host import comfyui_folder
from comfyui_server import Server
from frozen_workflows import NOTES, file_changes, node_changes

from qwen_l40s.tools.workflows.definitions import OURS, subset

pytestmark = pytest.mark.timeout(300)
FROZEN = Path(__file__).resolve().parent / "workflows"
RELEASES = sorted(folder.name for folder in FROZEN.iterdir())
FILES = sorted(FROZEN.glob("*/ui/*.json"))


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(comfyui_folder(), tmp_path_factory.mktemp("base"))
    yield server
    server.stop()


@pytest.fixture(scope="module")
def today(server: Server) -> dict[str, Any]:
    """Every node that a frozen file names, and all of ours, of the real ComfyUI."""
    info = server.client.get("/object_info").json()
    named = {node["type"] for path in FILES for node in read(path)["nodes"]} - NOTES
    ours = {name for name in info if name.startswith(OURS)}
    return subset(info, (named & info.keys()) | ours)


@pytest.fixture(scope="module")
def replaced(server: Server) -> set[str]:
    return set(server.client.get("/node_replacements").json())


@pytest.mark.parametrize("release", RELEASES)
def test_inputs_and_outputs_were_only_appended(release: str, today: dict, replaced: set):
    assert node_changes(read(FROZEN / release / "nodes.json"), today, replaced) == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parts[-3]}-{path.stem}")
def test_values_and_wires_of_a_released_file_land_where_they_were_saved(
    path: Path, today: dict, replaced: set
):
    assert file_changes(read(path), today, replaced) == []


@pytest.mark.parametrize("release", RELEASES)
def test_both_forms_of_each_file_are_kept(release: str):
    forms = [
        {path.name for path in (FROZEN / release / form).glob("*.json")} for form in ("ui", "api")
    ]
    assert forms[0] == forms[1] and len(forms[0]) >= 14


# That the comparison finds what would break files, with the released nodes as today's.

NODES = read(FROZEN / RELEASES[0] / "nodes.json")
LOAD_MODEL = "QwenL40S_LoadModel"


def new_input(**changes: Any) -> dict[str, Any]:
    return {"name": "new", "type": "INT", "widget": True, "optional": True, "options": {}} | changes


def inputs_of(nodes: dict[str, Any]) -> list[dict[str, Any]]:
    return nodes[LOAD_MODEL]["inputs"]


BREAKING: dict[str, tuple[Callable[[dict], Any], str]] = {
    "inserted": (
        lambda nodes: inputs_of(nodes).insert(1, new_input()),
        "input 1 was precision (COMBO), is new (INT)",
    ),
    "reordered": (lambda nodes: inputs_of(nodes).reverse(), "input 0 was model"),
    "removed": (lambda nodes: inputs_of(nodes).pop(), "input modulation is gone"),
    "appended and required": (
        lambda nodes: inputs_of(nodes).append(new_input(optional=False)),
        "input new is new and not optional",
    ),
    "renamed": (lambda nodes: inputs_of(nodes)[1].update(name="dtype"), "is dtype (COMBO)"),
    "another type": (lambda nodes: inputs_of(nodes)[1].update(type="INT"), "is precision (INT)"),
    "a socket": (lambda nodes: inputs_of(nodes)[1].update(widget=False), "input 1 was precision"),
    "required": (
        lambda nodes: inputs_of(nodes)[3].update(optional=False),
        "input modulation was optional",
    ),
    "a choice less": (
        lambda nodes: inputs_of(nodes)[1]["choices"].remove("int8"),
        "lost the choice 'int8'",
    ),
    "another widget behind it": (
        lambda nodes: inputs_of(nodes)[1]["options"].update(control_after_generate=True),
        "had other widgets behind it",
    ),
    "a narrower range": (
        lambda nodes: nodes["QwenL40S_VAEDecode"]["inputs"][2]["options"].update(max=3),
        "input tiles has a narrower max",
    ),
    "an output less": (
        lambda nodes: nodes[LOAD_MODEL]["outputs"].pop(0),
        "output 0 was MODEL (MODEL)",
    ),
    "the node gone": (lambda nodes: nodes.pop(LOAD_MODEL), "is gone and has no replacement"),
}


@pytest.mark.parametrize("what", BREAKING)
def test_a_change_that_breaks_files_is_found(what: str):
    change, sentence = BREAKING[what]
    today = copy.deepcopy(NODES)
    change(today)
    found = node_changes(NODES, today)
    assert any(sentence in each for each in found), found


def test_what_is_appended_and_optional_breaks_nothing():
    today = copy.deepcopy(NODES)
    inputs_of(today).append(new_input())
    inputs_of(today)[1]["choices"].append("int4")
    today[LOAD_MODEL]["outputs"].append({"name": "new", "type": "INT"})
    assert node_changes(NODES, today) == []


def test_a_replacement_stands_in_for_a_node_that_is_gone():
    today = {name: node for name, node in NODES.items() if name != LOAD_MODEL}
    assert node_changes(NODES, today, {LOAD_MODEL}) == []


def saved(*, values: list[Any], inputs: list[dict], links: list[list]) -> dict[str, Any]:
    """A file of a loader and Optimize, with these values of the loader."""
    names = ["model", "precision", "keep_in_bf16", "modulation"][: len(values)]
    return {
        "nodes": [
            {
                "id": 1,
                "type": LOAD_MODEL,
                "title": "Model",
                "widgets_values": values,
                "widgets_values_named": dict(zip(names, values, strict=True)),
            },
            {"id": 2, "type": "QwenL40S_Optimize", "title": "Optimize", "inputs": inputs},
        ],
        "links": links,
    }


FILE = saved(
    values=["a", "auto", "", "auto"],
    inputs=[{"name": "model"}],
    links=[[1, 1, 0, 2, 0, "MODEL"]],
)


def test_a_value_that_lands_on_another_input_is_found():
    assert file_changes(FILE, NODES) == []
    today = copy.deepcopy(NODES)
    inputs_of(today).insert(1, new_input())
    assert "the value of precision lands on new" in "\n".join(file_changes(FILE, today))
    del inputs_of(today)[1:]
    assert "the value of precision lands on nothing" in "\n".join(file_changes(FILE, today))


def test_a_wire_that_no_longer_fits_is_found():
    for part, name in (("outputs", LOAD_MODEL), ("inputs", "QwenL40S_Optimize")):
        today = copy.deepcopy(NODES)
        today[name][part][0]["type"] = "LATENT"
        assert any("QwenL40S_Optimize.model" in each for each in file_changes(FILE, today))


def test_a_node_of_a_file_that_is_gone_is_found():
    today = {name: node for name, node in NODES.items() if name != LOAD_MODEL}
    assert file_changes(FILE, today) == [f"Model ({LOAD_MODEL}) is gone and has no replacement"]
    assert file_changes(FILE, today, {LOAD_MODEL}) == []
