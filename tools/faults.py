"""Plants each fault of tools/faults.txt in a copy of this checkout, and says which test catches it.

A fault that none catches says that the tests have lost something. The checkout stays as it is.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from ..machine.packages import check_comfyui, find_comfyui

ROOT = Path(__file__).resolve().parents[1]
TABLE = Path(__file__).with_suffix(".txt")
AT_ONCE = 2
HOST = "tests/host"
FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", re.MULTILINE)  # a line of pytest's


@dataclass
class Fault:
    """A fault, as it was in the product or could come.

    Attributes:
        name: what goes wrong.
        file: from the root.
        old: text that stands in the file once.
        new: what takes its place.
        tests: files or test ids, of one folder in tests/.
    """

    name: str
    file: str
    tests: tuple[str, ...]
    old: str
    new: str


def read_faults(text: str) -> list[Fault]:
    """Reads a table: "# name", "file: tests", then the old lines after "-", the new after "+"."""
    found = []
    for part in re.split(r"^# ", text, flags=re.MULTILINE)[1:]:
        name, where, *lines = part.splitlines()
        file, *tests = where.split()
        old, new = ("\n".join(it[1:] for it in lines if it[:1] == sign) for sign in "-+")
        found.append(Fault(name, file.removesuffix(":"), tuple(tests), old, new))
    return found


def main() -> int:
    """Returns 1 where a fault is not caught, or its text is not there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="*", help="faults whose name or file this pattern fits")
    options = parser.parse_args()
    faults = read_faults(TABLE.read_text(encoding="utf-8"))
    pattern = f"*{options.only}*"
    chosen = [
        it for it in faults if any(fnmatch.fnmatch(part, pattern) for part in (it.name, it.file))
    ]
    found = check_comfyui(
        Path(named) if (named := os.environ.get("COMFYUI_PATH")) else find_comfyui()
    )
    if not found.usable:
        chosen = [it for it in chosen if not it.tests[0].startswith(HOST)]
        print(
            f"faults that {HOST} catches: left out: ComfyUI: {found.why.fact}; {found.why.remedy}"
        )
    began, missed = time.monotonic(), 0
    for fault, caught, words in run_all(chosen):
        missed += not caught
        print(f"{fault.file:40} {fault.name}: {words}", flush=True)
    minutes = (time.monotonic() - began) / 60
    print(f"{len(chosen) - missed} of {len(chosen)} caught, in {minutes:.0f} minutes")
    return int(bool(missed))


def run_all(faults: list[Fault]) -> Iterator[tuple[Fault, bool, str]]:
    """Yields each fault in turn, whether it is caught, and by what."""

    def run(fault: Fault) -> tuple[Fault, bool, str]:
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="qwen-l40s-faults-") as folder:
            copy = Path(folder, "qwen_l40s")
            copy_checkout(copy)
            caught, words = run_one(copy, fault)
        return fault, caught, f"{words} ({time.monotonic() - began:.0f} s)"

    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield from pool.map(run, faults)


def copy_checkout(target: Path) -> None:
    """Copies the files that git does not ignore."""
    target.mkdir(parents=True)
    (target.parent / "tmp").mkdir()
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout
    for name in filter(None, os.fsdecode(names).split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target / name)


def run_one(copy: Path, fault: Fault) -> tuple[bool, str]:
    """Plants a fault and runs its tests; whether they catch it, and what to say of it."""
    path = copy / fault.file
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    if text.count(fault.old) != 1:
        return False, f"TEXT NOT FOUND once, but {text.count(fault.old)} times"
    path.write_text(text.replace(fault.old, fault.new), encoding="utf-8")
    code, output = run_tests(copy, ("-x", *fault.tests))
    failed = FAILED.search(output)
    if code != 1 or failed is None:  # what cannot be collected has another code
        return False, f"NOT CAUGHT: {(output.splitlines() or ['no output'])[-1]}"
    return True, f"caught by {failed[1]}"


def run_tests(copy: Path, arguments: Sequence[str]) -> tuple[int, str]:
    """Runs pytest in a copy; returns its exit code and output."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(copy.parent),  # goes before an installed package, which is the checkout
        "TMPDIR": str(copy.parent / "tmp"),
    }
    if "/interpreted_" in arguments[-1]:  # as tests/unit/test_kernels.py runs Triton's kernels
        environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(
        command,
        cwd=copy,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    return done.returncode, done.stdout


if __name__ == "__main__":
    sys.exit(main())
