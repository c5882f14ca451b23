"""Measures the phases of a prompt that has a Report node: `with phase("decode", vae.patcher, ...)`.

In other prompts nothing waits for the device, no counter is reset and nothing is kept. torch has
one peak for a process, so in a prompt with a Report node each phase starts it again: a profiler
that reads `max_memory_allocated` over such a prompt finds the last phase's.
What fails in here never fails the run.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ...caches import remembered
from ...errors import restart_for
from ...verdict import Verdict

logger = logging.getLogger(__name__)

REPORT_NODE = "QwenL40S_Report"
MOST_MODELS, MOST_PHASES = 64, 256

# {a patcher's `clone_base_uuid`: its model's phases in the last prompt}; () where the last sampling
# was not measured.
_measured: dict[Any, tuple[MeasuredPhase, ...]] = remembered({})
_open: list[MeasuredPhase] = []  # of all threads, an inner one behind its outer one
_logged: set[str] = remembered(set())


@contextmanager
def harmless(measuring: MeasuredPhase | None = None) -> Iterator[None]:
    """Logs what fails inside, once for each kind of failure, and goes on without its figures."""
    try:
        yield
    except Exception as error:
        if measuring is not None:
            measuring.off = True
        kind = f"{type(error).__name__}: {error}"
        if kind not in _logged:
            _logged.add(kind)
            logger.warning(
                "Qwen-Image Accelerator: the run was not measured or reported, and continues: %s.",
                kind,
                exc_info=True,
            )


class MeasuredPhase:
    """Measures a phase as a context manager, and holds its figures if no exception ends it.

    An exception that `restart_for` knows asks for a restart instead, whether or not it measures:
    a phase surrounds all that ComfyUI's nodes run of this package.
    It keeps no model and no tensor alive. Bytes are 0 where the device is not counted.
    """

    def __init__(
        self,
        name: str,
        owner: Any,
        device: torch.device | None,
        path: tuple[str, ...] = (),
        prompt: str | None = None,
        outer: MeasuredPhase | None = None,
        **asked: Any,
    ) -> None:
        # outer: the phase that this one is a part of, which may run in another thread; None for the
        # innermost that is open in this thread
        self.outer, self._thread = outer, threading.get_ident()
        # name: "text", "tables", "sampling", "decode" or "encode"
        self.name, self.prompt, self.device = name, prompt, device
        # asked: {setting: a number, a word or a list of them}
        self.asked, self.path = asked, path
        # why no block of a sampling ran fused; None where one did
        self.not_fused: Verdict | None = None
        # names of this package's backends that ran in a sampling, and "fast" where it chose by
        # measured errors
        self.attention: set[str] = set()
        # whether nothing is measured: no Report node asks, or measuring failed
        self.off = owner is None or device is None or prompt is None
        self.counted = device is not None and device.type == "cuda"
        self.seconds = 0.0  # from `begin` to the end, without phases inside
        # from the start to `begin`, while weights load; None where nothing began
        self.waited_seconds: float | None = None
        self.loaded_bytes = 0  # the card's memory in use at `begin`
        self.card_bytes = 0  # its highest reading, of every program
        self.paged_bytes = 0  # highest reading of the weights that dynamic VRAM keeps outside torch
        self.allocated_bytes = 0  # peak of torch's tensors
        self.working_bytes = 0  # the same over those at `begin`: activations and workspace
        self._owner = owner
        self._base = 0
        self._known: int | None = None  # torch's peak at `begin`
        self._start = self._excluded = 0.0
        self._done = False
        self._parts: tuple[MeasuredPhase, ...] = ()

    def __enter__(self) -> MeasuredPhase:
        if not self.off:
            if self.outer is None:
                own = (it for it in reversed([*_open]) if it._thread == self._thread)
                self.outer = next(own, None)
            works = _at_work(self.device)
            _open.append(self)
            self._start = time.perf_counter()
            with harmless(self):
                self._fold(works)
                self.look()
                if self.outer is not None:
                    self.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: Any
    ) -> None:
        self._end(kind)
        if restart := restart_for(error):
            raise restart from error

    def _end(self, kind: type[BaseException] | None) -> None:
        if self not in _open:
            return
        if kind is None:
            self.stop()
        _open.remove(self)
        outer = self.outer
        if outer is not None:
            outer._excluded += time.perf_counter() - self._start
            outer.off |= self.off  # its time would count as the outer phase's
        if kind is None and not self.off:
            phases, self._parts = (*self._parts, self), ()
            if outer is None:
                with harmless(self):
                    _keep(self._owner, phases)
            else:
                outer._parts += phases

    def begin(self) -> None:
        """Marks the weights as loaded: what torch allocates from here on is working memory."""
        with harmless(self):
            if not self.off:
                if self.waited_seconds is None:
                    self.waited_seconds = time.perf_counter() - self._start - self._excluded
                self._fold(_at_work(self.device))
                self.look()
                self.loaded_bytes = self.card_bytes
            self.working_bytes = 0
            if self.counted:
                self._base = torch.cuda.memory_allocated(self.device)
                self._known = torch.cuda.max_memory_allocated(self.device)

    def look(self) -> None:
        """Reads the card; due before torch frees what it has reserved, and at each step."""
        if self.counted and not self.off:
            with harmless(self):
                free, total = torch.cuda.mem_get_info(self.device)
                self.card_bytes = max(self.card_bytes, total - free)
                self.paged_bytes = max(self.paged_bytes, paged_bytes())

    def stop(self) -> None:
        """Measures up to here. Where nothing resets torch's peak, it tells only if it has risen."""
        if self._done:
            return
        self._done = True
        with harmless(self):
            if not self.off:
                _wait(self.device)
                seconds = time.perf_counter() - self._start - self._excluded
                self.seconds = seconds - (self.waited_seconds or 0.0)
                self.look()
                self._fold(_at_work(self.device))
            elif self._known is not None:
                most = torch.cuda.max_memory_allocated(self.device)
                self.working_bytes = most - self._base if most > self._known else 0

    def _fold(self, phases: Sequence[MeasuredPhase]) -> None:
        """Counts torch's peak as that of phases of this one's device, and starts it again."""
        if self.counted:
            most = torch.cuda.max_memory_allocated(self.device)
            for whose in phases:
                whose.allocated_bytes = max(whose.allocated_bytes, most)
                if whose.waited_seconds is not None:
                    whose.working_bytes = max(whose.working_bytes, most - whose._base)
            torch.cuda.reset_peak_memory_stats(self.device)


