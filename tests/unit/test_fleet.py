"""Servers of a fleet: started, warmed up, watched, started again and drained; and their file."""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import waiting

from qwen_l40s.bench.server import free_port
from qwen_l40s.cli.fleet import table
from qwen_l40s.errors import SettingError, UnavailableError
from qwen_l40s.fleet import ray, supervisor
from qwen_l40s.fleet import server as module
from qwen_l40s.fleet.server import FleetServer, ServerPlan
from qwen_l40s.fleet.state import (
    ServerState,
    ServerStatus,
    StateFile,
    ask_all,
    rate,
    read_states,
)

ROOT = Path(__file__).resolve().parents[2]
until = functools.partial(waiting.until, seconds=20)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    for name, seconds in (("START_PROBE", 0.05), ("PROBE", 0.1), ("SILENT", 0.5), ("TICK", 0.02)):
        monkeypatch.setattr(module, f"{name}_SECONDS", seconds)
    monkeypatch.setattr(module, "FIRST_PAUSE", 0.05)
    monkeypatch.setattr(module, "END_SECONDS", 1.0)
    monkeypatch.setattr(module, "SETTLED_SECONDS", 0.2)


@pytest.fixture
def plan(tmp_path: Path) -> ServerPlan:
    comfyui = tmp_path / "a ComfyUI"
    comfyui.mkdir()
    shutil.copy(ROOT / "tests/fake_comfyui_main.py", comfyui / "main.py")
    (comfyui / "faults.json").write_text("{}")
    return ServerPlan(comfyui, Path(sys.executable), tmp_path / "fleet", ("--more", "x"))


def fault(plan: ServerPlan, **faults: Any) -> None:
    new = plan.comfyui / "new"
    new.write_text(json.dumps(faults))
    new.replace(plan.comfyui / "faults.json")


class Seen:
    def __init__(self, plan: ServerPlan, card: str = "cpu") -> None:
        self.states: list[str] = []
        self.server = FleetServer(plan, free_port(), card, changed=self._changed)
        self.state = self.server.state

    def _changed(self) -> None:
        self.states.append(self.state.state)

    def __enter__(self) -> Seen:
        self.server.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.server.stopping.set()
        self.server.hurry.set()
        assert self.server.join(30)


def test_a_server_starts_with_a_place_of_its_own_and_stops(plan: ServerPlan):
    with Seen(plan, "3") as seen:
        until(lambda: seen.state.state == "ready")
        own = plan.folder / seen.state.url.rpartition(":")[2]
        (line,) = (own / "server.log").read_text().splitlines()
        assert (own / "server.log").stat().st_mode & 0o777 == 0o600
        assert line.endswith(
            f"--output-directory {own / 'output'} --temp-directory {own / 'temp'} "
            "--database-url sqlite:///:memory: --cuda-device 3 --more x"
        )
        pid = seen.state.pid
        assert os.getsid(pid) == os.getsid(0)  # an orphan in a session of its own would live on
        assert os.getpgid(pid) != os.getpgid(0)  # Ctrl-C is for the fleet
    assert seen.states == ["starting", "ready", "draining", "stopped"]
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize("how", ["killed", "silent"])
def test_a_server_that_ends_or_hangs_starts_again_as_another_boot(plan: ServerPlan, how: str):
    with Seen(plan) as seen:
        until(lambda: seen.state.state == "ready")
        boot = seen.state.boot
        os.kill(seen.state.pid, signal.SIGKILL if how == "killed" else signal.SIGSTOP)
        until(lambda: seen.state.starts > 1 and seen.state.state == "ready")
        assert seen.state.boot != boot
        assert seen.state.error == ""
    assert seen.states[:3] == ["starting", "ready", "restarting"]


@pytest.mark.parametrize("how", ["apart", "with its server killed"])
def test_what_nodes_started_ends_with_the_fleet(plan: ServerPlan, how: str):
    fault(plan, child=how)
    with Seen(plan) as seen:
        until(lambda: seen.state.state == "ready")
        child = int(Path(seen.state.log).read_text().split("child ")[1].split()[0])
        if how != "apart":
            os.kill(seen.state.pid, signal.SIGKILL)
    until(lambda: not alive(child))


