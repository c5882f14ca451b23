"""Help of the nodes: a page for each, which says what its node has, and tooltips on everything."""

import ast
import json
import re
import shutil
from pathlib import Path

import pytest
from comfyui_host import comfyui_folder, run_in_comfyui
from comfyui_server import Server
from help_pictures import DRAWN, PICTURES

import qwen_l40s
from qwen_l40s.bench.rows import BASELINE
from qwen_l40s.charts.figures import duration
from qwen_l40s.planning.cards import BUNDLED, find_card, known_cards
from qwen_l40s.planning.estimate import estimate
from qwen_l40s.planning.request import Loras, RunRequest
from qwen_l40s.spec import GIB

ROOT = Path(__file__).resolve().parent.parent
WEB = ROOT / qwen_l40s.WEB_DIRECTORY
DOCS = WEB / "docs"
PAGES = {page.stem: page.read_text(encoding="utf-8") for page in sorted(DOCS.glob("*.md"))}
NODES = sorted(
    node
    for file in (ROOT / "nodes").glob("*.py")
    for node in re.findall(r'node_id="(\w+)"', file.read_text(encoding="utf-8"))
)
# What the page's Markdown renderer resolves against the folder of the help.
PICTURE = re.compile(r"!\[([^\]]*)\]\(([^)]*)\)")
OURS = ("ours bf16", "ours fp8", "ours int8")
MOST_BYTES = 40_000
LONGEST = 3_500  # characters: what is read in a narrow panel
# Choices that are not the node's own: files on a disk, cards in a list.
LISTS = {"model", "clip", "vae", "lora", "card"}
HTML = {"br"}
# What a node says is written here.
SPEAKING = ("charts", "hosts", "loaders", "nodes", "optimizations", "planning")


def section(page: str, heading: str) -> str:
    """What stands under a heading; empty where there is none."""
    found = re.search(rf"^## {heading}\n(.*?)(?=^## |\Z)", page, re.M | re.S)
    return found[1] if found else ""


def inputs_on(page: str) -> list[tuple[list[str], str]]:
    """(names, what is said of them) of the list of inputs."""
    lines = re.findall(r"^- ((?:\*\*`\w+`\*\*(?:, )?)+)(.+)$", section(page, "Choose"), re.M)
    return [(re.findall(r"`(\w+)`", names), words) for names, words in lines]


def outputs_on(page: str) -> list[str]:
    """Names in the table of outputs."""
    return re.findall(r"^\| `([^`]+)` \|", section(page, "Outputs"), re.M)


@pytest.fixture(scope="module")
def object_info() -> dict[str, dict]:
    """{node id: what ComfyUI tells its page of it}"""
    return json.loads(run_in_comfyui("comfyui_help.py").splitlines()[-1])


@pytest.fixture(params=NODES)
def node(request, object_info):
    return object_info[request.param]


def inputs_of(node: dict) -> dict[str, list]:
    return {**node["input"].get("required", {}), **node["input"].get("optional", {})}


# --- what needs no ComfyUI


def test_every_node_has_a_page_and_every_page_a_node():
    assert list(PAGES) == NODES


def test_there_is_no_script_in_what_is_served():
    """ComfyUI's page runs every .js file that it finds there."""
    kinds = {file.suffix for file in WEB.rglob("*") if file.is_file()}
    assert kinds == {".md", ".png"}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_short_and_begins_with_its_purpose(name):
    page = PAGES[name]
    assert len(page) <= LONGEST, f"{len(page)} characters"
    assert re.match(r"[A-Z][^\n]+[.]\n\n", page), "the first paragraph is one sentence"
    headings = re.findall(r"^## (.+)$", page, re.M)
    assert headings[:4] == ["Choose", "Cost", "Outputs", "Place"]
    assert set(re.findall(r"</?(\w+)", page)) <= HTML


@pytest.mark.parametrize("name", PAGES)
def test_pictures_of_a_page_are_there_and_small(name):
    for words, target in PICTURE.findall(PAGES[name]):
        # Relative to docs/; a path from the root would not know the folder's name.
        assert words and re.fullmatch(r"images/\w+\.png", target), target
        assert (DOCS / target).stat().st_size <= MOST_BYTES


def test_every_picture_is_on_a_page():
    shown = {target for page in PAGES.values() for _, target in PICTURE.findall(page)}
    assert {f"images/{file.name}" for file in PICTURES.iterdir()} == shown
    assert {f"images/{name}.png" for name in DRAWN} == shown


@pytest.mark.parametrize("name", DRAWN)
def test_a_picture_is_what_the_charts_draw(name):
    """Another version of PIL may draw letters a little otherwise."""
    image, chops = pytest.importorskip("PIL.Image"), pytest.importorskip("PIL.ImageChops")
    stat = pytest.importorskip("PIL.ImageStat")
    drawn = DRAWN[name]().convert("RGB")
    with image.open(PICTURES / f"{name}.png") as file:
        kept = file.convert("RGB")
    remedy = "run `python tests/help_pictures.py`"
    assert kept.size == drawn.size, remedy
    assert max(stat.Stat(chops.difference(kept, drawn)).mean) < 1.0, remedy


