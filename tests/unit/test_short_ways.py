"""How many files a person reads to follow an estimate, or a job to its server: no more than now."""

import json

from fake_comfyui import fake_comfyui, graph
from traced_files import traced

from qwen_l40s.cli import main


def test_an_estimate(capsys):
    arguments = ["estimate", "--card", "L40S"]
    assert main(arguments) == 0
    with traced() as files:
        assert main(arguments) == 0
    assert 10 < len(files) <= 26, sorted(files)


def test_four_jobs_on_two_servers(tmp_path, capsys):
    workflow = tmp_path / "work.json"
    workflow.write_text(json.dumps(graph()))

    def submit(name):
        folders = {"folders": (tmp_path,)}
        with fake_comfyui(**folders) as one, fake_comfyui(**folders) as other:
            servers = ["--server", one.url, "--server", other.url]
            more = ["--set", "seed=4..7", "--output", str(tmp_path / name)]
            assert main(["submit", str(workflow), *servers, *more]) == 0

    submit("first")
    with traced() as files:
        submit("second")
    assert 10 < len(files) <= 16, sorted(files)
