"""`qwen-l40s submit`: a workflow, with other settings, on a running ComfyUI server."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from ..client.scheduler import Job
from ..errors import SettingError
from ..files import print_text
from .output import require_packages

if TYPE_CHECKING:
    from ..client.submit import SubmitOutcome

SERVER = "http://127.0.0.1:8188"
TOKEN = "QWEN_L40S_TOKEN"
PACKAGES = ("aiohttp", "PIL", "tqdm")

EPILOG = """\
settings:
  --set seed=7               an input by name, if only one node has it
  --set seed=1..8            a job for each whole number
  --set prompt="a red cube"  the sampler's prompt; also: negative prompt
  --set prompt=@prompts.txt  a job for each line of a file
  --set sample.steps=20      an input of one node, by the node's id or title
  --set "image 1=photo.png"  an image on this machine, which submit uploads
  Several --set make every combination; the last one changes fastest.

what happens:
  submit checks everything, then keeps two jobs at each server. A server that
  stops gives its jobs to the others, or waits to be back. Images are named
  DIR/<hash of the job>_<number>.png; a job whose images are there is done,
  until a model that it loads is replaced, where this machine has the file.
  DIR/<workflow>.submit.jsonl records each job: after an interruption, the same
  command with --resume runs the missing ones. Ctrl-C removes the jobs of this
  run from the servers, and no others.

exit codes:
  0 all jobs done, 1 a job failed or was cancelled, 2 bad input, nothing queued,
  3 no server, or the disk is full, 130 Ctrl-C

example:
  qwen-l40s submit workflows/api/micro_text_to_image.json --set seed=1..4 \\
      --set prompt="a small red circle at the top left on a white background"
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Runs a workflow on ComfyUI servers and downloads the results."
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "workflow",
        type=Path,
        metavar="WORKFLOW",
        help="a file in API form (in ComfyUI: File > Export (API)), or a PNG that ComfyUI saved",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="set an input; see below",
    )
    parser.add_argument(
        "--server",
        action="append",
        default=[],
        metavar="URL",
        help=f"default: {SERVER}; may be https, with a path prefix; repeat it for several",
    )
    parser.add_argument(
        "--servers",
        type=Path,
        metavar="FILE",
        help="a list of servers: servers.json of `qwen-l40s fleet`, or one address on each line; "
        "read again when it changes",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("out"),
        metavar="DIR",
        help="a folder for results and the journal; replaces no file; default: %(default)s",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    parser.add_argument("--quiet", action="store_true", help="print files, but no nodes' reports")
    past = parser.add_mutually_exclusive_group()
    past.add_argument("--resume", action="store_true", help="continue an interrupted run")
    past.add_argument("--again", action="store_true", help="run jobs that are done, too")
    parser.add_argument(
        "--wait",
        type=_number,
        metavar="SECONDS",
        help="wait this long for a server that is still starting (default: 0), and for servers "
        "that are lost during the run (default: 60)",
    )
    parser.add_argument(
        "--header",
        action="append",
        default=[],
        metavar='"NAME: VALUE"',
        help='a header for each request, such as "Authorization: Bearer TOKEN"',
    )
    parser.add_argument(
        "--header-file",
        type=Path,
        metavar="FILE",
        help=f"HTTP headers, one on each line, which keeps secrets out of `ps`; {TOKEN} in the "
        "environment sets the bearer token",
    )
    parser.add_argument(
        "--most-gb",
        type=_number,
        default=4.0,
        metavar="GB",
        help="refuse larger files of a server; default: %(default)g",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="check everything, list the jobs, queue nothing"
    )


def run(args: argparse.Namespace) -> int:
    require_packages("submit", PACKAGES, extra="client", instead=", or use ComfyUI's Python")
    from ..client.progress import losable
    from ..client.submit import SubmitRequest, submit
    from ..client.transport import ServerError

    printer = Printer(texts=not args.quiet)

    def ended(job: Job) -> None:
        if not args.json:
            with losable(sys.stdout):
                printer.show(job)

    request = SubmitRequest(
        workflow=args.workflow,
        servers=args.server or ([] if args.servers else [SERVER]),
        server_file=args.servers,
        output=args.output,
        settings=args.set,
        headers=_headers(args.header, args.header_file),
        most=args.most_gb * 1e9,
        wait=args.wait,
        resume=args.resume,
        again=args.again,
        dry_run=args.dry_run,
    )
    try:
        outcome = asyncio.run(submit(request, sys.stderr, ended))
    except ServerError as error:  # before anything was queued
        if args.debug:
            traceback.print_exc()
        print_text(f"qwen-l40s: error: {error}", sys.stderr)
        return 3
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    if args.json:
        print_text(json.dumps(outcome.as_dict()))
    elif args.dry_run:
        for job in outcome.jobs:
            print_text(job.label)
    with losable(sys.stderr):
        _summarize(outcome)
    return outcome.exit_code


def _summarize(outcome: SubmitOutcome) -> None:
    request = outcome.request
    if outcome.error is not None:
        print_text(f"qwen-l40s: error: {outcome.error} --resume continues this run.", sys.stderr)
    if request.dry_run:
        print(f"jobs to queue: {len(outcome.jobs)}; queued: none (--dry-run)", file=sys.stderr)
        return
    counts: dict[str, int] = {}
    for job in outcome.jobs:
        counts[job.status] = counts.get(job.status, 0) + 1
    states = ", ".join(f"{count} {status}" for status, count in counts.items())
    print_text(f"{states}; results in {request.output}", sys.stderr)
    if outcome.stopped:
        print("qwen-l40s: stopped; --resume continues this run", file=sys.stderr)


class Printer:
    """Prints what jobs made: files, and texts indented; each text once, for jobs share loaders."""

    def __init__(self, *, texts: bool = True) -> None:
        self._texts, self._shown = texts, set[str]()

    def show(self, job: Job) -> None:
        if job.files:
            took = "" if job.seconds is None else f" ({job.seconds:.1f} s)"
            print_text(f"{job.label}: {', '.join(map(str, job.files))}{took}")
        titles: dict[str, list[str]] = {}
        for title, texts in job.texts.items() if self._texts else ():
            titles.setdefault("\n".join(texts), []).append(title)
        for text, named in titles.items():
            if text not in self._shown:
                self._shown.add(text)
                print_text(f"{job.label}, {', '.join(named)}:")
                print_text("\n".join(f"  {line}".rstrip() for line in text.splitlines()))


def _headers(texts: list[str], file: Path | None) -> dict[str, str]:
    token = os.environ.get(TOKEN, "").strip(" \t\r\n\ufeff")
    if not token.isprintable():
        raise SettingError(
            f"{TOKEN} has a line end or a control character: set it to the token only."
        )
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    if file is not None:
        try:
            texts = [*filter(str.strip, file.read_text("utf-8-sig").splitlines()), *texts]
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or "the file is not UTF-8"
            sentence = f"--header-file cannot be read ({reason}): name a text file of headers."
            raise SettingError(sentence, file) from error
    for text in texts:
        name, colon, value = text.partition(":")
        headers[name if colon else ""] = value
    return headers


def _number(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not (seconds >= 0 and math.isfinite(seconds)):
        raise argparse.ArgumentTypeError(f"{text!r} must be a number, 0 or more")
    return seconds
