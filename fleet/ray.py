"""The fleet of a Ray cluster: each server is an actor, which Ray places and restarts.

Ray knows nothing of jobs: these go by HTTP, and their journal is the client's. So Ray may end at
any time, and the next fleet goes on.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NoReturn

from ..errors import SettingError, UnavailableError
from .server import FleetServer, ServerPlan
from .state import FAILED, RESTARTING, STOPPED, ServerState, StateFile, try_port
from .supervisor import on_signals

# A cluster whose cards are taken, or has none, would be waited for without an end.
PLACE_SECONDS = 120.0
POLL_SECONDS = 2.0
# Ray's calls wait for a cluster that is gone, some without an end; after 60 s Ray ends the process
# itself, and does not say what to do.
LOST_SECONDS = 30.0
EXIT_LOST = 3
# That a server tries on its machine.
PORTS = 100


class ServerActor:
    """A server of the fleet on a machine of the cluster; runs as a Ray actor."""

    def __init__(self, plan: ServerPlan, cpu: bool, ports: range, threads: str | None) -> None:
        import ray

        # Ray sets one thread, in which ComfyUI would quantize and encode on the processor.
        os.environ.pop("OMP_NUM_THREADS", None)
        if threads:
            os.environ["OMP_NUM_THREADS"] = threads
        host = ray.util.get_node_ip_address()
        port = _free_port(ports)
        # Ray shows the process its own card alone.
        listening = replace(plan, arguments=("--listen", host, *plan.arguments))
        self._server = FleetServer(listening, port, "cpu" if cpu else "", host=host)
        if not cpu:
            self._server.state.card = ",".join(map(str, ray.get_gpu_ids()))
        self._server.start()

    def state(self) -> dict[str, Any]:
        return vars(self._server.state)

    def drain(self) -> None:
        self._server.stopping.set()

    def ended(self) -> bool:
        return self._server.join(0)


def run_ray_fleet(
    plan: ServerPlan,
    address: str,
    count: int | None,
    port: int,
    notify: Callable[[str], None],
    *,
    cpu: bool = False,
) -> int:
    """Runs a server on each card of a cluster until SIGINT or SIGTERM.

    Args:
        address: of the cluster: "auto", "host:6379" or "ray://host:10001".
        count: servers; None for one on each card.
        port: the first that a server tries on its machine.
        cpu: whether the servers use no card.

    Returns:
        The exit code: 0 after a signal, 1 where no server can be started, 3 where the cluster was
        lost.

    Raises:
        UnavailableError: Ray is missing, has another version, or the cluster lacks the cards.
        SettingError: no cluster is there.
    """
    if count is not None and count < 1:
        raise SettingError("--cards must name at least one server.")
    ray = _connect(address)
    cards = int(ray.cluster_resources().get("GPU", 0))
    count = count or cards
    if not count or (count > cards and not cpu):
        raise UnavailableError(
            f"the cluster has {cards} GPUs, and {count or 1} servers need one each: start Ray with "
            "--num-gpus on machines with cards, or name fewer with --cards."
        )
    fleet = RayFleet(ray, StateFile(plan.folder), notify)
    stop = threading.Event()
    try:
        with on_signals(stop.set), Heartbeat(fleet.lost) as heard:
            fleet.start(plan, count, port, cpu=cpu)
            while not (stop.is_set() or fleet.failed):
                fleet.look()
                heard.beat()
                stop.wait(POLL_SECONDS)
            while not fleet.drained():
                heard.beat()
                time.sleep(POLL_SECONDS)
    finally:
        fleet.file.close()
    ray.shutdown()
    return int(fleet.failed)


class RayFleet:
    """The actors of a fleet, and what they said last.

    Args:
        ray: the module, connected.
        file: for their states.
        notify: gets a line for each change.
    """

    def __init__(self, ray: Any, file: StateFile, notify: Callable[[str], None]) -> None:
        self.file = file
        self._ray, self._notify = ray, notify
        self._home = ray.get_runtime_context().get_node_id()
        self._actors: list[Any] = []
        self._states: dict[int, ServerState] = {}
        self._said: dict[int, str] = {}
        self._give_up = 0.0
        self._draining = False

    def start(self, plan: ServerPlan, count: int, port: int, *, cpu: bool) -> None:
        """Asks Ray for the actors."""
        remote = self._ray.remote(
            num_cpus=1 if cpu else 0,
            num_gpus=0 if cpu else 1,
            max_restarts=-1,
            max_task_retries=0,
            scheduling_strategy="SPREAD",
        )(ServerActor)
        # Several may come to one machine at the same time: each has ports of its own.
        ports = [range(port + number, port + PORTS * count, count) for number in range(count)]
        threads = os.environ.get("OMP_NUM_THREADS")
        self._actors = [remote.remote(plan, cpu, own, threads) for own in ports]
        self._give_up = time.monotonic() + PLACE_SECONDS

    @property
    def failed(self) -> bool:
        """Whether no server is started again."""
        ended = [state for state in self._states.values() if state.state == FAILED]
        return len(ended) == len(self._actors)

    def look(self) -> None:
        """Asks the actors how their servers fare.

        Raises:
            UnavailableError: Ray starts none.
        """
        nodes = self._ray.nodes()
        if not any(node["Alive"] and node["NodeID"] == self._home for node in nodes):
            self.lost()
        asked = [actor.state.remote() for actor in self._actors]
        self._ray.wait(asked, num_returns=len(asked), timeout=POLL_SECONDS)
        for number, answer in enumerate(asked):
            try:
                self._states[number] = ServerState(**self._ray.get(answer, timeout=0))
            except self._ray.exceptions.GetTimeoutError:
                if number not in self._states and time.monotonic() > self._give_up:
                    raise UnavailableError(
                        f"Ray has not started server {number + 1} of {len(asked)} within "
                        f"{PLACE_SECONDS:.0f} s: its resources are taken (`ray status` shows by "
                        "whom), or name fewer with --cards."
                    ) from None
            except self._ray.exceptions.RayActorError as error:
                if number not in self._states:
                    raise UnavailableError(f"Ray cannot start a server: {error}") from error
                # Ray starts it again, perhaps elsewhere.
                reason = str(error).splitlines()[0]
                self._set(number, RESTARTING, reason)
        self._write()

    def drained(self) -> bool:
        """Lets the servers end their jobs; whether all have ended."""
        if not self._draining:
            self._notify("draining the servers")
            self._draining = True
        left = False
        for number, actor in enumerate(self._actors):
            try:
                self._ray.get(actor.drain.remote(), timeout=POLL_SECONDS)
                ended = self._ray.get(actor.ended.remote(), timeout=POLL_SECONDS)
                found = self._ray.get(actor.state.remote(), timeout=POLL_SECONDS)
                self._states[number] = ServerState(**found)
            except self._ray.exceptions.RayActorError:
                self._ray.kill(actor)  # or Ray would start it again
                self._set(number, STOPPED, "")
                ended = True
            except self._ray.exceptions.GetTimeoutError:
                ended = False
            left = left or not ended
        self._write()
        return not left

    def lost(self) -> NoReturn:
        """Ends the process, for Ray's own end would wait for the cluster."""
        for number in self._states:
            self._set(number, STOPPED, "")
        with contextlib.suppress(OSError):
            self.file.write(list(self._states.values()))
        self._notify(
            "the Ray cluster is lost, and its servers with it: start it again, then the fleet. "
            "Jobs go on with submit --resume."
        )
        os._exit(EXIT_LOST)

    def _set(self, number: int, state: str, error: str) -> None:
        if number in self._states:
            self._states[number] = replace(self._states[number], state=state, error=error)

    def _write(self) -> None:
        self.file.write(list(self._states.values()))
        for number, state in self._states.items():
            words = f"{state.url} on {state.machine} (card {state.card}) {state.state}"
            words += f": {state.error}" if state.error else ""
            if self._said.get(number) != words:
                self._said[number] = words
                self._notify(words)


