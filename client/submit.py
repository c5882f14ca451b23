"""Runs `qwen-l40s submit`: reads workflow and images first, then queues and fetches."""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PureWindowsPath
from typing import Any, TextIO

from PIL import Image, UnidentifiedImageError

from ..errors import QwenL40SError, SettingError
from .journal import DiskError, Journal
from .progress import Progress, cancelled_by_signals
from .run import MOST_BYTES, WAIT_SECONDS, Run, check_jobs
from .scheduler import CANCELLED, DONE, LOST, Job
from .server import failure
from .servers import ServerList
from .settings import parse_settings, variations
from .transport import ServerError
from .workflow import (
    Graph,
    NodeInput,
    called,
    input_called,
    key_of,
    loaders_key,
    node_inputs,
    read_workflow,
    shortened,
    with_inputs,
)

LONGEST_VALUE = 40
# What is asked of Pillow, so that a file cannot reach its readers of documents and video.
IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
# How ComfyUI marks a file by the server's folder that it lies in.
SERVER_FOLDERS = ("[input]", "[output]", "[temp]")
# Of the server's input folder, so that uploads do not mix with what people put there.
SUBFOLDER = "qwen-l40s-submit"
NAME_LETTERS = 40
HASH_LETTERS = 16


def plan_jobs(
    graph: Graph,
    settings: Mapping[str, Sequence[str]],
    object_info: Mapping[str, Any],
    folder: Path,
    say: Callable[[str], None] = lambda line: None,
) -> tuple[list[Job], int]:
    """Returns the jobs of a workflow, each graph once, and how many equal ones were left out.

    Args:
        say: gets a line for each image outside it that the file itself names.

    Raises:
        SettingError: a setting or an image does not suit this server.
    """
    found = variations(graph, settings, object_info)
    named: dict[Any, tuple[Any, dict[str, Path]]] = {}
    known: dict[str, dict[str, NodeInput]] = {}
    jobs: dict[str, Job] = {}
    for variation in found:
        # Hundreds of seeds on one image: it is read once.
        inputs = image_inputs(variation.graph, object_info, known)
        wanted = tuple((node, name, value) for node, name, _, value in inputs)
        if wanted not in named:
            local = local_images(variation.graph, object_info, folder)
            names = {path: server_name(path) for path in local.values()}
            for (node, name), path in local.items():
                by_file = variation.graph[node]["inputs"][name] == graph[node]["inputs"].get(name)
                if by_file and not path.is_relative_to(folder.resolve()):
                    where = input_called(graph, node, name)
                    say(
                        f"{where} is a file outside the workflow's folder and will be uploaded: "
                        f"{path}"
                    )
            images = {name: path for path, name in names.items()}
            named[wanted] = {place: names[path] for place, path in local.items()}, images
        renamed, images = named[wanted]
        ready = with_inputs(variation.graph, renamed) if renamed else variation.graph
        key = key_of(ready)
        if key not in jobs:
            facts = (ready, variation.chosen, "", images, loaders_key(ready))
            jobs[key] = Job(len(jobs) + 1, key, *facts)
    for job, label in zip(jobs.values(), labels([j.settings for j in jobs.values()]), strict=True):
        job.label = label
    return list(jobs.values()), len(found) - len(jobs)


