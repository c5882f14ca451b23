"""Runs the `qwen-l40s` command. Each subcommand is a module with `add_arguments(parser)` and
`run(args) -> int`; only the one that is asked for is imported.
"""

from __future__ import annotations

import _thread
import argparse
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from ..errors import QwenL40SError, SettingError
from ..files import print_text
from ..machine.settings import read_settings, use_settings
from ..version import __version__

# {name, also of its module, with _ for -: its line of `--help`}, in that order.
COMMANDS = {
    "demo": "make an image with the bundled micro model",
    "generate": "make images with a Qwen-Image diffusers folder",
    "submit": "run a workflow on ComfyUI servers, once or many times",
    "fleet": "run a ComfyUI server on each GPU, and show what they do",
    "estimate": "predict a run's memory, time, disk and cost",
    "advise": "rank GPUs by the cost of an image",
    "inspect": "say what a checkpoint is, from its header",
    "quantize": "write a transformer to an fp8 or int8 file",
    "audit": "measure the error of fp8 or int8 on your checkpoint",
    "bench": "time this package against ComfyUI and diffusers",
    "doctor": "check GPU, packages, ComfyUI, model files and disks",
}
EXIT_CODES = """\
exit codes:
  0    done
  1    the answer is no: it does not fit, a job failed, nothing can run here
  2    bad input; nothing was done
  3    submit: no server, or the disk is full; fleet: the Ray cluster is lost
  4    estimate: it fits with offloading
  130  stopped by Ctrl-C
"""


class Parser(argparse.ArgumentParser):
    """Reports a wrong argument in one sentence, as every other error is."""

    def error(self, message: str) -> NoReturn:
        message = message.removeprefix("argument ")
        self.exit(2, f"qwen-l40s: error: {message}; see `{self.prog} --help`.\n")


def build_parser(argv: Sequence[str] = ()) -> argparse.ArgumentParser:
    """Returns the parser, with the arguments of the commands that are named in `argv`."""
    common = Parser(add_help=False)
    common.add_argument("--debug", action="store_true", help="show the traceback of errors")
    common.add_argument(
        "--settings",
        type=Path,
        metavar="FILE",
        help="the settings, as JSON; default: qwen-l40s.json in ComfyUI's user folder",
    )
    parser = Parser(
        prog="qwen-l40s",
        description="Qwen-Image, faster and in less memory, on NVIDIA GPUs.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"qwen-l40s {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    absent = left_out()
    for name, text in COMMANDS.items():
        if name in absent:
            text += " (in a clone)"
        subparser = subparsers.add_parser(name, parents=[common], help=text)
        if name in argv and name not in absent:
            command = import_module(f".{name.replace('-', '_')}", __name__)
            command.add_arguments(subparser)
            subparser.set_defaults(run=command.run, error=subparser.error)
    return parser


def left_out() -> set[str]:
    """Names the commands that are not in what ComfyUI's manager installs."""
    return {name for name in COMMANDS if find_spec(f".{name}", __name__) is None}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns one of `EXIT_CODES`."""
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] in left_out():
        print(
            f"qwen-l40s: error: {argv[0]} is not in an install by ComfyUI's manager: run `python "
            f"FOLDER {argv[0]}` with the FOLDER of a clone of the repository.",
            file=sys.stderr,
        )
        return 2
    args, unknown = build_parser(argv).parse_known_args(argv)
    if unknown:
        args.error(f"unrecognized arguments: {' '.join(unknown)}")

    hook = sys.unraisablehook
    sys.unraisablehook = partial(_interrupt_again, hook)
    try:
        if args.settings is not None:
            if not args.settings.is_file():
                sentence = "--settings is not a file: write the file, or leave --settings out"
                raise SettingError(sentence, args.settings)
            read_settings(args.settings)
            use_settings(args.settings)
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
    except OSError as error:  # of a path: too long a name, no right to read it, a disk that is gone
        if args.debug or error.filename is None:
            raise
        sentence = f"this path cannot be used: {error.strerror} ({error.filename})."
        print_text(f"qwen-l40s: error: {sentence}", sys.stderr)
        return 2
    finally:
        sys.unraisablehook = hook


def _interrupt_again(hook: Callable[[Any], None], lost: Any) -> None:
    """Repeats a Ctrl-C that Python dropped because it fell into a finalizer."""
    if not issubclass(lost.exc_type, KeyboardInterrupt):
        hook(lost)
        return
    # At once it would fall into this hook.
    threading.Timer(0.05, _thread.interrupt_main).start()
