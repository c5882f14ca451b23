"""What the estimator predicts of a run that is over, from its recorded settings and its card."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ....charts.notes import attention_notes
from ....charts.words import BOUND
from ....errors import QwenL40SError
from ....families.registry import member_by_text, pixels_of
from ....options import request_settings
from ....planning.estimate import Estimate
from ....planning.phases import Phase, Range
from ....planning.plan import attention_form
from ....planning.request import EXACT, FAST, RunRequest
from ....planning.times import PROCESSOR
from ....spec.formats import EIGHT_BIT, CardFacts
from ....spec.transformer import REFERENCE_SIDE, whole_pixels
from ..estimate.cards import THIS_CARD, card_of
from ..estimate.request import WiredRequest, estimate_on, request_from
from ..load.plan import card_facts

# A reference that differs by more from one megapixel takes other memory and time.
LIKE_A_MEGAPIXEL = 0.1
# A sampler can add a pass here and there; more of them are another run.
LIKE_THE_PASSES = 0.25
FUSED = "blocks: fused, "
ATTENTION, MEASURED_ERRORS = "attention: ", "; fast: "


def passes_of(asked: Mapping[str, Any]) -> float:
    """Averages the forward passes of one evaluation of the sampler."""
    return asked["passes"] / max(1, asked["evaluations"])


def prompts_of(asked: Mapping[str, Any]) -> float:
    """Averages the prompts that one evaluation computed for each image."""
    return asked["computed"] / (max(1, asked["evaluations"]) * asked["latent"][0])


def mismatches(asked: Mapping[str, Any], path: Sequence[str], request: RunRequest) -> list[str]:
    """Says what ran otherwise than the prediction assumes."""
    notes = []
    if not any(line.startswith(FUSED) for line in path):
        notes.append("The predicted times assume fused blocks, which did not run.")
    if asked["controlnet"]:
        notes.append("The prediction leaves out the ControlNet that ran.")
    found = passes_of(asked), prompts_of(asked)
    known = request.passes, request.passes * request.items / request.batch
    if any(abs(one - other) > LIKE_THE_PASSES for one, other in zip(found, known, strict=True)):
        notes.append(
            f"A step took {found[0]:.3g} forward passes with {found[1]:.3g} prompts; the "
            f"prediction assumes {known[0]} with {known[1]:.0f}."
        )
    area = (REFERENCE_SIDE // pixels_of(asked["latent"][1])) ** 2
    sizes = [height * width / area for height, width in asked["references"]]
    if any(abs(size - 1) > LIKE_A_MEGAPIXEL for size in sizes):
        megapixels = ", ".join(f"{size:.2g}" for size in sizes)
        notes.append(f"References had {megapixels} megapixels; the prediction assumes one each.")
    return notes


PARTS_MISSING = "Connect clip and vae to predict the card's memory: their weights count too."


def _cards_note(model: Any) -> list[str]:
    copies = len(model.get_additional_models_with_key("multigpu"))
    return [f"The MODEL ran on {copies + 1} cards; the prediction is for one."] if copies else []


@dataclass(frozen=True)
class Prediction:
    """Holds what the estimator says of a run.

    Attributes:
        notes: What the prediction leaves out, or why there is none.
        estimate: None where there is no prediction.
        whole: Whether all parts are known, so that the phases' `card_bytes` hold.
    """

    notes: tuple[str, ...] = ()
    estimate: Estimate | None = None
    whole: bool = False

    @property
    def step(self) -> Range | None:
        """Predicts an evaluation of the sampler with all its prompts; None without times."""
        return None if self.estimate is None else self.estimate.step_seconds

    def phases(self, **settings: Any) -> Mapping[str, Phase]:
        """Predicts the phases, with other settings where some are given; empty where nothing is
        predicted or the settings are not possible.
        """
        if self.estimate is None:
            return {}
        try:
            request = replace(self.estimate.request, **settings)
            if request == self.estimate.request:
                return self.estimate.phases
            return estimate_on(self.estimate.card, WiredRequest(request), None).phases
        except QwenL40SError:
            return {}


def predict(
    asked: Mapping[str, Any], path: Sequence[str], model: Any, clip: Any, vae: Any, tiles: int
) -> Prediction:
    """Predicts a recorded sampling run with its encoding and decoding.

    Args:
        asked, path: of the sampling's record.
        model, clip, vae: what ran; None for what is not connected.
        tiles: tiles of the decode; 0 where unknown.
    """
    device = model.load_device
    facts = card_facts(device)
    if facts is None:
        return Prediction(notes=(f"Nothing is predicted for a run on {device}.",))
    try:
        wired = request_from(_settings(asked, tiles), model=model, clip=clip, vae=vae)
        request = _with_tokens(wired.request, asked["text_tokens"])
        wired = replace(wired, request=replace(request, attention=_attention(path, facts)))
        card, _ = card_of(THIS_CARD, device)
        estimate = estimate_on(card, wired, None)
    except QwenL40SError as error:
        return Prediction(notes=(f"Nothing is predicted: {error}",))
    whole = clip is not None and vae is not None
    # The estimate's own notes are about other runs and about money.
    notes = (
        *wired.notes,
        *([f"The predicted step is {BOUND}."] if estimate.bound == PROCESSOR else []),
        *attention_notes(estimate),
        *mismatches(asked, path, wired.request),
        *_cards_note(model),
        *([] if whole else [PARTS_MISSING]),
    )
    return Prediction(notes, estimate, whole)


def _settings(asked: Mapping[str, Any], tiles: int) -> dict[str, Any]:
    """Gives the arguments of `RunRequest` that the parts that ran do not."""
    batch, channels, *frames, height, width = asked["latent"]
    side = pixels_of(channels)
    references = len(asked["references"])
    computed = max(1, asked["evaluations"])
    settings = request_settings(
        width=whole_pixels(side * width),
        height=whole_pixels(side * height),
        batch=batch,
        steps=max(asked["steps"] or 0, computed),
        computed=computed,
        cfg=_cfg(asked),
        references=references,
        layers=frames[0] - 1 if frames else 0,
        tiles=tiles,
    )
    if member := member_by_text(references, asked["text_tokens"]):
        settings["family"] = member.name
    return settings


def _attention(path: Sequence[str], card: CardFacts) -> str:
    """Names the attention that ran: "fast" where it chose what is predicted of it."""
    lines = [line for line in path if line.startswith(ATTENTION)]
    names = {line.removeprefix(ATTENTION).partition(":")[0] for line in lines}
    ran = next((form for form in EIGHT_BIT if form in names), EXACT)
    fast = any(MEASURED_ERRORS in line for line in lines)
    return FAST if fast and attention_form(FAST, card) == ran else ran


def _with_tokens(request: RunRequest, tokens: int) -> RunRequest:
    """Sets the prompt's own tokens: the family counts those of references."""
    each = request.member.reference_words
    return replace(request, text_tokens=max(1, tokens - request.references * each))


def _cfg(asked: Mapping[str, Any]) -> str:
    """Tells by what was computed: a guider may ask for the negative prompt in its own call."""
    if prompts_of(asked) < 1.5:
        return "off"
    # ComfyUI computes prompts of one length in one pass.
    return "one pass" if passes_of(asked) < 1.5 else "two passes"
