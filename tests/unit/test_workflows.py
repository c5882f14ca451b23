"""The shared workflows are what their builder writes, in two forms that agree."""

from __future__ import annotations

import json
import re
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from workflow_files import overlap

from qwen_l40s import __version__
from qwen_l40s.spec.families import find_family
from qwen_l40s.tools.workflows import __main__ as builder
from qwen_l40s.tools.workflows import definitions, thumbnails, ui_form, workflows
from qwen_l40s.tools.workflows.graph import Workflow
from qwen_l40s.tools.workflows.ui_form import (
    MOST_HEIGHT,
    MOST_WIDTH,
    extent,
    lay_out,
    room_below,
)

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "workflows"
NAMES = [
    "micro_text_to_image",
    "text_to_image_bf16",
    "text_to_image_cached",
    "text_to_image_fp8",
    "text_to_image_int8",
    "lightning_4_steps",
    "lightning_8_steps",
    "edit_2511",
    "edit_2511_lightning",
    "edit_2511_three_references",
    "try_on",
    "inpaint",
    "layered",
    "lora",
    "controlnet",
    "batch_of_8",
    "text_to_image_2048",
    "qwen_image_21",
    "qwen_image_21_2048",
    "qwen_image_21_turbo",
    "qwen_image_21_edit",
    "micro_qwen_image_21",
    "micro_report",
    "estimate",
    "estimate_generate_report",
    "advise",
    "save_quantized",
]
NOTE = "MarkdownNote"
MODEL_FOLDERS = ("diffusion_models", "text_encoders", "vae", "loras", "controlnet")
MODEL_FILE = re.compile(r"\.(safetensors|sft|ckpt|pt|gguf)$")


def ui(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def api(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / "api" / f"{name}.json").read_text(encoding="utf-8"))


def links(name: str) -> list[dict[str, str]]:
    """The models that the nodes of a workflow name."""
    return [link for node in api(name).values() for link in node["_meta"].get("models", [])]


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def test_writing_the_files_again_changes_nothing(capsys: pytest.CaptureFixture):
    assert builder.differences() == []
    assert builder.main(["--check"]) == 0
    assert "up to date" in capsys.readouterr().out


def test_check_tells_what_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    monkeypatch.setattr(builder, "ROOT", tmp_path)
    monkeypatch.setattr(builder, "FOLDER", tmp_path / "workflows")
    assert builder.main([]) == 0
    assert builder.differences() == []
    (tmp_path / "workflows" / "lora.json").write_text("{}\n")
    (tmp_path / "workflows" / "api" / "inpaint.json").unlink()
    (tmp_path / "workflows" / "old.json").write_text("{}\n")
    assert builder.main(["--check"]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "workflows/api/inpaint.json is missing.",
        "workflows/lora.json differs.",
        "workflows/old.json is made by nothing.",
    ]


def test_all_are_there_and_each_has_its_picture():
    assert sorted(workflow.name for workflow in workflows()) == sorted(NAMES)
    for ending in ("json", "jpg"):
        assert sorted(path.stem for path in FOLDER.glob(f"*.{ending}")) == sorted(NAMES)
    # The page lists every file of the folder as a template, and the API form is none.
    assert {path.suffix for path in FOLDER.iterdir()} == {"", ".json", ".jpg"}


def test_files_end_with_a_line_end_and_are_utf_8(name: str):
    for path in (FOLDER / f"{name}.json", FOLDER / "api" / f"{name}.json"):
        text = path.read_text(encoding="utf-8")
        assert text.endswith("}\n") and "\r" not in text


def from_page(graph: dict[str, Any]) -> dict[str, Any]:
    """The API form as the page derives it from a file, by titles: values by position, links by
    slots, and no widget that no input stands for.
    """
    nodes = {node["id"]: node for node in graph["nodes"] if node["type"] != NOTE}
    origins = {link[0]: link for link in graph["links"]}
    found = {}
    for node in nodes.values():
        known = definitions.definitions()[node["type"]]
        values = iter(node.get("widgets_values", []))
        inputs = {}
        for each in known.inputs:
            if each.widget:
                inputs[each.name] = next(values)
                for _ in definitions.companions(each):
                    next(values)
        assert list(values) == []
        for slot, socket in enumerate(node["inputs"]):
            if socket["link"] is None:
                continue
            link, origin, output, target, into, kind = origins[socket["link"]]
            assert (target, into) == (node["id"], slot)
            assert link in nodes[origin]["outputs"][output]["links"]
            assert nodes[origin]["outputs"][output]["type"] == kind
            inputs[socket["name"]] = [nodes[origin]["title"], output]
        found[node["title"]] = (node["type"], inputs)
    return found


