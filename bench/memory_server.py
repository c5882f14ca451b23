"""A process that is ended with a `with` block."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from abc import abstractmethod
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path


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


# A ComfyUI server in a process of its own, and a client that posts graphs to it.

ROOT = Path(__file__).resolve().parent.parent
PACK = "comfyui-qwen-image-l40s.main"
PROBE = "memory_probe.py"
START_SECONDS = 180
POLL_SECONDS = 0.02


class ServerError(RuntimeError):
    """The server did not start, stopped, refused a graph or took too long; says its last lines."""


@dataclass
class Answer:
    """What came of one prompt.

    Args:
        start, end: `time.monotonic()` of the post and of the history entry.
        entry: of /history.
    """

    start: float
    end: float
    entry: dict = field(repr=False)

    @property
    def status(self) -> str:
        return self.entry["status"]["status_str"]

    @property
    def error(self) -> str | None:
        """The node and the message of what failed."""
        for kind, data in self.entry["status"]["messages"]:
            if kind == "execution_error":
                return f"{data['node_type']}: {data['exception_message'].strip()}"
        return None

    def texts(self) -> dict[str, str]:
        """{node: the text that it shows}"""
        outputs = self.entry.get("outputs", {}).items()
        return {
            node: "\n".join(map(str, shown["text"])) for node, shown in outputs if "text" in shown
        }


class Server(ChildProcess):
    """Starts ComfyUI on a free port with the pack and the probe, and waits until it answers.

    Args:
        comfyui: ComfyUI's folder.
        python: that has its requirements.
        base: folder for custom_nodes, input, output, temporary files and logs.
        models: folder with diffusion_models, text_encoders and vae; None for the bundled ones.
        arguments: further ones of ComfyUI's command line.

    Raises:
        ServerError: it does not start.
    """

    def __init__(
        self, comfyui: Path, python: str, base: Path, models: Path | None, *arguments: str
    ) -> None:
        _fill(base)
        self.port = _free_port()
        self._detail, self._console = base / "detail.log", base / "console.log"
        extra = []
        if models is not None:
            extra = ["--extra-model-paths-config", str(_model_paths(base, models))]
        command = [
            *(python, str(comfyui / "main.py"), "--disable-auto-launch"),
            *("--port", str(self.port), "--base-directory", str(base)),
            *("--database-url", "sqlite:///:memory:"),
            # What leaves the card as a whole is told at this level only.
            *("--verbose", "DEBUG", str(self._detail)),
            *extra,
            *arguments,
        ]
        started = time.monotonic()
        with self._console.open("w") as console:
            self._process = subprocess.Popen(
                command, cwd=comfyui, stdout=console, stderr=subprocess.STDOUT
            )
        try:
            self._wait()
            self.stats: dict = self.get("/system_stats")
            self.known: dict = self.get("/object_info")
        except BaseException:
            self.close()
            raise
        self.start_seconds = time.monotonic() - started

    @property
    def pid(self) -> int:
        return self._process.pid

    def _wait(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            try:
                self.get("/system_stats")
                return
            except OSError:
                self._check_alive()
                time.sleep(0.2)
        raise ServerError(f"ComfyUI did not start in {START_SECONDS} s:\n{self.tail()}")

    def _check_alive(self) -> None:
        code = self._process.poll()
        if code is not None:
            raise ServerError(f"ComfyUI ended with {code}:\n{self.tail()}")

    def get(self, path: str) -> dict:
        return self._call(path, None)

    def post(self, path: str, data: dict) -> dict:
        return self._call(path, json.dumps(data).encode())

    def _call(self, path: str, body: bytes | None) -> dict:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read() or b"{}")

    def run(self, graph: dict, seconds: float) -> Answer:
        """Posts a graph and waits for its end.

        Raises:
            ServerError: the graph is refused, the server ends, or it takes longer than `seconds`.
        """
        start = time.monotonic()
        try:
            # Only a client is told which node runs, and so the probe.
            found = self.post("/prompt", {"prompt": graph, "client_id": "memory"})
        except urllib.error.HTTPError as error:
            raise ServerError(
                f"ComfyUI refuses the graph: {error.read().decode()[:2000]}"
            ) from None
        path = f"/history/{found['prompt_id']}"
        while time.monotonic() < start + seconds:
            try:
                entry = self.get(path).get(found["prompt_id"])
            except OSError:
                self._check_alive()
                entry = None
            if entry:
                return Answer(start, time.monotonic(), entry)
            time.sleep(POLL_SECONDS)
        raise ServerError(f"no answer in {seconds:.0f} s:\n{self.tail()}")

    def log_size(self) -> int:
        return self._detail.stat().st_size if self._detail.exists() else 0

    def log_since(self, size: int) -> list[str]:
        """The lines of the detailed log after so many bytes."""
        if not self._detail.exists():
            return []
        with self._detail.open("rb") as log:
            log.seek(size)
            return log.read().decode(errors="replace").splitlines()

    def tail(self) -> str:
        return self._console.read_text(errors="replace")[-3000:]

    def host_gib(self) -> dict[str, float]:
        """What the server holds of the machine's memory, in GiB, by kind; empty off Linux."""
        try:
            lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        except OSError:
            return {}
        kinds = ("RssAnon", "RssFile", "RssShmem", "VmPin", "VmLck")
        pairs = (line.split(":") for line in lines)
        return {name: int(rest.split()[0]) / 2**20 for name, rest in pairs if name in kinds}

    def close(self) -> None:
        self._process.terminate()
        wait_or_kill(self._process, 20)


def _fill(base: Path) -> None:
    nodes = base / "custom_nodes"
    nodes.mkdir(parents=True, exist_ok=True)
    if not (nodes / PACK).exists():
        (nodes / PACK).symlink_to(ROOT, target_is_directory=True)
    shutil.copyfile(ROOT / "benchmarks" / PROBE, nodes / PROBE)


def _model_paths(base: Path, models: Path) -> Path:
    # A string of JSON is one of YAML.
    lines = ["benchmark:", f"  base_path: {json.dumps(str(models))}"]
    lines += [f"  {name}: {name}/" for name in ("diffusion_models", "text_encoders", "vae")]
    path = base / "extra_model_paths.yaml"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