def test_what_a_killed_fleet_left_ends_with_the_next(plan: ServerPlan):
    left = {**os.environ, module.MARK: str(plan.folder / "8190")}
    others = [f"{plan.folder} 2/8190", str(plan.folder / "fleet/8190")]
    marks = [left, *({**os.environ, module.MARK: other} for other in others)]
    sleeps = [subprocess.Popen(["sleep", "600"], env=each) for each in marks]
    try:
        module.end_left(plan.folder)
        assert sleeps[0].wait(10) == -signal.SIGKILL
        assert [each.poll() for each in sleeps[1:]] == [None, None]
    finally:
        for each in sleeps:
            each.kill()
            each.wait()


def test_the_files_of_a_fleet_are_its_users_alone_and_its_status_is_true_after_a_kill(
    tmp_path: Path,
):
    file = StateFile(tmp_path, lambda line: None)
    file.write([ServerState("http://a", "0", "ready"), ServerState("http://b", "1", "failed")])
    assert file.path.stat().st_mode & 0o777 == 0o600
    assert [each.state for each in read_states(file.path)] == ["ready", "failed"]
    file.close()  # as its process does, however it ends
    assert [each.state for each in read_states(file.path)] == ["stopped", "failed"]


def test_servers_of_a_cluster_of_several_machines_listen_openly_only_if_told(
    plan: ServerPlan, monkeypatch
):
    nodes = [{"Alive": True, "NodeManagerAddress": address} for address in ("10.0.0.1", "10.0.0.2")]
    cluster = SimpleNamespace(cluster_resources=lambda: {"GPU": 2}, nodes=lambda: nodes)
    monkeypatch.setattr(ray, "_connect", lambda address: cluster)
    with pytest.raises(SettingError, match="--open"):
        ray.run_ray_fleet(plan, "auto", None, 8188, print)


def test_who_else_has_the_port_is_not_taken_for_the_server(plan: ServerPlan):
    with Seen(plan) as seen:
        until(lambda: seen.state.state == "ready")
        with socket.socket() as taken:
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            os.kill(seen.state.pid, signal.SIGKILL)
            until(lambda: binds(taken, int(seen.state.url.rpartition(":")[2])))
            taken.listen()
            until(lambda: "is in use" in seen.state.error)
            starts = seen.state.starts
        until(lambda: seen.state.state == "ready")
    assert seen.state.starts > starts


def binds(taker: socket.socket, number: int) -> bool:
    try:
        taker.bind(("127.0.0.1", number))
    except OSError:
        return False
    return True


def test_what_a_server_has_started_ends_with_it_and_its_log_is_kept(plan: ServerPlan):
    fault(plan, child=1)
    with Seen(plan) as seen:
        until(lambda: seen.state.state == "ready")
        log = Path(seen.state.log)
        until(lambda: "child" in log.read_text())
        child = int(log.read_text().split()[-1])
        assert alive(child)
        os.kill(seen.state.pid, signal.SIGKILL)
        until(lambda: not alive(child))
        kept = log.with_name("server.log.1")
        until(lambda: seen.state.starts == 2 and kept.exists())
        assert f"child {child}" in kept.read_text()


def test_a_server_that_never_starts_is_given_up_with_its_last_words(plan: ServerPlan):
    fault(plan, end=1)
    with Seen(plan) as seen:
        until(lambda: seen.state.state == "failed")
    assert seen.state.starts == module.MOST_STARTS
    assert "the server ended with exit code 1: no such file: a model (" in seen.state.error


def test_a_warm_up_comes_before_the_jobs_and_its_failure_ends_the_server(
    plan: ServerPlan, tmp_path: Path, monkeypatch
):
    graph = {"1": {"class_type": "KSampler", "inputs": {"steps": 20, "seed": 3}}}
    (tmp_path / "warm.json").write_text(json.dumps(graph))
    warm = ServerPlan(**{**vars(plan), "warm_up": tmp_path / "warm.json", "settings": ("seed=4",)})
    command = warm.warm_up_command("http://a", "out")
    assert command[2:] == [
        *("submit", str(tmp_path / "warm.json"), "--server", "http://a", "--output", "out"),
        *("--set", "1.steps=1", "--set", "seed=4"),
    ]
    for code, state in ((0, "ready"), (2, "failed")):
        says = f"import sys; sys.stderr.write('qwen-l40s: error: no node'); sys.exit({code})"
        script = [sys.executable, "-c", says]
        monkeypatch.setattr(ServerPlan, "warm_up_command", lambda *_, script=script: script)
        with Seen(warm) as seen:
            until(lambda seen=seen, state=state: seen.state.state == state)
        assert seen.states[:3] == ["starting", "warming", state]
        assert seen.state.error == ("the warm-up failed: no node" if code else "")


