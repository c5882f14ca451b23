"""What web/qwen_l40s.js shows on our nodes, in both pages: words of a run, and errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from browser_page import GRAPHS, ComfyPage, models_of
from comfyui_server import ROOT, Server

MICRO = ROOT / "workflows" / "micro_text_to_image.json"
# The most that a node grows by, which templates leave room for.
GROWTH = 148
# Decoding fails: the latent has four channels, as of another model.
FOUR_CHANNELS = {
    "1": {"class_type": "QwenL40S_Load", "inputs": GRAPHS["micro_text_to_image"]["load"]["inputs"]},
    "2": {
        "class_type": "EmptyLatentImage",
        "inputs": {"width": 64, "height": 64, "batch_size": 1},
    },
    "3": {
        "class_type": "QwenL40S_VAEDecode",
        "inputs": {"samples": ["2", 0], "vae": ["1", 2]},
    },
    "4": {"class_type": "PreviewImage", "inputs": {"images": ["3", 0]}},
}
EMPTY, SECOND = sorted(
    {
        name
        for graph in GRAPHS.values()
        for name, folder in models_of(graph).items()
        if folder == "diffusion_models"
    }
)[:2]
CHOOSE = """model => {
    const node = window.app.graph.nodes.find(node => node.type === 'QwenL40S_Load')
    node.widgets.find(widget => widget.name === 'model').value = model
}"""


def words(page: ComfyPage) -> dict[str, str]:
    found = """() => Object.fromEntries(window.app.graph.nodes.flatMap(node =>
        (node.widgets ?? []).filter(widget => widget.name === 'qwen_l40s')
            .map(widget => [node.title, widget.element.isConnected ? widget.value : '']))
    )"""
    page.draw()
    return page.page.evaluate(found)


def heights(page: ComfyPage) -> dict[str, float]:
    return {node["title"]: node["box"][3] for node in page.nodes()}


def run(page: ComfyPage) -> dict[str, Any]:
    """Runs the graph; returns what our nodes give the history, by title."""
    entry = page.run()
    assert entry["status"]["status_str"] == "success", entry["status"]
    titles = {str(node["id"]): node["title"] for node in page.nodes()}
    said = {titles[key]: output for key, output in entry["outputs"].items()}
    return {title: output for title, output in said.items() if "qwen_l40s" in output}


def test_a_run_stands_on_its_nodes_and_its_report_behind_them(page: ComfyPage):
    page.load(MICRO)
    before = heights(page)
    for _ in range(2):  # the second time the loader is cached, in a graph that was opened anew
        said = run(page)
        page.page.get_by_role("button", name="Details").first.wait_for()
        assert words(page) == {title: each["qwen_l40s"][0] for title, each in said.items()}
        grown = {title: height - before[title] for title, height in heights(page).items()}
        assert all(0 < grown[title] <= GROWTH for title in said)
        del grown["Save Image (fast PNG)"]  # which ComfyUI makes as high as its picture needs
        assert not any(grown[title] for title in grown if title not in said)
        saved = page.page.evaluate("() => JSON.stringify(window.app.graph.serialize())")
        assert "qwen_l40s" not in {
            value for node in json.loads(saved)["nodes"] for value in node.get("widgets_values", [])
        }
        title, output = next(iter(said.items()))
        page.page.get_by_role("button", name="Details").first.click()
        report = page.page.get_by_role("dialog", name=title).locator("pre")
        assert report.inner_text() == output["text"][0]
        page.page.keyboard.press("Escape")
        report.wait_for(state="detached")
        page.load(MICRO)
        assert words(page) == {}
    assert page.problems == []


def test_what_a_run_did_stands_on_what_changes_the_sampling(page: ComfyPage, tmp_path: Path):
    graph = json.loads((ROOT / "workflows" / "text_to_image_cached.json").read_text("utf-8"))
    nodes = {node["type"]: node for node in graph["nodes"]}
    for name, values in (
        ("QwenL40S_Load", {"model": "micro (bundled)", "text_encoder": "automatic"}),
        ("QwenL40S_Load", {"vae": "automatic"}),
        ("EmptySD3LatentImage", {"width": 64, "height": 64}),
        ("KSampler", {"steps": 12}),
    ):
        named = nodes[name]["widgets_values_named"] | values
        nodes[name] |= {"widgets_values": [*named.values()], "widgets_values_named": named}
    file = tmp_path / "cached.json"
    file.write_text(json.dumps(graph), encoding="utf-8")
    page.load(file)
    optimize, cache = (nodes[f"QwenL40S_{name}"]["title"] for name in ("Optimize", "StepCache"))
    for _ in range(2):
        said = run(page)  # what each will do
        page.page.wait_for_timeout(300)  # a message that must not come
        shown = words(page)
        assert cache not in said and "12" in shown[cache]
        assert shown[optimize] != said[optimize]["qwen_l40s"][0] and "\n" not in shown[optimize]
    assert page.problems == []


def test_an_error_in_a_tab_leaves_the_nodes_of_another_their_size(page: ComfyPage):
    page.load(MICRO)
    page.page.evaluate(CHOOSE, EMPTY)
    page.page.get_by_test_id("queue-button").click()
    page.page.locator(".qwen-l40s-box.error").get_by_text(EMPTY).wait_for()
    page.page.keyboard.press("Escape")
    page.load(ROOT / "workflows" / "micro_report.json")
    widths = """() => window.app.graph.nodes.map(node => node.size[0])"""
    before = page.page.evaluate(widths)
    run(page)
    page.draw()
    assert page.page.evaluate(widths) == before


def test_a_template_opens_in_the_language_of_the_page(browser: Any, server: Server):
    texts = """() => [...window.app.graph.nodes, ...window.app.graph.groups].flatMap(
        each => [each.title, ...(each.type === 'MarkdownNote' ? [each.widgets[0].value] : [])])"""
    page = ComfyPage(browser, server, locale="zh-CN")
    try:
        page.load(MICRO)
        found = page.page.evaluate(texts)
        assert found and [text for text in found if text.isascii()] == []
    finally:
        page.close()


def test_a_report_longer_than_the_window_opens_at_its_first_line(page: ComfyPage):
    page.load(ROOT / "workflows" / "estimate.json")
    run(page)
    page.page.get_by_role("button", name="Details").first.click()
    dialog = page.page.locator("dialog.qwen-l40s-report")
    assert dialog.evaluate("it => [it.scrollTop, it.scrollHeight > it.clientHeight]") == [0, True]
    page.page.keyboard.press("End")  # the focus is where keys scroll
    page.page.wait_for_function("() => document.querySelector('dialog[open]').scrollTop > 0")
    page.page.keyboard.press("Escape")
    dialog.wait_for(state="detached")


def test_a_refused_prompt_says_why_on_the_node(page: ComfyPage):
    page.load(MICRO)
    (title,) = (node["title"] for node in page.nodes() if node["type"] == "QwenL40S_Load")
    for name in (EMPTY, SECOND):  # files that are there, and empty
        page.page.evaluate(CHOOSE, name)
        (refused,) = page.server.post(page.prompt()).json()["node_errors"].values()
        page.page.get_by_test_id("queue-button").click()
        page.page.locator(".qwen-l40s-box.error").get_by_text(name).wait_for()
        assert words(page) == {title: refused["errors"][0]["details"]}


def test_a_run_that_fails_before_its_answer_is_here_says_why_too(page: ComfyPage, tmp_path: Path):
    """As on a slow line: the server's message of the failure overtakes its answer to the prompt."""
    file = tmp_path / "four_channels.json"
    file.write_text(json.dumps(FOUR_CHANNELS), encoding="utf-8")
    page.drop(file)
    (title,) = (node["title"] for node in page.nodes() if node["type"] == "QwenL40S_VAEDecode")
    held: list[Any] = []
    page.page.route("**/prompt", lambda route: held.append((route, route.fetch())))
    page.page.get_by_test_id("queue-button").click()
    box = page.page.locator(".qwen-l40s-box.error")
    box.wait_for(state="attached")
    # Without the answer nothing has the page draw the box, as a pointer that moves would.
    page.page.evaluate("() => window.app.canvas.setDirty(true, true)")
    page.draw()
    box.wait_for()
    with page.page.expect_response("**/prompt"):
        for route, response in held:
            route.fulfill(response=response)
    page.page.unroute("**/prompt")
    page.draw()
    assert "(1, 4, 8, 8)" in words(page)[title]


