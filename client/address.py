"""The address of a server, as people type it."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from yarl import URL

from ..errors import SettingError


@dataclass(frozen=True)
class Address:
    """Of a ComfyUI server, perhaps behind a proxy with TLS and a path prefix."""

    base: URL

    @classmethod
    def parse(cls, text: str) -> Address:
        """Of http(s)://host:port/prefix; `host:port` alone is http.

        Raises:
            SettingError: no such address.
        """
        text = text.strip()
        try:
            url = URL(text if "://" in text else f"http://{text}")
            usable = url.scheme in ("http", "https") and bool(url.host)
        except ValueError:
            usable = False
        if not usable or any(letter.isspace() for letter in text):
            raise SettingError(
                f"--server {text!r} is no address of a server: it must be like "
                "http://127.0.0.1:8188 or https://host/prefix."
            )
        if "?" in text or "#" in text:
            raise SettingError(
                f"--server {text.partition('?')[0].partition('#')[0]} must end there, without "
                "'?' and '#': a token goes into --header, such as "
                '--header "Authorization: Bearer TOKEN".'
            )
        return cls(url.with_path(url.raw_path.rstrip("/") + "/", encoded=True))

    def url(self, path: str) -> URL:
        """Of a route, such as "history/<id>"."""
        return self.base.join(URL(path))

    def websocket(self, client_id: str) -> URL:
        scheme = "wss" if self.base.scheme == "https" else "ws"
        return self.url("ws").with_scheme(scheme).with_query({"clientId": client_id})

    @property
    def loopback(self) -> bool:
        """Whether this is the machine itself."""
        host = self.base.host
        try:
            return ipaddress.ip_address(host).is_loopback
        except ValueError:
            return host == "localhost"

    def __str__(self) -> str:
        """Without a password, for messages and files."""
        return str(self.base.with_user(None)).rstrip("/")