def test_a_server_drains_until_its_queue_is_empty_or_someone_is_in_a_hurry(plan: ServerPlan):
    for hurry in (False, True):
        fault(plan, left=1)
        with Seen(plan) as seen:
            until(lambda seen=seen: seen.state.state == "ready")
            seen.server.stopping.set()
            until(lambda seen=seen: seen.state.state == "draining")
            assert not seen.server.join(0.3)
            seen.server.hurry.set() if hurry else fault(plan, left=0)
            assert seen.server.join(30)
        assert seen.state.state == "stopped"


def fleet(plan: ServerPlan, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(ROOT), "fleet", "--comfyui", str(plan.comfyui)]
    command += ["--python", sys.executable, "--folder", str(plan.folder), *more]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def listed(plan: ServerPlan) -> list[ServerState]:
    try:
        return read_states(plan.folder / "servers.json")
    except SettingError:
        return []


def ready(plan: ServerPlan, count: int) -> bool:
    return sum(each.state == "ready" for each in listed(plan)) == count


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's kill is Linux's")
def test_the_command_runs_two_servers_and_its_death_leaves_no_orphan(plan: ServerPlan):
    with fleet(plan, "--cards", "cpu:2", "--port", str(free_port())) as process:
        until(lambda: ready(plan, 2))
        pids = [each.pid for each in listed(plan)]
        second = fleet(plan, "--cards", "cpu:1", "--port", str(free_port()))
        assert "another fleet runs in this folder" in second.communicate(timeout=60)[1]
        assert second.returncode == 2
        process.kill()
        until(lambda: not any(alive(pid) for pid in pids))


def test_the_first_signal_drains_and_servers_json_says_so(plan: ServerPlan):
    fault(plan, left=1)
    with fleet(plan, "--cards", "cpu:2", "--port", str(free_port())) as process:
        until(lambda: ready(plan, 2))
        process.send_signal(signal.SIGTERM)
        until(lambda: [each.state for each in listed(plan)] == ["draining"] * 2)
        time.sleep(0.2)
        assert process.poll() is None
        fault(plan, left=0)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "draining: a second signal ends the jobs" in said
    assert [each.state for each in listed(plan)] == ["stopped"] * 2


def test_a_fleet_without_a_server_that_starts_is_exit_code_1(plan: ServerPlan):
    fault(plan, end=1)
    with fleet(plan, "--cards", "cpu:2", "--port", str(free_port())) as process:
        _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "failed: the server ended with exit code 1: no such file: a model" in said


@pytest.mark.parametrize(
    ("cards", "found", "expected"),
    [
        ("all", 3, ["0", "1", "2"]),
        ("0, 2", 3, ["0", "2"]),
        ("1", 0, ["1"]),  # no nvidia-smi: ComfyUI will say
        ("cpu", 0, ["cpu"]),
        ("cpu:2", 0, ["cpu", "cpu"]),
        ("all", 0, UnavailableError),
        ("3", 3, UnavailableError),
        ("0,0", 3, SettingError),
        ("cpu:0", 3, SettingError),
        ("cpu:x", 3, SettingError),
        ("first", 3, SettingError),
        ("", 3, SettingError),
    ],
)
def test_which_cards_are_meant(monkeypatch, cards: str, found: int, expected: Any):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(supervisor, "count_cards", lambda: found)
    if isinstance(expected, list):
        assert supervisor.find_cards(cards) == expected
    else:
        with pytest.raises(expected, match=r"^(--cards|nvidia-smi lists|there is no GPU 3)"):
            supervisor.find_cards(cards)


