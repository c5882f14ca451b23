"""An estimate in words: the answer first, then what it rests on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from ..planning.files import CARD_MEMORY
from ..planning.phases import KEPT_FREE_BYTES, Phase
from ..planning.request import RunRequest
from ..spec import GB, GIB, format_gib
from .figures import duration, folded, table, usd
from .notes import notes_of

if TYPE_CHECKING:
    from ..planning.estimate import Estimate
    from ..planning.plan import PlanOption

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


def estimate_text(estimate: Estimate) -> str:
    """What `qwen-l40s estimate` and the node print: whether it fits, then the figures behind it."""
    notes = (*notes_of(estimate), *estimate.notes)
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
        [_plan_heading(estimate.options), *_plan_lines(estimate.options)],
        [line for note in notes for line in folded(f"note: {note}", "")],
    ]
    return "\n\n".join("\n".join(lines) for lines in blocks if lines)


def summary_text(estimate: Estimate) -> str:
    """What the node shows in itself: whether it fits, of what, and an image's time and cost."""
    lines = [verdict(estimate), heading(estimate)]
    if estimate.image_seconds:
        time = f"{duration(estimate.image_seconds)}, {rests_on(estimate)}"
        lines.append(f"image: {time}; {_cost(estimate)}")
    return "\n".join(lines)


def verdict(estimate: Estimate) -> str:
    """Whether it fits, by how much, and where it is tightest: one sentence."""
    option = estimate.option
    peak, usable = format_gib(option.peak_bytes), format_gib(usable_bytes(estimate))
    when = PHASE_NAMES[option.peak_phase]
    if estimate.fits:
        spare = format_gib(estimate.headroom_bytes)
        return f"Fits: {peak} of {usable} to use, in {when}; {spare} to spare."
    moved = option.moved_bytes
    how = f"; the host moves {format_gib(moved)} to the card in every forward pass" if moved else ""
    return f"Does not fit: {peak} would be needed of {usable}, in {when}{how}."


def usable_bytes(estimate: Estimate) -> int:
    """Of the card, less what the host keeps free."""
    return max(0, estimate.card.memory_bytes - KEPT_FREE_BYTES)


def heading(estimate: Estimate) -> str:
    """The card and what runs on it, in one line."""
    request, setting = estimate.request, estimate.option.setting
    return f"{estimate.card.name}: {request.family}, {setting.precision}, {request_text(request)}"


def request_text(request: RunRequest) -> str:
    """Size, batch and what else differs from a plain picture."""
    words = [
        f"{request.width}x{request.height}",
        f"batch {request.batch}",
        f"{request.steps} steps",
    ]
    words.append(CFG_WORDS[request.cfg])
    if request.references:
        words.append(_many(request.references, "reference"))
    if request.layers:
        words.append(_many(request.layers, "layer"))
    if request.loras.count:
        words.append(
            f"{_many(request.loras.count, 'LoRA')} of rank {request.loras.rank}, "
            f"{request.loras.mode}"
        )
    if request.controlnet_bytes:
        words.append(f"ControlNet of {format_gib(request.controlnet_bytes)}")
    return ", ".join(words)


def basis_text(estimate: Estimate) -> str:
    """Whether the times were measured or predicted, and from what."""
    return f"Times {estimate.basis.text}"


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
    software = f"software and outputs {_gb(disk.container_bytes)}"
    times = {"step": estimate.step_seconds, "image": estimate.image_seconds}
    return [
        *(
            (name, f"{duration(time)}, {rests_on(estimate)}")
            for name, time in times.items()
            if time
        ),
        *([("cost", _cost(estimate))] if estimate.image_seconds else []),
        ("disk", f"{_gb(disk.total_bytes)}: {_named(disk.files)}, {software}"),
        ("guides say", _guides(estimate)),
        ("host RAM", format_gib(estimate.host_ram_bytes)),
    ]


def rests_on(estimate: Estimate) -> str:
    """Every time is computed; what differs is what from."""
    return "from measured rates" if estimate.basis.kind == "measured" else "predicted"


def _guides(estimate: Estimate) -> str:
    return ", ".join(
        f"{advice.advised_bytes / GB:.0f} GB of {advice.what} (here "
        + (format_gib if advice.what == CARD_MEMORY else _gb)(advice.needed_bytes)
        + ")"
        for advice in estimate.guides
    )


def _cost(estimate: Estimate) -> str:
    if estimate.usd_per_image is None:
        return "no price is known: give your own in USD an hour (--price, or the node's)"
    return f"{usd(estimate.usd_per_image)} an image"


def _plan_heading(options: Sequence[PlanOption]) -> str:
    if options[0].recommended:
        return "plan, the recommended first"
    return "plan, as asked first; the recommended is marked"


def _plan_lines(options: Sequence[PlanOption]) -> list[str]:
    lines = []
    for option in options:
        peak, spare = format_gib(option.peak_bytes), option.headroom_bytes
        room = f"{format_gib(spare)} to spare" if spare >= 0 else f"{format_gib(-spare)} too much"
        mark = "->" if option.recommended else "  "
        lines.append(f"{mark} {option_text(option)}: {peak}, {room}")
        for reason in option.reasons.values():
            lines += folded(reason, "     ")
    return lines


def option_text(option: PlanOption) -> str:
    """The settings of one option in one line."""
    setting = option.setting
    tiles = "whole VAE" if option.tiles <= 1 else f"VAE in {option.tiles} tiles"
    moved = "" if option.resident else ", weights move for each image"
    if option.moved_bytes:
        moved = ", weights move in every step"
    return (
        f"{setting.precision}, modulation {setting.modulation}, text encoder "
        f"{setting.text_encoder} {setting.text_encoder_place}, {tiles}{moved}"
    )


def _named(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {_gb(count)}" for name, count in sizes.items())


def _gb(count: int) -> str:
    """Decimal, as disks and downloads are sold."""
    return f"{count / GB:.1f} GB" if count >= GB / 10 else f"{count / 1e6:.0f} MB"


def _gib(count: int) -> str:
    return f"{count / GIB:.2f}"


def _many(count: int, thing: str) -> str:
    return f"{count} {thing}{'s' * (count != 1)}"
