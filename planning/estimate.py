"""Computes the answer before a run: memory of each phase, times, disk, system RAM and cost."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from ..errors import SettingError
from ..families.protocol import File, Template
from ..spec.formats import CardFacts, format_gib
from ..spec.transformer import ON_CARD
from .bytes import table_timesteps, text_encoder_bytes
from .cards import Card, UnlistedCard, is_named
from .files import (
    SOFTWARE_BYTES,
    START,
    host_memory,
    load_of,
    load_seconds,
    made_on_load,
    model_files,
    stored_precision,
)
from .phases import GRAPHS, Phase, Range, transformer_bytes
from .plan import (
    TIGHT_BYTES,
    PlanOption,
    left_as_stored,
    plan,
    plan_with_room,
    published_bytes,
)
from .rates import Basis, Rates, attending, hiding, measured, rates_of
from .request import (
    AUTO,
    DROPPED,
    EXACT,
    ON_PROCESSOR,
    OWN,
    STREAMED,
    Loras,
    Parts,
    RunRequest,
    Setting,
    repaid_by,
)
from .times import (
    encode_text_seconds,
    forward_seconds,
    forward_times,
    sampling_seconds,
    stock_steps,
    table_seconds,
)
from .vae_work import decode_seconds, encode_image_seconds

# The answers: all fits in VRAM, weights stream from system RAM, which "fits with offloading" is
# called in words, or it stops: a DoesNotFitError, or too little system RAM.
FITS, RUNS_SLOWLY, DOES_NOT_FIT = "fits", "runs slowly", "does not fit"

SECONDS_PER_HOUR = 3600

# The model whose files take the least system RAM.
SMALLEST = "qwen-image-2.1"

# What the measured runs cover. Of the matrix in `measured.json`: sides in pixels, and images in one
# forward pass.
MOST_SIDE, MOST_ITEMS = 2048, 2


def basis_within(basis: Basis, request: RunRequest, setting: Setting) -> Basis:
    """Says what the times of a request in a setting rest on."""
    left_out = setting.precision in basis.left_out
    if basis.kind != "measured" or not (left_out or _beyond_the_runs(request, setting)):
        return basis
    text = basis.text if left_out else f"predicted from rates {basis.origin}: no run there was such"
    return replace(basis, kind="predicted", text=text)


def _beyond_the_runs(request: RunRequest, setting: Setting) -> bool:
    """Tells whether no measured run of `measured.json` was such."""
    member = request.member
    return bool(
        not setting.resident
        or setting.weight_only
        or setting.packed
        or setting.attention != EXACT
        or setting.text_encoder_place != ON_CARD
        or request.loras.beside(setting.precision)
        or request.controlnet_bytes
        or member.layers
        or max(request.width, request.height) > MOST_SIDE
        or request.items > MOST_ITEMS
        or member.family.untimed
        or request.transformer != member.transformer
    )


class RunTimes(NamedTuple):
    """How long an option's run takes, each from the fastest to the slowest to expect."""

    phases: Mapping[str, Range]
    cold_start: Range  # from the start of ComfyUI and an NVMe disk until weights are there
    bound: str  # what bounds a step at the slowest, `times.CARD` or `times.PROCESSOR`


def run_times(option: PlanOption, slow: Rates, fast: Rates) -> RunTimes:
    """Predicts the times of a plan's option at the slowest and the fastest rates of its card."""
    low, high = (_seconds(option, rates, end) for end, rates in enumerate((fast, slow)))
    # Differences of forward passes round: equal ends may come out in the other order.
    phases = {name: Range(min(least, high[name]), high[name]) for name, least in low.items()}
    cold_start = phases.pop("cold load") + START
    how = {"graph": GRAPHS in option.phases["sampling"].resident, **_how(option)}
    bound = forward_times(option.request, option.setting.precision, slow, **how).bound
    return RunTimes(phases, cold_start, bound)


def _how(option: PlanOption, more: int = 0) -> dict[str, Any]:
    packed, attention = option.setting.packed, option.setting.attention
    return {"moved_bytes": option.moved_bytes + more, "packed": packed, "attention": attention}


