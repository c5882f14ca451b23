"""Recognizes the published few-step LoRA or model in a MODEL, by its file's name or its tensors,
and compares a run with the schedule that it is trained for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ....families.comfyui import kind_of
from ....families.identify import normalize_name
from ....families.protocol import Family
from ....families.registry import pixels_of
from ....families.schedules import (
    OFFICIAL,
    Schedule,
    plain_name,
    schedule_of_file,
    schedule_of_lora,
    steps_in,
)
from ....optimizations.patches import put
from ....spec.transformer import PIXELS_PER_TOKEN_SIDE
from ..on_node import show_run

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher

# What a patch of ours has as an attribute: its file.
FILE = "qwen_l40s_lora_file"
JUDGED = "qwen_l40s_few_steps"  # of a guider: (what is wrong in its run, all that is to say of it)
# Between sigmas: ComfyUI's templates shift 1.x by 3.1 where Lightning's publisher does by 3.
LIKE_THE_SCHEDULE = 0.02


@dataclass(frozen=True)
class FewSteps:
    what: str
    schedule: Schedule | None  # what it is trained for; None where its sigmas are not known here
    steps: int  # of its schedule, else as its name says
    told_by: str = "the file's name"  # the source, in words
    strength: float = 1.0  # of a LoRA; 1 of a model
    of_lora: bool = True

    def words(self) -> str:
        if self.schedule is None:
            return (
                f"{self.what} is for {self.steps} steps by its name, but its sigmas are unknown: "
                "enter the sigmas of its model card in ManualSigmas."
            )
        return (
            f"{self.what} is for {self.schedule.name!r}, by {self.told_by}: {self.steps} steps, "
            f"CFG 1{', strength 1' * self.of_lora}."
        )


@dataclass(frozen=True)
class FewStepParts:
    """Holds what `few_steps` found, in the order of the MODEL: its file, then its LoRAs."""

    parts: tuple[FewSteps, ...] = ()

    @property
    def chosen(self) -> FewSteps | None:
        """Returns what the schedule follows: the strongest that has one, of equals the last."""
        known = reversed(self.parts)
        return max(known, key=lambda it: (it.schedule is not None, it.strength), default=None)

    def faults(self) -> list[str]:
        """Says in a sentence that there are several, or that the strength is another."""
        if len(self.parts) > 1:
            named = " and ".join(it.what for it in self.parts)
            return [
                f"This MODEL has {named}, but each was distilled to run alone: keep one of them."
            ]
        return [
            f"{it.what} is published for strength 1, but its strength here is {it.strength:g}."
            for it in self.parts
            if it.strength != 1
        ]


def few_steps(patcher: ModelPatcher) -> FewStepParts:
    """Finds what a MODEL has that is trained for few steps; nothing in other models."""
    kind = kind_of(patcher.model)
    if kind is None:
        return FewStepParts()
    schedules, found = kind.family.schedules, []
    if (path := _model_file(patcher)) and (own := _named(path, schedules, 1.0)):
        found.append(replace(own, of_lora=False))
    loras: dict[Any, dict[str, Any]] = defaultdict(dict)
    strengths: dict[Any, float] = defaultdict(float)
    for key, patches in patcher.patches.items():
        for strength, change, *_ in patches:
            if hasattr(change, "weights"):
                # ComfyUI's loader gives all adapters of a file one set of names.
                lora = getattr(change, FILE, None) or id(getattr(change, "loaded_keys", None))
                loras[lora][key] = change
                strengths[lora, key] += strength
    for lora, changes in loras.items():
        strength = max(strengths[lora, key] for key in changes)
        if strength <= 0:
            continue
        path = lora if isinstance(lora, Path) else None
        told = path and _named(path, schedules, strength)
        schedule = schedule_of_lora(*_form(changes, kind.family.stack), schedules)
        if schedule is not None and not told:
            what = repr(path.name) if path else "a LoRA"
            told = FewSteps(what, schedule, len(schedule.nodes), "its tensors", strength)
        found += [told] if told else []
    return FewStepParts(tuple(found))


def _named(path: Path, schedules: Sequence[Schedule], strength: float) -> FewSteps | None:
    name = plain_name(path)
    schedule, steps = schedule_of_file(name, schedules), steps_in(name)
    steps = len(schedule.nodes) if schedule else steps
    return FewSteps(repr(path.name), schedule, steps, strength=strength) if steps else None


def _model_file(patcher: ModelPatcher) -> Path | None:
    """Returns the file by which ComfyUI would load the MODEL again."""
    _, given, *_ = patcher.cached_patcher_init or (None, ())
    path = given[0] if given else None
    path = getattr(getattr(path, "source", None), "path", path)  # of a `LoadPlan`
    return Path(path) if isinstance(path, (str, Path)) else None


def _form(changes: Mapping[str, Any], stack: str) -> tuple[str, int]:
    """Returns what `schedule_of_lora` asks of a LoRA's changes."""
    names = {name.removesuffix(".weight") for name in changes}
    for keys in (getattr(change, "loaded_keys", None) or () for change in changes.values()):
        names |= {it.removesuffix(".diff") for it in keys if it.endswith(".diff")}
    plain = {normalize_name(it) for it in names}
    outside = sorted(it for it in plain if not it.startswith(f"{stack}."))
    down = (change.weights[1:2] for change in changes.values())
    ranks = [len(it) for its in down for it in its if getattr(it, "ndim", 0) == 2]
    return ",".join(outside), min(ranks, default=0)


