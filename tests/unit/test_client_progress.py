"""Bars on a terminal, lines elsewhere, and never too many."""

from __future__ import annotations

import io

import pytest

from qwen_l40s.client import progress as module
from qwen_l40s.client.progress import Progress
from qwen_l40s.client.submit import labels


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def run(stream: io.StringIO, jobs: int) -> str:
    with Progress(stream) as progress:
        progress.begin(jobs)
        for number in range(jobs):
            for step in range(1, 5):
                progress.node(f"job {number + 1}", "Sample", step, 4, "2/3")
                progress.show(done=number, total=jobs, failed=0, ahead=0)
        progress.show(done=jobs, total=jobs, failed=2, ahead=0)
        progress.say("the end")
    return stream.getvalue()


@pytest.fixture
def each_drawing(monkeypatch):
    monkeypatch.setattr(module, "DRAW_SECONDS", 0.0)


def test_a_terminal_shows_one_bar_for_the_jobs_and_one_for_the_node(each_drawing):
    text = run(Terminal(), 3)
    assert "jobs 2/3 |" in text
    assert "node 2/3, Sample 3/4 |" in text
    assert "2 failed" in text
    # Two bars on two lines: one line down and up again, whatever the number of jobs.
    assert text.replace("the end\n", "").count("\n") == text.count("\x1b[A")


def test_five_hundred_jobs_in_a_moment_are_drawn_a_few_times():
    assert len(run(Terminal(), 500)) < 20_000


def test_elsewhere_a_line_a_job_at_the_most_within_ten_seconds():
    lines = run(io.StringIO(), 3).splitlines()
    assert lines == [
        "job 1: Sample 1/4",
        "job 2: Sample 1/4",
        "job 3: Sample 1/4",
        "the end",
    ]


def test_a_log_gets_a_line_each_minute_with_the_time_that_is_left(monkeypatch):
    now, stream = [0.0], io.StringIO()
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    with Progress(stream) as progress:
        progress.begin(500, done=100)
        for second in range(0, 200, 10):
            now[0] = second
            progress.show(done=100 + second, total=500, failed=second // 100, ahead=0)
        now[0] = 300  # an idle fleet says nothing
        progress.show(done=500, total=500, failed=1, ahead=0)
    assert stream.getvalue().splitlines() == [
        "160 of 500 jobs, about 6 min left",
        "220 of 500 jobs, about 5 min left, 1 failed",
        "280 of 500 jobs, about 4 min left, 1 failed",
    ]


def test_the_position_in_the_queue():
    for stream in (io.StringIO(), Terminal()):
        with Progress(stream) as progress:
            progress.begin(2)
            progress.show(done=0, total=2, failed=0, ahead=7)
        assert "7 ahead in the queue" in stream.getvalue()


def test_labels_name_the_settings_in_which_jobs_differ():
    chosen = [{"prompt": "a cat", "seed": seed} for seed in (1, 2)]
    assert labels(chosen) == ["job 1 (seed=1)", "job 2 (seed=2)"]
    assert labels([{"prompt": "a cat"}]) == ["job 1"]
    (first, _) = labels([{"prompt": "x " * 500}, {"prompt": "y\nz"}])
    assert first == f"job 1 (prompt={'x ' * 18}x...)"
