"""Finds the card that generates N images an hour for the least money, rented all day: at t seconds
each, the slow end, it takes ceil(N t / 3600) cards. `together` compares two uses of several cards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from ..errors import SettingError, UnavailableError
from ..spec.formats import QUANTIZED
from .cards import Card, Price, find_card
from .estimate import SECONDS_PER_HOUR, Estimate, check_positive, estimate, usd_range
from .phases import Range
from .plan import PlanOption
from .rates import Rates, attending, rates_of
from .request import Loras, RunRequest
from .split_cost import LEAST_GAIN, SplitCost, row_bytes
from .times import Pass, block_seconds, forward_times

# Images an hour. A card generates some hundred.
LOADS = (1e-6, 10**9)
# A load that so many cards just meet in decimals needs no further card for a rounding error.
ROUNDING = 1e-9


@dataclass(frozen=True)
class Offer:
    found: Estimate
    usd_per_hour: float
    price: Price | None = None  # the listed one; None where it is the user's own

    @property
    def name(self) -> str:
        return self.found.card.name

    @property
    def busy_usd(self) -> Range:
        """Gives US dollars for an image on a card that generates all the time."""
        return usd_range(self.usd_per_hour, self.found.image_seconds)

    def cards_for(self, images_per_hour: float, seconds: float | None = None) -> int:
        """Counts the cards that a load needs at `seconds` an image, by default the longest."""
        seconds = self.found.image_seconds.high if seconds is None else seconds
        needed = images_per_hour * seconds / SECONDS_PER_HOUR
        return max(1, math.ceil(needed * (1 - ROUNDING)))

    def usd_for(self, images_per_hour: float, seconds: float | None = None) -> float:
        return self.cards_for(images_per_hour, seconds) * self.usd_per_hour / images_per_hour

    def utilisation(self, images_per_hour: float) -> float:
        """Gives the share of the rented hours in which the cards generate, at the longest time."""
        busy = images_per_hour * self.found.image_seconds.high / SECONDS_PER_HOUR
        return min(1.0, busy / self.cards_for(images_per_hour))


@dataclass(frozen=True)
class Advice:
    """Cards for a load; raises SettingError for a load beyond `LOADS`."""

    images_per_hour: float
    offers: Sequence[Offer]
    unpriced: Sequence[str] = ()
    refused: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_positive("images per hour", self.images_per_hour)
        least, most = LOADS
        if not least <= self.images_per_hour <= most:
            raise SettingError(
                f"images per hour is {self.images_per_hour:g}: give {least:g} to {most:,} of them."
            )

    @property
    def loads(self) -> tuple[float, float, float]:
        return self.images_per_hour / 10, self.images_per_hour, self.images_per_hour * 10

    @cached_property
    def ranked(self) -> list[Offer]:
        """Sorts the offers by the cost of an image at the load; what does not fit comes last."""
        return sorted(
            self.offers,
            key=lambda offer: (
                not offer.found.fits,
                round(offer.usd_for(self.images_per_hour), 15),
                offer.busy_usd.high,
                offer.name,
            ),
        )

    @property
    def fitting(self) -> list[Offer]:
        return [offer for offer in self.ranked if offer.found.fits]

    @property
    def paid(self) -> list[Offer]:
        return [offer for offer in self.fitting if offer.usd_per_hour]


def advise(
    images_per_hour: float,
    request: RunRequest,
    cards: Iterable[Card],
    own_prices: Mapping[str, float] | None = None,
    calibration_of: Callable[[Card], Rates | None] = lambda card: None,
) -> Advice:
    """Estimates a request on every card, each in the setting that its plan recommends; `own_prices`
    are {card's name: USD an hour} over those of the list. Raises SettingError.
    """
    own_prices = own_prices or {}
    offers, unpriced = [], []
    refused: dict[str, str] = {}
    for card in cards:
        price = None if card.name in own_prices else card.price()
        usd = own_prices.get(card.name, price.usd_per_hour if price else None)
        try:
            found = estimate(request, card, calibration=calibration_of(card), usd_per_hour=usd)
        except UnavailableError as error:
            refused[card.name] = str(error)
            continue
        if usd is None:
            unpriced.append(card.name)
        else:
            offers.append(Offer(found, usd, price))
    return Advice(images_per_hour, offers, unpriced, refused)


# Prices that somebody types in.

EXAMPLE = "L40S = 0.79"  # a line of them
COMMENT = "#"


def read_prices(text: str, cards: Mapping[str, Card]) -> dict[str, float]:
    """Reads {card's name in the list: USD an hour}; raises SettingError with a line's number."""
    if not isinstance(text, str):
        raise SettingError(f"prices are {text!r} and must be a text of lines such as {EXAMPLE!r}.")
    prices: dict[str, float] = {}
    for number, line in enumerate(text.splitlines(), 1):
        line = line.partition(COMMENT)[0].strip()
        if not line:
            continue
        try:
            name, price = _split(line)
            card = find_card(name, cards).name
            if card in prices:
                raise SettingError(f"{card} already has a price above: keep one.")
        except SettingError as error:
            raise SettingError(f"prices, line {number}: {error}") from error
        prices[card] = price
    return prices


def _split(line: str) -> tuple[str, float]:
    name, _, amount = line.partition("=")
    try:
        price = float(amount.strip().removeprefix("$"))
    except ValueError:
        price = math.nan
    if not name.strip() or math.isnan(price):
        raise SettingError(
            f"{line!r} is not a GPU and its price in USD per hour: write {EXAMPLE!r}."
        )
    if not 0 <= price < math.inf:
        raise SettingError(f"a price must be at least 0 USD per hour, got {price:g}.")
    return name.strip(), price


# From card to card over PCIe without NVLink, each way with both busy: the least, the likely and the
# most of 16 lanes of PCIe 4, which carry 32 GB/s. From what others measured on L40 and L20; through
# system RAM it is the least.
PCIE_4 = 32e9
LINKS = (12e9, 17e9, 24e9)
# How many times as fast two cards are that compute one prompt each: int8 and bf16 on two H100.
CFG_SPLIT = Range(1.78, 1.88)


@dataclass(frozen=True)
class Together:
    """One image on several cards of one kind, and many images on as many servers."""

    cards: int
    links: tuple[float, float, float]  # bytes a second each way: the least, the likely and the most
    assumed: bool
    prompts: int  # how many are computed at once, each on its own cards: 2 with CFG
    refusal: str  # why one card computes a pass whatever it gains, in one clause; else empty
    likely: SplitCost | None  # at the likely link and slow cards; None where one computes
    gain: Range  # how many times as fast as one card the cards of a pass are, over all links
    alone: Range
    together: Range
    first_bytes: int
    other_bytes: int

    @property
    def each(self) -> int:
        return self.cards // self.prompts

    @property
    def faster(self) -> Range:
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
    """Estimates an image on at least 2 such cards, of which half compute each prompt with CFG;
    `link` is in bytes/s, None for PCIe's. None where no times are known.
    """
    scale = (found.card.pcie_bytes_per_second or PCIE_4) / PCIE_4
    slowest, usual, fastest = (scale * each if link is None else link for each in LINKS)
    links = slowest, usual, fastest
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
    if not request.member.family.split_rows:
        return f"the rows of {request.family} are not shared"
    return "it has fewer image tokens than GPUs" if request.step_tokens.image < cards else ""


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
        work.tokens,
        work.shape.dim,
        block,
        None if beside else row_bytes(work.shape.dim, quantized=quantized),
        cards,
        link,
        blocks=blocks,
        outside=times.card - blocks * sum(block),
        launch=rates.launches.block[precision],
    )
