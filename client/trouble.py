"""What goes wrong between a client and a server, in the words for people."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import Any

import aiohttp

from ..errors import QwenL40SError
from .address import Address
from .values import shortened


class ServerError(QwenL40SError):
    """The server cannot be reached, is no ComfyUI or was lost; the command's exit code is 3."""


class AnswerError(ServerError):
    """The server answered with an error status that no second try would change.

    Attributes:
        status: of HTTP.
        body: the JSON of the answer, or its text.
    """

    def __init__(self, message: str, status: int, body: Any) -> None:
        super().__init__(message)
        self.status = status
        self.body = body


class PatienceError(Exception):
    """The server, or a proxy before it, asks to come back later.

    Attributes:
        seconds: when, if it says.
    """

    def __init__(self, status: int, seconds: float | None) -> None:
        super().__init__(f"it answers {status}")
        self.seconds = seconds


# A disk's OSError while downloading is none of them.
TRANSIENT = (
    aiohttp.ClientConnectionError,
    aiohttp.ClientPayloadError,
    asyncio.TimeoutError,
    ConnectionError,
    PatienceError,
)


def patience_seconds(headers: Mapping[str, str]) -> float | None:
    """Of Retry-After: a number, or a date."""
    text = headers.get("Retry-After", "").strip()
    if text.isdecimal():
        return float(text)
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    except (TypeError, ValueError):
        return None


def tls_reason(error: aiohttp.ClientSSLError) -> str:
    cause = error.__cause__ or error
    return getattr(cause, "verify_message", None) or getattr(cause, "reason", None) or str(cause)


def transient_words(error: Exception) -> str:
    if isinstance(error, aiohttp.ClientConnectorError):
        # Of several addresses of one host, asyncio joins the reasons to a line nobody can read.
        cause = error.os_error
        refused = "Connect call failed" in str(cause) or isinstance(cause, ConnectionRefusedError)
        return "connection refused" if refused else str(cause.strerror or cause)
    if isinstance(error, asyncio.TimeoutError):
        return "no answer in time"
    if isinstance(error, PatienceError):
        return str(error)
    return "connection lost"


def answer_error(address: Address, call: str, status: int, data: bytes) -> AnswerError:
    text = data.decode("utf-8", "replace")
    try:
        body = json.loads(text)
    except ValueError:
        body = text.strip()
    if status in (401, 403):
        message = (
            f"{address} asks for a sign-in ({status} for {call}): pass what it wants with "
            '--header, such as --header "Authorization: Bearer TOKEN".'
        )
    elif status == 413:
        message = (
            f"{address} takes no request of this size (413 for {call}): start ComfyUI with a "
            "larger --max-upload-size (in MB), or raise its proxy's limit."
        )
    else:
        told = f" ({shortened(body, 300)})" if isinstance(body, str) and body else ""
        message = f"{address} answered {status} to {call}{told}: see the server's log."
    return AnswerError(message, status, body)
