"""Several servers: nothing lost and nothing twice, whichever of them stops, hangs or refuses."""

from __future__ import annotations

import functools
import io
import json
import subprocess
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import waiting
from fake_comfyui import FakeComfyUI, fake_comfyui, graph, hurry, submitted

from qwen_l40s.client import Fleet, JobError, feeder, transport
from qwen_l40s.client.journal import DiskError
from qwen_l40s.client.scheduler import Job
from qwen_l40s.client.server import Server
from qwen_l40s.client.submit import SubmitOutcome
from qwen_l40s.errors import SettingError

until = functools.partial(waiting.until, seconds=30)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    hurry(monkeypatch)
    monkeypatch.setattr(transport, "READ_SECONDS", 0.2)


def start(
    folder: Path, *servers: FakeComfyUI | str, jobs: int = 20, **more: Any
) -> tuple[SubmitOutcome, str]:
    names = [each if isinstance(each, str) else each.url for each in servers]
    return submitted(folder, names, [f"seed=1..{jobs}"], **more)[:2]


def check(folder: Path, jobs: list[Job]) -> Counter[str]:
    """Checks that each job is done once, with an image of its own; returns all events."""
    assert [job.status for job in jobs] == ["done"] * len(jobs)
    assert sorted((folder / "out").iterdir()) == sorted(
        [*(folder / "out" / f"{job.key}_1.png" for job in jobs), folder / "out/work.submit.jsonl"]
    )
    lines = (folder / "out/work.submit.jsonl").read_text().splitlines()
    entries = [json.loads(line) for line in lines]
    done = Counter(entry["key"] for entry in entries if entry["event"] == "done")
    assert done == Counter(job.key for job in jobs)
    return Counter(entry["event"] for entry in entries)


def test_two_servers_share_the_jobs(tmp_path: Path):
    with fake_comfyui(job_seconds=0.02) as one, fake_comfyui(job_seconds=0.02) as two:
        outcome, _ = start(tmp_path, one, two, jobs=40)
        shares = [len(one.posted), len(two.posted)]
    assert sum(shares) == 40 and min(shares) >= 15
    assert check(tmp_path, outcome.jobs) == {"run": 1, "queued": 40, "done": 40}
    assert {job.server for job in outcome.jobs} == {one.url, two.url}


def test_a_server_that_dies_for_good_gives_its_jobs_to_the_others(tmp_path: Path):
    with fake_comfyui(paused=True) as one, fake_comfyui() as two:

        def die() -> None:
            until(lambda: len(one.state.queue) == 2)
            one.call(one.stop())

        outcome, log = start(tmp_path, one, two, meanwhile=die)
        one.state.queue.clear()
        one.call(one.start())
    check(tmp_path, outcome.jobs)
    assert (
        f"{one.url} is gone (connection refused). Its jobs go to other servers or wait: 2." in log
    )


@pytest.mark.parametrize("finishes", [False, True])
def test_the_first_result_wins_when_a_server_comes_back_with_an_old_one(
    tmp_path: Path, finishes: bool
):
    with fake_comfyui(paused=True) as one, fake_comfyui(job_seconds=0.05) as two:

        def freeze() -> None:
            until(lambda: len(one.state.queue) == 2)
            one.faults.frozen = True
            # Its first job goes to the other server, and first of all that wait.
            seed = one.state.queue[0][2]["draw"]["inputs"]["seed"]
            until(lambda: seed in {body["prompt"]["draw"]["inputs"]["seed"] for body in two.posted})
            two.faults.paused = True
            one.faults.paused = not finishes
            one.faults.frozen = False
            if finishes:  # both of its jobs
                until(lambda: len(one.state.history) >= 2)
            else:
                until(lambda: one.requests.count("GET /queue") >= 3)
                one.faults.paused = False
            two.faults.paused = False

        outcome, _ = start(tmp_path, one, two, meanwhile=freeze, wait=0.3)
    events = check(tmp_path, outcome.jobs)
    assert events["queued"] <= 22


