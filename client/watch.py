"""Where the jobs of a run are, by the server's queue: the judge of what the websocket tells.

What is in neither the queue nor the history was taken out of the queue by someone, or the server
was started anew and has forgotten everything. No answer of ComfyUI tells the two apart, so:

- As long as no connection was lost since the job was last seen, the server is the same process:
  someone took the job out. It stays out.
- After a lost connection it is the same process where its history still has an entry that it had
  before; else it was restarted, and the job is queued again.

So a job is lost by neither, and nobody who empties the queue sees it fill up again, except where
the connection broke in between and no history is there to ask.
"""

from __future__ import annotations

from .follow import Follower
from .job import QUEUED, Job
from .server import Queue, Server


class Watch:
    """Compares jobs with the queue.

    Attributes:
        ahead: prompts of others before the first of our jobs; None while one of ours runs.
    """

    def __init__(self, server: Server, follower: Follower) -> None:
        self.ahead: int | None = None
        self._server = server
        self._follower = follower
        self._witness: str | None = None  # a prompt in the history of the process we know
        self._places: dict[str, int] = {}
        self._heard = 0
        self._suspicious = False

    @property
    def breaks(self) -> int:
        """Grows with each connection that is lost, and with each websocket that is opened."""
        return self._server.transport.breaks + self._follower.turns

    async def begin(self) -> None:
        """Finds a witness, where the server has one."""
        self._witness = await self._server.newest()

    def ended(self, job: Job) -> None:
        """The history has the job's entry."""
        self._witness = job.prompt_id

    async def gone(self, jobs: list[Job]) -> list[Job]:
        """Those of the queued jobs that are no longer in the queue."""
        known = [job for job in jobs if job.status == QUEUED]
        breaks = self.breaks
        queue = await self._server.queue()
        here = [job for job in known if job.prompt_id in queue]
        for job in here:
            job.breaks = breaks
            job.ran = job.ran or job.prompt_id in queue.running
        self.ahead = min((queue.places[job.prompt_id] for job in here), default=0)
        if any(job.prompt_id in queue.running for job in here):
            self.ahead = None
        await self._check_socket(queue)
        return [job for job in known if job.prompt_id not in queue and job.status == QUEUED]

    async def removed(self, job: Job) -> bool:
        """Whether someone took out a job that neither the queue nor the history has; else the
        server was restarted.
        """
        # Between two websockets a restart is not seen, where they can be had at all.
        unsure = self._follower.turns > 0 and not self._follower.connected
        if self.breaks == job.breaks and not unsure:
            return True
        if self._witness is not None and await self._server.history(self._witness) is not None:
            return True
        self._witness = None
        return False

    async def _check_socket(self, queue: Queue) -> None:
        """Renews a websocket that told nothing although the queue changed before the last look.

        The server tells every socket when its queue changes (server.py, queue_updated).
        """
        changed = queue.places != self._places
        silent = self._follower.heard == self._heard
        if self._follower.connected and silent and self._suspicious:
            await self._follower.renew()
            changed = False
        self._suspicious = silent and (changed or self._suspicious)
        self._places, self._heard = dict(queue.places), self._follower.heard
