"""The whole answer before a run: memory of each phase, times, disk, host memory and cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from .cards import Card
from .cost import check_price, usd_range
from .disk import GB, Advice, Disk, against_guides, disk
from .estimate import NOTHING, Phase, Range, figure, gib
from .estimator_notes import notes_of
from .plan import Option, plan
from .plan_trial import sized
from .rates import Basis, Rates, rates_of
from .residence import host_ram_bytes
from .run_times import RunTimes
from .wish import Wish


@dataclass(frozen=True)
class Estimate:
    """What a wish takes on a card.

    Attributes:
        option: The plan's recommendation, which everything here is of.
        options: All of the plan.
        phases: By name, with seconds. Where weights do not stay on the card, the bytes say what
            would be there if they did.
        fits: Whether all stays on the card in every phase, with what the host keeps free.
        headroom_bytes: What is left of the card in the worst phase; negative by what is lacking.
        step_seconds: One step of the sampler, with both prompts where there are two.
        image_seconds: One image of a run with a new prompt, when everything is loaded and the
            schedule's modulation table is there.
        first_image_seconds: The first run, all of its images: files in memory, nothing on the card.
        cold_start_seconds: From the start of ComfyUI until all weights are on the card, files on an
            NVMe disk.
        usd_per_image: None without a price.
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
    step_seconds: Range
    image_seconds: Range
    first_image_seconds: Range
    cold_start_seconds: Range
    usd_per_image: Range | None
    disk: Disk
    host_ram_bytes: int
    basis: Basis
    notes: tuple[str, ...]

    @property
    def guides(self) -> tuple[Advice, ...]:
        """What guides for rented machines advise, beside what is needed."""
        most = max(phase.card_bytes for phase in self.phases.values())
        return against_guides(self.disk, self.option.setting, most)

    def as_dict(self) -> dict[str, Any]:
        """For JSON: figures in the unit of their name, the middle where there is a range."""
        step = self.step_seconds.times(1000)
        ranges = {"step_ms": step, "image_seconds": self.image_seconds}
        if self.usd_per_image is not None:
            ranges["usd_per_image"] = self.usd_per_image
        usd = self.usd_per_image
        return {
            "card": self.card.name,
            "family": self.wish.family,
            "settings": _settings(self.wish, self.option),
            "phases": {name: phase.as_dict() for name, phase in self.phases.items()},
            "fits": self.fits,
            "headroom_gib": gib(self.headroom_bytes),
            "step_ms": figure(step.middle),
            "image_seconds": figure(self.image_seconds.middle),
            "first_image_seconds": figure(self.first_image_seconds.middle),
            "cold_start_seconds": figure(self.cold_start_seconds.middle),
            "usd_per_image": None if usd is None else figure(usd.middle),
            "ranges": {name: [figure(end) for end in ends] for name, ends in ranges.items()},
            "disk_gib": gib(self.disk.total_bytes),
            "disk": {
                "files_gib": {name: gib(count) for name, count in self.disk.files.items()},
                "container_gib": {name: gib(count) for name, count in self.disk.container.items()},
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
    slow, fast, basis = rates_of(card, calibration)
    run = RunTimes(sized(wish, option.setting.precision), option, card, slow, fast)
    files = disk(run.wish, option.setting)
    phases = run.phases(files.files_bytes)
    seconds = {name: phase.seconds or NOTHING for name, phase in phases.items()}
    warm = seconds["text"] + seconds["sampling"] + seconds["decode"]
    image = warm.times(1 / wish.batch)
    price = card.price()
    usd = usd_per_hour if price is None or usd_per_hour is not None else price.usd_per_hour
    found = Estimate(
        card=card,
        wish=wish,
        option=option,
        options=options,
        phases=phases,
        fits=option.headroom_bytes >= 0,
        headroom_bytes=option.headroom_bytes,
        step_seconds=seconds["sampling"].times(1 / wish.steps),
        image_seconds=image,
        first_image_seconds=warm + seconds["load"] + seconds["tables"],
        cold_start_seconds=run.cold_start_seconds(files.files_bytes),
        usd_per_image=None if usd is None else usd_range(usd, image),
        disk=files,
        host_ram_bytes=host_ram_bytes(run.wish, option.setting, card.memory_bytes),
        basis=basis,
        notes=(),
    )
    notes = notes_of(found, own_price=usd_per_hour is not None, loras_seconds=run.loras_seconds())
    return replace(found, notes=notes)


def _option(option: Option) -> dict[str, Any]:
    setting = option.setting
    return {
        "precision": setting.precision,
        "modulation": setting.modulation,
        "text_encoder_place": setting.text_encoder_place,
        "tiles": option.tiles,
        "resident": option.resident,
        "peak_gib": gib(option.peak_bytes),
        "headroom_gib": gib(option.headroom_bytes),
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
