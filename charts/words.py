"""An estimate in words: the answer in six lines, then the tables behind it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ..families.schedules import official_sigmas
from ..planning.files import SOFTWARE_BYTES
from ..planning.phases import KEPT_FREE_BYTES, Phase, Range
from ..planning.request import EXACT, W4A8, RunRequest, Setting
from ..planning.times import PROCESSOR
from ..spec.formats import format_gib
from ..step_cache import CUSTOM, OFF, cache_settings, plan_steps
from .figures import adding_up, between, duration, folded, many, table, tenths, tenths_between, usd
from .notes import SHOWN, notes_of, price_of, reasons

if TYPE_CHECKING:
    from ..planning.estimate import Estimate
    from ..planning.plan import PlanOption

PHASE_NAMES = {
    "load": "load",
    "text": "text encode",
    "tables": "modulation",
    "sampling": "sampling",
    "decode": "decode",
}
LORA_WORDS = {
    "auto": "merged, or in bypass mode beside int8 and fp8",
    "merge": "merged",
    "bypass": "in bypass mode",
}
CFG_WORDS = {
    "two passes": "CFG in two passes",
    "one pass": "CFG in one pass",
    "off": "CFG off",
}
# The part that works in a phase; else the transformer.
WORKS = {"text": "text encoder", "decode": "VAE"}
WORKING = "working memory"
PARTS = ("transformer", "text encoder", "VAE", WORKING, "CUDA")
# Of a step that waits for its launches; that the card bounds it is not worth a word.
BOUND = "bound by the processor"
OTHER_PICTURES = (
    "The cache changes the picture slightly; fewer steps or Lightning give another picture."
)
NOTHING_SAFER = "No safer setting stays on the card: choose a smaller size or batch."


def estimate_text(estimate: Estimate, cards: Iterable[str] = ()) -> str:
    """Says what `qwen-l40s estimate` prints and a node keeps behind its picture: the answer, then
    what it rests on.

    Args:
        cards: sentences about several cards (`advice.cards_lines`).
    """
    notes = (*notes_of(estimate), *estimate.notes)
    phases = estimate.phases.values()
    blocks = [
        summary_lines(estimate),
        _stock_table(estimate),
        folded(cards),
        folded(step_cache_lines(estimate)),
        _phase_table(phases),
        _part_table(phases),
        folded([*_needs(estimate), f"Times: {estimate.basis.text}"]),
        _plan_lines(estimate),
        folded(f"Note: {note}" for note in notes),
    ]
    return "\n\n".join("\n".join(lines) for lines in blocks if lines)


def summary_lines(estimate: Estimate) -> list[str]:
    """Says what the node shows: the answer, request, time, settings, template, what to change."""
    return [
        verdict(estimate),
        f"{estimate.card_note} {heading(estimate)}".strip(),
        f"Time: {_time(estimate)}.",
        f"Set: {settings_text(estimate.option.setting)}.",
        *filter(None, [downloads_text(estimate), remedy(estimate), stock_text(estimate)]),
    ]


def verdict(estimate: Estimate) -> str:
    """Says whether it fits, by how much, where the card is fullest, and how much system RAM."""
    usable, phase = estimate.option.usable_bytes, fullest(estimate)
    peak = phase.needed_bytes
    figures = f"{tenths(peak)} of {tenths(usable)} GiB of VRAM in {PHASE_NAMES[phase.name]}"
    figures += f"; {_ram(estimate)}"
    if estimate.short_of_ram:
        return f"{answer(estimate)}: {_ram(estimate)}."
    if estimate.fits:
        return f"{answer(estimate)}: {tenths_between(peak, usable)} GiB to spare, {figures}."
    return f"{answer(estimate)}: {moves(estimate)}; {figures}."


def _ram(estimate: Estimate) -> str:
    there = "" if estimate.ram_bytes is None else f" of {tenths(estimate.ram_bytes)}"
    return f"{tenths(estimate.host_ram_bytes)}{there} GiB of system RAM"


def downloads_text(estimate: Estimate) -> str:
    """Names the template and its files; empty where files are at hand."""
    if not estimate.downloads:
        return ""
    files = ", ".join(f"{file.name} ({format_gib(file.bytes)})" for file in estimate.downloads)
    return f"Template: {estimate.template.name}, with {files}."


def stock_text(estimate: Estimate) -> str:
    """Says what of stock ComfyUI is as fast; empty where nothing is."""
    names = " and ".join(estimate.as_fast)
    return f"Stock ComfyUI may be as fast here: {names}." if names else ""


def answer(estimate: Estimate) -> str:
    """Says whether it fits, in at most four words."""
    if estimate.short_of_ram:
        return "Not enough system RAM"
    if not estimate.fits:
        return "Fits with offloading"
    return "Tight, not measured" if estimate.tight else "Fits"


def fullest(estimate: Estimate) -> Phase:
    return max(estimate.phases.values(), key=lambda phase: phase.needed_bytes)


def moves(estimate: Estimate) -> str:
    """Says what streams to the card, and how long the link takes at least, in one clause."""
    if moved := estimate.request.passes * estimate.option.moved_bytes:
        link = estimate.card.pcie_bytes_per_second  # 0 where nobody has listed it
        least = f" ({moved / link:.2g} s or more)" if link else ""
        return f"{format_gib(moved)} stream from system RAM in every step{least}"
    return f"{format_gib(-estimate.headroom_bytes)} leave the card for each image and come back"


def step_cache_lines(estimate: Estimate) -> list[str]:
    """Says what a step cache saves, beside what else saves that time; nothing without one."""
    request = estimate.request
    if request.cache == OFF:
        return []
    if not estimate.beside:
        return [f"Step cache: {request.cache} has no effect: {_refusal(request)}."]
    image = estimate.image_seconds
    takes = f", {duration(image)} an image" if image else ""
    lines = [f"Step cache: {steps_text(request)}{takes}.", saved_otherwise(estimate)]
    return [*filter(None, lines), OTHER_PICTURES]


def saved_otherwise(estimate: Estimate) -> str:
    """Says how long an image takes that saves time by other means than a step cache; empty where
    that is not known, or the cache saves none.
    """
    request = estimate.request
    if request.computed_steps == request.steps or estimate.image_seconds is None:
        return ""
    fewer, lightning = estimate.beside
    return (
        f"Without a cache, {fewer.request.steps} steps take {duration(fewer.image_seconds)}; "
        f"{lightning.request.steps} steps with a Lightning LoRA and CFG off take "
        f"{duration(lightning.image_seconds)}."
    )


def _refusal(request: RunRequest) -> str:
    none = f"of {request.steps} steps none may be skipped"
    if request.cache == CUSTOM:
        return none
    return plan_steps(official_sigmas(request.steps), cache_settings(request.cache)).reason or none


def steps_text(request: RunRequest) -> str:
    """Says `50 steps`, or `balanced computes 26 of 50 steps`."""
    steps, computed = request.steps, request.computed_steps
    if computed == steps:
        return f"{steps} steps"
    return f"{request.cache} computes {computed} of {steps} steps"


def remedy(estimate: Estimate) -> str:
    """Says what to set or load where something is short; empty where nothing helps or has to."""
    if estimate.short_of_ram:
        less = [f"{name} ({format_gib(it)})" for name, it in estimate.with_less_ram.items()]
        return f"Next: load {' or '.join(less) or 'on a machine with more system RAM'}."
    if estimate.tight:
        return safer_text(estimate)
    if estimate.fits:
        return ""
    other = next((option for option in estimate.options if option.resident), None)
    if other is not None:
        tiles = "tiles 0" * (other.request.tiles != estimate.request.tiles)
        changed = ", ".join(filter(None, (changes(estimate.option.setting, other.setting), tiles)))
        time = _image_time(estimate, other)
        return f"Next: set {changed}, which fits with {_spare(other)} GiB to spare{time}."
    # Where weights move in each pass, a smaller image changes that little.
    return "" if estimate.option.moved_bytes else "Next: choose a smaller size or batch."


def safer_text(estimate: Estimate) -> str:
    """Says what to set where it is tight, and what that leaves."""
    safer = estimate.safer
    if safer is None:
        return NOTHING_SAFER
    changed = changes(estimate.option.setting, safer.setting)
    return f"Safer: {changed}, with {_spare(safer)} GiB to spare."


def changes(setting: Setting, other: Setting) -> str:
    return ", ".join(
        f"{name} {after}"
        for (name, before), after in zip(
            _named(setting).items(), _named(other).values(), strict=True
        )
        if before != after
    )


def settings_text(setting: Setting) -> str:
    """Says how a setting is set in the loaders."""
    loader, encoder = "Load Qwen-Image Text Encoder", setting.text_encoder
    encoder = f"{loader}: precision {encoder}, placement {setting.placement}"
    if setting.text_encoder == W4A8:
        encoder = "Load CLIP: a text encoder in w4a8"
    return (
        f"Load Qwen-Image Model: precision {setting.precision}, modulation {setting.modulation}; "
        f"{encoder}"
    )


def _named(setting: Setting) -> dict[str, str]:
    return {
        "precision": setting.precision,
        "modulation": setting.modulation,
        "text_encoder_precision": setting.text_encoder,
        "text_encoder_placement": setting.placement,
    }


def _spare(option: PlanOption) -> str:
    return tenths_between(option.peak_bytes, option.usable_bytes)


def heading(estimate: Estimate) -> str:
    request, precision = estimate.request, estimate.option.setting.precision
    return f"{estimate.card.name}: {request.family}, {precision}, {request_text(request)}"


def request_text(request: RunRequest) -> str:
    """Names size, batch and what else differs from a plain picture."""
    words = [
        f"{request.width}x{request.height}",
        f"batch {request.batch}",
        steps_text(request),
        CFG_WORDS[request.cfg],
    ]
    if request.attention != EXACT:
        words.append(f"attention {request.attention}")
    if request.references:
        words.append(many(request.references, "reference"))
    if request.layers:
        words.append(many(request.layers, "layer"))
    if request.loras.count:
        words.append(
            f"{many(request.loras.count, 'LoRA')} of rank {request.loras.rank}, "
            f"{LORA_WORDS[request.loras.mode]}"
        )
    if request.nag_tokens:
        words.append(f"NAG with {request.nag_tokens} tokens")
    if request.controlnet_bytes:
        words.append(f"ControlNet of {format_gib(request.controlnet_bytes)}")
    words += (f"beside {other.family} in {other.precision}" for other in request.others)
    return ", ".join(words)


def rests_on(estimate: Estimate) -> str:
    return "from measured rates" if estimate.basis.kind == "measured" else "predicted"


def parts_of(phase: Phase) -> dict[str, int]:
    """Counts {what is on the card in a phase: bytes}, those of `PARTS` first."""
    held = {**dict.fromkeys(PARTS, 0), **phase.resident}
    held[WORKS.get(phase.name, "transformer")] += phase.weights
    held[WORKING] += phase.activations + phase.workspace
    held["CUDA"] += phase.context
    return held


def _time(estimate: Estimate) -> str:
    if estimate.image_seconds is None:
        return "unknown, because the card is not in the list"
    image, step = duration(estimate.image_seconds), duration(estimate.step_seconds)
    computed = " computed" * (estimate.request.computed_steps < estimate.request.steps)
    waits = f", {BOUND}" if estimate.bound == PROCESSOR else ""
    cost = estimate.usd_per_image
    paid = f"; {usd(cost)} an image at {price_of(estimate)}" if cost else ""
    return f"{image} an image, {step} a{computed} step{waits} ({rests_on(estimate)}){paid}"


def _phase_table(phases: Iterable[Phase]) -> list[str]:
    rows = [["phase", "GiB on card", "time"]]
    for phase in phases:
        time = "" if phase.seconds is None else duration(phase.seconds)
        rows.append([PHASE_NAMES[phase.name], tenths(phase.card_bytes), time])
    return table(rows, right=(1, 2))


def _stock_table(estimate: Estimate) -> list[str]:
    rows = [
        [name, duration(estimate.stock[name]), _against(it)] for name, it in estimate.faster.items()
    ]
    return table([["stock ComfyUI", "a step", "ours against it"], *rows]) if rows else []


def _against(faster: Range) -> str:
    if faster.high < 1:
        longer = Range(1 / faster.high, 1 / faster.low)
        return f"takes {between(longer, '{:.2f}'.format)} times as long"
    return f"{between(faster, '{:.2f}'.format)} times as fast"


def _part_table(phases: Iterable[Phase]) -> list[str]:
    held = {PHASE_NAMES[phase.name]: parts_of(phase) for phase in phases}
    others = sorted({name for parts in held.values() for name in parts} - set(PARTS))
    names = [name for name in (*PARTS, *others) if any(parts.get(name) for parts in held.values())]
    rows = [["GiB of", *held]]
    columns = [adding_up([parts.get(name, 0) for name in names]) for parts in held.values()]
    rows += [[name, *figures] for name, *figures in zip(names, *columns, strict=True)]
    return table(rows, right=range(1, len(held) + 1))


def _needs(estimate: Estimate) -> list[str]:
    option = estimate.option
    files = {**estimate.files, "software and outputs": SOFTWARE_BYTES}
    parts = ", ".join(
        f"{name} {size}" for name, size in zip(files, adding_up([*files.values()]), strict=True)
    )
    return [
        f"Card: {tenths(option.usable_bytes)} of {tenths(option.card.total_bytes)} GiB usable: "
        f"ComfyUI keeps {format_gib(KEPT_FREE_BYTES)} free",
        f"Disk: {tenths(estimate.disk_bytes)} GiB: {parts}",
    ]


def _plan_lines(estimate: Estimate) -> list[str]:
    lines = ["Plan, the recommended setting first"]
    if not estimate.option.recommended:
        lines = ["Plan, your settings first; -> marks the recommended ones"]
    for option in estimate.options:
        peak, spare = tenths(option.peak_bytes), _spare(option)
        figures = f"{peak} GiB, {spare} to spare"
        time = _image_time(estimate, option)
        if option.headroom_bytes < 0:
            figures = f"all of it takes {peak} GiB, {spare} too much"
        mark = "->" if option.recommended else "  "
        lines += folded([f"{mark} {option_text(option)}: {figures}{time}"])
        lines += folded(reasons(option).values(), "     ")
    return lines


def _image_time(estimate: Estimate, option: PlanOption) -> str:
    seconds = estimate.seconds_of(option)
    return f", {duration(seconds)} an image" if seconds else ""


def option_text(option: PlanOption) -> str:
    setting = option.setting
    tiles = "" if option.tiles <= 1 else f", VAE in {option.tiles} tiles"
    moved = "" if option.resident else ", offloaded for each image"
    if option.moved_bytes:
        moved = ", offloaded in every step"
    precision = SHOWN.get(setting.precision, setting.precision)
    return (
        f"{precision}, modulation {setting.modulation}, text encoder {setting.text_encoder} "
        f"{setting.text_encoder_place}{tiles}{moved}"
    )
