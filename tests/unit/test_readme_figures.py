"""Tables of cards, settings and loops are what was predicted, shipped or measured, and are printed
when not.
"""

import json
import re
from dataclasses import replace
from itertools import product
from pathlib import Path

from qwen_l40s.charts.figures import duration, tenths, tenths_between, usd
from qwen_l40s.charts.words import changes, moves
from qwen_l40s.machine.store import known_cards
from qwen_l40s.planning.cards import find_card
from qwen_l40s.planning.estimate import estimate
from qwen_l40s.planning.rates import measured
from qwen_l40s.planning.request import RunRequest
from qwen_l40s.step_cache import CHOICES

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
ESTIMATE = (ROOT / "docs" / "estimate.md").read_text(encoding="utf-8")
MARK = "<!-- made by tests/unit/test_readme_figures.py -->"
MARK_SETTINGS = MARK.replace(" -->", ": settings -->")
# What people rent, then what they own, down to 8 GB.
CARDS = (
    *("L40S", "H200", "H100 SXM", "A100 80GB SXM"),
    *("RTX 5090", "RTX 4090", "RTX 3090", "RTX 4080", "RTX 3060 12GB", "RTX 4060"),
)
# Of Qwen-Image-2.1, whose weights are a third.
CARDS_21 = ("L40S", "RTX 4090", "RTX 3060 12GB")
# Of the README: what its readers have.
CARDS_SHORT = ("L40S", "RTX 5090", "RTX 4090", "RTX 3090", "RTX 4080", "RTX 3060 12GB", "RTX 4060")
SHORT = (
    "What `auto` takes, and how long an image takes, predicted: {size} in {steps} steps with CFG; "
    "2.1: {size_21} in {steps_21}\nwithout. [More cards and figures]"
    "(docs/estimate.md#which-settings-on-which-card), among them what a rented card costs."
)
HEAD_SHORT = "| card | Qwen-Image-2512 | Qwen-Image-2.1 |\n|---|---|---|"
# What a checkpoint is run with, as its template has it.
CHECKPOINTS = {
    "Qwen-Image-2512": "text_to_image",
    "2512, Lightning 4 or 8": "start_here_24gb",
    "Edit-2511": "edit_2511",
    "Edit-2511, Lightning": "edit_2511_lightning",
    "Layered": "layered",
    "2.1": "qwen_image_21",
    "2.1-Turbo": "start_here_12gb",
    "2.1, Viggle's LoRA": "qwen_image_21_viggle_6",
}
HEAD_SETTINGS = (
    "| checkpoint | steps | CFG | sampler and schedule | template |\n|---|---|---|---|---|"
)
INTRODUCTION = (
    "One image of the linked workflow: {size}, {steps} steps, CFG (rows of 2.1: {size_21}, "
    "{steps_21} steps, no CFG). Times are predicted, for the\n{measured} from its measurements. "
    "**Tight** means less than 1.5 GiB to spare of a predicted peak. `modulation`: a third of the "
    "weights,\nwhich see only the timestep; 2.1 has none."
)
HEAD = (
    "| card | `precision` | `modulation` | `text_encoder_placement` | to spare | an image | "
    "USD an image | faster |\n|---|---|---|---|---|---|---|---|"
)


def sampled(name):
    """What a workflow samples, as its file says."""
    path = ROOT / "workflows" / "api" / f"{name}.json"
    nodes = json.loads(path.read_text(encoding="utf-8"))
    size, sample = nodes["size"]["inputs"], nodes["sample"]["inputs"]
    assert size["batch_size"] == 1
    steps = nodes.get("sigmas", nodes["sample"])["inputs"]["steps"]
    request = RunRequest(width=size["width"], height=size["height"], steps=steps)
    if "2.1" not in nodes["load"]["inputs"]["model"]:
        assert sample["cfg"] > 1
        return request
    assert sample["cfg"] == 1
    return replace(request, family="qwen-image-2.1", cfg="off")


