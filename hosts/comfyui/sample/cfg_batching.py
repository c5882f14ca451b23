"""Which prompts of a step one forward pass could take if their texts were of one length.

ComfyUI puts the prompts of a step into one forward pass where every condition of theirs has one
shape. Qwen-Image's texts are as long as their prompts, so that a guided step is nearly always two
passes. Zeros behind the shorter text and an attention mask change no result: the positions of the
real tokens stay, and no token reads the padding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import comfy.model_management
import torch
from comfy.conds import CONDRegular
from comfy.samplers import can_concat_cond, get_area_and_mult
from torch.nn import functional as F

from ....errors import SettingError
from ....optimizations.attention import Request
from ....optimizations.attention.choice import measurement_key
from ....optimizations.attention.measure import Cache, Measurement, default_cache
from .call import is_compiled, options_of
from .layers import ComfyLayers

TEXT, MASK = "c_crossattn", "attention_mask"
# The masks that ComfyUI's model reads as 1 for a token and 0 for none. It adds any other to the
# scores, so that the two kinds do not go together.
WHOLE_NUMBERS = (torch.int32, torch.int64)

Conds = Sequence[list[dict[str, Any]] | None]


@dataclass(frozen=True)
class Merge:
    """Prompts that make one forward pass when they are padded, and two or more otherwise.

    Attributes:
        places: Where each is in ComfyUI's lists: (list, index in it).
        lengths: The text tokens of each.
        latent: Shape of the latents that each is given, (batch, channels, ...).
        others: Their other conditions, which agree: (name, shape).
    """

    places: tuple[tuple[int, int], ...]
    lengths: tuple[int, ...]
    latent: tuple[int, ...]
    others: tuple[tuple[str, tuple[int, ...]], ...]

    @property
    def longest(self) -> int:
        return max(self.lengths)


@dataclass(frozen=True, eq=False)
class _Prompt:
    """One prompt of a step; `bare` is ComfyUI's record of it without text and mask."""

    place: tuple[int, int]
    bare: Any
    text: torch.Tensor
    masked: bool

    def merges_with(self, other: _Prompt) -> bool:
        """Whether ComfyUI would batch the two if their texts agreed."""
        return (
            self.bare.hooks == other.bare.hooks
            and self.text.device == other.text.device
            and self.text.shape[::2] == other.text.shape[::2]
            and can_concat_cond(self.bare, other.bare)
        )


def find_merges(conds: Conds, latent: torch.Tensor, sigma: torch.Tensor) -> tuple[Merge, ...]:
    """What padding would merge; nothing that ComfyUI merges by itself.

    Args:
        conds: The prompts of each kind as ComfyUI's CALC_COND_BATCH wrappers get them.
        latent, sigma: Of the step, likewise.
    """
    merges, rest = [], list(_prompts(conds, latent, sigma))
    while rest:
        first, rest_before = rest[0], rest[1:]
        rest, together = [], [first]
        for prompt in rest_before:
            (together if first.merges_with(prompt) else rest).append(prompt)
        lengths = tuple(prompt.text.shape[1] for prompt in together)
        if len(set(lengths)) > 1 or len({prompt.masked for prompt in together}) > 1:
            sizes = {name: cond.size() for name, cond in first.bare.conditioning.items()}
            others = tuple(sorted((name, tuple(size)) for name, size in sizes.items()))
            places = tuple(prompt.place for prompt in together)
            merges.append(Merge(places, lengths, tuple(first.bare.input_x.shape), others))
    return tuple(merges)


def padded(conds: Conds, merges: Sequence[Merge]) -> list[list[dict[str, Any]] | None]:
    """The same prompts with the texts that are to merge of one length, each with its mask.

    What is changed is copied: the caller's lists and dicts stay as they are.
    """
    result = [None if entries is None else list(entries) for entries in conds]
    for merge in merges:
        for kind, index in merge.places:
            result[kind][index] = _padded(result[kind][index], merge.longest)
    return result


def _padded(entry: dict[str, Any], length: int) -> dict[str, Any]:
    model_conds = entry["model_conds"]
    text, mask = model_conds[TEXT].cond, model_conds.get(MASK)
    if mask is None:
        tokens = torch.ones(text.shape[:2], dtype=torch.int64, device=text.device)
    else:
        tokens = mask.cond.to(text.device, torch.int64)
    missing = length - text.shape[1]
    changed = {
        TEXT: CONDRegular(F.pad(text, (0, 0, 0, missing))),
        MASK: CONDRegular(F.pad(tokens, (0, missing))),
    }
    return {**entry, "model_conds": {**model_conds, **changed}}


