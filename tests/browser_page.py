"""A headless Chromium that shows ComfyUI's own page, and what a person does there."""

from __future__ import annotations

import importlib.util
import io
import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from comfyui_server import ROOT, Server
from PIL import Image

# The page looks for help under the folder's name up to its first dot.
PACK = "qwen-image-l40s"
GRAPHS = {
    file.stem: json.loads(file.read_text(encoding="utf-8"))
    for file in sorted((ROOT / "workflows" / "api").glob("*.json"))
}
WIDTH, HEIGHT = 1400, 900
WAIT_MS = 600_000
CLICK_MS = 60_000
PANEL_WIDTH = 270
CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
# A page without this pack logs these too: a user who has saved nothing has none of the files, and
# the page's own start asks for its graph too early.
FILES_OF_A_USER = ("/user.css", "/api/userdata")
OF_EACH_START = "ComfyApp graph accessed before initialization"

FRAMES = "async count => { while (count--) await new Promise(requestAnimationFrame) }"
READY = "() => window.app && window.app.vueAppReady && window.app.canvas"
IN_REACH = "([x, y]) => document.elementFromPoint(x, y)?.tagName === 'CANVAS'"
# A name that is open already gets a number.
IS_OPEN = """name => {
    const { filename } = window.app.extensionManager.workflow.activeWorkflow
    return filename === name || filename.startsWith(name + ' (')
}"""
# A text area is shown by an element of its own; the page's own value follows it.
NODES = """() => window.app.graph.nodes.map(node => ({
    id: node.id, type: node.type, title: node.title, box: [...node.boundingRect],
    widgets: Object.fromEntries(
        (node.widgets ?? []).map(w => [w.name, w.element?.value ?? w.value])),
}))"""
# The same of nodes that are elements of the document; each widget as its label and value.
ELEMENTS = """() => [...document.querySelectorAll('[data-node-id]')].map(node => {
    const { x, y, width, height } = node.getBoundingClientRect()
    const { scale } = window.app.canvas.ds
    return {
        title: node.querySelector('[data-testid="node-title"]').innerText,
        box: [x, y, width, height].map(value => Math.round(value / scale)),
        widgets: Object.fromEntries(
            [...node.querySelectorAll('[data-testid="node-widget"]')].map(widget => [
                ...widget.innerText.split('\\n'),
                ...[...widget.querySelectorAll('input, textarea')].map(input => input.value),
            ])),
    }
})"""
FIT = """([titles, zoom]) => {
    const { graph, canvas } = window.app
    const nodes = graph.nodes.filter(node => !titles.length || titles.includes(node.title))
    const boxes = nodes.map(node => node.boundingRect)
    const left = Math.min(...boxes.map(b => b[0])), top = Math.min(...boxes.map(b => b[1]))
    const right = Math.max(...boxes.map(b => b[0] + b[2]))
    const bottom = Math.max(...boxes.map(b => b[1] + b[3]))
    canvas.deselectAll()
    canvas.ds.fitToBounds([left, top, right - left, bottom - top], { zoom })
    canvas.setDirty(true, true)
}"""
# `graph.clear()` would give ids anew, and with them the values of the nodes that had them.
EMPTY = """() => {
    const { graph } = window.app
    for (const item of [...graph.nodes, ...graph.groups]) graph.remove(item)
}"""
# As a click on a template's card: the page brings the whole graph into view.
LOAD = "workflow => window.app.loadGraphData(workflow, true, true, null, {openSource: 'template'})"
# What the canvas draws in one frame, and what stands in elements over it, each with its height on
# the screen. Below a certain zoom the page draws no text of classic nodes at all.
TEXTS = r"""() => {
    const { canvas } = window.app, texts = []
    const context = CanvasRenderingContext2D.prototype, { fillText } = context
    context.fillText = function (text, ...place) {
        const { a, b } = this.getTransform()
        const px = parseFloat(/([\d.]+)px/.exec(this.font)[1]) * Math.hypot(a, b)
        if ([canvas.canvas, canvas.bgcanvas].includes(this.canvas)) texts.push({ text, px })
        return fillText.call(this, text, ...place)
    }
    const info = canvas.show_info
    canvas.show_info = false
    canvas.draw(true, true)
    canvas.show_info = info
    context.fillText = fillText
    for (const part of document.querySelectorAll('[data-node-id], .dom-widget')) {
        for (const element of part.querySelectorAll('*')) {
            const own = [...element.childNodes].filter(child => child.nodeType === Node.TEXT_NODE)
            const typed = element.matches('input, textarea') ? element.value : ''
            const text = (typed || own.map(child => child.data).join('')).trim()
            const { fontSize, visibility } = getComputedStyle(element)
            const { width } = element.getBoundingClientRect()
            if (!text || !width || visibility === 'hidden') continue
            texts.push({ text, px: parseFloat(fontSize) * canvas.ds.scale })
        }
    }
    return texts
}"""
NEW_NODE = "type => void window.app.graph.add(window.LiteGraph.createNode(type))"
# Where the page draws the one picture of a node; 15 pixels below it are for its size in words.
PICTURE = """title => {
    const node = window.app.graph.nodes.find(node => node.title === title)
    const shown = node.widgets.find(widget => widget.name === '$$canvas-image-preview')
    const image = node.imgs?.[0]
    if (!shown || !image?.naturalWidth) return null
    const { scale, offset } = window.app.canvas.ds
    const height = shown.computedHeight - 15
    const fit = Math.min(node.size[0] / image.naturalWidth, height / image.naturalHeight, 1)
    const width = image.naturalWidth * fit, tall = image.naturalHeight * fit
    return {
        source: image.src,
        x: (node.pos[0] + (node.size[0] - width) / 2 + offset[0]) * scale,
        y: (node.pos[1] + shown.y + (height - tall) / 2 + offset[1]) * scale,
        width: width * scale, height: tall * scale,
    }
}"""


