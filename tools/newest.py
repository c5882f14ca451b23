"""Runs the tests with the newest package of everything, and prints what broke (`make test-next`).

The packages go into .venv-newest, which each run brings up to date; ComfyUI's code is that of
COMFYUI_NEXT_PATH, else of COMFYUI_PATH or ~/ComfyUI.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import venv
from importlib.metadata import distributions
from pathlib import Path
from xml.etree import ElementTree

from ..machine.comfyui import check_comfyui, find_comfyui

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = ROOT / ".venv-newest"
PYTHON = ENVIRONMENT / "bin" / "python"
SUITES = {
    "unit": ("tests/unit", "-m", "not slow"),
    "host": ("tests/host",),
    "server": ("tests/server",),
    "page": ("tests/page",),
}
LISTED = re.compile(
    r"torch(vision|audio)?|triton|comfy-(kitchen|aimdo)|comfyui_(frontend_package|workflow_templates)"
    r"|diffusers|transformers|safetensors|numpy"
)


def main() -> int:
    """Returns 1 where something broke."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--suite", choices=SUITES, action="append", help="only this; may repeat")
    parser.add_argument("--workers", default="2", help="processes that run tests; default 2")
    options = parser.parse_args()
    if named := os.environ.get("COMFYUI_NEXT_PATH"):
        os.environ["COMFYUI_PATH"] = named
    folder = find_comfyui()
    try:
        install(folder)
    except subprocess.CalledProcessError:
        sys.exit("pip could not install the newest packages, see above: connect a package index")
    print(f"ComfyUI: {check_comfyui(folder).reason}")
    print(", ".join(versions()), flush=True)
    broken: list[tuple[str, str, str]] = []
    for suite in options.suite or SUITES:
        ran, faults = run(suite, options.workers)
        print(f"{suite:8} {ran:5} ran, {len(faults)} broke", flush=True)
        broken += [(suite, *fault) for fault in faults]
    for suite, name, reason in broken:
        print(f"{suite:8} {name}\n{'':9}{reason}")
    return int(bool(broken))


def install(folder: Path | None) -> None:
    """Installs or updates everything, without ComfyUI's pinned versions."""
    if not PYTHON.exists():
        venv.create(ENVIRONMENT, with_pip=True)
    pip = [str(PYTHON), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    text = (folder / "requirements.txt").read_text(encoding="utf-8") if folder else ""
    newest = ["torch", "torchvision", "torchaudio", *names_in(text)]
    subprocess.run([*pip, "--upgrade", *newest], check=True)
    subprocess.run([*pip, "--upgrade", "--editable", f"{ROOT}[dev]"], check=True)


def names_in(requirements: str) -> list[str]:
    """The packages that a requirements.txt names, without their versions."""
    return re.findall(r"^[A-Za-z][\w.-]*(?=\s*(?:[=<>~!;]|$))", requirements, re.MULTILINE)


def versions() -> list[str]:
    """Name and version of the packages that matter most."""
    site = next((ENVIRONMENT / "lib").glob("python*/site-packages"))
    found = {each.metadata["Name"]: each.version for each in distributions(path=[str(site)])}
    return [f"{name} {found[name]}" for name in sorted(found) if LISTED.fullmatch(name)]


def run(suite: str, workers: str) -> tuple[int, list[tuple[str, str]]]:
    """Runs one suite.

    Returns:
        How many tests ran, and (name, reason in one line) of those that failed.
    """
    report = ENVIRONMENT / f"{suite}.xml"
    report.unlink(missing_ok=True)
    command = [PYTHON, "-m", "pytest", *SUITES[suite], "-n", workers, "--dist", "loadgroup"]
    environment = {**os.environ, "COMFYUI_PYTHON": str(PYTHON), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "-q", f"--junitxml={report}"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    ran, faults = read_report(report) if report.exists() else (0, [])
    if done.returncode not in (0, 1) or not ran:
        last = (done.stdout + done.stderr).strip().splitlines() or ["it stopped"]
        faults.append((f"tests/{suite}", f"pytest ended with {done.returncode}: {last[-1]}"))
    return ran, faults


def read_report(report: Path) -> tuple[int, list[tuple[str, str]]]:
    """What `run` returns, from pytest's JUnit file."""
    cases = list(ElementTree.parse(report).iter("testcase"))
    broken = []
    for case in cases:
        for fault in (*case.iter("failure"), *case.iter("error")):
            reason = " ".join(fault.get("message", "").split())[:160]
            broken.append((f"{case.get('classname')}::{case.get('name')}", reason))
    return sum(case.find("skipped") is None for case in cases), broken


if __name__ == "__main__":
    sys.exit(main())