def workflow(precision):
    """A precision as a link to the workflow that has it."""
    name = "text_to_image_most_accurate" if precision == "bf16" else "text_to_image"
    return f"[{precision}](../workflows/{name}.json)"


def row(name):
    card = find_card(name, known_cards())
    found = estimate(sampled("text_to_image"), card)
    setting = found.option.setting
    return (
        f"| {name} | {workflow(setting.precision)} | {setting.modulation} | "
        f"{setting.text_encoder_place} | {spare(found)} | {duration(found.image_seconds)} | "
        f"{cost(found)} | {faster(found, card)} |"
    )


def row_21(name):
    card = find_card(name, known_cards())
    found = estimate(sampled("qwen_image_21"), card)
    setting = found.option.setting
    return (
        f"| {name}, [2.1](../workflows/qwen_image_21.json) | {setting.precision} |  | "
        f"{setting.text_encoder_place} | {spare(found)} | {duration(found.image_seconds)} | "
        f"{cost(found)} |  |"
    )


def cost(found):
    return "" if found.usd_per_image is None else usd(found.usd_per_image)


def spare(found):
    """Of what the card has to use; what is safer where it is tight."""
    option, usable = found.option, found.option.usable_bytes
    if not found.fits:
        return f"{found.verdict}: {moves(found)}"
    text = f"{tenths_between(option.peak_bytes, usable)} of {tenths(usable)} GiB"
    if not found.tight:
        return text
    if found.safer is None:
        return f"{text}: tight, no safer setting"
    safer = changes(option.setting, found.safer.setting)
    return f"{text}: tight; {tenths_between(found.safer.peak_bytes, usable)} with {safer}"


def faster(found, card):
    """The fastest precision that stays on the card, where it is another one, and how long it takes;
    with the other settings where they differ from what is taken.
    """
    stay = [option.setting.precision for option in found.options if option.resident]
    others = [estimate(replace(found.request, precision=name), card) for name in stay]
    fastest = min(others, key=lambda other: other.image_seconds.middle, default=found)
    if fastest.image_seconds.middle >= found.image_seconds.middle:
        return ""
    setting = fastest.option.setting
    text = f"{workflow(setting.precision)}: {duration(fastest.image_seconds)}"
    same = replace(found.option.setting, precision=setting.precision)
    return ", ".join(filter(None, (text, changes(same, setting), "tight" * fastest.tight)))


def test_the_table_of_cards_is_the_estimators():
    asked, of_21 = sampled("text_to_image"), sampled("qwen_image_21")
    introduction = INTRODUCTION.format(
        size=f"{asked.width}x{asked.height}",
        steps=asked.steps,
        size_21=f"{of_21.width}x{of_21.height}",
        steps_21=of_21.steps,
        measured=measured()["conditions"]["card"].removeprefix("NVIDIA "),
    )
    block = "\n".join((introduction, "", HEAD, *map(row, CARDS), *map(row_21, CARDS_21)))
    assert f"{MARK}\n\n{block}\n\n" in ESTIMATE, f"put this behind the mark:\n\n{block}\n"
    short = SHORT.format(
        size=f"{asked.width}x{asked.height}",
        steps=asked.steps,
        size_21=f"{of_21.width}x{of_21.height}",
        steps_21=of_21.steps,
    )
    rows = [f"| {name} | {takes(name, asked)} | {takes(name, of_21)} |" for name in CARDS_SHORT]
    block = "\n".join((short, "", HEAD_SHORT, *rows))
    assert f"{MARK}\n\n{block}\n\n" in README, f"put this behind the mark:\n\n{block}\n"


def takes(name, request):
    """A card's precision and time, and what moves where it is slow."""
    found = estimate(request, find_card(name, known_cards()))
    text = f"{found.option.setting.precision}, {duration(found.image_seconds)}"
    return text if found.fits else f"{text}: {found.verdict}"


