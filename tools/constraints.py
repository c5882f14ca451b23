"""Writes constraints.txt: exact versions of what `make` installs, for Python 3.10 to 3.14, by uv.
Torch's version stands in the Makefile; its own triton and CUDA libraries follow it.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "constraints.txt"
HEADER = "# Written by tools/constraints.py. torch stands in the Makefile, and triton follows it.\n"
COMMAND = (
    *("uv", "pip", "compile", "pyproject.toml", "--extra=dev", "--constraint=-", "--quiet"),
    *("--universal", "--python-version=3.10", "--no-annotate", "--no-header"),
)
OF_TORCH = re.compile(r"torch=|triton=|nvidia-|cuda-")


def main() -> None:
    (torch,) = re.findall(
        r"^TORCH \?= (.+)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M
    )
    try:
        resolved = subprocess.run(
            COMMAND,
            cwd=ROOT,
            input=f"{torch}\nsetuptools<82",  # torch before 2.13 goes with no newer one
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    except FileNotFoundError:
        sys.exit("there is no uv, which resolves for several Pythons: install it with pip")
    lines = [line for line in resolved.stdout.splitlines(True) if not OF_TORCH.match(line)]
    FILE.write_text(HEADER + "".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