def _seconds(option: PlanOption, rates: Rates, end: int) -> dict[str, float]:
    # {phase, or a load from disk: seconds} at one of the ends of a card's rates.
    request, setting, load = option.request, option.setting, load_of(option)
    precision, place = setting.precision, setting.text_encoder_place
    encoder, *turns = _bytes_of_turns(option)
    # What comes back to the card does so in the first pass, which hides as much of it.
    passes = (
        forward_seconds(request, precision, rates, **_how(option, more))
        for more in (0, turns[0], max(turns))
    )
    for_text, for_decoder = (more - less for less, more in itertools.pairwise(passes))
    split = option.card.splits(setting.text_encoder)
    prompts = encode_text_seconds(request, rates, place, setting.text_encoder, split=split, end=end)
    prompts += encode_image_seconds(request, rates) + encoder / rates.pcie
    graph = GRAPHS in option.phases["sampling"].resident
    repaid = repaid_by(request, setting) if graph else 0
    return {
        "load": load_seconds(load, rates)[end],
        "cold load": load_seconds(load, rates, cold=True)[end],
        "text": prompts + for_text,
        "tables": table_seconds(request, rates, setting.modulation),
        "sampling": sampling_seconds(request, precision, rates, repaid=repaid, **_how(option)),
        "decode": decode_seconds(request, option.tiles, rates) + for_decoder,
    }


def _stock_room(option: PlanOption) -> int:
    # For a transformer of stock ComfyUI while it samples: what ours has, without what ours adds.
    sampling = option.phases["sampling"]
    ours = "text encoder", "modulation table"
    leaves = sampling.weights + sum(sampling.resident.get(name, 0) for name in ours)
    return option.usable_bytes - (sampling.needed_bytes - leaves)


def _bytes_of_turns(option: PlanOption) -> tuple[int, int, int]:
    # What each run brings to the card again: (a text encoder that is not there, what of the
    # transformer had to leave for that, and for the decoder).
    phases, setting = option.phases, option.setting
    stays, encoder, turns = phases["sampling"].weights, 0, (DROPPED, STREAMED)
    if setting.text_encoder_place != ON_PROCESSOR:
        whole = text_encoder_bytes(option.request, setting.text_encoder)
        encoder = whole - phases["sampling"].resident.get("text encoder", 0)
    if setting.text_encoder_place == STREAMED:
        encoder += (option.request.prompts - 1) * (whole - phases["text"].weights)
    if setting.text_encoder_place in turns:
        left = min(stays, max(0, phases["text"].card_bytes + stays - option.usable_bytes))
    else:
        left = max(0, stays - phases["text"].resident.get("transformer", 0))
    return encoder, left, max(0, stays - phases["decode"].resident.get("transformer", 0))