def settings_of(checkpoint, name):
    nodes = json.loads((ROOT / "workflows" / "api" / f"{name}.json").read_text(encoding="utf-8"))
    sample = nodes["sample"]["inputs"]
    if "sigmas" in nodes:
        steps = nodes["sigmas"]["inputs"]["steps"]
        sampler = nodes["sampler"]["inputs"]["sampler_name"]
        schedule = f"**Qwen-Image Scheduler** `{nodes['sigmas']['inputs']['preset']}`"
    else:
        steps, sampler = sample["steps"], sample["sampler_name"]
        schedule = f"{sample['scheduler']}, shift {nodes['shift']['inputs']['shift']:g}"
    if "4 or 8" in checkpoint:
        steps = "4 or 8"
    norm = ", **CFG Rescale**" if "cfg_norm" in nodes else ""
    return (
        f"| {checkpoint} | {steps} | {sample['cfg']:g} | {sampler}, {schedule}{norm} | "
        f"[{name}](workflows/{name}.json) |"
    )


def test_the_settings_of_checkpoints_are_their_templates():
    block = "\n".join((HEAD_SETTINGS, *(settings_of(*pair) for pair in CHECKPOINTS.items())))
    assert f"{MARK_SETTINGS}\n\n{block}\n\n" in README, f"put this behind the mark:\n\n{block}\n"


def test_measured_figures_of_the_readme_stand_in_docs():
    """Tables that tests make are left out; a figure is a number with a point."""
    text = README
    for mark in (MARK, MARK_SETTINGS):
        before, _, after = text.partition(mark)
        text = before + after[after.index("\n## ") :]
    figures = set(re.findall(r"\d+\.\d+(?= ms| s\b| to| \||\*)", text))
    pages = (ROOT / "docs").glob("*.md")
    known = " ".join(page.read_text(encoding="utf-8") for page in pages)
    assert len(figures) > 20
    assert {
        figure for figure in figures if not re.search(rf"(?<![\d.]){figure}(?!\d)", known)
    } == set()


def test_the_promised_accuracy_is_what_was_measured():
    text = " ".join((ROOT / "docs" / "estimate.md").read_text(encoding="utf-8").split())

    def percent(name):
        return f"{100 * measured()['fit']['test'][name]:.1f} %"

    assert f"step times are at most {percent('step_worst')} off" in text
    assert f"({percent('step_mean')} on average)" in text
    assert f"activation memory at most {percent('activations_worst')}" in text
    assert f"weights {percent('weights_worst')}" in text


def test_the_loops_with_a_step_cache_are_what_was_measured():
    found = json.loads((ROOT / "bench" / "results" / "step-cache-h200.json").read_text())
    loops = {(row["model"], row["size"], row["cache"]): row for row in found["rows"]}
    lines = []
    for size, model in product((1024, 1328), ("bf16", "int8")):
        stock = loops["stock", size, "off"]["loop_seconds"]
        cells = [f"{size}x{size}, {model}", f"{stock:.1f}"]
        for cache in CHOICES:
            row = loops.get((model, size, cache), {"loop_seconds": 0})
            seconds = row["loop_seconds"]
            cells.append(f"{seconds:.1f} ({seconds / stock:.2f})" if seconds else "")
        lines.append(f"| {' | '.join(cells)} |")
    page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    assert "\n".join(lines) in page, "\n".join(lines)
    help_page = (ROOT / "web" / "docs" / "QwenL40S_StepCache.md").read_text(encoding="utf-8")
    seconds = (loops["bf16", 1024, cache]["loop_seconds"] for cache in CHOICES)
    said = "{:.1f} s; with `faithful` {:.1f}, `balanced` {:.1f}, `fast` {:.1f}."
    assert said.format(*seconds) in help_page
    cached = [row for row in found["rows"] if "of_count" in row]
    parts = sorted(row["of_count"] for row in cached)
    text = " ".join(page.split())
    assert f"{parts[0]:.2f} to {parts[-1]:.2f} of what the count of computed steps" in text
    skipped = (
        min(row["skipped_ms_median"] for row in cached),
        max(row["skipped_ms_max"] for row in cached),
    )
    assert "A skipped step takes {} ms, at most {}".format(*skipped) in text