def _at_work(device: torch.device) -> list[MeasuredPhase]:
    """Lists the phases on a device that no inner phase interrupts."""
    phases = [*_open]
    interrupted = [it.outer for it in phases]
    return [it for it in phases if it.device == device and it not in interrupted]


def phase(
    name: str, patcher: Any, device: torch.device | None, path: tuple[str, ...] = ()
) -> MeasuredPhase:
    """Measures a phase of the prompt that ComfyUI executes; off where it has no Report node."""
    prompt = None
    with harmless():
        prompt = reported_prompt()
    return MeasuredPhase(name, getattr(patcher, "clone_base_uuid", None), device, path, prompt)


def running(patcher: Any) -> MeasuredPhase | None:
    """Finds the phase that a patcher's model runs now on its device, in this thread if it does."""
    owner, device = (getattr(patcher, name, None) for name in ("clone_base_uuid", "load_device"))
    found = [it for it in reversed([*_open]) if (it._owner, it.device) == (owner, device)]
    return min(found, key=lambda it: it._thread != threading.get_ident(), default=None)


def inner_phase(name: str, patcher: Any, **asked: Any) -> MeasuredPhase:
    """Measures a phase inside the one that a patcher's model runs; off where none is measured."""
    outer = running(patcher)
    if outer is None or outer.off:
        return MeasuredPhase(name, None, None)
    return MeasuredPhase(name, outer._owner, outer.device, (), outer.prompt, outer, **asked)


def prompt_id() -> str:
    from comfy_execution.utils import get_executing_context

    context = get_executing_context()
    return "" if context is None else context.prompt_id


def reported_prompt() -> str | None:
    """Returns the id of the prompt that ComfyUI executes, if it has a Report node."""
    from comfy_execution.progress import get_progress_state

    prompt, state = prompt_id(), get_progress_state()
    if not prompt or state.prompt_id != prompt:
        return None
    nodes = map(state.dynprompt.get_node, state.dynprompt.all_node_ids())
    return prompt if any(node.get("class_type") == REPORT_NODE for node in nodes) else None


def measured(patcher: Any) -> tuple[MeasuredPhase, ...] | None:
    """Returns the phases of a patcher's model in its last prompt: () where its last sampling was
    not measured, None where it has not run.
    """
    return _measured.get(getattr(patcher, "clone_base_uuid", None))


def forget(patcher: Any) -> None:
    _keep(getattr(patcher, "clone_base_uuid", None), ())


def _keep(owner: Any, phases: tuple[MeasuredPhase, ...]) -> None:
    if owner is None:
        return
    before = _measured.pop(owner, ())
    same = [it for it in before if phases and it.prompt == phases[-1].prompt]
    # Replaced as a whole: another thread may be reading.
    _measured[owner] = (*same, *phases)[-MOST_PHASES:]
    if len(_measured) > MOST_MODELS:
        del _measured[next(iter(_measured))]


def paged_bytes() -> int:
    """Counts the weights that dynamic VRAM holds on all cards, which torch does not."""
    try:
        from comfy_aimdo import control
    except ImportError:
        return 0
    return 0 if control.lib is None else control.get_total_vram_usage()


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type != "cpu":
        torch.accelerator.synchronize(device)  # of torch 2.6; one that it does not know fails
