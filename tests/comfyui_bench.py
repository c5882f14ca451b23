"""Runs `qwen-l40s bench` in ComfyUI's own Python, as a user does, on the CPU and small.

    python comfyui_bench.py COMFYUI CHART.png

Prints one JSON object: {what is measured: [exit code, the command's last line]}.
"""

import contextlib
import importlib.util
import io
import json
import os
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
COMFYUI, CHART = sys.argv[1:]
SMALL = ["--device", "cpu", "--width", "small", "--text", "5", "--repeats", "2", "--warm-up", "1"]
RUNS = {
    "forward": "--size 64x32 --layers 2 --batch 2",
    "edit": "--size 32x32 --layers 1 --references 1 --repeats 1 --only *?bf16 *diffusers *eager",
    "block": "--size 32x32 --layers 3 --profile --only *?bf16",
    "image": "--size 32x32 --layers 1 --steps 1 --only *?bf16",
}


def main() -> None:
    torch.set_num_threads(1)
    os.environ["COMFYUI_PATH"] = COMFYUI
    spec = importlib.util.spec_from_file_location(
        "qwen_l40s", ROOT / "__init__.py", submodule_search_locations=[str(ROOT)]
    )
    package = importlib.util.module_from_spec(spec)
    sys.modules["qwen_l40s"] = package
    spec.loader.exec_module(package)
    from qwen_l40s.cli import main as command

    results = {}
    for name, arguments in RUNS.items():
        what = "forward" if name == "edit" else name
        arguments += f" --plot {CHART}" if name == "forward" else ""
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            code = command(["bench", what, *SMALL, *arguments.split()])
        results[name] = [code, json.loads(printed.getvalue().splitlines()[-1])]
    print(json.dumps(results))


main()
