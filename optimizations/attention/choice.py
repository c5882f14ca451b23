"""Lists every attention backend, says why one cannot run, and chooses one: on a card by timing."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from ...caches import cached, remembered
from ...errors import SettingError, UnavailableError
from ...machine.card import read_cards
from ...machine.packages import Package, check_package
from ...machine.settings import settings
from ...machine.store import AttentionTimings, load_attention, save_attention
from ...verdict import Verdict, check_asked, first_line, try_once
from ..kernels import on_card_of, sm_of
from .backends import (
    FLASH_ATTN_3,
    KITCHEN_INT8,
    MATH,
    SDPA_CUDNN,
    SDPA_EFFICIENT,
    SDPA_FLASH,
    AttentionRequest,
    dtype_name,
    lower_right,
    sm_name,
)

BACKENDS = {
    backend.name: backend
    for backend in (
        *(SDPA_FLASH, SDPA_CUDNN, SDPA_EFFICIENT, FLASH_ATTN_3),
        *(KITCHEN_INT8, MATH),
    )
}

FAST = "fast"
# From the fastest on: those that are not named come last. sm_90: measured on an H200 in bf16 with
# 24 heads x 128 at 4296 tokens: cuDNN 0.454 ms, FlashAttention 3 0.497, flash 0.800, efficient
# 1.407. Elsewhere predicted.
ORDER: dict[tuple[int, int] | None, tuple[str, ...]] = {
    (9, 0): ("sdpa_cudnn", "flash_attn_3", "sdpa_flash", "sdpa_efficient"),
    None: ("sdpa_flash", "sdpa_cudnn", "sdpa_efficient"),
}
# The quantized backends that "fast" measures on a card, and may take.
TRIED_BY_FAST = (KITCHEN_INT8.name,)
# What is measured for one length serves all up to this or the same power of two: on an H200 the
# order is one from 4,300 to 16,600 tokens, and a measurement takes 0.09 s of a new size's run.
BUCKET = 512

# No further backend is begun after so long; the first call of one can take some tenths.
BUDGET_S = 1.2
# One backend's runs after the first two: at most so many, and so many milliseconds of them.
REPEATS, SHARE_MS = 6, 200
# More work than this is cut to fewer items and heads, not tokens: every card is full long before.
MOST_FLOP = 4e12

_measured: dict[str, AttentionTimings] = remembered({})

# No multiple of a tile, and more than two of the largest.
TRIAL_TOKENS = 333
# How far from the result in float64, relative. PyTorch's CPU kernels come to 0.0022, 0.0003 and
# 5e-7 on the trial's inputs; a card may compute fp32 in TF32.
EXACT_ERROR = {torch.bfloat16: 0.01, torch.float16: 0.002, torch.float32: 0.002}
# kitchen_int8 is off by 0.017 on an H200, with offset keys by 0.031. A tail of 77 in 333 keys that
# is left out or counted twice is off by 0.3 and more.
LOSSY_ERROR = 0.08


def limits_of(name: str, request: AttentionRequest) -> Verdict | None:
    """Says why a request is outside a backend's limits; launches nothing."""
    backend, sm = BACKENDS[name], sm_of(request.device)
    on_cpu = request.device.type == "cpu"
    limits = backend.card if sm is not None else backend.cpu if on_cpu else backend.other
    if limits is None:
        other = f"{request.device} is not an NVIDIA GPU that torch can use"
        return Verdict("needs an NVIDIA GPU" if on_cpu else other, final=True)
    fact = limits.refusal(request, sm)
    return Verdict(fact, final=True) if fact else None


def refusal(name: str, request: AttentionRequest, tried: bool = False) -> Verdict | None:
    """Says why a backend cannot run a request; None when it can.

    The last thing asked is a trial against float64, once per card, dtype, head and mask: which
    builds, compilers and drivers can, and which packages work, is declared nowhere. None is needed
    where backends were `tried` here for such a request before.
    """
    backend = BACKENDS[name]
    if found := limits_of(name, request):
        return found
    fact = "" if backend.package is None else _missing(backend.package)
    if not fact and backend.further is not None:
        fact = backend.further(request)
    if fact:
        return Verdict(fact, final=True)
    if tried:
        return None
    kind = name, request.device, request.dtype, request.head_dim, request.masked
    return try_once((refusal, *kind), lambda: trial(*kind))


