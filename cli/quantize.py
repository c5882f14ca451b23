"""`qwen-l40s quantize SRC DST`: a transformer in fp8 or int8, written once."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from pathlib import Path
from typing import Any

from ..spec.formats import GIB
from .output import require_packages

PACKAGES = ("torch", "safetensors", "numpy", "psutil")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Writes a Qwen-Image transformer with attention and MLP weights in fp8 or int8 to one "
        ".safetensors file, a third smaller than bf16. ComfyUI itself reads the int8 files too; "
        "only this package reads the fp8 files."
    )
    parser.add_argument(
        "source",
        metavar="SRC",
        help="a transformer in bf16, fp16, fp32 or GGUF: a .safetensors or .gguf file, a sharded "
        "folder or a diffusers folder",
    )
    parser.add_argument("destination", metavar="DST", help="the .safetensors file to write")
    parser.add_argument("--precision", required=True, metavar="NAME", help="fp8 or int8")
    add_keep(parser, "such as 'transformer_blocks.0.*' '*.img_mlp.net.2'")
    parser.add_argument(
        "--device", default="auto", metavar="NAME", help="auto (default), cpu, cuda or cuda:N"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace DST if it exists")


def add_keep(parser: argparse.ArgumentParser, text: str) -> None:
    how: dict[str, Any] = {"nargs": "+", "action": "extend", "default": [], "metavar": "PATTERN"}
    parser.add_argument("--keep", **how, help=f"layers to keep in bf16, {text}")


def run(args: argparse.Namespace) -> int:
    require_packages("quantize", PACKAGES)
    for name in ("SIGTERM", "SIGHUP"):  # else up to 25 GB of a file without a name are left
        number = getattr(signal, name, None)  # Windows has one of them
        if number and signal.getsignal(number) is signal.SIG_DFL:  # not under nohup
            signal.signal(number, signal.default_int_handler)
    from ..loaders.quantized_file import plan_quantized, write_quantized
    from ..machine.device import choose_device

    written = write_quantized(
        plan_quantized(args.source, args.precision, args.keep),
        Path(args.destination),
        device=choose_device(args.device),
        overwrite=args.overwrite,
        progress=_show_progress if sys.stderr.isatty() else lambda done, total: None,
    )
    print(json.dumps(written.as_dict()))
    return 0


def _show_progress(done: int, total: int) -> None:
    end = "\n" if done == total else ""
    text = f"\rquantize: {done / GIB:.1f} of {total / GIB:.1f} GiB"
    print(text, end=end, file=sys.stderr, flush=True)
