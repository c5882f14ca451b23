"""Runs jobs on servers that come and go, from the first question to the last result."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any

from ..errors import SettingError
from .feeder import Feeder
from .journal import Attempt, Journal
from .progress import Progress, within
from .scheduler import CANCELLED, DONE, FAILED, Job, Scheduler
from .servers import Admission, Listed, ServerList, Takes
from .transport import UNSET, GoneError, ServerError
from .workflow import title

# How long a server may be away before its jobs go to others, and all before the run ends.
WAIT_SECONDS = 60.0
# Between two looks at the file of servers and at how far the jobs are.
TICK_SECONDS = 0.1
# How long all servers of a fleet's file may be away: it starts them again, and loads models.
RESTART_SECONDS = 600.0
# So many times longer is waited for one that is there and silent, as while it loads a large model.
SILENT_TIMES = 10
STOP_SECONDS = 15.0
# Results that are fetched at once.
DOWNLOADS = 16
# Bytes of the largest file that is taken.
MOST_BYTES = 4e9


class Run:
    """The feeders of a run, one for each server, and what they share."""

    def __init__(
        self,
        servers: ServerList,
        *,
        progress: Progress,
        wait: float = WAIT_SECONDS,
        most: float = MOST_BYTES,
        ended: Callable[[Job], None] = lambda job: None,
    ) -> None:
        self.scheduler = Scheduler()
        self.journal: Journal = UNSET
        self.headers = servers.headers
        self.admission = Admission(progress.say)
        self.say = progress.say
        self.wait, self.most = wait, most
        self.downloads = asyncio.Semaphore(DOWNLOADS)
        self.all_asked = False  # whether every server was asked for the jobs of earlier runs
        self.feeders: dict[str, Feeder] = {}
        self._servers = servers
        self._progress = progress
        self._patience = wait if servers.file is None else max(wait, RESTART_SECONDS)
        self._ended = ended
        self._changed = asyncio.Event()
        self._fault: BaseException | None = None
        self._sessions = contextlib.AsyncExitStack()
        self._posted: dict[str, list[tuple[Attempt, Job]]] = {}
        self._said: set[str] = set()
        self._counts = {"total": 0, "done": 0, "failed": 0}
        self._alone_since: float | None = None
        self._stranded_since: float | None = None

    async def __aenter__(self) -> Run:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._end_tasks()
        await self._sessions.aclose()

    def begin(
        self, journal: Journal, jobs: list[Job], workflow: str, *, again: bool = False
    ) -> None:
        """Takes in jobs and what the journal knows of them; `again` runs also those done."""
        self.journal = journal
        journal.begin(workflow, list(self.feeders))
        for job in jobs if again else ():
            self._forget(job)
        self._take(jobs)
        done = sum(job.status == DONE for job in jobs)
        there = sum(map(len, self._posted.values()))
        if done or there:
            self.say(
                f"an earlier run left {self.journal.path}: {done} of {len(jobs)} jobs are done, "
                f"{there} may still be on a server"
            )
        unknown = [name for name in self._posted if name not in self.feeders]
        if unknown and not self._servers.file:
            self.say(
                f"no longer among the servers: {', '.join(sorted(unknown))}; its jobs run again"
            )
        self._hand_over()
        self._progress.begin(len(jobs), done=done)

    def add(self, jobs: Iterable[Job]) -> None:
        """Takes in jobs; those done by the journal have results, unless a model was replaced."""
        self._take(jobs)
        self._hand_over()

    def _take(self, jobs: Iterable[Job]) -> None:
        journal = self.journal
        replaced: Counter[str] = Counter()
        for job in jobs:
            self._counts["total"] += 1
            if changed := journal.changed(job.key):
                replaced.update(changed)
                self._forget(job)
            record = journal.finished(job.key)
            if record is not None:
                job.status, job.prompt_id, job.server = DONE, record.prompt_id, record.server
                job.seconds, job.texts = record.seconds, record.texts
                job.folder, job.names = journal.path.parent, record.files
                self._counts["done"] += 1
            else:
                for attempt in journal.attempts(job.key):
                    self._posted.setdefault(attempt.server, []).append((attempt, job))
            self.scheduler.add(job)
        for path, count in replaced.items():
            self.say(f"{path} was replaced since an earlier run; {count} jobs run again")

    def _hand_over(self) -> None:
        for name in self._posted.keys() & self.feeders.keys():
            self.feeders[name].follow(self._posted.pop(name))
        self.wake()

    def _forget(self, job: Job) -> None:
        for attempt in self.journal.forget(job.key):
            stray = dataclasses.replace(job, status=CANCELLED)  # which its server withdraws
            self._posted.setdefault(attempt.server, []).append((attempt, stray))

    async def reach(self, listed: list[Listed] | None, wait: float) -> dict[str, Takes]:
        """Waits for a server; returns {server: why it refuses a job}, or raises ServerError."""
        give_up = time.monotonic() + wait
        while True:
            for each in listed or ():
                await self.start(each)
            feeders = self.feeders.values()
            errors = [feeder.error for feeder in feeders if feeder.error]
            if self.scheduler.ready and all(feeder.asked for feeder in feeders):
                for error in errors:
                    self.say(str(error))
                ready = self.scheduler.ready
                return {n: each.admitted.takes for n, each in self.feeders.items() if n in ready}
            if len(errors) == len(feeders):
                gone = all(isinstance(error, GoneError) for error in errors)
                if time.monotonic() >= give_up or not gone:
                    raise next(iter(errors), None) or ServerError(
                        f"no server of {self._servers.file} is ready: start qwen-l40s fleet, or "
                        "wait for one with --wait SECONDS."
                    )
                names = ", ".join(self.feeders) or self._servers.file
                self.say_once(f"waiting up to {wait:g} s for {names}")
            await self._tick()
            listed = self._servers.changed()

    async def go(self, more: Callable[[], bool] = lambda: False) -> None:
        """Returns when no job is open or comes; raises ServerError or DiskError."""
        # A job counts once the journal has it: until then a full disk may still be reported.
        while self._counts["done"] < self._counts["total"] or more():
            if not self.all_asked and all(each.asked for each in self.feeders.values()):
                self.all_asked = True
                self.wake()
            await self._update()
            self._check_stalled()
            self._show()
            if self.journal.unsynced:
                await asyncio.to_thread(self.journal.sync)
            await self._tick()

    async def _tick(self) -> None:
        """Waits until something has changed, but not for long."""
        await within(self._changed.wait(), TICK_SECONDS)
        self._changed.clear()
        if self._fault is not None:
            raise self._fault

    def watch(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs it beside the others; what it raises ends the run."""

        def ended(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and task.exception() is not None:
                self._fault = self._fault or task.exception()
                self._changed.set()

        task = asyncio.create_task(work)
        task.add_done_callback(ended)
        return task

    async def _end_tasks(self) -> None:
        tasks = [feeder.task for feeder in self.feeders.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def stop(self) -> bool:
        """Takes the open jobs off all servers; says whether no server has one any more."""
        await self._end_tasks()
        here = [feeder for feeder in self.feeders.values() if feeder.error is None]
        if not here:
            return True
        stops = [asyncio.create_task(feeder.stop()) for feeder in here]
        _, late = await asyncio.wait(stops, timeout=STOP_SECONDS)
        for task in late:
            task.cancel()
        return all(each is True for each in await asyncio.gather(*stops, return_exceptions=True))

    def say_once(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            self.say(line)

    def wake(self) -> None:
        """Makes every server look for jobs, and `go` for what changed."""
        self._changed.set()
        for feeder in self.feeders.values():
            feeder.wake.set()

    async def start(self, listed: Listed) -> None:
        """Takes in a server, or what is new about one."""
        name = str(listed.address)
        feeder = self.feeders.get(name) or Feeder(listed, self)
        feeder.listed = listed
        feeder.stay()
        if feeder.task is None:
            await self._sessions.enter_async_context(feeder.server)
        if feeder.task is None or feeder.task.done():
            feeder.follow(self._posted.pop(name, []))
            feeder.task = self.watch(feeder.go())
            self.feeders[name] = feeder

    async def _update(self) -> None:
        listed = self._servers.changed()
        if listed is None:
            return
        for each in listed:
            name = str(each.address)
            if name not in self.feeders or self.feeders[name].leaving:
                self.say(f"{name} gets jobs from now on")
            await self.start(each)
        names = {str(each.address) for each in listed}
        for name, feeder in self.feeders.items():
            if name not in names and not feeder.leaving:
                feeder.leaving = True
                self.scheduler.leave(name)
                self.say(f"{name} gets no more jobs")

    def _check_stalled(self) -> None:
        """Ends the run where no server is left, and jobs that no server takes."""
        feeders = list(self.feeders.values())
        here = [feeder for feeder in feeders if feeder.here]
        now = time.monotonic()
        if here or any(feeder.busy for feeder in feeders) or not self.scheduler.open:
            self._alone_since = None
        else:
            errors = {feeder.away_since: feeder.error for feeder in feeders if feeder.error}
            silent = any(getattr(error, "silent", False) for error in errors.values())
            patience = max(self._patience, SILENT_TIMES * self.wait * silent)
            if self._alone_since is None:
                self._alone_since = now
                self.say(f"no server is left: waiting up to {patience:g} s for one")
            if now - min(self._alone_since, max(errors, default=now)) >= patience:
                reason = errors[max(errors)] if errors else "the list of servers is empty."
                raise ServerError(f"no server for {patience:g} s: {reason}")
        held = any(lane.held for lane in self.scheduler.lanes.values())
        if held or not (here and self.scheduler.waiting and self.all_asked):
            self._stranded_since = None
            return
        self._stranded_since = self._stranded_since or now
        away = len(here) < len(feeders) or self._servers.file is not None
        if now - self._stranded_since >= (self.wait if away else 0):
            for job in self.scheduler.stranded():
                error = self.scheduler.reason(job)
                self.scheduler.end(job, "", FAILED, error)
                self.job_ended(job)

    def job_ended(self, job: Job) -> None:
        self._counts["done"] += 1
        self._counts["failed"] += job.status != DONE
        self._ended(job)
        if self.scheduler.alone:
            self.wake()
        self._changed.set()

    def _show(self) -> None:
        running = [found for feeder in self.feeders.values() if (found := feeder.running())]
        ahead = min((f.ahead for f in self.feeders.values() if f.here), default=0)
        self._progress.show(**self._counts, ahead=0 if running else ahead)
        for job, state in running[-1:]:
            if state.node is not None:
                name = title(job.graph, state.node)
                place = f"{min(len(state.finished) + 1, len(job.graph))}/{len(job.graph)}"
                self._progress.node(job.label, name, state.value, state.maximum, place)


def check_jobs(jobs: Sequence[Job], takes: Mapping[str, Takes]) -> list[str]:
    """Names servers that cannot run the first job; raises SettingError for a job of none."""
    for job in jobs:
        if all(why(job) for why in takes.values()):
            refuse: Any = next(iter(takes.values()))
            raise SettingError(refuse(job)["message"])
    first = {name: why(job) for name, why in takes.items() for job in jobs[:1]}
    return [
        f"{name} can run none of these jobs: {why['message']}" for name, why in first.items() if why
    ]