@dataclass(frozen=True)
class Attention:
    name: str  # a key of `BACKENDS`
    reason: str  # why this one, in one clause, with the milliseconds where it was measured
    masked: bool = False  # whether it was chosen for requests with a mask

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Gives softmax(q @ k.T / sqrt(head_dim) + mask) @ v, as `Backend.attend`.

        Raises:
            SettingError: There is a mask, and the choice was made for requests without.
        """
        if mask is not None and not self.masked:
            raise SettingError(
                f"attention {self.name} was chosen for calls without a mask, and this call has "
                "one: choose again with masked=True."
            )
        return BACKENDS[self.name].attend(q, k, v, mask)


def choose_attention(request: AttentionRequest, name: str = "auto") -> Attention:
    """Chooses the backend for a request. Quantized backends run only when they are named.

    Args:
        name: A key of `BACKENDS`, which has to run here, or "auto": then that of the
            settings counts as if it were named, or `choose_exact` chooses. "fast" is a run's
            to choose (`ChosenAttention`), here `choose_exact` does.

    Raises:
        SettingError: There is no such backend.
        UnavailableError: The backend that was asked for cannot run the request.
    """
    device = request.device
    if device.type == "cuda" and device.index is None and torch.cuda.is_available():
        request = replace(request, device=torch.device("cuda", torch.cuda.current_device()))
    asked = asked_name(name)
    if asked in ("auto", FAST):
        return choose_exact(request)
    launches = _may_launch(sm_of(request.device), request.device)  # trials and timings
    refuse = refusal if launches else limits_of
    refused, others = (lambda name: refuse(name, request)), ("auto", FAST)
    check_asked("attention", asked, BACKENDS, refused, request.device, others)
    by = " by the settings" if name == "auto" else ""
    return Attention(asked, f"requested{by}", request.masked)


def choose_exact(request: AttentionRequest) -> Attention:
    """Chooses the exact backend that is the fastest, on a card by a measurement that is kept on
    disk: under two seconds for a card, driver, torch and shape that are new.

    Raises:
        UnavailableError: None runs here.
    """
    order = _order(sm := sm_of(request.device))
    if not _may_launch(sm, request.device):  # trials and timings
        runs = [key for key in order if not limits_of(key, request) and not BACKENDS[key].package]
        reason = "predicted, because nothing is measured while torch compiles or captures a graph"
        return Attention(runs[0], reason, request.masked)
    on_card = sm is not None and request.device.type == "cuda"
    tried: set[str] = set()
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
        return Attention(runs[0], "no GPU to measure on: the first that runs", request.masked)
    if len(quick) < 2:
        only = "the only one that runs here without all scores in memory"
        reason = only if quick else "every attention here keeps all scores in memory"
        return Attention(runs[0], "; ".join([reason, *not_here]), request.masked)
    timings, without = measurement(request, quick)
    name, found = (timings.fastest, _figures(timings)) if timings else (quick[0], "predicted")
    return Attention(name, "; ".join([found, *without, *not_here]), request.masked)


def measurement(
    request: AttentionRequest, quick: list[str], kind: str = ""
) -> tuple[AttentionTimings | None, list[str]]:
    """Finds the times of the backends that run: known, read, or measured now."""
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
    """Names what a measurement holds for: card, software and shape."""
    bucket = max(BUCKET, 1 << (request.tokens - 1).bit_length())
    shape = f"{request.batch}x{bucket}x{request.heads}x{request.head_dim}"
    masked = "masked" if request.masked else "unmasked"
    return "|".join((_machine(request.device), dtype_name(request.dtype), shape, masked))


@cached
def _machine(device: torch.device) -> str:
    sm = torch.cuda.get_device_capability(device)
    packages = [
        f"{(name := backend.package.present.distribution)} {_version(name)}"
        for backend in BACKENDS.values()
        if backend.exact and backend.package is not None
    ]
    name, driver = torch.cuda.get_device_name(device), read_cards(torch).driver
    software = f"driver {driver}", f"torch {torch.__version__}", f"cuDNN {_cudnn()}"
    return "|".join((name, sm_name(sm), *software, *packages))


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


def _figures(timings: AttentionTimings) -> str:
    (_, best), *others = timings.ms.items()
    times = "".join(f", {name} {ms:.2f}" for name, ms in others)
    count = f"fastest exact of {len(others) + 1}" if others else "the only exact one measured"
    return f"{count} on this GPU at {timings.tokens} tokens: {best:.2f} ms{times}"


def _order(sm: tuple[int, int] | None) -> list[str]:
    exact = [name for name, backend in BACKENDS.items() if backend.exact]
    named = ORDER.get(sm, ORDER[None])
    return [*named, *(name for name in exact if name not in named)]


def _may_launch(sm: tuple[int, int] | None, device: torch.device) -> bool:
    if torch.compiler.is_compiling():
        return False
    on_card = sm is not None and device.type == "cuda"
    return not (on_card and torch.cuda.is_current_stream_capturing())


def asked_name(name: str) -> str:
    """Gives the backend, "auto" or "fast": that of the settings where the name is "auto"."""
    return settings().attention or name if name == "auto" else name


def measure(
    names: Iterable[str], request: AttentionRequest
) -> tuple[AttentionTimings | None, list[str]]:
    """Times each backend for one request, in milliseconds.

    Returns:
        The times, None when there is none; and for each backend without one "not NAME: why".
    """
    request = cut(request)
    times: dict[str, float] = {}
    without = []
    end = time.monotonic() + BUDGET_S
    try:
        inputs = _inputs(request)
        flushed = torch.empty(_l2_bytes(request.device), dtype=torch.int8, device=request.device)
    except torch.cuda.OutOfMemoryError:
        return None, ["no memory is free to measure"]
    with on_card_of(flushed), torch.no_grad():
        for name in names:
            if times and time.monotonic() > end:
                without.append(f"not {name}: the time for measuring was over")
                continue
            try:
                times[name] = _median_ms(BACKENDS[name].attend, inputs, flushed)
            except Exception as error:  # as in a trial: a shape can be what a kernel fails at
                without.append(f"not {name}: {first_line(error)}")
    if not times:
        return None, without
    ordered = dict(sorted(times.items(), key=lambda entry: entry[1]))
    return AttentionTimings(request.tokens, ordered), without


def cut(request: AttentionRequest) -> AttentionRequest:
    """Takes so few items and heads of a request that one call does no more than `MOST_FLOP`."""
    flop = 4 * request.head_dim * request.tokens**2  # of one head
    pairs = max(int(MOST_FLOP / flop), 1)
    if pairs >= request.batch * request.heads:
        return request
    return replace(request, batch=1, heads=min(request.heads, pairs))


def _median_ms(call: Callable, inputs: tuple, flushed: torch.Tensor) -> float:
    call(*inputs)  # cuDNN makes its plan for the shape, packages load their code
    first = timed_ms(call, inputs, flushed)
    repeats = min(REPEATS, int(SHARE_MS / first))
    times = [first, *(timed_ms(call, inputs, flushed) for _ in range(repeats))]
    return sorted(times)[len(times) // 2]


def timed_ms(call: Callable, inputs: tuple, flushed: torch.Tensor) -> float:
    """Times one call on the card, without the inputs in its L2 cache."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    flushed.zero_()  # takes longer than launching what is timed after it
    begin.record()
    call(*inputs)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def _inputs(request: AttentionRequest) -> tuple:
    # Torch's own random numbers, which a seed is for, are left alone.
    generator = torch.Generator(request.device).manual_seed(0)
    shape = (3, request.batch, request.tokens, request.heads, request.head_dim)
    about: dict[str, Any] = {"dtype": request.dtype, "device": request.device}
    q, k, v = torch.randn(shape, generator=generator, **about)
    if not request.masked:
        return q, k, v, None
    mask = torch.zeros(request.batch, 1, 1, request.tokens, **about)
    mask[..., : request.tokens // 100] = -torch.inf
    return q, k, v, mask


def _l2_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    # An L40S has 96 MiB; torch tells since 2.6.
    return getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 96 * 2**20)


