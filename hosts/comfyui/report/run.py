"""What makes a run another one than the estimator can predict, in sentences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ....errors import QwenL40SError
from ....planning.phases import Phase, Range
from ....planning.request import RunRequest
from ....spec import FAMILIES, PIXELS_PER_LATENT, REFERENCE_SIDE, whole_pixels
from ..estimate.cards import THIS_CARD, ChosenCard, card_of
from ..estimate.estimate import estimate_on
from ..estimate.request import WiredRequest, request_from, request_settings
from ..load.precision import card_facts
from ..record.record import Record

# A reference that differs by more from one megapixel takes other memory and time.
LIKE_A_MEGAPIXEL = 0.1
# A sampler can add a pass here and there; more of them are another run.
LIKE_THE_PASSES = 0.25
FUSED = "blocks: fused, "


def passes_of(asked: Mapping[str, Any]) -> float:
    """Forward passes of one evaluation of the sampler, on average."""
    return asked["passes"] / max(1, asked["evaluations"])


def prompts_of(asked: Mapping[str, Any]) -> float:
    """Prompts that one evaluation computed for each image, on average."""
    return asked["computed"] / (max(1, asked["evaluations"]) * asked["latent"][0])


def mismatches(asked: Mapping[str, Any], path: Sequence[str], request: RunRequest) -> list[str]:
    """Of a sampling record and what was predicted of it."""
    notes = []
    if not any(line.startswith(FUSED) for line in path):
        notes.append("times are predicted of fused blocks, which did not run")
    if asked["controlnet"]:
        notes.append("a ControlNet ran, which the prediction leaves out")
    found = passes_of(asked), prompts_of(asked)
    known = request.passes, request.passes * request.items / request.batch
    if any(abs(one - other) > LIKE_THE_PASSES for one, other in zip(found, known, strict=True)):
        notes.append(
            f"a step took {found[0]:.3g} forward passes with {found[1]:.3g} prompts in all, and "
            f"the prediction is of {known[0]} with {known[1]:.0f}"
        )
    area = (REFERENCE_SIDE // PIXELS_PER_LATENT) ** 2
    sizes = [height * width / area for height, width in asked["references"]]
    if any(abs(size - 1) > LIKE_A_MEGAPIXEL for size in sizes):
        megapixels = ", ".join(f"{size:.2g}" for size in sizes)
        notes.append(f"references had {megapixels} megapixels and are predicted with one")
    return notes


# What was predicted of a run that is over: its own settings, the parts that ran, its card.

# Edit alone adds so many text tokens for its one reference.
EDIT = "qwen-image-edit"
# What is on the card beside the part that works.
PARTS_MISSING = (
    "what the card holds is predicted only where clip and vae are connected, whose weights count"
)


@dataclass(frozen=True)
class Prediction:
    """What the estimator says of a run.

    Attributes:
        request: What it was asked; None where it has no answer.
        phases: By name, with `seconds` where the card's are known.
        step: One evaluation of the sampler, with all its prompts.
        whole: Whether all that is on the card is known, so that the phases' `card_bytes` hold.
        basis: What the times rest on, in words.
        notes: What the prediction leaves out, or why there is none.
    """

    request: RunRequest | None = None
    phases: Mapping[str, Phase] = field(default_factory=dict)
    step: Range | None = None
    whole: bool = False
    basis: str = ""
    notes: tuple[str, ...] = ()
    _card: ChosenCard | None = None

    def changed(self, **settings: Any) -> Mapping[str, Phase]:
        """The phases of the same run with other settings; none where it cannot be."""
        if self.request is None:
            return {}
        try:
            request = replace(self.request, **settings)
            if request == self.request:
                return self.phases
            return estimate_on(self._card, WiredRequest(request), None).phases
        except QwenL40SError:
            return {}


def predict(
    asked: Mapping[str, Any], path: Sequence[str], model: Any, clip: Any, vae: Any, tiles: int
) -> Prediction:
    """Predicts what a recorded sampling run with its encoding and decoding takes on its card.

    Args:
        asked: of the record.
        path: of the record.
        model, clip, vae: what ran; None for what is not at hand.
        tiles: in how many the VAE decoded; 0 where nobody knows.
    """
    device = model.load_device
    if card_facts(device) is None:
        return Prediction(notes=(f"nothing is predicted of a run on {device}",))
    try:
        wired = request_from(_settings(asked, tiles), model=model, clip=clip, vae=vae)
        wired = replace(wired, request=_with_tokens(wired.request, asked["text_tokens"]))
        card = card_of(THIS_CARD, device)
        estimate = estimate_on(card, wired, None)
    except QwenL40SError as error:
        return Prediction(notes=(f"nothing is predicted: {error}",))
    whole = clip is not None and vae is not None
    return Prediction(
        wired.request,
        estimate.phases,
        estimate.step_seconds,
        whole,
        f"times: {estimate.basis.text}",
        # The estimate's own notes are about other runs and about money.
        (
            *wired.notes,
            *mismatches(asked, path, wired.request),
            *([] if whole else [PARTS_MISSING]),
        ),
        card,
    )


def _settings(asked: Mapping[str, Any], tiles: int) -> dict[str, Any]:
    """Arguments of `RunRequest`; the parts that ran tell the others."""
    batch, _, *frames, height, width = asked["latent"]
    references = len(asked["references"])
    settings = request_settings(
        width=whole_pixels(PIXELS_PER_LATENT * width),
        height=whole_pixels(PIXELS_PER_LATENT * height),
        batch=batch,
        steps=max(1, asked["evaluations"]),
        cfg=_cfg(asked),
        references=references,
        layers=frames[0] - 1 if frames else 0,
        tiles=tiles,
    )
    if references == 1 and asked["text_tokens"] > FAMILIES[EDIT].vision_tokens:
        settings["family"] = EDIT
    return settings


def _with_tokens(request: RunRequest, tokens: int) -> RunRequest:
    """The prompt's own tokens: those of references are counted by the family."""
    return replace(
        request, text_tokens=max(1, tokens - request.references * request.member.vision_tokens)
    )


