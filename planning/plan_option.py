"""One way to run a wish on a card, in figures and words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .estimate import Phase
from .plan_question import AUTO, Question
from .plan_trial import Trial
from .plan_words import (
    automatic_precision,
    modulation_words,
    requested_precision,
    room_words,
    text_encoder_words,
    together_words,
    weight_only,
)
from .setting import Setting


@dataclass(frozen=True)
class Option:
    """One way to run a wish on a card.

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
        as_asked: Whether everything is kept that the wish names.
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
    setting, wish, card = trial.setting, question.wish, question.card
    named = wish.text_encoder_place != AUTO
    reasons = {
        "precision": _precision(question, trial, first, found),
        "products": weight_only(setting.precision, card),
        "modulation": _modulation(question, trial, trial is first),
        "text encoder": text_encoder_words(setting.text_encoder_place, named, trial.text_encoder),
        "room": room_words(
            card, trial.on_card, trial.short, trial.worst, trial.moved_bytes, wish.passes
        ),
    }
    return {what: clause for what, clause in reasons.items() if clause}


def _precision(question: Question, trial: Trial, first: Trial, found: Sequence[Trial]) -> str:
    name = trial.setting.precision
    if question.as_stored or question.wish.precision != AUTO:
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
    requested = question.wish.modulation != AUTO
    why = ""
    if explain and not requested:
        all_there = question.together(trial)
        parts = {"transformer": trial.transformer.total}
        if "text encoder" in all_there.sampling.resident:
            parts["text encoder"] = trial.text_encoder
        why = together_words(question.card, parts, all_there.short)
    return modulation_words(place, requested, size, why)