def _prompts(conds: Conds, latent: torch.Tensor, sigma: torch.Tensor) -> Iterator[_Prompt]:
    for kind, entries in enumerate(conds):
        for index, entry in enumerate(entries or ()):
            model_conds = entry["model_conds"]
            if _stands_alone(entry) or not _can_be_padded(model_conds):
                continue
            whole = get_area_and_mult(entry, latent, sigma)
            if whole is None:  # not in this step
                continue
            kept = {name: c for name, c in whole.conditioning.items() if name not in (TEXT, MASK)}
            text = whole.conditioning[TEXT].cond
            bare = whole._replace(conditioning=kept)
            yield _Prompt((kind, index), bare, text, MASK in model_conds)


def _stands_alone(entry: dict[str, Any]) -> bool:
    """Whether something reads this prompt that knows no mask.

    A ControlNet gets the text without it. A default prompt's share is known only after the others.
    """
    return "default" in entry or "gligen" in entry or entry.get("control") is not None


def _can_be_padded(model_conds: dict[str, Any]) -> bool:
    text, mask = model_conds.get(TEXT), model_conds.get(MASK)
    if type(text) is not CONDRegular or text.cond.ndim != 3:
        return False
    return mask is None or (
        type(mask) is CONDRegular
        and mask.cond.dtype in WHOLE_NUMBERS
        and mask.cond.shape == text.cond.shape[:2]
    )


# Separate against batched passes, timed in the steps that a run takes anyway.

SEPARATE, BATCHED = "separate", "batched"
# How a run measures, a step each: how it is computed, and whether it is timed. The first of either
# kind also compiles kernels, measures attention and compares a block; after that they take turns.
ORDER = (
    (SEPARATE, False),
    (SEPARATE, True),
    (BATCHED, False),
    (BATCHED, True),
    (SEPARATE, True),
    (BATCHED, True),
)
BATCHED_STEPS = sum(kind == BATCHED for kind, _ in ORDER)
# A measurement holds for texts whose lengths round up to the same multiple.
TEXT_BUCKET = 64


