"""A process that is ended with a `with` block."""

from __future__ import annotations

import subprocess
from abc import abstractmethod
from contextlib import AbstractContextManager


class ChildProcess(AbstractContextManager):
    """Ends with the block that it was started for."""

    @abstractmethod
    def close(self) -> None:
        """Ends the process."""

    def __exit__(self, *error: object) -> None:
        self.close()


def wait_or_kill(process: subprocess.Popen, seconds: float) -> None:
    """Waits for a process that was asked to end; kills it when it does not."""
    try:
        process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
