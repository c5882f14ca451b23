"""A hundred stand-ins for ComfyUI in one process, whose jobs end at once.

`many_servers.py COUNT BYTES`, of each image, which is tiny without. It prints the ports, and ends
with its standard input.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
import zlib

from aiohttp import web
from fake_comfyui import OBJECT_INFO

PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de"
    "0000000c49444154789c63606060000000040001f61738550000000049454e44ae426082"
)
if len(sys.argv) > 2:  # a text before the pixels
    chunk = b"tEXt" + b"a\0" + b"b" * int(sys.argv[2])
    head = (len(chunk) - 4).to_bytes(4, "big")
    PNG = PNG[:33] + head + chunk + zlib.crc32(chunk).to_bytes(4, "big") + PNG[33:]


class Standin:
    def __init__(self) -> None:
        self.history: dict[str, dict] = {}
        self.names: dict[str, str] = {}  # {file: prompt id}
        self.socket: web.WebSocketResponse | None = None
        self.app = web.Application()
        self.app.add_routes(
            [
                web.get("/object_info", lambda request: self.json(OBJECT_INFO)),
                web.get("/system_stats", lambda request: self.json({"system": {}, "devices": []})),
                web.get("/queue", lambda request: self.json(self.queue())),
                web.get("/history", lambda request: self.json({})),
                web.get("/history/{id}", self.entry),
                web.get("/view", self.view),
                web.get("/ws", self.listen),
                web.post("/prompt", self.prompt),
            ]
        )

    async def json(self, data: dict) -> web.Response:
        return web.json_response(data)

    def queue(self) -> dict:
        return {"queue_running": [], "queue_pending": []}

    async def entry(self, request: web.Request) -> web.Response:
        found = self.history.get(request.match_info["id"])
        return await self.json({request.match_info["id"]: found} if found else {})

    async def view(self, request: web.Request) -> web.Response:
        # Forgotten only now: an answer that comes late is asked for again.
        self.history.pop(self.names.pop(request.query["filename"], ""), None)
        return web.Response(body=PNG, content_type="image/png")

    async def listen(self, request: web.Request) -> web.WebSocketResponse:
        self.socket = web.WebSocketResponse()
        await self.socket.prepare(request)
        await self.socket.send_json({"type": "status", "data": {}})
        async for _ in self.socket:
            pass
        return self.socket

    async def prompt(self, request: web.Request) -> web.Response:
        body = await request.json()
        prompt_id = body["prompt_id"]
        name = f"{body['prompt']['save']['inputs']['filename_prefix']}_00001_.png"
        self.names[name] = prompt_id
        image = {"filename": name, "subfolder": "", "type": "output"}
        now = int(time.time() * 1000)
        messages = [[kind, {"timestamp": now}] for kind in ("execution_start", "execution_success")]
        self.history[prompt_id] = {
            "outputs": {"save": {"images": [image]}},
            "status": {"status_str": "success", "completed": True, "messages": messages},
        }
        asyncio.get_running_loop().call_soon(self.tell, prompt_id)
        return await self.json({"prompt_id": prompt_id, "number": 1, "node_errors": {}})

    def tell(self, prompt_id: str) -> None:
        data = {"node": None, "prompt_id": prompt_id}
        text = json.dumps({"type": "executing", "data": data})
        self.told = asyncio.ensure_future(self.socket.send_str(text))


async def main(count: int) -> None:
    ports = []
    for _ in range(count):
        runner = web.AppRunner(Standin().app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        ports.append(runner.addresses[0][1])
    print(*ports, flush=True)
    await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
