"""From a workflow file and what was typed to jobs, checked before the server hears of any."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import SettingError
from .check import check_graph
from .graph import Graph
from .job import Job, labels
from .ledger import keys_of
from .server import Server
from .settings import Setting, variations
from .trouble import AnswerError
from .uploads import Upload, image_inputs, local_images, with_uploaded

# Of the server's input folder, so that uploads do not mix with what people put there.
SUBFOLDER = "qwen-l40s-submit"
NAME_LETTERS = 40
HASH_LETTERS = 16


@dataclass(frozen=True)
class Plan:
    """Jobs, and the images that have to be on the server before them.

    Attributes:
        images: {local path: what an image input calls the uploaded file}.
    """

    jobs: list[Job]
    images: Mapping[Path, str]


def plan_jobs(
    graph: Graph, settings: Sequence[Setting], object_info: Mapping[str, Any], folder: Path
) -> Plan:
    """The jobs of a workflow.

    Args:
        folder: of the workflow file.

    Raises:
        SettingError: a setting, an image or the workflow does not suit this server.
    """
    found = variations(graph, settings, object_info)
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
                    names[upload.path] = f"{SUBFOLDER}/{_server_name(upload.path)}"
        ready = with_uploaded(variation.graph, uploads[wanted], names)
        check_graph(ready, object_info)
        graphs.append(ready)
    chosen = [variation.chosen for variation in found]
    rows = zip(keys_of(graphs), graphs, chosen, labels(chosen), strict=True)
    jobs = [Job(number, *row) for number, row in enumerate(rows, start=1)]
    return Plan(jobs, names)


async def upload_images(server: Server, plan: Plan) -> None:
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


def _server_name(path: Path) -> str:
    """Of the file's content, so that two files of one name never meet."""
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:HASH_LETTERS]
    stem = re.sub(r"[^A-Za-z0-9]+", "-", path.stem).strip("-")[:NAME_LETTERS] or "image"
    return f"{stem}-{digest}{path.suffix.lower()}"
