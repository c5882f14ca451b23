"""What docs/step_cache.md says of step caches is what was measured."""

import json
from pathlib import Path

import pytest

from qwen_l40s.bench.step_cache import THRESHOLDS
from qwen_l40s.optimizations.step_cache import MOST_ASTRAY

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def results():
    path = ROOT / "bench" / "results" / "step-cache-micro.json"
    return json.loads(path.read_text(encoding="utf-8"))


def test_docs_hold_the_table_of_the_results(results):
    docs = (ROOT / "docs" / "step_cache.md").read_text(encoding="utf-8")
    cached = [row for row in results["rows"] if "preset" in row]
    for row in cached:
        shown = f"{100 * row['mean']:.2f} / {100 * row['worst_decile']:.2f}"
        if abs(row["computed"] - row["planned"]) >= 0.5:
            shown += f" ({row['computed']:.1f})"
        (line,) = [line for line in docs.splitlines() if line.startswith(f"| {row['rule']} |")]
        assert f" {shown} |" in line
    for row in (row for row in cached if row["rule"] == "EasyCache"):
        known = THRESHOLDS[row["steps"]][row["preset"]]
        assert known == pytest.approx(row["threshold"], rel=0.01)
    without = {f"{row['right']:.1f}" for row in results["rows"] if row["rule"] == "none"}
    right = [row["right"] for row in cached]
    words = " ".join(docs.split())
    assert f"of 100, {min(right):.1f} to {max(right):.1f} have the" in words
    assert [f"and {share} without a cache" in words for share in without] == [True]
    medians = [row["estimate_by_error"]["median"] for row in cached if row["rule"] == "ours"]
    assert f"{min(medians):.1f} to {max(medians):.1f} times the true one" in words


def rows_of_samplers(rows):
    """The rows of the page: what is read of each sampler, and its errors."""

    def short(reading):
        return f"{reading:.0f}" if reading >= 10 else f"{reading:.2g}"

    for sampler in dict.fromkeys(row["sampler"] for row in rows if "readings" in row):
        found = [row for row in rows if row["sampler"] == sampler and "readings" in row]
        largest = {row["scheduler"]: max(row["readings"]) for row in found if row["steps"] == 20}
        simple = largest.pop("simple")
        spread = f"{short(min(largest.values()))} to {short(max(largest.values()))}"
        cells = [f"`{sampler}`", "works" if simple <= MOST_ASTRAY else "steps aside"]
        cells += [short(simple), spread]
        for steps in (20, 50):
            errors = [
                f"{row['error']:.2g} / {row['error_of_fewer_steps']:.2g}"
                for row in found
                if (row["scheduler"], row["steps"]) == ("simple", steps) and "error" in row
            ]
            cells += errors or [""]
        yield f"| {' | '.join(cells)} |"


def test_the_page_holds_what_was_measured_of_samplers():
    path = ROOT / "bench" / "results" / "step-cache-samplers.json"
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    page = (ROOT / "docs" / "step_cache.md").read_text(encoding="utf-8")
    section = page.partition("## Samplers and schedulers")[2].partition("\n## ")[0]
    shown = [line for line in section.splitlines() if line.startswith("| `")]
    assert shown == list(rows_of_samplers(rows))
    for row in rows:
        refused = row.get("refused")
        assert refused is None or "_cfg_pp" in row["sampler"] or f"`{row['sampler']}`" in section
        assert refused is None or ("branches" in refused) == ("_cfg_pp" in row["sampler"]), row
