"""Tables of README.md, README.zh-CN.md and docs/ are what was predicted, shipped or measured."""

import pytest

from qwen_l40s.planning.rates import measured
from qwen_l40s.tools import readme

PAGES = {path.name: (path, text) for path, text in readme.made().items()}


@pytest.mark.parametrize("name", PAGES)
def test_tables_are_up_to_date(name):
    path, text = PAGES[name]
    assert text == path.read_text("utf-8"), "run `python -m qwen_l40s.tools.readme --write`"


def test_the_figure_draws_what_was_measured():
    assert readme.picture().width == readme.WIDTH


def test_the_promised_accuracy_is_what_was_measured():
    text = (readme.ROOT / "docs" / "estimate.md").read_text(encoding="utf-8")
    for name in ("step_worst", "step_mean", "activations_worst", "weights_worst"):
        assert f"{100 * measured()['fit']['test'][name]:.1f} %" in text