@pytest.mark.parametrize("name", PAGES)
def test_sentences_that_a_page_quotes_are_in_the_source(name, sentences):
    quoted = re.findall(r'^\| "([^"]+)"', PAGES[name], re.M)
    assert quoted or name == "QwenL40S_CFGNorm"
    for words in quoted:
        pattern = re.compile(".{1,60}?".join(map(re.escape, words.split("…"))))
        assert any(map(pattern.search, sentences)), f"nothing says {words!r}"


@pytest.fixture(scope="module")
def sentences() -> list[str]:
    """Every text of the package, with a mark where a value is put in."""
    found = []
    for file in (file for layer in SPEAKING for file in (ROOT / layer).rglob("*.py")):
        for text in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(text, ast.JoinedStr):
                parts = (getattr(part, "value", None) for part in text.values)
                found.append("".join(x if isinstance(x, str) else "<value>" for x in parts))
            elif isinstance(text, ast.Constant) and isinstance(text.value, str):
                found.append(text.value)
    return found


def test_predicted_figures_are_the_estimators():
    card = find_card("L40S", known_cards(BUNDLED))

    def found(**request):
        return estimate(RunRequest(**request), card)

    def row(words, estimate):
        peak = estimate.option.peak_bytes / GIB
        return f"| {words} | {peak:.1f} GiB | {duration(estimate.image_seconds)} |"

    for words, request in {
        "`auto`: bf16, modulation off card": {},
        "`int8`, modulation on card": {"precision": "int8"},
        "`fp8`, modulation on card": {"precision": "fp8"},
    }.items():
        assert row(words, found(**request)) in PAGES["QwenL40S_LoadModel"]
    for mode, name in (("merged", "merge"), ("bypass", "bypass")):
        step = duration(found(loras=Loras(1, 32, mode)).step_seconds)
        assert f"| `{name}` | {step} |" in PAGES["QwenL40S_LoadLora"]
    text = found().phases["text"]
    assert duration(text.seconds) in PAGES["QwenL40S_LoadTextEncoder"]
    assert f"{text.weights / GIB:.1f} in bf16" in PAGES["QwenL40S_LoadTextEncoder"].replace(
        " GiB", ""
    )


def test_measured_figures_are_those_of_the_results():
    results = ROOT / "benchmarks" / "results" / "forward-h200.json"
    page = PAGES["QwenL40S_Optimize"]
    for row in json.loads(results.read_text(encoding="utf-8"))["rows"]:
        if row["size"] == "1024x1024" and row["name"] in (BASELINE, *OURS):
            assert f"{row['ms']:.1f}" in page, row["name"]


@pytest.mark.parametrize("name", PAGES)
def test_workflows_that_a_page_names_have_the_node(name):
    for workflow in named_workflows(PAGES[name]):
        graph = json.loads((ROOT / "workflows" / f"{workflow}.json").read_text(encoding="utf-8"))
        assert name in {entry["type"] for entry in graph["nodes"]}, workflow


def named_workflows(page: str) -> list[str]:
    return re.findall(r"`(\w+)`", section(page, "Shown in"))


# --- what ComfyUI itself says of the nodes


def test_comfyui_has_the_same_nodes(object_info):
    assert sorted(object_info) == NODES


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
    shown = [entry[1].get("display_name") or name for name, entry in inputs_of(node).items()]
    assert [name for names, _ in inputs_on(PAGES[node["name"]]) for name in names] == shown


def test_a_page_names_every_output_in_order_and_no_other(node):
    assert outputs_on(PAGES[node["name"]]) == node["output_name"]


def test_a_page_names_every_choice(node):
    for names, words in inputs_on(PAGES[node["name"]]):
        for name in names:
            kind, settings = inputs_of(node)[name]
            if kind != "COMBO" or name in LISTS or is_list_of_files(node, name):
                continue
            missing = [choice for choice in settings["options"] if f"`{choice}`" not in words]
            assert missing == [], name


def is_list_of_files(node: dict, name: str) -> bool:
    return name == "text_encoder" and "Load" in node["name"]


# --- what the page asks the server for


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """In a folder without a dot: ComfyUI's page cuts the folder's name at the first one."""
    base = tmp_path_factory.mktemp("help")
    server = Server(comfyui_folder(), base, "--disable-api-nodes", pack="qwen-l40s-help")
    yield server
    server.stop()
    shutil.rmtree(base)


def test_the_server_gives_pages_and_pictures_where_the_page_looks(server):
    entry = server.client.get("/object_info/QwenL40S_Optimize").json()["QwenL40S_Optimize"]
    folder = entry["python_module"].split(".")[1]  # as the page's extractCustomNodeName
    for name, text in PAGES.items():
        answer = server.client.get(f"/extensions/{folder}/docs/{name}.md")
        assert answer.status_code == 200 and answer.text == text
        assert "text/html" not in answer.headers["content-type"]  # which the page takes for none
        for _, target in PICTURE.findall(text):
            assert server.client.get(f"/extensions/{folder}/docs/{target}").status_code == 200


def test_the_server_names_no_script_of_ours(server):
    assert [path for path in server.client.get("/extensions").json() if "qwen-l40s" in path] == []
