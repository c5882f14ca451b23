"""The phases of a run that is over: what the estimator predicts of each and what was measured."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from typing import Any

from comfy.model_patcher import ModelPatcher

from ...charts.answer import phase_json
from ...charts.figures import duration
from ...charts.notes import attention_notes
from ...charts.words import BOUND, PHASE_NAMES
from ...errors import QwenL40SError
from ...families.registry import member_by_text, pixels_of
from ...options import request_settings
from ...planning.estimate import Estimate
from ...planning.phases import Phase, Range, figure, gib
from ...planning.plan import attention_form
from ...planning.request import EXACT, FAST, RunRequest
from ...planning.times import PROCESSOR
from ...spec.formats import EIGHT_BIT, CardFacts
from ...spec.transformer import REFERENCE_SIDE, whole_pixels
from .estimate.cards import THIS_CARD, card_of
from .estimate.request import WiredRequest, estimate_on, request_from
from .load.plan import card_facts
from .record import MeasuredPhase, measured, prompt_id

ROW_NAMES = {**PHASE_NAMES, "encode": "VAE encode", "decode": "VAE decode"}
ORDER = ("text", "encode", "tables", "sampling", "decode")
# A reference that differs by more from one megapixel takes other memory and time.
LIKE_A_MEGAPIXEL = 0.1
# A sampler can add a pass here and there; more of them are another run.
LIKE_THE_PASSES = 0.25


def passes_of(asked: Mapping[str, Any]) -> float:
    """Averages the forward passes of one evaluation of the sampler."""
    return asked["passes"] / max(1, asked["evaluations"])


def prompts_of(asked: Mapping[str, Any]) -> float:
    """Averages the prompts that one evaluation computed for each image."""
    return asked["computed"] / (max(1, asked["evaluations"]) * asked["latent"][0])


def mismatches(run: MeasuredPhase, request: RunRequest) -> list[str]:
    asked, notes = run.asked, []
    if run.not_fused:
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


@dataclass(frozen=True)
class Prediction:
    """Holds what the estimator says of a run."""

    notes: tuple[str, ...] = ()  # what it leaves out, or why there is no estimate
    estimate: Estimate | None = None
    whole: bool = False  # all parts are known, so that the phases' `card_bytes` hold

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


def predict(run: MeasuredPhase, model: Any, clip: Any, vae: Any, tiles: int) -> Prediction:
    """Predicts a recorded sampling run with its encoding and decoding.

    Args:
        run: the sampling.
        model, clip, vae: what ran; None for what is not connected.
        tiles: tiles of the decode; 0 where unknown.
    """
    asked, device = run.asked, model.load_device
    facts = card_facts(device)
    if facts is None:
        return Prediction(notes=(f"Nothing is predicted for a run on {device}.",))
    try:
        wired = request_from(_run_settings(asked, tiles), model=model, clip=clip, vae=vae)
        request = wired.request
        # The family counts those of references.
        tokens = asked["text_tokens"] - request.references * request.member.reference_words
        attention = _attention(run.attention, facts)
        request = replace(request, text_tokens=max(1, tokens), attention=attention)
        wired = replace(wired, request=request)
        card, _ = card_of(THIS_CARD, device)
        estimate = estimate_on(card, wired, None)
    except QwenL40SError as error:
        return Prediction(notes=(f"Nothing is predicted: {error}",))
    whole = clip is not None and vae is not None
    copies = len(model.get_additional_models_with_key("multigpu"))
    # The estimate's own notes are about other runs and about money.
    notes = (
        *wired.notes,
        *([f"The predicted step is {BOUND}."] if estimate.bound == PROCESSOR else []),
        *attention_notes(estimate),
        *mismatches(run, wired.request),
        *([f"The MODEL ran on {copies + 1} cards; the prediction is for one."] if copies else []),
        *([] if whole else [PARTS_MISSING]),
    )
    return Prediction(notes, estimate, whole)


def _run_settings(asked: Mapping[str, Any], tiles: int) -> dict[str, Any]:
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
        tiles=tiles,
    )
    settings["layers"] = frames[0] - 1 if frames else 0
    if member := member_by_text(references, asked["text_tokens"]):
        settings["family"] = member.name
    return settings


def _attention(names: Collection[str], card: CardFacts) -> str:
    """Names the attention that ran: "fast" where it chose what is predicted of it."""
    ran = next((form for form in EIGHT_BIT if form in names), EXACT)
    return FAST if FAST in names and attention_form(FAST, card) == ran else ran


def _cfg(asked: Mapping[str, Any]) -> str:
    """Tells by what was computed: a guider may ask for the negative prompt in its own call."""
    if prompts_of(asked) < 1.5:
        return "off"
    # ComfyUI computes prompts of one length in one pass.
    return "one pass" if passes_of(asked) < 1.5 else "two passes"


@dataclass(frozen=True)
class LastRun:
    """Holds what a report is of: the MODEL's last run, with what CLIP and VAE did for it or now."""

    phases: tuple[MeasuredPhase, ...]  # in order
    now: str  # the id of the prompt that ComfyUI executes

    @property
    def last(self) -> MeasuredPhase:
        return self.of("sampling")[-1]

    @property
    def this_run(self) -> bool:
        return self.last.prompt == self.now

    def of(self, name: str) -> tuple[MeasuredPhase, ...]:
        return tuple(phase for phase in self.phases if phase.name == name)


def last_run(model: ModelPatcher, clip: Any, vae: Any) -> LastRun | None:
    own = measured(model) or ()
    sampled = [phase for phase in own if phase.name == "sampling"]
    if not sampled:
        return None
    prompts = (sampled[-1].prompt, prompt_id())
    parts = (getattr(part, "patcher", None) for part in (clip, vae))
    others = [it for part in parts for it in measured(part) or () if it.prompt in prompts]
    return LastRun((*own, *others), prompts[1])


