"""An estimate as a picture and as the JSON object of command and node; and what stops."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ..planning.cards import Card
from ..planning.estimate import DOES_NOT_FIT, FITS, Estimate
from ..planning.phases import Phase, Range, figure, gib
from ..planning.plan import PlanOption
from ..planning.request import RunRequest
from ..planning.times import PROCESSOR
from ..step_cache import OFF
from .figures import duration, folded, tenths, usd
from .notes import notes_of, price_of, reasons
from .run_chart import HOST_MEMORY, Bar, Figure, Limit, RunPicture, run_chart
from .words import (
    BOUND,
    PHASE_NAMES,
    WORKING,
    answer,
    fullest,
    heading,
    moves,
    parts_of,
    remedy,
    request_text,
    rests_on,
    saved_otherwise,
)

if TYPE_CHECKING:
    from PIL import Image

ANSWER = "Does not fit"


def estimate_json(estimate: Estimate) -> dict[str, Any]:
    """Gives figures in the unit of their name, the middle where there is a range."""
    times = estimate.times
    step = estimate.step_seconds and estimate.step_seconds.times(1000)
    answers = {
        "step_ms": step,
        "image_seconds": estimate.image_seconds,
        "first_image_seconds": estimate.first_image_seconds,
        "cold_start_seconds": times and times.cold_start,
        "usd_per_image": estimate.usd_per_image,
    }
    ranges = {name: ends for name, ends in answers.items() if ends is not None}
    return {
        "card": estimate.card.name,
        "family": estimate.request.family,
        "settings": _settings(estimate.request, estimate.option),
        "phases": {name: phase_json(phase) for name, phase in estimate.phases.items()},
        "fits": estimate.verdict == FITS,
        "tight": estimate.tight,
        "verdict": estimate.verdict,
        "headroom_gib": gib(estimate.headroom_bytes),
        **{name: ends and figure(ends.middle) for name, ends in answers.items()},
        "step_bound_by": estimate.bound,
        "step_cache": _step_cache(estimate),
        "stock": {
            name: {
                "step_ms": [figure(1000 * end) for end in seconds],
                "times_as_fast": [figure(end) for end in estimate.faster[name]],
            }
            for name, seconds in estimate.stock.items()
        },
        "ranges": _ends(ranges),
        "disk_gib": gib(estimate.disk_bytes),
        "disk": {"files_gib": {name: gib(count) for name, count in estimate.files.items()}},
        "host_ram_gib": gib(estimate.host_ram_bytes),
        "ram_gib": None if estimate.ram_bytes is None else gib(estimate.ram_bytes),
        "with_less_ram_gib": {name: gib(count) for name, count in estimate.with_less_ram.items()},
        "offloaded_gib_per_step": gib(estimate.request.passes * estimate.option.moved_bytes),
        "template": estimate.template and estimate.template.name,
        "downloads_gib": {f"{file.name}.safetensors": file.gib for file in estimate.downloads},
        "stock_as_fast": [*estimate.as_fast],
        "plan": [
            {**_option(option), "image_seconds": _pair(estimate.seconds_of(option))}
            for option in estimate.options
        ],
        "basis": estimate.basis.kind,
        "basis_detail": estimate.basis.text,
        "notes": [*notes_of(estimate), *estimate.notes, *filter(None, [estimate.card_note])],
    }


def _step_cache(estimate: Estimate) -> dict[str, Any] | None:
    request = estimate.request
    if request.cache == OFF:
        return None
    beside = zip(("fewer_steps", "lightning"), estimate.beside, strict=False)
    return {
        "name": request.cache,
        "computed_steps": request.computed_steps,
        "beside": {
            name: {
                "steps": each.request.steps,
                "cfg": each.request.cfg,
                "image_seconds": each.image_seconds and figure(each.image_seconds.middle),
            }
            for name, each in beside
        },
    }


def phase_json(phase: Phase) -> dict[str, Any]:
    parts: dict[str, Any] = {
        name: gib(getattr(phase, name))
        for name in ("weights", "activations", "workspace", "context")
    }
    parts["resident"] = {name: gib(count) for name, count in phase.resident.items()}
    return {
        "peak_gib": gib(phase.peak_bytes),
        "card_gib": gib(phase.card_bytes),
        "parts": parts,
        "seconds": None if phase.seconds is None else figure(phase.seconds.middle),
    }


def _pair(ends: Range | None) -> list[float] | None:
    return ends and [figure(end) for end in ends]


def _ends(found: Mapping[str, Range] | None) -> dict[str, list[float]] | None:
    return found and {name: _pair(ends) for name, ends in found.items()}


def _option(option: PlanOption) -> dict[str, Any]:
    return {
        **_named(option.setting, "precision", "modulation", "text_encoder_place"),
        **_named(option, "tiles", "resident"),
        "peak_gib": gib(option.peak_bytes),
        "peak_phase": option.peak_phase,
        "headroom_gib": gib(option.headroom_bytes),
        "moved_gib": gib(option.moved_bytes),
        "recommended": option.recommended,
        "reason": "; ".join(reasons(option).values()),
    }


def _settings(request: RunRequest, option: PlanOption) -> dict[str, Any]:
    setting = option.setting
    counts = "width", "height", "batch", "steps", "cfg", "references", "layers", "text_tokens"
    return {
        "precision": setting.precision,
        **_named(request, *counts, *["nag_tokens"] * (request.nag_tokens > 0)),
        **_named(setting, "modulation", "text_encoder", "text_encoder_place"),
        "loras": asdict(request.loras),
        "controlnet_gib": gib(request.controlnet_bytes),
        "with": [f"{other.family}:{other.precision}" for other in request.others],
        "tiles": option.tiles,
        "cache": request.cache,
        "attention": setting.attention,
    }


def _named(thing: Any, *names: str) -> dict[str, Any]:
    return {name: getattr(thing, name) for name in names}


def memory_chart(estimate: Estimate) -> Image.Image:
    """Draws whether an estimate fits, how long an image takes and what it costs, and a bar for each
    phase: amber is what has no room on the card and waits in host memory.
    """
    peak, usable = fullest(estimate).needed_bytes, estimate.option.usable_bytes
    ram = f"{tenths(estimate.host_ram_bytes)} GiB system RAM"
    figures = [Figure("VRAM", f"{tenths(peak)} of {tenths(usable)} GiB", ram)]
    if estimate.image_seconds:
        step, cost = duration(estimate.step_seconds), estimate.usd_per_image
        figures.append(Figure("an image", duration(estimate.image_seconds), f"{step} a step"))
        if cost:
            figures.append(Figure("cost of an image", usd(cost), f"at {price_of(estimate)}"))
        else:
            figures.append(Figure("cost of an image", "unknown", "no price known"))
    return run_chart(
        RunPicture(
            sign=sign(estimate),
            answer=answer(estimate),
            basis=rests_on(estimate),
            lines=[
                estimate.card_note,
                f"A step is {BOUND}." if estimate.bound == PROCESSOR else "",
                "" if estimate.fits else f"{moves(estimate)}.",
                remedy(estimate),
                saved_otherwise(estimate),
            ],
            about=heading(estimate),
            figures=figures,
            bars=[_bar(estimate, name, phase) for name, phase in estimate.phases.items()],
            limit=Limit(peak, usable, estimate.card.memory_bytes),
        )
    )


def sign(estimate: Estimate) -> str:
    if estimate.short_of_ram:
        return "bad"
    return "good" if estimate.fits and not estimate.tight else "tight"


def _bar(estimate: Estimate, name: str, phase: Phase) -> Bar:
    # What would have to be there too for all to stay.
    beyond = max(0, estimate.option.needs.get(name, 0) - phase.card_bytes)
    held = parts_of(phase)
    parts = {part: held.pop(part) for part in ("transformer", "text encoder", WORKING)}
    time = "" if phase.seconds is None else duration(phase.seconds)
    return Bar(
        PHASE_NAMES[name],
        {**parts, "other": sum(held.values()), HOST_MEMORY: beyond},
        f"{tenths(phase.card_bytes)} GiB",
        time,
    )


@dataclass(frozen=True)
class Refusal:
    """A request that a card does not run, even where weights move; `reason` is the planner's."""

    card: Card
    request: RunRequest
    reason: str
    card_note: str = ""

    @property
    def summary(self) -> str:
        about = f"{self.card_note} {self._about}".strip()
        return f"{ANSWER}: {self.reason}\n{about}"

    @property
    def text(self) -> str:
        return "\n".join(folded(self.summary.splitlines()))

    def as_dict(self) -> dict[str, Any]:
        return {
            "card": self.card.name,
            "family": self.request.family,
            "fits": False,
            "verdict": DOES_NOT_FIT,
            "reason": self.reason,
            "notes": [*filter(None, [self.card_note])],
        }

    def chart(self) -> Image.Image:
        lines = [self.card_note, self.reason]
        return run_chart(RunPicture("bad", ANSWER, "predicted", lines, self._about))

    @property
    def _about(self) -> str:
        return f"{self.card.name}: {self.request.family}, {request_text(self.request)}"
