"""`qwen-l40s submit`: a workflow, with other settings, on a running ComfyUI server."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import SettingError
from .output import print_text, require_packages

if TYPE_CHECKING:
    from ..client.ledger import Job
    from ..client.submission import SubmitOutcome

PACKAGES = ("aiohttp", "PIL", "tqdm")

EPILOG = """\
settings:
  --set seed=7                 one value; KEY is a node's title or id, or an input's name
  --set seed=1..8              a job for each whole number
  --set prompt="a red cube"    the node titled "Prompt"
  --set prompt=@prompts.txt    a job for each line of a file
  --set Sample.steps=20        this input of this node, where a name alone says too little
  --set "Image 1=photo.png"    an image of this machine: it is uploaded
  Several --set give every combination; the last one changes fastest.

what happens:
  Everything is checked before the first job is queued. All jobs are queued at once and run in
  order. A lost connection or a restarted server is waited for; jobs that the server forgot are
  queued again. DIR/<workflow>.submit.jsonl notes each job, so that after an interruption of any
  kind the same command with --resume does only what is missing. Ctrl-C takes the jobs of this
  run out of the queue and stops the one that runs, nobody else's.

exit codes:
  0 all jobs done, 1 a job failed, was cancelled or given up, 2 bad input and nothing queued,
  3 server not reachable or lost, 130 Ctrl-C

example:
  qwen-l40s submit workflows/api/micro_text_to_image.json \\
      --set prompt="a small red circle at the top left on a white background" --set seed=1..4
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Queues a workflow on a running ComfyUI server, follows it, and downloads what it makes."
    )
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "workflow",
        type=Path,
        metavar="WORKFLOW",
        help="a file in API form (on ComfyUI's page: File > Export (API)), or a PNG that ComfyUI "
        "saved",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="another value of an input; see below",
    )
    parser.add_argument(
        "--server",
        default="http://127.0.0.1:8188",
        metavar="URL",
        help="default: %(default)s; https and a path prefix are fine",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("out"),
        metavar="DIR",
        help="for results and the journal, default: %(default)s; no file there is replaced",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    parser.add_argument(
        "--resume", action="store_true", help="skip jobs that are done, follow those queued"
    )
    parser.add_argument(
        "--wait",
        type=_seconds,
        metavar="SECONDS",
        help="how long a server may be away, default: 60; given, it also waits for one that has "
        "yet to start",
    )
    parser.add_argument(
        "--header",
        action="append",
        default=[],
        metavar='"NAME: VALUE"',
        help='sent with each request, such as "Authorization: Bearer TOKEN"',
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="check everything, list the jobs, queue nothing"
    )


def run(args: argparse.Namespace) -> int:
    """Submits the jobs.

    Returns:
        0 when all are done, 1 when one is not, 3 when the server was lost, 130 when stopped.
    """
    require_packages(
        "talking to a server", PACKAGES, extra="client", instead=", or use ComfyUI's own Python"
    )
    from ..client.progress import losable
    from ..client.submission import SubmitRequest, submit
    from ..client.transport import ServerError

    printer = Printer()

    def ended(job: Job) -> None:
        if not args.json:
            with losable(sys.stdout):
                printer.show(job)

    request = SubmitRequest(
        workflow=args.workflow,
        server=args.server,
        output=args.output,
        settings=args.set,
        headers=_headers(args.header),
        wait=args.wait,
        resume=args.resume,
        dry_run=args.dry_run,
    )
    try:
        outcome = asyncio.run(submit(request, sys.stderr, ended))
    except ServerError as error:  # before anything was queued
        if args.debug:
            traceback.print_exc()
        print(f"qwen-l40s: error: {error}", file=sys.stderr)
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
        print(f"qwen-l40s: error: {outcome.error} --resume continues this run.", file=sys.stderr)
    if request.dry_run:
        print(f"jobs that could be queued: {len(outcome.jobs)}; none was", file=sys.stderr)
        return
    counts: dict[str, int] = {}
    for job in outcome.jobs:
        counts[job.status] = counts.get(job.status, 0) + 1
    states = ", ".join(f"{count} {status}" for status, count in counts.items())
    print(f"{states}; results in {request.output}", file=sys.stderr)
    if outcome.stopped:
        print("qwen-l40s: stopped; --resume continues this run", file=sys.stderr)


class Printer:
    """Prints what jobs made: files, and texts indented; each text once, for jobs share loaders."""

    def __init__(self) -> None:
        self._shown: set[str] = set()

    def show(self, job: Job) -> None:
        if job.files:
            took = "" if job.seconds is None else f" ({job.seconds:.1f} s)"
            print_text(f"{job.label}: {', '.join(map(str, job.files))}{took}")
        titles: dict[str, list[str]] = {}
        for title, texts in job.texts.items():
            titles.setdefault("\n".join(texts), []).append(title)
        for text, named in titles.items():
            if text not in self._shown:
                self._shown.add(text)
                print_text(f"{job.label}, {', '.join(named)}:")
                print_text("\n".join(f"  {line}".rstrip() for line in text.splitlines()))


def _headers(texts: list[str]) -> dict[str, str]:
    headers = {}
    for text in texts:
        name, colon, value = text.partition(":")
        name, value = name.strip(), value.strip()
        if not colon or not name or not (name + value).isprintable() or " " in name:
            raise SettingError(f'--header {text!r} must be "Name: value".')
        headers[name] = value
    return headers


def _seconds(text: str) -> float:
    """As argparse calls it."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not (seconds >= 0 and math.isfinite(seconds)):
        raise argparse.ArgumentTypeError(f"{text!r} must be a number of seconds, 0 or more")
    return seconds
