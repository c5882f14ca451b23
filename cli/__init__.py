"""The `qwen-l40s` command: one file per subcommand, each with `add_parser(subparsers, common)` and
`run(args) -> int`.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Sequence

from .. import __version__
from ..errors import QwenL40SError
from . import advise, audit, bench, demo, doctor, estimate, generate, inspect, quantize, submit
from .output import print_text

# In the order of `--help`.
COMMANDS = (demo, generate, submit, estimate, advise, inspect, quantize, audit, bench, doctor)


def build_parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser = argparse.ArgumentParser(
        prog="qwen-l40s",
        description="Qwen-Image on an NVIDIA L40S: estimate and generate, run workflows on a "
        "ComfyUI server, inspect and quantize checkpoints, measure and check the machine.",
    )
    parser.add_argument("--version", action="version", version=f"qwen-l40s {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_parser(subparsers, common)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command.

    Returns:
        0 when done, 1 when a check that the command makes says no, 2 on bad input, 130 on Ctrl-C;
        3, of `submit` alone, when the server cannot be reached.
    """
    args = build_parser().parse_args(argv)
    try:
        return args.run(args)
    except QwenL40SError as error:
        if args.debug:
            traceback.print_exc()
        print_text(f"qwen-l40s: error: {error}", sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("qwen-l40s: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `qwen-l40s inspect ... | head`
        sys.stderr.close()
        return 0