def models_of(graph: dict[str, Any]) -> dict[str, str]:
    nodes = (node["_meta"].get("models", []) for node in graph.values())
    return {model["name"]: model["directory"] for models in nodes for model in models}


def put_files(base: Path) -> None:
    """Empty files in the places of the models, which the page only lists, and the pictures."""
    for graph in GRAPHS.values():
        for name, folder in models_of(graph).items():
            file = base / "models" / folder / name
            file.parent.mkdir(parents=True, exist_ok=True)  # ComfyUI makes some of these itself
            file.touch()
        for node in graph.values():
            if node["class_type"] == "LoadImage":
                Image.new("RGB", (64, 64), "teal").save(base / "input" / node["inputs"]["image"])


def take_files(base: Path) -> None:
    for graph in GRAPHS.values():
        for name, folder in models_of(graph).items():
            (base / "models" / folder / name).unlink(missing_ok=True)


def missing() -> str | None:
    """What the browser tests lack, in one line that says what to install."""
    if importlib.util.find_spec("playwright") is None:
        return "no Playwright that drives a browser: pip install playwright"
    if not any(map(shutil.which, CHROMIUM)):
        return "no Chromium on the PATH: apt install chromium"
    return None


@contextmanager
def chromium() -> Iterator[Any]:
    """The system's Chromium without a window; Playwright's own browser is not downloaded."""
    from playwright.sync_api import sync_playwright

    program = next(filter(None, map(shutil.which, CHROMIUM)))
    with sync_playwright() as playwright:
        # Chromium refuses its sandbox to root, and a container often runs as root.
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


