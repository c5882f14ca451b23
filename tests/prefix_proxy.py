"""A reverse proxy that serves a server under a folder of its address, as http://host/comfy/."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def behind_prefix(port: int, prefix: str = "/comfy") -> Iterator[str]:
    """The address under which a server of this machine is found.

    Args:
        port: of the server itself.
    """
    loop = asyncio.new_event_loop()

    async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        except OSError:
            pass  # one side has gone
        finally:
            writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            writer.close()
            return
        method, path, rest = head.split(b" ", 2)
        if not path.startswith(f"{prefix}/".encode()):
            writer.write(
                b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
            )
            writer.close()
            return
        if b"upgrade: websocket" not in rest.lower():  # one request a connection: a head each
            rest = rest.replace(b"Connection: keep-alive", b"Connection: close", 1)
        there, back = await asyncio.open_connection("127.0.0.1", port)
        back.write(b" ".join([method, path[len(prefix) :], rest]))
        await asyncio.gather(pipe(reader, back), pipe(there, writer))

    # In a thread of its own: Playwright has a running loop in this one.
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    starting = asyncio.start_server(serve, "127.0.0.1", 0)
    server = asyncio.run_coroutine_threadsafe(starting, loop).result()
    own = server.sockets[0].getsockname()[1]
    yield f"http://127.0.0.1:{own}{prefix}/"
    asyncio.run_coroutine_threadsafe(_stop(server), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


async def _stop(server: asyncio.Server) -> None:
    server.close()
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
