"""What the last run of a MODEL, a CLIP or a VAE took: one record for each phase.

Records hang on the module that computes (BaseModel, `cond_stage_model`, `first_stage_model`), which
clones share. They hold numbers and words, so they keep no model and no tensor alive.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from comfy_execution.utils import get_executing_context

from .meter import Measured, Meter, harmless, only_measures

RECORD_KEY = "qwen_l40s_records"
MOST_RECORDS = 256


@dataclass(frozen=True)
class Record:
    """One phase that ran.

    Attributes:
        phase: "text", "tables", "sampling", "decode" or "encode".
        measured: What it took; None where nothing had to run.
        path: How it ran, in lines.
        asked: {setting: a number, a word or a list of them}.
        prompt: The id of ComfyUI's prompt; empty outside of its queue.
    """

    phase: str
    measured: Measured | None
    path: tuple[str, ...] = ()
    asked: Mapping[str, Any] = field(default_factory=dict)
    prompt: str = field(default_factory=lambda: prompt_id())


class Records:
    """The records of one module's last run, in order.

    Attributes:
        all: Empty where nothing has run.
        open: The recording that runs now.
    """

    def __init__(self) -> None:
        self.all: tuple[Record, ...] = ()
        self.open: Recording | None = None

    @classmethod
    def of(cls, holder: Any) -> Records:
        """Returns those that hang on a module, new ones if there are none."""
        return vars(holder).setdefault(RECORD_KEY, cls())

    @classmethod
    def share(cls, holder: Any, records: Records) -> Records:
        """Hangs records on another module as well."""
        vars(holder)[RECORD_KEY] = records
        return records

    def add(self, *records: Record) -> None:
        """Adds records of one prompt and drops those of others.

        Outside of the queue nothing tells one run from the next: the last of each phase stays.
        """
        prompt, new = records[-1].prompt, {record.phase for record in records}
        kept = [r for r in self.all if r.prompt == prompt and (prompt or r.phase not in new)]
        # Replaced as a whole: another thread may be reading.
        self.all = (*kept, *records)[-MOST_RECORDS:]


class Recording:
    """One phase while it runs, as a context manager; recorded if it ends without an exception.

    Attributes:
        asked, path: Of the record; more can be added.
        off: Whether nothing is measured: there is no holder, or measuring failed.
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
            holder: the module that the records hang on; None measures nothing.
            device: that computes.
            records: another module's, to share.
            within: the phase that this one interrupts and does not count in.
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
        """Marks the weights as loaded."""
        self._meter.begin()

    @only_measures
    def look(self) -> None:
        """Reads the card's memory."""
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
            self._meter = self._within._meter.pause()
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
            self._within.off = True  # its time would count as the outer phase's
        else:
            self._within._resume(self._meter)

    @only_measures
    def _resume(self, inner: Meter) -> None:
        self._meter.resume(inner)


def recorded(holder: Any) -> tuple[Record, ...]:
    """The records of a module; empty where nothing was recorded."""
    found = getattr(holder, RECORD_KEY, None)
    return found.all if isinstance(found, Records) else ()


def running(holder: Any) -> Recording:
    """The module's open recording, or one that is off."""
    found = getattr(holder, RECORD_KEY, None)
    opened = found.open if isinstance(found, Records) else None
    return Recording(None, "", None) if opened is None else opened


def inner_phase(holder: Any, phase: str, **asked: Any) -> Recording:
    """A phase inside the one that a module runs now; off where none is recorded."""
    whole = running(holder)
    if whole.off:
        return Recording(None, phase, None)
    return Recording(holder, phase, whole._device, within=whole, **asked)


def note(holder: Any, phase: str, *path: str) -> None:
    """Records that nothing had to run."""
    with harmless():
        Records.of(holder).add(Record(phase, None, path))


def prompt_id() -> str:
    """The id of the prompt that ComfyUI executes; empty where it executes none."""
    context = get_executing_context()
    return "" if context is None else context.prompt_id