class ComfyPage:
    """ComfyUI's page as a new user first sees it: no settings, no stored workflow.

    Args:
        settings: of the page by their ids, set before it starts; the rest stay at their defaults.
        size: of the window, width and height.
        address: of the page, else the server's own.
        locale: the language of the browser.

    Attributes:
        page: Playwright's page.
        problems: what the page has logged as errors.
    """

    def __init__(
        self,
        browser: Any,
        server: Server,
        settings: dict[str, Any] | None = None,
        size: tuple[int, int] = (WIDTH, HEIGHT),
        address: str = "",
        locale: str = "en-US",
    ):
        self.server = server
        stored = server.base / "user" / "default" / "comfy.settings.json"
        stored.unlink(missing_ok=True)
        if settings:
            server.client.post("/settings", json=settings).raise_for_status()
        self.problems: list[str] = []
        self.width, self.height = size
        viewport = {"width": self.width, "height": self.height}
        self.context = browser.new_context(viewport=viewport, locale=locale)
        self.page = self.context.new_page()
        self.page.set_default_timeout(WAIT_MS)
        self.page.on("console", self._logged)
        self.page.on("pageerror", lambda error: self.problems.append(f"not caught: {error}"))
        self.page.goto(address or f"http://127.0.0.1:{server.port}/")
        self.page.wait_for_function(READY)
        # A new user is greeted with the templates.
        self.templates.wait_for()
        self.page.keyboard.press("Escape")
        self.wait_for_canvas()

    def wait_for_canvas(self) -> None:
        """Waits until nothing above the canvas, such as a fading dialog, would catch a drop."""
        self.page.wait_for_function(IN_REACH, arg=[self.width // 2, self.height // 2])

    def close(self) -> None:
        self.context.close()

    def tidy(self) -> None:
        """Closes what a test left open, empties the canvas and forgets what the page has logged."""
        self.page.keyboard.press("Escape")
        self.empty()  # a node's text area catches a drop too
        self.set("Comfy.RightSidePanel.IsOpen", False)
        self.wait_for_canvas()
        self.problems.clear()

    def set(self, setting: str, value: Any) -> None:
        change = "([setting, value]) => window.app.extensionManager.setting.set(setting, value)"
        self.page.evaluate(change, [setting, value])

    def _logged(self, message: Any) -> None:
        if message.type != "error":
            return
        address = urlsplit(message.location.get("url", ""))
        # The page also asks hosts that a machine without internet does not reach.
        if address.hostname not in (None, "127.0.0.1"):
            return
        not_there = "status of 404" in message.text
        if not_there and address.path.startswith(FILES_OF_A_USER):
            return
        if message.text != OF_EACH_START:
            self.problems.append(f"{message.text} ({address.path})")

    @property
    def templates(self) -> Any:
        bar = self.page.get_by_test_id("template-filter-bar")
        return self.page.get_by_role("dialog").filter(has=bar)

    def card(self, name: str) -> Any:
        """A template's card; the page makes the 25th when the 24th comes in view."""
        card = self.templates.get_by_test_id(f"template-workflow-{name}")
        made = self.templates.get_by_test_id(re.compile("^template-workflow-"))
        made.first.wait_for()
        while not card.count():
            made.last.hover()
            self.page.mouse.wheel(0, self.height)
        return card

    def open_templates(self, pack: str) -> None:
        self.page.locator(".templates-tab-button").click()
        self.templates.get_by_text(pack, exact=True).click()

    def open_template(self, pack: str, name: str) -> None:
        self.open_templates(pack)
        self.choose_template(name)

    def choose_template(self, name: str) -> None:
        from playwright.sync_api import TimeoutError as TooLate

        for _ in range(WAIT_MS // CLICK_MS):  # the page can lose a click while it fills the list
            self.card(name).click()
            with suppress(TooLate):
                self.templates.wait_for(state="hidden", timeout=CLICK_MS)
                break
        self.page.wait_for_function(IS_OPEN, arg=name)
        self.fit()

    def load(self, file: Path) -> None:
        """Opens a workflow file by the page's own function, which takes a fifth of the time."""
        self.open_as_template(file)
        self.fit()

    def open_as_template(self, file: Path) -> None:
        """The same, and the view stays as the page chooses it for a template."""
        self.page.evaluate(LOAD, json.loads(file.read_text(encoding="utf-8")))
        self.draw()

    @property
    def scale(self) -> float:
        return self.page.evaluate("() => window.app.canvas.ds.scale")

    def texts(self) -> list[dict[str, Any]]:
        """Each text that the graph shows now, and its height on the screen: text, px."""
        return self.page.evaluate(TEXTS)

    def drop(self, file: Path) -> None:
        """Drops a file on the canvas, as a file manager would."""
        session = self.context.new_cdp_session(self.page)
        data = {"items": [], "files": [str(file)], "dragOperationsMask": 1}
        for event in ("dragEnter", "dragOver", "drop"):
            place = {"x": self.width // 2, "y": self.height // 2}
            session.send("Input.dispatchDragEvent", {"type": event, "data": data, **place})
        session.detach()
        self.page.wait_for_function(IS_OPEN, arg=file.stem)
        self.fit()

    def fit(self, *titles: str, zoom: float = 0.8) -> None:
        """Brings nodes, or all of the graph, into view: the page draws nothing of the others."""
        self.page.evaluate(FIT, [titles, zoom])
        self.draw()

    def draw(self) -> None:
        """Waits for a few frames, in which nodes take their sizes: a busy machine draws late."""
        self.page.evaluate(FRAMES, 12)

    def nodes(self) -> list[dict[str, Any]]:
        """Each node: id, type, title, box (x, y, width, height) and widgets' values by name."""
        return self.page.evaluate(NODES)

    def elements(self) -> list[dict[str, Any]]:
        """The same of the nodes that Nodes 2.0 shows, without id and type; values are text."""
        here = "n => document.querySelectorAll('[data-node-id]').length === n"
        self.page.wait_for_function(here, arg=len(self.nodes()))
        return self.page.evaluate(ELEMENTS)

    def prompt(self) -> dict[str, Any]:
        """The API form that the page would queue."""
        return self.page.evaluate("async () => (await window.app.graphToPrompt()).output")

    def empty(self) -> None:
        self.page.evaluate(EMPTY)

    def add(self, node_id: str) -> None:
        """Puts a new node on an empty canvas, selected, to the left of where its help opens."""
        self.empty()
        self.page.evaluate(NEW_NODE, node_id)
        self.draw()
        self.fit(zoom=0.6)
        self.page.evaluate(
            """aside => {
                const { graph, canvas } = window.app
                canvas.ds.offset[0] -= aside / canvas.ds.scale
                canvas.selectNode(graph.nodes[0])
            }""",
            PANEL_WIDTH / 2,
        )

    def open_search(self) -> Any:
        """Opens the search for nodes by a double click on the empty canvas."""
        self.empty()
        for x in (
            self.width // 3,
            self.width // 2,
        ):  # until the pointer moves, the page sees the old node
            self.page.mouse.move(x, self.height // 2)
            self.draw()
        search = self.page.get_by_role("search")
        for _ in range(20):  # a busy page takes the two for single clicks
            self.page.mouse.dblclick(self.width // 2, self.height // 2)
            self.page.wait_for_timeout(1000)
            if search.is_visible():
                break
        return search

    def run(self, meanwhile: Callable[[], None] = lambda: None) -> dict[str, Any]:
        """Presses Run, waits for the end and returns the history entry."""
        with self.page.expect_response(re.compile("/api/prompt$")) as sent:
            self.page.get_by_test_id("queue-button").click()
        assert sent.value.ok, sent.value.text()
        prompt_id = sent.value.json()["prompt_id"]
        for _ in range(900):
            entry = self.server.client.get(f"/history/{prompt_id}").json().get(prompt_id)
            if entry:
                return entry
            meanwhile()
            self.page.wait_for_timeout(100)
        raise AssertionError(f"the run did not end:\n{self.server.log.read_text()[-4000:]}")

    def picture(self, title: str) -> tuple[str, Image.Image]:
        """The address of the picture in a node, and how the page draws it."""
        self.page.wait_for_function(PICTURE, arg=title)
        # A node grows for its picture in a frame that a busy machine draws late.
        for _ in range(20):
            self.fit(title)
            place = self.page.evaluate(PICTURE, title)
            if place["y"] + place["height"] <= self.page.viewport_size["height"]:
                break
        source = place.pop("source")
        return source, Image.open(io.BytesIO(self.page.screenshot(clip=place))).convert("RGB")

    def errors_shown(self) -> str:
        """What the page's error panel says, empty where it shows none."""
        overlay = self.page.get_by_test_id("error-overlay")
        return overlay.inner_text() if overlay.is_visible() else ""