def test_both_forms_say_the_same(name: str):
    graph = api(name)
    titles = {id: node["_meta"]["title"] for id, node in graph.items()}
    assert len(set(titles.values())) == len(titles)
    expected = {}
    for id, node in graph.items():
        inputs = {
            key: [titles[value[0]], value[1]] if isinstance(value, list) else value
            for key, value in node["inputs"].items()
        }
        expected[titles[id]] = (node["class_type"], inputs)
    assert from_page(ui(name)) == expected


def test_values_by_name_are_those_by_position(name: str):
    for node in ui(name)["nodes"]:
        assert list(node.get("widgets_values_named", {}).values()) == node.get("widgets_values", [])


def test_links_are_listed_at_both_ends(name: str):
    graph = ui(name)
    into = {slot["link"] for node in graph["nodes"] for slot in node["inputs"]} - {None}
    out = [
        link for node in graph["nodes"] for slot in node["outputs"] for link in slot["links"] or []
    ]
    assert sorted(into) == sorted(out) == [link[0] for link in graph["links"]]
    assert graph["last_link_id"] == len(out)
    assert graph["last_node_id"] == max(node["id"] for node in graph["nodes"])


def test_a_graph_is_flat_and_of_our_nodes_and_comfyuis(name: str):
    graph = ui(name)
    assert "definitions" not in graph and graph["version"] == 0.4
    for node in graph["nodes"]:
        assert node["type"] == NOTE or node["type"] in definitions.definitions()
        if node["type"] == NOTE:
            continue
        ours = node["type"].startswith("QwenL40S_")
        properties = node["properties"]
        assert properties["Node name for S&R"] == node["type"]
        pack = ("comfyui-qwen-image-l40s", __version__) if ours else ("comfy-core", "0.33.0")
        assert (properties["cnr_id"], properties["ver"]) == pack
    for node in api(name).values():
        ours = node["class_type"].startswith("QwenL40S_")
        assert node["_meta"].get("version") == (__version__ if ours else None)


def test_every_model_file_has_its_link(name: str):
    for node, properties in [
        *((node["inputs"], node["_meta"]) for node in api(name).values()),
        *((node.get("widgets_values_named", {}), node["properties"]) for node in ui(name)["nodes"]),
    ]:
        files = [
            value
            for key, value in node.items()
            if key != "filename"  # of what is written
            if isinstance(value, str) and "\n" not in value and MODEL_FILE.search(value)
        ]
        links = properties.get("models", [])
        assert [link["name"] for link in links] == files
        for link in links:
            assert set(link) == {"name", "url", "directory"}
            assert link["url"].startswith("https://huggingface.co/")
            assert link["url"].endswith(f"/{link['name']}")
            assert link["directory"] in MODEL_FOLDERS


def described(name: str) -> Workflow:
    return next(workflow for workflow in workflows() if workflow.name == name)


def test_nothing_overlaps_when_nodes_have_said_what_they_did(name: str):
    workflow = described(name)
    layout = lay_out(workflow)
    nodes = {"Read me": layout.note.with_title()}
    for node in workflow.nodes.values():
        box = layout.nodes[node.id].with_title()
        nodes[node.title] = box._replace(height=box.height + room_below(node))
    for (first, box), (second, other) in combinations(nodes.items(), 2):
        assert not overlap(box, other), (first, second)
    for (first, box), (second, other) in combinations(layout.frames.items(), 2):
        assert not overlap(box, other), (first, second)
    for title, box in nodes.items():
        for frame in layout.frames.values():
            if overlap(frame, box):
                assert frame.x <= box.x and box.x + box.width <= frame.x + frame.width, title
                assert frame.y <= box.y and box.y + box.height <= frame.y + frame.height, title