def test_a_result_that_another_server_brought_meanwhile_is_noted_as_late(tmp_path: Path):
    with fake_comfyui(paused=True) as one, fake_comfyui(view="500") as two:

        def finish() -> None:
            until(lambda: len(one.state.queue) == 1)
            one.faults.busy = 10**6
            until(lambda: len(two.posted) == 2 and two.requests.count("GET /view") >= 2)
            one.faults.paused = False
            until(lambda: one.state.history)
            one.faults.busy = 0
            journal = tmp_path / "out/work.submit.jsonl"
            try:
                waiting.until(lambda: '"late"' in journal.read_text(), seconds=6)
            finally:
                two.faults.view = ""

        outcome, _ = start(tmp_path, one, two, jobs=2, meanwhile=finish, wait=0.3)
    assert check(tmp_path, outcome.jobs)["late"] == 1


def test_a_silent_server_with_the_last_jobs_holds_nobody_up(tmp_path: Path):
    with fake_comfyui(paused=True) as one, fake_comfyui() as two:

        def freeze() -> None:
            until(lambda: len(one.state.queue) == 1)
            one.faults.frozen = True

        outcome, log = start(tmp_path, one, two, jobs=2, meanwhile=freeze, wait=0.3)
        one.faults.frozen = False
        one.state.queue.clear()
    check(tmp_path, outcome.jobs)
    assert f"{one.url} gave no answer for 0.2 s" in log


def test_a_server_without_a_node_gets_nothing_and_says_why(tmp_path: Path):
    with fake_comfyui(lacks="Draw") as one, fake_comfyui() as two:
        outcome, log = start(tmp_path, one, two, jobs=4)
        assert one.posted == []
    check(tmp_path, outcome.jobs)
    assert f"{one.url} can run none of these jobs: 'Prompt' (Draw, id draw) is missing" in log


@pytest.mark.parametrize("fault", ["refuse", "small", "old"])
def test_what_one_server_refuses_or_cannot_run_runs_on_another(tmp_path: Path, fault: str):
    with fake_comfyui(**{fault: True}) as one, fake_comfyui(job_seconds=0.05) as two:
        outcome, log = start(tmp_path, one, two, jobs=12)
        tried = len(one.posted) + one.requests.count("POST /prompt") * (fault == "refuse")
    check(tmp_path, outcome.jobs)
    assert {job.server for job in outcome.jobs} == {two.url}
    words = "has too little memory for job" if fault == "small" else "refuses job"
    assert f"{one.url} {words}" in log
    assert ("(Draw, id draw): this ComfyUI is older: update ComfyUI." in log) == (fault == "old")
    assert 1 <= tried <= 12


@pytest.mark.parametrize("fault", ["refuse", "small", "old"])
def test_what_every_server_refuses_fails(tmp_path: Path, fault: str):
    faults = {fault: True}
    with fake_comfyui(**faults) as one, fake_comfyui(**faults) as two:
        outcome, log = start(tmp_path, one, two, jobs=3)
    assert "job 1 (seed=1) failed: 'Prompt' (Draw, id draw)" in log
    assert [job.status for job in outcome.jobs] == ["failed"] * 3
    assert outcome.exit_code == 1


def test_different_comfyuis_an_address_twice_and_one_that_is_away_are_said(tmp_path: Path):
    with fake_comfyui() as one, fake_comfyui(version="0.40.0") as two:
        same = one.url.replace("127.0.0.1", "localhost")
        outcome, log = start(tmp_path, one, two, same, "127.0.0.1:1", jobs=4)
    check(tmp_path, outcome.jobs)
    assert "is named twice and used once" in log
    assert "the servers run different versions of ComfyUI" in log
    assert f"0.40.0: {two.url}" in log
    assert "no server listens at http://127.0.0.1:1" in log


