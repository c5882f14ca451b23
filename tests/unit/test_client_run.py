"""A whole run against a server with faults: nothing lost, nothing queued twice."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import waiting
from fake_comfyui import FakeComfyUI, fake_comfyui, hurry, submitted

from qwen_l40s.client import scheduler
from qwen_l40s.client.journal import DiskError, Journal
from qwen_l40s.client.server import Server
from qwen_l40s.client.transport import ServerError

until = functools.partial(waiting.until, seconds=30)

LOADER = {
    "input": {"required": {"unet_name": ["STRING", {}]}},
    "output": ["MODEL"],
    "output_node": False,
}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    hurry(monkeypatch)


class Ran:
    def __init__(self, fake: FakeComfyUI, folder: Path, *texts: str, **more: Any) -> None:
        prompts = folder / "prompts.txt"
        prompts.write_text("\n".join(texts) + "\n", encoding="utf-8")
        settings = more.pop("settings", [f"prompt=@{prompts}"])
        self.outcome, self.log, self.ended = submitted(folder, [fake.url], settings, **more)
        self.jobs = self.outcome.jobs
        self.status = [job.status for job in self.jobs]


def looked(fake: FakeComfyUI) -> None:
    """Waits until the client has seen the queue as it is, and was told so."""
    seen = fake.requests.count("GET /queue")
    until(lambda: fake.requests.count("GET /queue") >= seen + 2)


def images(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "out").glob("*.png"))


def test_every_job_runs_once_and_its_image_is_here(tmp_path: Path):
    with fake_comfyui() as fake:
        ran = Ran(fake, tmp_path, "a cat", "Grüße, 猫", "x" * 5000)
        assert [body["prompt"]["draw"]["inputs"]["text"][:9] for body in fake.posted] == [
            "a cat",
            "Grüße, 猫",
            "xxxxxxxxx",
        ]
    assert ran.status == ["done"] * 3
    assert images(tmp_path) == sorted(f"{job.key}_1.png" for job in ran.jobs)
    assert sorted(ran.ended, key=lambda job: job.number) == ran.jobs
    assert all(job.seconds is not None for job in ran.jobs)
    assert ran.outcome.exit_code == 0


@pytest.mark.parametrize(
    "faults",
    [
        {"drop_socket_after": 3},
        {"drop_socket_after": 9},
        {"refuse_socket": True},
        {"mute_socket_after": 4},
        {"busy": 3},
        {"lose_answer": 2},
        {"lose_request": 2},
        {"refuse_socket": True, "lose_answer": 1},
        {"cut_file": 3},
        {"cached": True},
    ],
    ids=str,
)
def test_a_fault_on_the_way_changes_nothing(tmp_path: Path, faults: dict[str, Any]):
    with fake_comfyui(**faults) as fake:
        ran = Ran(fake, tmp_path, "a", "b", "c")
        assert len(fake.posted) == 3
    assert ran.status == ["done"] * 3
    assert len(images(tmp_path)) == 3


def test_a_refused_a_partly_refused_and_a_failing_job_fail_and_the_others_go_on(tmp_path: Path):
    with fake_comfyui() as fake:
        ran = Ran(fake, tmp_path, "a", "refuse", "partly", "fail", "block", "z")
        left = fake.state.queue
    assert ran.status == ["done", "failed", "failed", "failed", "failed", "done"]
    assert ran.outcome.exit_code == 1
    assert left == []
    _, refused, partly, failed, blocked, _ = (job.error for job in ran.jobs)
    sentence = "Value not in list: text: 'refuse' not in ['a cat']."
    for error in (refused, partly):
        assert error["message"] == f"'Prompt' (Draw, id draw): {sentence}"
    for error in (failed, blocked):
        assert error["type"] == "RuntimeError"
        assert error["message"] == "'Prompt' (Draw, id draw): the pencil broke"
        assert error["nodes"] == [
            {
                "id": "draw",
                "title": "Prompt",
                "class_type": "Draw",
                "message": "the pencil broke",
            }
        ]
    assert "job 4 (prompt=fail) failed: 'Prompt' (Draw, id draw): the pencil broke" in ran.log


def test_the_jobs_of_a_restarted_server_are_queued_again(tmp_path: Path):
    with fake_comfyui(paused=True) as fake:

        def restart() -> None:
            until(lambda: len(fake.state.queue) == 2)
            fake.faults.paused = False
            fake.call(fake.restart())

        ran = Ran(fake, tmp_path, "a", "b", "c", meanwhile=restart)
        assert len(fake.posted) == 5
    assert ran.status == ["done"] * 3
    assert "Its jobs go to other servers or wait: 2." in ran.log
    assert f"{fake.url} is back" in ran.log


def test_so_are_those_of_one_that_restarted_between_two_looks_without_a_websocket(tmp_path: Path):
    with fake_comfyui(paused=True, refuse_socket=True) as fake:

        def restart() -> None:
            until(lambda: len(fake.state.queue) == 2)
            looked(fake)
            fake.state.queue.clear()  # no request finds it away
            fake.faults.paused = False

        ran = Ran(fake, tmp_path, "a", "b", "c", meanwhile=restart)
    assert ran.status == ["done"] * 3
    assert (
        "was restarted and has forgotten its jobs. Its jobs go to other servers or wait: 2."
        in ran.log
    )


def test_a_job_that_takes_the_server_down_each_time_is_set_aside(tmp_path: Path):
    with fake_comfyui(away_seconds=0.02) as fake:
        ran = Ran(fake, tmp_path, "crash", "a")
        assert fake.restarts == scheduler.MOST_DEATHS
    assert ran.status == ["poison", "done"]
    assert ran.outcome.exit_code == 1
    assert ran.jobs[0].error["message"] == (
        f"servers ended 3 times while running this job ({fake.url})."
    )


@pytest.mark.parametrize("busy", [0, 2])
def test_a_job_that_someone_takes_out_of_the_queue_stays_out(tmp_path: Path, busy: int):
    """Also where the connection broke, and the history shows the same server."""
    with fake_comfyui() as fake:
        Ran(fake, tmp_path, "before")
        fake.faults.paused = True

        def remove() -> None:
            until(lambda: len(fake.state.queue) == 2)
            looked(fake)
            fake.faults.busy = busy
            fake.remove([fake.state.queue[0][1]])
            until(lambda: not fake.faults.busy)
            fake.faults.paused = False

        ran = Ran(fake, tmp_path, "a", "b", meanwhile=remove)
        assert len(fake.posted) == 3
    assert ran.status == ["cancelled", "done"]
    assert (ran.jobs[0].error["type"], ran.outcome.exit_code) == ("removed", 1)


def test_a_job_that_someone_interrupts_is_cancelled(tmp_path: Path):
    with fake_comfyui() as fake:

        def interrupt() -> None:
            until(lambda: fake.state.running)
            fake.state.interrupted = True

        ran = Ran(fake, tmp_path, "slow", "a", meanwhile=interrupt)
    assert ran.status == ["cancelled", "done"]
    assert ran.jobs[0].error["type"] == "interrupted"


def test_a_server_that_stays_away_ends_the_run_and_resume_continues(tmp_path: Path):
    with fake_comfyui(paused=True) as fake:

        def vanish() -> None:
            until(lambda: len(fake.state.queue) == 2)
            fake.call(fake.stop())

        ran = Ran(fake, tmp_path, "a", "b", meanwhile=vanish, wait=0.2)
        assert ran.status == ["lost", "lost"]
        assert ran.outcome.exit_code == 3
        assert isinstance(ran.outcome.error, ServerError)
        assert ran.jobs[0].error["message"] == str(ran.outcome.error)
        fake.faults.paused = False
        fake.call(fake.start())  # it kept its queue
        again = Ran(fake, tmp_path, "a", "b", resume=True)
        assert len(fake.posted) == 2
    assert again.status == ["done", "done"]
    assert "0 of 2 jobs are done, 2 may still be on a server" in again.log


@pytest.mark.parametrize("again", [True, False])
def test_what_a_run_left_on_a_server_is_withdrawn_where_its_jobs_run_again(
    tmp_path: Path, again: bool
):
    model = tmp_path / "models" / "base.safetensors"
    model.parent.mkdir()
    model.write_bytes(b"old")
    load = {"class_type": "UNETLoader", "inputs": {"unet_name": model.name}}
    faults = {"folders": (model.parent,), "knows": {"UNETLoader": LOADER}}
    with fake_comfyui(paused=True, **faults) as fake:

        def vanish() -> None:
            until(lambda: len(fake.state.queue) == 2)
            fake.call(fake.stop())

        Ran(fake, tmp_path, "a", "b", meanwhile=vanish, wait=0.2, nodes={"load": load})
        fake.call(fake.start())  # it kept its queue
        if not again:
            model.write_bytes(b"replaced")
        queued = []

        def go_on() -> None:
            until(lambda: len(fake.posted) == 4)
            queued.extend(item[1] for item in fake.state.queue)
            fake.faults.paused = False

        more = {"again": again, "meanwhile": go_on, "nodes": {"load": load}}
        ran = Ran(fake, tmp_path, "a", "b", **more)
    assert ran.status == ["done", "done"]
    assert set(queued) == {job.prompt_id for job in ran.jobs}


@pytest.mark.parametrize(
    ("kind", "drops"), [("UNETLoader", ["POST /free", "POST /prompt"]), ("QwenL40S_Load", [])]
)
def test_a_server_drops_what_its_own_loaders_keep_before_a_job_of_a_replaced_model(
    tmp_path: Path, kind: str, drops: list[str]
):
    model = tmp_path / "models" / "base.safetensors"
    model.parent.mkdir()
    load = {"class_type": kind, "inputs": {"unet_name": model.name}}
    with fake_comfyui(folders=(model.parent,), knows={kind: LOADER}) as fake:
        for content, text, first in ((b"old", "a", []), (b"replaced", "b", drops), (b"", "c", [])):
            if content:
                model.write_bytes(content)
            fake.requests.clear()
            Ran(fake, tmp_path, text, f"{text} cat", nodes={"load": load})
            posts = [each for each in fake.requests if each.startswith("POST")]
            assert posts == [*first, "POST /prompt", "POST /prompt"]


def test_a_further_run_skips_what_is_here_and_queues_what_failed_or_is_new(tmp_path: Path):
    with fake_comfyui() as fake:
        first = Ran(fake, tmp_path, "a", "fail", "c")
        first.jobs[2].files[0].unlink()  # still on the server
        ran = Ran(fake, tmp_path, "a", "fail", "c", "d")
        texts = [body["prompt"]["draw"]["inputs"]["text"] for body in fake.posted]
    assert texts == ["a", "fail", "c", "fail", "d"]
    assert ran.status == ["done", "failed", "done", "done"]
    assert ran.jobs[0].prompt_id == first.jobs[0].prompt_id
    assert ran.jobs[0].files == first.jobs[0].files
    assert images(tmp_path) == sorted(f"{ran.jobs[n].key}_1.png" for n in (0, 2, 3))


def test_equal_jobs_run_once(tmp_path: Path):
    with fake_comfyui() as fake:
        ran = Ran(fake, tmp_path, "a", "b", "a", "a")
        assert len(fake.posted) == 2
    assert ran.status == ["done", "done"]
    assert "2 identical jobs are left out" in ran.log


def test_the_journal_has_a_job_before_the_server_hears_of_it(tmp_path: Path):
    with fake_comfyui() as fake:
        lines = []
        take = fake._post_prompt

        async def look(request):
            lines.extend((tmp_path / "out" / "work.submit.jsonl").read_text().splitlines())
            return await take(request)

        fake._post_prompt = look
        fake.call(fake.stop())
        fake.call(fake.start())
        Ran(fake, tmp_path, "a")
    assert [json.loads(line)["event"] for line in lines] == ["run", "queued"]


def test_a_job_whose_file_the_server_lost_runs_again_under_another_name_and_three_times_at_most(
    tmp_path: Path,
):
    with fake_comfyui(no_file=1) as fake:
        ran = Ran(fake, tmp_path, "a")
        names = [body["prompt"]["save"]["inputs"]["filename_prefix"] for body in fake.posted]
    assert ran.status == ["done"]
    id_of_job = f"fake_job-{ran.jobs[0].key[:12]}"
    assert names == [id_of_job, f"{id_of_job}-1"]
    with fake_comfyui(no_file=99) as fake:
        ran = Ran(fake, tmp_path, "b")
        assert len(fake.posted) == 3
    [error] = [job.error for job in ran.jobs]
    assert error["type"] == "download" and "404" in error["message"]


def test_a_full_disk_ends_the_run_and_the_next_one_fetches_what_the_server_has(
    tmp_path: Path, monkeypatch
):
    async def full(server: Server, image: Any, target: Path, most: int) -> None:
        target.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with fake_comfyui() as fake:
        with monkeypatch.context() as patch:
            patch.setattr(Server, "download", full)
            ran = Ran(fake, tmp_path, "a")
        assert ran.status == ["lost"]
        assert ran.outcome.exit_code == 3
        words = "No space left on device): free disk space"
        assert words in str(ran.outcome.error)
        assert [path.name for path in (tmp_path / "out").iterdir()] == ["work.submit.jsonl"]
        again = Ran(fake, tmp_path, "a", resume=True)
        assert len(fake.posted) == 1
    assert again.status == ["done"]
    assert len(images(tmp_path)) == 1


@pytest.mark.parametrize(("event", "time"), [("queued", 2), ("done", 2), ("done", 3)])
def test_a_journal_on_a_full_disk_loses_no_job_and_runs_none_twice(
    tmp_path: Path, monkeypatch, event: str, time: int
):
    write, lines = Journal._write, []

    def full(self: Journal, kind: str, **facts: Any) -> None:
        lines.append(kind)
        if kind == event and lines.count(event) == time:
            raise DiskError("the journal cannot be written (No space left on device)")
        write(self, kind, **facts)

    with fake_comfyui() as fake:
        with monkeypatch.context() as patch:
            patch.setattr(Journal, "_write", full)
            ran = Ran(fake, tmp_path, settings=["seed=1..3"])
        assert ran.outcome.exit_code == 3
        assert set(ran.status) <= {"done", "lost"}
        again = Ran(fake, tmp_path, settings=["seed=1..3"], resume=True)
        assert len(fake.posted) == 3
    assert again.status == ["done"] * 3
    assert len(images(tmp_path)) == 3


def test_five_hundred_jobs_ask_for_each_history_about_once(tmp_path: Path):
    with fake_comfyui() as fake:
        ran = Ran(fake, tmp_path, "a", settings=["seed=1..500"])
        counts = {path: fake.requests.count(path) for path in set(fake.requests)}
    assert ran.status == ["done"] * 500
    assert counts["POST /prompt"] == 500
    assert counts["GET /view"] == 500
    assert sum(n for path, n in counts.items() if path.startswith("GET /history/")) < 600
    assert counts["GET /queue"] < 100


def test_a_dry_run_queues_uploads_and_writes_nothing(tmp_path: Path):
    with fake_comfyui() as fake:
        ran = Ran(fake, tmp_path, "a", "b", dry_run=True)
        assert {line.partition(" ")[0] for line in fake.requests} == {"GET"}
    assert ran.outcome.exit_code == 0
    assert not (tmp_path / "out").exists()