class Heartbeat:
    """Calls `lost` where nothing was heard of Ray for long: its calls then return to nobody. A
    context manager.
    """

    def __init__(self, lost: Callable[[], NoReturn]) -> None:
        self.lost = lost
        self._last = time.monotonic()
        self._done = threading.Event()

    def beat(self) -> None:
        self._last = time.monotonic()

    def __enter__(self) -> Heartbeat:
        threading.Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()

    def _watch(self) -> None:
        while not self._done.wait(1.0):
            if time.monotonic() - self._last > LOST_SECONDS:
                self.lost()


def _connect(address: str) -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError as error:
        raise UnavailableError(
            'fleet --ray needs Ray, not installed here: run `pip install ".[ray]"`.'
        ) from error
    if address != "auto":
        host, _, port = address.removeprefix("ray://").rpartition(":")
        try:
            socket.create_connection((host, int(port)), 10).close()
        except (OSError, ValueError) as error:
            raise SettingError(
                f"no Ray cluster answers at {address!r} ({error}): give the address that "
                "`ray start --head` printed, such as 10.0.0.5:6379."
            ) from error
    # Other machines need not have this package under the name that it has here.
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__.split(".")[0]])
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except ConnectionError as error:
        raise SettingError(
            f"no Ray cluster is running here ({error}): start one with `ray start --head`, or "
            "give its address."
        ) from error
    except RuntimeError as error:
        # Ray compares its own version and Python's with the cluster's.
        text = " ".join(str(error).split())
        if "ersion" not in text:
            raise
        raise UnavailableError(
            f"the cluster has another Ray or Python ({text[:300]}): install the same here."
        ) from error
    return ray


def _free_port(ports: range) -> int:
    for port in ports:
        with contextlib.suppress(OSError):
            try_port("", port)
            return port
    raise UnavailableError(f"no port from {ports[0]} to {ports[-1]} is free on this machine.")