def test_a_graph_has_four_columns_that_fit_the_window(name: str):
    workflow = described(name)
    box = extent(lay_out(workflow))
    assert len(workflow.columns) <= 4
    assert box.width <= MOST_WIDTH and box.height <= MOST_HEIGHT, box


def test_the_page_and_the_layout_agree_on_the_bars_of_the_window():
    script = (FOLDER.parent / "web" / "templates.js").read_text(encoding="utf-8")
    said = dict(re.findall(r"\b(LEFT|TOP|RIGHT|BOTTOM) = (\d+)", script))
    assert said == {
        name: str(getattr(ui_form, name)) for name in ("LEFT", "TOP", "RIGHT", "BOTTOM")
    }


def test_wires_go_to_the_right_or_down(name: str):
    workflow = described(name)
    boxes = lay_out(workflow).nodes
    column = {
        node.id: index
        for index, groups in enumerate(workflow.columns)
        for node in workflow.nodes.values()
        if node.group in groups
    }
    for origin, node, _ in workflow.links():
        right = column[origin.node] < column[node.id]
        down = column[origin.node] == column[node.id] and boxes[origin.node].y < boxes[node.id].y
        assert right or down, (origin.node, node.id)


def test_titles_are_the_names_that_the_search_shows(name: str):
    for node in ui(name)["nodes"]:
        if node["type"] == NOTE:
            continue
        shown = definitions.definitions()[node["type"]].title
        assert node["title"].partition(" (")[0] == shown.partition(" (")[0]


def test_the_note_names_each_file_and_what_it_takes(name: str):
    (note,) = [node for node in ui(name)["nodes"] if node["type"] == NOTE]
    (text,) = note["widgets_values"]
    assert text.startswith("## ") and "**Change first**" in text and len(text) < 2400
    for link in links(name):
        assert f"[{link['name']}]({link['url']})" in text
        assert f"`models/{link['directory']}`" in text
    samplers = {"KSampler", "SamplerCustom"}
    paints = not samplers.isdisjoint(node["class_type"] for node in api(name).values())
    assert ("On an L40S, predicted:" in text) == (paints and bool(links(name)))


def test_the_text_encoder_leaves_the_card_where_the_note_says_so(name: str):
    (note,) = [node for node in ui(name)["nodes"] if node["type"] == NOTE]
    says = "text encoder leaves the card" in note["widgets_values"][0]
    places = [node["inputs"].get("placement") for node in api(name).values()]
    assert says == ("drop after encoding" in places)


def test_what_no_file_is_needed_for_names_none():
    micro = ("micro_text_to_image", "micro_qwen_image_21", "micro_report")
    for name in (*micro, "estimate", "advise"):
        assert "safetensors" not in json.dumps(api(name))


def test_ids_and_inputs_of_the_demo_stay():
    graph = api("micro_text_to_image")
    assert list(graph) == ["load", "positive", "negative", "empty", "sample", "decode", "save"]
    assert graph["load"]["inputs"]["model"] == "micro (bundled)"
    assert graph["sample"]["inputs"]["seed"] == 1


def test_lightning_runs_as_it_was_trained():
    edit = "Edit-2511-Lightning-4steps"
    for name, steps, lora in (
        ("lightning_4_steps", 4, "2512-Lightning-4steps"),
        ("lightning_8_steps", 8, "2512-Lightning-8steps"),
        ("edit_2511_lightning", 4, edit),
        ("try_on", 4, edit),
    ):
        graph = api(name)
        inputs = graph["sample"]["inputs"]
        chosen = [inputs[key] for key in ("steps", "cfg", "sampler_name", "scheduler")]
        assert chosen == [steps, 1.0, "euler", "simple"]
        assert graph["shift"]["inputs"]["shift"] == 3.0
        assert lora in graph["lora"]["inputs"]["lora"]
        family = lora.partition("-Lightning")[0].lower().replace("-", "_")
        assert family in graph["load"]["inputs"]["model"]
        assert graph["negative"]["class_type"] == "ConditioningZeroOut"


