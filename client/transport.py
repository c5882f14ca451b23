"""Sends HTTP requests that outlast a server which is busy, down or restarting: for `wait` seconds
after a lost connection, or a proxy's own answer.
"""

from __future__ import annotations

import asyncio
import hashlib
import ipaddress
import json
import re
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from yarl import URL

from ..errors import QwenL40SError, SettingError
from .workflow import shortened

# Which only proxies answer, as all above 500; ComfyUI answers 500 itself, too.
PATIENCE_STATUS = (408, 425, 429)
# Which ComfyUI answers, too: then without a body, in the words of aiohttp, or with an "error".
EITHER_STATUS = (400, 404, 410, 500)
OWN_WORDS = re.compile(r"\d{3}: |\d{3} [A-Z][\w ]+\n\n|\s*$")
PAGES = ("text/html", "application/xhtml+xml")  # ComfyUI gives no file so
CONNECT_SECONDS = 10.0
# A server that runs a node holds Python's lock and may answer late. With the look at its queue that
# finds it so, its jobs are with others within a minute.
READ_SECONDS = 50.0
# A download without a further byte for so long is given up, and begun again.
STALL_SECONDS = 30.0
# Before the second try; doubled for each further one.
FIRST_PAUSE, LONGEST_PAUSE = 0.25, 5.0
CHUNK_BYTES = 1 << 18
LONGEST_SHOWN = 300
UNSET: Any = None  # until it is set, before anybody needs it


@dataclass(frozen=True)
class Address:
    """The address of a ComfyUI server, perhaps behind a proxy with TLS and a path prefix."""

    base: URL

    @classmethod
    def parse(cls, text: str) -> Address:
        """Reads http(s)://host:port/prefix; `host:port` alone is http. Raises SettingError."""
        text = text.strip()
        try:
            url = URL(text if "://" in text else f"http://{text}")
            # Once more, for brackets around no IPv6 address are dropped.
            usable = url.scheme in ("http", "https") and bool(url.host and URL(str(url)).port)
        except ValueError:
            usable = False
        if not usable or any(letter.isspace() for letter in text):
            shown = re.sub(r"[^/]*@", "...@", text[:LONGEST_SHOWN])  # without a password
            raise SettingError(
                f"--server {shown!r} is not an address: write one such as http://127.0.0.1:8188 "
                "or https://host/prefix."
            )
        if "?" in text or "#" in text:
            raise SettingError(
                "--server takes no '?' and no '#': pass a token with --header, such as --header "
                '"Authorization: Bearer TOKEN".'
            )
        return cls(url.with_path(url.raw_path.rstrip("/") + "/", encoded=True))

    def url(self, path: str) -> URL:
        return self.base.join(URL(path))

    def websocket(self, client_id: str) -> URL:
        # As http(s), which aiohttp takes too: of ws(s) it looks for a ws_proxy in the environment.
        return self.url("ws").with_query({"clientId": client_id})

    @property
    def loopback(self) -> bool:
        host = self.base.host or ""
        try:
            address = ipaddress.ip_address(host)
            # `--listen` makes ComfyUI print http://0.0.0.0:8188.
            return address.is_loopback or address.is_unspecified
        except ValueError:
            return host == "localhost"

    def __str__(self) -> str:
        """Leaves out a password, for messages and files."""
        return str(self.base.with_user(None)).rstrip("/")


class ServerError(QwenL40SError):
    """The server cannot be reached, is no ComfyUI or was lost; the command's exit code is 3."""


class AwayError(ServerError):
    """No usable answer came for `waited` seconds; a `silent` server takes requests."""

    def __init__(self, message: str, waited: float = 0.0, *, silent: bool = False) -> None:
        super().__init__(message)
        self.waited = waited
        self.silent = silent


class GoneError(AwayError):
    """Nothing listens at the address: no process, and so no queue."""


class AbsentError(GoneError):
    """Something else than ComfyUI answers, as while the machine behind a proxy boots."""


class ForeignIdError(ServerError):
    """The server has queued a prompt under an id of its own."""


class AnswerError(ServerError):
    """An error status that no second try would change; `body` is its JSON or its text."""

    def __init__(self, message: str, status: int, body: Any) -> None:
        super().__init__(message)
        self.status = status
        self.body = body


class LostError(Exception):
    """A request found no answer, and another try may, in `seconds` if the server says."""

    def __init__(self, reason: str, seconds: float | None = None) -> None:
        super().__init__(reason)
        self.seconds = seconds


REFUSED, SILENT = "connection refused", "no answer in time"
# A disk's OSError while downloading is none of them.
TRANSIENT = (
    aiohttp.ClientConnectionError,
    aiohttp.ClientPayloadError,
    asyncio.TimeoutError,
    ConnectionError,
)


