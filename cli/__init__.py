"""The `qwen-l40s` command: one module per subcommand, each with `add_arguments(parser)` and
`run(args) -> int`; only the one that is asked for is imported.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module

from .. import __version__
from ..errors import QwenL40SError

# {name, also of its module: its line of `--help`}, in that order.
COMMANDS = {
    "demo": "paint a simple scene with the micro model that comes along",
    "generate": "make images from a prompt with a Qwen-Image diffusers folder",
    "submit": "run a workflow on a ComfyUI server, once or with many settings",
    "estimate": "say what a run takes and costs, before it: memory, time, disk, USD",
    "advise": "say which card paints so many images an hour for the least",
    "inspect": "say what a checkpoint is, without loading it",
    "quantize": "write a transformer in fp8 or int8, with one scale for each row",
    "audit": "measure what fp8 or int8 loses on your checkpoint and prompts",
    "bench": "time this package against ComfyUI, diffusers and comfy-kitchen",
    "doctor": "say what of this machine can be used, and why not",
}


def build_parser(argv: Sequence[str] = ()) -> argparse.ArgumentParser:
    """The parser, with the arguments of the commands that are named in `argv`."""
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser = argparse.ArgumentParser(
        prog="qwen-l40s",
        description="Qwen-Image on an NVIDIA L40S: estimate and generate, run workflows on a "
        "ComfyUI server, inspect and quantize checkpoints, measure and check the machine.",
    )
    parser.add_argument("--version", action="version", version=f"qwen-l40s {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in COMMANDS.items():
        subparser = subparsers.add_parser(name, parents=[common], help=text)
        if name in argv:
            command = import_module(f".{name}", __name__)
            command.add_arguments(subparser)
            subparser.set_defaults(run=command.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command.

    Returns:
        0 when done, 1 when a check that the command makes says no, 2 on bad input, 130 on Ctrl-C;
        3, of `submit` alone, when the server cannot be reached.
    """
    argv = sys.argv[1:] if argv is None else argv
    args = build_parser(argv).parse_args(argv)
    from .output import print_text

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