def judge_run(
    guider: Any, noise: torch.Tensor, latent: Any, sampler: Any, sigmas: torch.Tensor, *_: Any
) -> None:
    """Notes on a guider, in sentences, how its run follows the few-step part of its MODEL; not
    where the sigmas begin later, as of an image to image.
    """
    patcher = guider.model_patcher
    found = few_steps(patcher)
    chosen, faults = found.chosen, found.faults()
    if chosen is not None and chosen.schedule is not None:
        family, cfg = kind_of(patcher.model).family, getattr(guider, "cfg", None)
        faults += _differences(chosen, family, sigmas, noise.shape, cfg)
    # Where all is well, what the LoRA's node has said of an earlier run is replaced.
    fine = [chosen.words()] if chosen and chosen.of_lora else []
    put(guider, **{JUDGED: (faults, faults or fine)})


def faults_of(guider: Any) -> list[str]:
    return getattr(guider, JUDGED, ([],))[0]


def show_few_steps(guider: Any) -> None:
    """Shows on the LoRA's node, and in the log, what `judge_run` noted."""
    *_, lines = getattr(guider, JUDGED, ([],))
    if lines:
        show_run("QwenL40S_LoadLora", lines, "\n".join(lines))


def _differences(
    chosen: FewSteps, family: Family, sigmas: torch.Tensor, latent: Sequence[int], cfg: Any
) -> list[str]:
    lines, schedule = [], chosen.schedule
    if cfg is not None and cfg > 1:
        lines.append(f"CFG is {cfg:g}, but {chosen.what} is distilled for CFG 1: set CFG to 1.")
    tokens = latent[-1] * latent[-2] * pixels_of(latent[1]) ** 2 // PIXELS_PER_TOKEN_SIDE**2
    # A second schedule of the same files has no names of its own.
    others = (it for it in family.schedules if it.source == schedule.source and not it.named)
    known = [it.sigmas(len(it.nodes), tokens) for it in (schedule, *others)]
    given = sigmas.tolist()
    if len(given) > 1 and not any(_is_part(given, it) for it in known):
        values = ", ".join(f"{it:.3g}" for it in known[0])
        lines.append(
            f"The sampler's sigmas differ from those of {chosen.what} ({values}): put Qwen-Image "
            "Scheduler with auto after the LoRA."
        )
    return lines


def _is_part(given: Sequence[float], schedule: Sequence[float]) -> bool:
    if given[0] < schedule[0] - LIKE_THE_SCHEDULE:
        return True
    alike = (abs(a - b) < LIKE_THE_SCHEDULE for a, b in zip(given, schedule, strict=False))
    return len(given) <= len(schedule) and all(alike)


def auto_schedule(patcher: ModelPatcher) -> tuple[Schedule, list[str]]:
    """Chooses the schedule of what is loaded, else the official one, and says why in sentences."""
    found = few_steps(patcher)
    chosen = found.chosen
    if chosen is None:
        return OFFICIAL, [
            "auto found no few-step model or LoRA: if one is loaded, choose its schedule."
        ]
    return chosen.schedule or OFFICIAL, [chosen.words(), *found.faults()]
