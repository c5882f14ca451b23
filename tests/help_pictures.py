"""The charts that web/docs and docs/ show, drawn by the package.

    python tests/help_pictures.py

writes them anew.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PICTURES = ROOT / "web" / "docs" / "images"
LOAD = 100.0  # images an hour
FAMILY = "qwen-image"  # with the steps that it is painted in
COLOURS = 128  # of the palette; fewer make one of two that a legend tells apart


def estimate_picture():
    """What one image takes of an L40S, as the node draws it."""
    from qwen_l40s.charts.picture import memory_chart
    from qwen_l40s.families.registry import find_member
    from qwen_l40s.machine.store import known_cards
    from qwen_l40s.planning.card_list import BUNDLED
    from qwen_l40s.planning.cards import find_card
    from qwen_l40s.planning.estimate import estimate
    from qwen_l40s.planning.request import RunRequest

    card = find_card("L40S", known_cards(BUNDLED))
    return memory_chart(estimate(RunRequest(steps=find_member(FAMILY).steps), card))


def advise_picture():
    """What an image costs on the cards of the list, as the node draws it."""
    from qwen_l40s.charts.picture import cost_chart
    from qwen_l40s.families.registry import find_member
    from qwen_l40s.machine.store import known_cards
    from qwen_l40s.planning.advise import advise
    from qwen_l40s.planning.card_list import BUNDLED
    from qwen_l40s.planning.request import RunRequest

    request = RunRequest(steps=find_member(FAMILY).steps)
    return cost_chart(advise(LOAD, request, known_cards(BUNDLED).values()))


def forward_picture():
    """What a step takes, as README.md shows it."""
    from qwen_l40s.tools.readme import picture

    return picture().convert("RGB")


# {file: its picture, and how many times as large the picture is}
DRAWN = {
    "web/docs/images/estimate.png": (estimate_picture, 2),
    "web/docs/images/advise.png": (advise_picture, 2),
    "web/docs/images/forward.png": (forward_picture, 2),
    "docs/images/estimate-l40s.png": (estimate_picture, 1),
    "docs/images/advise.png": (advise_picture, 1),
}


def drawn(file: str):
    draw, reduced = DRAWN[file]
    return draw().reduce(reduced)


def main() -> None:
    sys.path.insert(0, str(ROOT / "tests"))
    import conftest  # noqa: F401, which makes qwen_l40s importable

    for file in DRAWN:
        drawn(file).quantize(COLOURS).save(ROOT / file, optimize=True)


if __name__ == "__main__":
    main()
