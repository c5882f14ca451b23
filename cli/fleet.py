"""`qwen-l40s fleet`: a ComfyUI server for each card, and what they do."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import SettingError
from ..files import print_text

if TYPE_CHECKING:
    from ..fleet.state import ServerStatus

PORT = 8188
REFRESH_SECONDS = 5.0
CLEAR = "\x1b[H\x1b[J"

EPILOG = """\
`qwen-l40s fleet` runs until Ctrl-C or SIGTERM, which drains the servers: their
jobs end, then they do. A second signal ends them at once. FOLDER/servers.json
lists the servers for `qwen-l40s submit --servers`; each server's log, output and
temporary files are in FOLDER/<port>.
`qwen-l40s fleet status` shows what the servers of a folder do.

examples:
  qwen-l40s fleet --comfyui ~/ComfyUI --warm-up workflows/api/text_to_image.json
  qwen-l40s submit workflows/api/text_to_image.json --set seed=1..500 \\
      --servers out/fleet/servers.json
  qwen-l40s fleet status
  qwen-l40s fleet --comfyui ~/ComfyUI --cards cpu:2 -- --disable-api-nodes
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Starts a ComfyUI server for each GPU, warms it up, and keeps it running."
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--comfyui", type=Path, metavar="DIR", help="ComfyUI's folder")
    parser.add_argument(
        "--python",
        type=Path,
        metavar="FILE",
        help="ComfyUI's Python; default: that of DIR/.venv or DIR/venv, else this one",
    )
    parser.add_argument(
        "--cards",
        default="all",
        metavar="CARDS",
        help="all, numbers such as 0,1, or cpu:2 for two servers without a GPU; with --ray also a "
        "number of servers; default: %(default)s",
    )
    parser.add_argument(
        "--port", type=int, default=PORT, help="of the first server; default: %(default)s"
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("out/fleet"),
        metavar="FOLDER",
        help="for servers.json, logs and outputs; default: %(default)s",
    )
    parser.add_argument(
        "--warm-up",
        type=Path,
        metavar="WORKFLOW",
        help="a workflow in API form that each server runs, with one step, before it is ready",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="set an input of the warm-up, as in `qwen-l40s submit`",
    )
    parser.add_argument(
        "--drain",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="wait this long for jobs after the first signal; default: %(default)g",
    )
    parser.add_argument(
        "--ray",
        metavar="ADDRESS",
        help="run the servers on a Ray cluster, one on each GPU: auto, or host:6379",
    )
    parser.add_argument(
        "--open",
        action="store_true",
        help="with --ray: servers listen on the addresses of their machines, without a password",
    )
    parser.add_argument("--json", action="store_true", help="status as one JSON object")
    parser.add_argument(
        "rest",
        nargs="*",
        metavar="status | -- ARGUMENTS",
        help="`status`: show what the servers do, on a terminal until Ctrl-C; `-- ARGUMENTS`: more "
        "arguments for each ComfyUI",
    )


def run(args: argparse.Namespace) -> int:
    if args.rest == ["status"]:
        return _status(args)
    if args.rest and not args.rest[0].startswith("-"):
        raise SettingError(
            f"{args.rest[0]!r} is neither `status` nor an argument of ComfyUI: write `fleet "
            "status`, or begin ComfyUI's arguments with --."
        )
    if args.comfyui is None:
        raise SettingError("--comfyui is missing: name ComfyUI's folder.")
    from ..fleet.server import ServerPlan
    from ..fleet.supervisor import check_plan, find_cards, run_fleet

    comfyui = args.comfyui.expanduser().resolve()
    plan = ServerPlan(
        comfyui=comfyui,
        python=args.python or _python_of(comfyui),
        folder=args.folder.resolve(),
        arguments=tuple(args.rest),
        warm_up=args.warm_up and args.warm_up.resolve(),
        settings=tuple(args.set),
        drain=args.drain,
    )
    if args.ray is None:
        return run_fleet(plan, find_cards(args.cards), args.port, _say)
    from ..fleet.ray import run_ray_fleet

    check_plan(plan)
    cpu = args.cards.startswith("cpu")
    if not (cpu or args.cards == "all" or args.cards.isdecimal()):
        raise SettingError(
            f"--cards is {args.cards!r}, but must be all, a number, or cpu:2 with --ray."
        )
    count = len(find_cards(args.cards)) if cpu else None if args.cards == "all" else int(args.cards)
    return run_ray_fleet(plan, args.ray, count, args.port, _say, cpu=cpu, open_=args.open)


def _say(text: str) -> None:
    print_text(text, sys.stderr)


def _python_of(comfyui: Path) -> Path:
    places = [comfyui / name / "bin" / "python" for name in (".venv", "venv")]
    return next((place for place in places if place.is_file()), Path(sys.executable))


def _status(args: argparse.Namespace) -> int:
    from ..fleet.state import NAME, ask_all, is_running, read_states

    path = args.folder / NAME
    while True:
        rows = ask_all(read_states(path))
        if args.json:
            print_text(json.dumps({"servers": [row.as_dict() for row in rows]}))
            return 0
        text = table(rows)
        if not is_running(path):
            text += "\nno fleet runs in this folder now: start it again"
        if not sys.stdout.isatty():
            print_text(text)
            return 0
        sys.stdout.write(CLEAR)
        print_text(text)
        time.sleep(REFRESH_SECONDS)


def table(rows: Sequence[ServerStatus]) -> str:
    from ..charts.figures import table as columns
    from ..fleet.state import READY

    cells = [["server", "card", "state", "job", "waiting", "images/h", "failures"]]
    for row in rows:
        figures = str(row.waiting), f"{row.images_per_hour:.0f}", str(row.failures)
        server = row.server
        cells.append([server.url, server.card, server.state, row.job[:8] or "-", *figures])
    lines = columns(cells)
    lines += [f"{row.server.url}: {row.server.error}" for row in rows if row.server.error]
    ready = sum(row.server.state == READY for row in rows)
    images = sum(row.images_per_hour for row in rows)
    lines.append(f"{ready} of {len(rows)} servers ready, {images:.0f} images an hour")
    return "\n".join(lines)
