"""Writes an estimate in words and for programs: the answer, the tables behind it, the reasons for a
plan, what several cards do, and which card is the cheapest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from ..families.protocol import APACHE
from ..families.schedules import official_sigmas
from ..planning.advise import Advice, Offer, Together, together
from ..planning.bytes import text_encoder_bytes
from ..planning.cards import STARTING, Card, Price, UnlistedCard
from ..planning.estimate import DOES_NOT_FIT, FITS, Estimate
from ..planning.files import SOFTWARE_BYTES, made_on_load
from ..planning.options import CHOICE_LABELS, label_of, labelled
from ..planning.phases import Phase, Range, figure, gib, transformer_bytes
from ..planning.plan import PlanOption, auto_precision
from ..planning.rates import attention_share, class_of
from ..planning.request import (
    AS_STORED,
    AUTO,
    DROPPED,
    EXACT,
    FAST,
    ON_PROCESSOR,
    STREAMED,
    W4A8,
    RunRequest,
    Setting,
)
from ..planning.split_cost import KEYS, LEAST_GAIN, ROWS
from ..planning.step_cache import CUSTOM, OFF, cache_settings, plan_steps
from ..planning.times import PROCESSOR
from ..spec.formats import FORMATS, GIB, QUANTIZED, CardFacts, format_gib, sm
from .figures import (
    adding_up,
    between,
    dollars,
    duration,
    folded,
    many,
    significant,
    table,
    tenths,
    tenths_between,
    usd,
)

# {phase: (its name, what goes on)}
PHASE_WORDS = {
    "load": ("load", "loading"),
    "text": ("text encode", "encoding the prompt"),
    "tables": ("modulation", "filling the modulation table"),
    "sampling": ("sampling", "sampling"),
    "decode": ("decode", "decoding"),
}
LORA_WORDS = {
    "auto": "merged, or in bypass mode beside int8 and fp8",
    "merge": "merged",
    "bypass": "in bypass mode",
}
CFG_WORDS = {
    "two passes": "CFG above 1",
    "one pass": "CFG above 1 (one batch)",
    "off": "CFG 1",
}
# The part that works in a phase; else the transformer.
WORKS = {"text": "text encoder", "decode": "VAE"}
WORKING = "working memory"
PARTS = ("transformer", "text encoder", "VAE", WORKING, "CUDA")
# Of a step that waits for its launches; that the card bounds it is not worth a word.
BOUND = "bound by the CPU"
NOTHING_SAFER = "No safer setting fits in VRAM: choose a smaller size or batch."
# Of each precision, where people see it.
SHOWN = CHOICE_LABELS["precision"]
DEVICES = CHOICE_LABELS["placement"]


def estimate_text(estimate: Estimate, cards: Iterable[str] = ()) -> str:
    """Says what `estimate` prints and a node keeps: the answer, then what it rests on."""
    files = {**estimate.files, "software and outputs": SOFTWARE_BYTES}
    sizes = zip(files, adding_up([*files.values()]), strict=True)
    disk = f"{tenths(estimate.disk_bytes)} GiB: {', '.join(map(' '.join, sizes))}"
    blocks = [
        summary_lines(estimate),
        _stock_table(estimate),
        folded(cards),
        folded(step_cache_lines(estimate)),
        _phase_table(estimate.phases.values()),
        folded([f"Disk: {disk}", f"Times: {estimate.basis.text}"]),
        _plan_lines(estimate),
        folded(f"Note: {note}" for note in (*notes_of(estimate), *estimate.notes)),
    ]
    return "\n\n".join("\n".join(lines) for lines in blocks if lines)


# The answer.


def summary_lines(estimate: Estimate) -> list[str]:
    """Says what the node shows: the answer, request, time, settings, template, what to change."""
    return [
        verdict(estimate),
        f"{estimate.card_note} {heading(estimate)}".strip(),
        f"Time: {_time(estimate)}.",
        f"Set: {settings_text(estimate.option)}.",
        *filter(None, [downloads_text(estimate), remedy(estimate), stock_text(estimate)]),
    ]


def verdict(estimate: Estimate) -> str:
    """Says whether it fits, by how much, where the card is fullest, and how much system RAM."""
    there = "" if estimate.ram_bytes is None else f" of {tenths(estimate.ram_bytes)}"
    ram = f"{tenths(estimate.host_ram_bytes)}{there} GiB of system RAM"
    if estimate.short_of_ram:
        return f"{answer(estimate)}: {ram}."
    usable, phase = estimate.option.usable_bytes, fullest(estimate)
    peak = phase.needed_bytes
    spare = f"{tenths_between(peak, usable)} GiB to spare, " if estimate.fits else ""
    return (
        f"{answer(estimate)}: {spare or moves(estimate) + '; '}{tenths(peak)} of {tenths(usable)} "
        f"GiB of VRAM in {PHASE_WORDS[phase.name][0]}; {ram}."
    )


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
    return f"{format_gib(-estimate.headroom_bytes)} leave VRAM for each image and come back"


def heading(estimate: Estimate) -> str:
    request, precision = estimate.request, estimate.option.setting.precision
    return f"{estimate.card.name}: {request.family}, {precision}, {request_text(request)}"


def request_text(request: RunRequest) -> str:
    """Names size, batch and what else differs from a plain run."""
    loras = request.loras
    words = {
        f"{request.width}x{request.height}": True,
        f"batch {request.batch}": True,
        steps_text(request): True,
        CFG_WORDS[request.cfg]: True,
        f"attention {request.attention}": request.attention != EXACT,
        many(request.references, "reference"): request.references,
        many(request.layers, "layer"): request.layers,
        f"{many(loras.count, 'LoRA')} of rank {loras.rank}, {LORA_WORDS[loras.mode]}": loras.count,
        f"NAG with {request.nag_tokens} tokens": request.nag_tokens,
        f"ControlNet of {format_gib(request.controlnet_bytes)}": request.controlnet_bytes,
    }
    others = (f"beside {other.family} in {other.precision}" for other in request.others)
    return ", ".join([*(text for text, there in words.items() if there), *others])


def steps_text(request: RunRequest) -> str:
    """Says `50 steps`, or `balanced computes 26 of 50 steps`."""
    steps, computed = request.steps, request.computed_steps
    if computed == steps:
        return many(steps, "step")
    return f"{label_of('cache', request.cache)} computes {computed} of {steps} steps"


def _time(estimate: Estimate) -> str:
    if estimate.image_seconds is None:
        return "unknown, because the GPU is not in the list"
    image, step = duration(estimate.image_seconds), duration(estimate.step_seconds)
    computed = " computed" * (estimate.request.computed_steps < estimate.request.steps)
    waits = f", {BOUND}" if estimate.bound == PROCESSOR else ""
    cost = estimate.usd_per_image
    paid = f"; {usd(cost)} an image at {price_of(estimate)}" if cost else ""
    return f"{image} an image, {step} a{computed} step{waits} ({rests_on(estimate)}){paid}"


def rests_on(estimate: Estimate) -> str:
    return "from measured rates" if estimate.basis.kind == "measured" else "predicted"


def price_of(found: Estimate) -> str:
    """Says `$0.72 an hour or more`, of an estimate that has a price."""
    usd, starting = found.own_usd_per_hour, ""
    if usd is None:
        price = found.card.price()
        usd, starting = price.usd_per_hour, " or more" * (price.kind == STARTING)
    return f"${dollars(usd)} an hour{starting}"


def settings_text(option: PlanOption) -> str:
    setting = option.setting
    model = {"precision": option.loads_as, "modulation": setting.modulation}
    of_text = {"precision": setting.text_encoder, "placement": setting.placement}
    encoder = f"Load Qwen-Image Text Encoder: {_said(of_text)}"
    if setting.text_encoder == W4A8:
        encoder = "Load CLIP: a text encoder in w4a8"
    return f"Load Qwen-Image Model: {_said(model)}; {encoder}"


def _said(settings: Mapping[str, str]) -> str:
    return ", ".join(labelled(name, value) for name, value in settings.items())


def downloads_text(estimate: Estimate) -> str:
    """Names the template and its files; empty where the user has files."""
    if not estimate.downloads:
        return ""
    files = ", ".join(f"{file.name} ({format_gib(file.bytes)})" for file in estimate.downloads)
    return f"Template: {estimate.template.name}, with {files}."


def remedy(estimate: Estimate) -> str:
    """Says what to set or load where something is short; empty where nothing helps or has to."""
    if estimate.short_of_ram:
        less = [f"{name} ({format_gib(it)})" for name, it in estimate.with_less_ram.items()]
        return f"Next: load {' or '.join(less) or 'on a machine with more system RAM'}."
    if estimate.tight:
        return safer_text(estimate)
    if estimate.fits:
        return ""
    for option, seconds in estimate.plan:
        if option.resident:
            tiles = "tiles 0" * (option.request.tiles != estimate.request.tiles)
            changed = changes(estimate.option.setting, option.setting)
            changed = ", ".join(filter(None, (changed, tiles)))
            spare = f"{_spare(option)} GiB to spare{_image_time(seconds)}"
            return f"Next: set {changed}, which fits with {spare}."
    # Where weights move in each pass, a smaller image changes that little.
    return "" if estimate.option.moved_bytes else "Next: choose a smaller size or batch."


def safer_text(estimate: Estimate) -> str:
    safer = estimate.safer
    if safer is None:
        return NOTHING_SAFER
    changed = changes(estimate.option.setting, safer.setting)
    return f"Safer: {changed}, with {_spare(safer)} GiB to spare."


def changes(setting: Setting, other: Setting) -> str:
    names = {
        "precision": "precision",
        "modulation": "modulation",
        "text_encoder_precision": "text_encoder",
        "text_encoder_placement": "placement",
    }
    changed = {
        name: getattr(other, field)
        for name, field in names.items()
        if getattr(setting, field) != getattr(other, field)
    }
    return _said(changed)


def _spare(option: PlanOption) -> str:
    return tenths_between(option.peak_bytes, option.usable_bytes)


def _image_time(seconds: Range | None) -> str:
    return f", {duration(seconds)} an image" if seconds else ""


def stock_text(estimate: Estimate) -> str:
    """Says what of stock ComfyUI is as fast; empty where nothing is."""
    names = " and ".join(estimate.as_fast)
    return f"Stock ComfyUI may be as fast here: {names}." if names else ""


def step_cache_lines(estimate: Estimate) -> list[str]:
    """Says what a step cache computes, or why it skips no step; nothing without one."""
    request = estimate.request
    if request.cache == OFF:
        return []
    if request.computed_steps == request.steps:
        why = f"of {request.steps} steps none may be skipped"
        if request.cache != CUSTOM:
            settings = cache_settings(request.cache)
            why = plan_steps(official_sigmas(request.steps), settings).reason or why
        return [f"Step cache: {label_of('cache', request.cache)} has no effect: {why}."]
    return [
        f"Step cache: {steps_text(request)}{_image_time(estimate.image_seconds)}.",
        "The cache changes the image slightly.",
    ]


# The tables behind it.


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


def parts_of(phase: Phase) -> dict[str, int]:
    """Counts {what is on the card in a phase: bytes}, those of `PARTS` first."""
    held = {**dict.fromkeys(PARTS, 0), **phase.resident}
    held[WORKS.get(phase.name, "transformer")] += phase.weights
    held[WORKING] += phase.activations + phase.workspace
    held["CUDA"] += phase.context
    return held


def _phase_table(phases: Iterable[Phase]) -> list[str]:
    held = [(phase, parts_of(phase)) for phase in phases]
    others = sorted({name for _, parts in held for name in parts} - set(PARTS))
    names = [name for name in (*PARTS, *others) if any(parts.get(name) for _, parts in held)]
    columns = [["GiB of", *names, "in all", "time"]]
    for phase, parts in held:
        figures = adding_up([parts.get(name, 0) for name in names])
        time = "" if phase.seconds is None else duration(phase.seconds)
        columns.append([PHASE_WORDS[phase.name][0], *figures, tenths(phase.card_bytes), time])
    return table([*zip(*columns, strict=True)], right=range(1, len(columns)))


def _plan_lines(estimate: Estimate) -> list[str]:
    lines = ["Plan, the recommended setting first"]
    if not estimate.option.recommended:
        lines = ["Plan, your settings first; -> marks the recommended ones"]
    for option, seconds in estimate.plan:
        peak, spare = tenths(option.peak_bytes), _spare(option)
        figures = f"{peak} GiB, {spare} to spare"
        if option.headroom_bytes < 0:
            figures = f"all of it takes {peak} GiB, {spare} too much"
        mark = "->" if option.recommended else "  "
        lines += folded([f"{mark} {option_text(option)}: {figures}{_image_time(seconds)}"])
        lines += folded(reasons(option).values(), "     ")
    return lines


def option_text(option: PlanOption) -> str:
    setting = option.setting
    tiles = "" if option.tiles <= 1 else f", VAE in {option.tiles} tiles"
    moved = "" if option.resident else ", offloaded for each image"
    if option.moved_bytes:
        moved = ", offloaded in every step"
    precision = SHOWN.get(setting.precision, setting.precision)
    modulation = labelled("modulation", setting.modulation)
    place = DEVICES.get(setting.text_encoder_place, setting.text_encoder_place)
    return f"{precision}, {modulation}, text encoder {setting.text_encoder} {place}{tiles}{moved}"


def notes_of(found: Estimate) -> list[str]:
    return [*_time_notes(found), *_other_notes(found), *_price_notes(found)]


def _time_notes(found: Estimate) -> Iterator[str]:
    if found.times is None and isinstance(found.card, UnlistedCard):
        yield (
            f"{found.card.name} is not in the list of GPUs, so times and cost are not predicted. "
            f"The {found.card.nearest} is probably the closest in speed; `qwen-l40s bench "
            "--calibrate` measures your GPU."
        )
        return
    yield (
        "The time of an image includes a new prompt, with all models loaded. The first run takes "
        f"{duration(found.first_image_seconds)}; ComfyUI starts and loads everything from an NVMe "
        f"disk in {duration(found.times.cold_start)}."
    )
    if found.option.setting.text_encoder_place == ON_PROCESSOR:
        yield "The text encoder's time assumes a CPU with 16 cores."


def _other_notes(found: Estimate) -> Iterator[str]:
    option, request = found.option, found.request
    if option.card.computes_in == "fp32":
        yield (
            f"{sm(option.card.capability)} has no bf16 tensor cores: ComfyUI computes in fp32, "
            "which is slow and takes up to twice the working memory shown."
        )
    if made_on_load(option.request, option.setting):
        yield (
            f"Each load quantizes the file to {option.setting.precision}. `qwen-l40s quantize` "
            "writes that file once."
        )
    if found.times is not None:
        if request.loras.beside(option.setting.precision):
            added = duration(found.lora_seconds)
            yield (
                f"{many(request.loras.count, 'LoRA')} in bypass mode add {added} to each step "
                "(computed, not measured). Merged, they cost nothing."
            )
        asked, form = request.attention, option.setting.attention
        if form != EXACT:
            share = between(Range(*attention_share(found.card, form)), "{:.0%}".format)
            fast = "fast counts as " * (asked == FAST)
            yield (
                f"Attention {fast}{form}: predicted at {share} of the time of exact attention, not "
                "measured in a run."
            )
        elif asked == FAST and not request.nag_tokens:
            yield "Attention fast counts as exact, which is predicted to be faster on this GPU."
        if request.controlnet_bytes:
            yield "The ControlNet's time is computed from its size, not measured."
        if request.layers:
            yield f"One image here is the whole image and its {request.layers} layers."
    if request.member.licence != APACHE:
        yield f"The licence of the weights: {request.member.licence}."


def _price_notes(found: Estimate) -> Iterator[str]:
    if found.times is None:
        return
    if found.usd_per_image is None:
        yield (
            f"{found.card.name} has no price in the list: enter yours (--price, or the node's "
            "price_per_hour) to see the cost of an image."
        )
        return
    price, source = found.card.price(), "your own"
    if found.own_usd_per_hour is None:
        source = f"{price.provider}'s, on demand, {price.date}"
    yield (
        f"The cost assumes that the GPU is always busy, at {price_of(found)}; the price is "
        f"{source}."
    )


# Why an option of a plan, or a load, is as it is.

# Of int8 with rotation, which `auto` takes, relative to bf16: the latent on an H200, the images as
# others published them of an RTX 3090. In one block int8 is off by 0.018 and fp8 by 0.054; with
# channels 30 times as large by 0.024 and 0.048 (bench/results/fidelity-planted-h200.json).
INT8_DIFFERENCE = (
    "int8 with rotation changes the latent by 0.0058 after 6 steps on random weights (two bf16 "
    "implementations: 0.0042), and images of 2.1 by MS-SSIM 0.995, 38.8 dB (measured by others)"
)


def reasons(option: PlanOption) -> dict[str, str]:
    """Says {of what: why it is so, with figures} of an option that `plan` gives, in order."""
    found = {
        "precision": _precision_reason(option).clause,
        "products": weight_only(option.setting.precision, option.card),
        "packed": _packed_reason(option),
        "modulation": _modulation_reason(option),
        "text encoder": _text_encoder_reason(option),
        "room": _room_reason(option),
    }
    return {what: clause for what, clause in found.items() if clause}


def few_words(option: PlanOption) -> str:
    """Says why a transformer is loaded as an option has it, and how much room that leaves."""
    why, name, side = _precision_reason(option).few, option.card.name, option.request.width
    if moved := option.moved_bytes:
        return f"{why}; {format_gib(moved)} streamed to {name} per forward pass"
    spare = format_gib(max(0, option.headroom_bytes))
    return f"{why}; {spare} to spare on {name} at {side}x{side}"


def weight_only(name: str, card: CardFacts | None) -> str:
    """Says what quantized weights gain where their products do not run; empty elsewhere."""
    if name not in QUANTIZED or (card and card.runs(name)):
        return ""
    if card is None:
        return f"without an NVIDIA GPU the {name} weights are computed in full precision"
    return (
        f"{_refusal(name, card)}, so the {name} weights are computed in {card.computes_in} and "
        "save memory, not time"
    )


def _refusal(name: str, card: CardFacts) -> str:
    if card.multiplies(name):
        return card.no_int8
    return (
        f"{sm(card.capability)} has no {name} tensor cores (they need {sm(FORMATS[name].oldest)})"
    )


class Reason(NamedTuple):
    """Says why a precision was taken, in a few words and as a clause of a sentence."""

    few: str
    clause: str


def precision_reason(
    name: str, card: CardFacts | None, requested: str, stored: str | None, *, gguf: bool = False
) -> Reason:
    """Says why a transformer is loaded in a precision. `requested` may be `AUTO` or `AS_STORED`;
    `stored` is what the file holds, None for any; no card is none of NVIDIA's.
    """
    made, held = stored and _conversion(stored, name), f"auto: the file holds {stored}"
    asked = SHOWN[AS_STORED] if requested == AS_STORED else "as requested"
    if gguf and name == stored:
        few = f"auto: GGUF's blocks become {name}" if requested == AUTO else asked
        return Reason(
            few, f"GGUF's blocks are expanded and rounded to {name}, which tensor cores multiply"
        )
    if requested == AS_STORED:
        return Reason(asked, f"{asked}: the file holds {stored}")
    if requested != AUTO:
        return Reason(asked, f"requested: {made}" if stored else f"{name} as requested")
    if stored in QUANTIZED and name == stored:
        return Reason(held, f"{held}, and expanding it would gain nothing")
    if card is None:
        return Reason(held, f"auto: {made}, and there is no NVIDIA GPU")
    first = stored in QUANTIZED or name == auto_precision(card)
    if name == "bf16":
        rounded = "" if stored in (None, "bf16") else f", {made}"
        trained = f"{SHOWN['bf16']} is what the model was trained in{rounded}"
        why = f"auto: {trained}; {_refusal('int8', card)}" if first else trained
        return Reason("auto: bf16, no int8 products", why)
    if not first:
        return Reason(f"auto: {name}, less memory than bf16", f"{name}: less memory than bf16")
    made = f", and {made}" if made else ""
    why = f"auto: {name} products run on {card.name}{made}; {INT8_DIFFERENCE}"
    return Reason(f"auto: {name}, the fastest", why)


def _conversion(stored: str, name: str) -> str:
    if stored == name:
        return f"the file holds {name}"
    if name in QUANTIZED and stored in QUANTIZED:
        return f"the file's {stored} is quantized again to {name}, and both errors add up"
    if name in QUANTIZED:
        return f"the file's {stored} is quantized to {name} on load"
    if stored in QUANTIZED:
        return (
            f"the file's {stored} is expanded to {name}, which does not restore what {stored} lost"
        )
    return f"the file's {stored} is rounded to {name}"


def _precision_reason(option: PlanOption) -> Reason:
    asked = option.asked
    if asked.why:
        return Reason(asked.why, asked.why)
    requested = AS_STORED if asked.as_stored else AUTO if asked.kept else asked.request.precision
    stored, gguf = asked.kept or asked.stored, asked.request.parts.gguf
    return precision_reason(option.setting.precision, option.card, requested, stored, gguf=gguf)


def _packed_reason(option: PlanOption) -> str:
    if not option.setting.packed:
        return ""
    decoded = replace(option, setting=replace(option.setting, packed=False)).weights_bytes
    return (
        f"weights stay in the file's 4 or 6 bits and are decoded one by one, because "
        f"{format_gib(decoded)} of int8 do not fit in VRAM"
    )


def _modulation_reason(option: PlanOption) -> str:
    sizes = transformer_bytes(option.request, option.setting)
    if not sizes.modulation:
        return ""
    place = "in system RAM" if option.setting.off_card else "in VRAM"
    asked = ", as requested" * (option.asked.request.modulation != AUTO)
    return f"modulation: {format_gib(sizes.modulation)} stays {place}{asked}"


def _text_encoder_reason(option: PlanOption) -> str:
    place = option.setting.text_encoder_place
    named = option.asked.request.text_encoder_place != AUTO
    size = format_gib(text_encoder_bytes(option.request, option.setting.text_encoder))
    does = f"{size} stays in VRAM" if named else ""
    if place in (DROPPED, STREAMED):
        way = "leaves VRAM after" if place == DROPPED else "streams from system RAM for"
        does = f"{size} {way} each encoding"
    elif place == ON_PROCESSOR:
        does = "computes on the CPU"
    return does and f"text encoder: {does}{', as requested' * named}"


def _room_reason(option: PlanOption) -> str:
    weights, moved, card = option.weights_bytes, option.moved_bytes, option.card.name
    need, usable = option.needs[option.short_phase], option.usable_bytes
    work, passes = PHASE_WORDS[option.short_phase][1], option.request.passes
    of = f"{need / GIB:.1f} of {format_gib(usable)}"
    if moved:
        every = "step" if passes == 1 else f"pass, {format_gib(passes * moved)} in every step"
        return (
            f"{(weights - moved) / GIB:.1f} of {format_gib(weights)} of weights stay on {card}, "
            f"because {work} needs {of}: {format_gib(moved)} moves to the GPU in every {every}"
        )
    if need > usable:
        return (
            f"{format_gib(weights)} of weights stay on {card} while sampling, but {work} needs "
            f"{of}: {format_gib(need - usable)} leaves VRAM and comes back for each image"
        )
    return f"{format_gib(weights)} of weights stay on {card}; the peak is {of}, while {work}"


# The same for programs.


def estimate_json(estimate: Estimate) -> dict[str, Any]:
    """Gives figures in the unit of their name, the middle where there is a range."""
    times = estimate.times
    answers = {
        "step_ms": times and estimate.step_seconds.times(1000),
        "image_seconds": estimate.image_seconds,
        "first_image_seconds": estimate.first_image_seconds,
        "cold_start_seconds": times and times.cold_start,
        "usd_per_image": estimate.usd_per_image,
    }
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
                "step_ms": pair(seconds.times(1000)),
                "times_as_fast": pair(estimate.faster[name]),
            }
            for name, seconds in estimate.stock.items()
        },
        "ranges": {name: pair(ends) for name, ends in answers.items() if ends is not None},
        "disk_gib": gib(estimate.disk_bytes),
        "disk": {"files_gib": {name: gib(count) for name, count in estimate.files.items()}},
        "host_ram_gib": gib(estimate.host_ram_bytes),
        "ram_gib": None if estimate.ram_bytes is None else gib(estimate.ram_bytes),
        "with_less_ram_gib": {name: gib(count) for name, count in estimate.with_less_ram.items()},
        "offloaded_gib_per_step": gib(estimate.request.passes * estimate.option.moved_bytes),
        "template": estimate.template and estimate.template.name,
        "downloads_gib": {f"{file.name}.safetensors": file.gib for file in estimate.downloads},
        "stock_as_fast": [*estimate.as_fast],
        "plan": [_option(option, seconds) for option, seconds in estimate.plan],
        "basis": estimate.basis.kind,
        "basis_detail": estimate.basis.text,
        "notes": [*notes_of(estimate), *estimate.notes, *filter(None, [estimate.card_note])],
    }


def _step_cache(estimate: Estimate) -> dict[str, Any] | None:
    request = estimate.request
    if request.cache == OFF:
        return None
    return {"name": request.cache, **_named(request, "computed_steps")}


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


def pair(ends: Range | None) -> list[float] | None:
    return ends and [figure(end) for end in ends]


def _option(option: PlanOption, seconds: Range | None) -> dict[str, Any]:
    return {
        **_named(option.setting, "precision", "modulation", "text_encoder_place"),
        **_named(option, "tiles", "resident"),
        "peak_gib": gib(option.peak_bytes),
        "peak_phase": option.peak_phase,
        "headroom_gib": gib(option.headroom_bytes),
        "moved_gib": gib(option.moved_bytes),
        "recommended": option.recommended,
        "reason": "; ".join(reasons(option).values()),
        "image_seconds": pair(seconds),
    }


def _settings(request: RunRequest, option: PlanOption) -> dict[str, Any]:
    counts = "width", "height", "batch", "steps", "cfg", "references", "layers", "text_tokens"
    return {
        **_named(request, *counts, *["nag_tokens"] * (request.nag_tokens > 0), "cache"),
        **_named(option.setting, "precision", "modulation", "text_encoder", "text_encoder_place"),
        "loras": asdict(request.loras),
        "controlnet_gib": gib(request.controlnet_bytes),
        "with": [f"{other.family}:{other.precision}" for other in request.others],
        "tiles": option.tiles,
        "attention": option.setting.attention,
    }


def _named(thing: Any, *names: str) -> dict[str, Any]:
    return {name: getattr(thing, name) for name in names}


@dataclass(frozen=True)
class Refusal:
    """A request that a card does not run, even where weights move; `reason` is the planner's."""

    card: Card
    request: RunRequest
    reason: str
    card_note: str = ""

    @property
    def about(self) -> str:
        return f"{self.card.name}: {self.request.family}, {request_text(self.request)}"

    @property
    def summary(self) -> str:
        return f"Does not fit: {self.reason}\n{f'{self.card_note} {self.about}'.strip()}"

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


