"""What the README and docs/ name is there: files, nodes, workflows, commands, messages."""

import ast
import json
import re
from collections import defaultdict
from pathlib import Path

import pytest

from qwen_l40s.cli import COMMANDS
from qwen_l40s.planning.options import CHOICE_LABELS, LABELS
from qwen_l40s.tools.workflows.notes import published

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
NODES, COMMAND = ROOT / "docs" / "nodes.md", ROOT / "docs" / "command.md"
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [README, ROOT / "README.zh-CN.md", ROOT / "CONTRIBUTING.md", *DOCS]
LINK = re.compile(r"\]\((?!https?:)([^)\s#]*)(?:#([^)\s]+))?\)")
MODEL_FOLDERS = ("diffusion_models", "text_encoders", "vae", "loras", "controlnet")


def prose(page):
    """A page without its fenced blocks, where brackets and # mean other things."""
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)


def anchors(page):
    """How a Markdown page names its headings in addresses."""
    titles = re.findall(r"^#+ (.*)$", prose(page), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def section(title, page=README):
    """A page's text under a heading, to the next heading."""
    text = page.read_text(encoding="utf-8")
    found = re.search(rf"^#+ {re.escape(title)}\n(.*?)(?=^#|\Z)", text, re.M | re.S)
    assert found, f"{page.name} has no heading {title!r}"
    return found[1]


def rows(title, page):
    """The cells of the table under a heading, without its head."""
    lines = [line for line in section(title, page).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_of_the_repository(page):
    for path, anchor in LINK.findall(prose(page)):
        target = (page.parent / path).resolve() if path else page
        assert target.is_relative_to(ROOT) and target.exists(), f"{page.name} links to {path}"
        if anchor:
            assert anchor in anchors(target), f"{page.name} links to {path}#{anchor}"


def defined(path):
    """The names of a module, and those of its classes as `Class.name`."""

    def names(body, before=""):
        for node in body:
            targets = node.targets if isinstance(node, ast.Assign) else [node]
            for target in targets:
                name = getattr(target, "name", getattr(target, "id", None))
                yield before + str(name)
            if isinstance(node, ast.ClassDef):
                yield from names(node.body, f"{node.name}.")

    return set(names(ast.parse((ROOT / path).read_text(encoding="utf-8")).body))


def test_each_function_of_the_paths_through_the_code_exists():
    steps = re.findall(r"^\d+\. (.*):", section("Four paths through the code", PAGES[2]), re.M)
    assert len(steps) > 20
    for step in steps:
        path, *found = re.findall(r"`([^`]+)`", step)
        for name in found:
            if name.endswith(".py"):
                path = name
            else:
                assert name in defined(path), f"{path} has no {name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_addresses_are_of_models_and_of_comfyui_alone(page):
    found = re.findall(r"https?://([\w.-]+)", page.read_text(encoding="utf-8"))
    hosts = {host for host in found if not host.startswith("10.0.0.")}  # a private network
    assert hosts <= {"huggingface.co", "github.com", "127.0.0.1"}


def test_the_readme_is_short():
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 130


def test_every_page_of_docs_is_linked():
    """Pages for users from the README, pages for developers from any page."""
    for page in DOCS:
        sources = PAGES if page.parent.name == "dev" else [README]
        linked = {
            (source.parent / path).resolve()
            for source in sources
            if source != page
            for path, _ in LINK.findall(prose(source))
        }
        assert page in linked, page.name


def test_the_table_of_nodes_holds_each_node():
    ids = set()
    for file in (ROOT / "nodes").glob("*.py"):
        ids |= set(re.findall(r'node_id="(\w+)"', file.read_text(encoding="utf-8")))
    assert ids
    assert set(re.findall(r"web/docs/(\w+)\.md", section("Nodes", NODES))) == ids


def test_the_table_of_commands_holds_each_command():
    named = re.findall(r"^\| `qwen-l40s ([\w-]+)", section("Commands", COMMAND), re.M)
    assert set(named) == set(COMMANDS)


def test_the_table_of_files_is_what_the_workflows_name():
    text = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    table = [line for line in text.splitlines() if re.match(r"\| \d+ \|", line)]
    expected = [
        f"| {number} | [{file.name}]({file.url}) | {file.size} | `models/{file.directory}` |"
        for number, file in enumerate(published().values(), 1)
    ]
    assert table == expected
    named = set()
    for path in (ROOT / "workflows" / "api").glob("*.json"):
        for node in json.loads(path.read_text(encoding="utf-8")).values():
            named |= {link["name"] for link in node["_meta"].get("models", ())}
    assert named == set(published())
    for file in published().values():
        assert file.url.startswith("https://huggingface.co/")
        assert file.url.endswith(f"/{file.name}")
        assert file.directory in MODEL_FOLDERS
    sizes = {file.size for file in published().values()} - {"not known"}
    assert all(re.fullmatch(r"\d+\.\d GiB", size) for size in sizes)


def test_the_table_of_workflows_holds_each_with_its_files():
    numbers = {name: number for number, name in enumerate(published(), 1)}
    needed = defaultdict(set)
    for path in (ROOT / "workflows" / "api").glob("*.json"):
        graph = json.loads(path.read_text(encoding="utf-8"))
        links = [link for node in graph.values() for link in node["_meta"].get("models", ())]
        needed[path.stem] = {numbers[link["name"]] for link in links}
    expected = {
        name: ", ".join(map(str, sorted(files))) or "none" for name, files in needed.items()
    }
    found = {
        name: cells[2]
        for cells in rows("Workflows", NODES)
        for name in re.findall(r"\[(\w+)\]", cells[0])
    }
    assert found == expected
    assert {path.stem for path in (ROOT / "workflows").glob("*.json")} == set(expected)


def test_the_table_of_names_in_api_files_holds_each():
    text = section("Names in API files", NODES)
    names = {*LABELS, *LABELS.values()}
    for labels in CHOICE_LABELS.values():
        names |= {*labels, *labels.values()}
    steps = {"budget", "head", "tail", "longest", "gain"}  # of `cache`
    names = {f"cache.{name}" if name in steps else name for name in names}
    assert names <= {*re.findall(r"`([^`]+)`", text)}