def _cfg(asked: Mapping[str, Any]) -> str:
    """By what was computed: a guider may ask for the negative prompt in a call of its own."""
    if prompts_of(asked) < 1.5:
        return "off"
    # ComfyUI computes prompts of one length in one pass.
    return "one pass" if passes_of(asked) < 1.5 else "two passes"


# Which of the recorded runs gave the images that a report is of.
#
# ComfyUI keeps what earlier prompts gave, so that the images of a report can be older than the last
# run of its MODEL, and a prompt can run its phases in part.

EARLIER = (
    "Nothing was sampled with this MODEL in this run, because ComfyUI kept what an earlier one "
    "gave: these are the figures of the last run of this MODEL, which need not be the one that "
    "gave these images"
)


@dataclass(frozen=True)
class Ran:
    """The records that a report is of.

    Attributes:
        last: The sampling that gave the images, as far as that can be told.
        records: Of its run up to it, and of the other parts.
        now: The prompt that ComfyUI executes.
        notes: What cannot be told.
    """

    last: Record
    records: tuple[Record, ...]
    now: str
    notes: tuple[str, ...] = ()

    @property
    def this_run(self) -> bool:
        """Whether this prompt sampled."""
        return self.last.prompt == self.now

    def of(self, phase: str) -> tuple[Record, ...]:
        """Of one phase, in order; all are of one prompt."""
        return tuple(record for record in self.records if record.phase == phase)


def choose(model: Sequence[Record], beside: Sequence[Record], images: Any, now: str) -> Ran | None:
    """Finds the records of the run that gave images; None where nothing was sampled.

    Args:
        model: the records of a MODEL.
        beside: the records of the CLIP and the VAE.
        images: (batch, height, width, channels); None where nobody knows.
        now: the prompt that ComfyUI executes.
    """
    shape = _shape(images)
    places = [place for place, record in enumerate(model) if record.phase == "sampling"]
    if not places:
        return None

    def rank(place: int) -> tuple[int, bool, int]:
        record = model[place]
        return _fit(record.asked["latent"], shape), record.prompt == now, place

    chosen = max(places, key=rank)
    last = model[chosen]
    ran = [record for record in model[: chosen + 1] if record.prompt == last.prompt]
    for phase in ("text", "encode", "decode"):
        ran += _of_phase(phase, beside, last.prompt, now, shape)
    return Ran(last, tuple(ran), now, tuple(_notes(last, shape, now)))


def _shape(images: Any) -> tuple[int, int, int] | None:
    shape = getattr(images, "shape", None)
    return tuple(shape[:3]) if shape is not None and len(shape) == 4 else None


def _fit(latent: Sequence[int], shape: tuple[int, int, int] | None) -> int:
    """2 where a latent is of such images, 1 where of their size alone, else 0."""
    if shape is None:
        return 2
    batch, _, *frames, height, width = latent
    if shape[1:] != (PIXELS_PER_LATENT * height, PIXELS_PER_LATENT * width):
        return 0
    # Frames and layers are images of their own, of which a graph may take some.
    return 2 if shape[0] == batch or (frames and frames[0] > 1) else 1


def _of_phase(
    phase: str,
    records: Sequence[Record],
    ran: str,
    now: str,
    shape: tuple[int, int, int] | None,
) -> list[Record]:
    """Of the run that sampled, or else of this one; it is this one that decodes."""
    own = [record for record in records if record.phase == phase]
    prompts = dict.fromkeys((now, ran) if phase == "decode" else (ran, now))
    found = [[record for record in own if record.prompt == prompt] for prompt in prompts]
    if phase == "decode":
        fitting = [[record for record in each if _decodes(record, shape)] for each in found]
        found = [*fitting, *found]
    return next(filter(None, found), [])


def _decodes(record: Record, shape: tuple[int, int, int] | None) -> bool:
    size = record.asked.get("size")
    return shape is None or (size is not None and tuple(size[-2:]) == shape[1:])


def _notes(last: Record, shape: tuple[int, int, int] | None, now: str) -> list[str]:
    notes, fit = [], _fit(last.asked["latent"], shape)
    if last.prompt != now:
        notes.append(EARLIER)
    if fit < 2:
        batch, height, width = shape
        notes.append(
            f"the images are {batch} of {width}x{height}, which no run of this MODEL gave that is "
            "known here: they were changed, or another model's"
        )
    return notes
