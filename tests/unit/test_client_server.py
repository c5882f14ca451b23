"""The calls of a server: answers, refusals, patience; and its websocket."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import ssl
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from fake_comfyui import FakeComfyUI, fake_comfyui, graph

from qwen_l40s.client import progress as module
from qwen_l40s.client import transport
from qwen_l40s.client.progress import Listener
from qwen_l40s.client.server import Server, of_execution, of_validation
from qwen_l40s.client.transport import Address, AnswerError, ServerError
from qwen_l40s.errors import SettingError


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(transport, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(module, "PAUSE_SECONDS", 0.01)


def ask(url: str, question: Callable[[Server], Awaitable[Any]], **more: Any) -> Any:
    async def run() -> Any:
        options = {"wait": 5.0, "headers": {}, "notify": lambda line: None} | more
        async with Server(Address.parse(url), **options) as server:
            return await question(server)

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("text", "url", "websocket"),
    [
        ("127.0.0.1:8188", "http://127.0.0.1:8188/queue", "http://127.0.0.1:8188/ws?clientId=me"),
        ("http://host:1/", "http://host:1/queue", "http://host:1/ws?clientId=me"),
        ("https://host/a/b", "https://host/a/b/queue", "https://host/a/b/ws?clientId=me"),
        ("https://host/a%20b/", "https://host/a%20b/queue", "https://host/a%20b/ws?clientId=me"),
        ("http://[::1]:8188", "http://[::1]:8188/queue", "http://[::1]:8188/ws?clientId=me"),
    ],
)
def test_an_address_with_or_without_scheme_and_prefix(text, url, websocket):
    address = Address.parse(text)
    assert str(address.url("queue")) == url
    assert str(address.websocket("me")) == websocket


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "ftp://host",
            "http://",
            "a b",
            "http://host:port",
            "host:0",
            "[null,n:ll]",
            "ws://h",
        ),
        "a " * 200_000,  # of which each letter may begin a password
    ],
    ids=lambda text: text[:20],
)
def test_an_address_that_is_none(text):
    with pytest.raises(SettingError, match="is not an address") as error:
        Address.parse(text)
    assert len(str(error.value)) < 500


@pytest.mark.parametrize("more", ["?token=a", "/x?token=a#b", "#b", "?"])
def test_a_query_in_an_address_would_be_dropped_and_is_refused(more):
    with pytest.raises(SettingError, match="pass a token with --header") as error:
        Address.parse(f"https://host{more}")
    assert "token=a" not in str(error.value)


def test_a_password_is_never_shown():
    assert str(Address.parse("http://me:secret@host:1/x")) == "http://host:1/x"


@pytest.mark.parametrize(
    ("host", "here"), [("localhost", True), ("127.0.0.1", True), ("0.0.0.0", True), ("h", False)]
)
def test_only_the_machine_itself_goes_past_the_proxy_of_the_environment(host, here):
    assert Address.parse(f"http://{host}:1").loopback is here


@pytest.mark.parametrize("proxy", ["http://127.0.0.1:1", "127.0.0.1:1"])
def test_a_proxy_that_is_away_or_no_address_is_not_taken_for_the_server(proxy, monkeypatch):
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setenv("http_proxy", proxy)
    with pytest.raises(ServerError, match="no_proxy=host"):
        ask("http://host:1", lambda server: server.queue())


@pytest.mark.parametrize("sent", ["Bearer t", "Basic bWU6c2VjcmV0"])
def test_object_info_comes_with_the_header_or_the_password_that_was_given(sent: str):
    async def handler(request: web.Request) -> web.Response:
        assert request.headers["Authorization"] == sent
        return web.json_response({"SaveImage": {}})

    headers = {"Authorization": sent} if "Bearer" in sent else {}
    with fake_comfyui(answer=handler) as fake:
        url = fake.url if headers else fake.url.replace("//", "//me:secret@")
        found = ask(url, lambda server: server.object_info(), headers=headers)
    assert json.loads(found) == {"SaveImage": {}}


HTML = "<html>"
WRONG = {
    # status, body, the call, and what the error names
    "a page": (200, HTML, Server.object_info, "is not ComfyUI"),
    "no such page": (404, HTML, Server.object_info, "is not ComfyUI"),
    "a page in place of the queue": (200, HTML, Server.queue, "text/html"),
    "deep JSON": (500, "[" * 100_000, Server.object_info, "500"),
    "half of JSON": (500, "{", Server.object_info, "500"),
    "escapes": (500, "500 Error\n\n\x1b[2J<h1>no</h1>", Server.object_info, r"\\x1b\[2J<h1>no"),
    "a sign-in": (401, "", Server.object_info, "sign-in"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_a_server_answers_wrongly_is_an_error_of_that_server(name):
    status, body, call, named = WRONG[name]

    async def handler(request: web.Request) -> web.Response:
        kind = "text/html" if body == HTML else "text/plain"
        return web.Response(status=status, text=body, content_type=kind)

    with fake_comfyui(answer=handler) as fake, pytest.raises(ServerError, match=named) as error:
        ask(fake.url, call, wait=0.1)
    assert status != 401 or error.value.status == 401


def test_a_port_where_something_else_than_http_answers():
    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-OpenSSH_9.2\r\n")
        await writer.drain()
        writer.close()

    async def run() -> None:
        other = await asyncio.start_server(greet, "127.0.0.1", 0)
        url = f"127.0.0.1:{other.sockets[0].getsockname()[1]}"
        async with other:
            await asyncio.to_thread(ask, url, lambda server: server.object_info(), wait=0.1)

    with pytest.raises(ServerError, match="is not an HTTP server"):
        asyncio.run(run())


@pytest.mark.parametrize("status", [301, 302, 308])
def test_a_redirect_is_not_followed_for_it_would_turn_a_post_into_a_get(status):
    with fake_comfyui() as fake:

        async def handler(request: web.Request) -> web.Response:
            return web.Response(status=status, headers={"Location": f"{fake.url}{request.path}"})

        sent = f"redirects GET /object_info to '{fake.url}/object_info': give --server that address"
        with fake_comfyui(answer=handler) as other, pytest.raises(ServerError, match=sent):
            ask(other.url, lambda server: server.object_info())
        assert fake.requests == []


def test_a_busy_server_is_asked_again_when_it_says():
    lines: list[str] = []
    with fake_comfyui(busy=2, retry_after="0") as fake:
        ask(fake.url, lambda server: server.object_info(), notify=lines.append)
        assert fake.requests == ["GET /object_info"] * 3
    assert [line.partition(" ")[0] for line in lines] == ["waiting", fake.url]


PAGE = "<html>an edge</html>"
GO = "404 page not found\n"  # of Go's servers
AIOHTTP = "500 Internal Server Error\n\nServer got itself in trouble"
ANSWERS = [
    # status, body, and whether a proxy gives it while ComfyUI is not there: first, and later
    *((status, PAGE, True, True) for status in (408, 425, 429, 502, 503, 504)),
    *((status, PAGE, True, True) for status in (520, 521, 522, 523, 524, 525, 526, 527, 530, 561)),
    (502, '{"error": "bad gateway"}', True, True),
    (500, PAGE, True, True),
    (500, "Internal Server Error", True, True),
    (500, '{"message": "Internal server error"}', True, True),
    (500, AIOHTTP, False, False),
    (500, "", False, False),
    (500, '{"error": "a pack\'s"}', False, False),
    *((status, PAGE, False, True) for status in (200, 400, 404, 410)),
    (404, GO, False, True),
    (404, '{"error": "no such application"}', False, True),
    (404, "404: Not Found", False, False),
    (404, "", False, False),
    (400, '{"error": {"type": "no_prompt"}, "node_errors": {}}', False, False),
    (400, "400: Bad Request", False, False),
    *((status, PAGE, False, False) for status in (401, 403, 405, 413)),
]


@pytest.mark.parametrize(("status", "body", "first", "later"), ANSWERS)
@pytest.mark.parametrize("answered", [False, True])
def test_what_a_proxy_answers_by_itself_is_waited_out(status, body, first, later, answered):
    kind = {"<": "text/html", "{": "application/json"}.get(body[:1], "text/plain")
    left = [3]

    async def handler(request: web.Request) -> web.Response | None:
        if request.path != "/queue" or not left[0]:
            return None
        left[0] -= 1
        return web.Response(status=status, text=body, content_type=kind)

    async def question(server: Server) -> Any:
        if answered:
            await server.object_info()
        return await server.queue()

    with fake_comfyui(answer=handler) as fake:
        if later if answered else first:
            assert ask(fake.url, question).places == {}
        else:
            with pytest.raises(AnswerError) as error:
                ask(fake.url, question)
            assert (error.value.status, left) == (status, [2])


def test_routes_that_a_proxy_lets_no_one_see_are_not_waited_for():
    async def handler(request: web.Request) -> web.Response | None:
        hidden = request.path in ("/system_stats", "/experiment/models")
        return web.Response(status=404, text=PAGE, content_type="text/html") if hidden else None

    async def question(server: Server) -> Any:
        await server.object_info()
        with pytest.raises(AnswerError):
            await server.stats()
        return await server.model_folders()

    with fake_comfyui(answer=handler) as fake:
        assert ask(fake.url, question, wait=60) == set()


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate")
    name, keys = tmp_path / "cert.pem", ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    made = ["openssl", "req", "-x509", *keys, "-nodes", "-keyout", name, "-out", tmp_path / "crt"]
    more = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*map(str, made), *more], check=True, capture_output=True)
    name.write_bytes(name.read_bytes() + (tmp_path / "crt").read_bytes())
    return name


@pytest.mark.parametrize(
    ("scheme", "tls", "says"),
    [
        ("http", True, "write https://"),
        ("https", False, "write http://"),
        ("https", True, "SSL_CERT_FILE"),
    ],
)
def test_a_scheme_that_the_port_does_not_speak_is_told_at_once(certificate, scheme, tls, says):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)

    async def answer(request: web.BaseRequest) -> web.Response:
        return web.Response()

    async def run() -> None:
        runner = web.ServerRunner(web.Server(answer))
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context if tls else None)
        await site.start()
        url = f"{scheme}://127.0.0.1:{runner.addresses[0][1]}"
        try:
            await asyncio.to_thread(ask, url, lambda server: server.object_info(), wait=60)
        finally:
            await runner.cleanup()

    with pytest.raises(ServerError, match=re.escape(says)):
        asyncio.run(run())


def test_a_name_that_no_machine_has_is_told_at_once():
    with pytest.raises(ServerError, match=r"no machine named 'nothing\.invalid'"):
        ask("nothing.invalid:8188", lambda server: server.object_info(), wait=60)


def test_an_upload_is_sent_again_whole(tmp_path: Path):
    (tmp_path / "b.png").write_bytes(b"data")
    with fake_comfyui(busy=1) as fake:
        name = ask(fake.url, lambda server: server.upload(tmp_path / "b.png", "folder/a.png"))
        assert name == "folder/a.png"
        assert fake.uploads == {"folder/a.png": b"data"}


def test_the_queue_is_in_the_order_of_its_turns():
    with fake_comfyui(paused=True) as fake:
        fake.state.running = [3, "runs", {}, {}, []]
        fake.state.queue[:] = [[9, "last", {}, {}, []], [-1, "front", {}, {}, []]]
        queue = ask(fake.url, lambda server: server.queue())
        fake.state.queue.clear()
    assert queue.places == {"runs": 0, "front": 1, "last": 2}
    assert queue.running == {"runs"}


# The websocket


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
def test_messages_of_another_form_end_nothing(kind, data):
    listener = listening()
    for text in ("no json", "[]", "{}", '{"type": "x", "data": null}', "[" * 100_000):
        listener.hear(text)
    assert (listener.ended, listener.running) == ([], {})
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
        "no websocket (the server answered 403): progress is not shown, but results are fetched"
    ]


def test_the_socket_takes_the_proxy_of_the_other_requests(monkeypatch):
    monkeypatch.delenv("no_proxy", raising=False)
    with fake_comfyui() as fake:
        monkeypatch.setenv("http_proxy", fake.url)
        known_to_it = SimpleNamespace(url="http://comfyui.invalid:8188")

        async def work(server: Server, listener: Listener) -> None:
            assert listener.connected
            await server.submit(graph(), PROMPT, listener.client_id)
            await until(lambda: listener.ended == [PROMPT])

        assert following(known_to_it, work) == []


def test_a_long_error_of_a_node_is_cut():
    data = {"node_id": "draw", "exception_message": "x" * 1_000_000}
    message = of_execution(graph(), data)["message"]
    assert len(message) < 2100 and message.endswith(
        "... (998000 more characters in the server's log)"
    )


@pytest.mark.parametrize(
    "body",
    [
        {"node_errors": ["draw"]},
        {"node_errors": {"draw": "wrong"}},
        {"node_errors": {"draw": {"errors": ["wrong"]}}, "error": "no"},
        {"error": {"type": ["a"], "message": "no"}},
        ["no"],
    ],
    ids=str,
)
def test_a_refusal_of_another_form_is_a_refusal(body: Any):
    error = of_validation(graph(), body)
    assert isinstance(error["type"], str) and error["message"] and not error["nodes"]