# Several cards.

EXCHANGED = {ROWS: "normalized rows", KEYS: "keys and values"}


def cards_answer(
    found: Estimate, count: int, link: float | None = None
) -> tuple[Iterable[str], dict[str, Any]]:
    """Gives (sentences about several cards, their part of the estimate's JSON object)."""
    several = together(found, count, link)
    if several is None:
        return (), {"cards": None}
    return cards_lines(several), {"cards": cards_json(several)}


def cards_lines(found: Together) -> Iterator[str]:
    """Says what several cards are predicted to do for one image and for many, and why."""
    yield f"One image on {found.cards} GPUs: {'; '.join(_one_image(found))}."
    servers, one = (between(each, significant) for each in found.per_hour)
    yield (
        f"Many images: start a server for each GPU, which makes {servers} an hour; one image "
        f"after the other on all GPUs makes {one}."
    )
    if found.each > 1:
        low, likely, high = (f"{each / 1e9:.3g}" for each in found.links)
        carries = f"{likely} GB/s each way, as given."
        if found.assumed:
            carries = (
                f"assumed to carry {low} to {high} GB/s each way, likely {likely}, as PCIe does "
                "without NVLink. `qwen-l40s doctor` measures yours; give it with --link."
            )
        yield f"Link between GPUs: {carries}"
    if found.splits or found.prompts > 1:
        yield (
            f"Memory: at most {tenths(found.first_bytes)} GiB on the first GPU, "
            f"{tenths(found.other_bytes)} on each other one: all hold the whole transformer."
        )