def test_a_failed_run_says_why_on_the_node_until_one_succeeds(page: ComfyPage, tmp_path: Path):
    file = tmp_path / "four_channels.json"
    file.write_text(json.dumps(FOUR_CHANNELS), encoding="utf-8")
    page.drop(file)
    (title,) = (node["title"] for node in page.nodes() if node["type"] == "QwenL40S_VAEDecode")
    before = heights(page)[title]
    _, error = page.run()["status"]["messages"][-1]
    page.page.locator(".qwen-l40s-box.error").wait_for()
    assert words(page)[title] == error["exception_message"].strip()

    page.page.keyboard.press("Escape")
    page.page.evaluate(
        """() => {
            const { graph } = window.app, byType = type => graph.nodes.find(n => n.type === type)
            byType('EmptyLatentImage').disconnectOutput(0)
            const latent = window.LiteGraph.createNode('EmptySD3LatentImage')
            for (const widget of latent.widgets.slice(0, 2)) widget.value = 64
            graph.add(latent)
            latent.connect(0, byType('QwenL40S_VAEDecode'), 'samples')
        }"""
    )
    said = run(page)
    page.page.get_by_role("button", name="Details").first.wait_for()
    assert words(page) == {title: each["qwen_l40s"][0] for title, each in said.items()}
    assert page.page.locator(".qwen-l40s-box.error").count() == 0
    assert heights(page)[title] - before <= GROWTH


def test_a_run_of_another_client_stands_on_no_open_page(page: ComfyPage):
    page.load(ROOT / "workflows" / "estimate.json")
    done = page.server.run(GRAPHS["estimate"])
    assert done.status == "success"
    page.page.wait_for_timeout(300)  # a message that must not come
    assert words(page) == {}
