"""The shared workflows: both forms agree, all that they name is there, and the page shows it well.

tests/page/test_browser.py holds the API forms against those that ComfyUI's page makes.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from workflow_files import TITLE, Box, overlap

from qwen_l40s.families.qwen_image_21 import QWEN_IMAGE_21
from qwen_l40s.families.registry import find_member
from qwen_l40s.families.schedules import plain_name, schedule_of_file
from qwen_l40s.machine.store import known_cards
from qwen_l40s.planning.card_list import BUNDLED
from qwen_l40s.planning.estimate import FITS, estimate
from qwen_l40s.spec.formats import GIB
from qwen_l40s.tools.workflows import __main__ as command
from qwen_l40s.tools.workflows import definitions
from qwen_l40s.tools.workflows.notes import CARDS, run_request

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "workflows"
NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))
NOTE = "MarkdownNote"
MARGIN = 12  # of a frame
# How much a node grows when it says what it did, or below it what is wrong with it.
SAYS, ISSUES = 148, 28
READS_FILE = {"LoadImage", "ControlNetLoader"}  # of ComfyUI's own: a file may be missing
# Of a folded node, which keeps the size that it has when it is open.
FOLDED, FOLDED_LETTER, FOLDED_EDGE = 225, 7.5, 60


def ui(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def api(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / "api" / f"{name}.json").read_text(encoding="utf-8"))


OF_21 = [name for name in NAMES if "2.1" in str(api(name).get("load"))]


def links(name: str) -> list[dict[str, str]]:
    return [link for node in api(name).values() for link in node["_meta"].get("models", [])]


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(command, "ROOT", tmp_path)
    monkeypatch.setattr(command, "FOLDER", tmp_path / "workflows")
    shutil.copytree(FOLDER, tmp_path / "workflows")
    return tmp_path / "workflows"


def change(file: Path, how: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    graph = json.loads(file.read_text(encoding="utf-8"))
    how(graph)
    file.write_text(json.dumps(graph), encoding="utf-8")
    return graph


def node_of(graph: dict[str, Any], title: str) -> dict[str, Any]:
    (found,) = [node for node in graph["nodes"] if node["title"] == title]
    return found


def test_the_files_are_as_they_would_be_written(capsys: pytest.CaptureFixture):
    assert (command.main([]), capsys.readouterr().out) == (0, "")


def test_it_tells_what_differs(copied: Path, capsys: pytest.CaptureFixture):
    change(
        copied / "lora.json", lambda graph: graph.update(extra={"ds": {}, "frontendVersion": ""})
    )
    change(copied / "api" / "layered.json", lambda graph: graph["size"].update(inputs={}))
    (copied / "api" / "inpaint.json").unlink()
    assert command.main([]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "workflows/api/inpaint.json differs.",
        "workflows/api/layered.json differs.",
        "workflows/lora.json differs.",
    ]


def as_a_page_saves(graph: dict[str, Any]) -> None:
    """Leaves out titles that are the node's own; adds a socket for each widget and names in the
    language of the page; writes 1.0 as 1, and places between pixels.
    """
    for node in graph["nodes"]:
        if node["type"] != NOTE:
            known = definitions.definitions()[node["type"]]
            if node["title"] == known.title:
                del node["title"]
            taken = {socket["name"] for socket in node["inputs"]}
            node["inputs"] = [
                {"name": each.name, "type": each.type, "widget": {"name": each.name}, "link": None}
                for each in known.inputs
                if each.widget and each.name not in taken
            ] + [socket | {"localized_name": "Modell"} for socket in node["inputs"]]
        for link in graph["links"]:
            if link[3] == node["id"]:
                link[4] = [socket["link"] for socket in node["inputs"]].index(link[0])
        node["pos"] = [place + 0.25 for place in node["pos"]]
        node["properties"] = {"ver": "0.0.1"}
        node["widgets_values"] = [
            int(value) if isinstance(value, float) and value.is_integer() else value
            for value in node.get("widgets_values", [])
        ]
        node.pop("widgets_values_named", None)
    graph["links"].reverse()
    graph["extra"] = {**graph["extra"], "qwen_l40s": None, "reroutes": []}
    graph["definitions"] = {"subgraphs": []}


def test_what_a_page_saved_becomes_the_file_again(copied: Path):
    for name in NAMES:
        change(copied / f"{name}.json", as_a_page_saves)
    assert command.main(["--write"]) == 0
    for name in NAMES:
        for file in (f"{name}.json", f"api/{name}.json"):
            assert (copied / file).read_text("utf-8") == (FOLDER / file).read_text("utf-8"), file


def alone(copied: Path, name: str) -> Path:
    """Leaves one workflow in a copy of the folder."""
    for other in set(copied.glob("*.json")) - {file := copied / f"{name}.json"}:
        other.unlink()
    return file


def test_notes_and_api_forms_follow_a_change(copied: Path):
    def fewer_steps(graph: dict[str, Any]) -> None:
        node_of(graph, "KSampler")["widgets_values"][2] = 25
        prompt = node_of(graph, "CLIP Text Encode (Prompt)")
        prompt["title"] = "CLIP Text Encode (another)"
        load = node_of(graph, "Load Qwen-Image")
        load["widgets_values"][0] = "qwen_image_2512_fp8_e4m3fn.safetensors"

    change(file := alone(copied, "text_to_image_most_accurate"), fewer_steps)
    assert command.main(["--write"]) == 0 == command.main([])
    graph = json.loads(file.read_text("utf-8"))
    note = node_of(graph, "Read me")["widgets_values"][0]
    assert "1328x1328, 25 steps, predicted" in note and "fp8_e4m3fn" in note
    prompt = json.loads((copied / "api" / "text_to_image_most_accurate.json").read_text("utf-8"))
    old = api("text_to_image_most_accurate")
    number = str(node_of(graph, "CLIP Text Encode (another)")["id"])
    assert [key if key != number else "positive" for key in prompt] == list(old)
    assert prompt["sample"]["inputs"] == old["sample"]["inputs"] | {
        "steps": 25,
        "positive": [number, 0],
    }
    assert prompt["load"]["_meta"]["models"][0]["url"].endswith("2512_fp8_e4m3fn.safetensors")


SAMPLER, LOADER, DECODER = "KSampler", "Load Qwen-Image", "VAE Decode (Qwen-Image)"


def of(title: str, how: Callable[[dict[str, Any]], Any]) -> Callable[[dict[str, Any]], Any]:
    return lambda graph: how(node_of(graph, title))


def value(title: str, index: int, other: Any) -> Callable[[dict[str, Any]], Any]:
    return of(title, lambda node: node["widgets_values"].__setitem__(index, other))


@pytest.mark.parametrize(
    ("named", "how"),
    [
        ("0.4", lambda graph: graph.clear()),
        ("KSampler.control_after_generate", value(SAMPLER, 1, "fixed")),
        ("'int2'", value(LOADER, 1, "int2")),
        ("mine.safetensors", value(LOADER, 0, "mine.safetensors")),
        ("KSampler has 6 values", of(SAMPLER, lambda node: node["widgets_values"].pop())),
        ("KSampler", of(SAMPLER, lambda node: node.update(mode=4))),
        ("S: call it KSampler", of(SAMPLER, lambda node: node.update(title="S"))),
        ("20", of(SAMPLER, lambda node: node.update(flags={"collapsed": True}, title="S" * 21))),
        ("Fast", of(SAMPLER, lambda node: node.update(type="Fast"))),
        (f"{DECODER}.samples", of(DECODER, lambda node: node.update(inputs=[]))),
        ("2 nodes", of("CLIP Text Encode (Prompt)", lambda node: node.update(title=SAMPLER))),
        ("wire 99", of(SAMPLER, lambda node: node["inputs"][0].update(link=99))),
        (f"{DECODER}: ", lambda graph: graph["nodes"].remove(node_of(graph, LOADER))),
        ("MarkdownNote", lambda graph: graph["nodes"].pop(0)),
        ("**Files**", value("Read me", 0, "## No heading")),
        ("**What it takes**", value(LOADER, 0, "micro (bundled)")),
    ],
)
def test_a_workflow_that_is_wrong_is_told_and_nothing_is_written(
    copied: Path, capsys: pytest.CaptureFixture, how: Callable[[dict[str, Any]], Any], named: str
):
    change(file := alone(copied, "text_to_image_most_accurate"), how)
    before = file.read_bytes()
    for arguments in ([], ["--write"]):
        assert command.main(arguments) == 1
        lines = capsys.readouterr().out.splitlines()
        assert any(named in line for line in lines), lines
        assert all(line.startswith(f"workflows/{file.name}: ") for line in lines)
    assert file.read_bytes() == before


def test_each_has_both_forms_and_its_picture():
    assert sorted(path.stem for path in FOLDER.glob("*.jpg")) == NAMES
    assert sorted(path.stem for path in FOLDER.glob("api/*.json")) == NAMES
    # The page lists every file of the folder as a template, and the API form is none.
    assert {path.suffix for path in FOLDER.iterdir()} == {"", ".json", ".jpg"}


def test_pictures_are_small_and_say_what_they_are(name: str):
    path = FOLDER / f"{name}.jpg"
    with Image.open(path) as picture:
        assert picture.format == "JPEG" and picture.mode == "RGB"
        assert picture.size == (512, 512)
        comment = picture.info["comment"].decode()
    assert path.stat().st_size <= 30_000
    made = name in ("micro_text_to_image", "micro_qwen_image_21")
    drawn = set() if made else {"a drawing of what the workflow does"}
    assert comment in {"made by the workflow", *drawn}


def drawn(graph: dict[str, Any]) -> dict[str, tuple[dict[str, Any], Box]]:
    """{title: (node, its box as it is drawn)}"""
    found = {}
    for node in graph["nodes"]:
        (x, y), (width, height) = node["pos"], node["size"]
        if node["flags"].get("collapsed"):
            width, height = max(FOLDED, round(len(node["title"]) * FOLDED_LETTER) + FOLDED_EDGE), 0
        found[node["title"]] = node, Box(x, y - TITLE, width, height + TITLE)
    return found


def room_below(node: dict[str, Any]) -> int:
    if node["flags"].get("collapsed"):
        return 0
    if node["type"].startswith("QwenL40S_") and node["type"] != "QwenL40S_SaveImage":
        return SAYS
    return ISSUES if node["type"] in READS_FILE else 0


def test_nothing_overlaps_when_nodes_have_said_what_they_did(name: str):
    graph = ui(name)
    nodes = {
        title: box._replace(height=box.height + room_below(node))
        for title, (node, box) in drawn(graph).items()
    }
    frames = {frame["title"]: Box(*frame["bounding"]) for frame in graph["groups"]}
    for boxes in (nodes, frames):
        for (first, box), (second, other) in combinations(boxes.items(), 2):
            assert not overlap(box, other), (first, second)
    for title, box in nodes.items():
        for frame in frames.values():
            if overlap(frame, box):
                assert frame.x <= box.x and box.x + box.width <= frame.x + frame.width, title
                assert frame.y <= box.y and box.y + box.height <= frame.y + frame.height, title


def test_wires_go_to_the_right_or_down(name: str):
    graph = ui(name)
    nodes = {node["id"]: node for node in graph["nodes"]}
    for _, origin, _, target, *_ in graph["links"]:
        (x, y), (to_x, to_y) = nodes[origin]["pos"], nodes[target]["pos"]
        down = abs(to_x - x) <= MARGIN and to_y > y
        assert to_x - x > MARGIN or down, (nodes[origin]["title"], nodes[target]["title"])


def test_the_note_names_each_file_and_what_it_takes(name: str):
    (note,) = [node for node in ui(name)["nodes"] if node["type"] == NOTE]
    (text,) = note["widgets_values"]
    assert text.startswith("## ") and "**Change first**" in text and len(text) < 2400
    for link in links(name):
        assert f"[{link['name']}]({link['url']})" in text
        assert f"`models/{link['directory']}`" in text
    samplers = {"KSampler", "SamplerCustom"}
    paints = not samplers.isdisjoint(node["class_type"] for node in api(name).values())
    rows = [f"\n{size} GB ({name.removesuffix(f' {size}GB')}) · " for size, name in CARDS.items()]
    assert all((row in text) == (paints and bool(links(name))) for row in rows)


@pytest.mark.parametrize("size", [12, 24, 48])
def test_where_to_start_fits_the_smallest_card_of_its_class(size: int):
    """And each other one: a card sold with 12 GB shows 11 and a half."""
    request = run_request(api(f"start_here_{size}gb"))
    least = {12: 11, 24: 22, 48: 44}[size]
    cards = [
        card
        for card in known_cards(BUNDLED).values()
        if least * GIB <= card.memory_bytes <= size * GIB
    ]
    assert len(cards) > 3
    assert {card.name: estimate(request, card).verdict for card in cards} == {
        card.name: FITS for card in cards
    }


def test_lightning_runs_as_it_was_trained():
    edit = "Edit-2511-Lightning-4steps"
    for name, steps, lora in (
        ("start_here_24gb", 4, "2512-Lightning-4steps"),
        ("start_here_48gb", 8, "2512-Lightning-8steps"),
        ("lightning_8_steps_nag", 8, "2512-Lightning-8steps"),
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
        paints = {"KSampler", "SamplerCustom"} & {sampler["class_type"]}
        few = few or "turbo" in str(graph.get("load")) or "viggle" in name
        if paints and "micro" not in name and not few:
            model = graph["load"]["inputs"]["model"]
            [family] = [each for start, each in families.items() if model.startswith(start)]
            steps = graph.get("sigmas", sampler)["inputs"]["steps"]
            found[name] = steps, find_member(family).steps
    assert all(steps == own for steps, own in found.values()), found
    assert {own for _, own in found.values()} == {40, 50} and len(found) > 12


def test_those_of_qwen_image_21_take_its_own_schedule():
    few = {"start_here_12gb": ("auto", 8), "qwen_image_21_turbo_nag": ("auto", 8)}
    few |= {"qwen_image_21_viggle_6": ("auto", 6), "micro_qwen_image_21": ("official", 20)}
    for name in OF_21:
        graph = api(name)
        sample, sigmas = graph["sample"]["inputs"], graph["sigmas"]["inputs"]
        assert graph["sigmas"]["class_type"] == "QwenL40S_Sigmas"
        assert sample["sigmas"] == ["sigmas", 0] and sigmas["latent"] == sample["latent_image"]
        assert (sigmas["preset"], sigmas["steps"]) == few.get(name, ("official", 40))
        assert sample["cfg"] == (4.0 if "micro" in name else 1.0)
        source = graph[sigmas["model"][0]]["inputs"]  # behind the LoRA, if there is one
        assert ("lora" in source) == ("lora" in graph)
        file = source.get("lora", source["model"])
        told = schedule_of_file(plain_name(Path(file)), QWEN_IMAGE_21.schedules)
        assert sigmas["preset"] != "auto" or len(told.nodes if told else ()) in (0, sigmas["steps"])
        assert bool(told) == (sigmas["steps"] < 10), name
