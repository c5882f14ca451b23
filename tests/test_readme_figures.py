"""The table of cards in the README is what the estimator says, and is printed when it is not."""

from pathlib import Path

from qwen_l40s.charts.figures import duration, usd
from qwen_l40s.planning.cards import find_card, known_cards
from qwen_l40s.planning.constants import measured
from qwen_l40s.planning.estimator import estimate
from qwen_l40s.planning.memory import GIB
from qwen_l40s.planning.wish import Wish

README = (Path(__file__).resolve().parent.parent / "README.md").read_text(encoding="utf-8")
MARK = "<!-- made by tests/test_readme_figures.py -->"
CARDS = (
    *("L40S", "RTX 6000 Ada", "A100 80GB SXM", "H100 SXM", "H200"),
    *("A100 40GB SXM", "RTX 5090", "RTX 4090", "RTX 3090"),
)
HEAD = (
    "| card | 1328x1328, `auto` takes | most on the card, to spare | an image, 20 steps with CFG | "
    "USD an image |\n|---|---|---|---|---|"
)


def row(name):
    found = estimate(Wish(), find_card(name, known_cards()))
    setting = found.option.setting
    peak, spare = found.option.peak_bytes / GIB, found.headroom_bytes / GIB
    rests = "from measured rates" if found.basis.kind == "measured" else "predicted"
    cost = "" if found.usd_per_image is None else usd(found.usd_per_image)
    return (
        f"| {name} | {setting.precision}, modulation {setting.modulation}, text encoder "
        f"{setting.text_encoder_place} | {peak:.1f}, {spare:.1f} GiB | "
        f"{duration(found.image_seconds)}, {rests} | {cost} |"
    )


def test_the_table_of_cards_is_the_estimators():
    table = "\n".join((HEAD, *map(row, CARDS)))
    assert f"{MARK}\n\n{table}\n\n" in README, f"put this behind the mark:\n\n{table}\n"


def test_the_promised_accuracy_is_what_was_measured():
    text = " ".join(README.split())

    def percent(name):
        return f"{100 * measured()['fit']['test'][name]:.1f} %"

    assert f"step times are at most {percent('step_worst')} off" in text
    assert f"({percent('step_mean')} on average)" in text
    assert f"beside the weights at most {percent('beside_worst')}" in text
    assert f"weights {percent('weights_worst')}" in text