def test_others_take_the_steps_of_their_familys_model_card():
    families = {
        "qwen_image_2512": "qwen-image-2512",
        "qwen_image_edit_2511": "qwen-image-edit-2511",
        "qwen_image_layered": "qwen-image-layered",
        "qwen_image_2.1": "qwen-image-2.1",
    }
    found = {}
    for name in NAMES:
        graph = api(name)
        sampler = graph.get("sample", {"class_type": ""})
        few = "Lightning" in graph.get("lora", {"inputs": {"lora": ""}})["inputs"]["lora"]
        if sampler["class_type"] == "KSampler" and "micro" not in name and not few:
            model = graph["load"]["inputs"]["model"]
            [family] = [each for start, each in families.items() if model.startswith(start)]
            found[name] = sampler["inputs"]["steps"], find_family(family).steps
    assert all(steps == own for steps, own in found.values()), found
    assert {own for _, own in found.values()} == {40, 50} and len(found) > 12


def test_those_of_qwen_image_21_say_what_they_need_and_its_licence():
    for name in NAMES:
        if "qwen_image_21" in name:
            text = ui(name)["nodes"][0]["widgets_values"][0]
            assert text.split("\n\n")[1].startswith("**Needs ComfyUI 0.37 or newer.**")
            assert ("Qwen Research License" in text) == ("micro" not in name)


def test_the_turbo_keeps_its_own_sigmas():
    graph = api("qwen_image_21_turbo")
    sigmas = [float(value) for value in graph["sigmas"]["inputs"]["sigmas"].split(",")]
    assert len(sigmas) == 8 + 1 and sigmas == sorted(sigmas, reverse=True)
    assert (sigmas[0], sigmas[-1]) == (1.0, 0.0)
    assert graph["sample"]["inputs"]["cfg"] == 1.0


def test_pictures_are_small_and_say_what_they_are(name: str):
    path = FOLDER / f"{name}.jpg"
    with Image.open(path) as picture:
        assert picture.format == "JPEG" and picture.mode == "RGB"
        assert picture.size == (thumbnails.SIDE, thumbnails.SIDE)
    assert path.stat().st_size <= thumbnails.MOST_BYTES
    made = name in ("micro_text_to_image", "micro_qwen_image_21")
    # Others become "made by the workflow" as soon as a card has painted them.
    allowed = {thumbnails.MADE} if made else {thumbnails.MADE, thumbnails.DRAWN}
    assert thumbnails.comment_of(path) in allowed


def test_a_picture_that_was_made_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(builder, "FOLDER", tmp_path)
    noise = np.random.default_rng(0).integers(0, 256, (900, 1200, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "made.png")
    builder.main(["--thumbnail", "lora", str(tmp_path / "made.png")])
    before = (tmp_path / "lora.jpg").read_bytes()
    assert len(before) <= thumbnails.MOST_BYTES
    builder.main(["--draw"])
    assert (tmp_path / "lora.jpg").read_bytes() == before
    assert thumbnails.comment_of(tmp_path / "inpaint.jpg") == thumbnails.DRAWN
    with pytest.raises(SystemExit, match="no workflow is called 'lorra'"):
        builder.main(["--thumbnail", "lorra", str(tmp_path / "made.png")])


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ({"width": 1.5}, "size.width takes INT, got 1.5"),
        ({"width": True}, "size.width takes INT, got True"),
        ({"widht": 1}, "has no input 'widht'"),
    ],
)
def test_a_graph_refuses_what_a_node_does_not_take(inputs: dict, words: str):
    with pytest.raises((KeyError, ValueError), match=re.escape(words)):
        Workflow("x", "X").add("size", "EmptySD3LatentImage", "Prompt", **inputs)


def test_a_graph_refuses_wires_choices_and_ids_that_do_not_fit():
    graph = Workflow("x", "X")
    load = graph.add("load", "QwenL40S_Load", "Models", model="micro (bundled)")
    with pytest.raises(ValueError, match=r"optimize\.model takes MODEL, got CLIP"):
        graph.add("optimize", "QwenL40S_Optimize", "Models", model=load["CLIP"])
    with pytest.raises(ValueError, match=r"optimize\.model is missing"):
        graph.add("optimize", "QwenL40S_Optimize", "Models")
    with pytest.raises(ValueError, match=r"other\.precision: 'int2' is none of auto, bf16"):
        graph.add("other", "QwenL40S_Load", "Models", model="a", precision="int2")
    with pytest.raises(ValueError, match="two nodes are called 'load'"):
        graph.add("load", "QwenL40S_Load", "Models", model="micro (bundled)")
