"""The most faithful setting that stays on a card, and the next ones down, each with its reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ..errors import CheckpointError, UnavailableError
from .memory import BYTES_PER_WEIGHT, QUANTIZED, CardFacts, format_gib
from .plan_option import Option, option_of
from .plan_question import AUTO, Question
from .plan_trial import Held, Trial, sized
from .plan_words import check_tensor_cores
from .wish import PRECISIONS, Wish

__all__ = ["Held", "Option", "check_stored", "plan"]


def plan(
    card: CardFacts,
    wish: Wish,
    stored: str | None = None,
    *,
    as_stored: bool = False,
    held: Mapping[str, Held] | None = None,
) -> tuple[Option, ...]:
    """The ways to run a wish on a card, the recommended one first.

    What the wish names is kept. Of the rest the most faithful precision is recommended that stays
    on the card; a file that is quantized stays as it is, because dequantizing brings nothing back.
    Where not all parts fit, the modulation leaves the card first, then the text encoder. Next come
    less faithful precisions, and last more faithful ones that the host would have to move in each
    step. Where a named setting does not stay, it comes first with that said, and then what would
    stay if nothing were named.

    Args:
        stored: what the transformer's file holds, a key of `BYTES_PER_WEIGHT`; None for any.
        as_stored: whether the file's precision is to be kept, which no card refuses. fp16 and fp32
            are then settled as bf16, and `held` tells their size.
        held: {precision: sizes} that shape and precision do not tell, such as with layers that
            stay in bf16. Sizes in `wish.parts` are of `stored`, or else of the wish's precision.

    Returns:
        At least one.

    Raises:
        CheckpointError: `stored` is no precision that this package computes with.
        UnavailableError: the card does not multiply a precision that was asked for; or neither
            steps nor decoder run on it, even with weights that are moved.
    """
    if stored is not None:
        check_stored(stored)
    if not as_stored and wish.parts.transformer_bytes is None:
        check_tensor_cores(wish.precision, card, PRECISIONS)
    question = Question(card, wish, stored, as_stored, held or {})
    found = [question.trial(precision) for precision in question.precisions()]
    run = [trial for trial in found if trial.least_bytes <= card.total_bytes]
    if not run:
        raise UnavailableError(_refusal(card, wish, min(trial.least_bytes for trial in found)))
    order = _order(run)
    options = [option_of(question, trial, order[0], found) for trial in order]
    if not options[0].resident:
        options += _what_would_stay(question)
    return tuple(options)


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
    wish = question.wish
    free = replace(
        sized(wish, AUTO, question.stored) if question.stored not in QUANTIZED else wish,
        precision=AUTO,
        modulation=AUTO,
        text_encoder_place=AUTO,
        tiles=0 if wish.tiles == 1 else wish.tiles,
    )
    if free == wish and not question.as_stored:
        return []
    options = plan(question.card, free, question.stored, held=question.held)
    return [option for option in options if option.resident]


def _refusal(card: CardFacts, wish: Wish, least: int) -> str:
    batch = f"a batch of {wish.batch}" if wish.batch > 1 else "one image"
    return (
        f"{card.name} has {format_gib(card.total_bytes)} and a step of {batch} of "
        f"{wish.width}x{wish.height} takes {format_gib(least)} even with weights that are moved to "
        "it block by block: choose a smaller size or batch, fewer references, or a card with more "
        "memory."
    )
