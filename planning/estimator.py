"""The whole answer before a run: memory of each phase, times, disk, host memory and cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from .cards import Card
from .cost import check_price, usd_range
from .disk import GB, Advice, Disk, against_guides, disk, made_on_load
from .envelope import basis_within
from .estimate import NOTHING, Phase, Range, figure, gib
from .estimator_notes import notes_of
from .plan import Option, plan
from .plan_trial import sized
from .rates import Basis, Rates, rates_of
from .residence import host_ram_bytes
from .run_times import RunTimes
from .unlisted import UnlistedCard
from .wish import Wish


@dataclass(frozen=True)
class Estimate:
    """What a wish takes on a card.

    Attributes:
        option: The plan's first, which everything here is of: the recommended one, or what the
            wish names.
        options: All of the plan.
        phases: By name, with seconds where times are known: what really is on the card. What does
            not stay is in `option.moved_bytes`, and what each phase would need in `option.needs`.
        fits: Whether all stays on the card in every phase, with what the host keeps free.
        headroom_bytes: The option's: what is left of the card in the worst phase; negative by what
            is lacking for all to stay.
        step_seconds: One step of the sampler, with both prompts where there are two. None, as all
            times, on a card that is neither listed nor calibrated.
        image_seconds: One image of a run with a new prompt, when everything is loaded and the
            schedule's modulation table is there.
        first_image_seconds: The first run, all of its images: files in memory, nothing on the card.
        cold_start_seconds: From the start of ComfyUI until all weights are on the card, files on an
            NVMe disk.
        loads: {where the files are: seconds until all weights are on the card}, of the files that
            the setting reads.
        prequantized_loads: The same of a transformer that was quantized once and written; None for
            bf16.
        usd_per_image: None without a price or without times.
        basis: What the times rest on.
        notes: Sentences.
    """

    card: Card
    wish: Wish
    option: Option
    options: tuple[Option, ...]
    phases: Mapping[str, Phase]
    fits: bool
    headroom_bytes: int
    step_seconds: Range | None
    image_seconds: Range | None
    first_image_seconds: Range | None
    cold_start_seconds: Range | None
    loads: Mapping[str, Range] | None
    prequantized_loads: Mapping[str, Range] | None
    usd_per_image: Range | None
    disk: Disk
    host_ram_bytes: int
    basis: Basis
    notes: tuple[str, ...]

    @property
    def guides(self) -> tuple[Advice, ...]:
        """What guides for rented machines advise, beside what is needed."""
        return against_guides(self.disk, self.option.setting, self.option.peak_bytes)

    @property
    def written_once(self) -> Disk | None:
        """The disk where a file is written once in the option's 8 bits; None where nothing is
        quantized on load.
        """
        setting = self.option.setting
        whole = sized(self.wish, setting.precision)
        return disk(whole, setting, quantized_file=True) if made_on_load(whole, setting) else None

    def as_dict(self) -> dict[str, Any]:
        """For JSON: figures in the unit of their name, the middle where there is a range."""
        step = self.step_seconds and self.step_seconds.times(1000)
        answers = {
            "step_ms": step,
            "image_seconds": self.image_seconds,
            "first_image_seconds": self.first_image_seconds,
            "cold_start_seconds": self.cold_start_seconds,
            "usd_per_image": self.usd_per_image,
        }
        ranges = {name: ends for name, ends in answers.items() if ends is not None}
        written = self.written_once
        return {
            "card": self.card.name,
            "family": self.wish.family,
            "settings": _settings(self.wish, self.option),
            "phases": {name: phase.as_dict() for name, phase in self.phases.items()},
            "fits": self.fits,
            "headroom_gib": gib(self.headroom_bytes),
            **{name: ends and figure(ends.middle) for name, ends in answers.items()},
            "ranges": _ends(ranges),
            "loads": _ends(self.loads),
            "loads_prequantized": _ends(self.prequantized_loads),
            "disk_gib": gib(self.disk.total_bytes),
            "disk": {
                "files_gib": {name: gib(count) for name, count in self.disk.files.items()},
                "container_gib": {name: gib(count) for name, count in self.disk.container.items()},
                "written_once_gib": written and gib(written.total_bytes),
                "while_writing_gib": written and gib(written.most_bytes),
                "guides": [
                    {
                        "what": advice.what,
                        "advised_gb": round(advice.advised_bytes / GB, 1),
                        "needed_gb": round(advice.needed_bytes / GB, 1),
                        "why": advice.why,
                    }
                    for advice in self.guides
                ],
            },
            "host_ram_gib": gib(self.host_ram_bytes),
            "plan": [_option(option) for option in self.options],
            "basis": self.basis.kind,
            "basis_detail": self.basis.text,
            "notes": list(self.notes),
        }


def estimate(
    wish: Wish,
    card: Card,
    *,
    calibration: Rates | None = None,
    usd_per_hour: float | None = None,
) -> Estimate:
    """Answers for the setting that the plan recommends.

    Args:
        calibration: what `qwen-l40s bench --calibrate` measured on such a card.
        usd_per_hour: of one card; without it the lowest price on demand in the card's list.

    Raises:
        SettingError: the price is negative or no number.
        UnavailableError: nothing that the wish allows runs on the card.
    """
    if usd_per_hour is not None:
        check_price(usd_per_hour)
    options = plan(card.facts(), wish)
    option = options[0]
    whole = sized(wish, option.setting.precision)
    files = disk(whole, option.setting)
    found = Estimate(
        card=card,
        wish=wish,
        option=option,
        options=options,
        phases=option.phases,
        fits=option.headroom_bytes >= 0,
        headroom_bytes=option.headroom_bytes,
        step_seconds=None,
        image_seconds=None,
        first_image_seconds=None,
        cold_start_seconds=None,
        loads=None,
        prequantized_loads=None,
        usd_per_image=None,
        disk=files,
        host_ram_bytes=host_ram_bytes(whole, option.setting, moved_bytes=option.moved_bytes),
        basis=Basis("unknown", f"not predicted: {card.name} is not in the list of cards"),
        notes=(),
    )
    loras_seconds = NOTHING
    if calibration is not None or not isinstance(card, UnlistedCard):
        slow, fast, basis = rates_of(card, calibration)
        run = RunTimes(whole, option, card, slow, fast)
        basis = basis_within(basis, wish, option.setting)
        found = replace(_timed(found, run, usd_per_hour), basis=basis)
        loras_seconds = run.loras_seconds()
    notes = notes_of(found, own_price=usd_per_hour is not None, loras_seconds=loras_seconds)
    return replace(found, notes=notes)


def _timed(found: Estimate, run: RunTimes, usd_per_hour: float | None) -> Estimate:
    """The estimate with its times and its cost."""
    wish, price = found.wish, found.card.price()
    phases = run.phases()
    seconds = {name: phase.seconds or NOTHING for name, phase in phases.items()}
    warm = seconds["text"] + seconds["sampling"] + seconds["decode"]
    image = warm.times(1 / wish.batch)
    usd = usd_per_hour if price is None or usd_per_hour is not None else price.usd_per_hour
    return replace(
        found,
        phases=phases,
        step_seconds=seconds["sampling"].times(1 / wish.steps),
        image_seconds=image,
        first_image_seconds=warm + seconds["load"] + seconds["tables"],
        cold_start_seconds=run.cold_start_seconds(),
        loads=run.loads(),
        prequantized_loads=run.prequantized_loads(),
        usd_per_image=None if usd is None else usd_range(usd, image),
    )


def _ends(found: Mapping[str, Range] | None) -> dict[str, list[float]] | None:
    return found and {name: [figure(end) for end in ends] for name, ends in found.items()}


def _option(option: Option) -> dict[str, Any]:
    setting = option.setting
    return {
        "precision": setting.precision,
        "modulation": setting.modulation,
        "text_encoder_place": setting.text_encoder_place,
        "tiles": option.tiles,
        "resident": option.resident,
        "peak_gib": gib(option.peak_bytes),
        "peak_phase": option.peak_phase,
        "headroom_gib": gib(option.headroom_bytes),
        "moved_gib": gib(option.moved_bytes),
        "recommended": option.recommended,
        "reason": option.reason,
    }


def _settings(wish: Wish, option: Option) -> dict[str, Any]:
    setting = option.setting
    return {
        "precision": setting.precision,
        "width": wish.width,
        "height": wish.height,
        "batch": wish.batch,
        "steps": wish.steps,
        "cfg": wish.cfg,
        "references": wish.references,
        "layers": wish.layers,
        "text_tokens": wish.text_tokens,
        "modulation": setting.modulation,
        "text_encoder": setting.text_encoder,
        "text_encoder_place": setting.text_encoder_place,
        "loras": {
            "count": wish.loras.count,
            "rank": wish.loras.rank,
            "mode": wish.loras.mode,
        },
        "controlnet_gib": gib(wish.controlnet_bytes),
        "tiles": option.tiles,
    }
