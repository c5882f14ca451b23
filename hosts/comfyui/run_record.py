"""What the last runs of a MODEL, a CLIP or a VAE took, for the report after them.

The records hang on the object itself, which its clones share, and hold numbers and words only: they
keep no model and no tensor alive.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from comfy_execution.utils import get_executing_context

from .meter import Measured, Meter

KEY = "qwen_l40s_records"
# Of one prompt; a graph that samples more often is a video's.
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
    """What one object ran for the last prompt that made it run."""

    def __init__(self) -> None:
        self._records: tuple[Record, ...] = ()
        self._meter: Meter | None = None

    @classmethod
    def of(cls, holder: Any) -> Records:
        """The records that hang on a BaseModel, a CLIP or a VAE."""
        return vars(holder).setdefault(KEY, cls())

    @classmethod
    def share(cls, holder: Any, records: Records) -> None:
        """Hangs records on another object as well, such as a clone."""
        vars(holder)[KEY] = records

    def add(self, record: Record) -> None:
        """Adds a record, and forgets those of earlier prompts.

        Outside of the queue nothing tells one run from the next: there it keeps one of each phase.
        """
        kept = [
            known
            for known in self._records
            if known.prompt == record.prompt and (record.prompt or known.phase != record.phase)
        ]
        # Replaced as a whole: another thread may be reading.
        self._records = (*kept, record)[-MOST_RECORDS:]

    @property
    def last(self) -> tuple[Record, ...]:
        """What ran for the last prompt, in order; empty where nothing has run."""
        return self._records

    @contextmanager
    def during(self, meter: Meter) -> Iterator[None]:
        """For the length of a phase: what is measured `apart` is no part of it."""
        before, self._meter = self._meter, meter
        try:
            yield
        finally:
            self._meter = before

    @contextmanager
    def apart(self, phase: str, **asked: Any) -> Iterator[None]:
        """Records a phase within the one that is measured; nothing where none is."""
        if self._meter is None:
            yield
            return
        with self._meter.apart() as meter:
            yield
            self.add(Record(phase, meter.finish(), asked=asked))


def prompt_id() -> str:
    """The prompt that ComfyUI executes now; empty where it executes none."""
    context = get_executing_context()
    return "" if context is None else context.prompt_id


@contextmanager
def recording(
    holder: Any, phase: str, device: torch.device, path: tuple[str, ...] = (), **asked: Any
) -> Iterator[dict[str, Any]]:
    """Records what runs inside, if it does not fail.

    Yields:
        `asked`, to which more can be added.
    """
    meter = Meter(device)
    yield asked
    Records.of(holder).add(Record(phase, meter.finish(), path, asked))
