"""How a job that is gone is judged, and when a websocket is believed no longer."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from qwen_l40s.client.follow import QueueWatch
from qwen_l40s.client.ledger import QUEUED, Job
from qwen_l40s.client.server import ServerQueue


class Told:
    """As much of a follower as the watch looks at."""

    def __init__(self) -> None:
        self.connected, self.turns, self.heard, self.renewed = True, 1, 0, 0

    async def renew(self) -> None:
        self.renewed += 1


class Known:
    """As much of a server."""

    def __init__(self, *queue: str, history: tuple[str, ...] = ()) -> None:
        self.transport = SimpleNamespace(breaks=0)
        self.waiting, self.entries = list(queue), list(history)

    async def queue(self) -> ServerQueue:
        places = {prompt_id: place for place, prompt_id in enumerate(self.waiting)}
        return ServerQueue(places, frozenset(self.waiting[:1]), {})

    async def history(self, prompt_id: str) -> Any:
        return {} if prompt_id in self.entries else None

    async def newest(self) -> str | None:
        return self.entries[-1] if self.entries else None


def job(prompt_id: str = "ours") -> Job:
    return Job(1, "key", {}, {}, "job 1", prompt_id=prompt_id, status=QUEUED)


def removed(
    *, history: tuple[str, ...] = (), lost: int = 0, connected: bool = True, forgets: bool = False
) -> bool:
    async def run() -> bool:
        server, follower, ours = Known("other", "ours", history=history), Told(), job()
        watch = QueueWatch(server, follower)
        await watch.begin()
        assert await watch.gone([ours]) == []
        server.waiting.clear()
        server.transport.breaks += lost
        follower.connected = connected
        if forgets:
            server.entries.clear()
        assert await watch.gone([ours]) == [ours]
        return await watch.removed(ours)

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ({}, True),
        ({"forgets": True, "history": ("old",)}, True),
        ({"lost": 1, "history": ("old",)}, True),
        ({"lost": 1, "history": ("old",), "forgets": True}, False),
        ({"lost": 1}, False),
        ({"connected": False}, False),
        ({"connected": False, "history": ("old",)}, True),
    ],
)
def test_the_fate_of_a_job_that_is_neither_queued_nor_done(case, expected):
    assert removed(**case) is expected


def test_the_prompts_ahead_are_those_before_our_first():
    async def run() -> list[int | None]:
        server = Known("a", "b", "ours", "c")
        watch, seen = QueueWatch(server, Told()), []
        for waiting in (server.waiting, ["b", "ours"], ["ours"]):
            server.waiting = waiting
            await watch.gone([job()])
            seen.append(watch.ahead)
        return seen

    assert asyncio.run(run()) == [2, 1, None]


@pytest.mark.parametrize(("told", "renewed"), [(False, 1), (True, 0)])
def test_a_socket_that_says_nothing_while_the_queue_changes_is_renewed(told, renewed):
    async def run() -> int:
        server, follower = Known("a", "b", "ours"), Told()
        watch = QueueWatch(server, follower)
        await watch.gone([job()])
        follower.heard += 1
        await watch.gone([job()])
        for _ in range(2):
            server.waiting = server.waiting[1:]
            follower.heard += told
            await watch.gone([job()])
        return follower.renewed

    assert asyncio.run(run()) == renewed


def test_a_socket_that_says_nothing_while_nothing_changes_is_left_alone():
    async def run() -> int:
        server, follower = Known("ours"), Told()
        watch = QueueWatch(server, follower)
        await watch.gone([job()])
        follower.heard += 1
        for _ in range(5):
            await watch.gone([job()])
        return follower.renewed

    assert asyncio.run(run()) == 0
