"""What was predicted of a run that is over: its own settings, the parts that ran, this card."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...errors import QwenL40SError
from ...planning.estimate import Phase, Range
from ...planning.families import FAMILIES
from ...planning.memory import PIXELS_PER_TOKEN_SIDE, CardFacts
from ...planning.phases import phases
from ...planning.setting import Setting
from ...planning.vae_steps import PIXELS_PER_LATENT
from ...planning.wish import Wish
from ...planning.work import REFERENCE_SIDE
from .precision import card_facts
from .this_card import THIS_CARD, card_of
from .wired_estimate import estimate_on
from .wired_wish import wish_from, wish_settings

# Edit alone adds so many text tokens for its one reference.
EDIT = "qwen-image-edit"
# A reference that differs by more from one megapixel takes other memory and time.
LIKE_A_MEGAPIXEL = 0.1
FUSED = "blocks: fused, "


@dataclass(frozen=True)
class Prediction:
    """What the estimator says of a run.

    Attributes:
        wish: What it was asked; None where it has no answer.
        phases: By name, with `seconds` where the card is known.
        step: One evaluation of the sampler, with all its prompts.
        basis: What the times rest on, in words.
        notes: What the prediction leaves out, or why there is none.
    """

    wish: Wish | None = None
    phases: Mapping[str, Phase] = field(default_factory=dict)
    step: Range | None = None
    basis: str = ""
    notes: tuple[str, ...] = ()


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
    facts = card_facts(model.load_device)
    if facts is None:
        return Prediction(notes=(f"nothing is predicted of a run on {model.load_device}",))
    notes = _notes(asked, path)
    try:
        wired = wish_from(_settings(asked, tiles), model=model, clip=clip, vae=vae)
        wish = _with_tokens(wired.wish, asked["text_tokens"])
        wired = replace(wired, wish=wish)
    except QwenL40SError as error:
        return Prediction(notes=(f"nothing is predicted: {error}",))
    try:
        estimate = estimate_on(card_of(THIS_CARD), wired, None)
    except QwenL40SError as error:
        return _peaks(wish, facts, (*notes, f"no times are predicted: {error}"))
    basis = f"times: {estimate.basis.text}"
    # The estimate's own notes are about other runs and about money.
    return Prediction(wish, estimate.phases, estimate.step_seconds, basis, (*wired.notes, *notes))


def _peaks(wish: Wish, card: CardFacts, notes: tuple[str, ...]) -> Prediction:
    """Of a card whose times nobody knows."""
    try:
        return Prediction(wish, phases(wish, _setting(wish), card.total_bytes), notes=notes)
    except QwenL40SError as error:
        return Prediction(wish, notes=(f"nothing is predicted: {error}",))


def _settings(asked: Mapping[str, Any], tiles: int) -> dict[str, Any]:
    """Arguments of `Wish`; the parts that ran tell the others."""
    batch, _, *frames, height, width = asked["latent"]
    references = len(asked["references"])
    settings = wish_settings(
        width=_pixels(width),
        height=_pixels(height),
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


def _with_tokens(wish: Wish, tokens: int) -> Wish:
    """The prompt's own tokens: those of references are counted by the family."""
    return replace(wish, text_tokens=max(1, tokens - wish.references * wish.member.vision_tokens))


def _pixels(latent: int) -> int:
    """Rounded up to whole tokens, as the model pads it."""
    side = PIXELS_PER_TOKEN_SIDE
    return side * math.ceil(PIXELS_PER_LATENT * latent / side)


def _cfg(asked: Mapping[str, Any]) -> str:
    if not asked["guided"]:
        return "off"
    # Steps in which CFG batching measured are of either kind.
    together = asked["prompts"] > 1 and asked["passes"] < 1.5 * asked["evaluations"]
    return "one pass" if together else "two passes"


def _setting(wish: Wish) -> Setting:
    chosen = {"text_encoder": wish.text_encoder, "text_encoder_place": wish.text_encoder_place}
    chosen |= {"precision": wish.precision, "modulation": wish.modulation}
    return Setting(**{name: value for name, value in chosen.items() if value != "auto"})


def _notes(asked: Mapping[str, Any], path: Sequence[str]) -> list[str]:
    """What makes the run another one than what is predicted."""
    notes = []
    if not any(line.startswith(FUSED) for line in path):
        notes.append("times are predicted of fused blocks, which did not run")
    if asked["controlnet"]:
        notes.append("a ControlNet ran, which the prediction leaves out")
    passes = asked["passes"] / max(1, asked["evaluations"])
    if passes > 2:
        notes.append(f"a step took {passes:.3g} forward passes, and the prediction is of 2")
    area = (REFERENCE_SIDE // PIXELS_PER_LATENT) ** 2
    sizes = [height * width / area for height, width in asked["references"]]
    if any(abs(size - 1) > LIKE_A_MEGAPIXEL for size in sizes):
        megapixels = ", ".join(f"{size:.2g}" for size in sizes)
        notes.append(f"references had {megapixels} megapixels and are predicted with one")
    return notes
