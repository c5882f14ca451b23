"""Feeds broken files and texts to the package's readers: each is read, or refused in the error of
its room, within 2 s of the processor's time and half a gigabyte.

A case is drawn from its target, seed and number alone. Where atheris is installed
(https://github.com/google/atheris), and no seed is given, what reaches new code is changed further.
Prints the cases of each target, and each finding with the file that repeats it; ends with 1 where
there is one. `--write` puts the numbers into docs/trust.md.
"""

import argparse
import contextlib
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from ...files import printable

try:
    import atheris
except ImportError:
    atheris = None
with atheris.instrument_imports(include=["qwen_l40s"]) if atheris else contextlib.nullcontext():
    from .targets import ROOT, TARGETS, Target

SECONDS, BYTES = 2, 2**29
PAGE = ROOT / "docs" / "trust.md"
MEMORY = Path("/dev/shm")  # a disk takes longer than most cases


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
        keys = list(value) if isinstance(value, dict) else range(len(value))
        key = random.choice(keys)
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
    piece = random.choice(PIECES)
    if random.random() < 0.3:
        return text[:at] + random.choice(("", text[at + 1 :]))
    piece = piece if random.random() < 0.7 else text[at : at + random.randint(1, 20)]
    return text[:at] + piece * random.choice((*(1,) * 40, 2, 2, 20, 5000)) + text[at:]


def damaged(random: Random, data: bytes) -> bytes:
    """Copies bytes with one change somewhere in them."""
    at, count, what = random.randint(0, len(data)), random.choice((1, 1, 4, 8)), random.random()
    number = random.choice((0, 1, 2**20, 2**31, 2**32 - 1, 2**60, 2**64 - 1))
    if what < 0.2:
        return data[:at]
    if what < 0.4:
        return data[:at] + data[at + count :]
    if what < 0.6:
        return data[:at] + number.to_bytes(8, "little")[:count] + data[at + count :]
    if what < 0.8:
        return data[:at] + random.randbytes(count) + data[at + count :]
    start = random.randint(0, len(data))
    return data[:at] + data[start : start + random.choice((1, 8, 100))] + data[at:]


def drawn(target: Target, seeds: list[Any], random: Random) -> tuple[bytes, int]:
    """Gives a case: a seed with one to four changes, of its values or of its bytes."""
    value, data = random.choice(seeds), None
    for _ in range(random.choice((1, 1, 2, 4)) * (random.random() < 0.75)):
        value = changed(random, value)
    with contextlib.suppress(Exception):  # which no longer has a file's form
        data, zeros = target.join(value)
    if data is None:
        data, zeros = target.join(random.choice(seeds))
    for _ in range(random.choice((1, 2, 4)) * (random.random() < 0.35)):
        data = damaged(random, data)
    if zeros is None:  # no file
        return data, 0
    return data, zeros if random.random() < 0.999 else 2**30


# How cases are tried.


class TooSlowError(BaseException):
    """The processor has worked for `SECONDS`."""


def stop(*_: object) -> None:
    raise TooSlowError


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """Lets this process have half a gigabyte more, and each case its time."""
    signal.signal(signal.SIGPROF, stop)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + BYTES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def tried(target: Target, path: Path, data: bytes, zeros: int = 0) -> str | None:
    """Reads one case; returns what is wrong, with the line that raised it."""
    path.write_bytes(data)
    if zeros:
        os.truncate(path, len(data) + zeros)
    return refused(target, path)


def refused(target: Target, path: Path) -> str | None:
    """Does so with a file that is there."""
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        target.read(path)
    except target.clean as error:
        if not printable(str(error), sys.stdout).strip():
            return "an error without words"
    except (Exception, TooSlowError) as error:
        signal.setitimer(signal.ITIMER_PROF, 0)
        frames = traceback.extract_tb(error.__traceback__)
        own = [
            it for it in frames if ROOT in Path(it.filename).resolve().parents and it.name != "stop"
        ] or frames
        last = own[-1]
        where = f"{Path(last.filename).name}:{last.lineno}"
        return f"{type(error).__name__} at {where}: {str(error)[:200]}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return None


