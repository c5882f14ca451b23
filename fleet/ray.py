"""Runs the fleet of a Ray cluster: each server is an actor, which Ray places and restarts. Jobs go
by HTTP, and their journal is the client's, so that the next fleet goes on.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
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
    """Runs a server of the fleet on a machine of the cluster, as a Ray actor."""

    def __init__(
        self, plan: ServerPlan, cpu: bool, ports: range, threads: str | None, open_: bool
    ) -> None:
        import ray

        # Ray sets one thread, in which ComfyUI would quantize and encode on the CPU.
        os.environ.pop("OMP_NUM_THREADS", None)
        if threads:
            os.environ["OMP_NUM_THREADS"] = threads
        host = ray.util.get_node_ip_address() if open_ else "127.0.0.1"
        # Ray shows the process its own card alone.
        listening = replace(plan, arguments=("--listen", host, *plan.arguments))
        self._server = FleetServer(listening, _free_port(ports), "cpu" if cpu else "", host=host)
        if not cpu:
            self._server.state.card = ",".join(map(str, ray.get_gpu_ids()))
        self._server.start()

    def report(self, drain: bool) -> tuple[dict[str, Any], bool]:
        """Drains the server if asked to; tells its state, and whether it has ended for good."""
        if drain:
            self._server.stopping.set()
        ended = self._server.join(0)
        return vars(self._server.state), ended


def run_ray_fleet(
    plan: ServerPlan,
    address: str,
    count: int | None,
    port: int,
    notify: Callable[[str], None],
    *,
    cpu: bool = False,
    open_: bool = False,
) -> int:
    """Runs a server on each card of a cluster until SIGINT or SIGTERM; `open_` servers listen on
    their machines' addresses. Returns 0, 1 where none can be started, 3 where the cluster was lost.
    Raises UnavailableError and SettingError before.
    """
    if count is not None and count < 1:
        raise SettingError("--cards must name at least one server.")
    ray = _connect(address)
    cards = int(ray.cluster_resources().get("GPU", 0))
    count = count or cards
    if not count or (count > cards and not cpu):
        raise UnavailableError(
            f"the cluster has {cards} GPUs, and {count or 1} servers need one each: start Ray "
            "with a higher --num-gpus, or ask for fewer servers with --cards."
        )
    machines = {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    if len(machines) > 1 and not open_:
        raise SettingError(
            f"the cluster has {len(machines)} machines, whose servers are reached over the "
            "network without a password: in a private network, add --open."
        )
    options = {"num_cpus": 1, "num_gpus": 0} if cpu else {"num_cpus": 0, "num_gpus": 1}
    remote = ray.remote(**options, max_restarts=-1, scheduling_strategy="SPREAD")(ServerActor)
    # Several may come to one machine at the same time: each has ports of its own.
    ports = [range(port + number, port + PORTS * count, count) for number in range(count)]
    threads = os.environ.get("OMP_NUM_THREADS")
    fleet = RayFleet(ray, StateFile(plan.folder, notify), notify)
    stop = threading.Event()
    try:
        with on_signals(stop.set):
            with fleet.unless_lost():
                fleet.actors = [remote.remote(plan, cpu, own, threads, open_) for own in ports]
            while not (fleet.look(drain=False) or stop.wait(POLL_SECONDS)):
                pass
            notify("draining the servers")
            while not fleet.look(drain=True):
                time.sleep(POLL_SECONDS)
    finally:
        fleet.file.close()
    ray.shutdown()
    return int(all(state.state == FAILED for state in fleet.states.values()))


class RayFleet:
    def __init__(self, ray: Any, file: StateFile, notify: Callable[[str], None]) -> None:
        self.file = file
        self.actors: list[Any] = []
        self.states: dict[int, ServerState] = {}
        self._ray, self._notify = ray, notify
        self._home = ray.get_runtime_context().get_node_id()
        self._give_up = time.monotonic() + PLACE_SECONDS

    def look(self, drain: bool) -> bool:
        """Asks actors for states, or to drain; says if all ended. Raises UnavailableError."""
        with self.unless_lost():
            nodes = self._ray.nodes()
            if not any(node["Alive"] and node["NodeID"] == self._home for node in nodes):
                self._lost()
            asked = [actor.report.remote(drain) for actor in self.actors]
            self._ray.wait(asked, num_returns=len(asked), timeout=POLL_SECONDS)
            ended = [self._hear(number, answer, drain) for number, answer in enumerate(asked)]
        self.file.write(list(self.states.values()))
        return all(ended)

    def _hear(self, number: int, answer: Any, drain: bool) -> bool:
        state = self.states.get(number)
        try:
            report, ended = self._ray.get(answer, timeout=0)
            self.states[number] = ServerState(**report)
            return ended
        except self._ray.exceptions.GetTimeoutError:
            if state is None and time.monotonic() > self._give_up:
                raise UnavailableError(
                    f"Ray has not started server {number + 1} of {len(self.actors)} within "
                    f"{PLACE_SECONDS:.0f} s, because the resources are in use: see `ray status`, "
                    "or ask for fewer servers with --cards."
                ) from None
        except self._ray.exceptions.RayActorError as error:
            if drain:
                self._ray.kill(self.actors[number])  # or Ray would start it again
            elif state is None:
                raise UnavailableError(f"Ray cannot start a server: {error}") from error
            if state is not None:  # Ray starts it again, perhaps on another machine
                new, why = (STOPPED, "") if drain else (RESTARTING, str(error).splitlines()[0])
                self.states[number] = replace(state, state=new, error=why)
            return drain
        return False

    @contextlib.contextmanager
    def unless_lost(self) -> Iterator[None]:
        """Ends the process where Ray's calls in the block do not return."""
        timer = threading.Timer(LOST_SECONDS, self._lost)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _lost(self) -> NoReturn:
        # Ray's own end would wait for the cluster.
        self.file.write([replace(each, state=STOPPED, error="") for each in self.states.values()])
        self._notify(
            "the Ray cluster and its servers are lost: start the cluster again, then the fleet. "
            "Continue jobs with submit --resume."
        )
        os._exit(EXIT_LOST)


def _connect(address: str) -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError as error:
        raise UnavailableError(
            'fleet --ray needs Ray, which is not installed: run `pip install ".[ray]"`.'
        ) from error
    if address != "auto":
        host, _, port = address.removeprefix("ray://").rpartition(":")
        try:
            socket.create_connection((host, int(port)), 10).close()
        except (OSError, ValueError) as error:
            raise SettingError(
                f"no Ray cluster answers at {address!r} ({error}): give the address that `ray "
                "start --head` printed, such as 10.0.0.5:6379."
            ) from error
    # Other machines need not have this package under the name that it has here.
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__.split(".")[0]])
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError) as error:
        # Ray compares its own version and Python's with the cluster's.
        raise UnavailableError(
            f"cannot join the Ray cluster ({' '.join(str(error).split())[:300]}): start one with "
            "`ray start --head`, with the same versions of Ray and Python as here, or give its "
            "address."
        ) from error
    return ray


def _free_port(ports: range) -> int:
    for port in ports:
        with contextlib.suppress(OSError):
            try_port("", port)
            return port
    raise UnavailableError(
        f"no port from {ports[0]} to {ports[-1]} is free on this machine: end programs that listen."
    )