@dataclass(frozen=True)
class Estimate:
    card: Card
    request: RunRequest
    options: tuple[PlanOption, ...]  # of the plan; all below is of the first
    files: Mapping[str, int]
    host_memory: Mapping[str, int]
    basis: Basis
    times: RunTimes | None = None  # None, as all below, on a card neither listed nor calibrated
    own_usd_per_hour: float | None = None  # the user's own price; None for the list's
    calibration: Rates | None = None
    stock: Mapping[str, Range] = field(default_factory=dict)  # {format of stock ComfyUI: step}
    notes: tuple[str, ...] = ()
    card_note: str = ""  # why it is of this card, where the user's own cannot be it
    ram_bytes: int | None = None

    @property
    def option(self) -> PlanOption:
        return self.options[0]

    @property
    def phases(self) -> Mapping[str, Phase]:
        """Gives by name what really is on the card; what each phase needs is in `option.needs`."""
        if self.times is None:
            return self.option.phases
        return {
            name: replace(phase, seconds=self.times.phases[name])
            for name, phase in self.option.phases.items()
        }

    @property
    def fits(self) -> bool:
        return self.headroom_bytes >= 0

    @property
    def short_of_ram(self) -> bool:
        return self.ram_bytes is not None and self.host_ram_bytes > self.ram_bytes

    @property
    def verdict(self) -> str:
        if self.short_of_ram:
            return DOES_NOT_FIT
        return FITS if self.fits else RUNS_SLOWLY

    @property
    def template(self) -> Template | None:
        request = self.request
        if request.parts != Parts():
            return None
        return request.member.template(request.steps, request.cfg, self.option.setting.precision)

    @property
    def downloads(self) -> tuple[File, ...]:
        if self.template is None:
            return ()
        member, setting = self.request.member, self.option.setting
        encoders = member.text_encoder.files
        files = (
            self.template.transformer or member.file(setting.precision),
            self.template.lora,
            encoders.get(setting.text_encoder, encoders.get("bf16")),
            member.vae_file,
        )
        return tuple(filter(None, files))

    @cached_property
    def with_less_ram(self) -> Mapping[str, int]:
        """Finds {what to load instead: system RAM in bytes} where the machine has too little."""
        if not self.short_of_ram:
            return {}
        option, asked = self.option, {}
        if not self.request.parts.at_hand:
            asked["with precision auto"] = replace(self.request, precision=AUTO)
        if made_on_load(option.request, option.setting):
            name, size = option.setting.precision, transformer_bytes(option.request, option.setting)
            parts = replace(
                option.request.parts, gguf=False, packed=None, transformer_bytes=size.total
            )
            parts = replace(parts, modulation_bytes=size.modulation)
            ready = replace(self.request, precision=name, parts=parts)
            asked[f"a file that is {name} already"] = ready
        asked[SMALLEST] = RunRequest(SMALLEST, width=OWN, height=OWN)
        facts, room = self.card.facts(), self.ram_bytes
        found = {what: _ram(_plan(facts, it, room)[0]) for what, it in asked.items()}
        return {what: count for what, count in found.items() if count <= room}

    @cached_property
    def as_fast(self) -> tuple[str, ...]:
        """Lists what of stock ComfyUI may take no longer for a step."""
        return tuple(name for name, times in self.faster.items() if times.low < 1)

    @cached_property
    def plan(self) -> tuple[tuple[PlanOption, Range | None], ...]:
        """Pairs each option of the plan with the time of an image, as `image_seconds`."""
        others = self.options[1:]
        if self.times is None:
            return tuple((option, None) for option in self.options)
        found = [(self.option, self.image_seconds)]
        for option in others:
            times = run_times(option, *_rates(option, self.card, self.calibration))
            other = replace(self, options=(option,), times=times)
            found.append((option, other.image_seconds))
        return tuple(found)

    @property
    def headroom_bytes(self) -> int:
        """Counts the card's free bytes in the worst phase; negative where not all stays there."""
        return self.option.headroom_bytes

    @cached_property
    def tight(self) -> bool:
        """Tells whether it fits with less than `TIGHT_BYTES` to spare on a card whose memory nobody
        measured. Measured are the peaks of the one card of `measured.json`; a calibration measures
        how fast a card is and no memory, so a calibrated card can be tight.
        """
        measured_card = is_named(self.card, measured()["conditions"]["card"])
        return self.fits and self.headroom_bytes < TIGHT_BYTES and not measured_card

    @cached_property
    def safer(self) -> PlanOption | None:
        """Finds, where it is tight, the setting nearest to bf16 that leaves `TIGHT_BYTES`."""
        if not self.tight:
            return None
        room = math.inf if self.ram_bytes is None else self.ram_bytes
        return plan_with_room(self.option.asked, TIGHT_BYTES, lambda it: _ram(it) <= room)

    @cached_property
    def step_seconds(self) -> Range | None:
        """Gives one computed step of the sampler, with both prompts where there are two."""
        return self.times and self.times.phases["sampling"].times(1 / self.request.computed_steps)

    @property
    def lora_seconds(self) -> Range:
        """Predicts what LoRAs as bypass add to a step; needs times."""
        request, precision = self.option.request, self.option.setting.precision
        how = {"graph": GRAPHS in self.option.phases["sampling"].resident}
        slow, fast = _rates(self.option, self.card, self.calibration)
        ends = [
            [forward_seconds(it, precision, rates, **how) for rates in (fast, slow)]
            for it in (request, replace(request, loras=Loras()))
        ]
        return Range(*(request.passes * (more - less) for more, less in zip(*ends, strict=True)))

    @cached_property
    def faster(self) -> dict[str, Range]:
        ours = self.step_seconds
        ends = {
            name: sorted(theirs / own for theirs, own in zip(seconds, ours, strict=True))
            for name, seconds in self.stock.items()
        }
        return {name: Range(*each) for name, each in ends.items()}

    @property
    def bound(self) -> str | None:
        return self.times and self.times.bound

    @cached_property
    def image_seconds(self) -> Range | None:
        """Gives one image with a new prompt, when models and the modulation's table are there."""
        return self.times and self._warm_seconds().times(1 / self.request.batch)

    @property
    def first_image_seconds(self) -> Range | None:
        """Gives the first run of a server, all of its images: files in memory, kernels compiled."""
        if self.times is None:
            return None
        tables = Range(0, 0) if self._refills_table else self.times.phases["tables"]
        return self._warm_seconds() + self.times.phases["load"] + tables

    @property
    def _refills_table(self) -> bool:
        # Whether the first timesteps of a schedule leave the table before the next image.
        return table_timesteps(self.request) < self.request.steps

    def _warm_seconds(self) -> Range:
        phases = self.times.phases
        seconds = phases["text"] + phases["sampling"] + phases["decode"]
        return seconds + phases["tables"] if self._refills_table else seconds

    @property
    def usd_per_image(self) -> Range | None:
        """Gives the cost on a card that generates all the time; None without a price or times."""
        usd, price = self.own_usd_per_hour, self.card.price()
        if usd is None and price is not None:
            usd = price.usd_per_hour
        seconds = self.image_seconds
        return None if usd is None or seconds is None else usd_range(usd, seconds)

    @property
    def host_ram_bytes(self) -> int:
        return sum(self.host_memory.values())

    @property
    def disk_bytes(self) -> int:
        return sum(self.files.values()) + SOFTWARE_BYTES