def _one_image(found: Together) -> Iterator[str]:
    if found.splits or found.prompts > 1:
        faster = between(found.faster, "{:.2f}".format)
        yield f"{duration(found.together)}, {faster} times as fast as on one (predicted)"
    if found.prompts > 1:
        yield "ComfyUI's MultiGPU CFG Split computes both prompts at once"
    if idle := found.cards % found.prompts:
        yield f"{many(idle, 'GPU')} has nothing to do"
    if found.splits:
        exchanged = EXCHANGED[found.likely.best.name]
        yield f"{found.each} GPUs split the tokens of a forward pass and exchange {exchanged}"
    elif found.refusal:
        yield f"one GPU computes a forward pass, as {found.refusal}"
    elif found.each > 1:
        gain = between(found.gain, "{:.2f}".format)
        yield (
            f"one GPU computes a forward pass, as {found.each} are predicted to be {gain} times as "
            f"fast, and less than {LEAST_GAIN} does not pay"
        )


def cards_json(found: Together) -> dict[str, Any]:
    """Gives figures in the unit of their name, from the fastest to the slowest; all predicted."""
    servers, one = found.per_hour
    best = found.likely.best if found.splits else None
    return {
        "count": found.cards,
        "link_gbps": [figure(each / 1e9) for each in found.links],
        "link_assumed": found.assumed,
        "prompts_at_once": found.prompts,
        "exchange": best and best.name,
        "image_rows": best and list(best.image_rows),
        "pass_gain": pair(found.gain),
        "image_seconds": pair(found.together),
        "times_as_fast": pair(found.faster),
        "images_per_hour": {"one_image_at_a_time": pair(one), "servers": pair(servers)},
        "many_images": "servers",
        "one_image": "cards" if found.faster.high > 1 else "one card",
        "first_card_gib": gib(found.first_bytes),
        "other_card_gib": gib(found.other_bytes),
        "basis": "predicted",
    }


