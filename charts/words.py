"""An estimate and an advice in words: the answer first, then what it rests on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from ..planning.disk import GB
from ..planning.estimate import Phase, Range
from ..planning.memory import GIB, format_gib
from ..planning.phases import KEPT_FREE_BYTES
from ..planning.wish import Wish
from .figures import between, dollars, duration, folded, table, usd

if TYPE_CHECKING:
    from ..planning.advise import Advice
    from ..planning.crossover import Comparison
    from ..planning.estimator import Estimate
    from ..planning.offers import Market
    from ..planning.plan import Option

PHASE_NAMES = {
    "load": "load",
    "text": "text encode",
    "tables": "table build",
    "sampling": "sampling",
    "decode": "decode",
}
CFG_WORDS = {
    "two passes": "CFG in two passes",
    "one pass": "CFG in one pass",
    "off": "CFG off",
}
PHASE_COLUMNS = (
    *("on card", "weights", "activations", "workspace", "context", "time"),
    "also there",
)
ADVICE_COLUMNS = ["", "card", "image", "cards", "busy", "USD an image", "when always busy"]


def estimate_text(estimate: Estimate) -> str:
    """What `qwen-l40s estimate` and the node print: whether it fits, then the figures behind it."""
    blocks = [
        [verdict(estimate), heading(estimate)],
        table(_phase_rows(estimate.phases.values()), right=range(1, 7)),
        [
            line
            for phase in estimate.phases.values()
            if phase.note
            for line in folded(f"{PHASE_NAMES[phase.name]}: {phase.note}", "")
        ],
        [*table(_figures(estimate)), *folded(basis_text(estimate), "")],
        ["plan, the recommended first", *_plan_lines(estimate.options)],
        [line for note in estimate.notes for line in folded(f"note: {note}", "")],
    ]
    return "\n\n".join("\n".join(lines) for lines in blocks if lines)


def verdict(estimate: Estimate) -> str:
    """Whether it fits, by how much, and where it is tightest: one sentence."""
    tightest = max(estimate.phases.values(), key=lambda phase: phase.card_bytes)
    held = f"{format_gib(tightest.card_bytes)} of {format_gib(usable_bytes(estimate))} to use"
    when = PHASE_NAMES[tightest.name]
    if estimate.fits:
        return f"Fits: {held}, in {when}; {format_gib(estimate.headroom_bytes)} to spare."
    moved = estimate.option.moved_bytes
    how = f"; the host moves {format_gib(moved)} to the card in every forward pass" if moved else ""
    return f"Does not fit: {held}, in {when}{how}."


def usable_bytes(estimate: Estimate) -> int:
    """Of the card, less what the host keeps free."""
    return max(0, estimate.card.memory_bytes - KEPT_FREE_BYTES)


def heading(estimate: Estimate) -> str:
    """The card and what runs on it, in one line."""
    wish, setting = estimate.wish, estimate.option.setting
    return f"{estimate.card.name}: {wish.family}, {setting.precision}, {wish_text(wish)}"


def wish_text(wish: Wish) -> str:
    """Size, batch and what else differs from a plain picture."""
    words = [f"{wish.width}x{wish.height}", f"batch {wish.batch}", f"{wish.steps} steps"]
    words.append(CFG_WORDS[wish.cfg])
    if wish.references:
        words.append(_many(wish.references, "reference"))
    if wish.layers:
        words.append(_many(wish.layers, "layer"))
    if wish.loras.count:
        words.append(
            f"{_many(wish.loras.count, 'LoRA')} of rank {wish.loras.rank}, {wish.loras.mode}"
        )
    if wish.controlnet_bytes:
        words.append(f"ControlNet of {format_gib(wish.controlnet_bytes)}")
    return ", ".join(words)


def basis_text(estimate: Estimate) -> str:
    """Whether the times were measured or predicted, and from what."""
    return f"Times {estimate.basis.text}"


def advise_text(
    market: Market, advices: Sequence[Advice], comparisons: Sequence[Comparison]
) -> str:
    """What `qwen-l40s advise` and the node print: the cheapest card first, then all of them.

    Args:
        advices: of `market.offers`, ranked.
        comparisons: of the card that the package is about with others.
    """
    blocks = [
        [_cheapest(advices)],
        table([ADVICE_COLUMNS, *map(_advice_row, _numbered(advices))], right=(0, 2, 3, 4, 5, 6)),
        [f"{advice.offer.card.name}: {_setting_line(market, advice)}" for advice in advices],
        [comparison_text(found) for found in comparisons],
        _without_offer(market),
    ]
    return "\n\n".join("\n".join(lines) for lines in blocks if lines)


def comparison_text(found: Comparison) -> str:
    """Which of two cards is cheaper at which load, and how sure that is."""
    return f"{found.first.card.name} against {found.second.card.name}: {found.sentence}."


def _numbered(advices: Sequence[Advice]) -> Iterator[tuple[int, Advice]]:
    return enumerate(advices, 1)


def _cheapest(advices: Sequence[Advice]) -> str:
    fitting = [advice for advice in advices if advice.offer.fits]
    if not fitting:
        return "None of the cards with a price holds it: choose a smaller size, batch or precision."
    best = fitting[0]
    cards = _many(best.middle_cards, best.offer.card.name)
    return (
        f"Cheapest for {best.images_per_hour:,.10g} images an hour: {cards} at "
        f"${dollars(best.offer.usd_per_hour)} an hour, {usd(best.usd_per_image)} an image."
    )


def _advice_row(numbered: tuple[int, Advice]) -> list[str]:
    number, advice = numbered
    offer = advice.offer
    return [
        str(number) if offer.fits else "-",
        offer.card.name,
        duration(offer.seconds),
        between(Range(*advice.cards), lambda count: f"{count:.0f}"),
        f"{advice.utilisation:.0%}",
        usd(advice.usd_per_image),
        usd(offer.full_usd_per_image),
    ]


def _setting_line(market: Market, advice: Advice) -> str:
    offer = advice.offer
    kind = _resting_on(market.estimates[offer.card.name])
    fits = "" if offer.fits else "does not fit; "
    source = market.prices[offer.card.name]
    return f"{fits}{offer.note}; {kind}; ${dollars(offer.usd_per_hour)} an hour ({source})"


def _without_offer(market: Market) -> list[str]:
    lines = [f"{name}: {reason}" for name, reason in market.refused.items()]
    if market.unpriced:
        lines.append(
            f"no price is known of {', '.join(market.unpriced)}: give your own in USD an hour, as "
            f'--price "{market.unpriced[0]}=1.00" or as such a line in the node'
        )
    return lines


def _phase_rows(phases: Iterable[Phase]) -> list[list[str]]:
    rows = [["GiB", *PHASE_COLUMNS]]
    for phase in phases:
        counts = (phase.card_bytes, phase.weights, phase.activations, phase.workspace)
        beside = [f"{name} {_gib(count)}" for name, count in phase.resident.items() if count]
        time = "" if phase.seconds is None else duration(phase.seconds)
        figures = map(_gib, (*counts, phase.context))
        rows.append([PHASE_NAMES[phase.name], *figures, time, ", ".join(beside)])
    return rows


def _figures(estimate: Estimate) -> list[tuple[str, str]]:
    disk = estimate.disk
    software = f"software and outputs {format_gib(disk.container_bytes)}"
    return [
        ("step", f"{duration(estimate.step_seconds)}, {_resting_on(estimate)}"),
        ("image", f"{duration(estimate.image_seconds)}, {_resting_on(estimate)}"),
        ("cost", _cost(estimate)),
        ("disk", f"{format_gib(disk.total_bytes)}: {_named(disk.files)}, {software}"),
        ("guides say", _guides(estimate)),
        ("host RAM", format_gib(estimate.host_ram_bytes)),
    ]


def _resting_on(estimate: Estimate) -> str:
    """Every time is computed; what differs is what from."""
    return "from measured rates" if estimate.basis.kind == "measured" else "predicted"


def _guides(estimate: Estimate) -> str:
    return ", ".join(
        f"{advice.advised_bytes / GB:.0f} GB of {advice.what} (here {advice.needed_bytes / GB:.0f})"
        for advice in estimate.guides
    )


def _cost(estimate: Estimate) -> str:
    if estimate.usd_per_image is None:
        return "no price is known: give your own in USD an hour (--price, or the node's)"
    return f"{usd(estimate.usd_per_image)} an image"


def _plan_lines(options: Sequence[Option]) -> list[str]:
    lines = []
    for place, option in enumerate(options):
        peak, spare = format_gib(option.peak_bytes), option.headroom_bytes
        room = f"{format_gib(spare)} to spare" if spare >= 0 else f"{format_gib(-spare)} too much"
        lines.append(f"{'->' if not place else '  '} {option_text(option)}: {peak}, {room}")
        for reason in option.reasons.values():
            lines += folded(reason, "     ")
    return lines


def option_text(option: Option) -> str:
    """The settings of one option in one line."""
    setting = option.setting
    tiles = "whole VAE" if option.tiles <= 1 else f"VAE in {option.tiles} tiles"
    moved = "" if option.resident else ", weights move in every step"
    return (
        f"{setting.precision}, modulation {setting.modulation}, text encoder "
        f"{setting.text_encoder} {setting.text_encoder_place}, {tiles}{moved}"
    )


def _named(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {format_gib(count)}" for name, count in sizes.items())


def _gib(count: int) -> str:
    return f"{count / GIB:.2f}"


def _many(count: int, thing: str) -> str:
    return f"{count} {thing}{'s' * (count != 1)}"