@cached
def _missing(package: Package) -> str:
    capability, module = check_package(package)
    return "" if module is not None else f"{capability.name} {capability.why.fact}"


def trial(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    masked: bool,
    causal: bool = False,
) -> str:
    backend, how, first = BACKENDS[name], {}, 0
    fewest = backend.card.fewest if backend.card else 1
    tokens = TRIAL_TOKENS if fewest < TRIAL_TOKENS else fewest + TRIAL_TOKENS
    q, k, v, mask = _trial_inputs(dtype, tokens, head_dim, masked)
    if causal:
        how, first = {"causal": True}, tokens * 3 // 4
        mask = lower_right(tokens - first, tokens, q)
    expected = attend_float64(q[:, first:], k, v, mask)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # PyTorch tells with several what its error says
        # Views of one tensor, as the blocks have them.
        q, k, v = torch.stack((q, k, v), dim=2).to(device).unbind(2)
        mask = None if mask is None or causal else mask.to(device)
        out = backend.attend(q[:, first:], k, v, mask, **how)
        if out.dtype != dtype or out.shape != expected.shape:
            return f"a trial gave {tuple(out.shape)} in {out.dtype}"
        out = out.cpu().double()
    if not out.isfinite().all():
        return "a trial gave values that are not finite"
    error = ((out - expected).norm() / expected.norm()).item()
    most = EXACT_ERROR[dtype] if backend.exact else LOSSY_ERROR
    return "" if error <= most else f"a trial had a relative error of {error:.2g}"


def _trial_inputs(dtype: torch.dtype, tokens: int, head_dim: int, masked: bool) -> tuple:
    generator = torch.Generator().manual_seed(0)
    shape = (3, 2, tokens, 2, head_dim)
    q, k, v = torch.randn(shape, generator=generator).to(dtype)
    if not masked:
        return q, k, v, None
    mask = torch.zeros(2, 1, 1, tokens, dtype=dtype)
    mask[0, ..., ::3] = -1
    mask[1, ..., 20:60] = -torch.inf  # as the text padding of the shorter prompt
    return q, k, v, mask


def attend_float64(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """Computes what every backend does, (B, tokens, heads * head_dim), written down plainly."""
    q, k, v = (x.transpose(1, 2).double() for x in (q, k, v))
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if mask is not None:
        scores = scores + mask.double()
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
