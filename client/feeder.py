"""Feeds one server: keeps two jobs there, follows them, fetches what they made, and outlasts its
restarts.

What the server's queue and history say decides. A job in neither of them was taken out by someone,
or forgotten by a process that ended. While the websocket stays open, and no connection was lost
since the job was last seen, the process is the same. Else it is the same where its history still
has an entry that it had before, or where the fleet's file gives it the same boot id.
"""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..errors import SettingError
from .journal import Attempt, Fetched, fetch, place
from .progress import within
from .scheduler import CANCELLED, COLLECTING, DONE, FAILED, QUEUED, WAITING, Job
from .server import Listener, RunningPrompt, Server, failure, of_execution, of_validation
from .servers import OURS, Listed
from .transport import AnswerError, GoneError, ServerError
from .workflow import renamed

if TYPE_CHECKING:
    from .run import Run

# Between two looks at the queue, with a websocket and without.
POLL_SECONDS, POLL_SECONDS_ALONE = 5.0, 1.0
# A look at a queue of hundreds of long graphs takes time of the server: at most this part of it.
POLL_SHARE = 0.05
# A websocket that says nothing for so long is not waited for.
SOCKET_SECONDS = 5.0
# After a server was lost, before it is tried again.
PAUSE_SECONDS = 1.0
# A job that shows no progress for so long, and for so many times the longest job, hangs.
HUNG_SECONDS, HUNG_TIMES = 1800.0, 20
# A run that is stopped waits so long for the answer to a prompt on its way.
ANSWER_SECONDS = 5.0
# What a node raises where its machine is too small or too old, and another server's may not be.
UNABLE = re.compile(r"OutOfMemory|\.(Unavailable|DoesNotFit)Error$")


@dataclass
class Posted:
    """A job at this server."""

    job: Job
    boot: str
    breaks: int = -1  # `Feeder._breaks` when the server was last known to have it
    ran: bool = False  # as far as was seen
    hung: bool = False
    moved: float = field(default_factory=time.monotonic)  # when it was last seen to go on
    progress: tuple[Any, ...] = ()


