"""What the websocket tells, and what happens when it is lost, refused or mute."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from fake_comfyui import FakeComfyUI, fake_comfyui, graph

from qwen_l40s.client import server as module
from qwen_l40s.client.server import Listener, Server
from qwen_l40s.client.transport import Address


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(module, "PAUSE_SECONDS", 0.01)


def listening() -> Listener:
    async def make() -> Listener:
        return Listener(None)

    return asyncio.run(make())


def hear(listener: Listener, kind: str, **data: Any) -> None:
    listener.hear(json.dumps({"type": kind, "data": {"prompt_id": "p", **data}}))


def following(fake: FakeComfyUI, work: Callable[[Server, Listener], Awaitable[Any]]) -> list[str]:
    """Runs `work` while a follower listens; returns the lines that were told."""
    lines: list[str] = []

    async def run() -> None:
        options = {"headers": {}, "wait": 5.0, "notify": lines.append}
        async with Server(Address.parse(fake.url), **options) as server:
            listener = Listener(server, notify=lines.append)
            listening = asyncio.create_task(listener.listen())
            try:
                await asyncio.wait_for(listener.tried.wait(), 5)
                await work(server, listener)
            finally:
                listening.cancel()
                await asyncio.gather(listening, return_exceptions=True)

    asyncio.run(run())
    return lines


async def until(true: Callable[[], bool]) -> None:
    async def wait() -> None:
        while not true():
            await asyncio.sleep(0.005)

    await asyncio.wait_for(wait(), 5)


def test_progress_of_the_node_that_runs():
    listener = listening()
    hear(listener, "execution_start")
    hear(listener, "execution_cached", nodes=["load"])
    hear(listener, "executing", node="sample", display_node="sample")
    hear(listener, "progress", value=3, max=20, node="sample")
    running = listener.running["p"]
    assert (running.node, running.value, running.maximum) == ("sample", 3, 20)
    assert running.finished == {"load"}


def test_a_node_that_another_made_counts_as_the_one_on_the_page():
    listener = listening()
    state = {"value": 1, "max": 4, "state": "running", "display_node_id": "loop"}
    done = {"value": 1, "max": 1, "state": "finished", "display_node_id": "load"}
    hear(listener, "progress_state", nodes={"loop.0.7": state, "load": done})
    running = listener.running["p"]
    assert (running.node, running.value, running.maximum) == ("loop", 1, 4)
    assert running.finished == {"load"}


def test_only_executing_none_tells_the_end_for_the_history_is_written_just_before():
    listener = listening()
    hear(listener, "execution_success")
    assert listener.ended == []
    hear(listener, "executing", node=None)
    assert listener.ended == ["p"]
    assert listener.running == {}


@pytest.mark.parametrize(
    "text", ["no json", "[]", "{}", '{"type": "x", "data": null}', '{"type": "x", "data": {}}']
)
def test_messages_of_custom_nodes_are_passed_over(text):
    listener = listening()
    listener.hear(text)
    assert (listener.ended, listener.running) == ([], {})


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        ("progress", {"node": "1"}),
        ("progress", {"node": "1", "value": "half", "max": 2}),
        ("progress", {"node": None, "value": 1, "max": 2}),
        ("progress_state", {"nodes": [1]}),
        ("progress_state", {"nodes": {"1": 1}}),
        ("progress_state", {"nodes": {"1": {"state": "running"}}}),
        ("execution_cached", {"nodes": 3}),
        ("executing", {}),
        ("executing", {"node": None, "prompt_id": ["a"]}),
        (["executing"], {"node": None}),
    ],
)
def test_messages_of_a_known_type_and_another_form_end_nothing(kind, data):
    listener = listening()
    hear(listener, "executing", node="draw")
    hear(listener, kind, **data)
    running = listener.running["p"]
    assert (running.node, running.value, running.maximum) == ("draw", 0, 0)


PROMPT = "11111111-1111-4111-8111-111111111111"


def test_a_dropped_socket_is_opened_again_as_another_client():
    with fake_comfyui(drop_socket_after=2) as fake:

        async def work(server: Server, listener: Listener) -> None:
            first = listener.client_id
            await until(lambda: listener.turns == 3 and listener.client_id != first)
            await server.submit(graph(), PROMPT, listener.client_id)
            await until(lambda: listener.ended == [PROMPT])

        following(fake, work)
        assert fake.opened_sockets == 2


def test_a_refused_socket_is_told_once_and_tried_again():
    with fake_comfyui(refuse_socket=True) as fake:

        async def work(server: Server, listener: Listener) -> None:
            assert not listener.connected
            await until(lambda: fake.requests.count("GET /ws") >= 3)
            fake.faults.refuse_socket = False
            await until(lambda: listener.connected)
            assert listener.turns == 1

        lines = following(fake, work)
    assert lines == [
        "no websocket (the answer is 403): progress is not shown, but results are fetched"
    ]
