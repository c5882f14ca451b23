"""An estimate in words: the answer first, then what it rests on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from ..planning.cards import STARTING, Card
from ..planning.files import CARD_MEMORY, NETWORK, NVME, PAGE_CACHE, SOURCES
from ..planning.phases import KEPT_FREE_BYTES, Phase, Range
from ..planning.rates import GEMM, constants, measured, why_predicted
from ..planning.request import DROPPED, ON_PROCESSOR, RunRequest
from ..spec import GB, GIB, QUANTIZED, format_gib
from .figures import duration, folded, table, usd

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


NOTHING_SAFER = "Nothing safer stays on the card: choose a smaller size or batch."


def estimate_text(estimate: Estimate) -> str:
    """What `qwen-l40s estimate` and the node print: whether it fits, then the figures behind it."""
    notes = (*notes_of(estimate), *estimate.notes)
    blocks = [
        [verdict(estimate), *safer_lines(estimate), heading(estimate)],
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
    lines = [verdict(estimate), *safer_lines(estimate), heading(estimate)]
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
        fits = "Tight, not measured" if estimate.tight else "Fits"
        return f"{fits}: {peak} of {usable} to use, in {when}; {spare} to spare."
    moved = option.moved_bytes
    how = f"; the host moves {format_gib(moved)} to the card in every forward pass" if moved else ""
    return f"Does not fit: {peak} would be needed of {usable}, in {when}{how}."


def safer_lines(estimate: Estimate) -> list[str]:
    """What to set where it is tight, and what that leaves; nothing where it is not tight."""
    safer = estimate.safer
    if safer is None:
        return [NOTHING_SAFER] if estimate.tight else []
    change, spare = safer_setting(estimate), format_gib(safer.headroom_bytes)
    return [f"Safer: {change}; {spare} to spare."]


def safer_setting(estimate: Estimate) -> str:
    """What the safer setting of a tight estimate changes, as the loaders name it."""
    setting, safer = estimate.option.setting, estimate.safer.setting
    changes = {
        "precision": (setting.precision, safer.precision),
        "modulation": (setting.modulation, safer.modulation),
        "text_encoder_placement": (setting.text_encoder_place, safer.text_encoder_place),
    }
    return ", ".join(
        f"{name} {after}" for name, (before, after) in changes.items() if before != after
    )


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
        also = [f"{name} {_gib(count)}" for name, count in phase.resident.items() if count]
        time = "" if phase.seconds is None else duration(phase.seconds)
        figures = map(_gib, (*counts, phase.context))
        rows.append([PHASE_NAMES[phase.name], *figures, time, ", ".join(also)])
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


# What an estimate has to say with its figures.

# Below this a card runs the model only with nearly all of it moved in each step.
SMALL_CARD_BYTES = 6 * GIB


def notes_of(found: Estimate) -> tuple[str, ...]:
    """What an estimate has to say, without the caller's own notes."""
    return (*_time_notes(found), *_room_notes(found), *_addition_notes(found), *_price_notes(found))


def _seconds(seconds: Range) -> str:
    """`2.1 s`, `2.1 to 3.4 s`."""
    low, high = (f"{end:.3g}" for end in seconds)
    return f"{low} s" if low == high else f"{low} to {high} s"


def _time_notes(found: Estimate) -> Iterator[str]:
    if found.times is None:
        yield (
            f"No times and no cost are predicted, because {found.card.name} is not in the list of "
            f"cards: of these the {found.card.nearest} has likely the nearest times, and "
            "`qwen-l40s bench --calibrate` measures yours."
        )
        return
    yield from _range_notes(found)
    yield (
        "An image is one with a new prompt when everything is loaded; the first run takes "
        f"{_seconds(found.first_image_seconds)} with files in memory, and ComfyUI with all weights "
        f"from an NVMe disk starts in {_seconds(found.times.cold_start)} (predicted)."
    )
    yield f"Loading takes {_loads(found.times.loads)} (predicted)."
    place = found.option.setting.text_encoder_place
    if place == ON_PROCESSOR:
        yield "The text encoder's time is predicted for a processor of 16 cores."
    elif place == DROPPED:
        yield "Each new prompt brings the text encoder to the card again."