def listed(file: Path, **states: tuple[FakeComfyUI, str]) -> None:
    servers = [
        {"url": server.url, "boot": boot, "state": state, "log": f"/logs/{boot}"}
        for boot, (server, state) in states.items()
    ]
    (file.parent / "new").write_text(json.dumps({"version": 1, "servers": servers}))
    (file.parent / "new").replace(file)


def test_servers_come_and_go_with_their_file(tmp_path: Path):
    file = tmp_path / "servers.json"
    with fake_comfyui(paused=True) as one, fake_comfyui(job_seconds=0.01) as two:
        listed(file, a=(one, "ready"), b=(two, "starting"))

        def change() -> None:
            until(lambda: len(one.state.queue) == 2)
            listed(file, a=(one, "draining"), b=(two, "ready"))
            until(lambda: len(two.state.history) >= 5)
            one.faults.paused = False  # what it has goes on

        outcome, log = start(tmp_path, jobs=30, server_file=file, meanwhile=change)
        assert (len(one.posted), len(two.posted)) == (2, 28)
    assert check(tmp_path, outcome.jobs)["queued"] == 30
    assert f"{two.url} gets jobs from now on" in log
    assert f"{one.url} gets no more jobs" in log
    entry = json.loads((tmp_path / "out/work.submit.jsonl").read_text().splitlines()[1])
    assert (entry["server"], entry["boot"]) == (one.url, "a")


def test_a_server_that_the_file_takes_back_gets_jobs_again(tmp_path: Path):
    file, log = tmp_path / "servers.json", io.StringIO()
    with fake_comfyui(paused=True) as one:
        listed(file, a=(one, "ready"))

        def change() -> None:
            until(lambda: len(one.state.queue) == 2)
            listed(file, a=(one, "draining"))
            until(lambda: f"{one.url} gets no more jobs" in log.getvalue())
            listed(file, a=(one, "ready"))
            until(lambda: f"{one.url} gets jobs from now on" in log.getvalue())
            one.faults.paused = False

        outcome, _ = start(tmp_path, jobs=6, server_file=file, meanwhile=change, log=log)
    assert check(tmp_path, outcome.jobs)["queued"] == 6


def test_a_result_that_a_lost_server_still_owes_is_made_by_another(
    tmp_path: Path,
):
    file = tmp_path / "servers.json"
    with fake_comfyui(view="hang") as one, fake_comfyui() as two:
        listed(file, a=(one, "ready"))

        def change() -> None:
            until(lambda: "GET /view" in one.requests)
            one.faults.busy = 10**6
            listed(file, a=(one, "draining"), b=(two, "ready"))

        options = {"server_file": file, "meanwhile": change, "wait": 0.3}
        outcome, _ = start(tmp_path, jobs=1, **options)
    check(tmp_path, outcome.jobs)


def test_a_new_boot_in_the_file_tells_of_a_restart_that_nobody_saw(tmp_path: Path):
    file, log = tmp_path / "servers.json", io.StringIO()
    with fake_comfyui(paused=True) as one, fake_comfyui() as two:
        listed(file, a=(one, "ready"))

        def restart() -> None:
            until(lambda: len(one.state.queue) == 2)
            listed(file, b=(one, "ready"), c=(two, "ready"))
            until(lambda: f"{two.url} gets jobs from now on" in log.getvalue())  # so that is read
            one.state.queue.clear()
            one.faults.paused = False

        outcome, _ = start(tmp_path, jobs=4, server_file=file, meanwhile=restart, log=log)
    assert check(tmp_path, outcome.jobs)["queued"] == 6
    assert "was restarted and has forgotten its jobs" in log.getvalue()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "--servers cannot be read"),
        ('{"version": 2, "servers": []}', "a newer version"),
        ('{"version": 1}', "is not a list of servers"),
        ('{"version": ' + "[" * 100_000, "is not a list of servers"),
        (" " * (2**24 + 1), "larger than 16 MiB"),
        (
            '{"version": 1, "servers": [{"url": "ftp://x", "boot": "", "state": "ready"}]}',
            "address",
        ),
        ("ftp://x", "is not an address"),
        ("\n", "--servers is empty"),
    ],
)
def test_a_file_that_lists_no_servers(tmp_path: Path, text: str | None, words: str):
    file = tmp_path / "servers"
    if text is not None:
        file.write_text(text)
    with pytest.raises(SettingError, match=words):
        start(tmp_path, server_file=file)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("change", ["ftp://x", "http://me:secret@x", ""])
