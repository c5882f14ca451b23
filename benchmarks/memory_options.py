"""The command line of benchmarks/memory.py."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from memory_cases import CASES, DEFAULT_CASES

# What ComfyUI is started with.
MODES = {"dynamic": (), "legacy": ("--disable-dynamic-vram",)}
DRY = {"cpu": ("--cpu",)}


def parse(description: str) -> argparse.Namespace:
    """Reads the command line; ends the program with a sentence on what is wrong with it."""

    def listed(text: str) -> list[str]:
        return [part.strip() for part in text.split(",") if part.strip()]

    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--models", type=Path, default=Path("/dev/shm/qwen_l40s_models"), help="for the weights")
    add("--free-gib", type=float, default=44.4, help="of the card, as on an L40S (default 44.4)")
    add("--json", type=Path, help="where the results go")
    add("--modes", type=listed, default=["dynamic"], help=f"of {', '.join(MODES)}")
    add("--cases", type=listed, default=list(DEFAULT_CASES), help=f"of {', '.join(CASES)}")
    add("--sizes", type=lambda text: [int(one) for one in listed(text)], default=[1024, 1328, 2048])
    add("--pressure-size", type=int, default=512, help="of the images under pressure")
    add("--steps", type=int, default=20)
    add("--cfg", type=float, default=4.0)
    add("--modulation", default="off card", help="our loader's widget; empty leaves it as it is")
    add("--placement", default="", help="the text encoder's widget; empty leaves it as it is")
    add("--timeout", type=float, default=300, help="seconds for one image")
    add("--comfyui", type=Path, default=os.environ.get("COMFYUI_PATH", "~/ComfyUI"))
    add("--python", help="that runs ComfyUI (default: its .venv, else this one)")
    add("--front-end-root", help="ComfyUI's argument, where its front end is not installed")
    add("--server-args", default="", help="further arguments of ComfyUI")
    add("--work", type=Path, help="for base folders and logs (default: a temporary one)")
    add("--dry", action="store_true", help="on a CPU with the bundled model: small, no card")
    options = parser.parse_args()
    for name, allowed in (("modes", MODES), ("cases", CASES)):
        unknown = [value for value in getattr(options, name) if value not in allowed]
        if unknown:
            parser.error(f"--{name}: {', '.join(unknown)}: choose from {', '.join(allowed)}")
    options.comfyui = Path(options.comfyui).expanduser().resolve()
    if not (options.comfyui / "main.py").is_file():
        parser.error(f"no ComfyUI in {options.comfyui}: name one with --comfyui or COMFYUI_PATH")
    own = options.comfyui / ".venv" / "bin" / "python"
    options.python = options.python or str(own if own.exists() else sys.executable)
    options.work = options.work or Path(tempfile.mkdtemp(prefix="qwen_l40s_memory_"))
    options.work = options.work.resolve()
    options.models = options.models.resolve()
    return options
