"""The page's table of samplers against what was measured."""

import json
from pathlib import Path

from qwen_l40s.bench.step_cache.samplers import table

ROOT = Path(__file__).resolve().parents[2]
MEASURED = ROOT / "bench" / "results" / "step-cache-samplers.json"


def test_the_page_holds_what_was_measured_of_samplers():
    rows = json.loads(MEASURED.read_text(encoding="utf-8"))["rows"]
    page = (ROOT / "docs" / "step_cache.md").read_text(encoding="utf-8")
    section = page.partition("## Samplers and schedulers")[2].partition("\n## ")[0]
    assert [line for line in section.splitlines() if line.startswith("| `")] == table(rows)
    for row in rows:
        refused = row.get("refused")
        assert refused is None or "_cfg_pp" in row["sampler"] or f"`{row['sampler']}`" in section
        assert refused is None or ("branches" in refused) == ("_cfg_pp" in row["sampler"]), row
