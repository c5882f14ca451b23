"""Which attention backend computes a request, and why."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version

import torch

from ...errors import SettingError, UnavailableError
from ...machine.card import read_cards
from ...machine.store import AttentionTimings, load_attention, save_attention
from ..fallback import Fallback
from .backend import AttentionRequest, dtype_name, sm_of
from .fast import FAST, MOST_ERROR, MeasuredErrors, lossy_backends
from .registry import BACKENDS, limits_of, refusal
from .timing import measure

VARIABLE = "QWEN_L40S_ATTENTION"
# From the fastest on: those that are not named come last. sm_90: measured on an H200 in bf16 with
# 24 heads x 128 at 4296 tokens: cuDNN 0.454 ms, FlashAttention 3 0.497, flash 0.800, efficient
# 1.407. Elsewhere predicted.
ORDER: dict[tuple[int, int] | None, tuple[str, ...]] = {
    (9, 0): ("sdpa_cudnn", "flash_attn_3", "sdpa_flash", "flash_attn_2", "sdpa_efficient"),
    None: ("sdpa_flash", "flash_attn_2", "sdpa_cudnn", "sdpa_efficient"),
}
# What is measured for one length serves all up to this or the same power of two: on an H200 the
# order is one from 4,300 to 16,600 tokens, and a measurement takes 0.09 s of a new size's run.
BUCKET = 512

_measured: dict[str, AttentionTimings] = {}


@dataclass(frozen=True)
class Attention:
    """How a block's attention is computed.

    Attributes:
        name: A key of `BACKENDS`.
        reason: Why this one, in one clause, with the milliseconds where it was measured.
        exact: Whether nothing is quantized.
        masked: Whether it was chosen for requests with a mask.
    """

    name: str
    reason: str
    exact: bool
    masked: bool = False
    _attend: Callable[..., torch.Tensor] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_attend", BACKENDS[self.name].attend)

    @property
    def quantizes(self) -> bool:
        """Whether the fused blocks make its operands where they normalize q and k."""
        return BACKENDS[self.name].quantizes

    def __reduce__(self) -> tuple:
        return Attention, (self.name, self.reason, self.exact, self.masked)

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """softmax(q @ k.T / sqrt(head_dim) + mask) @ v.

        Args:
            q: (B, tokens, heads, head_dim) as in the request it was chosen for, with any strides
                but a contiguous last dimension; k and v likewise.
            mask: (B, 1, 1, tokens) in q's dtype, added to the scores.

        Returns:
            (B, tokens, heads * head_dim), contiguous, in memory of its own.

        Raises:
            SettingError: There is a mask, and the choice was made for requests without.
        """
        if mask is not None and not self.masked:
            raise SettingError(
                f"attention {self.name} was chosen for requests without a mask: choose it again "
                "with masked=True"
            )
        return self._attend(q, k, v, mask)


def choose_attention(request: AttentionRequest, name: str = "auto") -> Attention:
    """The backend for a request.

    "auto" takes the exact backend that is the fastest, on a card by a measurement that is kept on
    disk: under two seconds for a card, driver, torch and shape that are new. Quantized backends
    run only when they are named.

    Args:
        name: A key of `BACKENDS`, which has to run here, or "auto": then the environment's
            QWEN_L40S_ATTENTION counts as if it were named. "fast" is a run's to choose
            (`ChosenAttention`), here it counts as "auto".

    Raises:
        SettingError: There is no such backend.
        UnavailableError: The backend that was asked for cannot run the request.
    """
    device = request.device
    if device.type == "cuda" and device.index is None and torch.cuda.is_available():
        request = replace(request, device=torch.device("cuda", torch.cuda.current_device()))
    sm = sm_of(request.device)
    launches = _may_launch(sm, request.device)
    refuse = refusal if launches else _declared_refusal
    asked = asked_name(name)
    if asked not in ("auto", FAST):
        _check_asked(asked, request, refuse)
        by = f" by {VARIABLE}" if name == "auto" else ""
        return _attention(asked, f"asked for{by}", request)
    order = _order(sm)
    if not launches:
        runs = [key for key in order if not refuse(key, request) and not BACKENDS[key].package]
        reason = "predicted: nothing is measured while torch compiles or captures a graph"
        return _attention(runs[0], reason, request)
    on_card, tried = sm is not None and request.device.type == "cuda", frozenset()
    if on_card and (known := load_attention(measurement_key(request))):
        tried = known.ms.keys() | {key for key in order if BACKENDS[key].whole_scores}
    refusals = {key: refusal(key, request, key in tried) for key in order}
    runs = [key for key, reason in refusals.items() if not reason]
    not_here = [
        f"not {key}: {reason}"
        for key, reason in refusals.items()
        if reason and BACKENDS[key].package is None
    ]
    quick = [key for key in runs if not BACKENDS[key].whole_scores]
    if not runs:
        raise UnavailableError(f"no attention runs on {request.device}: {'; '.join(not_here)}")
    if sm is None:
        return _attention(runs[0], "no card to measure on: the first that runs", request)
    if len(quick) < 2:
        only = "the only one that runs here without all scores in memory"
        reason = only if quick else "every attention that runs here keeps all scores in memory"
        return _attention(runs[0], "; ".join([reason, *not_here]), request)
    measurement, without = _measurement(request, quick)
    if measurement is None:
        return _attention(quick[0], "; ".join(["predicted", *without, *not_here]), request)
    return _attention(
        measurement.fastest, "; ".join([_figures(measurement), *without, *not_here]), request
    )


def choose_fast(request: AttentionRequest, errors: MeasuredErrors) -> Attention:
    """The fastest of the best exact backend and the quantized ones within the bound.

    Raises:
        UnavailableError: Nothing computes the request.
    """
    exact = choose_attention(request)
    allowed = [name for name in errors.allowed if not refusal(name, request)]
    found = "; ".join(errors.clause(name) for name in lossy_backends())
    found = f"fast: {found}; at most {errors.most:g} allowed"
    if not allowed or sm_of(request.device) is None:
        return replace(exact, reason=f"{exact.reason}; {found}")
    measurement, without = _measurement(request, [exact.name, *allowed], "quantized")
    if measurement is None:
        return replace(exact, reason="; ".join([exact.reason, *without, found]))
    name = min((exact.name, *allowed), key=lambda name: measurement.ms.get(name, math.inf))
    times = ", ".join(f"{name} {ms:.2f} ms" for name, ms in measurement.ms.items())
    reason = "; ".join([f"fastest at {measurement.tokens} tokens: {times}", *without, found])
    return _attention(name, reason, request)


def _measurement(
    request: AttentionRequest, quick: list[str], kind: str = ""
) -> tuple[AttentionTimings | None, list[str]]:
    """The times of the backends that run: known, read, or measured now.

    Args:
        kind: Of the measurement, where it is not of exact backends.
    """
    key = "|".join(filter(None, (measurement_key(request), kind)))
    known = _measured.get(key) or load_attention(key)
    without: list[str] = []
    if known is None or (known.fastest not in quick if not kind else set(quick) - set(known.ms)):
        known, without = measure(quick, request)
        if known is None:
            return None, without
        save_attention(key, known)
    _measured[key] = known
    return known, without


def measurement_key(request: AttentionRequest) -> str:
    """What a measurement holds for: card, software and shape."""
    bucket = max(BUCKET, 1 << (request.tokens - 1).bit_length())
    shape = f"{request.batch}x{bucket}x{request.heads}x{request.head_dim}"
    masked = "masked" if request.masked else "unmasked"
    return "|".join((_machine(request.device), dtype_name(request.dtype), shape, masked))


@functools.cache
def _machine(device: torch.device) -> str:
    sm = torch.cuda.get_device_capability(device)
    packages = [
        f"{(name := backend.package.present.distribution)} {_version(name)}"
        for backend in BACKENDS.values()
        if backend.exact and backend.package is not None
    ]
    return "|".join(
        (
            torch.cuda.get_device_name(device),
            f"sm_{sm[0]}{sm[1]}",
            f"driver {read_cards(torch).driver}",
            f"torch {torch.__version__}",
            f"cuDNN {_cudnn()}",
            *packages,
        )
    )


def _cudnn() -> int | None:
    try:
        return torch.backends.cudnn.version()
    except RuntimeError:  # another cuDNN than torch's own is found first
        return None


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "none"


def _figures(measurement: AttentionTimings) -> str:
    (_, best), *others = measurement.ms.items()
    times = "".join(f", {name} {ms:.2f}" for name, ms in others)
    count = f"fastest exact of {len(others) + 1}" if others else "the only exact one measured"
    return f"{count} on this card at {measurement.tokens} tokens: {best:.2f} ms{times}"


def _order(sm: tuple[int, int] | None) -> list[str]:
    """Every exact backend, the one that is expected to be the fastest first."""
    exact = [name for name, backend in BACKENDS.items() if backend.exact]
    named = ORDER.get(sm, ORDER[None])
    return [*named, *(name for name in exact if name not in named)]


def _may_launch(sm: tuple[int, int] | None, device: torch.device) -> bool:
    """Whether trials and timings can run now: not while code is traced or a CUDA graph captured."""
    if torch.compiler.is_compiling():
        return False
    on_card = sm is not None and device.type == "cuda"
    return not (on_card and torch.cuda.is_current_stream_capturing())


def _declared_refusal(name: str, request: AttentionRequest) -> str:
    return limits_of(BACKENDS[name], request)


def _attention(name: str, reason: str, request: AttentionRequest) -> Attention:
    return Attention(name, reason, BACKENDS[name].exact, request.masked)


def _check_asked(
    asked: str, request: AttentionRequest, refuse: Callable[[str, AttentionRequest], str]
) -> None:
    if asked not in BACKENDS:
        names = " or ".join(("auto", FAST, *BACKENDS))
        raise SettingError(f"there is no attention {asked!r}: use {names}")
    reason = refuse(asked, request)
    if reason:
        others = {name: refuse(name, request) for name in BACKENDS if name != asked}
        clauses = [f"attention {asked} cannot run on {request.device}: {reason}"]
        clauses.append(f"use auto or {' or '.join(name for name, no in others.items() if not no)}")
        clauses += [f"not {name}: {no}" for name, no in others.items() if no]
        raise UnavailableError("; ".join(clauses))


def asked_name(name: str) -> str:
    """The backend, "auto" or "fast": the environment's where the name is "auto"."""
    return os.environ.get(VARIABLE, "auto") if name == "auto" else name


