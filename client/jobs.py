"""A run: queues every job, follows them to their end and fetches what they made."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
import uuid
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

from .files import collect
from .follow import Follower, QueueWatch, withdraw
from .graph.workflow import title
from .ledger import CANCELLED, COLLECTING, DONE, FAILED, LOST, OPEN, QUEUED, WAITING, Job, Ledger
from .progress import Progress
from .server import Accepted, Server, failure, of_validation
from .transport import AnswerError, ServerError

# Between two looks at the queue, with a websocket and without.
POLL_SECONDS, POLL_SECONDS_ALONE = 5.0, 1.0
# A look at a queue of hundreds of long graphs takes time of the server: at most this part of it.
POLL_SHARE = 0.05
DOWNLOADS = 4
# A websocket that says nothing for so long is not waited for.
SOCKET_SECONDS = 5.0
# A run that is stopped waits for the answer to a prompt that is on its way.
ANSWER_SECONDS = 5.0
# A job during which the server went away so often is not queued once more.
MOST_CRASHES = 3


class JobRun:
    """Jobs on one server, followed to their end.

    Args:
        ledger: gets a line before the server hears of a job, and when the job ends.
        folder: for the results.
        ended: called once for each job, when its results are there or it failed.
    """

    def __init__(
        self,
        server: Server,
        jobs: list[Job],
        ledger: Ledger,
        folder: Path,
        *,
        client_id: str,
        progress: Progress,
        ended: Callable[[Job], None] = lambda job: None,
    ) -> None:
        self.jobs = jobs
        self._server = server
        self._ledger = ledger
        self._folder = folder
        self._client_id = client_id
        self._progress = progress
        self._ended = ended
        self._looked = (-math.inf, 0.0)  # when, and how long it took
        self._posting: asyncio.Task[Accepted] | None = None
        self._wake = asyncio.Event()
        self._follower = Follower(server, client_id, changed=self._wake.set, notify=progress.say)
        self._watch = QueueWatch(server, self._follower)
        self._by_id = {job.prompt_id: job for job in jobs if job.prompt_id}
        self._to_queue: asyncio.Queue[Job] = asyncio.Queue()
        self._slots = asyncio.Semaphore(DOWNLOADS)
        self._tasks: set[asyncio.Task[None]] = set()
        self._error: BaseException | None = None
        self._open = sum(job.status in OPEN for job in jobs)
        self._failed = 0

    async def go(self) -> None:
        """Returns when no job is open any more.

        Raises:
            ServerError: the server stayed away; the jobs that are open may still run there.
        """
        try:
            await self._watch.begin()
            self._start(self._follower.listen())
            await _within(self._follower.first_try(), SOCKET_SECONDS)
            for job in self.jobs:
                job.breaks = self._watch.breaks
                if job.status == WAITING:
                    self._to_queue.put_nowait(job)
            self._start(self._feed())
            await self._until_ended()
        except ServerError:
            if self._posting is not None:
                self._posting.cancel()
            raise
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _until_ended(self) -> None:
        while self._open:
            if self._error is not None:
                raise self._error
            await self._look_up_ended()
            if self._until_look() <= 0:
                took = await self._look_at_queue()
                self._looked = (time.monotonic(), took)
            self._show()
            if not self._wake.is_set():
                await _within(self._wake.wait(), self._until_look())
            self._wake.clear()

    def _until_look(self) -> float:
        """Seconds until the queue is to be looked at."""
        when, took = self._looked
        usual = POLL_SECONDS if self._follower.connected else POLL_SECONDS_ALONE
        return when + max(usual, took / POLL_SHARE) - time.monotonic()

    async def _look_up_ended(self) -> None:
        """Looks up jobs that ended by what the websocket said."""
        ended, self._follower.ended[:] = list(self._follower.ended), []
        for prompt_id in ended:
            job = self._by_id.get(prompt_id)
            # One that ended before the answer of its POST was here is seen at the next look.
            if job is not None and job.status == QUEUED:
                await self._look_up(job)

    async def _feed(self) -> None:
        while True:
            await self._queue(await self._to_queue.get())
            if self._to_queue.empty():  # people want to know their position
                self._looked = (-math.inf, 0.0)
                self._wake.set()

    async def _queue(self, job: Job) -> None:
        job.prompt_id, job.ran = str(uuid.uuid4()), False
        self._by_id[job.prompt_id] = job
        try:
            self._ledger.write(job.key, job.prompt_id, QUEUED, settings=dict(job.settings))
        except OSError as broken:
            message = (
                f"not queued, because the journal cannot be written ({broken.strerror}): make "
                f"room, then --resume queues it ({self._ledger.path})."
            )
            self._end(job, FAILED, error=failure("journal", message))
            return
        post = self._server.submit(job.graph, job.prompt_id, self._client_id)
        self._posting = asyncio.create_task(post)
        try:
            # Ctrl-C must not cut off a prompt that the server would queue after we left.
            accepted = await asyncio.shield(self._posting)
        except AnswerError as error:
            if error.status not in (400, 413, 500):
                raise
            body = error.body if error.status == 400 else str(error)
            self._end(job, FAILED, error=of_validation(job.graph, body))
            return
        if accepted.prompt_id != job.prompt_id:  # an older server chooses the id itself
            job.prompt_id = accepted.prompt_id
            self._by_id[job.prompt_id] = job
            self._ledger.write(job.key, job.prompt_id, QUEUED, settings=dict(job.settings))
        if accepted.node_errors:
            await withdraw(self._server, [job.prompt_id])
            body = {"node_errors": accepted.node_errors}
            self._end(job, FAILED, error=of_validation(job.graph, body))
            return
        job.status, job.breaks = QUEUED, self._watch.breaks

    async def _look_at_queue(self) -> float:
        """Returns the seconds that the server took to tell."""
        start, ahead = time.monotonic(), self._watch.ahead
        gone = await self._watch.gone(self.jobs)
        took = time.monotonic() - start
        forgotten = []
        for job in gone:
            if await self._look_up(job):
                continue
            if await self._watch.removed(job):
                message = "someone took it out of the server's queue."
                self._end(job, CANCELLED, error=failure("removed", message))
            else:
                forgotten.append(job)
        ran = [job for job in forgotten if job.ran or job.prompt_id in self._follower.started]
        if not ran and not ahead:
            ran = forgotten[:1]  # its turn had come; it may have taken the server down at once
        for job in ran:
            job.crashes += 1
        self._queue_again(forgotten)
        return took

    def _queue_again(self, jobs: list[Job]) -> None:
        again = [job for job in jobs if job.crashes < MOST_CRASHES]
        if again:
            self._progress.say(f"the server was restarted: {len(again)} jobs are queued again")
        for job in again:
            job.status = WAITING
            self._to_queue.put_nowait(job)
        for job in jobs:
            if job.crashes >= MOST_CRASHES:
                message = f"the server stopped {job.crashes} times while it ran this job."
                self._end(job, LOST, error=failure("crashed", message))

    async def _look_up(self, job: Job) -> bool:
        """Whether the history has it; then its results are fetched."""
        entry = await self._server.history(job.prompt_id)
        if entry is not None and job.status == QUEUED:
            job.status = COLLECTING
            self._watch.ended(job)
            self._start(self._collect(job, entry))
        return entry is not None

    async def _collect(self, job: Job, entry: Mapping[str, Any]) -> None:
        async with self._slots:
            # A node that blocks the rest with a message is reported on the websocket alone.
            reported = self._follower.errors.pop(job.prompt_id, None)
            status, error = await collect(self._server, job, entry, self._folder, reported)
        self._end(job, status, error=error)

    def _end(self, job: Job, status: str, *, error: dict[str, Any] | None = None) -> None:
        job.status, job.error = status, error
        self._open -= 1
        self._failed += status != DONE
        files = [path.relative_to(self._folder).as_posix() for path in job.files]
        # On a full disk the line is missing, and --resume asks the server in its stead.
        with contextlib.suppress(OSError):
            self._ledger.write(
                job.key, job.prompt_id, status, seconds=job.seconds, files=files, texts=job.texts
            )
        self._ended(job)
        self._wake.set()

    async def stop(self) -> bool:
        """Takes the open jobs off the server; see `withdraw`."""
        if self._posting is not None:
            await asyncio.wait({self._posting}, timeout=ANSWER_SECONDS)
            self._posting.cancel()
            await asyncio.gather(self._posting, return_exceptions=True)
        open_ids = [job.prompt_id for job in self.jobs if job.status in OPEN and job.prompt_id]
        return await withdraw(self._server, open_ids)

    def _show(self) -> None:
        running = [
            (self._by_id[prompt_id], state)
            for prompt_id, state in self._follower.running.items()
            if prompt_id in self._by_id
        ]
        ahead = None if running else self._watch.ahead
        ended = len(self.jobs) - self._open
        self._progress.show(done=ended, failed=self._failed, ahead=ahead)
        for job, state in running[-1:]:
            if state.node is not None:
                name = title(job.graph, state.node)
                place = f"{min(len(state.finished) + 1, len(job.graph))}/{len(job.graph)}"
                self._progress.node(job.label, name, state.value, state.maximum, place)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._stopped)

    def _stopped(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._error = self._error or task.exception()
        self._wake.set()


async def _within(waiting: Coroutine[Any, Any, Any], seconds: float) -> None:
    """Not asyncio.wait_for: before Python 3.12 it can swallow a Ctrl-C that arrives just then."""
    task = asyncio.create_task(waiting)
    try:
        await asyncio.wait({task}, timeout=seconds)
    finally:
        task.cancel()
