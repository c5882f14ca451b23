"""Writes the report after a run: six lines with the answer first, what was measured of each phase,
which path its code took, and one line of the prediction; a chart, and the same for programs.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from typing import Any

from comfy.model_patcher import ModelPatcher

from ...charts.figures import duration, folded, table, tenths, usd
from ...charts.picture import Bar, Figure, Limit, RunPicture
from ...charts.text import pair
from ...errors import QwenL40SError
from ...families.registry import member_by_text, pixels_of
from ...planning.estimate import Estimate, usd_range
from ...planning.options import request_settings
from ...planning.phases import Range, figure, gib
from ...planning.plan import attention_form
from ...planning.request import EXACT, FAST
from ...spec.formats import GIB, KITCHEN_INT8, CardFacts
from ...spec.transformer import whole_pixels
from .contract import unsupported_model
from .estimate.cards import THIS_CARD, card_of
from .estimate.request import estimate_on, request_from
from .load.plan import card_facts
from .record import MeasuredPhase, harmless, measured, prompt_id
from .sample.measure import is_recorded

# {phase: what a report calls it}, as a first run has them.
ROWS = {
    "load": "load",
    "text": "text encode",
    "encode": "VAE encode",
    "tables": "modulation",
    "sampling": "sampling",
    "decode": "VAE decode",
}
NO_RUN = (
    "Nothing was sampled with this MODEL since it was loaded: connect the MODEL that goes into the "
    "sampler."
)
NOT_MEASURED = (
    "This MODEL's last run was not measured: this node was missing, or ComfyUI's log shows the "
    "reason. Change the seed and run again."
)
EARLIER = (
    "ComfyUI reused an earlier result, so this run did not sample. These figures are from the "
    "last run that did."
)
UNWATCHED = (
    "Another pack loaded this MODEL, so its runs are not measured: put Qwen-Image Optimize "
    "between the MODEL and the sampler, and connect its output here."
)
FAILED = "The run could not be reported: ComfyUI's log shows the reason."
PARTS_MISSING = "Connect clip and vae to predict VRAM, because their weights count too."
FIRST_RUN = "a first run also moves the model to the GPU, compiles kernels and tests attention"
# What sampling may take besides its steps before the report says so.
LONG_SECONDS, LONG_SHARE = 1.0, 0.25
# A run that takes so much more or less than predicted is called slower or faster.
LIKE_THE_PREDICTION = 0.15
SIGNS = {"as predicted": "good", "faster than predicted": "good", "slower than predicted": "tight"}
# A sampler can add a pass here and there; more of them are another run.
LIKE_THE_PASSES = 0.25


@dataclass(frozen=True)
class RunReport:
    """Holds the report in words, its first lines, its chart, and the same for JSON."""

    text: str
    summary: str
    picture: RunPicture
    data: dict[str, Any]


def report_run(model: ModelPatcher, clip: Any = None, vae: Any = None) -> RunReport:
    """Reports the last run of a MODEL with what CLIP and VAE did for it. Never raises."""
    with harmless():
        report = _report(model, clip, vae)
        json.dumps(report.data)
        return report
    return _sentence(FAILED)


def _sentence(text: str) -> RunReport:
    picture = RunPicture("plain", "No run to report", lines=[text])
    return RunReport(text, text, picture, {"note": text})


def _report(model: ModelPatcher, clip: Any, vae: Any) -> RunReport:
    if fallback := unsupported_model(model):
        return _sentence(str(fallback).replace("it is left unchanged", "its runs are not reported"))
    ran = last_run(model, clip, vae)
    if ran is None:
        if measured(model) is not None:
            return _sentence(NOT_MEASURED)
        return _sentence(NO_RUN if is_recorded(model) else UNWATCHED)
    sampled, rows = ran.of("sampling"), rows_of(ran)
    prediction = predict(sampled[-1], model, clip, vae)
    run = RunFacts(ran, rows, prediction, predicted_seconds(rows, prediction, model, clip, vae))
    notes = [] if ran.this_run else [EARLIER]
    if clip is not None and not ran.of("text"):
        notes.append(
            "No text encoding was measured: ComfyUI reused the prompts, or another pack loaded "
            "the CLIP."
        )
    if vae is not None and not ran.of("decode"):
        notes.append(
            "No VAE decode was measured: use VAE Decode (Qwen-Image), the only one that is "
            "measured."
        )
    notes += prediction.notes
    if len(sampled) > 1:
        notes.append(
            f"{len(sampled)} samplings ran: the times cover all of them, the step time is from "
            "the last."
        )
    if beyond := run.beyond_steps():
        notes.append(f"{seconds_text(beyond)} of sampling were outside the steps: {FIRST_RUN}.")
    notes += dict.fromkeys(it for each in sampled for it in each.asked.get("few_steps", ()))
    device = ran.last.device
    if ran.last.counted:
        notes.append("VRAM is what the driver reports: all programs, including torch's reserve.")
    elif device.type == "cpu":
        notes.append("VRAM is not measured on the CPU.")
    else:
        notes.append(f"VRAM and steps are measured on CUDA GPUs only; this run was on {device}.")
    lines = run.summary()
    return RunReport(
        run.text(lines, notes), "\n".join(lines), run.picture(), run.data() | {"notes": notes}
    )


# What was measured.


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
    """Holds a phase that ran, once or several times; `run` says of which run it is, if not all are
    of one.
    """

    name: str
    phases: Sequence[MeasuredPhase]  # in order
    run: str = ""

    @property
    def title(self) -> str:
        count = f"{len(self.phases)} times" if len(self.phases) > 1 else ""
        which = ", ".join(filter(None, (count, self.run)))
        return f"{ROWS[self.name]} ({which})" if which else ROWS[self.name]

    @property
    def seconds(self) -> float:
        return sum(phase.seconds for phase in self.phases)

    def most(self, name: str) -> int:
        return max(getattr(phase, name) for phase in self.phases)

    def path(self) -> list[str]:
        return list(dict.fromkeys(line for phase in self.phases for line in phase.path))

    def as_dict(self) -> dict[str, Any]:
        found = {"seconds": figure(self.seconds)}
        if any(phase.counted for phase in self.phases):
            found |= {
                "card_gib": gib(self.most("card_bytes")),
                "allocated_gib": gib(self.most("allocated_bytes")),
                "paged_weights_gib": gib(self.most("paged_bytes")),
                "working_gib": gib(self.most("working_bytes")) or None,
            }
        return {
            "run": self.run or None,
            "measured": found,
            "times": len(self.phases),
            "path": self.path(),
            "asked": [dict(phase.asked) for phase in self.phases],
        }


def rows_of(ran: LastRun) -> list[Row]:
    """Sorts the phases that ran as a first run has them; the first sums the waits for weights."""
    rows = []
    waited = [
        phase
        for phase in ran.phases
        if phase.name != "tables" and phase.prompt == ran.last.prompt
        if phase.waited_seconds is not None
    ]
    for name in ROWS:
        phases = ran.of(name)
        if name == "load" and waited:
            load = MeasuredPhase("load", None, waited[0].device, prompt=ran.last.prompt)
            load.seconds = sum(phase.waited_seconds for phase in waited)
            load.card_bytes = max(phase.loaded_bytes for phase in waited)
            phases = (load,)
        if phases:
            own = "this run" if phases[-1].prompt == ran.now else "an earlier run"
            rows.append(Row(name, phases, "" if ran.this_run else own))
    return rows


# What was predicted.


@dataclass(frozen=True)
class Prediction:
    """Holds what the estimator says of a sampling with its encoding and decoding."""

    notes: tuple[str, ...] = ()  # what it leaves out, or why there is no estimate
    estimate: Estimate | None = None
    whole: bool = False  # all parts are known, so that the phases' `card_bytes` hold

    @property
    def step(self) -> Range | None:
        """Predicts an evaluation of the sampler with all its prompts; None without times."""
        return None if self.estimate is None else self.estimate.step_seconds

    @property
    def card_bytes(self) -> int:
        """Predicts the card's bytes at the peak; 0 where a part is unknown."""
        phases = self.estimate.phases.values() if self.whole and self.estimate else ()
        return max((phase.card_bytes for phase in phases), default=0)


