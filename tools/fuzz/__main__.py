"""Feeds broken files and texts to the package's readers: each is read, or refused in the error of
its room, within 2 s of the CPU's time and half a gigabyte. A finding is printed with the file that
repeats it, and ends the command with 1. A crash's case is the file that the first line names.
"""

import argparse
import faulthandler
import logging
import os
import re
import resource
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from random import Random
from typing import Any

from ...client import settings
from ...files import printable
from .targets import ROOT, TARGETS, Target

SECONDS, BYTES = 2, 2**29
STUCK = 60  # seconds of a case, for `SECONDS` of a CPU that many share
MEMORY = "/dev/shm"  # a disk takes longer than most cases


HOSTILE: tuple[Any, ...] = (
    *(None, True, 0, -1, 1, 3, 255, 2**31, 2**53, 2**63 - 1, 2**64, 10**30, 0.5, -0.0, 1e308),
    *("", " ", "a", "\0", "\x1b[2J", "\ud800", "..", "../x", "/", "\u202e", "1", "nan", "x" * 300),
    *("(a+)+$", "(.*)*x", ".*.*.*.*.*.*x", "(", "@digits", "@1e999", "@NaN", "@deep90000"),
    *([], {}, [[]], [{}], {"": None}, ["model", 0], ["model"], [None, None]),
)
PIECES = (".", "_", "9", "dit.", "transformer_blocks.", "=", "[", "(", "\n", "\0", " ", "..")


def changed(random: Random, value: Any) -> Any:
    """Copies JSON with one change somewhere in it."""
    what = random.random()
    if isinstance(value, dict | list) and value and what < 0.85:
        key = random.choice(list(value) if isinstance(value, dict) else range(len(value)))
        copy, what = value.copy(), random.random()
        if what < 0.65:
            copy[key] = changed(random, value[key])
        elif what < 0.75:
            del copy[key]
        elif isinstance(copy, list):
            copy.insert(key, random.choice(copy))
        else:
            copy[longer(random, key)] = copy.pop(key) if what < 0.95 else copy[key]
        return copy
    if isinstance(value, str) and what < 0.5:
        return longer(random, value)
    if isinstance(value, int | float) and what < 0.3:
        return value + random.choice((-1, 1, 0.5, 256, -2 * value))
    wrapped = (value, [value], {"a": value}, f"@deep{random.randint(20, 1100)}")
    return random.choice(wrapped if what > 0.9 else HOSTILE)


def longer(random: Random, text: str) -> str:
    at = random.choice((0, len(text), random.randint(0, len(text))))
    piece = random.choice((*PIECES, "", text[at : at + random.randint(1, 20)]))
    count = random.choice((*(1,) * 40, 2, 2, 20, 5000))
    return text[:at] + piece * count + text[at + random.choice((0, 0, 1)) :]


def damaged(random: Random, data: bytes) -> bytes:
    """Copies bytes with one change somewhere in them."""
    at, start = random.randint(0, len(data)), random.randint(0, len(data))
    count = random.choice((1, 1, 4, 8))
    number = random.choice((0, 1, 2**20, 2**31, 2**32 - 1, 2**60, 2**64 - 1))
    other = (number.to_bytes(8, "little")[:count], random.randbytes(count), b"")
    copied = data[start : start + random.choice((1, 8, 100))]
    piece, gone = random.choice((*((it, count) for it in other), (b"", len(data)), (copied, 0)))
    return data[:at] + piece + data[at + gone :]


def drawn(target: Target, random: Random) -> tuple[bytes, int]:
    """Gives a case, which is a seed with a few changes, and how many zeros follow it."""
    value, count = random.choice(target.seeds), random.choice((0, 1, 1, 2, 4))
    damages = sum(random.random() > 0.7 for _ in range(count))
    for _ in range(count - damages):
        value = changed(random, value)
    try:
        data, zeros = target.join(value)
    except Exception:  # which no longer has a file's form
        data, zeros = target.join(random.choice(target.seeds))
    for _ in range(damages):
        data = damaged(random, data)
    return data, zeros or 0


