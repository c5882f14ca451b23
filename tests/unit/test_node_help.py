"""Help of the nodes: a page for each, which says what its node has, and tooltips on everything."""

import json
import re
from pathlib import Path

import pytest
from help_pictures import DRAWN, PICTURES, drawn

import qwen_l40s
from qwen_l40s.bench.rows import BASELINE
from qwen_l40s.charts.figures import duration
from qwen_l40s.machine.store import known_cards
from qwen_l40s.planning.card_list import BUNDLED
from qwen_l40s.planning.cards import find_card
from qwen_l40s.planning.estimate import estimate
from qwen_l40s.planning.options import CHOICE_LABELS
from qwen_l40s.planning.request import LORA_MODES, Loras, RunRequest
from qwen_l40s.planning.step_cache import PRESETS, computed_steps
from qwen_l40s.spec.formats import GIB

ROOT = Path(__file__).resolve().parents[2]
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
MOST_BYTES = 40_000
LONGEST = 3_500  # characters: what is read in a narrow panel
HTML = {"br"}


def section(page: str, heading: str) -> str:
    found = re.search(rf"^## {heading}\n(.*?)(?=^## |\Z)", page, re.M | re.S)
    return found[1] if found else ""


def test_every_node_has_a_page_and_every_page_a_node():
    assert list(PAGES) == NODES


def test_the_scripts_that_are_served():
    """ComfyUI's page runs every .js file that it finds there."""
    others = [
        file for file in WEB.rglob("*") if file.is_file() and file.suffix not in (".md", ".png")
    ]
    assert sorted(others) == [WEB / "qwen_l40s.js"]


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
    assert shown <= {file.removeprefix("web/docs/") for file in DRAWN}


@pytest.mark.parametrize("file", DRAWN)
def test_a_picture_is_what_the_charts_draw(file):
    """Another version of PIL may draw letters a little otherwise."""
    image, chops = pytest.importorskip("PIL.Image"), pytest.importorskip("PIL.ImageChops")
    stat = pytest.importorskip("PIL.ImageStat")
    chart = drawn(file).convert("RGB")
    with image.open(ROOT / file) as opened:
        kept = opened.convert("RGB")
    remedy = "run `python tests/help_pictures.py`"
    assert kept.size == chart.size, remedy
    assert max(stat.Stat(chops.difference(kept, chart)).mean) < 1.0, remedy


def test_predicted_figures_are_the_estimators():
    card = find_card("L40S", known_cards(BUNDLED))

    def found(**request):
        return estimate(RunRequest(**request), card)

    def row(words, estimate):
        peak = estimate.option.peak_bytes / GIB
        return f"| {words} | {peak:.1f} GiB | {duration(estimate.image_seconds)} |"

    for words, request in {
        "`auto`: int8": {},
        "`bf16 (most accurate)`, modulation in system RAM": {"precision": "bf16"},
        "`fp8`": {"precision": "fp8"},
    }.items():
        assert row(words, found(steps=50, **request)) in PAGES["QwenL40S_LoadModel"]
    for mode in LORA_MODES[1:]:  # auto is either
        step = duration(found(loras=Loras(1, 32, mode)).step_seconds)
        assert f"| `{mode}` | {step} |" in PAGES["QwenL40S_LoadLora"]
    text = found().phases["text"]
    assert duration(text.seconds) in PAGES["QwenL40S_LoadTextEncoder"]
    assert f"{text.weights / GIB:.1f} in bf16" in PAGES["QwenL40S_LoadTextEncoder"].replace(
        " GiB", ""
    )


def test_steps_that_a_cache_computes_are_the_plans():
    counts = (20, 40, 50)
    whole = (ROOT / "docs" / "few_steps.md").read_text(encoding="utf-8")
    for name in PRESETS:
        computed = [computed_steps(count, name) for count in counts]
        cells = " | ".join(map(str, computed))
        label = CHOICE_LABELS["cache"].get(name, name)
        assert f"| `{label}` | {cells} |" in PAGES["QwenL40S_StepCache"]
        gains = (f"{count / each:.3g}" for count, each in zip(counts, computed, strict=True))
        shown = f"`{label}`" if label == name else f"`{label}` (`{name}`)"
        assert f"| {shown} | {cells} | {', '.join(gains)} times" in whole


def test_measured_figures_are_those_of_the_results():
    """int8 is the rotated one that is made today, which was measured a day later."""
    page = PAGES["QwenL40S_Optimize"]
    for file, names in {
        "forward-h200.json": (BASELINE, "ours bf16", "ours fp8"),
        "forward-h200-8bit.json": ("ours int8",),
    }.items():
        results = json.loads((ROOT / "bench" / "results" / file).read_text(encoding="utf-8"))
        rows = {row["name"]: row["ms"] for row in results["rows"] if row["size"] == "1024x1024"}
        for name in names:
            assert f"{rows[name]:.1f} ms" in page, name


@pytest.mark.parametrize("name", PAGES)
def test_workflows_that_a_page_names_have_the_node(name):
    for workflow in named_workflows(PAGES[name]):
        graph = json.loads((ROOT / "workflows" / f"{workflow}.json").read_text(encoding="utf-8"))
        assert name in {entry["type"] for entry in graph["nodes"]}, workflow


def named_workflows(page: str) -> list[str]:
    return re.findall(r"`(\w+)`", section(page, "Shown in"))