def test_a_text_file_lists_servers_and_a_broken_change_of_it_changes_nothing(
    tmp_path: Path, change: str
):
    file = tmp_path / "servers.txt"
    with fake_comfyui(job_seconds=0.01) as one:
        file.write_text(f"# ours\n\n{one.url}  # here\n")

        def spoil() -> None:
            until(lambda: one.state.history)
            file.write_text(f"{change}\n")

        options = {"server_file": file, "meanwhile": spoil, "headers": {"Authorization": "b"}}
        outcome, log = start(tmp_path, **options)
    check(tmp_path, outcome.jobs)
    assert "The list of servers stays unchanged." in log


def test_a_further_run_asks_every_server_before_it_queues_anything(tmp_path: Path):
    with fake_comfyui(paused=True) as one, fake_comfyui(paused=True) as two:

        def vanish() -> None:
            until(lambda: len(one.state.queue) == len(two.state.queue) == 2)
            one.call(one.stop())
            two.call(two.stop())

        outcome, _ = start(tmp_path, one, two, jobs=6, meanwhile=vanish, wait=0.2)
        assert outcome.exit_code == 3
        for server in (one, two):
            server.faults.paused = False
            server.call(server.start())  # it kept its queue
        two.faults.busy = 10  # and one takes its time
        outcome, _ = start(tmp_path, one, two, jobs=6, resume=True)
    assert check(tmp_path, outcome.jobs)["queued"] == 6


def test_a_token_stands_in_no_line_file_or_error(tmp_path: Path):
    with fake_comfyui() as one, fake_comfyui(refuse=True) as two:
        named = [each.url.replace("//", "//me:secret@") for each in (one, two)]
        outcome, log = start(
            tmp_path, *named, "http://me:secret@127.0.0.1:1", headers={"X-Token": "hidden"}, jobs=4
        )
        assert all(each["X-Token"] == "hidden" for each in one.headers + two.headers)
    check(tmp_path, outcome.jobs)
    everything = (
        log + json.dumps(outcome.as_dict()) + (tmp_path / "out/work.submit.jsonl").read_text()
    )
    assert "secret" not in everything and "hidden" not in everything


def test_an_error_of_ours_ends_the_run_instead_of_being_waited_for(tmp_path: Path, monkeypatch):
    def broken(*_: Any) -> None:
        raise KeyError("ours")

    monkeypatch.setattr(feeder, "place", broken)
    with fake_comfyui() as one, pytest.raises(KeyError, match="ours"):
        start(tmp_path, one, jobs=3)


def test_graphs_become_futures_and_equal_ones_the_same(tmp_path: Path):
    log = io.StringIO()
    with (
        fake_comfyui() as one,
        fake_comfyui() as two,
        Fleet([one.url, two.url], tmp_path, log=log) as fleet,
    ):
        futures = [fleet.submit(graph(seed=seed)) for seed in range(10)]
        assert fleet.submit(graph(seed=3)) is futures[3]
        changing = graph(seed=100)
        for seed in (101, 102):
            changing["draw"]["inputs"]["seed"] = seed
            futures.append(fleet.submit(changing))
        bad = fleet.submit(graph("fail"))
        results = [future.result(30) for future in futures]
        with pytest.raises(JobError, match="the pencil broke") as error:
            bad.result(30)
        again = fleet.submit(graph("fail"))
        with pytest.raises(JobError, match="the pencil broke"):
            again.result(30)
        assert again is not bad
        seeds = {each["prompt"]["draw"]["inputs"]["seed"] for each in one.posted + two.posted}
    assert seeds >= {101, 102}
    assert len({path for result in results for path in result.files}) == 12
    assert {result.server for result in results} <= {one.url, two.url}
    assert (error.value.status, error.value.nodes[0]["id"]) == ("failed", "draw")
    with pytest.raises(RuntimeError, match="closed"):
        fleet.submit(graph(seed=11))
    with fake_comfyui() as three, Fleet(three.url, tmp_path, log=None) as fleet:
        assert fleet.submit(graph(seed=3)).result(30).files == results[3].files
        assert three.posted == []


