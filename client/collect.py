"""From a history entry to a job with its results."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .failure import failure, of_execution
from .job import CANCELLED, DONE, FAILED, Job
from .results import download, files_of, texts_of
from .server import Server
from .trouble import AnswerError

ENDS = ("execution_success", "execution_error", "execution_interrupted")


async def collect(
    server: Server,
    job: Job,
    entry: Mapping[str, Any],
    folder: Path,
    told: Mapping[str, Any] | None = None,
) -> tuple[str, dict[str, Any] | None]:
    """Fetches what an ended job made; files and texts of a failed one too, as far as they are.

    Args:
        entry: of the server's history.
        told: an execution_error that the history may not have.

    Returns:
        The job's status, and why it failed; see `client/failure.py`.

    Raises:
        ServerError: the server went away.
    """
    messages = dict((entry.get("status") or {}).get("messages", ()))
    job.seconds = _seconds(messages)
    if "execution_interrupted" in messages:
        return CANCELLED, failure("interrupted", "someone interrupted it on the server")
    job.texts = texts_of(entry, job.graph)
    broken = messages.get("execution_error", told)
    error = None if broken is None else of_execution(job.graph, broken)
    for image in files_of(entry):
        try:
            job.files.append(await download(server, image, folder))
        except AnswerError as refused:
            message = f"{image['filename']} cannot be fetched: {refused}"
            error = error or failure("download", message)
        except OSError as full:
            message = (
                f"{image['filename']} cannot be written ({full.strerror or full}); --resume "
                "fetches it once there is room"
            )
            error = error or failure("download", message)
    return (DONE if error is None else FAILED), error


def _seconds(told: Mapping[str, Mapping[str, Any]]) -> float | None:
    """That the run took, by the server's clock; None where it does not say."""
    start = told.get("execution_start", {}).get("timestamp")
    end = next((told[kind].get("timestamp") for kind in told if kind in ENDS), None)
    return None if start is None or end is None else round((end - start) / 1000, 3)
