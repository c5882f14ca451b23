"""A hundred stand-ins for ComfyUI in one process: `many_servers.py COUNT`.

It prints the ports, and ends with its standard input.
"""

from __future__ import annotations

import asyncio
import sys

from fake_comfyui import FakeComfyUI, Faults


async def main(count: int) -> None:
    servers = [FakeComfyUI(Faults(idle_seconds=0.1)) for _ in range(count)]
    for server in servers:
        await server.start()
    print(*(server.port for server in servers), flush=True)
    await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