@dataclass(frozen=True)
class Row:
    """Holds a phase that ran, once or several times: measured beside predicted."""

    name: str
    phases: Sequence[MeasuredPhase]  # in order
    predicted: Sequence[Phase] = ()  # of each that ran; fewer where there is none
    whole: bool = False  # whether the estimate of the whole card holds
    run: str = ""  # which run it is of, in words; empty where all are of one

    @property
    def title(self) -> str:
        count = f"{len(self.phases)} times" if len(self.phases) > 1 else ""
        which = ", ".join(filter(None, (count, self.run)))
        return f"{ROW_NAMES[self.name]} ({which})" if which else ROW_NAMES[self.name]

    @property
    def seconds(self) -> float:
        return sum(phase.seconds for phase in self.phases)

    @property
    def predicted_seconds(self) -> Range | None:
        expected = [phase.seconds for phase in self.predicted]
        known = expected and None not in expected and len(expected) == len(self.phases)
        return reduce(add, expected) if known else None

    @property
    def card(self) -> tuple[int, int]:
        """Finds the bytes of the card at the peak, measured and predicted; 0 where unknown."""
        predicted = max((phase.card_bytes for phase in self.predicted), default=0) * self.whole
        return _most(self.phases, "card_bytes"), predicted

    @property
    def working(self) -> tuple[int, int]:
        """Finds the bytes of working memory at the peak, as `card`."""
        # The tables' weights pass the card once.
        predicted = (
            phase.activations + phase.workspace + phase.weights * (self.name == "tables")
            for phase in self.predicted
        )
        return _most(self.phases, "working_bytes"), max(predicted, default=0)

    def path(self) -> list[str]:
        return list(dict.fromkeys(line for phase in self.phases for line in phase.path))

    def as_dict(self) -> dict[str, Any]:
        """Gives the figures for JSON, in seconds and GiB."""
        found = {"seconds": figure(self.seconds)}
        if any(phase.counted for phase in self.phases):
            found |= {
                "card_gib": gib(self.card[0]),
                "allocated_gib": gib(_most(self.phases, "allocated_bytes")),
                "paged_weights_gib": gib(_most(self.phases, "paged_bytes")),
                "working_gib": gib(self.working[0]) if self.working[0] else None,
            }
        predicted = None
        if self.predicted:
            most = max(self.predicted, key=lambda phase: phase.card_bytes)
            predicted = phase_json(most) | {"seconds": ends(self.predicted_seconds)}
            if not self.card[1]:
                predicted["card_gib"] = predicted["parts"]["resident"] = None
        return {
            "run": self.run or None,
            "predicted": predicted,
            "measured": found,
            "times": len(self.phases),
            "path": self.path(),
            "asked": [dict(phase.asked) for phase in self.phases],
        }


def _most(phases: Sequence[MeasuredPhase], name: str) -> int:
    return max(getattr(phase, name) for phase in phases)


def rows_of(ran: LastRun, predictions: Sequence[Prediction]) -> list[Row]:
    """Sorts the phases that ran as a first run has them, with the estimate of each.

    Args:
        predictions: of each sampling; the last is of the one that gave the images.
    """
    last, rows = predictions[-1], []
    for name in ("load", *ORDER):
        phases = _load(ran) if name == "load" else ran.of(name)
        if not phases:
            continue
        by = predictions if name == "sampling" else [last] * len(phases)
        found = [_predicted(phase, each) for phase, each in zip(phases, by, strict=True)]
        run = ""
        if not ran.this_run:
            run = "this run" if phases[-1].prompt == ran.now else "an earlier run"
        rows.append(Row(name, phases, [it for it in found if it is not None], last.whole, run))
    return rows


def _predicted(phase: MeasuredPhase, prediction: Prediction) -> Phase | None:
    if phase.name == "load" and not prediction.whole:
        return None
    found = prediction.phases(**_phase_settings(phase)).get(phase.name)
    if found is None or phase.name != "text" or found.seconds is None:
        return found
    prompts = 1 if prediction.estimate.request.cfg == "off" else 2
    return replace(found, seconds=found.seconds.times(1 / prompts))


def _load(ran: LastRun) -> list[MeasuredPhase]:
    """Sums the waits for weights as one phase; none where nothing waited."""
    found = [
        phase
        for phase in ran.phases
        if phase.name != "tables" and phase.prompt == ran.last.prompt
        if phase.waited_seconds is not None
    ]
    if not found:
        return []
    load = MeasuredPhase("load", None, found[0].device, prompt=ran.last.prompt)
    load.seconds = sum(phase.waited_seconds for phase in found)
    load.card_bytes = _most(found, "loaded_bytes")
    return [load]


def _phase_settings(phase: MeasuredPhase) -> dict[str, int]:
    """Names the fields of a `RunRequest` in which a phase can differ from the sampling."""
    if phase.name == "decode" and "size" in phase.asked:
        images, *_, height, width = phase.asked["size"]
        asked = {name: whole_pixels(side) for name, side in (("width", width), ("height", height))}
        return asked | {"batch": images, "layers": 0, "tiles": phase.asked["tiles"]}
    if phase.name == "tables":
        return dict.fromkeys(("steps", "computed"), phase.asked["timesteps"])
    return {}


def ends(seconds: Range | None) -> list[float] | None:
    return None if seconds is None else [figure(seconds.low), figure(seconds.high)]


def seconds_text(value: float) -> str:
    """Formats seconds: `840 ms`."""
    return duration(Range(value, value))
