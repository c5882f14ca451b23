"""`qwen-l40s fleet --ray` on a local cluster, with stand-ins for ComfyUI: whatever is killed."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import waiting

from qwen_l40s.bench.server import free_port
from qwen_l40s.errors import SettingError
from qwen_l40s.fleet.state import ServerState, read_states

pytest.importorskip("ray", reason="Ray is not installed")
psutil = pytest.importorskip("psutil")

ROOT = Path(__file__).resolve().parents[2]
until = functools.partial(waiting.until, seconds=90)


def start(folder: str) -> tuple[subprocess.Popen[bytes], str]:
    number = free_port()
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"]
    command += ["--num-cpus=2", "--num-gpus=0", f"--port={number}", f"--temp-dir={folder}"]
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    ray = subprocess.Popen([*command, "--include-dashboard=false"], env=environment, **silent)
    return ray, f"127.0.0.1:{number}"


@pytest.fixture
def cluster():
    """Yields the process of a cluster with two processors, and its address."""
    folder = tempfile.mkdtemp(prefix="ray")  # Ray's sockets lie in it: a long path is refused
    ray, address = start(folder)

    def runs() -> bool:
        nonlocal ray, address
        if ray.poll() is not None:  # another program has taken one of its ports
            ray, address = start(folder)
        return bool(raylets(ray))

    try:
        until(runs)
        yield ray, address
    finally:
        mine = psutil.Process(ray.pid).children(recursive=True) if ray.poll() is None else []
        ray.terminate()
        ray.wait(60)
        for process in mine:
            with contextlib.suppress(psutil.Error):
                process.kill()
        shutil.rmtree(folder, ignore_errors=True)


def raylets(ray: subprocess.Popen[bytes]) -> list[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        every = psutil.Process(ray.pid).children(recursive=True)
        return [process for process in every if process.name() == "raylet"]
    return []


@pytest.fixture
def comfyui(tmp_path: Path) -> Path:
    folder = tmp_path / "ComfyUI"
    folder.mkdir()
    shutil.copy(ROOT / "tests/fake_comfyui_main.py", folder / "main.py")
    (folder / "faults.json").write_text("{}")
    return folder


@contextlib.contextmanager
def fleet(comfyui: Path, address: str, *more: str):
    command = [sys.executable, ROOT, "fleet", "--ray", address, "--comfyui", comfyui]
    command += ["--python", sys.executable, "--folder", comfyui / "fleet", "--port", free_port()]
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled"}
    with subprocess.Popen(
        [*map(str, command), *more], stderr=subprocess.PIPE, text=True, env=environment
    ) as driver:
        try:
            yield driver
        finally:
            driver.kill()


def states(comfyui: Path) -> list[ServerState]:
    try:
        return read_states(comfyui / "fleet" / "servers.json")
    except SettingError:
        return []


def ready(comfyui: Path) -> bool:
    return [each.state for each in states(comfyui)] == ["ready", "ready"]


def alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"


def test_an_actor_that_is_killed_comes_back_and_a_signal_drains_all(cluster, comfyui: Path):
    with fleet(comfyui, cluster[1], "--cards", "cpu:2") as driver:
        until(lambda: ready(comfyui) or driver.poll() is not None)
        assert ready(comfyui)
        first, second = states(comfyui)
        assert first.url != second.url
        actor = next(
            each for each in psutil.Process(first.pid).parents() if "ServerActor" in each.name()
        )
        actor.kill()
        until(lambda: not alive(first.pid))
        until(lambda: ready(comfyui) and states(comfyui)[0].boot != first.boot)
        assert states(comfyui)[1].boot == second.boot
        pids = [each.pid for each in states(comfyui)]
        driver.send_signal(signal.SIGTERM)
        _, said = driver.communicate(timeout=90)
    assert driver.returncode == 0, said
    assert [each.state for each in states(comfyui)] == ["stopped", "stopped"]
    assert not any(alive(pid) for pid in pids)


@pytest.mark.parametrize("who", ["raylet", "driver"])
def test_no_server_outlives_the_raylet_or_the_fleet(cluster, comfyui: Path, who: str):
    ray, address = cluster
    with fleet(comfyui, address, "--cards", "cpu:2") as driver:
        until(lambda: ready(comfyui) or driver.poll() is not None)
        assert ready(comfyui)
        pids = [each.pid for each in states(comfyui)]
        if who == "driver":
            driver.kill()
        else:
            raylets(ray)[0].kill()
        _, said = driver.communicate(timeout=120)
        until(lambda: not any(alive(pid) for pid in pids))
    if who == "raylet":
        assert driver.returncode == 3
        assert "the Ray cluster and its servers are lost" in said


def test_a_cluster_that_has_no_gpu_or_is_not_there_is_said(cluster, comfyui: Path):
    for address, words in (
        (cluster[1], "the cluster has 0 GPUs, and 1 servers need one each"),
        (f"127.0.0.1:{free_port()}", "no Ray cluster answers at"),
    ):
        with fleet(comfyui, address) as driver:
            _, said = driver.communicate(timeout=90)
        assert driver.returncode == 2, said
        assert words in said
    assert states(comfyui) == []


def test_servers_that_cannot_start_end_the_fleet_with_their_last_words(cluster, comfyui: Path):
    (comfyui / "faults.json").write_text('{"end": 1}')
    with fleet(comfyui, cluster[1], "--cards", "cpu:2") as driver:
        _, said = driver.communicate(timeout=90)
    assert driver.returncode == 1, said
    assert "failed: the server ended with exit code 1: no such file: a model" in said
