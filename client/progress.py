"""What a terminal shows of a run, and how Ctrl-C ends it."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from tqdm import tqdm

from ..files import printable

EXIT_CODE = 130
# Between two lines about the same thing where there is no terminal.
LINE_SECONDS = 10.0
# Between two drawings of a bar.
DRAW_SECONDS = 0.1
LONGEST_NAME = 28


@contextmanager
def cancelled_by_signals(task: asyncio.Task[Any]) -> Iterator[None]:
    """Cancels the task at the first signal; it may then take its time to tidy up."""
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


async def within(waiting: Coroutine[Any, Any, Any], seconds: float | None) -> None:
    """Waits so long at the most.

    Not asyncio.wait_for: before Python 3.12 it can swallow a Ctrl-C that arrives just then.
    """
    task = asyncio.create_task(waiting)
    try:
        await asyncio.wait({task}, timeout=seconds)
    finally:
        task.cancel()


class Progress:
    """How far the jobs and the running node are: two bars on a terminal, else now and then a line.

    A context manager.

    Args:
        stream: of the terminal or the log, in whatever encoding.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._last = ("", 0.0)
        self._drawn = 0.0
        self._jobs = self._node = None

    def begin(self, total: int, *, done: int = 0) -> None:
        """Shows the bars.

        Args:
            done: jobs that earlier runs did; they say nothing about the time that is left.
        """
        stream = self._stream
        if stream.isatty():
            layout = "{desc} {n_fmt}/{total_fmt} |{bar}| {elapsed}<{remaining}{postfix}"
            options = {"file": stream, "leave": False, **_size(stream)}
            self._jobs = tqdm(total=total, initial=done, desc="jobs", bar_format=layout, **options)
            self._node = tqdm(total=1, bar_format="{desc} |{bar}|", position=1, **options)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: object) -> None:
        for bar in (self._node, self._jobs):
            if bar is not None:
                bar.close()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Clears the bars while something else is written to the terminal."""
        with losable(self._stream):
            if self._jobs is None:
                yield
            else:
                with tqdm.external_write_mode(file=self._stream):
                    yield

    def say(self, text: str) -> None:
        """Writes a line that stays."""
        with self.paused():
            self._stream.write(printable(text, self._stream) + "\n")

    def show(self, *, done: int, total: int, failed: int, ahead: int | None) -> None:
        """The whole run.

        Args:
            done: jobs that ended, whichever way.
            ahead: prompts in the server's queue before the first of ours that waits; None when
                one of ours runs.
        """
        facts = [f"{failed} failed"] * bool(failed)
        facts += [f"{ahead} ahead in the queue"] * bool(ahead)
        if self._jobs is not None:
            self._jobs.n, self._jobs.total = done, total
            self._jobs.set_postfix_str(", ".join(facts), refresh=False)
            self._draw()
        elif ahead:
            self._line("queue", f"{done}/{total} jobs, {', '.join(facts)}")

    def node(self, job: str, name: str, value: float, maximum: float, place: str) -> None:
        """The node that runs.

        Args:
            place: among the nodes of its graph, such as "5/7".
        """
        if self._node is not None:
            steps = f" {value:g}/{maximum:g}" if maximum > 1 else ""
            name = name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 3]}..."
            text = f"node {place}, {name}{steps}"
            self._node.set_description_str(printable(text, self._stream), refresh=False)
            self._node.total = maximum or 1
            self._node.n = min(value, self._node.total)
            self._draw()
        elif maximum > 1:
            self._line(f"{job} {name}", f"{job}: {name} {value:g}/{maximum:g}")

    def _draw(self) -> None:
        if time.monotonic() - self._drawn >= DRAW_SECONDS:
            self._drawn = time.monotonic()
            self._jobs.refresh()
            self._node.refresh()

    def _line(self, subject: str, text: str) -> None:
        last, at = self._last
        if subject != last or time.monotonic() - at >= LINE_SECONDS:
            self._last = (subject, time.monotonic())
            self.say(text)


@contextmanager
def losable(stream: TextIO) -> Iterator[None]:
    """Ends no run where writing fails: the reader left, the disk is full."""
    try:
        yield
        stream.flush()
    except OSError:
        # What is still in the buffer would fail again at the end of the process.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _size(stream: TextIO) -> dict[str, Any]:
    """A container's terminal may have a size of 0 by 0, in which tqdm draws nothing."""
    try:
        known = all(os.get_terminal_size(stream.fileno()))
    except OSError:
        known = False
    return {"dynamic_ncols": True} if known else {"ncols": 80, "nrows": 24}