def predict(run: MeasuredPhase, model: Any, clip: Any, vae: Any) -> Prediction:
    """Predicts a recorded sampling run; CLIP and VAE are None where they are not connected."""
    asked, device = run.asked, model.load_device
    facts = card_facts(device)
    if facts is None:
        return Prediction((f"Nothing is predicted for a run on {device}.",))
    try:
        wired = request_from(_run_settings(asked), model=model, clip=clip, vae=vae)
        request = wired.request
        # The family counts those of references.
        tokens = asked["text_tokens"] - request.references * request.member.reference_words
        attention = _attention(run.attention, facts)
        request = replace(request, text_tokens=max(1, tokens), attention=attention)
        card, _ = card_of(THIS_CARD, device)
        estimate = estimate_on(card, replace(wired, request=request), None)
    except QwenL40SError as error:
        return Prediction((f"Nothing is predicted: {error}",))
    notes = [*wired.notes]
    if run.not_fused:
        notes.append("The predicted times assume fused kernels, which did not run.")
    if asked["controlnet"]:
        notes.append("The prediction does not include the ControlNet that ran.")
    found = passes_of(asked), prompts_of(asked)
    known = request.passes, request.passes * request.items / request.batch
    if any(abs(one - other) > LIKE_THE_PASSES for one, other in zip(found, known, strict=True)):
        notes.append(
            f"A step took {found[0]:.3g} forward passes with {found[1]:.3g} prompts; the "
            f"prediction assumes {known[0]} passes with {known[1]:.0f}."
        )
    if copies := len(model.get_additional_models_with_key("multigpu")):
        notes.append(f"The MODEL ran on {copies + 1} GPUs; the prediction is for one GPU.")
    whole = clip is not None and vae is not None
    return Prediction((*notes, *([] if whole else [PARTS_MISSING])), estimate, whole)