def _timeout(read: float) -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=read)


Answer = tuple[str, bytes]  # the content type and the body of one with a status below 300


class Transport:
    """The requests of one server; an async context manager. Of `headers` that differ in case the
    last one counts. After a failure it goes on trying for `wait` seconds, unless nothing listens.
    """

    def __init__(
        self,
        address: Address,
        *,
        headers: Mapping[str, str],
        wait: float,
        notify: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.address = address
        self.breaks = 0  # how often a request found no server: a restart cannot hide from it
        self._wait = wait
        self._notify = notify
        self._answered = False
        self._waiting = False
        self._headers = {name.lower(): (name, value) for name, value in headers.items()}
        self.session: aiohttp.ClientSession = UNSET

    async def __aenter__(self) -> Any:
        self.session = aiohttp.ClientSession(
            headers=dict(self._headers.values()),
            # A proxy that the environment names is not meant for the machine itself.
            trust_env=not self.address.loopback,
            timeout=_timeout(READ_SECONDS),
            read_bufsize=CHUNK_BYTES,
        )
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.session.close()

    async def call(
        self,
        method: str,
        path: str,
        *,
        before_retry: Callable[[], Awaitable[Answer | None]] | None = None,
        form: Callable[[], aiohttp.FormData] | None = None,
        optional: bool = False,
        **arguments: Any,
    ) -> Answer:
        """Sends a request, whose form is made anew for each try, until an answer comes, or
        `before_retry` knows one. A proxy may let no one see an `optional` route. Raises AnswerError
        for an error status, and AwayError after `wait` seconds.
        """

        async def once() -> Answer:
            data = {} if form is None else {"data": form()}
            async with self._send(method, path, **data, **arguments) as answer:
                ours = self._answered and not optional
                await self._check(answer, f"{method} /{path}", ours=ours)
                return answer.content_type, await answer.read()

        return await self._patiently(once, before_retry)

    async def download(self, item: Mapping[str, str], target: Path, most: float) -> tuple[int, str]:
        """Writes a file that an output names into `target`, in one try; returns (bytes, sha256).
        Raises ServerError where it does not come whole, or has more than `most` bytes, and OSError.
        """

        async def once() -> tuple[int, str]:
            size, digest, limit = 0, hashlib.sha256(), _timeout(STALL_SECONDS)
            async with self._send("GET", "view", params=dict(item), timeout=limit) as answer:
                await self._check(answer, "GET /view", ours=True)
                with target.open("wb") as file:
                    async for chunk in answer.content.iter_any():
                        size += len(chunk)
                        if size > most:
                            raise ServerError(
                                f"{self.address} sends a file of more than {most / 1e9:g} GB: "
                                "raise --most-gb."
                            )
                        digest.update(chunk)
                        file.write(chunk)
            return size, digest.hexdigest()

        try:
            return await self._once(once)
        except LostError as error:
            if str(error) == REFUSED:
                raise self._gone() from error
            raise ServerError(f"{self.address} does not send a file ({error}).") from error

    def _send(self, method: str, path: str, **arguments: Any) -> Any:
        # A redirected POST would become a GET, and a --header go to another server.
        return self.session.request(
            method, self.address.url(path), allow_redirects=False, **arguments
        )

    async def _check(self, answer: aiohttp.ClientResponse, call: str, *, ours: bool) -> None:
        """Raises what an answer means; `ours`: ComfyUI has the route, and gives no page there."""
        if answer.status in PATIENCE_STATUS or answer.status > 500:
            seconds = answer.headers.get("Retry-After", "").strip()  # or a date, or nothing
            known = float(seconds) if seconds.isdecimal() else None
            raise LostError(f"the server answers {answer.status}", known)
        if ours and answer.status < 300 and answer.content_type in PAGES:
            raise LostError("the server answers with a web page, such as a sign-in")
        if 300 <= answer.status < 400:
            raise ServerError(
                f"{self.address} redirects {call} to {answer.headers.get('Location')!r}: give "
                "--server that address, or sign in with --header."
            )
        if answer.status >= 400:
            text = (await answer.read()).decode("utf-8", "replace")
            try:
                body = json.loads(text)
            except (ValueError, RecursionError):
                body = text.strip()
            if answer.status in EITHER_STATUS and not OWN_WORDS.match(text):
                own = answer.status in (400, 500) and isinstance(body, dict) and "error" in body
                if not own and (ours or answer.status == 500):
                    raise LostError(
                        f"the server answers {answer.status}, but not in ComfyUI's form"
                    )
                await self._check_scheme()
            message = f"{self.address} answered {answer.status} to {call}"
            if answer.status in (401, 403):
                message = (
                    f"{self.address} needs a sign-in ({answer.status} for {call}): pass it with "
                    '--header, such as --header "Authorization: Bearer TOKEN".'
                )
            elif answer.status == 413:
                message = (
                    f"{self.address} refuses a request of this size (413 for {call}): start "
                    "ComfyUI with a larger --max-upload-size (in MB), or raise the limit of the "
                    "proxy."
                )
            else:
                reason = f" ({shortened(body, 300)})" if isinstance(body, str) and body else ""
                message = f"{message}{reason}: see the server's log."
            raise AnswerError(message, answer.status, body)

    async def _check_scheme(self) -> None:
        """Raises ServerError where an address that was given as http:// speaks TLS."""
        if self._answered or self.address.base.scheme != "http":
            return
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        place = self.address.base.host, self.address.base.port
        limits: dict[str, Any] = {"ssl": context, "ssl_handshake_timeout": CONNECT_SECONDS}
        try:
            _, writer = await asyncio.open_connection(*place, **limits)
        except OSError:
            return
        writer.transport.abort()
        raise ServerError(
            f"{self.address} uses TLS: write https:// instead of http:// in --server."
        )

    def _gone(self) -> GoneError:
        return GoneError(
            f"no server listens at {self.address} (connection refused): start ComfyUI there, name "
            "another --server, or wait with --wait SECONDS."
        )

    async def _once(self, once: Callable[[], Awaitable[Any]]) -> Any:
        try:
            return await once()
        except aiohttp.ClientSSLError as error:
            cause = error.__cause__ or error
            words = getattr(cause, "verify_message", None) or getattr(cause, "reason", None)
            remedy = "for a server without TLS, write http://"
            if isinstance(error, aiohttp.ClientConnectorCertificateError):
                remedy = (
                    "install a valid certificate there. For a self-signed one, set SSL_CERT_FILE "
                    "to its file"
                )
            raise ServerError(
                f"no secure connection to {self.address} ({words or cause}): {remedy}."
            ) from error
        except aiohttp.ClientConnectorDNSError as error:
            if not self._answered:
                raise ServerError(
                    f"there is no machine named {self.address.base.host!r}: check --server."
                ) from error
            raise LostError("its name is not found") from error
        except (aiohttp.ClientProxyConnectionError, aiohttp.InvalidURL) as error:
            host = self.address.base.host
            raise ServerError(
                f"the proxy for {self.address}, set in the environment, cannot be used: start the "
                f"proxy, write it as http_proxy=http://host:port, or set no_proxy={host}."
            ) from error
        except aiohttp.ClientConnectorError as error:
            # Of several addresses of one host, asyncio joins the reasons to a line nobody can read.
            cause = error.os_error
            refused = "Connect call failed" in str(cause) or isinstance(
                cause, ConnectionRefusedError
            )
            raise LostError(REFUSED if refused else str(cause.strerror or cause)) from error
        except TRANSIENT as error:
            silent = isinstance(error, asyncio.TimeoutError)
            if not silent:
                await self._check_scheme()
            raise LostError(SILENT if silent else "connection lost") from error
        except aiohttp.ClientError as error:
            await self._check_scheme()
            raise ServerError(
                f"{self.address} is not an HTTP server: give --server the address of ComfyUI's "
                "page."
            ) from error

    async def _patiently(
        self,
        once: Callable[[], Awaitable[Any]],
        before_retry: Callable[[], Awaitable[Any]] | None,
    ) -> Any:
        pause, start = FIRST_PAUSE, time.monotonic()
        while True:
            try:
                found = await self._once(once)
            except LostError as error:
                lost = error
            else:
                self._answered = True
                if self._waiting:
                    self._waiting = False
                    self._notify(f"{self.address} is back")
                return found
            self.breaks += 1
            reason = str(lost)
            if reason == REFUSED:
                raise self._gone() from lost
            waited = min(self._wait, READ_SECONDS) if reason == SILENT else self._wait
            left = start + waited - time.monotonic()
            if left <= 0:
                raise AwayError(
                    f"{self.address} gave no answer for {waited:g} s ({reason}): start ComfyUI "
                    "there, name another --server, or wait longer with --wait SECONDS.",
                    waited,
                    silent=reason == SILENT,
                ) from lost
            if not self._waiting:
                self._waiting = True
                self._notify(f"waiting up to {self._wait:g} s for {self.address}: {reason}")
            await asyncio.sleep(min(pause if lost.seconds is None else lost.seconds, left))
            pause = min(2 * pause, LONGEST_PAUSE)
            if before_retry is not None and (known := await before_retry()) is not None:
                return known
