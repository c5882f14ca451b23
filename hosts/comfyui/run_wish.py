"""What was predicted of a run that is over: its own settings, the parts that ran, its card."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...errors import QwenL40SError
from ...planning.estimate import Phase, Range
from ...planning.families import FAMILIES
from ...planning.memory import whole_pixels
from ...planning.vae_steps import PIXELS_PER_LATENT
from ...planning.wish import Wish
from .precision import card_facts
from .run_mismatch import mismatches, passes_of, prompts_of
from .this_card import THIS_CARD, ChosenCard, card_of
from .wired_estimate import estimate_on
from .wired_wish import WiredWish, wish_from, wish_settings

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
        wish: What it was asked; None where it has no answer.
        phases: By name, with `seconds` where the card's are known.
        step: One evaluation of the sampler, with all its prompts.
        whole: Whether all that is on the card is known, so that the phases' `card_bytes` hold.
        basis: What the times rest on, in words.
        notes: What the prediction leaves out, or why there is none.
    """

    wish: Wish | None = None
    phases: Mapping[str, Phase] = field(default_factory=dict)
    step: Range | None = None
    whole: bool = False
    basis: str = ""
    notes: tuple[str, ...] = ()
    _card: ChosenCard | None = None

    def changed(self, **settings: Any) -> Mapping[str, Phase]:
        """The phases of the same run with other settings; none where it cannot be."""
        if self.wish is None:
            return {}
        try:
            wish = replace(self.wish, **settings)
            if wish == self.wish:
                return self.phases
            return estimate_on(self._card, WiredWish(wish), None).phases
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
        wired = wish_from(_settings(asked, tiles), model=model, clip=clip, vae=vae)
        wired = replace(wired, wish=_with_tokens(wired.wish, asked["text_tokens"]))
        card = card_of(THIS_CARD, device)
        estimate = estimate_on(card, wired, None)
    except QwenL40SError as error:
        return Prediction(notes=(f"nothing is predicted: {error}",))
    whole = clip is not None and vae is not None
    return Prediction(
        wired.wish,
        estimate.phases,
        estimate.step_seconds,
        whole,
        f"times: {estimate.basis.text}",
        # The estimate's own notes are about other runs and about money.
        (*wired.notes, *mismatches(asked, path, wired.wish), *([] if whole else [PARTS_MISSING])),
        card,
    )


def _settings(asked: Mapping[str, Any], tiles: int) -> dict[str, Any]:
    """Arguments of `Wish`; the parts that ran tell the others."""
    batch, _, *frames, height, width = asked["latent"]
    references = len(asked["references"])
    settings = wish_settings(
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


def _with_tokens(wish: Wish, tokens: int) -> Wish:
    """The prompt's own tokens: those of references are counted by the family."""
    return replace(wish, text_tokens=max(1, tokens - wish.references * wish.member.vision_tokens))


def _cfg(asked: Mapping[str, Any]) -> str:
    """By what was computed: a guider may ask for the negative prompt in a call of its own."""
    if prompts_of(asked) < 1.5:
        return "off"
    # Steps in which CFG batching measured are of either kind.
    return "one pass" if passes_of(asked) < 1.5 else "two passes"