def predicted_seconds(
    rows: Sequence[Row], last: Prediction, model: Any, clip: Any, vae: Any
) -> Range | None:
    """Adds up the predicted times of all that ran; None where one has no prediction."""
    times = []
    for row in rows:
        predictions = [last] * len(row.phases)
        if row.name == "sampling":
            earlier = (predict(phase, model, clip, vae) for phase in row.phases[:-1])
            predictions = [*earlier, last]
        for each in predictions:
            phases = {} if each.estimate is None else each.estimate.phases
            found = phases.get(row.name)
            if found is None or found.seconds is None or (row.name == "load" and not each.whole):
                return None
            prompts = 2 if row.name == "text" and each.estimate.request.cfg != "off" else 1
            times.append(found.seconds.times(1 / prompts))
    return reduce(add, times)


def passes_of(asked: Mapping[str, Any]) -> float:
    """Averages the forward passes of one evaluation of the sampler."""
    return asked["passes"] / max(1, asked["evaluations"])


def prompts_of(asked: Mapping[str, Any]) -> float:
    """Averages the prompts that one evaluation computed for each image."""
    return asked["computed"] / (max(1, asked["evaluations"]) * asked["latent"][0])


def _run_settings(asked: Mapping[str, Any]) -> dict[str, Any]:
    batch, channels, *frames, height, width = asked["latent"]
    side = pixels_of(channels)
    references = len(asked["references"])
    computed = max(1, asked["evaluations"])
    # A guider may ask for the negative prompt in its own call; ComfyUI computes prompts of one
    # length in one pass.
    cfg = "one pass" if passes_of(asked) < 1.5 else "two passes"
    settings = request_settings(
        width=whole_pixels(side * width),
        height=whole_pixels(side * height),
        batch=batch,
        steps=max(asked["steps"] or 0, computed),
        computed=computed,
        cfg="off" if prompts_of(asked) < 1.5 else cfg,
        references=references,
    )
    settings["layers"] = frames[0] - 1 if frames else 0
    if member := member_by_text(references, asked["text_tokens"]):
        settings["family"] = member.name
    return settings


def _attention(names: Collection[str], card: CardFacts) -> str:
    """Names the attention that ran: "fast" where it chose what is predicted of it."""
    ran = KITCHEN_INT8 if KITCHEN_INT8 in names else EXACT
    return FAST if FAST in names and attention_form(FAST, card) == ran else ran


# Its words.


