"""Predicts each source's times of stock ComfyUI from the other sources, and prints the table.

    python -m qwen_l40s.bench.public

Figures and classes of cards are those of planning/public.json. A card is predicted as the class of
another source: a GeForce as another one of the nearest power, an H100 from an H200's constants.
Classes without another source are left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from ..charts.figures import table
from ..families.registry import find_member
from ..machine.store import known_cards
from ..planning.cards import Card, find_card
from ..planning.phases import Range
from ..planning.rates import hiding, public, rates_of
from ..planning.request import RunRequest
from ..planning.times import forward_seconds, stock_steps
from ..planning.vae_work import vae_seconds

OURS, VAE = "ours", "VAE decode"
# {what of stock ComfyUI a figure is of: what an estimate calls it}
STOCK = {
    "bf16": "bf16",
    "fp8 cast to bf16": "fp8, products in bf16",
    "fp8": "fp8 fast",
    "int8": "int8 ConvRot",
    "int8, int8 attention": "int8 ConvRot, --use-ck-attention",
}
# Of a prompt; where a step has two, about half of both.
TEXT_TOKENS = {"umag": 21, "joaozaokk": 40, "mats2208": 40, "here-h100": 130}
ROOM = 2**40  # all of these ran
HEAD = ("source", "card", "engine", "what", "ms", "predicted", "middle", "inside")


class Row(NamedTuple):
    figure: Mapping[str, Any]
    seconds: Range

    @property
    def inside(self) -> bool:
        return self.seconds.low <= self.figure["ms"] / 1e3 <= self.seconds.high

    @property
    def off(self) -> float:
        return sum(self.seconds) / 2 / (self.figure["ms"] / 1e3) - 1

    def cells(self) -> list[str]:
        figure, (low, high), passes = self.figure, self.seconds, self.figure["passes"]
        what = f"{figure['family']} {figure['size']} {figure['what']}"
        return [
            *(figure[name] for name in HEAD[:3]),
            f"{what}, {passes} passes" if passes > 1 else what,
            f"{figure['ms']:g}",
            f"{1e3 * low:.0f} to {1e3 * high:.0f}",
            f"{self.off:+.0%}",
            "yes" if self.inside else "no",
        ]


def tested() -> Iterator[Mapping[str, Any]]:
    return (figure for figure in public()["figures"] if figure["use"] == "test")


def from_others(figure: Mapping[str, Any]) -> Card | None:
    """Finds the card of a figure with the names of a class that another source gave."""
    card, source = find_card(figure["card"], known_cards()), figure["source"]
    kin = [row for row in public()["classes"] if row["source"] not in ("", source)]
    if any({card.name, *card.also} & {*row["names"]} for row in kin):
        return card
    if not any("GeForce" in name for name in card.also):
        return None
    cards = {row["source"]: known_cards()[row["card"]] for row in tested()}
    geforce = [row for row in reversed(kin) if "GeForce" in row["name"]]
    # The source whose card takes the nearest power.
    likest = min(
        geforce,
        key=lambda row: abs(math.log(cards[row["source"]].tdp_watts / card.tdp_watts)),
        default=None,
    )
    return likest and replace(card, name=likest["names"][0], also=())


def predicted(figure: Mapping[str, Any], card: Card) -> Range:
    slow, fast = hiding(*rates_of(card)[:2])
    side, what, passes = figure["size"], figure["what"], figure["passes"]
    if what == VAE:
        shape = find_member(figure["family"]).vae
        latent = side // shape.pixels, side // shape.pixels
        return Range(*(vae_seconds("decode", shape, latent, 1, it) for it in (fast, slow)))
    request = RunRequest(
        family=figure["family"],
        width=side,
        height=side,
        cfg="two passes" if passes == 2 else "off",
        text_tokens=TEXT_TOKENS.get(figure["source"], 200),
    )
    if figure["engine"] == OURS:
        return Range(*(passes * forward_seconds(request, what, it) for it in (fast, slow)))
    return stock_steps(request, card, slow, fast, ROOM)[STOCK[what]]


def rows() -> Iterator[Row]:
    for figure in tested():
        if (card := from_others(figure)) is not None:
            yield Row(figure, predicted(figure, card))


def main() -> int:
    found = list(rows())
    print("\n".join(table([HEAD, *(row.cells() for row in found)], (4, 5, 6))))
    others = [row for row in found if not row.figure["source"].startswith("here")]
    inside, near = sum(row.inside for row in others), sum(abs(row.off) <= 0.2 for row in others)
    sources = len({row.figure["source"] for row in others})
    print(f"public: n {len(others)} of {sources} sources, {inside} inside, {near} within 20%")
    return 0


if __name__ == "__main__":
    main()
