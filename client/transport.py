"""HTTP requests that outlast a server which is busy, down or restarting.

A request is tried again until `wait` seconds after its first failure: after a lost connection, and
after the answers by which servers and proxies ask for patience.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from .address import Address
from .trouble import (
    TRANSIENT,
    PatienceError,
    ServerError,
    answer_error,
    patience_seconds,
    tls_reason,
    transient_words,
)

PATIENCE_STATUS = (429, 502, 503, 504)
CONNECT_SECONDS = 10.0
# A server that runs a node holds Python's lock and may answer late.
READ_SECONDS = 120.0
# Before the second try; doubled for each further one.
FIRST_PAUSE, LONGEST_PAUSE = 0.25, 5.0
CHUNK_BYTES = 1 << 18


@dataclass(frozen=True)
class Answer:
    """One below 300."""

    content_type: str
    body: bytes


class Transport:
    """The requests of one server.

    Args:
        headers: sent with every request.
        wait: seconds to go on trying after a failure.
        notify: told in one line when the server is waited for, and when it is back.

    Attributes:
        breaks: how often a request found no server: a restart cannot hide from it.
    """

    def __init__(
        self,
        address: Address,
        *,
        headers: Mapping[str, str],
        wait: float,
        notify: Callable[[str], None],
    ) -> None:
        self.address = address
        self.breaks = 0
        self._wait = wait
        self._notify = notify
        self._answered = False
        self._waiting = False
        self._headers = dict(headers)
        self.session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        self.session = aiohttp.ClientSession(
            headers=self._headers,
            # A proxy that the environment names is not meant for the machine itself.
            trust_env=not self.address.loopback,
            timeout=aiohttp.ClientTimeout(
                total=None, sock_connect=CONNECT_SECONDS, sock_read=READ_SECONDS
            ),
        )

    async def close(self) -> None:
        await self.session.close()

    async def call(
        self,
        method: str,
        path: str,
        *,
        before_retry: Callable[[], Awaitable[Any]] | None = None,
        form: Callable[[], aiohttp.FormData] | None = None,
        **arguments: Any,
    ) -> Any:
        """Sends a request.

        Args:
            before_retry: asked before each further try; unless None, what it returns is
                the result.
            form: makes the body; aiohttp sends a form only once.

        Raises:
            AnswerError: an error status.
            ServerError: no usable answer within `wait` seconds.
        """

        async def once() -> Answer:
            data = {} if form is None else {"data": form()}
            async with self._send(method, path, **data, **arguments) as answer:
                await self._check(answer, f"{method} /{path}")
                return Answer(answer.content_type, await answer.read())

        return await self._patiently(once, before_retry)

    async def download(self, path: str, params: Mapping[str, str], target: Path) -> None:
        """Writes the body of an answer into a file; each try begins it anew.

        Raises:
            OSError: of the file.
        """

        async def once() -> bool:
            async with self._send("GET", path, params=dict(params)) as answer:
                await self._check(answer, f"GET /{path}")
                with target.open("wb") as file:
                    async for chunk in answer.content.iter_chunked(CHUNK_BYTES):
                        file.write(chunk)
            return True

        await self._patiently(once, None)

    def _send(self, method: str, path: str, **arguments: Any) -> Any:
        # A redirected POST would become a GET, and a --header go to another server.
        return self.session.request(
            method, self.address.url(path), allow_redirects=False, **arguments
        )

    async def _check(self, answer: aiohttp.ClientResponse, call: str) -> None:
        if answer.status in PATIENCE_STATUS:
            raise PatienceError(answer.status, patience_seconds(answer.headers))
        if 300 <= answer.status < 400:
            raise ServerError(
                f"{self.address} sends {call} on to {answer.headers.get('Location')!r}: give "
                "--server the address where that leads, or --header what a sign-in wants."
            )
        if answer.status >= 400:
            raise answer_error(self.address, call, answer.status, await answer.read())

    async def _patiently(
        self,
        once: Callable[[], Awaitable[Any]],
        before_retry: Callable[[], Awaitable[Any]] | None,
    ) -> Any:
        pause, give_up = FIRST_PAUSE, None
        while True:
            try:
                found = await once()
            except aiohttp.ClientSSLError as error:
                raise ServerError(
                    f"no secure connection to {self.address} ({tls_reason(error)}): its "
                    "certificate must be valid, and a ComfyUI without one is at http://."
                ) from error
            except aiohttp.ClientConnectorDNSError as error:
                if not self._answered:
                    raise ServerError(
                        f"no machine is called {self.address.base.host!r}: check --server."
                    ) from error
                asked, reason = None, "its name is not found"
            except TRANSIENT as error:
                asked, reason = getattr(error, "seconds", None), transient_words(error)
            except aiohttp.ClientError as error:
                raise ServerError(
                    f"{self.address} does not speak HTTP: --server takes the address at which "
                    "ComfyUI's page opens."
                ) from error
            else:
                self._answered = True
                if self._waiting:
                    self._waiting = False
                    self._notify(f"{self.address} is back")
                return found
            self.breaks += 1
            now = time.monotonic()
            give_up = now + self._wait if give_up is None else give_up
            if now >= give_up:
                raise ServerError(
                    f"{self.address} gave no answer for {self._wait:g} s ({reason}): start ComfyUI "
                    "there, name another --server, or give it more time with --wait."
                )
            if not self._waiting:
                self._waiting = True
                self._notify(f"waiting up to {self._wait:g} s for {self.address}: {reason}")
            await asyncio.sleep(min(pause if asked is None else asked, give_up - now))
            pause = min(2 * pause, LONGEST_PAUSE)
            if before_retry is not None and (known := await before_retry()) is not None:
                return known