def labels(chosen: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names jobs by the settings in which they differ."""
    first = chosen[0] if chosen else {}
    differing = [key for key in first if any(job[key] != first[key] for job in chosen)]

    def short(value: Any) -> str:
        text = " ".join(str(value).split())
        return text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 3]}..."

    found = []
    for number, job in enumerate(chosen, start=1):
        facts = ", ".join(f"{key}={short(job[key])}" for key in differing)
        found.append(f"job {number} ({facts})" if facts else f"job {number}")
    return found


@dataclass(frozen=True)
class SubmitRequest:
    workflow: Path
    output: Path
    servers: Sequence[str] = ()
    server_file: Path | None = None
    settings: Sequence[str] = ()
    headers: Mapping[str, str] | None = None
    wait: float | None = None  # for a first server in s; None: none, `WAIT_SECONDS` for lost ones
    resume: bool = False
    again: bool = False
    dry_run: bool = False
    most: float = MOST_BYTES


@dataclass(frozen=True)
class SubmitOutcome:
    """How a run ended: by an error, stopped, or with all jobs. Servers have no passwords."""

    request: SubmitRequest
    servers: list[str]
    jobs: list[Job]
    error: QwenL40SError | None = None
    stopped: bool = False

    @property
    def exit_code(self) -> int:
        if self.stopped:
            return 130
        if self.error is not None:
            return 3
        return 0 if self.request.dry_run or all(job.status == DONE for job in self.jobs) else 1

    def as_dict(self) -> dict[str, Any]:
        return {
            "servers": self.servers,
            "workflow": str(self.request.workflow),
            "jobs": [job.as_dict() for job in self.jobs],
        }


async def submit(
    request: SubmitRequest, log: TextIO, ended: Callable[[Job], None]
) -> SubmitOutcome:
    """Runs a workflow; `ended` takes each job. Raises its errors before anything is queued."""
    with cancelled_by_signals(asyncio.current_task()), Progress(log) as progress:
        graph = read_workflow(request.workflow)
        settings = parse_settings(request.settings, graph)
        headers = request.headers or {}
        servers = ServerList(request.servers, request.server_file, progress.say, headers)
        listed = servers.read()
        wait = WAIT_SECONDS if request.wait is None else request.wait

        def tell(job: Job) -> None:
            if job.error is not None:
                progress.say(f"{job.label} {job.status}: {job.error['message']}")
            with progress.paused():
                ended(job)

        limits = {"wait": wait, "most": request.most}
        async with Run(servers, progress=progress, ended=tell, **limits) as run:
            takes = await run.reach(listed, request.wait or 0)
            info = run.feeders[next(iter(takes))].admitted.info
            jobs, equal = plan_jobs(graph, settings, info, request.workflow.parent, run.say_once)
            for line in check_jobs(jobs, takes):
                progress.say(line)
            if equal:
                progress.say(f"{equal} identical jobs are left out: each runs once")
            if request.dry_run:
                return SubmitOutcome(request, list(run.feeders), jobs)
            with Journal(request.output, request.workflow.stem, resume=request.resume) as journal:
                run.begin(journal, jobs, str(request.workflow), again=request.again)
                return await _go(request, run, jobs, progress)


async def _go(
    request: SubmitRequest, run: Run, jobs: list[Job], progress: Progress
) -> SubmitOutcome:
    error, stopped = None, False
    try:
        await run.go()
    except (ServerError, DiskError) as lost:
        error = lost
        for job in jobs:
            if job.open:
                job.status, job.error = LOST, failure("server", str(lost))
    except asyncio.CancelledError:
        stopped = True
        progress.say(
            "stopping: removing the jobs of this run from the queue (Ctrl-C again ends at once)"
        )
        if not await run.stop():
            progress.say("a server has not confirmed: a job of this run may still run there")
        for job in jobs:
            if job.open:
                job.status = CANCELLED
    return SubmitOutcome(request, list(run.feeders), jobs, error, stopped)


def local_images(
    graph: Graph, object_info: Mapping[str, Any], folder: Path
) -> dict[tuple[str, str], Path]:
    """Finds {(node id, input): path} of images that the server lacks and this machine has, each
    read once. A path starts from the working directory, else from the workflow file. A name in the
    server's list, or with `[input]` at its end, is the server's. Raises SettingError.
    """
    found: dict[tuple[str, str], Path] = {}
    for node, name, spec, value in image_inputs(graph, object_info, {}):
        # A text that may name an image, as a drawn mask's does, may also be empty.
        empty = spec.kind == "STRING" and not value
        if value in spec.choices or value.endswith(SERVER_FOLDERS) or empty:
            continue
        path = _local_file(value, folder)
        if path is None:
            where = input_called(graph, node, name)
            there = f"'subfolder/photo.png [{spec.rules.get('image_folder', 'input')}]'"
            raise SettingError(
                f"{where} is {shortened(value)}, an image that neither the server nor this "
                f'machine has: give one with --set "{where}=photo.png". For an image in a '
                f"subfolder of the server, write {there}."
            )
        if path not in found.values():
            check_image(path, called(graph, node))
        found[node, name] = path
    return found


def image_inputs(
    graph: Graph, object_info: Mapping[str, Any], known: dict[str, dict[str, NodeInput]]
) -> Iterator[tuple[str, str, NodeInput, str]]:
    """Yields (node id, input, its rules, image) and fills `known`, image inputs by class."""
    for node, described in graph.items():
        kind = described["class_type"]
        images = known.get(kind)
        if images is None:
            specs = node_inputs(object_info, described) or {}
            images = {name: spec for name, spec in specs.items() if spec.rules.get("image_upload")}
            if not any(spec.opens for spec in specs.values()):
                known[kind] = images
        for name, spec in images.items():
            value = described["inputs"].get(name)
            if isinstance(value, str):
                yield node, name, spec, value


def _local_file(value: str, folder: Path) -> Path | None:
    tries = [value]
    if os.sep == "/" and "\\" in value:  # a workflow that Windows wrote
        tries.append(PureWindowsPath(value).as_posix())
    for text in tries:
        try:
            path = Path(text).expanduser()
            for place in (Path.cwd() / path, folder / path):
                if place.exists() and not place.is_dir():
                    return place.resolve()
        except (OSError, RuntimeError, ValueError):  # too long, no such user, a zero byte
            continue
    return None


def check_image(path: Path, used_by: str) -> None:
    """Reads the first image of a file to its end, or raises SettingError for the node `used_by`."""
    Image.init()
    formats = [name for name in IMAGE_FORMATS if name in Image.OPEN]
    try:
        with warnings.catch_warnings():
            # From 89 megapixels Pillow warns, and cameras make those; from 179 it refuses.
            warnings.simplefilter("ignore")
            with Image.open(path, formats=formats) as image:
                image.load()
        return
    except UnidentifiedImageError as error:
        cause: Exception = error
        what = "is not a readable image"
        remedy = f"give a {', '.join(IMAGE_FORMATS[:-1])} or {IMAGE_FORMATS[-1]}"
        if not path.stat().st_size:
            what, remedy = "is empty", "give another"
    except Image.DecompressionBombError as error:
        cause, what, remedy = error, f"is too large ({error})", "scale it down"
    except Exception as error:  # a damaged file makes Pillow's readers fail in many ways
        cause, what, remedy = error, f"cannot be read ({error})", "save it again"
    raise SettingError(f"the image for {used_by} {what}: {remedy}.", path) from cause


def server_name(path: Path) -> str:
    """Names an image by its content, so that two files of one name never meet."""
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:HASH_LETTERS]
    stem = re.sub(r"[^A-Za-z0-9]+", "-", path.stem).strip("-")[:NAME_LETTERS] or "image"
    return f"{SUBFOLDER}/{stem}-{digest}{path.suffix.lower()}"
