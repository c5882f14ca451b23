"""What a run takes of host memory, by what it is for.

The weights themselves stay in their files, which ComfyUI maps: the system caches them where memory
is left, and reads them again where none is. Counted are copies, and what has to wait in host memory
while it is not on the card.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..spec import GIB, MIB, ON_CARD, QUANTIZED, format_gib
from .bytes import quantized_language_bytes, text_encoder_bytes, weight_bytes
from .cards import STARTING, Card, UnlistedCard
from .cost import check_price, usd_range
from .disk import GB, Advice, Disk, against_guides, disk, made_on_load
from .phases import NOTHING, Phase, Range, figure, gib, transformer_bytes
from .plan import Option, plan
from .rates import GEMM, Basis, Rates, constants, measured, rates_of, why_predicted
from .request import DROPPED, ON_PROCESSOR, TEXT_ENCODER, RunRequest, Setting
from .run_times import NETWORK, NVME, PAGE_CACHE, SOURCES, RunTimes
from .trial import sized

if TYPE_CHECKING:
    from .cards import Card
    from .request import Loras

# Python, torch with CUDA, ComfyUI and its nodes. Predicted.
PROGRAM_BYTES = 3 * GIB
# While a file is quantized on load, and the pinned ring through which weights pass the card
# (hosts/comfyui/precision.py, optimizations/stream.py).
STAGING_BYTES = 2 * GIB
RING_BYTES = 128 * MIB
FP32 = 4
# An image as it comes from the VAE, and as it is saved.
IMAGE_COPIES = 2


def host_ram(
    request: RunRequest, setting: Setting, *, moved_bytes: int = 0, quantize_on_load: bool = True
) -> dict[str, int]:
    """{what it is for: bytes of host memory}.

    Args:
        moved_bytes: of the transformer, what the plan's option brings to the card in each forward
            pass; it waits in host memory, where a copy that was quantized on load is already.
        quantize_on_load: whether fp8 and int8 are made of a bf16 file on load. A file that is
            quantized already, such as the node SaveQuantized writes, takes no copy; nor does what
            `request.parts` says is at hand.
    """
    weights = transformer_bytes(request, setting)
    parts = {"ComfyUI, torch and CUDA": PROGRAM_BYTES}
    files = dict(request.parts.file_bytes)
    held = request.parts.text_encoder_bytes
    at_hand = held is not None and held == files.get(TEXT_ENCODER, held)
    copied = 0
    if quantize_on_load and made_on_load(request, setting):
        counted = weight_bytes(request.transformer, setting.precision)
        copied = counted.gemm + counted.scales
        parts["transformer, quantized on load"] = copied
        parts["staging while it is quantized"] = STAGING_BYTES
    if setting.off_card:
        parts["modulation that waits"] = weights.modulation
        parts["pinned ring"] = RING_BYTES
    if setting.text_encoder_place != ON_CARD:
        parts["text encoder that waits"] = text_encoder_bytes(request, setting.text_encoder)
    elif quantize_on_load and setting.text_encoder in QUANTIZED and not at_hand:
        parts["text encoder, quantized on load"] = quantized_language_bytes()
    parts["transformer that is moved in each pass"] = max(0, moved_bytes - copied)
    pixels = request.batch * request.frames * request.width * request.height
    parts["images"] = IMAGE_COPIES * FP32 * request.vae.image_channels * pixels
    return {name: count for name, count in parts.items() if count}


def host_ram_bytes(request: RunRequest, setting: Setting, *, moved_bytes: int = 0) -> int:
    """The sum of `host_ram`."""
    return sum(host_ram(request, setting, moved_bytes=moved_bytes).values())


# What the runs that were measured cover, and what times rest on beyond it.

# Of the matrix in `measured.json`: sides in pixels, and images in one forward pass.
MOST_SIDE, MOST_ITEMS = 2048, 2


def basis_within(basis: Basis, request: RunRequest, setting: Setting) -> Basis:
    """What the times of a request in a setting rest on.

    Args:
        basis: of the card's rates.
        setting: what the plan has settled.
    """
    if basis.kind != "measured" or setting.precision in basis.left_out:
        return Basis("predicted", basis.text, basis.origin, basis.left_out)
    beyond = list(not_measured(request, setting))
    if not beyond:
        return basis
    *others, last = beyond
    named = f"{', '.join(others)} or {last}" if others else last
    text = f"predicted from rates {basis.origin}: no run there had {named}"
    return Basis("predicted", text, basis.origin, basis.left_out)


def not_measured(request: RunRequest, setting: Setting) -> Iterator[str]:
    """What of a request no measured run had, each as a noun."""
    if not setting.resident:
        yield "weights that leave the card"
    if setting.weight_only:
        yield f"{setting.precision} weights that are computed in bf16"
    if setting.text_encoder_place != ON_CARD:
        yield "a text encoder off the card"
    if request.loras.count and request.loras.mode == "bypass":
        yield "LoRAs beside the weights"
    if request.controlnet_bytes:
        yield "a ControlNet"
    if request.member.layers:
        yield "layers"
    if max(request.width, request.height) > MOST_SIDE:
        yield f"a side above {MOST_SIDE} pixels"
    if request.items > MOST_ITEMS:
        yield f"more than {MOST_ITEMS} images in a pass"
    if request.transformer != request.member.transformer:
        yield "a transformer of this shape"


# What an estimate has to say beside its figures, in sentences.

# Below this a card runs the model only with nearly all of it moved in each step.
SMALL_CARD_BYTES = 6 * GIB


def notes_of(found: Estimate, *, own_price: bool, loras_seconds: Range) -> tuple[str, ...]:
    """The notes of an estimate without any.

    Args:
        own_price: whether the user gave the price.
        loras_seconds: of a step, what LoRAs beside the weights take.
    """
    additions = _additions(found, loras_seconds)
    return (*_times(found), *_room(found), *additions, *_price(found, own_price))


def words(seconds: Range) -> str:
    """`2.1 s`, `2.1 to 3.4 s`."""
    low, high = (f"{end:.3g}" for end in seconds)
    return f"{low} s" if low == high else f"{low} to {high} s"


def _times(found: Estimate) -> Iterator[str]:
    if found.first_image_seconds is None:
        yield (
            f"No times and no cost are predicted, because {found.card.name} is not in the list of "
            f"cards: of these the {found.card.nearest} has likely the nearest times, and "
            "`qwen-l40s bench --calibrate` measures yours."
        )
        return
    yield from _range(found)
    yield (
        "An image is one with a new prompt when everything is loaded; the first run takes "
        f"{words(found.first_image_seconds)} with files in memory, and ComfyUI with all weights "
        f"from an NVMe disk starts in {words(found.cold_start_seconds)} (predicted)."
    )
    yield f"Loading takes {_loads(found.loads)} (predicted)."
    place = found.option.setting.text_encoder_place
    if place == ON_PROCESSOR:
        yield "The text encoder's time is predicted for a processor of 16 cores."
    elif place == DROPPED:
        yield "Each new prompt brings the text encoder to the card again."


def _range(found: Estimate) -> Iterator[str]:
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
    *others, last = (f"{words(seconds)} {places[source]}" for source, seconds in loads.items())
    return f"{', '.join(others)} and {last}"


def _room(found: Estimate) -> Iterator[str]:
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
        ready = found.prequantized_loads
        yield (
            f"{precision} is made of the bf16 file on each load; `qwen-l40s quantize` writes it "
            f"once{f', and loading then takes {_loads(ready)} (predicted)' if ready else ''}."
        )


def _additions(found: Estimate, loras_seconds: Range) -> Iterator[str]:
    request = found.request
    if found.step_seconds is None:
        return
    if request.loras.count and request.loras.mode == "bypass":
        yield (
            f"{_many(request.loras)} beside the weights take {words(loras_seconds)} of each "
            "step, counted and not measured: merged they cost nothing."
        )
    if request.controlnet_bytes:
        yield "The ControlNet's time is counted from its bytes and was not measured."
    if request.member.layers and request.layers:
        yield f"An image is a set: the whole and its {request.layers} layers."
    elif request.member.layers:
        yield (
            "One picture is counted: Qwen-Image-Layered paints layers beside it, 3 where ComfyUI's "
            "node is left as it is, so give how many (--layers, or the node's)."
        )


def _price(found: Estimate, own: bool) -> Iterator[str]:
    if found.image_seconds is None:
        return
    if found.usd_per_image is None:
        yield f"No price of {found.card.name} is known: give your own to see the cost of an image."
        return
    where = "your own" if own else _listed(found.card)
    yield f"The cost of an image is that of a card that paints all the time; the price is {where}."


def _listed(card: Card) -> str:
    price = card.price()
    starting = price.kind == STARTING
    usd = f"{'from ' * starting}{price.usd_per_hour:g} USD an hour"
    return f"{price.provider}'s, on demand, {price.date}: {usd}"


def _many(loras: Loras) -> str:
    return "1 LoRA" if loras.count == 1 else f"{loras.count} LoRAs"


# The whole answer before a run: memory of each phase, times, disk, host memory and cost.


@dataclass(frozen=True)
class Estimate:
    """What a request takes on a card.

    Attributes:
        option: The plan's first, which everything here is of: the recommended one, or what the
            request names.
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
    request: RunRequest
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
        whole = sized(self.request, setting.precision)
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
            "family": self.request.family,
            "settings": _settings(self.request, self.option),
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
    request: RunRequest,
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
        UnavailableError: nothing that the request allows runs on the card.
    """
    if usd_per_hour is not None:
        check_price(usd_per_hour)
    options = plan(card.facts(), request)
    option = options[0]
    whole = sized(request, option.setting.precision)
    files = disk(whole, option.setting)
    found = Estimate(
        card=card,
        request=request,
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
        basis = basis_within(basis, request, option.setting)
        found = replace(_timed(found, run, usd_per_hour), basis=basis)
        loras_seconds = run.loras_seconds()
    notes = notes_of(found, own_price=usd_per_hour is not None, loras_seconds=loras_seconds)
    return replace(found, notes=notes)


def _timed(found: Estimate, run: RunTimes, usd_per_hour: float | None) -> Estimate:
    """The estimate with its times and its cost."""
    request, price = found.request, found.card.price()
    phases = run.phases()
    seconds = {name: phase.seconds or NOTHING for name, phase in phases.items()}
    warm = seconds["text"] + seconds["sampling"] + seconds["decode"]
    image = warm.times(1 / request.batch)
    usd = usd_per_hour if price is None or usd_per_hour is not None else price.usd_per_hour
    return replace(
        found,
        phases=phases,
        step_seconds=seconds["sampling"].times(1 / request.steps),
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


def _settings(request: RunRequest, option: Option) -> dict[str, Any]:
    setting = option.setting
    return {
        "precision": setting.precision,
        "width": request.width,
        "height": request.height,
        "batch": request.batch,
        "steps": request.steps,
        "cfg": request.cfg,
        "references": request.references,
        "layers": request.layers,
        "text_tokens": request.text_tokens,
        "modulation": setting.modulation,
        "text_encoder": setting.text_encoder,
        "text_encoder_place": setting.text_encoder_place,
        "loras": {
            "count": request.loras.count,
            "rank": request.loras.rank,
            "mode": request.loras.mode,
        },
        "controlnet_gib": gib(request.controlnet_bytes),
        "tiles": option.tiles,
    }
