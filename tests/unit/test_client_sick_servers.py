"""Servers, and proxies before them, that answer wrongly: each costs itself, and no other's jobs."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import waiting
from fake_comfyui import OBJECT_INFO, FakeComfyUI, fake_comfyui, hurry, submitted
from PIL import Image

from qwen_l40s.client import feeder, results, transport
from qwen_l40s.client.scheduler import Job

VIEWS = ["302", "500", "504", "long", "cut", "empty", "noise", "html", "json", "page as png"]
VIEWS += ["short", "hang", "another"]
SUCCESS = {"status_str": "success", "messages": []}
ODD = {
    "a list": '["a"]',
    "a text": '"a"',
    "null": "null",
    "nested": "[" * 100_000,
}
ENTRIES = {
    "none": lambda entry: None,
    "empty": lambda entry: {},
    "no outputs": lambda entry: entry | {"outputs": None},
    "outputs of another shape": lambda entry: entry | {"outputs": {"save": 5}},
    "no messages": lambda entry: entry | {"status": {"status_str": "success", "messages": None}},
    "odd messages": lambda entry: entry | {"status": SUCCESS | {"messages": [["a"], [5, 6, 7]]}},
}
NAMELESS = [["execution_error", {"exception_type": None, "node_id": "draw"}]]
FAILURES = {
    "error of no type": lambda entry: (
        entry | {"status": {"status_str": "error", "messages": NAMELESS}}
    ),
    "error without a reason": lambda entry: entry | {"status": SUCCESS | {"status_str": "error"}},
    "no files": lambda entry: entry | {"outputs": {}},
    "no images": lambda entry: entry | {"outputs": {"save": {"images": []}}},
}


beside = pytest.mark.parametrize("count", [1, pytest.param(7, marks=pytest.mark.slow)])


@contextmanager
def healthy(count: int) -> Iterator[list[FakeComfyUI]]:
    with ExitStack() as stack:
        yield [stack.enter_context(fake_comfyui(job_seconds=0.01)) for _ in range(count)]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    hurry(monkeypatch)
    monkeypatch.setattr(feeder, "LONGEST_PAUSE", 0.05)
    monkeypatch.setattr(results, "FETCHES", 3)
    monkeypatch.setattr(feeder, "REST_SECONDS", 0.2)
    monkeypatch.setattr(transport, "STALL_SECONDS", 0.1)


class Ran:
    """A run of jobs on these servers; no file of it is another's or damaged, none ran too often."""

    def __init__(
        self, folder: Path, *servers: FakeComfyUI, jobs: int = 6, files: bool = True, **more: Any
    ) -> None:
        names = [each.url for each in servers]
        more = {"wait": 0.5} | more
        self.outcome, self.log, _ = submitted(folder, names, [f"seed=1..{jobs}"], **more)
        self.jobs: list[Job] = self.outcome.jobs
        self.status = Counter(job.status for job in self.jobs)
        self.errors = {job.error["type"] for job in self.jobs if job.error}
        for job in self.jobs:
            assert job.files or job.status != "done" or not files
            for path in job.files:
                with Image.open(path) as image:
                    image.load()
                    assert image.getpixel((0, 0))[0] == job.settings["seed"]
        posted = [body["prompt"]["draw"]["inputs"]["seed"] for s in servers for body in s.posted]
        assert not posted or Counter(posted).most_common(1)[0][1] <= 3


@pytest.mark.parametrize("view", VIEWS)
def test_a_result_that_does_not_come_fails_as_a_download_and_runs_thrice_at_most(
    tmp_path: Path, view: str
):
    with fake_comfyui(view=view) as sick:
        ran = Ran(tmp_path, sick, jobs=3)
        asked = sick.requests.count("GET /view")
        sick.faults.view = ""
        posted = len(sick.posted)
        again = Ran(tmp_path, sick, jobs=3, resume=True)
        if view != "another":
            assert len(sick.posted) == posted  # asked again, and not run again
    if view == "another":  # the first one's own
        assert ran.status == {"done": 1, "failed": 2}
    else:
        assert (ran.status, asked) == ({"failed": 3}, 9)
    assert ran.errors == {"download"}
    assert ran.log.count("its result could not be fetched yet: ") >= 1
    assert again.status == {"done": 3}


@beside
@pytest.mark.parametrize("view", VIEWS)
def test_beside_healthy_servers_it_costs_few_jobs(tmp_path: Path, view: str, count: int):
    with fake_comfyui(view=view) as sick, healthy(count) as well:
        ran = Ran(tmp_path, sick, *well, jobs=40)
    assert set(ran.status) <= {"done", "failed"} and ran.status["done"] >= 30
    assert ran.errors <= {"download"}


@pytest.mark.parametrize("name", ["text.txt", "picture.png", "text_job-0123456789ab.txt"])
def test_files_that_a_node_names_by_itself_come_of_one_job_at_a_time(tmp_path: Path, name: str):
    """Each job overwrites the file of the one before, on both servers."""
    with fake_comfyui(named=name) as one, fake_comfyui(named=name) as two:
        two.files = one.files
        ran = Ran(tmp_path, one, two, jobs=12)
    assert ran.status == {"done": 12}