class TooSlowError(BaseException):
    """The CPU has worked for `SECONDS`."""


def stop(*_: object) -> None:
    raise TooSlowError


def limit(more: int) -> None:
    """Lets this process have that many bytes more than now; 0 ends the limit."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    pages = int(Path("/proc/self/statm").read_bytes().split()[0]) if more else 0
    most = pages * resource.getpagesize() + more or hard
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))


def tried(target: Target, path: Path, data: bytes, zeros: int = 0) -> str | None:
    """Reads one case; returns what is wrong, with the line that raised it."""
    path.write_bytes(data)
    os.truncate(path, len(data) + zeros)
    signal.signal(signal.SIGPROF, stop)
    limit(BYTES)  # of each case: what the process has kept does not count
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    faulthandler.dump_traceback_later(STUCK, exit=True)
    error = None
    try:
        target.read(path)
    except (Exception, TooSlowError) as raised:
        error = raised
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        faulthandler.cancel_dump_traceback_later()
        limit(0)
    said = printable(str(error), sys.stdout).strip()
    if error is None or (said and isinstance(error, target.clean)):
        return None
    frames = [it for it in traceback.extract_tb(error.__traceback__) if it.name != "stop"]
    last = ([it for it in frames if ROOT in Path(it.filename).resolve().parents] or frames)[-1]
    place = f"{Path(last.filename).name}:{last.lineno}"
    return f"{type(error).__name__} at {place}: {said[:200] or 'no words'}"


def search(name: str, path: Path, seed: int, cases: float, end: float) -> tuple[int, int]:
    """Tries cases of a target until `end`, shows what is wrong, counts (cases, kinds of it)."""
    number = 0
    places: set[Any] = set()
    while number < cases and time.monotonic() < end:
        data, zeros = drawn(TARGETS[name], Random(f"{seed} {name} {number}"))
        wrong = tried(TARGETS[name], path, data, zeros)
        if wrong and (place := wrong.partition(": ")[0]) not in places:
            kept = Path(
                f"fuzz-{re.sub('[^A-Za-z]+', '-', name).strip('-')}-{len(places)}"
            ).resolve()
            places.add(place)
            kept.write_bytes(data)
            os.truncate(kept, len(data) + zeros)
            print(f"{name}: seed {seed}, case {number}, {wrong}")
            print(f"  again: --only={name!r} --file {kept}", flush=True)
        number += 1
    return number, len(places)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--cases", type=int, help="of each target, instead of minutes")
    parser.add_argument("--seed", type=int, default=0, help="of the cases")
    parser.add_argument("--only", choices=TARGETS, action="append", help="a target")
    parser.add_argument("--file", type=Path, help="try this case of --only alone")
    args = parser.parse_args()
    names, rows, wrong = args.only or list(TARGETS), {}, 0
    seconds = float("inf") if args.cases else 60 * args.minutes / len(names)
    faulthandler.enable()
    logging.disable(logging.WARNING)  # which report a damaged measurement
    settings.MAX_JOBS = 1000  # each takes its microseconds, as many as somebody asks for
    with tempfile.TemporaryDirectory(prefix="qwen-l40s-fuzz-", dir=MEMORY) as folder:
        if args.file:
            target = TARGETS[names[0]]
            sys.exit(tried(target, Path(folder, target.name), args.file.read_bytes()))
        for name in names:
            path, start = Path(folder, TARGETS[name].name), time.monotonic()
            print(f"{name}: {path}", flush=True)
            cases = args.cases or float("inf")
            rows[name], found = search(name, path, args.seed, cases, start + seconds)
            wrong, each = wrong + found, (time.monotonic() - start) * 1e6 / max(rows[name], 1)
            print(f"{name}: {rows[name]:,} cases, {found} found, {each:.0f} us each", flush=True)
    print(f"{sum(rows.values()):,} cases, {wrong} found")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
