"""Guides a MODEL's attention away from a negative prompt (NAG), as at CFG 1. A wrapper around each
call of the transformer adds the prompt, and `GuidedAttention` reads it.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import WrappersMP

from ....errors import SettingError
from ....families.comfyui import kind_of, kind_of_transformer
from ....optimizations.reference import Guidance
from ....verdict import Verdict, read_or
from ..contract import unsupported_model
from ..on_node import show_run
from .measure import record_runs
from .run import NAG_KEY, UNREAD

EMPTY = Verdict("the negative prompt is empty")
COMBINED = Verdict("prompts are combined, in regions or scheduled")
CARDS = Verdict("several GPUs share the run")
OTHER = Verdict("this model has no known way to use a negative prompt")
ONLY_NEGATIVE = Verdict("no forward pass in these steps had the positive prompt")
LAST_STEP = 10_000
# Of a conditioning, what says that it is for a part of the image or of the run, and what for all.
WHOLE = {"area": None, "mask": None, "default": None, "strength": 1.0} | {
    "start_percent": 0.0,
    "end_percent": 1.0,
}


@dataclass(frozen=True)
class NagSettings:
    """The settings of `guide_attention`."""

    # scale, tau, alpha: as of `Guidance`
    scale: float = 5.0
    tau: float = 2.5
    alpha: float = 0.25
    # start, end: the first step that is guided, and the first that is not any more
    start: int = 0
    end: int = LAST_STEP

    def __post_init__(self) -> None:
        if self.end <= self.start:
            raise SettingError(
                f"end_at_step is {self.end} and start_at_step is {self.start}, so no step is "
                "guided: raise end_at_step."
            )


class NegativePrompt(NamedTuple):
    """A conditioning's (1, tokens, width), its mask or None, its references as the model takes
    latents, and their places in the text.
    """

    text: torch.Tensor
    mask: torch.Tensor | None
    references: Sequence[torch.Tensor]
    slots: Sequence[int]


class AttentionGuidance:
    """The attachment that `guide_attention` puts on a patcher; clones of the patcher share it."""

    def __init__(self, negative: Sequence[Any], settings: NagSettings) -> None:
        self.settings = settings
        self._conditioning = negative
        self._negative: NegativePrompt | None = None
        self._aside: Verdict | None = None
        self._positive: dict[Any, bool] = {}  # by a prompt's uuid
        self._kept: dict[Any, Any] = {}  # what the family computes once in a run
        self._guided = self._passes = 0
        self._cfg: float | None = None

    def outer_sample(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        guider = executor.class_obj
        self._guided = self._passes = 0
        self._aside = read_or(UNREAD, _refusal, guider, self._conditioning)
        self._cfg = getattr(guider, "cfg", None)
        self._positive = {
            prompt.get("uuid"): name == "positive"
            for name, prompts in ({} if self._aside else guider.conds).items()
            for prompt in prompts
        }
        self._negative = None if self._aside else _negative(guider, self._conditioning)
        try:
            output = executor(*args, **kwargs)
        finally:
            self._negative, self._kept = None, {}
        show_run("QwenL40S_NAG", lines := self.lines(), "\n".join(lines))
        return output

    def forward(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        """Runs one call of the transformer (DIFFUSION_MODEL)."""
        transformer = executor.class_obj
        names = list(inspect.signature(type(transformer).forward).parameters)[1:]
        given = dict(zip(names, args, strict=False)) | kwargs
        options = given["transformer_options"]
        places = options.get("cond_or_uncond") or (0,)
        # Dual CFG Guider has its positive prompt in the last place.
        prompts = zip(places, (*options.get("uuids", ()), *places), strict=False)
        on = tuple(self._positive.get(prompt, place == 0) for place, prompt in prompts)
        self._passes += self._negative is not None
        if self._negative is None or not any(on) or not self._in_range(options):
            return executor(*args, **kwargs)
        self._guided += 1
        items = len(given["x"]) // len(on)
        rows = () if all(on) else tuple(it for it in on for _ in range(items))
        settings = self.settings
        guidance = Guidance(settings.scale, settings.tau, settings.alpha, rows)
        add = kind_of_transformer(transformer).add_negative
        changed = add(transformer, given, self._negative, guidance, self._kept)
        args = tuple(changed.pop(name, value) for name, value in zip(names, args, strict=False))
        return executor(*args, **kwargs | changed)

    def _in_range(self, options: Mapping[str, Any]) -> bool:
        start, end = self.settings.start, self.settings.end
        if (start, end) == (0, LAST_STEP):
            return True  # without waiting for the card
        schedule, sigmas = options.get("sample_sigmas"), options.get("sigmas")
        if schedule is None or sigmas is None:
            return True
        # A sampler may look between two of the schedule.
        step = int((schedule[:-1].to(sigmas) > sigmas.max() * (1 + 1e-6)).sum())
        return start <= step < end

    @property
    def tokens(self) -> int:
        """How many the negative prompt has; 0 where it guides nothing."""
        aside = self._aside or _unusable(self._conditioning)
        return 0 if aside else _text_of(self._conditioning).shape[1]

    def lines(self) -> list[str]:
        if self._aside:
            return [f"NAG: has no effect: {self._aside}"]
        if self._passes and not self._guided:
            return [f"NAG: has no effect: {ONLY_NEGATIVE}"]
        settings = self.settings
        lines = [
            f"NAG: the negative prompt, of {self.tokens} tokens, guides {self._guided} of "
            f"{self._passes} forward passes: scale {settings.scale:g}, tau {settings.tau:g}, "
            f"alpha {settings.alpha:g}"
        ]
        if self._cfg is not None and self._cfg > 1:
            lines.append(
                f"NAG: CFG is {self._cfg:g}, so each step also computes the sampler's negative "
                "prompt; CFG 1 takes about half the time"
            )
        return lines


def guide_attention(
    model: ModelPatcher, negative: Sequence[Any], settings: NagSettings
) -> tuple[ModelPatcher, str]:
    """Returns a clone that a negative prompt guides, and what the node says.

    A second call replaces the first. With a scale of 1 the clone has no guidance.
    """
    if fallback := unsupported_model(model):
        return model, str(fallback)
    clone = model.clone()
    for kind in (WrappersMP.OUTER_SAMPLE, WrappersMP.DIFFUSION_MODEL):
        clone.remove_wrappers_with_key(kind, NAG_KEY)
    clone.remove_attachments(NAG_KEY)
    if settings.scale == 1 or settings.alpha == 0:
        return clone, "NAG: off, because nag_scale is 1 or nag_alpha is 0."
    guidance = AttentionGuidance(negative, settings)
    clone.set_attachments(NAG_KEY, guidance)
    record_runs(clone)
    clone.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, NAG_KEY, guidance.outer_sample)
    clone.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, NAG_KEY, guidance.forward)
    aside = _unusable(negative)
    said = f"has no effect: {aside}" if aside else "guides the run; the Report shows how much."
    return clone, f"NAG: {said}"


def _refusal(guider: Any, negative: Sequence[Any]) -> Verdict | None:
    kind = kind_of(guider.model_patcher.model)
    if kind is None or kind.add_negative is None:
        return OTHER
    if guider.model_patcher.get_additional_models_with_key("multigpu"):
        return CARDS
    given = [prompts for name, prompts in guider.conds.items() if name != "negative"]
    if any(len(prompts) > 1 or any(map(_is_partial, prompts)) for prompts in given):
        return COMBINED
    return _unusable(negative)


def _unusable(negative: Sequence[Any]) -> Verdict | None:
    if not negative or not _text_of(negative).shape[1]:
        return EMPTY
    return COMBINED if len(negative) > 1 or _is_partial(negative[0][1]) else None


def _is_partial(conditioning: Mapping[str, Any]) -> bool:
    return any(conditioning.get(it) not in (None, whole) for it, whole in WHOLE.items())


def _text_of(negative: Sequence[Any]) -> torch.Tensor:
    return negative[0][0]


def _negative(guider: Any, negative: Sequence[Any]) -> NegativePrompt:
    model, (text, more) = guider.model_patcher.model, negative[0]
    width, _ = read_or((None, None), kind_of(model).takes, model.diffusion_model)
    if width and text.shape[-1] != width:
        raise SettingError(
            f"NAG's negative prompt is {text.shape[-1]} wide, but the MODEL takes text {width} "
            "wide: use the model's text encoder."
        )
    references = [model.process_latent_in(it) for it in more.get("reference_latents") or ()]
    slots = list(more.get("image_slots") or ())
    return NegativePrompt(text, more.get("attention_mask"), references, slots)