def show(
    name: str, data: bytes, zeros: int, wrong: str, found: dict[str, Path], where: str = ""
) -> None:
    """Keeps the first case of a kind, and says how to repeat it."""
    place = wrong.partition(": ")[0]
    if place in found:
        return
    short = re.sub(r"\W+", "-", name).strip("-")
    kept = found[place] = Path(f"fuzz-{short}-{len(found)}").resolve()
    kept.write_bytes(data)
    os.truncate(kept, len(data) + zeros)
    print(f"{name}: {where}{wrong}\n  again: --only={name!r} --file {kept}", flush=True)


class Until(NamedTuple):
    """Says when a target has had enough: cases, or else time."""

    cases: int | None
    end: float

    def over(self, number: int) -> bool:
        return time.monotonic() >= self.end if self.cases is None else number >= self.cases


def fuzz(name: str, folder: Path, seed: int, until: Until) -> tuple[int, int]:
    """Tries the cases of one target.

    Returns:
        (how many, what was found).
    """
    target, number, found = TARGETS[name], 0, {}
    seeds, path = target.seeds(), folder / target.name
    while not until.over(number):
        data, zeros = drawn(target, seeds, Random(f"{seed} {name} {number}"))
        if wrong := tried(target, path, data, zeros):
            show(name, data, zeros, wrong, found, f"seed {seed}, case {number}, ")
        number += 1
    return number, len(found)


def guide(name: str, folder: Path, seconds: float) -> None:
    """Lets atheris choose; it ends the process. Every file is a seed, and mutated by our changes
    where it still comes apart, else by atheris'.
    """
    target, found, corpus = TARGETS[name], {}, folder / "corpus"
    path = folder / target.name
    corpus.mkdir()
    for number, value in enumerate(target.seeds()):
        data, zeros = target.join(value)
        (corpus / str(number)).write_bytes(data + bytes(min(zeros or 0, 2**16)))

    def one(data: bytes) -> None:
        if wrong := tried(target, path, data):
            show(name, data, 0, wrong, found)

    def mutated(data: bytes, most: int, seed: int) -> bytes:
        random = Random(seed)
        with contextlib.suppress(Exception):
            if random.random() < 0.5 and target.split:
                return target.join(changed(random, target.split(data)))[0][:most]
        return atheris.Mutate(data, most)

    limits = (f"-max_total_time={seconds:.0f}", "-max_len=1048576", "-rss_limit_mb=0")
    atheris.Setup([sys.argv[0], *limits, "-verbosity=0", str(corpus)], one, custom_mutator=mutated)
    atheris.Fuzz()


def write(rows: Mapping[str, int]) -> None:
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
    parser.add_argument("--guided", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--write", action="store_true", help="put the numbers into docs/trust.md")
    args = parser.parse_args()
    names, rows, wrong = args.only or list(TARGETS), {}, 0
    place = MEMORY if MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="qwen-l40s-fuzz-", dir=place) as folder, limited():
        if args.file:
            target = TARGETS[names[0]]
            shutil.copyfile(args.file, Path(folder, target.name))
            sys.exit(refused(target, Path(folder, target.name)))
        if args.guided:
            guide(names[0], Path(folder), args.minutes * 60)
        if atheris and args.seed is args.cases is None:
            command = [sys.executable, "-m", "qwen_l40s.tools.fuzz", "--guided"]
            each = f"--minutes={args.minutes / len(names)}"
            done = [subprocess.run([*command, each, f"--only={it}"], check=False) for it in names]
            sys.exit(any(it.returncode for it in done))
        for name in names:
            start, minutes = time.process_time(), args.minutes / len(names)
            until = Until(args.cases, time.monotonic() + minutes * 60)
            with limited():  # anew, for a million cases leave something behind
                rows[name], found = fuzz(name, Path(folder), args.seed or 0, until)
            each, wrong = (time.process_time() - start) / max(rows[name], 1), wrong + found
            said = f"{name}: {rows[name]:,} cases, {found} found, {each * 1e6:.0f} us each"
            print(said, flush=True)
    print(f"{sum(rows.values()):,} cases, {wrong} found")
    if args.write:
        write(rows)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
