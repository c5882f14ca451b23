"""One way to run a request on a card, in figures and words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..errors import CheckpointError, UnavailableError
from ..spec import BYTES_PER_WEIGHT, QUANTIZED, CardFacts, format_gib
from .phases import Phase
from .reasons import (
    automatic_precision,
    check_tensor_cores,
    modulation_words,
    requested_precision,
    room_words,
    text_encoder_words,
    together_words,
    weight_only,
)
from .request import PRECISIONS, RunRequest, Setting
from .trial import AUTO, Held, Question, Trial, sized


@dataclass(frozen=True)
class Option:
    """One way to run a request on a card.

    Attributes:
        setting: What it settles.
        tiles: Of each image that the VAE decodes; 1 is whole.
        resident: Whether all stays on the card that steps and decoder need.
        needs: {phase: bytes that the card would need for all to stay that is to}.
        headroom_bytes: What the card has beside the largest of them and `phases.KEPT_FREE_BYTES`;
            negative by what does not fit.
        moved_bytes: Weights that the host brings to the card in each forward pass.
        reasons: {of what: why, with figures}, in order.
        phases: What really is on the card in each phase: never more than it has, and without what
            is moved.
        as_asked: Whether everything is kept that the request names.
        recommended: Whether it is the one of its plan to take.
    """

    setting: Setting
    tiles: int
    resident: bool
    needs: Mapping[str, int]
    headroom_bytes: int
    moved_bytes: int
    reasons: Mapping[str, str] = field(repr=False)
    phases: Mapping[str, Phase] = field(repr=False)
    as_asked: bool = True
    recommended: bool = False

    @property
    def peak_phase(self) -> str:
        """The phase that needs the most."""
        return max(self.needs, key=self.needs.__getitem__)

    @property
    def peak_bytes(self) -> int:
        """What that phase needs for all to stay; of a resident option, what it takes."""
        return self.needs[self.peak_phase]

    @property
    def reason(self) -> str:
        """All of them in one line."""
        return "; ".join(self.reasons.values())


def option_of(question: Question, trial: Trial, first: Trial, found: Sequence[Trial]) -> Option:
    """A trial that a plan offers.

    Args:
        first: the recommended one, which alone says why modulation and text encoder are where they
            are.
        found: of each precision, the most faithful first.
    """
    setting = trial.settled
    return Option(
        setting=setting,
        tiles=trial.tiles,
        resident=setting.resident,
        needs={name: need.bytes for name, need in trial.needs.items()},
        headroom_bytes=trial.worst.spare(question.card),
        moved_bytes=trial.moved_bytes,
        reasons=_reasons(question, trial, first, found),
        phases=trial.there,
    )


def _reasons(
    question: Question, trial: Trial, first: Trial, found: Sequence[Trial]
) -> dict[str, str]:
    setting, request, card = trial.setting, question.request, question.card
    named = request.text_encoder_place != AUTO
    reasons = {
        "precision": _precision(question, trial, first, found),
        "products": weight_only(setting.precision, card),
        "modulation": _modulation(question, trial, trial is first),
        "text encoder": text_encoder_words(setting.text_encoder_place, named, trial.text_encoder),
        "room": room_words(
            card, trial.on_card, trial.short, trial.worst, trial.moved_bytes, request.passes
        ),
    }
    return {what: clause for what, clause in reasons.items() if clause}


def _precision(question: Question, trial: Trial, first: Trial, found: Sequence[Trial]) -> str:
    name = trial.setting.precision
    if question.as_stored or question.request.precision != AUTO:
        return requested_precision(name, question.stored, question.as_stored)
    return automatic_precision(
        name,
        question.stored,
        resident=not trial.moved,
        first=trial is first,
        bf16=found[0].on_card,
        bf16_fits=not found[0].moved,
        least=first.setting.precision if first.moved else "",
    )


def _modulation(question: Question, trial: Trial, explain: bool) -> str:
    place, size = trial.setting.modulation, trial.transformer.modulation
    requested = question.request.modulation != AUTO
    why = ""
    if explain and not requested:
        all_there = question.together(trial)
        parts = {"transformer": trial.transformer.total}
        if "text encoder" in all_there.sampling.resident:
            parts["text encoder"] = trial.text_encoder
        why = together_words(question.card, parts, all_there.short)
    return modulation_words(place, requested, size, why)


# The most faithful setting that stays on a card, and the next ones down, each with its reason.

__all__ = ["Held", "Option", "check_stored", "plan"]

# Of an image that is as small as anybody paints.
LEAST_SIDE = 256


def plan(
    card: CardFacts,
    request: RunRequest,
    stored: str | None = None,
    *,
    as_stored: bool = False,
    held: Mapping[str, Held] | None = None,
) -> tuple[Option, ...]:
    """The ways to run a request on a card, what was asked for first.

    What the request names is kept. Of the rest the most faithful precision is recommended that
    stays on the card; a quantized file stays as it is, because dequantizing brings nothing back.
    Where not all parts fit, the modulation leaves the card first, then the text encoder. Next come
    less faithful precisions, and last more faithful ones that the host would have to move in each
    step. Where a named setting does not stay, it comes first with that said, and then what would
    stay if nothing were named, of which the first is the recommended one.

    Args:
        stored: what the transformer's file holds, a key of `BYTES_PER_WEIGHT`; None for any.
        as_stored: whether the file's precision is to be kept, which no card refuses. fp16 and fp32
            are then settled as bf16, and `held` tells their size.
        held: {precision: sizes} that shape and precision do not tell, such as with layers that
            stay in bf16. Sizes in `request.parts` are of `stored`, or else of its precision.

    Returns:
        At least one.

    Raises:
        CheckpointError: `stored` is no precision that this package computes with.
        UnavailableError: the card does not multiply a precision that was asked for; or neither
            steps nor decoder run on it, even with weights that are moved.
    """
    if stored is not None:
        check_stored(stored)
    if not as_stored and request.parts.transformer_bytes is None:
        check_tensor_cores(request.precision, card, PRECISIONS)
    question = Question(card, request, stored, as_stored, held or {})
    found = [question.trial(precision) for precision in question.precisions()]
    run = [trial for trial in found if trial.least_bytes <= card.total_bytes]
    if not run:
        raise UnavailableError(_refusal(question, min(trial.least_bytes for trial in found)))
    order = _order(run)
    options = [option_of(question, trial, order[0], found) for trial in order]
    others = [] if options[0].resident else _what_would_stay(question)
    best = (others or options)[0]
    return tuple(replace(option, recommended=option is best) for option in (*options, *others))


def check_stored(stored: str) -> None:
    """Raises CheckpointError for a precision that this package does not compute with."""
    if stored not in BYTES_PER_WEIGHT:
        raise CheckpointError(
            f"the file stores its weights as {stored!r}: this package computes with "
            f"{', '.join(BYTES_PER_WEIGHT)}, so get the model in one of these."
        )


def _order(trials: Sequence[Trial]) -> list[Trial]:
    """What stays, the most faithful first, then what would be more faithful and is moved; where
    nothing stays, what moves least first.
    """
    stay = [trial for trial in trials if not trial.moved]
    if stay:
        return stay + list(trials[: trials.index(stay[0])])
    return sorted(trials, key=lambda trial: trial.moved_bytes)


def _what_would_stay(question: Question) -> list[Option]:
    """Were nothing named that decides about room; empty where nothing was."""
    request = question.request
    free = replace(
        sized(request, AUTO, question.stored) if question.stored not in QUANTIZED else request,
        precision=AUTO,
        modulation=AUTO,
        text_encoder_place=AUTO,
        tiles=0 if request.tiles == 1 else request.tiles,
    )
    if free == request and not question.as_stored:
        return []
    options = plan(question.card, free, question.stored, held=question.held)
    return [replace(option, as_asked=False) for option in options if option.resident]


def _refusal(question: Question, least: int) -> str:
    """Why not even weights that are moved help, and what would, each by itself or all together."""
    card, request = question.card, question.request
    batch = f"a batch of {request.batch}" if request.batch > 1 else "one image"
    what = f"a step of {batch} of {request.width}x{request.height}"
    if extras := _extras(request):
        what += f" with {' and '.join(extras)}"
    remedies = _remedies(request)
    enough = [remedy for remedy, less in remedies.items() if _runs(question, less)]
    if len(remedies) > 1 and not enough:
        advice = f"more than one of these is needed: {', '.join(remedies)}"
    else:
        advice = ", ".join(enough or remedies)
    return (
        f"{card.name} has {format_gib(card.total_bytes)} and {what} takes {format_gib(least)} even "
        f"with weights that are moved to it block by block: {advice}, or "
        "choose a card with more memory."
    )


def _extras(request: RunRequest) -> list[str]:
    """What a request adds to a picture."""
    extras = []
    if request.controlnet_bytes:
        extras.append(f"a ControlNet of {format_gib(request.controlnet_bytes)}")
    if count := _bypass_loras(request):
        loras = "1 LoRA" if count == 1 else f"{count} LoRAs"
        extras.append(f"{loras} of rank {request.loras.rank} beside the weights")
    if request.references:
        extras.append(
            "1 reference" if request.references == 1 else f"{request.references} references"
        )
    if request.layers:
        extras.append("1 layer" if request.layers == 1 else f"{request.layers} layers")
    return extras


def _remedies(request: RunRequest) -> dict[str, RunRequest]:
    """{what to do: the request that it leaves}."""
    remedies = {}
    if request.controlnet_bytes:
        remedies["run without the ControlNet"] = replace(request, controlnet_bytes=0)
    if _bypass_loras(request):
        merged = replace(request.loras, mode="merged")
        remedies["merge the LoRAs into the weights"] = replace(request, loras=merged)
    if request.references:
        remedies["give fewer references"] = replace(request, references=0)
    if request.layers > 1:
        remedies["paint fewer layers"] = replace(request, layers=1)
    smaller = replace(request, width=LEAST_SIDE, height=LEAST_SIDE, batch=1)
    return {**remedies, "choose a smaller size or batch": smaller}


def _bypass_loras(request: RunRequest) -> int:
    return request.loras.count if request.loras.mode == "bypass" else 0


def _runs(question: Question, request: RunRequest) -> bool:
    asked = replace(question, request=request)
    try:
        found = [asked.trial(precision) for precision in asked.precisions()]
    except UnavailableError:  # it does not decode
        return False
    return any(trial.least_bytes <= question.card.total_bytes for trial in found)