def test_a_scheduler_gives_a_fleet_its_cards(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,GPU-7a")
    assert supervisor.find_cards("all") == ["2", "GPU-7a"]
    assert supervisor.find_cards("GPU-7a") == ["GPU-7a"]
    with pytest.raises(UnavailableError, match="no GPU 0: CUDA_VISIBLE_DEVICES lists 2, GPU-7a"):
        supervisor.find_cards("0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(UnavailableError, match="CUDA_VISIBLE_DEVICES lists no GPU"):
        supervisor.find_cards("all")


@pytest.mark.parametrize(
    ("arguments", "address"),
    [
        ((), "127.0.0.1"),
        (("--listen",), "127.0.0.1"),
        (("--listen", "--disable-api-nodes"), "127.0.0.1"),
        (("--listen", "0.0.0.0"), "127.0.0.1"),
        (("--fast", "--listen", "10.0.0.5,::1"), "10.0.0.5"),
        (("--listen=10.0.0.5",), "10.0.0.5"),
    ],
)
def test_where_a_server_answers_this_machine(arguments: tuple[str, ...], address: str):
    assert supervisor.listen_address(arguments) == address


def test_what_is_not_there_is_said_before_anything_starts(plan: ServerPlan, tmp_path: Path):
    (tmp_path / "page.json").write_text('{"nodes": []}')
    for change, words in (
        ({"comfyui": tmp_path}, "--comfyui is not a ComfyUI folder"),
        ({"python": tmp_path / "python"}, "name it with --python"),
        ({"arguments": ("--port=1",)}, "--port=1 cannot follow `--`"),
        ({"warm_up": tmp_path / "none.json"}, "--warm-up is not a workflow in API form"),
        ({"warm_up": tmp_path / "page.json"}, "--warm-up is not a workflow in API form"),
    ):
        with pytest.raises(SettingError, match=words):
            supervisor.check_plan(ServerPlan(**{**vars(plan), **change}))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        number = taken.getsockname()[1]
        with pytest.raises(SettingError, match=f"port {number} cannot be used"):
            supervisor.check_ports([number])
    with pytest.raises(SettingError, match="port 65536 cannot be used"):
        supervisor.check_ports([65536])
    assert not plan.folder.exists()


def test_a_folder_of_files_that_are_no_fleet(tmp_path: Path):
    with pytest.raises(SettingError, match="there is no fleet in this folder"):
        read_states(tmp_path / "servers.json")
    (tmp_path / "servers.json").write_text('{"servers": [{"address": "x"}]}')
    with pytest.raises(SettingError, match=r"servers\.json"):
        read_states(tmp_path / "servers.json")
    with pytest.raises(SettingError, match="--folder cannot be used"):
        StateFile(tmp_path / "servers.json", print)


def entry(began: float, *, images: int = 1, status: str = "success") -> dict[str, Any]:
    outputs = {"9": {"images": [{"type": "output"}] * images + [{"type": "temp"}]}}
    messages = [["execution_start", {"timestamp": 1000 * began}]]
    return {"status": {"status_str": status, "messages": messages}, "outputs": outputs}


def test_images_an_hour_are_of_the_last_hour():
    now = 10_000.0
    assert rate({}, now) == (0.0, 0)
    assert rate({"a": entry(now - 1800), "b": entry(now - 900, images=3)}, now) == (8.0, 0)
    old = {"old": entry(now - 3601), "new": entry(now - 3600, images=2)}
    assert rate(old, now) == (2.0, 0)
    failed = {"a": entry(now - 60, images=0, status="error"), "b": entry(now - 30)}
    assert rate(failed, now) == (60.0, 1)


def test_the_table_has_a_row_a_server_and_says_what_is_wrong():
    good = ServerStatus(ServerState("http://a", "0", "ready"), "12345678-9", 1, 120.4, 0)
    bad = ServerStatus(ServerState("http://b", "1", "failed", error="it ended."))
    assert table([good, bad]).splitlines() == [
        "server    card  state   job       waiting  images/h  failures",
        "http://a  0     ready   12345678  1        120       0",
        "http://b  1     failed  -         0        0         0",
        "http://b: it ended.",
        "1 of 2 servers ready, 120 images an hour",
    ]
    (row,) = ask_all([ServerState(f"http://127.0.0.1:{free_port()}", "0", "restarting")])
    assert (row.job, row.images_per_hour) == ("", 0.0)
    assert row.as_dict()["state"] == "restarting"