class Feeder:
    """One server of a run.

    Attributes:
        name: the server's address.
        boot: which process it is: the id in the fleet's file, or one that is made when the server
            is first met and after each restart.
        ahead: prompts of others before the first of ours; 0 while one of ours runs.
        error: why it is away; None while it is not.
        away_since: when it was lost (time.monotonic).
        asked: whether it has said what it has, or was lost.
        leaving: it gets no more jobs; `go` returns when it has none.
        fault: of a task that fetched results.
    """

    def __init__(self, listed: Listed, run: Run) -> None:
        self.listed = listed
        self.name = str(listed.address)
        self.boot = listed.boot or uuid.uuid4().hex
        self.ahead = 0
        self.error: ServerError | None = None
        self.away_since = 0.0
        self.asked = False
        self.leaving = False
        self.fault: BaseException | None = None
        self.wake = asyncio.Event()
        self.server = Server(
            listed.address, headers=run.admission.headers, wait=run.wait, notify=run.say
        )
        self.listener = Listener(self.server, changed=self.wake.set, notify=run.say)
        self._run = run
        self._scheduler = run.scheduler
        self._posted: dict[str, Posted] = {}
        self._witness: str | None = None  # a prompt in the history of the process we know
        self._uploaded: dict[str, str] = {}  # {what graphs call an image: what the server does}
        self._posting: asyncio.Task[Any] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._longest = 0.0
        self._met = False

    @property
    def here(self) -> bool:
        return self.error is None and not self.leaving

    @property
    def busy(self) -> bool:
        return self.error is None and bool(self._posted)

    def follow(self, posted: Iterable[tuple[Attempt, Job]]) -> None:
        """Takes in jobs that earlier runs posted to this server."""
        for attempt, job in posted:
            self._posted[attempt.prompt_id] = Posted(job, attempt.boot)
            self._met = False
            if self.error is None:
                self.asked = False
        self.wake.set()

    def stay(self) -> None:
        """Undoes `leaving`: the server is asked what it has, and gets jobs again."""
        if self.leaving:
            self.leaving = self._met = False
            self.wake.set()

    async def go(self) -> None:
        """Feeds the server until it leaves, or is cancelled.

        Raises:
            DiskError: the output folder takes no more.
        """
        listening = asyncio.create_task(self.listener.listen())
        try:
            await within(self.listener.tried.wait(), SOCKET_SECONDS)
            while True:
                try:
                    await self._meet()
                    await self._feed()
                    return
                except ServerError as error:
                    self._lose(error)
                    if self.leaving:
                        return
                await asyncio.sleep(PAUSE_SECONDS)
        finally:
            self._scheduler.leave(self.name)
            for task in (listening, *self._tasks):
                task.cancel()
            await asyncio.gather(listening, *self._tasks, return_exceptions=True)

    async def stop(self) -> bool:
        """Takes our jobs off the server, as `Server.withdraw` does, and gives it no more."""
        self._scheduler.leave(self.name)
        if self._posting is not None:
            await asyncio.wait({self._posting}, timeout=ANSWER_SECONDS)
            self._posting.cancel()
            await asyncio.gather(self._posting, return_exceptions=True)
        return await self.server.withdraw(list(self._posted))

    def running(self) -> tuple[Job, RunningPrompt] | None:
        """The job that runs, and how far it is."""
        here = self.listener.running.keys() & self._posted.keys()
        return next(((self._posted[i].job, self.listener.running[i]) for i in here), None)

    async def _meet(self) -> None:
        self._met = True
        takes = await self._run.admission.admit(self.name, self.server)
        await self._recognize()
        breaks, queue = self._breaks, await self.server.queue()
        strays = []
        for prompt_id, posted in list(self._posted.items()):
            entry = None if prompt_id in queue else await self.server.history(prompt_id)
            if entry is not None:
                self._collect(prompt_id, entry)
            elif prompt_id not in queue:
                del self._posted[prompt_id]
                if posted.ran and posted.boot != self.boot:
                    self._died(posted)
            elif posted.job.status == WAITING and not posted.hung:
                posted.breaks = breaks
                self._scheduler.hold(posted.job, self.name)
            elif posted.job.server != self.name or not posted.job.open:
                strays.append(prompt_id)
        if not await self.server.withdraw(strays):
            raise ServerError(f"{self.name} still runs a job that another server has.")
        if self.error is not None and self._run.journal is not None:
            self._run.say(f"{self.name} is back")
        self.error = None
        if not self.leaving:
            self._scheduler.join(self.name, takes)
        if self._met:  # else it is asked once more, for jobs that came meanwhile
            self.asked = True

    async def _recognize(self) -> None:
        # A later prompt may have reached the next process before we knew of it: it proves nothing.
        oldest = [i for i, p in self._posted.items() if p.boot == self.boot][:1]
        known = {self._witness, *oldest} - {None}
        same = bool(self.listed.boot) and self.listed.boot == self.boot
        for prompt_id in [] if self.listed.boot else known:
            same = same or await self.server.has(prompt_id)
        if not same:
            self.boot = self.listed.boot or uuid.uuid4().hex
            self._uploaded.clear()
            self._witness = None
        self._witness = self._witness or await self.server.newest()

    async def _feed(self) -> None:
        next_look, breaks = 0.0, self._breaks
        while self._posted or not self.leaving:
            if not self._met:
                await self._meet()
            while self._run.all_asked and (job := self._scheduler.next(self.name)) is not None:
                await self._post(job)
            # A server that has nothing of ours is left alone.
            pause = max(0.0, next_look - time.monotonic()) if self._posted else None
            await within(self.wake.wait(), pause)
            self.wake.clear()
            await self._look_up_ended()
            # A websocket that was lost may mean that the server is.
            if self._posted and (time.monotonic() >= next_look or breaks != self._breaks):
                breaks = self._breaks
                took = await self._look()
                usual = POLL_SECONDS if self.listener.connected else POLL_SECONDS_ALONE
                next_look = time.monotonic() + max(usual, took / POLL_SHARE)

    async def _post(self, job: Job) -> None:
        local = self._run.admission.local_files(self.name, job.graph)
        attempt = Attempt(str(uuid.uuid4()), self.name, self.boot, local)
        try:
            await self._upload(job)
            if kept := self._run.journal.kept(self.name, local):
                # This package's loaders read it anew.
                graph = job.graph.items()
                others = {node: d for node, d in graph if not d["class_type"].startswith(OURS)}
                if kept & self._run.admission.local_files(self.name, others).keys():
                    await self.server.free()
            graph = renamed(job.graph, self._uploaded) if job.images else job.graph
            self._run.journal.queued(job.key, attempt)
            # Counted before: the process may end as soon as it has answered.
            self._posted[attempt.prompt_id] = Posted(job, self.boot, self._breaks)
            job.prompt_id = attempt.prompt_id
            post = self.server.submit(graph, attempt.prompt_id, self.listener.client_id)
            self._posting = asyncio.create_task(post)
            # Ctrl-C must not cut off a prompt that the server would queue after we left.
            left_out = await asyncio.shield(self._posting)
            wrong: Any = {"node_errors": left_out}
        except SettingError as error:  # of an image
            wrong = str(error)
        except AnswerError as error:
            if error.status not in (400, 413, 500):
                raise
            wrong = error.body if error.status == 400 else str(error)
        else:
            if not left_out:
                return
            await self.server.withdraw([attempt.prompt_id])
        self._refuse(job, attempt.prompt_id, of_validation(job.graph, wrong))

    async def _upload(self, job: Job) -> None:
        for name, path in job.images.items():
            if name in self._uploaded:
                continue
            try:
                self._uploaded[name] = await self.server.upload(path, name)
            except AnswerError as error:
                if error.status not in (400, 413):
                    raise
                raise SettingError(f"{path} cannot be uploaded: {error}") from error
            except OSError as error:
                raise SettingError(f"{path} cannot be read any more: {error.strerror}") from error

    def _refuse(self, job: Job, prompt_id: str, error: dict[str, Any]) -> None:
        self._posted.pop(prompt_id, None)
        self._journal("refused", job, prompt_id)
        if self._scheduler.refuse(job, self.name, error):
            self._ended(job, prompt_id)
            return
        small = "OutOfMemory" in error["type"]
        why = "has too little memory for" if small else "refuses"
        reason = "" if small else f": {error['message']}"
        self._run.say(f"{self.name} {why} {job.label}{reason}")
        self._run.wake()

    async def _look_up_ended(self) -> None:
        ended, self.listener.ended[:] = set(self.listener.ended), []
        for prompt_id, posted in list(self._posted.items()):
            if not posted.job.open:  # another server was first
                await self.server.withdraw([prompt_id])
                self._posted.pop(prompt_id, None)
            elif prompt_id in ended and (entry := await self.server.history(prompt_id)):
                self._collect(prompt_id, entry)

    async def _look(self) -> float:
        """Looks at all jobs; returns the seconds that the server took to tell its queue."""
        start, breaks = time.monotonic(), self._breaks
        queue = await self.server.queue()
        took = time.monotonic() - start
        places = []
        for prompt_id, posted in list(self._posted.items()):
            if prompt_id in queue:
                places.append(queue.places[prompt_id])
                posted.breaks = breaks
                self._check_progress(prompt_id, posted, prompt_id in queue.running)
                continue
            if entry := await self.server.history(prompt_id):
                self._collect(prompt_id, entry)
            elif posted.job.status == QUEUED and posted.job.server == self.name:
                # Counted now: the next process may have answered before the break was noticed.
                unbroken = self.listener.connected and posted.breaks == self._breaks
                known = self.listed.boot in ("", self.boot) and unbroken
                if not known and not await self._same_process():
                    raise ServerError(f"{self.name} was restarted and has forgotten its jobs.")
                message = "someone took it out of the server's queue."
                self._end(posted.job, prompt_id, CANCELLED, failure("removed", message))
        self.ahead = min(places, default=0)
        return took

    async def _same_process(self) -> bool:
        boot = self.boot
        await self._recognize()
        return boot == self.boot

    def _check_progress(self, prompt_id: str, posted: Posted, runs: bool) -> None:
        state = self.listener.running.get(prompt_id)
        progress = (runs, state and (state.node, state.value))
        posted.ran = posted.ran or runs
        if progress != posted.progress or not runs:
            posted.progress, posted.moved = progress, time.monotonic()
        silent = time.monotonic() - posted.moved
        if silent > max(HUNG_SECONDS, HUNG_TIMES * self._longest):
            posted.hung = True
            self._died(posted)
            raise ServerError(
                f"{self.name} has shown no progress of {posted.job.label} for {silent:.0f} s: see "
                "its log, and restart it."
            )

    def _collect(self, prompt_id: str, entry: dict[str, Any]) -> None:
        self._witness = prompt_id
        posted = self._posted.get(prompt_id)
        if posted is None or (posted.job.status == COLLECTING and posted.job.server == self.name):
            return
        if not self._scheduler.collect(posted.job, self.name):
            del self._posted[prompt_id]
            self._journal("late", posted.job, prompt_id)
            return
        self.wake.set()  # there is room for another
        task = asyncio.create_task(self._fetch(posted.job, prompt_id, entry))
        self._tasks.add(task)
        task.add_done_callback(self._fetched)

    def _fetched(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            self.fault = self.fault or task.exception()
        self.wake.set()

    async def _fetch(self, job: Job, prompt_id: str, entry: dict[str, Any]) -> None:
        fetched = Fetched()
        try:
            async with self._run.downloads:
                await fetch(self.server, job.graph, entry, self._run.journal.part, fetched)
            self._accept(job, prompt_id, fetched)
        except AnswerError as error:
            self._end(job, prompt_id, FAILED, failure("download", str(error)))
        except ServerError:  # it is asked again when it is back
            self._scheduler.give_back(job, self.name)
            self._run.wake()
        finally:
            fetched.discard()

    def _accept(self, job: Job, prompt_id: str, fetched: Fetched) -> None:
        # A node that blocks the rest with a message is reported on the websocket alone.
        broken = fetched.broken or self.listener.errors.pop(prompt_id, None)
        error = None if broken is None else of_execution(job.graph, broken)
        self._longest = max(self._longest, fetched.seconds or 0.0)
        if fetched.interrupted:
            message = "someone interrupted it on the server."
            self._end(job, prompt_id, CANCELLED, failure("interrupted", message))
        elif error is None:
            self._end(job, prompt_id, DONE, None, fetched)
        elif UNABLE.search(error["type"]):
            self._refuse(job, prompt_id, error)
        else:
            self._end(job, prompt_id, FAILED, error, fetched)

    def _end(
        self,
        job: Job,
        prompt_id: str,
        status: str,
        error: dict[str, Any] | None = None,
        fetched: Fetched | None = None,
    ) -> None:
        self._posted.pop(prompt_id, None)
        if not job.open:
            self._journal("late", job, prompt_id)
            return
        if fetched is not None:  # on a full disk the job stays open
            job.files = place(fetched, self._run.journal.path.parent, job.key)
            job.texts, job.seconds = fetched.texts, fetched.seconds
        self._scheduler.end(job, self.name, status, error)
        self._ended(job, prompt_id)

    def _ended(self, job: Job, prompt_id: str) -> None:
        self._posted.pop(prompt_id, None)
        job.prompt_id = prompt_id
        facts = {"seconds": job.seconds, "texts": job.texts}
        facts["files"] = [path.name for path in job.files]
        self._journal(job.status, job, prompt_id, **facts)
        self._run.job_ended(job)

    def _journal(self, event: str, job: Job, prompt_id: str, **facts: Any) -> None:
        self._run.journal.ended(
            event, job.key, prompt_id, server=self.name, boot=self.boot, **facts
        )

    def _lose(self, error: ServerError) -> None:
        back = self._scheduler.lose(self.name)
        for posted in self._posted.values():
            # The first one's turn had come; it may have taken the server down at once.
            posted.ran = posted.ran or (posted.job in back[:1] and not self.ahead)
        if self.error is None:
            gone = isinstance(error, GoneError)
            fact = f"{self.name} is gone (connection refused)." if gone else error
            jobs = f" Its jobs wait again: {len(back)}." if back else ""
            if self._run.journal is not None:
                self._run.say(f"{fact}{jobs}")
            self.away_since = time.monotonic() - error.waited
        self.error = error
        self.asked = True
        self._run.wake()

    def _died(self, posted: Posted) -> None:
        if self._scheduler.died(posted.job, self.name, posted.boot):
            where = f" Its log: {self.listed.log}." if self.listed.log else ""
            posted.job.error["message"] += where
            self._ended(posted.job, posted.job.prompt_id)

    @property
    def _breaks(self) -> int:
        # Grows with each connection that is lost, and with each websocket that is opened.
        return self.server.transport.breaks + self.listener.turns
