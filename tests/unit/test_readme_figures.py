"""The table of cards in the README is what the estimator says, and is printed when it is not."""

from dataclasses import replace
from pathlib import Path

from qwen_l40s.charts.figures import duration, usd
from qwen_l40s.machine.card_list import known_cards
from qwen_l40s.planning.cards import find_card
from qwen_l40s.planning.estimate import estimate
from qwen_l40s.planning.rates import measured
from qwen_l40s.planning.request import RunRequest
from qwen_l40s.spec import GIB, ON_CARD

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
MARK = "<!-- made by tests/unit/test_readme_figures.py -->"
CARDS = (
    *("L40S", "RTX 6000 Ada", "A100 80GB SXM", "H100 SXM", "H200"),
    *("A100 40GB SXM", "RTX 5090", "RTX 4090", "RTX 3090"),
)
HEAD = (
    "| card | take | `modulation` | `placement` | most on the card, to spare | "
    "an image | USD an image | faster |\n|---|---|---|---|---|---|---|---|"
)


def workflow(precision):
    """A precision as a link to the workflow that has it."""
    path = f"workflows/text_to_image_{precision}.json"
    return f"[{precision}]({path})"


def placement(setting):
    """What the text encoder's loader offers: on the card is what its `auto` does with room."""
    place = setting.text_encoder_place
    return "auto" if place == ON_CARD else place


def seconds(found):
    rests = "from measured rates" if found.basis.kind == "measured" else "predicted"
    return f"{duration(found.image_seconds)}, {rests}"


def row(name):
    card = find_card(name, known_cards())
    found = estimate(RunRequest(), card)
    setting = found.option.setting
    peak, spare = found.option.peak_bytes / GIB, found.headroom_bytes / GIB
    cost = "" if found.usd_per_image is None else usd(found.usd_per_image)
    return (
        f"| {name} | {workflow(setting.precision)} | {setting.modulation} | {placement(setting)} | "
        f"{peak:.1f}, {spare:.1f} GiB | {seconds(found)} | {cost} | {faster(found, card)} |"
    )


def faster(found, card):
    """The fastest precision that stays on the card, where it is another one, and how long it takes;
    with the other two settings where they differ from what is taken.
    """
    stay = [option.setting.precision for option in found.options if option.resident]
    others = [estimate(replace(RunRequest(), precision=name), card) for name in stay]
    fastest = min(others, key=lambda other: other.image_seconds.middle)
    if fastest.image_seconds.middle >= found.image_seconds.middle:
        return ""
    setting = fastest.option.setting
    text = f"{workflow(setting.precision)}: {duration(fastest.image_seconds)}"
    if setting.modulation != found.option.setting.modulation:
        text += f", {setting.modulation}"
    if placement(setting) != placement(found.option.setting):
        text += f", {placement(setting)}"
    return text


def test_the_table_of_cards_is_the_estimators():
    table = "\n".join((HEAD, *map(row, CARDS)))
    assert f"{MARK}\n\n{table}\n\n" in README, f"put this behind the mark:\n\n{table}\n"


def test_the_promised_accuracy_is_what_was_measured():
    text = " ".join((ROOT / "docs" / "estimate.md").read_text(encoding="utf-8").split())

    def percent(name):
        return f"{100 * measured()['fit']['test'][name]:.1f} %"

    assert f"step times are at most {percent('step_worst')} off" in text
    assert f"({percent('step_mean')} on average)" in text
    assert f"activation memory at most {percent('activations_worst')}" in text
    assert f"weights {percent('weights_worst')}" in text
