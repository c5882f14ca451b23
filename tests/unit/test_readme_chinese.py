"""README.zh-CN.md keeps in step with README.md: commands, figures, links and pictures.

Whoever changes one changes the other; words are free, these are not.
"""

import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ENGLISH = (ROOT / "README.md").read_text(encoding="utf-8")
CHINESE = (ROOT / "README.zh-CN.md").read_text(encoding="utf-8").replace("(README.md)", "")
FENCE = re.compile(r"^```.*?^```$", re.M | re.S)


def without_blocks(text):
    return FENCE.sub("", text.replace("(README.zh-CN.md)", ""))


def tables(text):
    """The numbers of each cell of each row; within a cell the languages order them differently."""
    lines = [line for line in without_blocks(text).splitlines() if line.startswith("|")]
    cells = [line.strip("|").split("|") for line in lines]
    return [[sorted(re.findall(r"\d+(?:\.\d+)*", cell)) for cell in row] for row in cells]


@pytest.mark.parametrize(
    "of",
    [
        lambda text: FENCE.findall(text),
        lambda text: Counter(re.findall(r"`[^`\n]+`", without_blocks(text))),
        lambda text: Counter(re.findall(r"\]\(([^)\s]+)\)", without_blocks(text))),
        lambda text: re.findall(r"!\[[^]]*\]\(([^)]+)\)", text),
        lambda text: [
            len(line.split()[0]) for line in without_blocks(text).splitlines() if line[:1] == "#"
        ],
        lambda text: Counter(
            re.findall(r"\d+(?:\.\d+)*(?: GiB| GB| MB|x\d+)?", without_blocks(text))
        ),
    ],
    ids=["blocks", "code", "links", "pictures", "headings", "figures"],
)
def test_both_have_the_same(of):
    assert of(CHINESE) == of(ENGLISH)


def test_each_row_of_each_table_has_the_same_figures():
    assert tables(CHINESE) == tables(ENGLISH)


def test_it_is_chinese():
    assert len(re.findall(r"[\u4e00-\u9fff]", CHINESE)) > 1000