def _range_notes(found: Estimate) -> Iterator[str]:
    """Why times are a range, and where in it one card is."""
    low, high = found.step_seconds
    if low == high:
        return
    setting = found.option.setting
    if found.basis.origin:
        why = f"the calibration left {setting.precision} out"
    else:
        why = why_predicted(found.card)
    yield (
        f"Times are a range because {why}: its ends are the shares of the data sheet's dense peaks "
        "that such programs reach."
    )
    if setting.precision in QUANTIZED and not setting.weight_only:
        reached = constants()
        yield (
            f"The card that was measured, an {measured()['conditions']['card']}, reached "
            f"{reached.gemm_int8:.0%} of its dense peak in int8 and {reached.gemm_fp8:.0%} in fp8, "
            f"where this range takes {GEMM[0]:.0%} to {GEMM[1]:.0%}: its slow end is the likelier."
        )


def _loads(loads: Mapping[str, Range]) -> str:
    """`9.4 to 13 s with files in the page cache, ...`."""
    places = {
        PAGE_CACHE: "with files in the page cache",
        NVME: f"from an NVMe disk of {SOURCES[NVME] / 1e9:g} GB/s",
        NETWORK: f"from a network volume of {SOURCES[NETWORK] / 1e9:g} GB/s",
    }
    *others, last = (f"{_seconds(seconds)} {places[source]}" for source, seconds in loads.items())
    return f"{', '.join(others)} and {last}"


def _room_notes(found: Estimate) -> Iterator[str]:
    option = found.option
    if option.moved_bytes:
        moved = found.request.passes * option.moved_bytes
        link = found.card.pcie_bytes_per_second  # 0 where nobody has listed it
        least = f", at least {moved / link:.2g} s of it" if link else ""
        yield (f"It runs, slowly: {format_gib(moved)} of weights cross PCIe in every step{least}.")
    elif not option.resident:
        yield "It runs, with weights that leave the card and come back for each image."
    stays = next((other for other in found.options[1:] if other.resident), None)
    if not option.resident and stays is not None:
        setting = stays.setting
        yield (
            f"{setting.precision} with modulation {setting.modulation} and the text encoder: "
            f"{setting.text_encoder_place}, would stay on the card."
        )
    if found.card.memory_bytes < SMALL_CARD_BYTES:
        yield (
            f"With {format_gib(found.card.memory_bytes)} nearly all weights are moved in each "
            "step, and a smaller image saves little of that: a rented card with 24 GiB or more is "
            "faster by far."
        )
    precision = option.setting.precision
    at_hand = found.request.parts.transformer_bytes is not None
    if precision in QUANTIZED and not at_hand:
        ready = found.times and found.times.prequantized_loads
        yield (
            f"{precision} is made of the bf16 file on each load; `qwen-l40s quantize` writes it "
            f"once{f', and loading then takes {_loads(ready)} (predicted)' if ready else ''}."
        )


def _addition_notes(found: Estimate) -> Iterator[str]:
    request = found.request
    if found.times is None:
        return
    if request.loras.count and request.loras.mode == "bypass":
        yield (
            f"{_many(request.loras.count, 'LoRA')} run as bypass take "
            f"{_seconds(found.times.loras)} of each step, counted and not measured: merged they "
            "cost nothing."
        )
    if request.controlnet_bytes:
        yield "The ControlNet's time is counted from its bytes and was not measured."
    if request.member.layers and request.layers:
        yield f"An image is a set: the whole and its {request.layers} layers."
    elif request.member.layers:
        yield (
            "One picture is counted: Qwen-Image-Layered paints layers as well, 3 where ComfyUI's "
            "node is left as it is, so give how many (--layers, or the node's)."
        )


def _price_notes(found: Estimate) -> Iterator[str]:
    if found.times is None:
        return
    if found.usd_per_image is None:
        yield f"No price of {found.card.name} is known: give your own to see the cost of an image."
        return
    where = "your own" if found.own_usd_per_hour is not None else _listed(found.card)
    yield f"The cost of an image is that of a card that paints all the time; the price is {where}."


def _listed(card: Card) -> str:
    price = card.price()
    starting = price.kind == STARTING
    usd = f"{'from ' * starting}{price.usd_per_hour:g} USD an hour"
    return f"{price.provider}'s, on demand, {price.date}: {usd}"
