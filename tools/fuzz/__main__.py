"""Feeds broken files and texts to the package's readers: each is read, or refused in the error of
its room, within 2 s of the processor's time and half a gigabyte.

A case is drawn from its target, seed and number alone; where atheris is installed and no seed is
given, what reaches new code is changed further. A finding is printed with the file that repeats it,
and ends the command with 1.
"""

import argparse
import contextlib
import faulthandler
import multiprocessing
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

from ...files import printable

try:
    import atheris
except ImportError:
    atheris = None
with atheris.instrument_imports(include=["qwen_l40s"]) if atheris else contextlib.nullcontext():
    from .targets import ROOT, TARGETS, Target

SECONDS, BYTES = 2, 2**29
STUCK = 60  # seconds without a new case, for `SECONDS` of a processor that many share
PAGE = ROOT / "docs" / "dev" / "development.md"
MEMORY = "/dev/shm"  # a disk takes longer than most cases
FORK = multiprocessing.get_context("fork")


# What is changed.

HOSTILE = (
    *(None, True, 0, -1, 1, 3, 255, 2**31, 2**53, 2**63 - 1, 2**64, 10**30, 0.5, -0.0, 1e308),
    *("", " ", "a", "\0", "\x1b[2J", "\ud800", "..", "../x", "/", "\u202e", "1", "nan", "x" * 300),
    *("(a+)+$", "(.*)*x", ".*.*.*.*.*.*x", "(", "@digits", "@1e999", "@NaN", "@deep90000"),
    *([], {}, [[]], [{}], {"": None}, ["model", 0], ["model"], [None, None]),
)
PIECES = (".", "_", "9", "dit.", "transformer_blocks.", "=", "[", "(", "\n", "\0", " ", "..")


def changed(random: Random, value: Any) -> Any:
    """Copies JSON with one change somewhere in it."""
    if isinstance(value, dict | list) and value and random.random() < 0.85:
        key = random.choice(list(value) if isinstance(value, dict) else range(len(value)))
        inner, what = changed(random, value[key]), random.random()
        copy = value.copy()
        if what < 0.65:
            copy[key] = inner
        elif what < 0.75:
            del copy[key]
        elif isinstance(copy, list):
            copy.insert(key, random.choice(copy))
        else:
            copy[longer(random, key)] = copy.pop(key) if what < 0.95 else copy[key]
        return copy
    what = random.random()
    if isinstance(value, str) and what < 0.5:
        return longer(random, value)
    if isinstance(value, int | float) and what < 0.3:
        return value + random.choice((-1, 1, 0.5, 256)) if what < 0.2 else -value
    if what > 0.95:
        return f"@deep{random.randint(20, 1100)}"
    return random.choice((value, [value], {"a": value})) if what > 0.9 else random.choice(HOSTILE)


def longer(random: Random, text: str) -> str:
    at = random.choice((0, len(text), random.randint(0, len(text))))
    if random.random() < 0.3:
        return text[:at] + random.choice(("", text[at + 1 :]))
    own = text[at : at + random.randint(1, 20)]
    piece = random.choice(PIECES) if random.random() < 0.7 else own
    return text[:at] + piece * random.choice((*(1,) * 40, 2, 2, 20, 5000)) + text[at:]


def damaged(random: Random, data: bytes) -> bytes:
    """Copies bytes with one change somewhere in them."""
    at, start = random.randint(0, len(data)), random.randint(0, len(data))
    count = random.choice((1, 1, 4, 8))
    number = random.choice((0, 1, 2**20, 2**31, 2**32 - 1, 2**60, 2**64 - 1))
    other = (number.to_bytes(8, "little")[:count], random.randbytes(count), b"")
    copied = data[start : start + random.choice((1, 8, 100))]
    piece, gone = random.choice((*((it, count) for it in other), (b"", len(data)), (copied, 0)))
    return data[:at] + piece + data[at + gone :]


def drawn(target: Target, choices: list[Random]) -> tuple[bytes, int]:
    """Gives a case and its zeros: the first chooses a seed, each other a change of it."""
    first, *others = choices
    value, of_bytes = first.choice(target.seeds), []
    for random in others:
        if random.random() < 0.7:
            value = changed(random, value)
        else:
            of_bytes.append(random)
    try:
        data, zeros = target.join(value)
    except Exception:  # which no longer has a file's form
        data, zeros = target.join(first.choice(target.seeds))
    for random in of_bytes:
        data = damaged(random, data)
    huge = zeros is not None and first.random() < 0.001
    return data, 2**30 if huge else zeros or 0


# How cases are tried.


class TooSlowError(BaseException):
    """The processor has worked for `SECONDS`."""


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
    limit(BYTES)  # of each case: what a process leaves behind does not count
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    error = None
    try:
        target.read(path)
    except (Exception, TooSlowError) as raised:
        error = raised
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        limit(0)
    said = printable(str(error), sys.stdout).strip()
    if error is None or (said and isinstance(error, target.clean)):
        return None
    frames = [it for it in traceback.extract_tb(error.__traceback__) if it.name != "stop"]
    last = ([it for it in frames if ROOT in Path(it.filename).resolve().parents] or frames)[-1]
    place = f"{Path(last.filename).name}:{last.lineno}"
    return f"{type(error).__name__} at {place}: {said[:200] or 'no words'}"


