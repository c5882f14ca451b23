"""Attention over a run: one choice for each shape. `fast` is the fastest backend whose error,
measured in the run, stays below a bound.
"""

from __future__ import annotations

import math
import threading
from dataclasses import replace

import torch

from ...errors import UnavailableError
from ...verdict import Verdict, try_once
from ..kernels import sm_of
from .backends import SDPA_FLASH, AttentionRequest
from .choice import (
    BACKENDS,
    FAST,
    TRIED_BY_FAST,
    Attention,
    asked_name,
    choose_attention,
    choose_exact,
    limits_of,
    measurement,
    refusal,
    trial,
)

# Relative, of one call. On Gaussian q, k and v kitchen_int8 is off by 0.017 (H200). An emulation
# of its CUDA source, on a CPU in fp32, is off by 0.0066 to 0.0097 in the first measured forward
# pass of the micro model and by 0.0075 to 0.0145 in that of micro 2.1; 40 held-out prompts each.
# Later steps have up to 1.8 times that. Mean PSNR of their images against exact attention, by the
# median error: 51.5 and 50.4 dB at 0.008 and 0.010, 45.8 and 45.5 at 0.016 and 0.019 (7 bits),
# 40.3 and 40.2 at 0.036 (6 bits; one shape of 80 fails). int8 weights give 46.6 and 46.9 dB, bf16
# against fp32 39.5 and 41.1.
MOST_ERROR = 0.02
NOT_RUN = Verdict("it did not run")


class _Pass(threading.local):
    calls = 0
    wanted = frozenset[int]()