def test_a_file_that_a_node_names_by_itself_is_not_taken_from_what_the_server_kept(tmp_path: Path):
    with fake_comfyui(named="text.txt") as one:
        Ran(tmp_path, one, jobs=1)
        first, second = (body["prompt"]["save"]["inputs"] for body in one.posted)
    # Inputs that no node has make ComfyUI run it.
    assert first.keys() < second.keys()


def test_a_file_larger_than_the_limit_is_refused(tmp_path: Path):
    with fake_comfyui(view="endless") as sick:
        ran = Ran(tmp_path, sick, jobs=1, most=1e6)
    assert ran.errors == {"download"}
    assert "sends a file of more than 0.001 GB: raise --most-gb." in ran.jobs[0].error["message"]


@beside
@pytest.mark.parametrize("entry", FAILURES)
def test_a_prompt_that_names_no_file_or_failed_without_a_word_has_failed(
    tmp_path: Path, entry: str, count: int
):
    with fake_comfyui(entry=FAILURES[entry]) as sick, healthy(count) as well:
        alone = Ran(tmp_path, sick, jobs=2)
        beside = Ran(tmp_path, sick, *well, jobs=20)
    assert alone.status == {"failed": 2}
    assert alone.errors == {"execution_error" if entry.startswith("error") else "no output"}
    assert beside.status == {"done": 20}


@beside
@pytest.mark.parametrize("entry", ENTRIES)
def test_a_history_of_another_shape_is_that_servers_fault(tmp_path: Path, entry: str, count: int):
    with fake_comfyui(entry=ENTRIES[entry]) as sick, healthy(count) as well:
        alone = Ran(tmp_path, sick, jobs=2)
        beside = Ran(tmp_path, sick, *well, jobs=20)
    assert (alone.status, alone.outcome.exit_code) == ({"lost": 2}, 3)
    assert beside.status == {"done": 20}


@beside
@pytest.mark.parametrize(
    "call", ["GET /queue", "GET /history", "GET /system_stats", "POST /prompt"]
)
@pytest.mark.parametrize("shape", ODD)
def test_json_of_another_shape_ends_the_turn_of_its_server_alone(
    tmp_path: Path, call: str, shape: str, count: int
):
    with fake_comfyui() as sick, healthy(count) as well:
        sick.faults.odd[call] = ODD[shape]
        alone = Ran(tmp_path, sick, jobs=2) if call == "POST /prompt" else None
        beside = Ran(tmp_path, sick, *well, jobs=20)
    assert beside.status == {"done": 20}
    assert alone is None or (alone.status, alone.outcome.exit_code) == ({"lost": 2}, 3)


@beside
@pytest.mark.parametrize("prompt", ["no JSON", "redirect", "wrong id", "404", "500", "524"])
def test_a_post_that_is_answered_wrongly_is_no_death(tmp_path: Path, prompt: str, count: int):
    with fake_comfyui(prompt=prompt) as sick, healthy(count) as well:
        alone = Ran(tmp_path, sick, jobs=2)
        beside = Ran(tmp_path, sick, *well, jobs=20)
    # What another id was given to may run there.
    assert alone.status == ({"failed": 2} if prompt in ("500", "wrong id") else {"lost": 2})
    assert beside.status == {"done": 20}


def test_a_server_that_fails_at_once_fails_no_job_of_seven_healthy_ones_and_rests(tmp_path: Path):
    with ExitStack() as stack:
        healthy = [stack.enter_context(fake_comfyui(job_seconds=0.02)) for _ in range(7)]
        sick = stack.enter_context(fake_comfyui(broken=True))
        ran = Ran(tmp_path, sick, *healthy, jobs=200)
        assert len(sick.posted) < 50
    assert ran.status == {"done": 200}
    assert (
        f"{sick.url} failed 3 jobs in a row, and other servers failed none: it pauses for"
        in ran.log
    )


def test_a_server_that_has_rested_and_is_well_gets_jobs_again(tmp_path: Path):
    with fake_comfyui(broken=True) as sick, fake_comfyui(job_seconds=0.03) as well:

        def mend() -> None:
            waiting.until(lambda: len(sick.posted) >= 4, seconds=30)
            sick.faults.broken = False

        ran = Ran(tmp_path, sick, well, jobs=100, meanwhile=mend)
        assert len(sick.posted) > 10
    assert ran.status == {"done": 100}


@pytest.mark.parametrize("outcome", ["done", "failed"])
def test_output_nodes_that_name_no_file_by_design_are_done_and_it_is_said_once(
    tmp_path: Path, outcome: str
):
    socket = {"class_type": "SaveImageWebsocket", "inputs": {"images": ["draw", 0]}}
    known = {
        "input": {"required": {"images": ["IMAGE", {}]}},
        "output_node": True,
        "python_module": "custom_nodes.websocket_image_save",
    }
    # The graph's own SaveImage is then a pack's, too, and need not name one either.
    pack = {"python_module": "custom_nodes.pack"} if outcome == "done" else {}
    knows = {"SaveImageWebsocket": known, "SaveImage": OBJECT_INFO["SaveImage"] | pack}
    with fake_comfyui(entry=FAILURES["no files"], knows=knows) as one:
        ran = Ran(tmp_path, one, jobs=3, nodes={"socket": socket}, files=False)
    assert ran.status == {outcome: 3}
    assert ran.log.count("the output nodes of these jobs report no files") == (outcome == "done")