class Search:
    """Tries `cases` of one target, or until `end`, in a process of its own: a crash ends it alone.
    Without a seed atheris chooses them.
    """

    def __init__(
        self, name: str, folder: str, seed: int | None, cases: int | None, end: float
    ) -> None:
        self.name, self.seed, self.cases, self.end = name, seed, cases, end
        self.target, self.path, self.places = TARGETS[name], Path(folder, TARGETS[name].name), set()
        self.counts = FORK.RawArray("Q", 2)  # cases tried, found: both processes see them

    def run(self) -> tuple[int, int]:
        """Returns (how many cases, what was found)."""
        process = FORK.Process(target=self.guide if self.seed is None else self.draw)
        process.start()
        while process.is_alive():
            before = self.counts[0]
            process.join(STUCK)
            if process.is_alive() and self.counts[0] == before:
                os.kill(process.pid, signal.SIGABRT)  # of which faulthandler says where
        if process.exitcode:
            self.show(self.path.read_bytes(), 0, f"its process ended with {process.exitcode}")
        return self.counts[0], self.counts[1]

    def draw(self) -> None:
        faulthandler.enable()
        while time.monotonic() < self.end if self.cases is None else self.counts[0] < self.cases:
            random = Random(f"{self.seed} {self.name} {self.counts[0]}")
            self.attempt(*drawn(self.target, [random] * random.choice((1, 2, 2, 3, 5))))

    def guide(self) -> None:
        """Lets atheris make the choices, four bytes each; it ends the process."""

        def one(data: bytes) -> None:
            parts = [data[at : at + 4] for at in range(0, len(data) or 1, 4)]
            self.attempt(*drawn(self.target, list(map(Random, parts))))

        limits = [f"-max_total_time={self.end - time.monotonic():.0f}", "-max_len=64"]
        quiet = ["-rss_limit_mb=0", "-verbosity=0", f"-artifact_prefix={self.path}."]
        atheris.Setup([sys.argv[0], *limits, *quiet], one)
        atheris.Fuzz()

    def attempt(self, data: bytes, zeros: int) -> None:
        """Tries a case, and keeps the first of a kind that is wrong."""
        wrong = tried(self.target, self.path, data, zeros)
        if wrong and (place := wrong.partition(": ")[0]) not in self.places:
            self.places.add(place)
            self.show(data, zeros, wrong)
        self.counts[0] += 1

    def show(self, data: bytes, zeros: int, wrong: str) -> None:
        """Says how to repeat a case."""
        short = re.sub(r"\W+", "-", self.name).strip("-")
        kept = Path(f"fuzz-{short}-{self.counts[1]}").resolve()
        kept.write_bytes(data)
        os.truncate(kept, len(data) + zeros)
        self.counts[1] += 1
        where = "" if self.seed is None else f"seed {self.seed}, case {self.counts[0]}, "
        print(f"{self.name}: {where}{wrong}")
        print(f"  again: --only={self.name!r} --file {kept}", flush=True)


def write(rows: dict[str, int]) -> None:
    """Puts the numbers of cases into the page."""
    each = {**rows, "in all": sum(rows.values())}
    line = "; ".join(f"{name} {count:,}" for name, count in each.items())
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(re.sub(r"(?m)^Cases: .*", f"Cases: {line}.", text), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--cases", type=int, help="of each target, in the place of minutes")
    parser.add_argument("--seed", type=int, help="of the cases, with atheris too")
    parser.add_argument("--only", choices=TARGETS, action="append", help="a target")
    parser.add_argument("--file", type=Path, help="try this case of --only alone")
    parser.add_argument("--write", action="store_true", help="put the numbers into docs/dev")
    args = parser.parse_args()
    names, rows, wrong = args.only or list(TARGETS), {}, 0
    seed = args.seed or 0 if args.seed is not None or args.cases or not atheris else None
    with tempfile.TemporaryDirectory(prefix="qwen-l40s-fuzz-", dir=MEMORY) as folder:
        if args.file:
            target = TARGETS[names[0]]
            sys.exit(tried(target, Path(folder, target.name), args.file.read_bytes()))
        for name in names:
            start = time.monotonic()
            end = start + args.minutes / len(names) * 60
            rows[name], found = Search(name, folder, seed, args.cases, end).run()
            wrong, each = wrong + found, (time.monotonic() - start) * 1e6 / max(rows[name], 1)
            print(f"{name}: {rows[name]:,} cases, {found} found, {each:.0f} us each", flush=True)
    print(f"{sum(rows.values()):,} cases, {wrong} found")
    if args.write:
        write(rows)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
