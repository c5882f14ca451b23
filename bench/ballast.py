"""Holds a part of a card's memory, so that a large card has as little free as a small one.

    python benchmarks/ballast.py --free-gib 44.4    leaves 44.4 GiB free
    python benchmarks/ballast.py --share 0.5        takes half of what is free

Prints one line when it holds it, "ready" and then JSON. Each "used" that it reads is answered with
the bytes in use on the card. It ends with its standard input, so with the process that started it,
however that ends.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

from .memory_server import ChildProcess, wait_or_kill

GIB = 2**30
CHUNK = GIB
# What cudaMalloc rounds up to.
STEP = 2**21


class Ballast(ChildProcess):
    """The process that holds the memory, for the one that wants it held.

    Args:
        python: has torch.
        arguments: of this file's command line.

    Raises:
        RuntimeError: the card has less free than is to stay free, or cannot be used.
    """

    def __init__(self, python: str, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [python, __file__, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        first = self._process.stdout.readline()
        if not first.startswith("ready "):
            raise RuntimeError(f"the ballast failed: {self._process.communicate()[1][-2000:]}")
        self.facts: dict = json.loads(first.removeprefix("ready "))

    def used(self) -> int:
        """The bytes in use on the card, by all processes."""
        self._process.stdin.write("used\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def close(self) -> None:
        """Gives the memory back."""
        self._process.stdin.close()
        wait_or_kill(self._process, 30)
        self._process.stdout.close()
        self._process.stderr.close()


def hold(target: int) -> list:
    """Allocates until at most `target` bytes, rounded up to `STEP`, are free."""
    import torch

    held = []
    while (excess := torch.cuda.mem_get_info()[0] - target) >= STEP:
        size = min(CHUNK, excess // STEP * STEP)
        held.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
    return held


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--free-gib", type=float, help="GiB to leave free")
    what.add_argument("--share", type=float, help="the part to take of what is free")
    arguments = parser.parse_args()
    import torch

    torch.cuda.init()
    # After the context, which takes memory of its own.
    free, total = torch.cuda.mem_get_info()
    if arguments.share is not None:
        target = int(free * (1 - arguments.share))
    else:
        target = int(arguments.free_gib * GIB)
    if target > free:
        print(
            f"{target / GIB:.1f} GiB are to stay free and the card has {free / GIB:.1f} GiB free: "
            "end what else runs on it, or ask for less",
            file=sys.stderr,
        )
        return 2
    held = hold(target)
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    facts = {
        "card": properties.name,
        "uuid": str(getattr(properties, "uuid", "")),
        "total_gib": total / GIB,
        "held_gib": sum(chunk.numel() for chunk in held) / GIB,
        "free_gib": torch.cuda.mem_get_info()[0] / GIB,
        "torch": torch.__version__,
    }
    print("ready", json.dumps(facts), flush=True)
    for line in sys.stdin:
        if line.strip() == "used":
            free, total = torch.cuda.mem_get_info()
            print(total - free, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