def check_positive(name: str, value: Any) -> None:
    """Refuses what is no amount."""
    if not _is_finite(value) or value <= 0:
        raise SettingError(f"{name} is {value!r}: give a finite number above 0.")


def _is_finite(value: Any) -> bool:
    numeric = isinstance(value, (int, float)) and not isinstance(value, bool)
    # A whole number has no largest; one that no float holds is no price, time or load.
    return numeric and abs(value) < 1e300 and math.isfinite(value)


def usd_range(usd_per_hour: float, seconds_per_image: Range) -> Range:
    """Gives US dollars for an image of a range of times, on a card that generates all the time."""
    return Range(*(usd_per_hour * seconds / SECONDS_PER_HOUR for seconds in seconds_per_image))


def estimate(
    request: RunRequest,
    card: Card,
    *,
    calibration: Rates | None = None,
    usd_per_hour: float | None = None,
    ram_bytes: int | None = None,
) -> Estimate:
    """Answers for the first setting of the plan, without a price at the list's lowest on demand,
    and without `ram_bytes` for any system RAM. Raises SettingError, and as `plan`.
    """
    if usd_per_hour is not None and not (_is_finite(usd_per_hour) and usd_per_hour >= 0):
        raise SettingError(
            f"usd_per_hour is {usd_per_hour!r}: give the price of one GPU in USD per hour, 0 or "
            "more."
        )
    options = _plan(card.facts(), request, ram_bytes)
    option = options[0]
    times, stock = None, {}
    basis = Basis("unknown", f"not predicted: {card.name} is not in the list of GPUs")
    if calibration is not None or not isinstance(card, UnlistedCard):
        slow, fast, basis = rates_of(card, calibration)
        stock = stock_steps(option.request, card, *hiding(slow, fast), _stock_room(option))
        basis = basis_within(basis, request, option.setting)
        times = run_times(option, *_rates(option, card, calibration))
    return Estimate(
        card=card,
        request=request,
        options=options,
        files=model_files(option.request, option.setting),
        host_memory=host_memory(option.request, option.setting, moved_bytes=option.moved_bytes),
        basis=basis,
        times=times,
        own_usd_per_hour=usd_per_hour,
        calibration=calibration,
        stock=stock,
        ram_bytes=ram_bytes,
    )


def _ram(option: PlanOption) -> int:
    moved = option.moved_bytes
    return sum(host_memory(option.request, option.setting, moved_bytes=moved).values())


def _plan(card: CardFacts, request: RunRequest, room: int | None) -> tuple[PlanOption, ...]:
    # What system RAM has room for, the first as the loader decides it.
    options = plan(card, request)
    if room is None:
        return options
    first, *others = options
    needed, name = _ram(first), first.setting.precision
    requested = AUTO if request.parts.kept else request.precision
    if needed > room and first.request.parts.packed:
        first = replace(first, setting=replace(first.setting, packed=True))
    elif (
        made_on_load(first.request, first.setting)
        and not request.parts.gguf
        and left_as_stored(requested, needed, room)
    ):
        stored = request.parts.kept or stored_precision(request, name)
        known = published_bytes(request, stored)
        why = f"auto: a run in {name} takes {format_gib(needed)} of system RAM"
        sizes = {stored: known} if known else None
        options = plan(card, request, stored, as_stored=True, known_sizes=sizes, why=why)
        first, *others = options
    others = [it for it in others if _ram(it) <= room]
    recommended = first.recommended or not any(it.recommended for it in others)
    return replace(first, recommended=recommended), *others


def _rates(option: PlanOption, card: Card, calibration: Rates | None) -> tuple[Rates, Rates]:
    slow, fast, _ = rates_of(card, calibration)
    return attending(card, option.setting.attention, *hiding(slow, fast))
