"""`qwen-l40s submit`: from a workflow file, checked before anything is queued, to the results."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from ..errors import SettingError
from .graph.check import Checker
from .graph.images import Upload, image_inputs, local_images, server_name, with_uploaded
from .graph.settings import InputSetting, parse_settings, variations
from .graph.workflow import Graph, read_workflow
from .jobs import JobRun
from .ledger import CANCELLED, DONE, LOST, OPEN, QUEUED, Job, Ledger, keys_of, labels
from .progress import Progress, cancelled_by_signals
from .server import Server, failure
from .transport import AnswerError, ServerError

STOP_SECONDS = 15.0


@dataclass(frozen=True)
class SubmitPlan:
    """Jobs, and the images that have to be on the server before them.

    Attributes:
        images: {local path: what an image input calls the uploaded file}.
    """

    jobs: list[Job]
    images: Mapping[Path, str]


def plan_jobs(
    graph: Graph, settings: Sequence[InputSetting], object_info: Mapping[str, Any], folder: Path
) -> SubmitPlan:
    """The jobs of a workflow.

    Args:
        folder: of the workflow file.

    Raises:
        SettingError: a setting, an image or the workflow does not suit this server.
    """
    found = variations(graph, settings, object_info)
    checker = Checker(object_info)
    uploads: dict[tuple[tuple[str, str, str], ...], list[Upload]] = {}
    names: dict[Path, str] = {}
    graphs = []
    for variation in found:
        # Hundreds of seeds on one image: it is read once.
        wanted = tuple(
            (node, name, value)
            for node, name, _, value in image_inputs(variation.graph, object_info)
        )
        if wanted not in uploads:
            uploads[wanted] = local_images(variation.graph, object_info, folder)
            for upload in uploads[wanted]:
                if upload.path not in names:
                    names[upload.path] = server_name(upload.path)
        ready = with_uploaded(variation.graph, uploads[wanted], names)
        checker.check(ready)
        graphs.append(ready)
    chosen = [variation.chosen for variation in found]
    rows = zip(keys_of(graphs), graphs, chosen, labels(chosen), strict=True)
    jobs = [Job(number, *row) for number, row in enumerate(rows, start=1)]
    return SubmitPlan(jobs, names)


async def upload_images(server: Server, plan: SubmitPlan) -> None:
    """Puts the plan's images on the server, each once, under the names that the jobs hold.

    Raises:
        SettingError: the server does not take one.
        ServerError: it is away.
    """
    for path, name in plan.images.items():
        subfolder, _, file = name.rpartition("/")
        try:
            given = await server.upload(path.read_bytes(), file, subfolder)
        except AnswerError as error:
            if error.status not in (400, 413):
                raise
            raise SettingError(f"{path} cannot be uploaded: {error}") from error
        if given != name:
            rename(plan.jobs, name, given)


def rename(jobs: Iterable[Job], name: str, given: str) -> None:
    """Where the server has another file of that name, it gives the upload a different one."""
    for job in jobs:
        for node in job.graph.values():
            for key, value in node["inputs"].items():
                if value == name:
                    node["inputs"][key] = given


@dataclass(frozen=True)
class SubmitRequest:
    """What was asked for.

    Attributes:
        settings: as they are typed after --set.
        wait: see `Transport`.
    """

    workflow: Path
    server: str
    output: Path
    settings: Sequence[str] = ()
    headers: Mapping[str, str] | None = None
    wait: float | None = None
    resume: bool = False
    dry_run: bool = False


@dataclass(frozen=True)
class SubmitOutcome:
    """How a run ended.

    Attributes:
        server: its address without a password.
        error: why the server was lost; None when it was not.
        stopped: by Ctrl-C or SIGTERM.
    """

    request: SubmitRequest
    server: str
    jobs: list[Job]
    error: ServerError | None = None
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
            "server": self.server,
            "workflow": str(self.request.workflow),
            "jobs": [job.as_dict() for job in self.jobs],
        }


async def submit(
    request: SubmitRequest, log: TextIO, ended: Callable[[Job], None]
) -> SubmitOutcome:
    """Runs a workflow on a server.

    Args:
        log: for progress and notes.
        ended: called once for each job that ended, while no bar is drawn.

    Raises:
        SettingError: bad input; nothing was queued.
        ServerError: no server; nothing was queued.
        asyncio.CancelledError: stopped before anything was queued.
    """
    with cancelled_by_signals(asyncio.current_task()):
        graph = read_workflow(request.workflow)
        settings = parse_settings(request.settings)
        with Progress(log) as progress:
            server = Server(
                request.server, headers=request.headers, wait=request.wait, notify=progress.say
            )
            async with server:
                info = await server.object_info()
                plan = plan_jobs(graph, settings, info, request.workflow.parent)
                if request.dry_run:
                    return SubmitOutcome(request, str(server.address), plan.jobs)
                with Ledger(request.output, request.workflow.stem) as ledger:
                    await _begin(request, server, plan, ledger, progress)
                    return await _run(request, server, plan.jobs, ledger, progress, ended)


async def _begin(
    request: SubmitRequest, server: Server, plan: SubmitPlan, ledger: Ledger, progress: Progress
) -> None:
    if request.resume:
        await attach(server, plan.jobs, ledger)
        count = len(plan.jobs)
        done = sum(job.status == DONE for job in plan.jobs)
        there = sum(job.status == QUEUED for job in plan.jobs)
        rest = count - done - there
        progress.say(
            f"resuming: {done} of {count} jobs done, {there} on the server, {rest} to queue"
        )
    elif ledger.unfinished:
        progress.say(
            f"an earlier run left jobs unfinished ({ledger.unfinished}): this run starts anew, "
            f"--resume continues that one ({ledger.path})"
        )
    if any(job.status in OPEN and job.status != QUEUED for job in plan.jobs):
        await upload_images(server, plan)


async def attach(server: Server, jobs: list[Job], ledger: Ledger) -> None:
    """Gives the jobs what the journal and the server know of them.

    A job whose files are here is done; one that the server has queued, runs or has finished well
    is followed; one that failed or was interrupted stays to be queued.
    """
    queue = await server.queue()
    for job in jobs:
        record = ledger.records.get(job.key)
        if record is None:
            continue
        if record.complete:
            job.status, job.prompt_id, job.seconds = DONE, record.prompt_id, record.seconds
            job.files, job.texts = list(record.files), dict(record.texts)
            continue
        prompt_id = queue.called.get(record.prompt_id, record.prompt_id)
        if prompt_id not in queue:
            entry = await server.history(prompt_id)
            if entry is None or (entry.get("status") or {}).get("status_str") == "error":
                continue
        job.status, job.prompt_id = QUEUED, prompt_id


async def _run(
    request: SubmitRequest,
    server: Server,
    jobs: list[Job],
    ledger: Ledger,
    progress: Progress,
    ended: Callable[[Job], None],
) -> SubmitOutcome:
    def tell(job: Job) -> None:
        if job.error is not None:
            progress.say(f"{job.label} {job.status}: {job.error['message']}")
        with progress.paused():
            ended(job)

    progress.begin(len(jobs), done=sum(job.status == DONE for job in jobs))
    # The server tells of a queued job to the client that queued it.
    client_id = (request.resume and ledger.client_id) or uuid.uuid4().hex
    ledger.run(client_id, str(server.address), str(request.workflow))
    run = JobRun(
        server,
        jobs,
        ledger,
        request.output,
        client_id=client_id,
        progress=progress,
        ended=tell,
    )
    error, stopped = None, False
    try:
        await run.go()
    except ServerError as lost:
        error = lost
        for job in jobs:
            if job.status in OPEN:
                job.status, job.error = LOST, failure("server", str(lost))
    except asyncio.CancelledError:
        stopped = True
        await _stop(run, progress)
    return SubmitOutcome(request, str(server.address), jobs, error, stopped)


async def _stop(run: JobRun, progress: Progress) -> None:
    progress.say("stopping: removing our jobs from the queue (Ctrl-C again ends at once)")
    gone = False
    with contextlib.suppress(asyncio.TimeoutError, ServerError):
        gone = await asyncio.wait_for(run.stop(), STOP_SECONDS)
    for job in run.jobs:
        if job.status in OPEN:
            job.status = CANCELLED
    if not gone:
        progress.say("the server has not confirmed: a job of ours may still run there")