class Meeting(dict):
    """A graph whose nodes are first read when two threads do so."""

    both, met = threading.Barrier(2), False

    def items(self) -> Any:
        if not self.met:
            self.met = True
            self.both.wait(30)
        return super().items()


def test_two_threads_that_submit_equal_graphs_get_one_job_and_the_fleet_goes_on(tmp_path: Path):
    with fake_comfyui() as one, Fleet(one.url, tmp_path, log=None) as fleet:
        with ThreadPoolExecutor(2) as threads:
            futures = list(threads.map(fleet.submit, [Meeting(graph()), Meeting(graph())]))
        first, second = (future.result(30) for future in futures)
        assert first.files == second.files
        assert fleet.submit(graph(seed=1)).result(30).files != first.files
        assert len(one.posted) == 2


def test_a_fleet_runs_a_graph_again_once_its_lora_was_replaced(tmp_path: Path):
    loader = {"input": {"required": {"lora_name": ["STRING", {}]}}, "output": ["MODEL"]}
    lora = tmp_path / "loras" / "style.safetensors"
    lora.parent.mkdir()
    load = {"class_type": "LoraLoaderModelOnly", "inputs": {"lora_name": lora.name}}
    faults = {"folders": (lora.parent,), "knows": {"LoraLoaderModelOnly": loader}}
    with fake_comfyui(**faults) as one, Fleet(one.url, tmp_path / "out", log=None) as fleet:

        def files(seed: int) -> list[Path]:
            return fleet.submit({**graph(seed=seed), "lora": load}).result(30).files

        files(0)  # while there is no such file
        lora.write_bytes(b"first")
        first = files(1)
        assert files(1) == first
        lora.write_bytes(b"replaced")
        second = files(1)
        assert files(1) == second != first
        assert len(one.posted) == 3


def test_a_fleet_that_a_full_disk_has_ended_says_so_to_the_next_graph(tmp_path: Path, monkeypatch):
    async def full(self: Server, image: Any, target: Path, most: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Server, "download", full)
    with fake_comfyui() as one, Fleet(one.url, tmp_path, log=None) as fleet:
        with pytest.raises(DiskError, match="No space left"):
            fleet.submit(graph()).result(30)
        with pytest.raises(RuntimeError, match=r"the fleet has ended: .*No space left"):
            fleet.submit(graph(seed=1))


def test_a_fleet_left_by_an_exception_takes_its_jobs_off_the_servers(tmp_path: Path):
    with fake_comfyui(paused=True) as one:
        with pytest.raises(KeyError), Fleet(one.url, tmp_path, log=None) as fleet:
            future = fleet.submit(graph())
            until(lambda: one.state.queue)
            raise KeyError
        assert one.state.queue == []
    with pytest.raises(JobError, match="the fleet was closed"):
        future.result(0)


def test_a_fleet_takes_its_jobs_off_the_servers_where_ctrl_c_ends_the_wait_for_them(
    tmp_path: Path, monkeypatch
):
    with fake_comfyui(paused=True) as one:
        with pytest.raises(KeyboardInterrupt), Fleet(one.url, tmp_path, log=None) as fleet:
            fleet.submit(graph())
            until(lambda: one.state.queue)
            joined, interrupts = fleet._thread.join, iter([KeyboardInterrupt])

            def join() -> None:
                for interrupt in interrupts:
                    raise interrupt
                joined()

            monkeypatch.setattr(fleet._thread, "join", join)
        assert one.state.queue == []