class MeasuredErrors:
    """Measures how far quantized backends are from exact attention, on the run's own queries, keys
    and values of a first, a middle and the last block.

    Cards that each compute a prompt do so in threads: a pass counts the blocks of its own thread.
    """

    def __init__(self, most: float) -> None:
        self.most = most
        self.complete = False  # whether the last block of a pass was measured
        self._pass = _Pass()
        self._found: dict[str, list[torch.Tensor]] = {}
        self._refused: dict[str, Verdict | None] = {}

    def start_pass(self, blocks: int) -> None:
        """Begins to count blocks, which are measured unless those of another pass were."""
        self._pass.calls = 0
        self._pass.wanted = frozenset(() if self.complete else (0, blocks // 2, blocks - 1))

    @property
    def measuring(self) -> bool:
        """Whether blocks of this pass are still to be measured."""
        return self._pass.calls <= max(self._pass.wanted, default=-1)

    def add(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        exact: torch.Tensor,
    ) -> None:
        """Measures where this is one of the blocks, of which exact attention gave `exact`."""
        if self._pass.calls in self._pass.wanted:
            request, size = AttentionRequest.of(q, mask), exact.float().norm()
            for name in TRIED_BY_FAST:
                self._refused[name] = refusal(name, request)
                if not self._refused[name]:
                    off = BACKENDS[name].attend(q, k, v, mask).sub_(exact).float().norm()
                    self._found.setdefault(name, []).append(off / size)
        self._pass.calls += 1
        self.complete = self.complete or not self.measuring

    @property
    def errors(self) -> dict[str, float]:
        """Gives the largest error of each backend that runs; NaN where one gave NaN."""
        # Copies, since another card may be measuring; one by one, since its errors are there.
        return {
            name: torch.tensor([error.item() for error in list(found)]).max().item()
            for name, found in list(self._found.items())
        }

    def refused(self, name: str) -> Verdict:
        return self._refused.get(name) or NOT_RUN


def attend_causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor | None:
    """Attends with a causal mask under which the last query reads all keys (`lower_right`).

    FlashAttention needs no mask in memory for it, and no plan for each length, as cuDNN does.
    """
    kind = SDPA_FLASH.name, q.device, q.dtype, q.shape[-1], False, True
    if limits_of(SDPA_FLASH.name, AttentionRequest.of(q, None)):
        return None
    if try_once((attend_causal, *kind), lambda: trial(*kind)):
        return None
    return BACKENDS[SDPA_FLASH.name].attend(q, k, v, causal=True)


def choose_fast(request: AttentionRequest, measured: MeasuredErrors) -> Attention:
    """Chooses the fastest of the best exact backend and the quantized ones within the bound."""
    exact, errors = choose_attention(request), measured.errors
    within = [name for name, error in errors.items() if error <= measured.most]
    allowed = [name for name in within if not refusal(name, request)]
    found = "; ".join(
        f"{name} error {errors[name]:.2g}"
        if name in errors
        else f"not {name}: {measured.refused(name)}"
        for name in TRIED_BY_FAST
    )
    found = f"8 bits: {found}; at most {measured.most:g} allowed"
    if not allowed or sm_of(request.device) is None:
        return replace(exact, reason=f"{exact.reason}; {found}")
    timings, without = measurement(request, [exact.name, *allowed], "quantized")
    if timings is None:
        return replace(exact, reason="; ".join([exact.reason, *without, found]))
    name = min((exact.name, *allowed), key=lambda name: timings.ms.get(name, math.inf))
    times = ", ".join(f"{name} {ms:.2f} ms" for name, ms in timings.ms.items())
    reason = "; ".join([f"fastest at {timings.tokens} tokens: {times}", *without, found])
    return Attention(name, reason, request.masked)


def is_lossy(
    name: str, device: torch.device, dtype: torch.dtype, heads: int, head_dim: int
) -> bool:
    """Whether the attention that is asked for differs from exact attention by more than rounding.

    A backend that is named, here or by the settings, has to run for a 1024x1024 image.
    """
    asked = asked_name(name)
    if asked in ("auto", FAST):
        return asked == FAST
    request = AttentionRequest(device, dtype, 1, heads, head_dim, 4096 + 200)
    return not BACKENDS[choose_attention(request, name).name].exact


def _unplanned(request: AttentionRequest, chosen: Attention) -> Attention:
    """Takes the fastest backend that was measured beside the chosen one and does not plan."""
    timings, _ = measurement(request, [chosen.name])
    for name in timings.ms if timings else ():
        if name in BACKENDS and not BACKENDS[name].plans:  # another version may have measured
            reason = (
                f"in one forward pass, for which {chosen.name} would make a plan ({chosen.reason})"
            )
            return replace(chosen, name=name, reason=reason)
    return chosen


class ChosenAttention:
    """Attention by the backend that is chosen for the shapes that a run has, each once in a run."""

    host = "the host's"

    def __init__(self, name: str, lossy: bool = False, most_error: float = MOST_ERROR) -> None:
        self.name = name
        self.lossy = lossy
        # why that happens; final for the run where a backend gave NaN
        self.fallback: Verdict | None = None
        self._errors = MeasuredErrors(most_error)
        # By the request, whether errors were measured beside it, and as `choose` is asked.
        self._chosen: dict[tuple[AttentionRequest, bool, bool, bool], Attention] = {}

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
        """Leaves the rest of the run to the attention of the host, after NaN or infinity."""
        names = sorted({attention.name for attention in self._found()}) or [self.name]
        self.fallback = Verdict(f"{' and '.join(names)} gave NaN or infinity", final=True)
        self.fallback.log(f"{self.host} attention runs from here")

    def names(self) -> set[str]:
        """Names the backends that ran, and "fast" where measured errors decided."""
        if self.fallback:
            return set()
        return {it.name for it in self._found()} | ({FAST} if self._errors.complete else set())

    def lines(self) -> list[str]:
        if self.fallback:
            return [f"attention: {self.host} code: {self.fallback}"]
        found = {f"attention: {chosen}" for chosen in self._found()}
        return sorted(found) or [f"attention: {self.name}, chosen in the first step"]

    def choose(
        self, request: AttentionRequest, once: bool = False, exact: bool = False
    ) -> Attention:
        """Chooses for a request in this run: asked once a pass, it serves all blocks of the pass.

        Whether a `fallback` takes its place is for the caller to look at.

        Args:
            once: Whether no other pass has these lengths: a backend that `plans` is not chosen.
            exact: Whether nothing that quantizes is chosen.
        """
        key = request, self.measuring, once, exact
        chosen = self._chosen.get(key)
        if chosen is None:
            overruled = exact and self.lossy  # what is exact anyway is kept, also by its name
            chosen = self._choose(request, overruled)
            by_name = not overruled and asked_name(self.name) != "auto"
            if once and BACKENDS[chosen.name].plans and not by_name:
                chosen = _unplanned(request, chosen)
            self._chosen[key] = chosen
        return chosen

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Attends with q, k and v, (batch, joint, heads, head_dim), as `Attention` does."""
        out = self.choose(AttentionRequest.of(q, mask))(q, k, v, mask)
        self.look(q, k, v, mask, out)
        return out

    def with_lse(
        self, chosen: Attention, *given: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Attends to a part of the keys, and gives log-sum-exps too; None where the backend gives
        none, and where errors are measured, which are those of whole attention.
        """
        backend = BACKENDS[chosen.name]
        return None if self.measuring or not backend.gives_lse else backend.attend(*given, lse=True)

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

    def _choose(self, request: AttentionRequest, exact: bool) -> Attention:
        if exact:
            chosen = choose_exact(request)
            return replace(chosen, reason=f"for prompts, references and guidance; {chosen.reason}")
        if self.measuring:
            chosen = choose_attention(request)
            return replace(
                chosen, reason=f"in the first forward pass, as the reference; {chosen.reason}"
            )
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
