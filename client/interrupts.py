"""Ctrl-C and SIGTERM end a run in an orderly way; a second one ends the process at once."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

EXIT_CODE = 130


@contextmanager
def cancelled_by_signals(task: asyncio.Task[Any]) -> Iterator[None]:
    """The first signal cancels the task, which may then take its time to tidy up."""
    loop = asyncio.get_running_loop()
    seen = False

    def handle(*signal_and_frame: Any) -> None:
        nonlocal seen
        if seen:
            os._exit(EXIT_CODE)
        seen = True
        loop.call_soon_threadsafe(task.cancel)

    before = {}
    # Not loop.add_signal_handler, which Windows lacks.
    for number in (signal.SIGINT, signal.SIGTERM):
        try:
            before[number] = signal.signal(number, handle)
        except ValueError:  # only the main thread gets signals
            break
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
