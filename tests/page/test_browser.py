"""The workflows, the nodes and their help in ComfyUI's own page, shown by a real browser.

`pytest tests/page/test_browser.py -k gives_the_graph_back --screenshots docs/images` also films the
README's animation.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser_page import GRAPHS, LOAD, PACK, ComfyPage, models_of, put_files, take_files
from comfyui_server import ROOT, Server
from PIL import Image

from qwen_l40s.micro.judge import adherence
from qwen_l40s.micro.scene import parse_prompt
from qwen_l40s.tools.workflows.forms import api_form, tidy

HELP = ROOT / "web" / "docs"
FILM = (960, 600)  # pixels of the README's animation
# What "Export" of the page's menu writes.
EXPORT = "async () => JSON.stringify((await window.app.graphToPrompt()).workflow)"
each_template = pytest.mark.parametrize("name", sorted(GRAPHS))


@pytest.fixture
def film(request: pytest.FixtureRequest) -> Iterator[Callable[[ComfyPage, int], None]]:
    """Takes the page as it is now, to be shown for some milliseconds, where the command line has a
    folder for the film.
    """
    folder = request.config.getoption("--screenshots")
    frames: list[tuple[Image.Image, int]] = []

    def take(page: ComfyPage, milliseconds: int) -> None:
        if folder:
            for setting in ("Comfy.Minimap.Visible", "Comfy.Graph.CanvasInfo"):
                page.set(setting, False)
            picture = Image.open(io.BytesIO(page.page.screenshot())).convert("RGB")
            frames.append((picture.resize(FILM, Image.Resampling.LANCZOS), milliseconds))

    yield take
    if frames:
        (first, *rest), shown = zip(*frames, strict=True)
        folder.mkdir(parents=True, exist_ok=True)
        about = {"append_images": rest, "duration": list(shown), "quality": 70, "method": 6}
        first.save(folder / "micro_run.webp", save_all=True, loop=0, **about)


def by_title(graph: dict[str, Any]) -> dict[str, Any]:
    """A graph whose nodes and links are called by titles: {title: (class, inputs)}."""
    titles = {node_id: node["_meta"]["title"] for node_id, node in graph.items()}
    assert len(set(titles.values())) == len(graph)
    return {
        titles[node_id]: (
            node["class_type"],
            {
                name: (titles[value[0]], value[1]) if isinstance(value, list) else value
                for name, value in node["inputs"].items()
            },
        )
        for node_id, node in graph.items()
    }


def overlapping(boxes: dict[str, list[float]]) -> list[tuple[str, str]]:
    """The pairs of nodes of which one covers a part of the other; boxes are x, y, width, height."""
    titles = list(boxes)
    return [
        (one, other)
        for index, one in enumerate(titles)
        for other in titles[index + 1 :]
        if all(
            boxes[one][axis] < boxes[other][axis] + boxes[other][axis + 2]
            and boxes[other][axis] < boxes[one][axis] + boxes[one][axis + 2]
            for axis in (0, 1)
        )
    ]


def test_the_page_lists_each_workflow_with_its_picture(page: ComfyPage):
    listed = page.server.client.get("/api/workflow_templates").json()
    assert sorted(listed[PACK]) == sorted(GRAPHS)
    page.open_templates(PACK)
    for name in GRAPHS:
        answer = page.server.client.get(f"/api/workflow_templates/{PACK}/{name}.jpg")
        assert (answer.status_code, answer.headers["content-type"]) == (200, "image/jpeg"), name
        page.card(name).scroll_into_view_if_needed()  # pictures are fetched when they come in view
        image = page.card(name).locator("img")
        loaded = "i => i.decode().then(() => [i.naturalWidth, i.naturalHeight])"
        assert tuple(image.evaluate(loaded)) == Image.open(io.BytesIO(answer.content)).size
    assert page.problems == []


def known_nodes(page: ComfyPage, name: str) -> dict[str, Any]:
    """What the server says of its nodes; skips a template that needs a newer ComfyUI."""
    known = page.server.client.get("/object_info").json()
    if lacks := {kind for kind, _ in by_title(GRAPHS[name]).values()} - known.keys():
        pytest.skip(f"this ComfyUI has no {min(lacks)}")
    return known


def check_what_is_saved(page: ComfyPage, name: str) -> None:
    """The page's own API form of a template is the shipped one, and but for the first view the file
    that the page saves becomes the shipped one when `--write` tidies it.
    """
    assert by_title(page.prompt()) == by_title(GRAPHS[name])
    written = tidy(json.loads(page.page.evaluate(EXPORT)))
    assert api_form(written, GRAPHS[name]) == GRAPHS[name]
    shipped = json.loads((ROOT / "workflows" / f"{name}.json").read_text(encoding="utf-8"))
    written["extra"] = shipped["extra"]
    for node, as_shipped in zip(written["nodes"], shipped["nodes"], strict=True):
        if node["type"] == "QwenL40S_StepCache":  # the classic page cuts it to the widgets it shows
            node["size"] = as_shipped["size"]
    assert written == shipped


@each_template
def test_a_template_opens_as_its_api_form(classic: ComfyPage, name: str):
    known_nodes(classic, name)
    classic.open_template(PACK, name)
    classic.draw()
    assert classic.errors_shown() == ""
    nodes = classic.nodes()
    widgets = {node["title"]: node["widgets"] for node in nodes}
    for title, (_, inputs) in by_title(GRAPHS[name]).items():
        for key, value in inputs.items():
            if not isinstance(value, tuple):
                assert (title, key, widgets[title][key]) == (title, key, value)
    check_what_is_saved(classic, name)
    assert overlapping({node["title"]: node["box"] for node in nodes}) == []
    assert classic.problems == []


@each_template
def test_a_template_opens_with_nodes_2_too(modern: ComfyPage, name: str):
    classes = known_nodes(modern, name)
    file = ROOT / "workflows" / f"{name}.json"
    modern.load(file)
    nodes = json.loads(file.read_text(encoding="utf-8"))["nodes"]
    collapsed = {node["title"] for node in nodes if node["flags"].get("collapsed")}
    shown = {node["title"]: node for node in modern.elements()}
    for title, (kind, inputs) in by_title(GRAPHS[name]).items():
        known = classes[kind]["input"]
        options = known.get("required", {}) | known.get("optional", {})
        for key, value in inputs.items():
            if isinstance(value, tuple):  # a wire, whose input may grow with it
                continue
            _, said = (*options[key], {})[:2]  # ComfyUI's older nodes may say nothing
            if said.get("advanced") or title in collapsed:
                continue
            text = shown[title]["widgets"][said.get("display_name") or key]
            if isinstance(value, bool):  # a switch, which has no text
                continue
            found = text if isinstance(value, str) else float(text)
            assert (title, key, found) == (title, key, said.get("labels", {}).get(value, value))
    check_what_is_saved(modern, name)
    assert overlapping({title: node["box"] for title, node in shown.items()}) == []
    assert modern.errors_shown() == ""
    assert modern.problems == []


def test_the_page_names_the_models_that_are_missing(browser: Any, server: Server):
    take_files(server.base)
    try:
        page = ComfyPage(browser, server)
        for name in ("text_to_image", "start_here_24gb", "edit_2511", "controlnet"):
            page.open_template(PACK, name)
            page.page.get_by_test_id("error-overlay-see-errors").click()
            panel = page.page.get_by_test_id("properties-panel")
            panel.get_by_test_id("missing-model-actions").wait_for()
            rows = panel.get_by_test_id("missing-model-importable-rows").inner_text()
            lines = rows.replace("\nDownload", "").split("\n")
            assert dict(zip(lines[::2], lines[1::2], strict=True)) == models_of(GRAPHS[name])
            page.tidy()
        page.close()
    finally:
        put_files(server.base)


def test_run_shows_the_picture_and_the_picture_gives_the_graph_back(
    classic: ComfyPage, browser: Any, server: Server, film: Callable[[ComfyPage, int], None]
):
    classic.open_templates(PACK)
    classic.card("micro_text_to_image").hover()
    film(classic, 2000)
    classic.choose_template("micro_text_to_image")
    film(classic, 2000)
    entry = classic.run(lambda: film(classic, 300))
    assert entry["status"]["status_str"] == "success", entry["status"]
    (image,) = next(o["images"] for o in entry["outputs"].values() if "images" in o)
    source, drawn = classic.picture("Save Image (fast PNG)")
    assert f"filename={image['filename']}&" in source
    file = server.base / "output" / image["filename"]
    saved = Image.open(file)
    prompt = GRAPHS["micro_text_to_image"]["positive"]["inputs"]["text"]
    assert adherence(np.asarray(saved.convert("RGB")), parse_prompt(prompt)).score == 1.0
    expected = np.asarray(saved.convert("RGB").resize(drawn.size), np.float32)
    assert np.abs(np.asarray(drawn, np.float32) - expected).mean() < 8
    nodes = classic.nodes()
    assert overlapping({node["title"]: node["box"] for node in nodes}) == []
    assert classic.problems == []
    film(classic, 4000)

    other = ComfyPage(browser, server)
    other.drop(file)
    assert by_title(other.prompt()) == by_title(json.loads(saved.text["prompt"]))
    places = {node["title"]: node["box"][:2] for node in other.nodes()}
    assert places == {node["title"]: node["box"][:2] for node in nodes}
    assert other.problems == []
    other.close()


def test_the_estimate_shows_its_picture_and_its_words(classic: ComfyPage):
    classic.open_template(PACK, "estimate")
    entry = classic.run()
    assert entry["status"]["status_str"] == "success", entry["status"]
    _, drawn = classic.picture("Estimate Qwen-Image VRAM")
    assert min(drawn.size) > 100
    assert len(drawn.getcolors(drawn.width * drawn.height)) > 10
    (report,) = next(o["text"] for o in entry["outputs"].values() if {"images", "text"} <= o.keys())
    words = classic.page.locator(".widget-text-preview textarea")
    classic.page.wait_for_function("area => area.value", arg=words.element_handle())
    assert words.input_value() == report
    # The words above are in Preview as Text; these are in the node itself.
    classic.page.get_by_text(report.splitlines()[0]).wait_for()
    nodes = classic.nodes()
    assert overlapping({node["title"]: node["box"] for node in nodes}) == []
    heights = "() => window.app.graph.nodes.map(node => node.size[1])"
    before = classic.page.evaluate(heights)
    classic.run()
    classic.picture("Estimate Qwen-Image VRAM")
    assert classic.page.evaluate(heights) == before
    assert classic.problems == []


def plain(markdown: str) -> str:
    return re.sub(r"[`*_]", "", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", markdown)).strip()


def test_the_help_of_each_node_shows(classic: ComfyPage):
    ours = [
        name for name in classic.server.client.get("/object_info").json() if "QwenL40S_" in name
    ]
    for node_id in ours:
        classic.add(node_id)
        classic.page.get_by_test_id("info-button").click()
        text = (HELP / f"{node_id}.md").read_text(encoding="utf-8")
        content = classic.page.locator(".node-help-content [class*=markdown-content]")
        content.get_by_text(plain(text.split("\n\n")[0])).wait_for()
        headings = [plain(line.lstrip("#")) for line in text.splitlines() if line[:1] == "#"]
        assert content.locator("h1, h2, h3, h4").all_inner_texts() == headings
        for image in content.locator("img").all():
            assert image.evaluate("image => image.decode().then(() => image.naturalWidth)") > 0
    # The page asks for the help in its own language first.
    own_language = re.compile(rf"status of 404 .*\(/extensions/{PACK}/docs/\w+/en\.md\)$")
    assert [problem for problem in classic.problems if not own_language.search(problem)] == []


def test_tooltips_show_under_the_pointer(classic: ComfyPage):
    node_id = "QwenL40S_Optimize"
    known = classic.server.client.get(f"/object_info/{node_id}").json()[node_id]
    inputs = known["input"].get("required", {}) | known["input"].get("optional", {})
    classic.add(node_id)
    places = classic.page.evaluate(
        """() => {
            const { graph, canvas } = window.app
            const node = graph.nodes[0], { scale, offset } = canvas.ds
            const onPage = ([x, y]) => [(x + offset[0]) * scale, (y + offset[1]) * scale]
            const widgets = node.widgets.map(w =>
                [w.name, onPage([node.pos[0] + node.size[0] / 2, node.pos[1] + w.last_y + 8])])
            const slots = node.inputs.filter(i => !i.widget).map(i =>
                [i.name, onPage(node.getInputPos(node.inputs.indexOf(i)))])
            return Object.fromEntries([...widgets, ...slots])
        }"""
    )
    assert set(places) == set(inputs)
    for name, (x, y) in places.items():
        classic.page.mouse.move(x + 2, y)
        tooltip = classic.page.locator(".node-tooltip")
        tooltip.get_by_text(inputs[name][1]["tooltip"]).wait_for()


def test_a_step_cache_shows_settings_for_custom_alone(page: ComfyPage):
    settings = {
        **{"budget": 0.6, "head": 0.16, "tail": 0.08, "longest": 2, "gain": 0.5},
    }
    nested = {f"cache.{name}": value for name, value in settings.items()}
    for choice in ("off", "faithful", "balanced", "fast", "custom"):
        page.add("QwenL40S_StepCache")
        page.page.evaluate(
            "choice => { window.app.graph.nodes[0].widgets[0].value = choice }", choice
        )
        page.draw()
        inputs = {"cache": choice, **(nested if choice == "custom" else {})}
        assert page.nodes()[0]["widgets"] == inputs
        assert [node["inputs"] for node in page.prompt().values()] == [inputs]
    # A saved graph with values of one's own opens with them.
    page.page.evaluate("() => { window.app.graph.nodes[0].widgets[1].value = 0.25 }")
    saved = page.page.evaluate("() => window.app.graph.serialize()")
    assert saved["nodes"][0]["widgets_values"] == ["custom", 0.25, *list(settings.values())[1:]]
    page.page.evaluate(LOAD, saved)
    page.draw()
    opened = inputs | {"cache.budget": 0.25}
    assert page.nodes()[0]["widgets"] == opened
    assert [node["inputs"] for node in page.prompt().values()] == [opened]


def test_a_name_is_filled_in_as_of_comfyuis_node(page: ComfyPage):
    """The saved graph keeps it as it was typed; the date is that of Save Image beside it."""
    typed = "%date:yyyy-MM-dd%/%Size.width%x%Size.height% %Save.nothing% %batch_num%"
    page.empty()
    page.page.evaluate(
        """typed => {
            for (const [type, title] of Object.entries({
                EmptyLatentImage: "Size", SaveImage: "Theirs", QwenL40S_SaveImage: "Ours",
            })) {
                const node = window.LiteGraph.createNode(type)
                node.title = title
                window.app.graph.add(node)
                for (const widget of node.widgets) {
                    if (widget.name === "filename_prefix") widget.value = typed
                    if (widget.name === "width") widget.value = 1328
                }
            }
        }""",
        typed,
    )
    page.draw()
    nodes = by_title(page.prompt())
    (ours, theirs) = (nodes[title][1]["filename_prefix"] for title in ("Ours", "Theirs"))
    assert ours == theirs
    assert re.fullmatch(r"\d{4}-\d\d-\d\d/1328x512 %Save.nothing% %batch_num%", ours)
    saved = page.page.evaluate("() => window.app.graph.serialize()")["nodes"]
    values = {node["title"]: node["widgets_values"] for node in saved}
    assert values["Ours"] == values["Theirs"] == [typed]


def test_the_search_finds_each_node_by_its_aliases(page: ComfyPage):
    classes = page.server.client.get("/object_info").json()
    search = page.open_search()
    for node_id, known in classes.items():
        if not node_id.startswith("QwenL40S_"):
            continue
        for alias in known["search_aliases"]:
            search.locator("input").first.fill(alias)
            results = search.get_by_test_id("result-item")
            results.get_by_text(known["display_name"], exact=True).first.wait_for()


def test_the_page_tells_a_node_that_this_version_lacks(page: ComfyPage, tmp_path: Path):
    workflow = json.loads((ROOT / "workflows" / "micro_text_to_image.json").read_text("utf-8"))
    for node in workflow["nodes"]:
        if node["type"] == "QwenL40S_Load":
            node["type"] = "QwenL40S_OfTheFuture"
    file = tmp_path / "newer.json"
    file.write_text(json.dumps(workflow), encoding="utf-8")
    page.drop(file)
    page.page.get_by_text("Missing node: QwenL40S_OfTheFuture").wait_for()
    assert "QwenL40S_OfTheFuture" in page.errors_shown()


def test_a_dropped_api_file_becomes_its_graph(page: ComfyPage):
    name = "micro_text_to_image"
    page.drop(ROOT / "workflows" / "api" / f"{name}.json")
    assert by_title(page.prompt()) == by_title(GRAPHS[name])
    assert page.problems == []


def test_a_graph_of_an_older_version_has_todays_names(page: ComfyPage):
    """Its values are known by their order alone, its wires by the names of that time."""
    page.page.evaluate(
        """() => {
            const { nodeData } = LiteGraph.registered_node_types.QwenL40S_EstimateVRAM
            const { modulation, text_encoder_precision } = nodeData.input.optional
            Object.assign(modulation[1], { older_name: 'tables', older: { on: 'off card' } })
            Object.assign(text_encoder_precision[1], { older_name: 'text_encoder' })
        }"""
    )
    workflow = json.loads((ROOT / "workflows" / "estimate.json").read_text("utf-8"))
    (estimate,) = (node for node in workflow["nodes"] if node["type"] == "QwenL40S_EstimateVRAM")
    values = estimate["widgets_values_named"] | {"modulation": "on"}
    estimate["widgets_values"] = list(values.values())
    name = "text_encoder"
    estimate["inputs"] = [it for it in estimate["inputs"] if it["name"] != f"{name}_precision"]
    estimate["inputs"].append({"name": name, "type": "COMBO", "widget": {"name": name}, "link": 99})
    choice = {"id": 99, "type": "CustomCombo", "pos": [0, 0], "size": [200, 100], "flags": {}}
    choice |= {"outputs": [{"name": "STRING", "type": "COMBO", "links": [99]}], "mode": 0}
    workflow["nodes"].append(choice)
    workflow["links"].append([99, 99, 0, estimate["id"], len(estimate["inputs"]) - 1, "COMBO"])
    page.page.evaluate(LOAD, workflow)
    (found,) = (node for node in page.prompt().values() if "lora_mode" in node["inputs"])
    assert found["inputs"]["modulation"] == "off card"
    assert found["inputs"]["text_encoder_precision"] == ["99", 0]