def is_lossy(
    name: str, device: torch.device, dtype: torch.dtype, heads: int, head_dim: int
) -> bool:
    """Whether the attention that is asked for differs from exact attention by more than rounding.

    A backend that is named, here or by QWEN_L40S_ATTENTION, has to run for a 1024x1024 image.

    Raises:
        SettingError, UnavailableError: As `choose_attention`.
    """
    asked = asked_name(name)
    if asked in ("auto", FAST):
        return asked == FAST
    request = AttentionRequest(device, dtype, 1, heads, head_dim, 4096 + 200)
    return not choose_attention(request, name).exact


class ChosenAttention:
    """Attention by the backend that is chosen for the shapes at hand, each once in a run.

    Args:
        name: "auto", "fast", or the name of a backend.
        lossy: Whether that backend differs from exact attention by more than rounding.
        most_error: What "fast" allows.

    Attributes:
        host: Whose attention stands in for it, in the genitive.
        fallback: Why that happens; final for the run where a backend gave NaN.
    """

    host = "the host's"

    def __init__(self, name: str, lossy: bool = False, most_error: float = MOST_ERROR) -> None:
        self.name = name
        self.lossy = lossy
        self.fallback: Fallback | None = None
        self._errors = MeasuredErrors(most_error)
        # By the request, and whether errors were measured beside it.
        self._chosen: dict[tuple[AttentionRequest, bool], Attention] = {}

    def start_run(self) -> None:
        """Forgets the last run: what was chosen, and what went wrong."""
        self._chosen.clear()
        self._errors = MeasuredErrors(self._errors.most)
        self.fallback = None

    def start_blocks(self, blocks: int) -> None:
        """Begins a pass over so many blocks: "fast" measures errors in the first one."""
        if asked_name(self.name) == FAST:
            self._errors.start_pass(blocks)

    @property
    def measuring(self) -> bool:
        """Whether exact attention runs in this pass, because errors are measured beside it."""
        return self._errors.measuring

    @property
    def used(self) -> bool:
        """Whether anything was chosen in this run, and is not given up."""
        return bool(self._chosen) and self.fallback is None

    def give_up(self) -> None:
        """Leaves the rest of the run to the host's own attention, after NaN or infinity."""
        names = sorted({attention.name for attention in self._found()}) or [self.name]
        self.fallback = Fallback(f"{' and '.join(names)} gave NaN or infinity", final=True)
        self.fallback.log(f"{self.host} own attention runs from here")

    def lines(self) -> list[str]:
        """What was chosen and why, a line each."""
        if self.fallback:
            return [f"attention: {self.host} own: {self.fallback}"]
        found = {f"attention: {chosen}" for chosen in self._found()}
        return sorted(found) or [f"attention: {self.name}, chosen in the first step"]

    def choose(self, request: AttentionRequest) -> Attention:
        """What computes a request in this run: asked once a pass, it serves all blocks of the pass.

        Whether a `fallback` takes its place is for the caller to look at.

        Raises:
            UnavailableError: Nothing computes the request.
        """
        key = request, self.measuring
        chosen = self._chosen.get(key)
        if chosen is None:
            chosen = self._chosen[key] = self._choose(request)
        return chosen

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Attention of q, k and v, (batch, joint, heads, head_dim), as `Attention` computes it."""
        out = self.choose(AttentionRequest.of(q, mask))(q, k, v, mask)
        self.look(q, k, v, mask, out)
        return out

    def look(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        """Measures errors against what attention gave, where they are not known yet."""
        if self.measuring:
            self._errors.add(q, k, v, mask, out)

    def _found(self) -> list[Attention]:
        return list(self._chosen.values())  # a copy: a run on another card may be choosing

    def _choose(self, request: AttentionRequest) -> Attention:
        if self.measuring:
            chosen = choose_attention(request)
            return replace(chosen, reason=f"in the first pass, to compare with; {chosen.reason}")
        if self._errors.complete:
            return choose_fast(request, self._errors)
        try:
            return choose_attention(request, self.name)
        except UnavailableError as error:
            if self.name == "auto":
                raise
            # The name was checked for images of the usual size; a mask or a few tokens may be too
            # much for it in the middle of a run.
            chosen = choose_attention(request)
            return replace(chosen, reason=f"{chosen.reason}; {error}")
