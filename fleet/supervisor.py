"""Runs the fleet of one machine: a server for each card, until a signal drains them."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence

from ..errors import SettingError, UnavailableError
from .server import FleetServer, ServerPlan, end_left
from .state import FAILED, StateFile, try_port

JOIN_SECONDS = 0.2
# Of which each server has its own.
OWN_FLAGS = {"--port", "--output-directory", "--temp-directory", "--cuda-device", "--database-url"}


def check_plan(plan: ServerPlan) -> None:
    """Raises SettingError for what cannot be used, and UnavailableError but on Linux."""
    if sys.platform != "linux":
        raise UnavailableError(
            "fleet needs Linux, where the servers end with the fleet: here, start ComfyUI once "
            "for each GPU, and name each with `submit --server`."
        )
    for word in plan.arguments:
        if word.partition("=")[0] in OWN_FLAGS:
            raise SettingError(
                f"{word} cannot follow `--`, because each server of a fleet has a value of its "
                "own: use --port, --folder and --cards."
            )
    if not (plan.comfyui / "main.py").is_file():
        raise SettingError("--comfyui is not a ComfyUI folder: main.py is missing.", plan.comfyui)
    if not plan.python.is_file():
        raise SettingError(
            "ComfyUI's Python is not there: name it with --python.",
            plan.python,
        )
    if plan.warm_up is not None:
        with contextlib.suppress(OSError, ValueError, AttributeError, TypeError):
            plan.warm_up_command("", "")
            return
        raise SettingError(
            "--warm-up is not a workflow in API form: export one with File > Export (API).",
            plan.warm_up,
        )


def find_cards(text: str) -> list[str]:
    """Returns the cards of `all`, `0,1` or `cpu:2`; raises SettingError, UnavailableError."""
    kind, _, count = text.partition(":")
    if kind == "cpu":
        if not (count or "1").isdecimal() or int(count or 1) < 1:
            raise SettingError(
                f"--cards {text!r} is wrong: write cpu:N with the number of servers."
            )
        return ["cpu"] * int(count or 1)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        teller, found = "nvidia-smi", [str(card) for card in range(count_cards())]
    else:  # a scheduler, which gives this process some of the machine's cards
        teller, found = "CUDA_VISIBLE_DEVICES", [card.strip() for card in visible.split(",")]
        found = [card for card in found if card]
    if text == "all":
        if not found:
            raise UnavailableError(
                f"{teller} lists no GPU: name GPUs with --cards 0,1, or use --cards cpu:2."
            )
        return found
    cards = [part.strip() for part in text.split(",")]
    if not all(card.isdecimal() or card in found for card in cards) or len({*cards}) < len(cards):
        raise SettingError(f"--cards {text!r} is wrong: write all, numbers such as 0,1, or cpu:2.")
    for card in cards:
        if found and card not in found:
            raise UnavailableError(f"there is no GPU {card}: {teller} lists {', '.join(found)}.")
    return cards


def count_cards() -> int:
    """Asks nvidia-smi for the number of cards; 0 without a driver."""
    try:
        # A faulty card can block it for minutes.
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return 0
    return len(done.stdout.splitlines())


def listen_address(arguments: Sequence[str]) -> str:
    """Returns where this machine reaches a server with these arguments of ComfyUI."""
    words = [*arguments, "--"]
    for word, following in itertools.pairwise(words):
        if word.partition("=")[0] == "--listen":
            address = (word.partition("=")[2] or following).partition(",")[0]
            return "127.0.0.1" if address in ("0.0.0.0", "::") or address[0] == "-" else address
    return "127.0.0.1"


def check_ports(ports: Sequence[int], host: str = "127.0.0.1") -> None:
    """Raises SettingError where something listens already."""
    for port in ports:
        try:
            try_port(host, port)
        except (OSError, OverflowError) as error:
            raise SettingError(
                f"port {port} cannot be used ({getattr(error, 'strerror', None) or error}): stop "
                "the program on that port, or choose another first --port."
            ) from error


def run_fleet(
    plan: ServerPlan, cards: Sequence[str], port: int, notify: Callable[[str], None]
) -> int:
    """Runs a server for each card until SIGINT or SIGTERM, which drains them; a second signal ends
    them at once. Returns 0, or 1 where no server can be started; raises SettingError before.
    """
    check_plan(plan)
    host = listen_address(plan.arguments)
    check_ports(range(port, port + len(cards)), host)
    file = StateFile(plan.folder, notify)
    end_left(plan.folder)  # of a fleet that was killed

    def changed() -> None:
        file.write([server.state for server in servers])

    servers: list[FleetServer] = []
    servers += [
        FleetServer(plan, port + place, card, host=host, changed=changed)
        for place, card in enumerate(cards)
    ]

    def stop() -> None:
        again = servers[0].stopping.is_set()
        for server in servers:
            (server.hurry if again else server.stopping).set()
        # Not from here: a handler must not wait for a lock that the main thread has.
        words = "stopping at once" if again else "draining: a second signal ends the jobs"
        threading.Thread(target=notify, args=(words,)).start()

    with on_signals(stop):
        changed()
        for server in servers:
            server.start()
        # Not one long join: the main thread would hear of no signal.
        for server in servers:
            while not server.join(JOIN_SECONDS):
                pass
    file.close()
    return int(all(server.state.state == FAILED for server in servers))


@contextlib.contextmanager
def on_signals(stop: Callable[[], None]) -> Iterator[None]:
    before = {
        number: signal.signal(number, lambda *_: stop())
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
