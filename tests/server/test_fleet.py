"""`qwen-l40s fleet` with real ComfyUI servers on the CPU, and a night's work on them."""

from __future__ import annotations

import collections
import functools
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import waiting
from comfyui_host import comfyui_folder, comfyui_python
from comfyui_server import Server
from PIL import Image

from qwen_l40s.bench.server import PACK
from qwen_l40s.errors import SettingError
from qwen_l40s.fleet.state import ServerState, read_states

ROOT = Path(__file__).resolve().parents[2]
MICRO = ROOT / "workflows" / "api" / "micro_text_to_image.json"
SERVERS = 4
JOBS = 200
until = functools.partial(waiting.until, seconds=240)


def states(folder: Path) -> list[ServerState]:
    try:
        return read_states(folder / "servers.json")
    except SettingError:
        return []


def ready(folder: Path) -> bool:
    return [each.state for each in states(folder)] == ["ready"] * SERVERS


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    base = tmp_path_factory.mktemp("fleet")
    (base / "custom_nodes").mkdir()
    (base / "custom_nodes" / PACK).symlink_to(ROOT, target_is_directory=True)
    comfyui = comfyui_folder()
    command = [sys.executable, ROOT, "fleet", "--comfyui", comfyui, "--warm-up", MICRO]
    command += ["--python", comfyui_python(comfyui), "--folder", base / "run"]
    command += ["--cards", f"cpu:{SERVERS}", "--port", random.randrange(10_000, 31_000)]
    command += ["--", "--base-directory", base]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (base / "log").open("w") as log:
        fleet = subprocess.Popen([*map(str, command)], stderr=log, env=environment)
    try:
        until(lambda: ready(base / "run") or fleet.poll() is not None)
        assert ready(base / "run"), (base / "log").read_text()
        yield base / "run"
        pids = [each.pid for each in states(base / "run")]
        fleet.send_signal(signal.SIGTERM)
        assert fleet.wait(120) == 0
        assert [each.state for each in states(base / "run")] == ["stopped"] * SERVERS
        for pid in pids:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)
    finally:
        fleet.kill()
        fleet.wait()


def submit(servers: Path, output: Path, *more: str) -> subprocess.Popen[str]:
    """Takes a fleet's folder, or a list of servers."""
    servers = servers / "servers.json" if servers.is_dir() else servers
    command = [sys.executable, ROOT, "submit", MICRO, "--servers", servers]
    command += ["--output", output, *more, "--json"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([*map(str, command)], text=True, encoding="utf-8", **pipes)


def pictures(output: Path) -> dict[str, bytes]:
    return {path.name: Image.open(path).tobytes() for path in output.glob("*.png")}


def check(process: subprocess.Popen[str], output: Path, count: int) -> None:
    out, err = process.communicate(timeout=500)
    assert process.returncode == 0, err
    jobs = json.loads(out)["jobs"]
    assert [job["status"] for job in jobs] == ["done"] * count
    files = [path for job in jobs for path in job["files"]]
    assert len(set(files)) == len(files) == count == len(list(output.glob("*.png")))
    lines = (output / "micro_text_to_image.submit.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    done = collections.Counter(entry["key"] for entry in events if entry["event"] == "done")
    assert set(done.values()) == {1}


def test_hundreds_of_jobs_on_four_servers_one_of_which_is_killed(folder: Path, tmp_path: Path):
    output, started = tmp_path / "out", time.monotonic()
    process = submit(folder, output, "--set", f"seed=1..{JOBS}", "--set", "Sample.steps=2")
    until(lambda: len(list(output.glob("*.png"))) >= JOBS // 5)
    victim, killed = states(folder)[0], time.monotonic()
    os.kill(victim.pid, signal.SIGKILL)
    until(lambda: states(folder)[0].boot != victim.boot and ready(folder))
    full = time.monotonic() - killed
    check(process, output, JOBS)
    took = time.monotonic() - started
    print(f"{JOBS} jobs in {took:.0f} s; all servers again {full:.1f} s after the kill")


@pytest.mark.soak
def test_pictures_of_many_settings_are_those_of_a_server_that_paints_alone(
    folder: Path, server: Server, tmp_path: Path
):
    """One of the fleet's is killed meanwhile, and started again."""
    lists = {"load.precision": "bf16 int8 fp8", "empty.width": "192 256 320", "Sample.cfg": "1 4"}
    more = ["--set", "seed=2001..2006", "--set", "Sample.steps=3"]
    for key, values in lists.items():
        (tmp_path / key).write_text("\n".join(values.split()))
        more += ["--set", f"{key}=@{tmp_path / key}"]
    output, alone = tmp_path / "out", tmp_path / "alone"
    process = submit(folder, output, *more)
    until(lambda: len(list(output.glob("*.png"))) >= 108 // 5)
    victim = states(folder)[0]
    os.kill(victim.pid, signal.SIGKILL)
    check(process, output, 108)
    until(lambda: states(folder)[0].boot != victim.boot and ready(folder))
    listed = tmp_path / "servers.txt"
    listed.write_text(f"http://127.0.0.1:{server.port}")
    check(submit(listed, alone, *more), alone, 108)
    assert pictures(output) == pictures(alone)
    assert len(set(pictures(alone).values())) == 108


@pytest.mark.parametrize("fault", ["client killed", "server stopped"])
def test_a_fault_in_the_middle_loses_nothing(folder: Path, tmp_path: Path, fault: str):
    output = tmp_path / "out"
    more = ("--set", "seed=1001..1080", "--set", "Sample.steps=2", "--wait", "5")
    process = submit(folder, output, *more)
    until(lambda: len(list(output.glob("*.png"))) >= 20)
    if fault == "client killed":
        process.kill()
        process.communicate()
        process = submit(folder, output, *more, "--resume")
    else:
        victim = states(folder)[0].pid
        os.kill(victim, signal.SIGSTOP)
        time.sleep(10)  # the others go on, and its jobs wait for it
        os.kill(victim, signal.SIGCONT)
    check(process, output, 80)
