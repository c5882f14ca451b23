"""Decides which server runs which job, without connections, files or a clock.

A job is executed at least once and accepted exactly once: whichever server brings the first result.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

WAITING = "waiting"
QUEUED = "queued"  # a server has it
COLLECTING = "collecting"  # it ended, and its results are fetched
DONE = "done"
FAILED = "failed"
CANCELLED = "cancelled"
POISON = "poison"  # it ended `MOST_DEATHS` servers
LOST = "lost"  # the run ended without it
OPEN = (WAITING, QUEUED, COLLECTING)

# What a hundred thousand jobs and records share.
NOTHING: Mapping[str, Any] = MappingProxyType({})
# One runs and one waits, so that a server never waits for this machine.
DEPTH = 2
MOST_DEATHS = 3
# A server reloads 20 to 40 GB for jobs of other models only where so many of them wait for each
# server that has these loaded: fewer are done there before the reload ends.
WORTH_A_RELOAD = 3
# A server that refuses so many jobs of one kind, and has taken none, is offered no more of them.
MOST_REFUSALS = 3
# A server that fails so many jobs in a row while another fails none rests.
MOST_STRIKES = 3
# A job that ended so often and brought nothing is not run again, whatever was the reason.
MOST_RUNS = 3
# Results that wait to be fetched from one server; more would wait longer.
MOST_FETCHED = 4


@dataclass(eq=False, slots=True)
class Job:
    number: int
    key: str
    graph: Mapping[str, dict[str, Any]]
    settings: Mapping[str, Any] = field(default_factory=lambda: NOTHING)
    label: str = ""
    images: Mapping[str, Path] = field(default_factory=lambda: NOTHING)  # {name in the graph: file}
    loads: str = ""  # equal for jobs that share loaded models; see `workflow.loaders_key`
    prompt_id: str = ""
    server: str = ""
    status: str = WAITING
    seconds: float | None = None
    folder: Path | None = None
    names: Sequence[str] = ()  # of its files in `folder`: a hundred thousand paths would take 35 MB
    texts: Mapping[str, list[str]] = field(default_factory=lambda: NOTHING)
    error: dict[str, Any] | None = None  # see `server.failure`; None unless it failed
    deaths: frozenset[tuple[str, str]] = frozenset()  # (server, boot) that ended while they ran it
    # {server: why it does not take this job, or failed it}.
    refused: Mapping[str, dict[str, Any]] = field(default_factory=lambda: NOTHING)
    ran: int = 0
    failed: bool = False
    alone: bool = False  # whether it was given to a server while no other job was at any

    @property
    def files(self) -> list[Path]:
        return [self.folder / name for name in self.names if self.folder]

    @property
    def worn(self) -> bool:
        return self.ran + len(self.deaths) >= MOST_RUNS

    @property
    def open(self) -> bool:
        return self.status in OPEN

    def as_dict(self) -> dict[str, Any]:
        return {
            "key": self.key,
            "server": self.server or None,
            "prompt_id": self.prompt_id or None,
            "settings": dict(self.settings),
            "status": self.status,
            "seconds": self.seconds,
            "files": [str(path) for path in self.files],
            "texts": dict(self.texts),
            "error": self.error,
        }


@dataclass(eq=False, slots=True)
class Lane:
    name: str
    takes: Callable[[Job], dict[str, Any] | None] = lambda job: None  # why it cannot run a job
    held: dict[Job, None] = field(default_factory=dict)
    loads: str | None = None  # of the job that it was given last: what it has loaded, or will have
    taken: set[str] = field(default_factory=set)
    refusals: dict[str, int] = field(default_factory=dict)  # {loads: jobs that it refused}
    seen: dict[str, int] = field(default_factory=dict)  # {loads: `arrivals` of its last vain look}
    fetching: set[Job] = field(default_factory=set)
    strikes: set[Job] = field(default_factory=set)  # failed here in a row, and on no other server
    resting: bool = False

    @property
    def suspect(self) -> bool:
        return len(self.strikes) >= MOST_STRIKES

    def suits(self, job: Job) -> bool:
        return self.name not in job.refused and self.takes(job) is None


@dataclass(eq=False, slots=True)
class Group:
    # Those that wait, among others that no longer do: taking one out of the middle of a million
    # would take milliseconds.
    jobs: deque[Job] = field(default_factory=deque)
    waiting: int = 0
    arrivals: int = 0
    lanes: int = 0


class Scheduler:
    def __init__(self, jobs: Iterable[Job] = ()) -> None:
        self.lanes: dict[str, Lane] = {}
        self.ready: set[str] = set()
        self.waiting = self.open = 0
        self.alone = False  # whether a job waits until no server has another
        self._groups: dict[str, Group] = {}
        for job in jobs:
            self.add(job)

    def add(self, job: Job) -> None:
        """Takes in a job; one that has ended is left alone."""
        if job.open:
            self.open += 1
            self._wait(job)

    def join(
        self, server: str, takes: Callable[[Job], dict[str, Any] | None] | None = None
    ) -> None:
        """Admits a server: it may be given jobs from now on."""
        lane = self._lane(server)
        lane.seen.clear()
        if takes is not None:
            lane.takes = takes
        self.ready.add(server)

    def leave(self, server: str) -> None:
        """Gives a server no more jobs; the jobs that it has go on."""
        self.ready.discard(server)

    def lose(self, server: str) -> list[Job]:
        """Removes a server that is gone; returns its jobs, which wait again, before all others."""
        self.leave(server)
        lane = self._lane(server)
        self._load(lane, None)
        back = [job for job in lane.held if job.status == QUEUED and job.server == server]
        lane.held.clear()
        for job in reversed(back):
            self._wait(job, first=True)
        return back

    def next(self, server: str) -> Job | None:
        """Gives the server a job; None where it has enough, or none is for it."""
        lane = self.lanes[server]
        depth = 1 if lane.suspect else DEPTH
        if not (self.waiting and server in self.ready and len(lane.held) < depth):
            return None
        if len(lane.fetching) >= MOST_FETCHED or (lane.resting and self._others(lane)):
            return None
        if self.alone and any(each.held or each.fetching for each in self.lanes.values()):
            return None
        # The last jobs go to whoever is free first, and wait behind none.
        if lane.held and self.waiting < len(self.ready):
            return None
        for loads, group in self._order(lane):
            job = self._first(group, lane)
            if job is not None:
                self._load(lane, loads)
                self.hold(job, server)
                job.alone = self.alone
                return job
            lane.seen[loads] = group.arrivals
        return None

    def hold(self, job: Job, server: str) -> None:
        """Records that a server has the job: it was given the job, or still had it."""
        self._unwait(job)
        self._lane(server).held[job] = None
        job.status, job.server = QUEUED, server

    def collect(self, job: Job, server: str) -> bool:
        """Records that a server ended the job, and returns whether its results are wanted."""
        lane = self._lane(server)
        lane.held.pop(job, None)
        if job.open:
            self._unwait(job)
            job.status, job.server = COLLECTING, server
            lane.fetching.add(job)
        return job.open

    def give_back(self, job: Job, server: str) -> None:
        """Puts a job back that the server has not ended, or whose result it lost."""
        self._drop(job, server)
        if job.status in (QUEUED, COLLECTING) and job.server == server:
            self._wait(job, first=True)

    def refuse(self, job: Job, server: str, error: dict[str, Any]) -> bool:
        """Records that a server refuses the job; returns whether all do, so that it has ended."""
        lane = self._lane(server)
        job.refused = {**job.refused, server: error}
        if job.loads not in lane.taken:
            lane.refusals[job.loads] = lane.refusals.get(job.loads, 0) + 1
        self.give_back(job, server)
        if any(other.suits(job) for other in self.lanes.values()):
            return False
        return self.end(job, server, FAILED, error)

    def another(self, job: Job, server: str) -> bool:
        """Returns whether another server may try, once, a job that failed on this one."""
        others = (self.lanes[name] for name in self.ready - {server})
        return not (job.failed or job.worn) and any(lane.suits(job) for lane in others)

    def pass_on(self, job: Job, server: str, error: dict[str, Any]) -> None:
        """Gives a job that failed on the server to another one."""
        job.failed, job.refused = True, {**job.refused, server: error}
        self.give_back(job, server)

    def strike(self, job: Job, server: str) -> bool:
        """Counts a failure of the server, and returns whether it shall rest from now on."""
        lane = self._lane(server)
        struck = [other for other in self.lanes.values() if job in other.strikes]
        for other in struck:  # then it is the job
            other.strikes.discard(job)
        if not struck or lane in struck:
            lane.strikes.add(job)
        before = lane.resting
        lane.resting = lane.suspect and self._others(lane)
        return lane.resting and not before

    def wake(self, server: str, *, well: bool = False) -> None:
        """Gives a server that has rested one job, and as many as others once it is well."""
        lane = self._lane(server)
        lane.resting = False
        if well:
            lane.strikes.clear()

    def died(self, job: Job, server: str, boot: str) -> bool:
        """Records that the server ended in this job; returns whether the job is set aside."""
        job.deaths |= {(server, boot)}
        if len(job.deaths) < MOST_DEATHS:
            return False
        names = ", ".join(sorted({name for name, _ in job.deaths}))
        message = f"servers ended {len(job.deaths)} times while running this job ({names})."
        return self.end(job, server, POISON, {"type": "poison", "message": message, "nodes": []})

    def end(self, job: Job, server: str, status: str, error: dict[str, Any] | None = None) -> bool:
        """Records the job's result, and returns whether it is the first; others change nothing."""
        self._drop(job, server)
        if not job.open:
            return False
        self._unwait(job)
        if status == DONE:
            self._lane(server).taken.add(job.loads)
        job.status, job.error, job.server = status, error, server
        self.open -= 1
        return True

    def stranded(self) -> list[Job]:
        """Jobs that wait although no server that is ready takes them."""
        ready = [self.lanes[name] for name in self.ready]
        waiting = {job: None for group in self._groups.values() for job in group.jobs}
        return [
            job
            for job in waiting
            if job.status == WAITING and not any(lane.suits(job) for lane in ready)
        ]

    def reason(self, job: Job) -> dict[str, Any]:
        found = (job.refused.get(lane.name) or lane.takes(job) for lane in self.lanes.values())
        nobody = {"type": "refused", "message": "no server accepts the job.", "nodes": []}
        return next(filter(None, found), nobody)

    def _drop(self, job: Job, server: str) -> None:
        lane = self._lane(server)
        lane.held.pop(job, None)
        lane.fetching.discard(job)

    def _others(self, lane: Lane) -> bool:
        others = (self.lanes[name] for name in self.ready - {lane.name})
        return any(not other.strikes for other in others)

    def _lane(self, server: str) -> Lane:
        return self.lanes.setdefault(server, Lane(server))

    def _order(self, lane: Lane) -> Iterator[tuple[str, Group]]:
        """Returns what the server may load: first what it has, then what waits longest."""
        some = {
            loads: group
            for loads, group in self._groups.items()
            if group.waiting
            and lane.refusals.get(loads, 0) < MOST_REFUSALS
            and lane.seen.get(loads) != group.arrivals
        }
        if lane.loads in some:
            yield lane.loads, some.pop(lane.loads)
        by_need = sorted(some.items(), key=lambda each: -each[1].waiting / (each[1].lanes + 1))
        for loads, group in by_need:
            if lane.loads is None or group.waiting > WORTH_A_RELOAD * group.lanes:
                yield loads, group

    def _first(self, group: Group, lane: Lane) -> Job | None:
        """Takes the first job that suits the server out of the group."""
        passed = []
        found = None
        while group.jobs and found is None:
            job = group.jobs.popleft()
            if job.status != WAITING:
                continue
            if lane.suits(job):
                found = job
            else:
                passed.append(job)
        group.jobs.extendleft(reversed(passed))
        return found

    def _wait(self, job: Job, *, first: bool = False) -> None:
        job.status = WAITING
        group = self._groups.setdefault(job.loads, Group())
        (group.jobs.appendleft if first else group.jobs.append)(job)
        group.waiting += 1
        group.arrivals += 1
        self.waiting += 1

    def _unwait(self, job: Job) -> None:
        """Takes a job out of those that wait; `_first` drops its place."""
        if job.status == WAITING:
            self._groups[job.loads].waiting -= 1
            self.waiting -= 1

    def _load(self, lane: Lane, loads: str | None) -> None:
        for each, change in ((lane.loads, -1), (loads, 1)):
            if each is not None:
                self._groups[each].lanes += change
        lane.loads = loads
