"""What the last runs of a MODEL, a CLIP or a VAE took, for the report after them.

The records hang on the module that computes (BaseModel, `cond_stage_model`, `first_stage_model`),
which clones and copies of a MODEL, CLIP or VAE share, and hold numbers and words only: they keep no
model and no tensor alive.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from comfy_execution.utils import get_executing_context

from .meter import Measured, Meter, harmless, only_measures

RECORD_KEY = "qwen_l40s_records"
# ComfyUI can keep the images of several runs, and a report can be asked for of any of them.
MOST_PROMPTS = 8
# Of all; a graph that samples more often is a video's.
MOST_RECORDS = 256


@dataclass(frozen=True)
class Record:
    """One phase that ran.

    Attributes:
        phase: "text", "tables", "sampling", "decode" or "encode".
        measured: What it took; None where nothing had to run.
        path: How it ran, in lines.
        asked: {what was asked for: a number, a word or a list of them}.
        prompt: The prompt of ComfyUI's queue that it belongs to; empty outside of the queue.
    """

    phase: str
    measured: Measured | None
    path: tuple[str, ...] = ()
    asked: Mapping[str, Any] = field(default_factory=dict)
    prompt: str = field(default_factory=lambda: prompt_id())


class Records:
    """What one module ran for the last prompts that made it run.

    Attributes:
        all: In order; empty where nothing has run.
        open: The recording that runs now.
    """

    def __init__(self) -> None:
        self.all: tuple[Record, ...] = ()
        self.open: Recording | None = None

    @classmethod
    def of(cls, holder: Any) -> Records:
        """Those that hang on a module, from now on if there were none."""
        return vars(holder).setdefault(RECORD_KEY, cls())

    @classmethod
    def share(cls, holder: Any, records: Records) -> Records:
        """Hangs records on another module as well."""
        vars(holder)[RECORD_KEY] = records
        return records

    def add(self, *records: Record) -> None:
        """Adds records of one prompt, and forgets those of prompts long ago.

        Outside of the queue nothing tells one run from the next: there it keeps one of each phase.
        """
        new = {(record.prompt, record.phase) for record in records}
        kept = [
            record
            for record in self.all
            if record.prompt or (record.prompt, record.phase) not in new
        ]
        kept += records
        prompts = list(dict.fromkeys(record.prompt for record in reversed(kept)))[:MOST_PROMPTS]
        # Replaced as a whole: another thread may be reading.
        self.all = tuple(record for record in kept if record.prompt in prompts)[-MOST_RECORDS:]


class Recording:
    """One phase while it runs, as a context: it is recorded where it ends without failing.

    Attributes:
        asked, path: Of the record; more can be added.
        off: Whether nothing is measured, because there is nothing to hang it on, or measuring it
            has failed.
    """

    def __init__(
        self,
        holder: Any,
        phase: str,
        device: torch.device | None,
        path: tuple[str, ...] = (),
        *,
        records: Records | None = None,
        within: Recording | None = None,
        **asked: Any,
    ) -> None:
        """
        Args:
            holder: the module that the records hang on; None for none.
            device: that computes.
            records: to hang on it, where they are another one's.
            within: the phase that this one is a part of, and is measured apart from.
        """
        self.asked, self.path = asked, path
        self.off = holder is None or device is None
        self._holder, self._phase, self._device = holder, phase, device
        self._records, self._within, self._before = records, within, None
        self._parts: list[Record] = []
        self._meter: Meter | None = None
        self._measured: Measured | None = None

    def __enter__(self) -> Recording:
        self._start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: Any) -> None:
        if kind is None:
            self._record()
        with harmless():
            self._close()

    @only_measures
    def begin(self) -> None:
        """Weights are loaded: what this phase is about begins."""
        self._meter.begin()

    @only_measures
    def look(self) -> None:
        """Reads the card."""
        self._meter.look()

    @only_measures
    def stop(self) -> Measured | None:
        """Measures up to here; None where nothing is measured."""
        if self._measured is None:
            self._measured = self._meter.finish()
        return self._measured

    @only_measures
    def _start(self) -> None:
        if self._within is not None:
            self._meter = self._within._meter.apart()
            self._meter.begin()
            return
        if self._records is None:
            self._records = Records.of(self._holder)
        else:
            Records.share(self._holder, self._records)
        self._before, self._records.open = self._records.open, self
        self._meter = Meter(self._device)

    @only_measures
    def _record(self) -> None:
        measured = self.stop()
        if self.off:
            return
        record = Record(self._phase, measured, tuple(self.path), dict(self.asked))
        if self._within is not None:
            self._within._parts.append(record)
        else:
            self._records.add(*self._parts, record)

    def _close(self) -> None:
        if self._within is None:
            if self._records is not None and self._records.open is self:
                self._records.open = self._before
        elif self.off:
            self._within.off = True  # what it took would count as the other's
        else:
            self._within._rejoin(self._meter)

    @only_measures
    def _rejoin(self, inner: Meter) -> None:
        self._meter.rejoin(inner)


def recorded(holder: Any) -> tuple[Record, ...]:
    """What a module ran; empty for one that nothing was recorded of."""
    found = getattr(holder, RECORD_KEY, None)
    return found.all if isinstance(found, Records) else ()


def running(holder: Any) -> Recording:
    """The recording of a module that runs now, or one that is off."""
    found = getattr(holder, RECORD_KEY, None)
    opened = found.open if isinstance(found, Records) else None
    return Recording(None, "", None) if opened is None else opened


def apart(holder: Any, phase: str, **asked: Any) -> Recording:
    """Of a part of the phase that a module runs now; off where none is recorded."""
    whole = running(holder)
    if whole.off:
        return Recording(None, phase, None)
    return Recording(holder, phase, whole._device, within=whole, **asked)


def note(holder: Any, phase: str, *path: str) -> None:
    """Records that nothing had to run."""
    with harmless():
        Records.of(holder).add(Record(phase, None, path))


def prompt_id() -> str:
    """The prompt that ComfyUI executes now; empty where it executes none."""
    context = get_executing_context()
    return "" if context is None else context.prompt_id
