"""Which card paints a load of images for the least, where cards are rented by the hour all day.

N images an hour at t seconds each need ceil(N t / 3600) cards, so the cost of an image is a
sawtooth over the load: lowest where the cards are busy all the time. Where t is predicted as a
range, its slow end counts, so that the cards carry the load in any case.

And what several cards of a machine are for: one image sooner, or many images.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..errors import SettingError, UnavailableError
from ..spec.formats import QUANTIZED
from ..split_cost import LEAST_GAIN, Rows, SplitCost, check_link, row_bytes
from .cards import SECONDS_PER_HOUR, Card, Price, check_positive, check_price
from .estimate import Estimate, estimate, usd_range
from .phases import Range, figure
from .plan import PlanOption
from .rates import Rates, attending, rates_of
from .request import Loras, RunRequest
from .times import Pass, block_seconds, forward_times

# The card that this package is about, and those that it is most often compared with.
SUBJECT = "L40S"
RIVALS = ("A100 80GB SXM", "H100 SXM")
# Images an hour. A card paints some hundred.
LOADS = (1e-6, 10**9)
# A load that so many cards just meet in decimals needs no further card for a rounding error.
ROUNDING = 1e-9
# Offers whose costs at full use differ by less than this share count as equal.
EQUAL = 0.001


@dataclass(frozen=True)
class Offer:
    """A card at a price, and how fast it paints.

    Args:
        seconds: for an image, from the shortest to the longest that is to be expected.
        usd_per_hour: for one card.
        fits: whether what is to run fits on it.
        tight: whether it fits with little to spare, as `Estimate.tight` says.

    Raises:
        SettingError: the price is negative or no number, or a time is not above 0.
    """

    card: Card
    seconds: Range
    usd_per_hour: float
    fits: bool = True
    tight: bool = False

    def __post_init__(self) -> None:
        check_price(self.usd_per_hour)
        for seconds in self.seconds:
            check_positive("seconds per image", seconds)
        if self.seconds.low > self.seconds.high:
            raise SettingError(
                f"seconds per image are {self.seconds.low} to {self.seconds.high}: give the "
                "shorter time first."
            )

    @property
    def full_usd_per_image(self) -> Range:
        """US dollars for an image where the card is busy all the time."""
        return usd_range(self.usd_per_hour, self.seconds)

    def cards_for(self, images_per_hour: float, seconds: float | None = None) -> int:
        """How many cards a load needs at `seconds` an image, by default the longest."""
        seconds = self.seconds.high if seconds is None else seconds
        needed = images_per_hour * seconds / SECONDS_PER_HOUR
        return max(1, math.ceil(needed * (1 - ROUNDING)))

    def usd_for(self, images_per_hour: float, seconds: float | None = None) -> float:
        """US dollars for an image at a load, on the cards for `seconds` an image."""
        return self.cards_for(images_per_hour, seconds) * self.usd_per_hour / images_per_hour


@dataclass(frozen=True)
class Advice:
    """What a load costs with one offer.

    Attributes:
        cards: how many are needed, at the shortest and the longest time.
        usd_per_image: at this load, at the shortest and the longest time.
    """

    offer: Offer
    images_per_hour: float
    cards: tuple[int, int]
    usd_per_image: Range

    @property
    def usd(self) -> float:
        """US dollars for an image on cards that carry the load at the longest time: what the
        ranking goes by, and what is printed.
        """
        return self.offer.usd_for(self.images_per_hour)

    @property
    def utilisation(self) -> float:
        """The share of the rented hours in which these cards paint, at the longest time."""
        busy = self.images_per_hour * self.offer.seconds.high / SECONDS_PER_HOUR
        return min(1.0, busy / self.cards[1])

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        offer, full = self.offer, self.offer.full_usd_per_image
        return {
            "card": offer.card.name,
            "usd_per_hour": offer.usd_per_hour,
            "seconds_per_image": figure(offer.seconds.middle),
            "cards": self.cards[1],
            "usd_per_image": figure(self.usd),
            "full_usd_per_image": figure(full.middle),
            "utilisation": figure(self.utilisation),
            "fits": offer.fits,
            "tight": offer.tight,
            "ranges": {
                "seconds_per_image": [figure(end) for end in offer.seconds],
                "cards": list(self.cards),
                "usd_per_image": [figure(end) for end in self.usd_per_image],
                "full_usd_per_image": [figure(end) for end in full],
            },
        }


def advise(images_per_hour: float, offers: Iterable[Offer]) -> tuple[Advice, ...]:
    """Ranks offers by the cost of an image at a load; what does not fit comes last.

    Raises:
        SettingError: the load is not a finite number above 0, or beyond `LOADS`.
    """
    check_positive("images per hour", images_per_hour)
    least, most = LOADS
    if not least <= images_per_hour <= most:
        raise SettingError(
            f"images per hour is {images_per_hour:g}: give {least:g} to {most:,} of them."
        )
    advices = []
    for offer in offers:
        cards, usd = (
            [of(images_per_hour, end) for end in offer.seconds]
            for of in (offer.cards_for, offer.usd_for)
        )
        advices.append(Advice(offer, images_per_hour, tuple(cards), Range(*usd)))
    return tuple(sorted(advices, key=_rank))


def _rank(advice: Advice) -> tuple:
    offer = advice.offer
    full = offer.full_usd_per_image.high
    return (not offer.fits, round(advice.usd, 15), full, offer.card.name)


@dataclass(frozen=True)
class Comparison:
    """Two offers over all loads, at the longest of their times.

    Attributes:
        cheaper: the one that costs less where cards are always busy; None where both cost the same.
        break_even: images an hour, above which it costs less or the same at every load; 0 where
            that is so from the first image on.
        certain: whether the ranges of both costs at full use are disjoint.
    """

    first: Offer
    second: Offer
    cheaper: Offer | None
    break_even: float
    certain: bool


def compare(first: Offer, second: Offer) -> Comparison:
    """Finds the load from which one of two offers is the cheaper one for good.

    With price p and c images a card and hour, a load N costs p ceil(N / c) an hour: at least
    N p / c and less than p above that. So from p / (difference of both p / c) on, p being that of
    the cheaper one, it stays the cheaper one. Below, for each number of its cards, the other one
    is the cheaper one while fewer dollars of it are needed.
    """
    full = [offer.full_usd_per_image for offer in (first, second)]
    busy = [offer.usd_per_hour * offer.seconds.high for offer in (first, second)]
    certain = full[0].high < full[1].low or full[1].high < full[0].low
    if math.isclose(*busy, rel_tol=EQUAL):
        return Comparison(first, second, None, 0.0, certain)
    better, other = (first, second) if busy[0] < busy[1] else (second, first)
    return Comparison(
        first, second, better, _last_load(better, other, abs(busy[0] - busy[1])), certain
    )


def _last_load(better: Offer, other: Offer, difference: float) -> float:
    """The highest load at which `other` is still the cheaper one; 0 where there is none."""
    rate, other_rate = (SECONDS_PER_HOUR / offer.seconds.high for offer in (better, other))
    ratio = better.usd_per_hour / other.usd_per_hour
    settled = better.usd_per_hour * SECONDS_PER_HOUR / difference
    for cards in range(math.floor(settled / rate) + 1, 0, -1):
        fewer_dollars = math.ceil(cards * ratio * (1 - ROUNDING)) - 1
        load = min(fewer_dollars * other_rate, cards * rate)
        if load > (cards - 1) * rate * (1 + ROUNDING):
            return load
    return 0.0


@dataclass(frozen=True)
class Market:
    """Offers of many cards for one request.

    Attributes:
        offers: Of the cards that have a price and run it.
        estimates: Of all cards that run it, by name.
        prices: {card's name: its listed price, or None where it is the user's own}.
        unpriced: Names of cards that would run it and have no price.
        refused: {name of a card that cannot run it: why}.
    """

    offers: tuple[Offer, ...]
    estimates: Mapping[str, Estimate]
    prices: Mapping[str, Price | None]
    unpriced: tuple[str, ...]
    refused: Mapping[str, str]

    def comparisons(self, names: Sequence[str] = (SUBJECT, *RIVALS)) -> tuple[Comparison, ...]:
        """The first of the named cards on which the request fits, with each of the others."""
        fitting = {offer.card.name: offer for offer in self.offers if offer.fits}
        offers = [fitting[name] for name in names if name in fitting]
        return tuple(compare(offers[0], other) for other in offers[1:])


def market(
    request: RunRequest,
    cards: Iterable[Card],
    own_prices: Mapping[str, float] | None = None,
    calibration_of: Callable[[Card], Rates | None] = lambda card: None,
) -> Market:
    """Estimates a request on every card, each in the setting that its plan recommends.

    Args:
        own_prices: {card's name: USD an hour} over those of the list, of which the cheapest on
            demand counts.
        calibration_of: gives what was measured on a card, or None.

    Raises:
        SettingError: a price is negative or no number.
    """
    own_prices = own_prices or {}
    offers, unpriced = [], []
    estimates: dict[str, Estimate] = {}
    prices: dict[str, Price | None] = {}
    refused: dict[str, str] = {}
    for card in cards:
        price = None if card.name in own_prices else card.price()
        usd = own_prices.get(card.name, price and price.usd_per_hour)
        try:
            found = estimate(request, card, calibration=calibration_of(card), usd_per_hour=usd)
        except UnavailableError as error:
            refused[card.name] = str(error)
            continue
        estimates[card.name] = found
        if usd is None:
            unpriced.append(card.name)
        else:
            prices[card.name] = price
            offers.append(Offer(card, found.image_seconds, usd, found.fits, found.tight))
    return Market(tuple(offers), estimates, prices, tuple(unpriced), refused)


# From card to card over PCIe without NVLink, each way with both busy: the least, the likely and the
# most of 16 lanes of PCIe 4, which carry 32 GB/s. From what others measured on L40 and L20; through
# host memory it is the least.
PCIE_4 = 32e9
LINKS = (12e9, 17e9, 24e9)
# How many times as fast two cards are that compute one prompt each: int8 and bf16 on two H100.
CFG_SPLIT = Range(1.78, 1.88)


@dataclass(frozen=True)
class Together:
    """One image on several cards of one kind, and many images on as many servers.

    Attributes:
        cards: How many.
        links: Bytes a second each way: the least, the likely and the most.
        assumed: Whether nobody has given the link.
        prompts: How many are computed at once, each on its own cards: 2 with CFG.
        refusal: Why one card computes a pass whatever it gains, in one clause; else empty.
        likely: A pass at the likely link and the slowest of each card; None where one computes it.
        gain: How many times as fast as one card the cards of a pass are, over all links.
        alone: Seconds of an image on one card.
        together: On all of them.
        first_bytes, other_bytes: The most on the first card, and on each other one.
    """

    cards: int
    links: tuple[float, float, float]
    assumed: bool
    prompts: int
    refusal: str
    likely: SplitCost | None
    gain: Range
    alone: Range
    together: Range
    first_bytes: int
    other_bytes: int

    @property
    def each(self) -> int:
        """Counts the cards of one pass."""
        return self.cards // self.prompts

    @property
    def faster(self) -> Range:
        """Tells how many times as fast as on one card an image is."""
        ends = [one / all_cards for one, all_cards in zip(self.alone, self.together, strict=True)]
        return Range(min(ends), max(ends))

    @property
    def splits(self) -> bool:
        """Tells whether the rows of a pass are split, at some of the rates at least."""
        return self.gain.high >= LEAST_GAIN

    @property
    def per_hour(self) -> tuple[Range, Range]:
        """Counts images an hour (on as many servers; one after the other on all cards)."""
        servers, one = (
            Range(count * SECONDS_PER_HOUR / seconds.high, count * SECONDS_PER_HOUR / seconds.low)
            for count, seconds in ((self.cards, self.alone), (1, self.together))
        )
        return servers, one


def together(found: Estimate, cards: int, link: float | None = None) -> Together | None:
    """Estimates an image on several such cards; None where no times are known.

    Args:
        cards: at least 2; with CFG, half of them compute each prompt.
        link: bytes a second each way between two cards; None for what PCIe is likely to reach.

    Raises:
        SettingError: the link carries nothing.
    """
    scale = (found.card.pcie_bytes_per_second or PCIE_4) / PCIE_4
    links = tuple(scale * each for each in LINKS) if link is None else (link,) * 3
    check_link(links[0])
    if found.times is None:
        return None
    option, phases = found.option, found.times.phases
    prompts = 1 if option.request.cfg == "off" else 2
    each = cards // prompts
    refusal = _refusal(option, each)
    likely, gain, low, high = None, Range(1.0, 1.0), 1.0, 1.0
    if each > 1 and not refusal:
        slow, fast = rates_of(found.card, found.calibration)[:2]
        slow, fast = attending(found.card, option.setting.attention, slow, fast)
        at_fast, at_slow = (
            [_split_cost(option, rates, each, way) for way in links] for rates in (fast, slow)
        )
        gains = [cost.gain for cost in (*at_fast, *at_slow)]
        likely, gain = at_slow[1], Range(min(gains), max(gains))
        low, high = (cost.gain if cost.pays else 1.0 for cost in (at_fast[2], at_slow[0]))
    if prompts == 2:
        low, high = low * CFG_SPLIT.high, high * CFG_SPLIT.low
    alone = phases["sampling"]
    image = phases["text"] + phases["decode"] + Range(alone.low / low, alone.high / high)
    # All hold the transformer; the encoders and what else stays is on the first.
    sampling = found.phases["sampling"]
    table = sampling.resident.get("modulation table", 0)
    return Together(
        cards=cards,
        links=links,
        assumed=link is None,
        prompts=prompts,
        refusal=refusal,
        likely=likely,
        gain=gain,
        alone=found.image_seconds,
        together=image.times(1 / option.request.batch),
        first_bytes=max(phase.card_bytes for phase in found.phases.values()),
        other_bytes=sampling.peak_bytes + sampling.context + table,
    )


def _refusal(option: PlanOption, cards: int) -> str:
    request = option.request
    if cards < 2:
        return ""
    if not option.resident:
        return "its weights do not stay there"
    if request.member.cached_prefix:
        return f"the rows of {request.family} are not shared"
    return "it has fewer image tokens than cards" if request.image_tokens < cards else ""


def _split_cost(option: PlanOption, rates: Rates, cards: int, link: float) -> SplitCost:
    """Counts a pass of one prompt. LoRAs beside weights read plain rows, so that keys and values
    are sent; their time shrinks as the products' does.
    """
    setting, request = option.setting, replace(option.request, cfg="off", loras=Loras())
    precision, form = setting.precision, setting.attention
    times = forward_times(request, precision, rates, packed=setting.packed, attention=form)
    work, blocks = Pass.of(request), request.transformer.blocks
    block = block_seconds(work, precision, rates, form)
    quantized = precision in QUANTIZED and not setting.weight_only
    beside = option.request.loras.beside(precision)
    return SplitCost(
        Rows(work.items, work.text, work.image, work.shape.dim),
        block,
        None if beside else row_bytes(work.shape.dim, quantized=quantized),
        cards,
        link,
        blocks=blocks,
        outside=times.card - blocks * block.all,
        launch=rates.launches.block[precision],
    )
