"""The examples of the README and of docs/ run as they stand, on a real server."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from comfyui_host import comfyui_folder, comfyui_python
from PIL import Image
from waiting import SECONDS, until

from qwen_l40s.bench.server import free_port

ROOT = Path(__file__).resolve().parents[2]
ADDRESS = "127.0.0.1:8188"


def blocks(page, language):
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.M | re.S)


@pytest.fixture
def folder(tmp_path):
    """A place to run in, from which the pack's files are found as from its own folder."""
    for name in ("workflows", "__main__.py"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


def run(command, folder):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        list(map(str, command)),
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def is_picture(path):
    with Image.open(path) as image:
        image.load()
        return image.size == (256, 256) and len(image.getcolors(256 * 256)) > 100


def test_python(server, folder):
    [code] = blocks("docs/headless.md", "python")
    assert ADDRESS in code
    code = code.replace(ADDRESS, f"127.0.0.1:{server.port}")
    printed = run([sys.executable, "-W", "error", "-c", code], folder).splitlines()
    assert printed[0].startswith("running ")
    assert is_picture(folder / printed[-1])
    assert sorted(path.name for path in folder.iterdir()) == ["__main__.py", "out", "workflows"]


def test_curl(server, folder):
    if not shutil.which("curl"):
        pytest.skip("there is no curl")
    [example] = [b for b in blocks("docs/headless.md", "bash") if "curl" in b]
    assert ADDRESS in example
    example = example.replace(ADDRESS, f"127.0.0.1:{server.port}")
    printed = run(["bash", "-c", example], folder)
    assert '"status_str": "success"' in printed
    [name] = re.findall(r'"filename": "(.*)"', printed)
    picture = server.client.get("/view", params={"filename": name})
    (folder / "picture.png").write_bytes(picture.content)
    assert is_picture(folder / "picture.png")


def test_the_download_is_that_of_its_workflow(folder):
    [example] = [block for block in blocks("docs/models.md", "bash") if "--create-dirs" in block]
    printed = run(["bash", "-c", f'curl() {{ echo "${{@: -2}}"; }}\n{example}'], folder)
    graph = json.loads((ROOT / "workflows" / "api" / "text_to_image.json").read_text("utf-8"))
    models = [model for node in graph.values() for model in node["_meta"].get("models", ())]
    assert printed.splitlines() == [
        f"models/{model['directory']}/{model['name']} {model['url']}" for model in models
    ]


def test_submit(server, folder):
    [example] = [block for block in blocks("README.md", "bash") if "submit" in block]
    command = shlex.join([sys.executable, str(ROOT)])
    example = example.replace("python .", command).rstrip()
    example += f" --server http://127.0.0.1:{server.port}"
    run(["bash", "-c", example], folder)
    images = sorted((folder / "out").rglob("*.png"))
    assert len(images) == 2
    assert all(map(is_picture, images))


class Worker:
    """The entry script of docs/serverless.md, with the micro workflow."""

    def __init__(self, folder, *arguments, **environment):
        comfyui = comfyui_folder()
        [script] = [block for block in blocks("docs/serverless.md", "bash") if "READY" in block]
        (folder / "start.sh").write_text(script, encoding="utf-8")
        self.ready, self.log = folder / "ready", folder / "log"
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHON": str(comfyui_python(comfyui)),
            "COMFYUI": str(comfyui),
            "PACK": str(ROOT),
            "OUTPUT": str(folder / "output"),
            "READY": str(self.ready),
            "WARM_UP": str(ROOT / "workflows" / "api" / "micro_text_to_image.json"),
            "MODEL": "micro (bundled)",
            "PORT": str(free_port()),
            **environment,
        }
        nodes = folder / "custom_nodes"
        if not nodes.exists():
            nodes.mkdir()
            (nodes / "comfyui-qwen-image-l40s").symlink_to(ROOT, target_is_directory=True)
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                ["bash", "start.sh", "--cpu", "--base-directory", str(folder), *arguments],
                cwd=folder,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_until_ready(self):
        until(lambda: self.ready.exists() or self.process.poll() is not None)
        assert self.process.poll() is None, self.log.read_text()[-4000:]

    def stop(self):
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        self.process.wait()


@pytest.fixture
def worker(tmp_path):
    started = []

    def start(*arguments, **environment):
        started.append(Worker(tmp_path, *arguments, **environment))
        return started[-1]

    yield start
    for running in started:
        running.stop()


@pytest.mark.xdist_group("workers")
def test_a_worker_is_ready_when_it_has_painted(worker):
    """Also when its container starts again, whose files are those of the first time."""
    [dockerfile] = blocks("docs/serverless.md", "dockerfile")
    flags = re.search(r"^CMD (\[.*?\])", dockerfile.replace("\\\n", ""), re.M)
    port = str(free_port())
    for starts in (1, 2):
        running = worker(*json.loads(flags[1]), PORT=port)
        running.wait_until_ready()
        images = list(running.log.parent.glob("output/*.png"))
        assert len(images) == starts and all(map(is_picture, images))
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(SECONDS) == 143
        assert not running.ready.exists()
        with pytest.raises(ProcessLookupError):  # ComfyUI is gone, too
            os.killpg(running.process.pid, 0)


@pytest.mark.xdist_group("workers")
def test_a_worker_stops_when_its_comfyui_does(worker):
    running = worker("--no-such-flag")
    until(lambda: running.process.poll() is not None)
    assert running.process.returncode == 1
    assert not running.ready.exists()


@pytest.mark.xdist_group("workers")
def test_a_worker_stops_when_the_warm_up_fails(worker):
    running = worker(MODEL="not there.safetensors")
    until(lambda: running.process.poll() is not None)
    assert running.process.returncode == 2
    assert "not there.safetensors" in running.log.read_text()
    assert not running.ready.exists()