class Span:
    """The card's time from here to `end`, without a wait for either."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device)
        self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._begin.record(self._stream)

    def end(self) -> None:
        self._end.record(self._stream)

    def ms(self) -> float:
        """Milliseconds; waits for the end."""
        self._end.synchronize()
        return self._begin.elapsed_time(self._end)


class Trial:
    """The measurement that a run makes of prompts of certain lengths.

    Args:
        key: What it is kept under.
        tokens: Of the longest prompt and its image.
    """

    def __init__(self, key: str, tokens: int) -> None:
        self.key = key
        self._tokens = tokens
        self._steps = 0
        self._spans: dict[str, list[Span]] = {SEPARATE: [], BATCHED: []}

    @property
    def complete(self) -> bool:
        return self._steps == len(ORDER)

    def next_step(self) -> tuple[str, bool]:
        """How the next step is computed, and whether it is timed."""
        return ORDER[self._steps]

    def add(self, kind: str, span: Span | None) -> None:
        """Notes a step; without a span where it is not timed."""
        self._steps += 1
        if span is not None:
            self._spans[kind].append(span)

    def result(self) -> tuple[Measurement, float]:
        """The milliseconds of either kind, and the part by which like steps differ at most."""
        times = {kind: [span.ms() for span in spans] for kind, spans in self._spans.items()}
        spread = max(max(ms) / min(ms) - 1 for ms in times.values())
        return Measurement(self._tokens, {kind: min(ms) for kind, ms in times.items()}), spread


def why_not_measured(device: torch.device) -> str:
    """Why no time is taken on a device, in one clause; empty where it is."""
    return "" if device.type == "cuda" else f"nothing is measured on {device.type}"


def key_of(merges: Sequence[Merge], model: Any, device: torch.device, path: str) -> str:
    """What a measurement holds for: card, software, shapes, weights.

    Args:
        model: ComfyUI's BaseModel.
        path: What else decides how long a forward pass takes.
    """
    blocks, patcher = model.diffusion_model.transformer_blocks, model.current_patcher
    attn, layers = blocks[0].attn, ComfyLayers()
    items = max(len(merge.places) for merge in merges)
    longest = max(merge.longest for merge in merges)
    dtype = model.get_dtype_inference()
    request = Request(device, dtype, items, attn.heads, attn.dim_head, longest, masked=True)
    kinds = {
        str(layers.kind(layer))
        for block in blocks
        for layer in (block.attn.to_q, block.img_mlp.net[2])
    }
    if patcher is not None and patcher.is_dynamic():
        where = "paged"
    else:
        where = "partly loaded" if getattr(model, "model_lowvram", False) else "loaded"
    weights = f"{len(blocks)} blocks of {'+'.join(sorted(kinds))}, {where}"
    return "|".join((measurement_key(request), *map(_shapes, merges), weights, path))


def _shapes(merge: Merge) -> str:
    texts = "+".join(str(-(-length // TEXT_BUCKET) * TEXT_BUCKET) for length in merge.lengths)
    latent = "x".join(map(str, merge.latent))
    others = "".join(f", {name} {'x'.join(map(str, size))}" for name, size in merge.others)
    return f"latent {latent}, text {texts}{others}"


# Positive and negative prompt in one forward pass, where that is faster on this card.
#
# One pass of two prompts reads the weights once and fills the card better; its padding and its mask
# cost time. Which of the two wins is measured in the steps of a run itself, without a step more,
# and
# kept on disk. The result differs from that of separate passes by rounding: not bit-identical.

SETTINGS = ("off", "on", "auto")
# The part of the time that a batched pass has to save.
LEAST_GAIN = 0.03
# Steps of one kind that differ by more are no measurement: something else used the card, or another
# node left out a forward pass.
MOST_SPREAD = 0.05
OWN = "cfg: ComfyUI's own forward passes"

Run = Callable[[Conds], list[torch.Tensor]]


class CfgBatching:
    """Merges the prompts of a guided step, by two wrappers of a patcher; clones share it.

    Args:
        setting: "off", "on", or "auto": where it was measured to save `LEAST_GAIN` of the time.
        path: What else decides how long a forward pass takes, such as the attention's name: part
            of what a measurement holds for.
        cache: Where measurements are kept; the user's cache folder by default.

    Raises:
        SettingError: There is no such setting.
    """

    def __init__(self, setting: str, path: str = "", cache: Cache | None = None) -> None:
        if setting not in SETTINGS:
            choices = " or ".join(SETTINGS)
            raise SettingError(f"there is no cfg_batching {setting!r}: use {choices}")
        self._setting = setting
        self._path = path
        self._cache = cache
        self._measured: dict[str, Measurement] = {}
        self._passes: list[int] = []  # the prompts of each forward pass of a step
        self.start_run()

    def start_run(self) -> None:
        """Forgets the last run, not what was measured."""
        self._cases: dict[tuple[Merge, ...], _Case] = {}
        self._aside = ""
        self._seen = False

    def finish_run(self) -> None:
        """Reads the times of a run that was no longer than its measurement."""
        for case in self._cases.values():
            self._conclude(case)

    def calc_cond_batch(
        self,
        executor: Any,
        model: Any,
        conds: Conds,
        x: torch.Tensor,
        sigma: torch.Tensor,
        model_options: dict[str, Any],
        *args: Any,
        **kwargs: Any,
    ) -> list[torch.Tensor]:
        """CALC_COND_BATCH wrapper: the prompts of one step."""

        def run(conds: Conds) -> list[torch.Tensor]:
            return executor(model, conds, x, sigma, model_options, *args, **kwargs)

        self._seen = True
        self._passes.clear()
        if "multigpu_clones" in model_options:
            self._aside = "several cards share the prompts of a step"
        if self._setting == "off" or self._aside:
            return run(conds)
        merges = find_merges(conds, x, sigma)
        if not merges:
            return run(conds)
        if merges not in self._cases:
            options = model_options.get("transformer_options", {})
            self._cases[merges] = self._case(merges, model, x.device, options)
        case = self._cases[merges]
        self._conclude(case)
        if case.trial is None:
            return self._merged(run, conds, merges) if case.batched else run(conds)
        kind, timed = case.trial.next_step()
        span = Span(x.device) if timed else None
        output = self._merged(run, conds, merges) if kind == BATCHED else run(conds)
        if span is not None:
            span.end()
        # Without a pass another node has answered without the model.
        if self._passes and not self._aside:
            case.trial.add(kind, span)
        return output

    def apply_model(
        self, executor: Any, x: torch.Tensor, t: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """APPLY_MODEL wrapper: notes how many prompts a forward pass takes."""
        self._passes.append(len(options_of(args, kwargs).get("cond_or_uncond", ())))
        return executor(x, t, *args, **kwargs)

    def lines(self) -> list[str]:
        """How the prompts of the last run were batched and why, a line each."""
        if self._setting == "off":
            return [OWN]
        if not self._seen:
            how = {"on": "are padded and batched", "auto": "are batched where that is faster"}
            return [f"cfg: prompts of different lengths {how[self._setting]}"]
        if self._aside:
            return [f"{OWN}: {self._aside}"]
        if not self._cases:
            return [f"{OWN}: there was nothing that padding would merge"]
        return list(dict.fromkeys(case.line for case in self._cases.values()))

    def _case(
        self,
        merges: tuple[Merge, ...],
        model: Any,
        device: torch.device,
        options: dict[str, Any],
    ) -> _Case:
        """What to do with prompts of these lengths in this run."""
        if self._setting == "on":
            return _Case("cfg: one batched pass, as asked for; not bit-identical", batched=True)
        reason = why_not_measured(device)
        if is_compiled(options):
            reason = "torch.compile would compile the model once more for the batch"
        if reason:
            return _Case(f"{OWN}: {reason}")
        key = key_of(merges, model, device, self._path)
        known = self._measured.get(key) or self._store.get(key)
        if known is not None and known.ms.keys() >= {SEPARATE, BATCHED}:
            self._measured[key] = known
            return _decided(known)
        sigmas = options.get("sample_sigmas")
        if sigmas is not None and len(sigmas) <= len(ORDER):
            few = f"{len(sigmas) - 1} steps are too few to measure in, which takes {len(ORDER)}"
            return _Case(f"{OWN}: {few}")
        tokens = max(math.prod(merge.latent[2:]) // 4 + merge.longest for merge in merges)
        unfinished = f"{OWN}: the run ended before separate and batched passes were timed"
        return _Case(unfinished, trial=Trial(key, tokens))

    def _conclude(self, case: _Case) -> None:
        """Makes a trial that is complete a decision, and keeps it."""
        trial = case.trial
        if trial is None or not trial.complete:
            return
        case.trial = None
        found, spread = trial.result()
        if spread > MOST_SPREAD:
            case.line = (
                f"{OWN}: the times of like steps differ by {100 * spread:.0f} %, which decides "
                "nothing: the next run measures again"
            )
            return
        self._measured[trial.key] = found
        self._store.put(trial.key, found)
        decided = _decided(found)
        case.batched = decided.batched
        case.line = f"{decided.line}; measured in this run, {BATCHED_STEPS} steps of it batched"

    def _merged(self, run: Run, conds: Conds, merges: tuple[Merge, ...]) -> list[torch.Tensor]:
        """One step in one pass; separate passes for the rest of the run where memory is short."""
        try:
            output = run(padded(conds, merges))
        except torch.OutOfMemoryError:
            output = None
        if output is None:
            # Outside of `except`, which holds the failed pass's tensors.
            self._aside = "memory ran out with the prompts in one pass"
            comfy.model_management.soft_empty_cache()
            return run(conds)
        passes = sorted(self._passes, reverse=True)
        wanted = sorted((len(merge.places) for merge in merges), reverse=True)
        if any(found < most for found, most in zip(passes, wanted, strict=False)):
            self._aside = "ComfyUI finds too little free memory for the prompts in one pass"
        return output

    @property
    def _store(self) -> Cache:
        if self._cache is None:
            self._cache = Cache(default_cache().path.with_name("cfg_batching.json"))
        return self._cache


@dataclass
class _Case:
    """What is done with prompts of certain lengths in one run; `trial` while it is measured."""

    line: str
    batched: bool = False
    trial: Trial | None = None


def _decided(found: Measurement) -> _Case:
    separate, batched = found.ms[SEPARATE], found.ms[BATCHED]
    gain = 1 - batched / separate
    change = f"{100 * abs(gain):.1f} % {'less' if gain >= 0 else 'more'} time on this card"
    change += f" ({batched:.1f} ms against {separate:.1f} ms)"
    if gain >= LEAST_GAIN:
        return _Case(f"cfg: one batched pass: {change}; not bit-identical", batched=True)
    least = f"{100 * LEAST_GAIN:.0f} %"
    return _Case(f"{OWN}: one batched pass takes {change}, and has to save {least}")