# The cheapest card for a load.


def advise_text(advice: Advice) -> str:
    """Says what `advise` prints and a node keeps: the cheapest card, then all cards."""
    if not advice.offers:
        return "\n".join(["None of these GPUs has a price.", *_without_offer(advice)])
    blocks = [
        advise_summary(advice),
        folded(step_cache_lines(advice.ranked[0].found)),
        _ranking(advice),
        [
            "The number of GPUs carries the load even at the slowest predicted time.",
            "USD per image includes idle time.",
        ],
        folded(map(_basis, advice.ranked)),
        _without_offer(advice),
    ]
    return "\n\n".join("\n".join(lines) for lines in blocks if lines)


def advise_summary(advice: Advice) -> list[str]:
    """Says what the node shows: the cheapest card, the next ones, and the settings."""
    if not advice.fitting:
        return ["Every GPU with a price needs offloading: choose a smaller size or batch."]
    load = advice.images_per_hour
    best, *others = advice.fitting
    lines = [
        f"Cheapest for {load:,.10g} images per hour: {_counted(best, load)}, "
        f"${dollars(best.usd_for(load))} an image."
    ]
    if best.found.tight:
        lines += [verdict(best.found), safer_text(best.found)]
    elif others:
        costs = (f"{_counted(it, load)} ${dollars(it.usd_for(load))}" for it in others[:2])
        lines.append(f"Next cheapest: {', '.join(costs)}.")
    lines.append(f"Set: {settings_text(best.found.option)}.")
    if advice.unpriced:
        lines.append(f"{len(advice.unpriced)} GPUs have no price: enter yours to rank them.")
    return lines


