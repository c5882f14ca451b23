"""Feeds one server: keeps two jobs there, fetches their results, and outlasts restarts.

What the server's queue and history say decides. A job in neither of them was taken out by someone,
or forgotten by a process that ended: `Feeder._recognize` tells which.
"""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import SettingError
from .journal import Attempt, DiskError
from .progress import Listener, RunningPrompt, within
from .results import Collector, Fetched, place
from .scheduler import (
    CANCELLED,
    COLLECTING,
    DONE,
    FAILED,
    MOST_STRIKES,
    QUEUED,
    WAITING,
    Job,
)
from .server import Server, failure, fault, of_execution, of_validation
from .servers import Admitted, Listed
from .transport import UNSET, AnswerError, AwayError, ForeignIdError, GoneError, ServerError
from .workflow import OURS, always_names, renamed, with_job_id

# Between two looks at the queue, with a websocket and without.
POLL_SECONDS, POLL_SECONDS_ALONE = 5.0, 1.0
# A look at a queue of hundreds of long graphs takes time of the server: at most this part of it.
POLL_SHARE = 0.05
# A websocket that says nothing for so long is not waited for.
SOCKET_SECONDS = 5.0
# After a server was lost, before it is tried again; doubled each time where something answers.
PAUSE_SECONDS, LONGEST_PAUSE = 1.0, 30.0
# A job that shows no progress for so long, and for so many times the longest job, hangs.
HUNG_SECONDS, HUNG_TIMES = 1800.0, 20
# A run that is stopped waits so long for the answer to a prompt on its way.
ANSWER_SECONDS = 5.0
# A server that fails jobs which others do rests so long; doubled each time.
REST_SECONDS, LONGEST_REST = 30.0, 900.0
# What a node raises where its machine is too small or too old, and another server's may not be.
UNABLE = re.compile(r"OutOfMemory|\.(Unavailable|DoesNotFit)Error$")


@dataclass
class Posted:
    job: Job
    boot: str
    breaks: int = -1  # `Feeder._breaks` when the server was last known to have it
    accepted: bool = False  # by the answer to POST /prompt
    ran: bool = False  # as far as was seen
    ended: bool = False  # and was counted
    hung: bool = False
    moved: float = field(default_factory=time.monotonic)  # when it was last seen to go on
    progress: tuple[Any, ...] = ()