@dataclass(frozen=True)
class RunFacts:
    ran: LastRun
    rows: Sequence[Row]
    prediction: Prediction  # of the last sampling
    predicted: Range | None = None  # seconds of all that ran

    @property
    def seconds(self) -> float:
        return sum(row.seconds for row in self.rows)

    @property
    def step(self) -> float | None:
        """Returns the seconds of the last sampling's step; None where it was not timed."""
        return self.ran.last.asked["step_seconds"]

    @property
    def peak(self) -> int:
        return max(row.most("card_bytes") for row in self.rows)

    @property
    def usable(self) -> int:
        """Counts the bytes of the card that a run may use; 0 where nothing is predicted."""
        estimate = self.prediction.estimate
        return estimate.option.usable_bytes if estimate else 0

    def beyond_steps(self) -> float:
        """Counts the seconds of sampling that were no steps, where they are many; else 0."""
        sampled = self.ran.of("sampling")
        if any(run.asked["step_seconds"] is None for run in sampled):
            return 0.0
        steps = sum(run.asked["evaluations"] * run.asked["step_seconds"] for run in sampled)
        beyond = sum(run.seconds for run in sampled) - steps
        return beyond if beyond >= max(LONG_SECONDS, LONG_SHARE * steps) else 0.0

    def compared(self) -> str:
        if self.predicted is None:
            return ""
        low, high = self.predicted
        if self.seconds > high * (1 + LIKE_THE_PREDICTION):
            return "slower than predicted"
        faster = self.seconds < low * (1 - LIKE_THE_PREDICTION)
        return "faster than predicted" if faster else "as predicted"

    def cost(self) -> str:
        price = self.prediction.estimate and self.prediction.estimate.card.price()
        seconds = self.seconds / self.ran.last.asked["latent"][0]
        return usd(usd_range(price.usd_per_hour, Range(seconds, seconds))) if price else ""

    def answer(self) -> str:
        took = f"{'Took' if self.ran.this_run else 'An earlier run took'} "
        compared = "" if self.predicted is None else f", {self.compared()}"
        return f"{took}{seconds_text(self.seconds)}{compared}"

    def summary(self) -> list[str]:
        known = "" if self.predicted is None else f" ({duration(self.predicted)})"
        answer = f"{self.answer()}{known or ', without a prediction'}."
        times = [f"{ROWS[row.name]} {seconds_text(row.seconds)}" for row in self.rows]
        if self.step is not None:
            times.append(f"a step {seconds_text(self.step)}")
        memory = f"VRAM not measured on {self.ran.last.device}, only on CUDA GPUs"
        if self.peak:
            of = f" of {tenths(self.usable)}" if self.usable else ""
            memory = f"peak VRAM {tenths(self.peak)}{of} GiB"
        cost = self.cost()
        return [
            answer,
            heading(self.ran.last.asked),
            f"Time: {', '.join(times)}.",
            f"Memory: {memory}.",
            f"Cost: {f'{cost} an image' if cost else 'unknown, without a price for this device'}.",
            f"Next: {self._next()}.",
        ]

    def _next(self) -> str:
        if not self.ran.this_run:
            return "change the seed and run again for new figures"
        if self.beyond_steps():
            return f"run again, because {FIRST_RUN}"
        if self.prediction.estimate is not None:
            if why := self.ran.last.not_fused:
                return why.remedy or f"fused kernels did not run: {why}"
            if not self.prediction.whole:
                return PARTS_MISSING[0].lower() + PARTS_MISSING[1:-1]
        return "nothing to change; the json output has these figures for programs"

    def text(self, summary: Sequence[str], notes: Sequence[str]) -> str:
        paths = [
            f"{ROWS[row.name]}: {line}" if row.name in ("text", "tables") else line
            for row in self.rows
            for line in row.path()
        ]
        last = [f"Note: {note}" for note in notes]
        blocks = [summary, [*self._table(), *self._prediction()], folded(paths), folded(last)]
        return "\n\n".join("\n".join(lines) for lines in blocks if lines)

    def _table(self) -> list[str]:
        rows = [["time and GiB", "time", "VRAM", "working"]]
        for row in self.rows:
            memory = (row.most("card_bytes"), row.most("working_bytes"))
            cells = [f"{count / GIB:.2f}" if count else "" for count in memory]
            rows.append([row.title, seconds_text(row.seconds), *cells])
            if row.name == "sampling" and self.step is not None:
                rows.append(["  a step", seconds_text(self.step), "", ""])
        rows.append(["total", seconds_text(self.seconds), "", ""])
        columns = [column for column in zip(*rows, strict=True) if any(column[1:])]
        return table(list(zip(*columns, strict=True)), right=range(1, 4))

    def _prediction(self) -> list[str]:
        prediction, said = self.prediction, []
        if self.predicted is not None:
            said.append(f"{duration(self.predicted)} in total")
        if prediction.step is not None:
            said.append(f"{duration(prediction.step)} a step")
        if prediction.card_bytes:
            said.append(f"peak VRAM {tenths(prediction.card_bytes)} GiB")
        if prediction.estimate:
            said.append(f"times {prediction.estimate.basis.text}")
        return folded([f"Predicted: {', '.join(said)}"]) if said else []

    def data(self) -> dict[str, Any]:
        step, prediction = self.step, self.prediction
        estimate = prediction.estimate
        return {
            "this_run": self.ran.this_run,
            "phases": {row.name: row.as_dict() for row in self.rows},
            "step_ms": {
                "predicted": prediction.step and pair(prediction.step.times(1000)),
                "measured": None if step is None else figure(1000 * step),
            },
            "step_bound_by": estimate and estimate.bound,
            "measured_seconds": figure(self.seconds),
            "predicted_seconds": self.predicted and pair(self.predicted),
            "predicted_card_gib": gib(prediction.card_bytes) or None,
            "basis": estimate and estimate.basis.text,
        }

    def picture(self) -> RunPicture:
        peak, estimate, cost, figures = self.peak, self.prediction.estimate, self.cost(), []
        limit = None
        if peak and self.usable:
            limit = Limit(peak, self.usable, estimate.card.memory_bytes)
            figures = [Figure("VRAM", f"{tenths(peak)} of {tenths(self.usable)} GiB")]
        below = f"({duration(self.predicted)})" if self.predicted else ""
        figures.append(Figure("total", seconds_text(self.seconds), below))
        if cost:
            figures.append(Figure("cost of an image", cost))
        step = ""
        if self.step is not None:
            known = self.prediction.step
            expected = f" ({duration(known)})" if known else ""
            step = f" A step took {seconds_text(self.step)}{expected}."
        place = estimate.card.name if estimate else self.ran.last.device
        earlier = "" if self.ran.this_run else ", in an earlier run"
        return RunPicture(
            sign=SIGNS.get(self.compared(), "plain"),
            answer=self.answer(),
            basis="measured" if self.predicted is None else "measured (predicted)",
            lines=[
                f"On {place}{earlier}{'' if estimate else ', where nothing is predicted'}.{step}"
            ],
            about=heading(self.ran.last.asked),
            figures=figures,
            bars=[_bar(row, counted=bool(peak)) for row in self.rows],
            limit=limit,
        )


def _bar(row: Row, *, counted: bool) -> Bar:
    name, time = ROWS[row.name], seconds_text(row.seconds)
    if not counted:
        return Bar(name, {"measured": row.seconds}, "", time)
    count = row.most("card_bytes")
    return Bar(name, {"measured": count}, f"{tenths(count)} GiB", time)


def heading(asked: Mapping[str, Any]) -> str:
    batch, channels, *frames, height, width = asked["latent"]
    side = pixels_of(channels)
    words = [f"{side * width}x{side * height}", f"batch {batch}"]
    if frames and frames[0] > 1:
        words.append(f"{frames[0]} frames")
    steps = asked["steps"]
    words.append(f"{asked['evaluations'] if steps is None else steps} steps")
    if steps not in (None, asked["evaluations"]):
        words.append(f"{asked['evaluations']} evaluations")
    words.append(f"{asked['passes']} forward passes")
    if asked["cfg"] is not None:
        words.append(f"CFG {asked['cfg']:g}")
    words.append(f"{asked['text_tokens']} text tokens")
    if asked["references"]:
        words.append(f"{len(asked['references'])} references")
    return f"Sampled: {', '.join(words)}"


def seconds_text(value: float) -> str:
    return duration(Range(value, value))