def test_a_run_that_is_killed_between_line_and_file_leaves_one_version(tmp_path: Path, monkeypatch):
    def killed(*_: Any) -> None:
        raise KeyError("killed")

    with fake_comfyui() as one:
        with monkeypatch.context() as patch, pytest.raises(KeyError):
            patch.setattr(results, "name_file", killed)
            Ran(tmp_path, one, jobs=1)
        one.call(one.restart())  # and forgets; its next image differs in its bits
        again = Ran(tmp_path, one, jobs=1, resume=True)
    assert again.status == {"done": 1}
    assert len(list((tmp_path / "out").glob("*.png"))) == 1


def test_a_result_reaches_the_disk_before_its_name_and_the_journal_after_it(
    tmp_path: Path, monkeypatch
):
    events, sync, link = [], os.fsync, os.link

    def synced(file: int) -> None:
        events.append(Path(os.readlink(f"/proc/self/fd/{file}")).suffix)
        sync(file)

    def linked(*names: Any) -> None:
        events.append("named")
        link(*names)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "link", linked)
    with fake_comfyui() as one:
        Ran(tmp_path, one, jobs=1)
    kinds = list(dict.fromkeys(reversed(events)))
    assert kinds.index("named") < kinds.index(".part")
    assert events[-2:] == [".jsonl", ""]


@pytest.mark.parametrize("left", [b"", b"\x89PNG\r\n"])
def test_a_damaged_file_is_fetched_again_in_its_place(tmp_path: Path, left: bytes):
    with fake_comfyui() as one:
        [job] = Ran(tmp_path, one, jobs=1).jobs
        job.files[0].write_bytes(left)
        [again] = Ran(tmp_path, one, jobs=1, resume=True).jobs
        assert len(one.posted) == 1
    assert again.files == job.files


def test_two_servers_with_one_output_folder_mix_nothing_up(tmp_path: Path):
    with fake_comfyui(job_seconds=0.002) as one, fake_comfyui(job_seconds=0.002) as two:
        two.files = one.files
        ran = Ran(tmp_path, one, two, jobs=60)
    assert ran.status == {"done": 60}


def test_names_that_other_images_have_meanwhile_give_no_other_image(tmp_path: Path):
    with fake_comfyui() as one:
        first = Ran(tmp_path, one, jobs=2)
        for job in first.jobs:
            job.files[0].unlink()
        one.files = dict(zip(one.files, reversed(one.files.values()), strict=True))
        again = Ran(tmp_path, one, jobs=2, resume=True)
        assert len(one.posted) == 4
    assert again.status == {"done": 2}


def test_a_server_that_chooses_ids_itself_runs_a_job_three_times_at_most(tmp_path: Path):
    with fake_comfyui(own_ids=True, job_seconds=0.05) as sick:
        ran = Ran(tmp_path, sick, jobs=1, wait=5.0)
    assert ran.status == {"failed": 1}
    assert "replaces the ids of prompts" in ran.jobs[0].error["message"]


def test_a_prompt_whose_result_is_collected_again_has_run_once(tmp_path: Path):
    with fake_comfyui(view="500") as sick:

        def vanish() -> None:
            for _ in range(4):  # each time its results are asked for
                asked = sick.requests.count("GET /view")
                waiting.until(lambda asked=asked: sick.requests.count("GET /view") > asked, 10)
                sick.faults.busy = 10**6
                time.sleep(0.5)
                sick.faults.busy = 0
            sick.faults.view = ""

        names = tmp_path / "servers.txt"  # whose servers are waited for longer
        names.write_text(sick.url)
        ran = Ran(tmp_path, sick, jobs=1, wait=0.1, server_file=names, meanwhile=vanish)
        posted = len(sick.posted)
    assert (ran.status, posted) == ({"done": 1}, 1)


def test_a_lone_server_that_is_silent_while_it_loads_ends_no_run(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(transport, "READ_SECONDS", 0.2)
    with fake_comfyui(paused=True) as one:

        def load() -> None:
            waiting.until(lambda: one.state.queue, 10)
            one.faults.frozen = True
            time.sleep(1.5)
            one.faults.frozen = one.faults.paused = False

        ran = Ran(tmp_path, one, jobs=2, wait=0.4, meanwhile=load)
        assert len(one.posted) == 2
    assert ran.status == {"done": 2}


def test_headers_whose_names_differ_in_case_are_sent_once(tmp_path: Path):
    with fake_comfyui() as one:
        Ran(tmp_path, one, jobs=1, headers={"x-token": "old", "X-Token": "new"})
        for each in one.headers:
            assert [value for name, value in each.items() if name.lower() == "x-token"] == ["new"]
