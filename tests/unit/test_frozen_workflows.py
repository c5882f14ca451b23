"""Workflow files as they were released keep working: nothing of today's nodes may break them.

Files and nodes of each release are in tests/workflows/<version>; nothing there is ever changed.
Today's nodes are those of `definitions.json`, which test_workflows.py holds against a real ComfyUI.
tests/server/test_workflows.py posts the files to one.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from frozen_workflows import file_changes, node_changes, replacement_changes

from qwen_l40s import __version__
from qwen_l40s.tools.workflows import definitions

FROZEN = Path(__file__).resolve().parents[1] / "workflows"
# A rename by search and replace all over the tree would change them together with the nodes.
RELEASES = {
    "0.1.0": "f242f0add9a638a8d7cdd47be495de3eef9963172dad84d5cc871daa717e204e",
    "0.2.0": "7e7a13d587291777ff21844a3ebfb6678e0b50db26928c833216d8f3b4edfb36",
}
FILES = sorted(FROZEN.glob("*/ui/*.json"))


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


TODAY = read(definitions.FILE)


@pytest.mark.parametrize("release", RELEASES)
def test_what_was_released_is_not_changed(release: str):
    files = sorted((FROZEN / release).rglob("*.json"))
    held = {file.relative_to(FROZEN).as_posix(): read(file) for file in files}
    assert hashlib.sha256(json.dumps(held).encode()).hexdigest() == RELEASES[release]


def test_every_release_is_kept():
    assert {folder.name for folder in FROZEN.iterdir()} == set(RELEASES)
    assert __version__ in RELEASES, (
        f"copy workflows/*.json to tests/workflows/{__version__}/ui, workflows/api there, and "
        "tools/workflows/definitions.json as nodes.json; put their hash into RELEASES"
    )


@pytest.mark.parametrize("release", RELEASES)
def test_inputs_and_outputs_were_only_appended(release: str):
    assert node_changes(read(FROZEN / release / "nodes.json"), TODAY) == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parts[-3]}-{path.stem}")
def test_values_and_wires_of_a_released_file_land_where_they_were_saved(path: Path):
    assert file_changes(read(path), TODAY) == []


@pytest.mark.parametrize("release", RELEASES)
def test_both_forms_of_each_file_are_kept(release: str):
    forms = [
        {path.name for path in (FROZEN / release / form).glob("*.json")} for form in ("ui", "api")
    ]
    assert forms[0] == forms[1] and len(forms[0]) >= 14


# That the comparison finds what would break files, with the released nodes as today's.

NODES = read(FROZEN / "0.1.0" / "nodes.json")
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


def renamed(**changes: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Nodes of which the loader has another name and calls its precision `dtype`, and the answer of
    GET /node_replacements about it.
    """
    today = copy.deepcopy(NODES)
    today["New"] = today.pop(LOAD_MODEL)
    today["New"]["inputs"][1]["name"] = "dtype"
    names = ["model", "precision", "keep_in_bf16", "modulation"]
    mapping = [{"old_id": name, "new_id": {"precision": "dtype"}.get(name, name)} for name in names]
    outputs = [{"old_idx": index, "new_idx": index} for index in range(2)]
    rules = {
        "new_node_id": "New",
        "old_widget_ids": names,
        "input_mapping": mapping,
        "output_mapping": outputs,
    }
    return today, {LOAD_MODEL: [rules | changes]}


def test_a_replacement_stands_in_for_a_node_that_is_gone():
    today, replacements = renamed()
    assert node_changes(NODES, today) == []
    assert replacement_changes(NODES, today, replacements) == []
    assert replacement_changes(NODES, NODES, {}) == []


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"new_node_id": "Newer"}, "its replacement Newer is not there"),
        ({"old_widget_ids": ["precision", "model"]}, "old_widget_ids must be"),
        ({"old_widget_ids": None}, "old_widget_ids must be"),
        ({"input_mapping": None}, "input model (COMBO) goes to no input of New"),
        (
            {"input_mapping": [{"old_id": "precision", "new_id": "precision"}]},
            "input precision (COMBO) goes to no input of New",
        ),
        (
            {"input_mapping": [{"old_id": "precision", "new_id": "dtype"}]},
            "input model of New gets nothing",
        ),
        ({"output_mapping": None}, "output 0 (MODEL) comes from no output of New"),
        (
            {"output_mapping": [{"old_idx": 0, "new_idx": 1}, {"old_idx": 1, "new_idx": 0}]},
            "output 0 (MODEL) comes from no output of New",
        ),
    ],
)
def test_a_replacement_that_loses_something_is_found(changes: dict[str, Any], sentence: str):
    today, replacements = renamed(**changes)
    found = replacement_changes(NODES, today, replacements)
    assert any(sentence in each for each in found), found


def test_a_node_that_is_gone_without_a_replacement_is_found():
    today = {name: node for name, node in NODES.items() if name != LOAD_MODEL}
    for none in ({}, {LOAD_MODEL: []}):
        found = replacement_changes(NODES, today, none)
        assert found == [f"{LOAD_MODEL} is gone and has no replacement"]


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


def test_a_node_of_comfyui_that_is_gone_from_a_file_is_found():
    file = saved(values=["a"], inputs=[{"name": "model"}], links=[])
    file["nodes"][0]["type"] = "Gone"
    assert file_changes(file, NODES) == ["Model (Gone) is gone"]