def price_source(price: Price | None) -> str:
    """Says whose price it is, from when; a starting price is called so. None is the user's own."""
    if price is None:
        return "your own"
    starting = ", a starting price" * (price.kind == STARTING)
    return f"{price.provider}{starting}, {price.date}"


def setting_text(offer: Offer) -> str:
    option = offer.found.option
    setting = option.setting
    said = _said({"modulation": setting.modulation, "text_encoder_placement": setting.placement})
    moved = "" if option.resident else ", offloaded in every step"
    return f"{setting.precision}, {said}{moved}"


def _counted(offer: Offer, load: float) -> str:
    tight = ", tight" * offer.found.tight
    precision = offer.found.option.setting.precision
    return f"{offer.cards_for(load):,} {offer.name} in {precision}{tight}"


def _ranking(advice: Advice) -> list[str]:
    load = advice.images_per_hour
    rows = [["", "GPU", "in", "an image", "GPUs", "busy", "USD per image"]]
    for number, offer in enumerate(advice.ranked, 1):
        found = offer.found
        rows.append(
            [
                str(number) if found.fits else "-",
                offer.name + ", tight" * found.tight,
                found.option.setting.precision,
                duration(found.image_seconds),
                f"{offer.cards_for(load):,}",
                f"{offer.utilisation(load):.0%}",
                f"${dollars(offer.usd_for(load))}",
            ]
        )
    return table(rows, right=(0, 3, 4, 5, 6))


def _basis(offer: Offer) -> str:
    found = offer.found
    price = f"${dollars(offer.usd_per_hour)} an hour ({price_source(offer.price)})"
    unsure = found.calibration is None and not class_of(found.card).source
    rests = rests_on(found) + ", no public figure of its class" * unsure
    says = [f"{price}; {rests}; {setting_text(offer)}"]
    if not found.fits:
        says.insert(0, found.verdict)
    if found.safer:
        says.append(f"safer: {changes(found.option.setting, found.safer.setting)}")
    return f"{offer.name}: {'; '.join(says)}"


def _without_offer(advice: Advice) -> list[str]:
    lines = folded(f"{name}: {reason}" for name, reason in advice.refused.items())
    if advice.unpriced:
        first, count = advice.unpriced[0], len(advice.unpriced)
        lines.append(
            f"{count} GPUs have no price. Enter yours in USD per hour, in the node or as --price "
            f'"{first}=1.00":'
        )
        lines += folded([", ".join(advice.unpriced)])
    return lines
