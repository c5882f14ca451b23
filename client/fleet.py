"""Offers servers as a Python object: graphs go in, futures of their images come out."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import io
import json
import os
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from ..errors import QwenL40SError
from .journal import Journal
from .progress import Progress
from .run import WAIT_SECONDS, Run
from .scheduler import DONE, Job
from .servers import Listed, ServerList
from .workflow import graph_of, key_of, loaders_key, read_workflow


class JobError(QwenL40SError):
    """A job failed, was cancelled, or no server was left for it.

    Attributes:
        status: "failed", "cancelled", "poison" or "lost".
        nodes: what went wrong in which node: id, title, class_type, message.
    """

    def __init__(self, status: str, message: str, nodes: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__(message)
        self.status = status
        self.nodes = list(nodes)


@dataclass(frozen=True)
class Result:
    """What a job made.

    Attributes:
        files: in the output folder, `<hash of the graph>_<n>.png`.
        texts: {title of a node: the texts that it shows}.
        seconds: that the server ran it; None where it does not say.
    """

    files: list[Path]
    texts: dict[str, list[str]]
    seconds: float | None
    server: str


class Fleet:
    """ComfyUI servers that share the graphs submitted here; a context manager.

    Every graph runs to one accepted result, however often servers stop; equal graphs are one job.
    One that failed runs again when it is submitted again.
    Leaving the context waits for all jobs; leaving it by an exception, and the end of the program,
    take them off the servers. A process that was forked needs a Fleet of its own.

    Args:
        servers: addresses, such as "http://127.0.0.1:8188".
        output: folder for the results and the journal; a graph whose images are there is not run
            again, in a later process either, unless a model of it was replaced on this machine.
        server_file: servers.json of `qwen-l40s fleet`, or a text with an address on each line; read
            again when it changes.
        headers: sent with every request, such as {"Authorization": "Bearer TOKEN"}.
        wait: seconds to wait for a server where there is none.
        log: gets lines about servers that come and go; None for none.

    Raises:
        SettingError: an address or a file is wrong, or another process uses the output folder.

    Example:
        with Fleet(["http://10.0.0.5:8188", "http://10.0.0.6:8188"], output="out") as fleet:
            futures = [fleet.submit(graph) for graph in graphs]
            for future in futures:
                print(future.result().files)
    """

    def __init__(
        self,
        servers: Sequence[str] = (),
        output: Path | str = "out",
        *,
        server_file: Path | str | None = None,
        headers: Mapping[str, str] | None = None,
        wait: float = WAIT_SECONDS,
        log: TextIO | None = sys.stderr,
    ) -> None:
        self._progress = Progress(io.StringIO() if log is None else log)
        file = None if server_file is None else Path(server_file)
        addresses = [servers] if isinstance(servers, str) else servers
        listed = ServerList(addresses, file, self._progress.say, headers or {})
        first = listed.read()
        self._journal = Journal(Path(output), "fleet")
        self._futures: dict[str, Future[Result]] = {}
        self._lock = threading.Lock()  # of _futures and _closing
        self._closing = self._last = False
        self._reason: Exception | None = None
        self._started = threading.Event()
        self._loop = asyncio.new_event_loop()
        # asyncio imports it late, and a fork in that moment leaves a lock of its module unlocked.
        self._loop.set_default_executor(ThreadPoolExecutor())
        self._run = Run(listed, progress=self._progress, wait=wait, ended=self._ended)
        # Python waits for other threads before it tells anybody that the program ends.
        self._thread = threading.Thread(
            target=self._work, args=(first,), name="qwen-l40s fleet", daemon=True
        )
        _OPEN.add(self)
        self._thread.start()
        self._started.wait()

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self.close(wait=kind is None)

    def submit(self, graph: Mapping[str, Any] | Path | str) -> Future[Result]:
        """Runs a graph on whichever server is free first.

        Args:
            graph: a workflow in API form, or the path of one, as `read_workflow` takes it; node ids
                may be numbers. It names images that the servers have.

        Returns:
            A future; `result()` raises JobError where the job failed.

        Raises:
            SettingError: this is no workflow.
            TypeError: it holds what JSON does not.
            RuntimeError: the fleet is closed, or has ended; the message says why.
        """
        if isinstance(graph, str | Path):
            graph = read_workflow(Path(graph))
        else:  # a copy, for the caller may set the next seed in it
            graph = graph_of(json.loads(json.dumps(graph)))
        key, loads = key_of(graph), loaders_key(graph)
        with self._lock:
            if self._reason is not None:
                raise RuntimeError(f"the fleet has ended: {self._reason}") from self._reason
            if self._closing:
                raise RuntimeError("the fleet is closed: submit jobs before you close it.")
            known = self._futures.get(key)
            ended = known is not None and known.done()
            if not known or (ended and (known.exception() or self._journal.changed(key))):
                number = len(self._futures) + 1
                job = Job(number, key, graph, label=f"job {number}", loads=loads)
                self._futures[key] = Future()
                self._futures[key].set_running_or_notify_cancel()
                self._loop.call_soon_threadsafe(self._add, job)
            return self._futures[key]

    def close(self, *, wait: bool = True) -> None:
        """Ends the fleet.

        Args:
            wait: for all jobs; else they are taken off the servers.
        """
        with self._lock:
            if not self._closing:
                self._closing = True
                self._loop.call_soon_threadsafe(self._finish if wait else self._going.cancel)
        try:
            self._thread.join()
        except BaseException:  # Ctrl-C while it waits for jobs
            with contextlib.suppress(RuntimeError):  # it has just ended
                self._loop.call_soon_threadsafe(self._going.cancel)
            self._thread.join()
            raise

    def _work(self, listed: list[Listed]) -> None:
        reason: Exception = JobError("cancelled", "the fleet was closed.")
        try:
            self._loop.run_until_complete(self._go(listed))
        except asyncio.CancelledError:
            pass
        except Exception as error:
            reason = self._reason = error
        with self._lock:  # from here on no future is added
            self._closing = True
        self._started.set()  # also where it could not start
        for future in self._futures.values():
            if not future.done():
                future.set_exception(reason)
        self._loop.close()
        self._progress.__exit__()
        self._journal.__exit__()
        _OPEN.discard(self)

    async def _go(self, listed: list[Listed]) -> None:
        self._going: Any = asyncio.current_task()
        async with self._run as run:
            for each in listed:
                await run.start(each)
            run.begin(self._journal, [], "Fleet")
            self._started.set()
            try:
                await run.go(lambda: not self._last)
            except asyncio.CancelledError:
                await run.stop()

    def _finish(self) -> None:
        """Runs after every `_add` before it, so that no job is left out."""
        self._last = True
        self._run.wake()

    def _add(self, job: Job) -> None:
        self._run.add([job])
        if job.status == DONE:
            self._ended(job)

    def _ended(self, job: Job) -> None:
        future = self._futures[job.key]
        if job.status == DONE:
            future.set_result(Result(job.files, dict(job.texts), job.seconds, job.server))
        else:
            error = job.error or {"message": "it was stopped.", "nodes": []}
            future.set_exception(JobError(job.status, error["message"], error["nodes"]))

    def _forget(self) -> None:
        """Ends in a forked process, which has neither the thread nor its jobs."""
        self._lock = threading.Lock()  # which another thread may have held
        self._closing = True
        self._reason = JobError(
            "lost", "the fleet runs in the process that made it: make one in this process."
        )
        self._journal.__exit__()  # else this process holds its lock, too
        for future in self._futures.values():
            if not future.done():
                # Which that process runs.
                future._done_callbacks.clear()  # type: ignore[attr-defined]
                future.set_exception(self._reason)


_OPEN: weakref.WeakSet[Fleet] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for fleet in list(_OPEN):
        fleet.close(wait=False)


def _forget_all() -> None:
    for fleet in list(_OPEN):
        fleet._forget()
    _OPEN.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
