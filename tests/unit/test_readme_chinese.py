"""README.zh-CN.md keeps in step with README.md: commands, figures, links and pictures."""

import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ENGLISH = (ROOT / "README.md").read_text(encoding="utf-8").replace("(README.zh-CN.md)", "")
CHINESE = (ROOT / "README.zh-CN.md").read_text(encoding="utf-8").replace("(README.md)", "")


PATTERNS = {
    "blocks": r"(?ms)^```.*?^```",
    "code": r"`[^`\n]+`",
    "links": r"\]\(([^)\s]+)\)",
    "headings": r"(?m)^#+ ",
    "figures": r"\d+(?:\.\d+)*(?: (?:GiB|GB))?",
}


@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
def test_both_have_the_same(pattern):
    assert Counter(re.findall(pattern, CHINESE)) == Counter(re.findall(pattern, ENGLISH))