def test_a_fleet_whose_servers_stay_away_says_so_in_each_future(tmp_path: Path):
    with Fleet("127.0.0.1:1", tmp_path, wait=0.2, log=None) as fleet:
        future = fleet.submit(graph())
        with pytest.raises(transport.ServerError, match="connection refused"):
            future.result(30)


@pytest.mark.parametrize(
    ("data", "taken"),
    [
        (graph(), True),
        ({1: graph()["draw"], 2: graph()["save"] | {"inputs": {"images": [1, 0]}}}, True),
        ({"prompt": graph(), "client_id": "me"}, True),
        ({"input": {"workflow": graph()}}, True),
        ({"nodes": [], "links": []}, False),
        ({"save": {"class_type": "SaveImage"}}, False),
        ({"save": {"inputs": {}}}, False),
        ({}, False),
        ([], False),
    ],
    ids=str,
)
def test_a_fleet_takes_and_refuses_the_objects_that_are_taken_and_refused_as_files(
    tmp_path: Path, data: Any, taken: bool
):
    file = tmp_path / "graph.json"
    file.write_text(json.dumps(data))
    with fake_comfyui(paused=True) as one, Fleet(one.url, tmp_path, log=None) as fleet:
        if taken:
            future = fleet.submit(data)
            assert fleet.submit(file) is future
            fleet.close(wait=False)
        else:
            for each in (data, file):
                with pytest.raises(SettingError):
                    fleet.submit(each)


FLEET = (
    "import os, sys; from qwen_l40s.client import Fleet; fleet = Fleet(*sys.argv[1:3], log=None); "
)
GRAPH = f"future = fleet.submit({graph()!r}); "
FORK = """
if os.fork() == 0:
    for wait in (future.result, lambda: fleet.submit(sys.argv[3]), fleet.close):
        try:
            wait()
        except Exception as error:
            print(type(error).__name__)
    os._exit(0)
os.wait()
open(sys.argv[2] + ".forked", "w").close()
print(len(future.result(30).files))
fleet.close()
"""
PROGRAMS = {
    "forgotten": (FLEET, 0, []),
    "ended by an exception": (f"{FLEET}{GRAPH} raise SystemExit(5)", 5, []),
    "in the middle of jobs": (f"{FLEET}{GRAPH} future.result(0.5)", 1, []),
    "after its jobs": (f"{FLEET}{GRAPH} print(len(future.result(30).files))", 0, ["1"]),
    "closed": (f"{FLEET}{GRAPH} fleet.close(wait=False); fleet.close()", 0, []),
    "forked": (f"{FLEET}{GRAPH}{FORK}", 0, ["JobError", "RuntimeError", "1"]),
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_ends_whether_it_closes_its_fleet_or_not(tmp_path: Path, program: str):
    text, code, lines = PROGRAMS[program]
    with fake_comfyui(paused=lines != ["1"]) as one:
        (tmp_path / "graph.json").write_text(json.dumps(graph()))
        given = one.url, str(tmp_path / "out"), str(tmp_path / "graph.json")
        command = [sys.executable, "-c", text, *given]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        with subprocess.Popen(command, **pipes) as process:
            if program == "forked":
                until((tmp_path / "out.forked").exists)
                one.faults.paused = False
            out, err = process.communicate(timeout=waiting.SECONDS)
        assert (process.returncode, out.split()) == (code, lines), err
        assert not (one.state.queue or one.state.running)  # none is left to a server
    journal = (tmp_path / "out" / "fleet.submit.jsonl").read_text().splitlines()
    assert [json.loads(line)["event"] for line in journal][:1] == ["run"]
    with fake_comfyui() as one, Fleet(one.url, tmp_path / "out", log=None) as fleet:
        assert fleet.submit(graph()).result(30).files
