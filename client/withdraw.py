"""Takes prompts off a server: ours, and nobody else's."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from .server import Server

LOOKS = 40
LOOK_SECONDS = 0.25


async def withdraw(server: Server, prompt_ids: Sequence[str]) -> bool:
    """Takes the prompts out of the queue and interrupts one that runs.

    What waits goes first, so that none of it begins when the running one stops.

    Args:
        prompt_ids: as they were chosen here, or as the server calls them.

    Returns:
        Whether the server has none of them any more; a node that runs may take long to notice.

    Raises:
        ServerError: the server stayed away.
    """
    if not prompt_ids:
        return True
    await server.delete(prompt_ids)
    for _ in range(LOOKS):
        queue = await server.queue()
        names = {queue.called.get(prompt_id, prompt_id) for prompt_id in prompt_ids}
        left = [prompt_id for prompt_id in names if prompt_id in queue]
        if not left:
            return True
        waiting = [prompt_id for prompt_id in left if prompt_id not in queue.running]
        if waiting:
            await server.delete(waiting)
        # Older servers interrupt whatever runs, so they are asked only while ours does.
        for prompt_id in left:
            if prompt_id in queue.running:
                await server.interrupt(prompt_id)
        await asyncio.sleep(LOOK_SECONDS)
    return False