class Feeder:
    """One server of a run."""

    def __init__(self, listed: Listed, run: Any) -> None:  # a `run.Run`, which imports this
        self.listed = listed
        self.name = str(listed.address)
        # Which process it is: the id in the fleet's file, or one that is made when the server is
        # first met and after each restart.
        self.boot = listed.boot or uuid.uuid4().hex
        self.admitted: Admitted = UNSET
        self.ahead = 0  # prompts of others before the first of ours; 0 while one of ours runs
        self.error: ServerError | None = None
        self.away_since = 0.0
        self.asked = False  # whether it has said what it has, or was lost
        self.leaving = False
        self.wake = asyncio.Event()
        self.server = Server(listed.address, headers=run.headers, wait=run.wait, notify=run.say)
        self.listener = Listener(self.server, changed=self.wake.set, notify=run.say)
        self._run = run
        self._scheduler = run.scheduler
        self.posted: dict[str, Posted] = {}
        self._witness: str | None = None  # a prompt in the history of the process we know
        self._uploaded: dict[str, str] = {}  # {what graphs call an image: what the server does}
        self._posting: asyncio.Task[Any] | None = None
        self._collector = Collector(self.server, run.most, run.downloads)
        self._collecting: set[asyncio.Task[None]] = set()
        self._longest = 0.0  # seconds that a job took
        self._rest = 0.0
        self.task: asyncio.Task[None] = UNSET  # of `go`
        self._doubts = 0  # prompts in a row that were answered wrongly: the server stays away
        self._unanswered = False  # the last prompt, by a server that answers all else
        self._met = False

    @property
    def here(self) -> bool:
        return self.error is None and not self.leaving

    @property
    def busy(self) -> bool:
        return self.error is None and bool(self.posted)

    def follow(self, posted: Iterable[tuple[Attempt, Job]]) -> None:
        """Takes in jobs that earlier runs posted to this server."""
        for attempt, job in posted:
            self.posted[attempt.prompt_id] = Posted(job, attempt.boot)
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
        """Feeds the server until it leaves, or is cancelled; raises DiskError alone."""
        listening = asyncio.create_task(self.listener.listen())
        try:
            await within(self.listener.tried.wait(), SOCKET_SECONDS)
            pause = PAUSE_SECONDS
            while True:
                try:
                    await self._meet()
                    pause = pause if self._doubts else PAUSE_SECONDS
                    await self._feed()
                    return
                except DiskError:
                    raise
                except Exception as error:
                    self._lose(fault(self.name, error))
                    if self.leaving:
                        return
                    await asyncio.sleep(pause)
                    gone = isinstance(error, GoneError)
                    pause = PAUSE_SECONDS if gone else min(2 * pause, LONGEST_PAUSE)
        finally:
            self._scheduler.leave(self.name)
            for task in (listening, *self._collecting):
                task.cancel()
            await asyncio.gather(listening, *self._collecting, return_exceptions=True)
            for posted in self.posted.values():
                if posted.job.status == COLLECTING:  # nobody fetches it any more
                    self._scheduler.give_back(posted.job, self.name)
                    self._run.wake()

    async def stop(self) -> bool:
        """Takes our jobs off the server, as `Server.withdraw` does, and gives it no more."""
        self._scheduler.leave(self.name)
        if self._posting is not None:
            await asyncio.wait({self._posting}, timeout=ANSWER_SECONDS)
            self._posting.cancel()
            await asyncio.gather(self._posting, return_exceptions=True)
        return await self.server.withdraw(list(self.posted))

    def running(self) -> tuple[Job, RunningPrompt] | None:
        here = self.listener.running.keys() & self.posted.keys()
        return next(((self.posted[i].job, self.listener.running[i]) for i in here), None)

    async def _meet(self) -> None:
        self._met = True
        self.admitted = await self._run.admission.admit(self.name, self.server)
        await self._recognize()
        await self._look(anew=True)
        if self.error is not None and not self._doubts:
            if self._run.journal is not None:
                self._run.say(f"{self.name} is back")
            self.error = None
        if not self.leaving:
            self._scheduler.join(self.name, self.admitted.takes)
        if self._met:  # else it is asked once more, for jobs that came meanwhile
            self.asked = True

    async def _recognize(self) -> None:
        # A later prompt may have reached the next process before we knew of it: it proves nothing.
        oldest = [i for i, p in self.posted.items() if p.boot == self.boot][:1]
        known = {it for it in (self._witness, *oldest) if it is not None}
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
        while self.posted or not self.leaving:
            if not self._met:
                await self._meet()
            while self._run.all_asked and (job := self._scheduler.next(self.name)) is not None:
                await self._post(job)
            # A server that has nothing of ours is left alone.
            pause = max(0.0, next_look - time.monotonic()) if self.posted else None
            await within(self.wake.wait(), pause)
            self.wake.clear()
            ended, self.listener.ended[:] = list(self.listener.ended), []
            for prompt_id in filter(self.posted.__contains__, ended):
                if entry := await self.server.history(prompt_id):
                    self._collect(prompt_id, entry)
            # A websocket that was lost may mean that the server is.
            due = time.monotonic() >= next_look or breaks != self._breaks
            if (due and self.posted) or not all(each.job.open for each in self.posted.values()):
                breaks = self._breaks
                took = await self._look()
                usual = POLL_SECONDS if self.listener.connected else POLL_SECONDS_ALONE
                next_look = time.monotonic() + max(usual, took / POLL_SHARE)

    async def _post(self, job: Job) -> None:
        local = self.admitted.local_files(job.graph)
        attempt = Attempt(str(uuid.uuid4()), self.name, self.boot, local)
        try:
            await self._upload(job)
            if kept := self._run.journal.kept(self.name, local):
                # This package's loaders read it anew.
                nodes = job.graph.items()
                others = {node: d for node, d in nodes if not d["class_type"].startswith(OURS)}
                if kept & self.admitted.local_files(others).keys():
                    await self.server.free()
            graph = renamed(job.graph, self._uploaded) if job.images else job.graph
            fresh = attempt.prompt_id if job.alone else ""
            graph = with_job_id(graph, self.admitted.info, job.key, job.ran, fresh)
            self._run.journal.queued(job.key, attempt)
            # Counted before: the process may end as soon as it has answered.
            self.posted[attempt.prompt_id] = Posted(job, self.boot, self._breaks)
            job.prompt_id = attempt.prompt_id
            post = self.server.submit(graph, attempt.prompt_id, self.listener.client_id)
            self._posting = asyncio.create_task(post)
            # Ctrl-C must not cut off a prompt that the server would queue after we left.
            left_out = await asyncio.shield(self._posting)
            self.posted[attempt.prompt_id].accepted = True
            self._doubts, self._unanswered, self.error = 0, False, None
            wrong: Any = {"node_errors": left_out}
        except SettingError as error:  # of an image
            wrong = str(error)
        except AnswerError as error:
            if error.status not in (400, 413, 500):
                self._doubts += 1
                raise
            wrong = error.body if error.status == 400 else str(error)
        except ServerError as error:
            self._doubts += self._unanswered or not isinstance(error, AwayError)
            self._unanswered = True
            foreign = isinstance(error, ForeignIdError)  # it runs there, and nobody can ask for it
            job.ran += foreign
            if not (foreign and job.worn):
                raise
            self._end(job, attempt.prompt_id, FAILED, failure("refused", str(error)))
            return
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

    def _refuse(
        self, job: Job, prompt_id: str, error: dict[str, Any], *, ran: bool = False
    ) -> None:
        """Leaves a job that the server does not take, or failed while it `ran`, to another."""
        self.posted.pop(prompt_id, None)
        self._journal("refused", job, prompt_id)
        words = f": {error['message']}"
        if ran:
            self._scheduler.pass_on(job, self.name, error)
            words = f"failed {job.label}, and another server tries it{words}"
        elif self._scheduler.refuse(job, self.name, error):
            self._ended(job, prompt_id)
            return
        elif "OutOfMemory" in error["type"]:
            words = f"has too little memory for {job.label}"
        else:
            words = f"refuses {job.label}{words}"
        self._run.say(f"{self.name} {words}")
        self._run.wake()

    async def _look(self, *, anew: bool = False) -> float:
        """Looks at all jobs, and returns the seconds that the server took to tell its queue."""
        start, breaks = time.monotonic(), self._breaks
        queue = await self.server.queue()
        took = time.monotonic() - start
        places, strays = [], []
        for prompt_id, posted in list(self.posted.items()):
            job, here = posted.job, prompt_id in queue
            entry = None if here else await self.server.history(prompt_id)
            if prompt_id not in self.posted:  # it ended meanwhile
                continue
            if entry:
                self._collect(prompt_id, entry)
            elif not here and anew:
                del self.posted[prompt_id]
                if posted.ran and posted.boot != self.boot:
                    self._died(posted)
            elif not job.open or (anew and job.server != self.name and job.status != WAITING):
                strays.append(prompt_id)  # another server was first, or has it
            elif here and anew and job.status == WAITING and not posted.hung:
                posted.breaks = breaks
                self._scheduler.hold(job, self.name)
            elif here:
                places.append(queue.places[prompt_id])
                posted.breaks = breaks
                self._check_progress(prompt_id, posted, prompt_id in queue.running)
            elif job.status == QUEUED and job.server == self.name:
                # Counted now: the next process may have answered before the break was noticed.
                unbroken = self.listener.connected and posted.breaks == self._breaks
                boot = self.boot
                if not (unbroken and self.listed.boot in ("", boot)):
                    await self._recognize()
                if boot != self.boot:
                    raise ServerError(f"{self.name} was restarted and has forgotten its jobs.")
                message = "someone removed the job from the server's queue."
                self._end(job, prompt_id, CANCELLED, failure("removed", message))
        if not await self.server.withdraw(strays) and anew:
            raise ServerError(f"{self.name} still runs a job that another server has taken over.")
        for prompt_id in strays:
            if (stray := self.posted.pop(prompt_id, None)) is not None:
                self._scheduler.give_back(stray.job, self.name)
        self.ahead = min(places, default=0)
        return took

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
                "the server's log, and restart the server."
            )

    def _collect(self, prompt_id: str, entry: dict[str, Any]) -> None:
        self._witness = prompt_id
        posted = self.posted.get(prompt_id)
        if posted is None or (posted.job.status == COLLECTING and posted.job.server == self.name):
            return
        posted.job.ran += not posted.ended
        posted.ended = True
        if not self._scheduler.collect(posted.job, self.name):
            del self.posted[prompt_id]
            self._journal("late", posted.job, prompt_id)
            return
        self.wake.set()  # there is room for another
        task = self._run.watch(self._bring(posted.job, prompt_id, entry))
        self._collecting.add(task)
        task.add_done_callback(self._collecting.discard)
        task.add_done_callback(lambda _: self.wake.set())

    async def _bring(self, job: Job, prompt_id: str, entry: Mapping[str, Any]) -> None:
        def late(why: ServerError) -> None:
            self._run.say(f"{job.label} is done, but its result could not be fetched yet: {why}")
            self._strike(job)

        collect = self._collector.collect
        found = await collect(job, prompt_id, entry, self._run.journal, late)
        if isinstance(found, Fetched):
            try:
                self._accept(job, prompt_id, found)
            finally:
                found.discard()
        elif found.last or job.worn:
            message = f"{found.fault} Tried {found.tries} times: continue with --resume."
            self._end(job, prompt_id, FAILED, failure("download", message), kept=True)
        else:
            if found.lost:
                self._run.say(f"{self.name} has lost the result of {job.label}: the job runs again")
            self._give_back(job, prompt_id if found.lost else "")

    def _give_back(self, job: Job, dropped: str = "") -> None:
        """Lets the job run again, without the result of the prompt that is `dropped`."""
        if dropped:
            self.posted.pop(dropped, None)
            self._journal("late", job, dropped)
        self._scheduler.give_back(job, self.name)
        self._run.wake()

    def _accept(self, job: Job, prompt_id: str, fetched: Fetched) -> None:
        if not job.open:  # another server was first, and nothing was fetched
            self._end(job, prompt_id, CANCELLED)
            return
        # A node that blocks the rest with a message is reported on the websocket alone.
        told = self.listener.errors.pop(prompt_id, None)
        error = fetched.error or (of_execution(job.graph, told) if told else None)
        self._longest = max(self._longest, fetched.seconds or 0.0)
        if fetched.interrupted:
            message = "someone interrupted the job on the server."
            self._end(job, prompt_id, CANCELLED, failure("interrupted", message))
            return
        if fetched.doubtful:
            self._scheduler.alone = True
            self._run.say_once(
                "a node of these jobs chooses its own file names: to keep each file with its job, "
                "the jobs run one at a time, and the first ones run once more"
            )
            self._give_back(job, prompt_id)
            return
        if error is None and not fetched.parts:
            if saver := always_names(job.graph, self.admitted.info):
                message = f"{saver} reported no file on {self.name}: see the server's log."
                error = failure("no output", message)
            elif not fetched.texts:
                self._run.say_once(
                    "the output nodes of these jobs report no files, such as nodes that save "
                    "models or send images by websocket: their results stay on the servers"
                )
        if error is None:
            self._rest = 0.0
            self._scheduler.wake(self.name, well=True)
            self._end(job, prompt_id, DONE, None, fetched)
        elif UNABLE.search(error["type"]):
            self._refuse(job, prompt_id, error)
        else:
            self._strike(job)
            if self._scheduler.another(job, self.name):
                self._refuse(job, prompt_id, error, ran=True)
            else:
                self._end(job, prompt_id, FAILED, error, fetched)

    def _strike(self, job: Job) -> None:
        if self._scheduler.strike(job, self.name):
            self._rest = min(max(REST_SECONDS, 2 * self._rest), LONGEST_REST)
            self._run.say(
                f"{self.name} failed {MOST_STRIKES} jobs in a row, and other servers failed "
                f"none: it pauses for {self._rest:g} s, then gets one job. See its log, or "
                "restart it."
            )
            asyncio.get_running_loop().call_later(self._rest, self._rested)

    def _rested(self) -> None:
        self._scheduler.wake(self.name)
        self.wake.set()

    def _end(
        self,
        job: Job,
        prompt_id: str,
        status: str,
        error: dict[str, Any] | None = None,
        fetched: Fetched | None = None,
        *,
        kept: bool = False,
    ) -> None:
        posted = self.posted.pop(prompt_id, None)
        if not job.open:
            self._scheduler.give_back(job, self.name)
            if posted is not None:  # else it was noted while the download still ran
                self._journal("late", job, prompt_id)
            return
        parts = fetched.parts if fetched is not None else []

        def told(paths: list[Path]) -> None:
            facts = {"files": [path.name for path in paths], "kept": kept}
            facts |= {"sizes": [part.size for part in parts]}
            facts |= {"hashes": [part.sha256 for part in parts]}
            self._journal(status, job, prompt_id, seconds=job.seconds, texts=job.texts, **facts)

        if fetched is not None:
            job.texts, job.seconds = fetched.texts, fetched.seconds
        # On a full disk the job stays open.
        job.folder = self._run.journal.path.parent
        job.names = [path.name for path in place(parts, job.folder, job.key, told)]
        self._scheduler.end(job, self.name, status, error)
        job.prompt_id = prompt_id
        self._run.job_ended(job)

    def _ended(self, job: Job, prompt_id: str) -> None:
        self.posted.pop(prompt_id, None)
        job.prompt_id = prompt_id
        self._journal(job.status, job, prompt_id)
        self._run.job_ended(job)

    def _journal(self, event: str, job: Job, prompt_id: str, **facts: Any) -> None:
        self._run.journal.ended(
            event, job.key, prompt_id, server=self.name, boot=self.boot, **facts
        )

    def _lose(self, error: ServerError) -> None:
        back = self._scheduler.lose(self.name)
        for posted in self.posted.values():
            # The first one's turn had come; it may have taken the server down at once.
            first = posted.job in back[:1] and not self.ahead
            posted.ran = posted.ran or (posted.accepted and first)
        if self.error is None:
            gone = type(error) is GoneError
            fact = f"{self.name} is gone (connection refused)." if gone else error
            jobs = f" Its jobs go to other servers or wait: {len(back)}." if back else ""
            if self._run.journal is not None:
                self._run.say(f"{fact}{jobs}")
            self.away_since = time.monotonic() - getattr(error, "waited", 0.0)
        self.error = error
        self.asked = True
        self._run.wake()

    def _died(self, posted: Posted) -> None:
        if self._scheduler.died(posted.job, self.name, posted.boot):
            where = f" Its log: {self.listed.log}." if self.listed.log else ""
            error: Any = posted.job.error
            error["message"] += where
            self._ended(posted.job, posted.job.prompt_id)

    @property
    def _breaks(self) -> int:
        # Grows with each connection that is lost, and with each websocket that is opened.
        return self.server.breaks + self.listener.turns
