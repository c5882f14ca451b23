"""Which server gets which job: rules, any order of events, and a thousand servers for a night."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from qwen_l40s.client.journal import Attempt, Journal
from qwen_l40s.client.scheduler import (
    COLLECTING,
    DEPTH,
    DONE,
    FAILED,
    MOST_DEATHS,
    MOST_REFUSALS,
    POISON,
    QUEUED,
    WAITING,
    WORTH_A_RELOAD,
    Job,
    Scheduler,
)

FATES = ["done", "failed", "refuse", "died", "unfetched", "broke"]
NO = {"type": "refused", "message": "no", "nodes": []}


def jobs(count: int, loads: str = "a") -> list[Job]:
    return [Job(number, f"{loads}{number}", {}, loads=loads) for number in range(1, count + 1)]


def scheduler(*groups: list[Job], servers: str = "AB") -> Scheduler:
    made = Scheduler([job for group in groups for job in group])
    for server in servers:
        made.join(server)
    return made


def numbers(made: Scheduler, server: str, count: int) -> list[str | None]:
    """Gives a server jobs, each ended before the next; returns their keys."""
    found = []
    for _ in range(count):
        job = made.next(server)
        found.append(job and job.key)
        if job is not None:
            made.end(job, server, DONE)
    return found


def test_one_server_gets_the_jobs_in_order_and_two_at_once():
    made = scheduler(jobs(4), servers="A")
    assert [made.next("A").number, made.next("A").number, made.next("A")] == [1, 2, None]
    made.end(next(iter(made.lanes["A"].held)), "A", DONE)
    assert made.next("A").number == 3


def test_the_last_jobs_wait_behind_none():
    made = scheduler(jobs(4), servers="ABC")
    assert [made.next(server).number for server in "ABC"] == [1, 2, 3]
    assert made.next("A") is None  # the last one is for whoever is free first
    made.end(next(iter(made.lanes["B"].held)), "B", DONE)
    assert made.next("B").number == 4


def test_a_server_keeps_to_what_it_has_loaded():
    made = scheduler(jobs(6, "a"), jobs(6, "b"))
    assert {made.next("A").loads, made.next("B").loads} == {"a", "b"}
    made = scheduler(jobs(3, "a"), jobs(3, "b"), servers="A")
    assert numbers(made, "A", 7) == [*("a1", "a2", "a3", "b1", "b2", "b3"), None]


def test_another_server_reloads_only_where_many_jobs_wait():
    for left, reloads in ((WORTH_A_RELOAD, False), (WORTH_A_RELOAD + 1, True)):
        made = scheduler(jobs(1, "b"), servers="B")
        assert numbers(made, "B", 2) == ["b1", None]
        made.join("A")
        for job in jobs(left + 1, "a"):
            made.add(job)
        made.next("A")
        assert (made.next("B") is not None) is reloads


def test_jobs_of_a_lost_server_go_first_and_the_first_result_wins():
    made = scheduler(jobs(5), servers="A")
    one, two = made.next("A"), made.next("A")
    assert made.lose("A") == [one, two]
    made.join("B")
    assert [made.next("B"), made.next("B")] == [one, two]
    assert made.collect(one, "A")  # it comes back with the old result
    assert made.end(one, "A", DONE)
    assert not made.end(one, "B", DONE)
    assert (one.server, one.status, made.open) == ("A", DONE, 4)
    assert one not in made.lanes["B"].held


def test_a_result_that_cannot_be_fetched_gives_the_job_back_once():
    made = scheduler(jobs(1), servers="AB")
    job = made.next("A")
    made.lose("A")
    assert made.next("B") is job
    made.collect(job, "A")
    made.give_back(job, "B")  # A's result may still come
    assert (job.status, made.waiting) == (COLLECTING, 0)
    made.give_back(job, "A")
    assert (job.status, made.waiting) == (WAITING, 1)


def test_a_job_that_one_server_refuses_goes_to_another_and_fails_where_all_do():
    made = scheduler(jobs(1))
    job = made.next("A")
    assert not made.refuse(job, "A", NO)
    assert made.next("A") is None
    assert made.next("B") is job
    assert made.refuse(job, "B", NO)
    assert (job.status, job.error, made.open) == (FAILED, NO, 0)


def test_a_server_that_refuses_a_kind_of_jobs_is_spared_the_rest():
    made = scheduler(jobs(100))
    for _ in range(MOST_REFUSALS):
        made.refuse(made.next("A"), "A", NO)
    assert made.next("A") is None
    assert made.next("B").number <= MOST_REFUSALS
    made = scheduler(jobs(100))
    made.end(made.next("A"), "A", DONE)  # it has done one: the next are to blame themselves
    for _ in range(MOST_REFUSALS):
        made.refuse(made.next("A"), "A", NO)
    assert made.next("A") is not None


def test_a_server_gets_only_what_fits_it():
    made = scheduler(jobs(2, "big"), jobs(2, "small"), servers="")
    made.join("A", lambda job: NO if job.loads == "big" else None)
    made.join("B")
    assert numbers(made, "A", 3) == ["small1", "small2", None]
    assert made.stranded() == []
    made.leave("B")
    assert [job.key for job in made.stranded()] == ["big1", "big2"]
    assert made.reason(made.stranded()[0]) == NO


def test_a_job_that_ends_servers_is_set_aside():
    made = scheduler(jobs(1), servers="ABC")
    for count, server in enumerate("ABC", start=1):
        job = made.next(server)
        made.lose(server)
        assert made.died(job, server, "boot") is (count == MOST_DEATHS)
    assert (job.status, made.open, made.waiting) == (POISON, 0, 0)
    assert "ended 3 times while running this job (A, B, C)" in job.error["message"]


def fail(made: Scheduler, job: Job, server: str) -> bool:
    """The job fails while it runs; returns whether the server shall rest."""
    made.collect(job, server)
    rests = made.strike(job, server)
    if made.another(job, server):
        made.pass_on(job, server, NO)
    else:
        made.end(job, server, FAILED, NO)
    return rests


def test_a_job_that_fails_is_tried_once_more_and_only_elsewhere():
    made = scheduler(jobs(1), servers="ABC")
    job = made.next("A")
    fail(made, job, "A")
    assert made.next("A") is None
    assert made.next("B") is job
    fail(made, job, "B")
    assert (job.status, made.next("C")) == (FAILED, None)
    alone = scheduler(jobs(1), servers="A")
    fail(alone, job := alone.next("A"), "A")
    assert job.status == FAILED


def test_jobs_that_fail_on_two_servers_are_at_fault_and_no_server_is():
    made = scheduler(jobs(6), servers="AB")
    for _ in range(6):
        job = made.next("A")
        fail(made, job, "A")
        assert made.next("B") is job
        assert not fail(made, job, "B")
    assert not made.lanes["A"].strikes and not made.lanes["B"].strikes


@pytest.mark.parametrize("healthy", [1, 7])
def test_beside_a_server_that_fails_at_once_no_other_waits_and_no_job_fails(healthy: int):
    todo = jobs(200)
    made = scheduler(todo, servers="")
    names = ["sick", *(f"well {number}" for number in range(healthy))]
    for name in names:
        made.join(name)
    events, failures, rest = [(0.0, name, None) for name in names], 0, 30.0
    running: dict[str, Job | None] = dict.fromkeys(names)
    while made.open:
        now, name, job = heapq.heappop(events)
        if job is not None:
            running[name] = None
            if name == "sick":
                failures += 1
                if fail(made, job, name):
                    heapq.heappush(events, (now + rest, name, None))
                    rest *= 2
            else:
                made.end(job, name, DONE)
        elif now:
            made.wake(name)
        for each in names:
            while made.next(each) is not None:
                pass
            if running[each] is None and (held := made.lanes[each].held):
                running[each] = job = next(iter(held))
                seconds = 0.1 if each == "sick" else 10.0 + job.number / 1000
                heapq.heappush(events, (now + seconds, each, job))
            assert each == "sick" or running[each] or not made.waiting
    assert {job.status for job in todo} == {DONE}
    assert failures < 16


class AnyOrder(RuleBasedStateMachine):
    """Servers come, refuse, die and return in any order; a model of what each of them has."""

    def __init__(self) -> None:
        super().__init__()
        self.jobs = [*jobs(8, "a"), *jobs(4, "b")]
        self.scheduler = Scheduler(self.jobs)
        self.at: dict[str, set[Job]] = {name: set() for name in "ABC"}  # what each really has
        self.accepted: Counter[Job] = Counter()
        self.up: set[str] = set()

    servers = st.sampled_from("ABC")

    @rule(server=servers)
    def come(self, server: str) -> None:
        if server not in self.up:
            self.up.add(server)
            self.scheduler.join(server)
            for job in self.at[server]:
                if job.status == WAITING:
                    self.scheduler.hold(job, server)

    @rule(server=servers)
    def go(self, server: str) -> None:
        self.up.discard(server)
        self.scheduler.lose(server)

    @rule(server=servers)
    def take(self, server: str) -> None:
        if server in self.up and (job := self.scheduler.next(server)) is not None:
            self.at[server].add(job)

    @precondition(lambda self: any(self.at.values()))
    @rule(data=st.data(), fate=st.sampled_from(FATES))
    def end(self, data: st.DataObject, fate: str) -> None:
        server = data.draw(st.sampled_from([name for name in self.at if self.at[name]]))
        job = data.draw(st.sampled_from(sorted(self.at[server], key=lambda job: job.key)))
        self.at[server].discard(job)
        if fate == "refuse":
            self.accepted[job] += self.scheduler.refuse(job, server, NO)
        elif fate == "died":
            self.scheduler.give_back(job, server)
            if job.status == WAITING:
                self.accepted[job] += self.scheduler.died(job, server, f"{len(job.deaths)}")
        else:
            wanted = self.scheduler.collect(job, server)
            assert wanted == job.open
            if fate == "unfetched":
                self.scheduler.give_back(job, server)
            elif fate == "broke" and wanted:
                self.scheduler.strike(job, server)
                if self.scheduler.another(job, server):
                    self.scheduler.pass_on(job, server, NO)
                else:
                    self.accepted[job] += self.scheduler.end(job, server, FAILED)
            else:
                self.scheduler.wake(server, well=fate == "done")
                self.accepted[job] += self.scheduler.end(job, server, fate)

    @invariant()
    def nothing_is_lost_and_nothing_accepted_twice(self) -> None:
        made = self.scheduler
        assert max(self.accepted.values(), default=0) <= 1
        assert made.open == sum(job.open for job in self.jobs)
        assert made.open == len(self.jobs) - sum(self.accepted.values())
        assert made.waiting == sum(job.status == WAITING for job in self.jobs)
        for job in self.jobs:
            if job.status == QUEUED:  # someone has it, and will tell
                assert job in made.lanes[job.server].held
                assert job in self.at[job.server]
        for lane in made.lanes.values():
            assert len(lane.held) <= DEPTH + len(self.jobs)

    def teardown(self) -> None:
        """Two good servers then do all the rest."""
        for job in self.jobs:
            job.refused = {}
        for name in "DE":
            self.scheduler.join(name)
        for name in "ABC":
            self.scheduler.lose(name)
        for _ in range(2 * len(self.jobs)):
            for name in "DE":
                if (job := self.scheduler.next(name)) is not None:
                    self.accepted[job] += self.scheduler.end(job, name, DONE)
        assert self.scheduler.open == 0
        assert set(self.accepted.values()) == {1}


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(deadline=None, stateful_step_count=40)


class Night:
    """Servers with a virtual clock: jobs of 8 to 40 s, reloads of 30 s, and a death now and then.

    Attributes:
        busy: share of the time between a server's first job and the last job's end in which it
            computed: running a job to its end.
    """

    def __init__(self, made: Scheduler, servers: int, journal: Journal, seed: int = 0) -> None:
        self.made, self.journal, self.random = made, journal, random.Random(seed)
        self.now = self.worked = self.away = 0.0
        self.events: list[tuple[float, int, str, Job | None, str]] = []
        self.loaded: dict[str, str] = {}
        self.running: dict[str, Job | None] = {}
        self.boots: Counter[str] = Counter()
        self.ended: Counter[str] = Counter()
        for number in range(servers):
            self.start(f"http://10.0.{number // 256}.{number % 256}:8188")

    def later(self, seconds: float, server: str, job: Job | None) -> None:
        event = (self.now + seconds, len(self.events), server, job, str(self.boots[server]))
        heapq.heappush(self.events, event)

    def start(self, server: str) -> None:
        self.boots[server] += 1
        self.running[server] = None
        self.made.join(server)
        self.fill(server)

    def fill(self, server: str) -> None:
        while (job := self.made.next(server)) is not None:
            attempt = Attempt(f"{self.random.getrandbits(128):032x}", server, "b" * 32)
            job.prompt_id = attempt.prompt_id
            self.journal.queued(job.key, attempt)
        held = self.made.lanes[server].held
        if self.running[server] is None and held:
            job = self.running[server] = next(iter(held))
            reload = 0.0 if self.loaded.get(server) == job.loads else 30.0
            self.loaded[server] = job.loads
            takes = self.random.uniform(8, 40) if self.random.random() > 1e-4 else None
            if takes is None:
                self.later(reload + self.random.uniform(0, 40), server, None)
            else:
                self.worked += takes
                self.later(reload + takes, server, job)

    def go(self) -> None:
        while self.made.open:
            self.now, _, server, job, boot = heapq.heappop(self.events)
            if boot != str(self.boots[server]):
                continue
            if self.running[server] is None:  # it is back
                self.start(server)
            elif job is None:  # it dies, and is back in a minute
                died = self.running[server]
                self.made.lose(server)
                self.made.died(died, server, boot)
                self.loaded.pop(server, None)
                self.running[server] = None
                self.away += 60.0
                self.later(60.0, server, None)
                for other in list(self.made.ready)[:4]:
                    self.fill(other)
            else:
                self.running[server] = None
                assert self.made.end(job, server, DONE)
                self.ended[job.key] += 1
                facts = {"server": server, "boot": "b" * 32, "seconds": 12.345}
                self.journal.ended(
                    "done", job.key, job.prompt_id, files=[f"{job.key}_1.png"], **facts
                )
                self.fill(server)


def night(folder: Path, servers: int, count: int) -> tuple[float, float]:
    """Returns the busy share, and bytes of journal a job."""
    kinds = [f"{kind:012x}" for kind in range(5)]
    shares = random.Random(1).choices(kinds, [50, 30, 15, 4, 1], k=count)
    todo = [Job(n, f"{n:016x}", {}, loads=loads) for n, loads in enumerate(shares)]
    with Journal(folder, "night") as journal:
        ran = Night(Scheduler(todo), servers, journal)
        ran.go()
        size = journal.path.stat().st_size
    with Journal(folder, "night", resume=True) as journal:
        assert len(journal.records) == count
    assert set(ran.ended.values()) == {1} and len(ran.ended) == count
    return ran.worked / (servers * ran.now - ran.away), size / count


def test_a_night_of_many_servers(tmp_path: Path):
    busy, size = night(tmp_path, 50, 20_000)
    assert busy > 0.98
    assert size < 1024
