"""`qwen-l40s quantize SRC DST`: a transformer in fp8 or int8, written once."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from .output import require_packages

PACKAGES = ("torch", "safetensors", "numpy", "psutil")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Rounds the attention and MLP weights of a Qwen-Image transformer and writes "
        "one .safetensors file of about two thirds of the bytes, one tensor at a time. int8 is "
        "read by ComfyUI itself too, fp8 by this package only."
    )
    parser.add_argument(
        "source",
        metavar="SRC",
        help="a transformer in bf16, fp16 or fp32: a .safetensors file, a sharded folder or a "
        "diffusers folder",
    )
    parser.add_argument("destination", metavar="DST", help="the .safetensors file to write")
    parser.add_argument("--precision", required=True, help="fp8 or int8")
    parser.add_argument(
        "--keep",
        nargs="+",
        action="extend",
        default=[],
        metavar="PATTERN",
        help="layers that stay in bf16, such as 'transformer_blocks.0.*' '*.img_mlp.net.2'",
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--overwrite", action="store_true", help="replace DST when it exists")


def run(args: argparse.Namespace) -> int:
    require_packages("quantizing", PACKAGES)
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
    text = f"\rquantize: {done / 1e9:.1f} of {total / 1e9:.1f} GB"
    print(text, end=end, file=sys.stderr, flush=True)
