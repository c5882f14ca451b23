"""`qwen-l40s submit` as a command: exit codes, what is on stdout, what is on stderr."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from fake_comfyui import FakeComfyUI, fake_comfyui, graph, hurry
from PIL import Image
from waiting import SECONDS, until

from qwen_l40s.cli import build_parser, main
from qwen_l40s.client.workflow import key_of

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    hurry(monkeypatch)


@pytest.fixture
def workflow(tmp_path: Path) -> Path:
    path = tmp_path / "work.json"
    path.write_text(json.dumps(graph()))
    return path


def arguments(fake: FakeComfyUI | None, workflow: Path, *more: str) -> list[str]:
    server = [] if fake is None else ["--server", fake.url]
    return ["submit", str(workflow), *server, "--output", str(workflow.parent / "out"), *more]


def started(fake: FakeComfyUI, workflow: Path, *more: str, **environment: str) -> Any:
    command = [sys.executable, str(ROOT), *arguments(fake, workflow, *more)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, env={**os.environ, **environment}, **pipes)


def test_one_json_object_and_nothing_else_on_stdout(workflow: Path, capsys):
    with fake_comfyui() as fake:
        assert main(arguments(fake, workflow, "--json", "--set", "seed=4..5")) == 0
    (line,) = capsys.readouterr().out.splitlines()
    found = json.loads(line)
    assert set(found) == {"servers", "workflow", "jobs"}
    assert (found["servers"], found["workflow"]) == ([fake.url], str(workflow))
    first, second = found["jobs"]
    assert list(first) == [
        *("key", "server", "prompt_id", "settings", "status"),
        *("seconds", "files", "texts", "error"),
    ]
    assert (first["settings"], second["settings"]) == ({"seed": 4}, {"seed": 5})
    assert (first["status"], first["error"]) == ("done", None)
    assert [Path(path).is_file() for path in first["files"]] == [True]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--set", "nothing=1"], "nothing"),
        (["--set", "seed=x"], "seed"),
        (["--server", "https://host/x?token=secret"], "--header"),
        (["--server", "ftp://x"], "is not an address"),
        (["--header", "my token"], 'must be "Name: value"'),
        (["--header-file", "nowhere"], "--header-file cannot be read"),
        (["--server", "http://me:my token@x"], "is not an address"),
        (["--server", "http://me:a@x", "--header", "authorization: b"], "Authorization header"),
        (["--output", "/proc/nowhere"], "--output cannot be written"),
    ],
)
def test_bad_input_is_exit_code_2_and_nothing_is_queued(workflow: Path, capsys, more, words):
    with fake_comfyui() as fake:
        assert main([*arguments(fake, workflow, "--json"), *more]) == 2
        assert fake.posted == []
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("qwen-l40s: error: ")
    assert words in err


@pytest.mark.parametrize(
    ("text", "words"), [("prompt=@no.txt", "cannot read the file 'no.txt'"), ("", "has no nodes")]
)
def test_what_is_no_setting_or_no_workflow_needs_no_server(workflow: Path, capsys, text, words):
    if not text:
        workflow.write_text("{}")
    more = ("--server", "127.0.0.1:1", *(("--set", text) if text else ()))
    assert main(arguments(None, workflow, *more)) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("status", [200, 404, 410, 502, 530])
@pytest.mark.parametrize("body", ["<html>starting</html>", '{"message": "not found"}'])
def test_a_server_whose_machine_still_boots_is_waited_for(workflow: Path, status: int, body: str):
    answers = []

    async def boots(request: web.Request) -> web.Response | None:
        answers.append(request.path)
        kind = "text/html" if body.startswith("<") else "application/json"
        late = answers.count("/object_info") > 3
        return None if late else web.Response(status=status, text=body, content_type=kind)

    with fake_comfyui(answer=boots) as fake:
        assert main(arguments(fake, workflow, "--wait", "60")) == 0
        assert len(fake.posted) == 1


@pytest.mark.parametrize(
    ("token", "code"),
    [
        *((f"hidden{end}", 0) for end in ("", "\n", "\r\n", " ", "\t\n")),
        ("\ufeffhidden\r\n", 0),
        (" hidden", 0),
        *((f"hid{inner}den", 2) for inner in ("\n", "\r\n", "\x7f", "\udcff")),
    ],
)
def test_a_token_is_sent_without_its_line_end_or_refused(
    workflow: Path, monkeypatch, capsys, token: str, code: int
):
    monkeypatch.setenv("QWEN_L40S_TOKEN", token)
    with fake_comfyui() as fake:
        assert main(arguments(fake, workflow)) == code
        sent = {headers.get("Authorization") for headers in fake.headers}
    assert sent == (set() if code else {"Bearer hidden"})
    assert ("QWEN_L40S_TOKEN" in capsys.readouterr().err) == bool(code)


def test_headers_come_from_a_file_and_a_token_from_the_environment(
    workflow: Path, tmp_path: Path, monkeypatch
):
    (tmp_path / "headers").write_text("X-One: 1\n\nX-Two: 2\n", "utf-8-sig")  # as Notepad does
    monkeypatch.setenv("QWEN_L40S_TOKEN", "hidden")
    with fake_comfyui() as fake:
        assert main(arguments(fake, workflow, "--header-file", str(tmp_path / "headers"))) == 0
    for sent in fake.headers:
        assert (sent["X-One"], sent["X-Two"]) == ("1", "2")
        assert sent["Authorization"] == "Bearer hidden"


@pytest.mark.parametrize("text", ["-1", "soon", "nan", "inf"])
def test_a_wait_that_is_no_time(text):
    with pytest.raises(SystemExit) as error:
        build_parser(["submit"]).parse_args(["submit", "a.json", f"--wait={text}"])
    assert error.value.code == 2


def test_no_server_is_exit_code_3(workflow: Path, capsys):
    more = ("--server", "127.0.0.1:1", "--wait", "0.1", "--json")
    assert main(arguments(None, workflow, *more)) == 3
    out, err = capsys.readouterr()
    assert out == ""
    assert "waiting up to 0.1 s for http://127.0.0.1:1" in err
    assert "no server listens at http://127.0.0.1:1 (connection refused): start ComfyUI" in err


def test_where_nothing_listens_nobody_waits_unless_told_to(workflow: Path, capsys):
    assert main(arguments(None, workflow, "--server", "127.0.0.1:1")) == 3
    assert capsys.readouterr().err == (
        "qwen-l40s: error: no server listens at http://127.0.0.1:1 (connection refused): start "
        "ComfyUI there, name another --server, or wait with --wait SECONDS.\n"
    )


def test_a_server_that_is_lost_is_exit_code_3_with_the_jobs_in_json(workflow: Path):
    with fake_comfyui(paused=True) as fake:
        process = started(fake, workflow, "--json", "--wait", "0.2", "--set", "seed=1..2")
        until(lambda: len(fake.state.queue) == 2)
        fake.call(fake.stop())
        out, err = process.communicate(timeout=SECONDS)
        fake.call(fake.start())
        fake.state.queue.clear()
    assert process.returncode == 3
    assert [job["status"] for job in json.loads(out)["jobs"]] == ["lost", "lost"]
    assert b"--wait SECONDS. --resume continues this run." in err


def test_files_texts_and_failures_are_shown_without_json(workflow: Path, capsys):
    with fake_comfyui() as fake:
        assert main(arguments(fake, workflow, "--set", "seed=1..2")) == 0
    out, err = capsys.readouterr()
    (first,) = (workflow.parent / "out").glob(f"{key_of(graph(seed=1))}_1.png")
    assert f"job 1 (seed=1): {first} (" in out
    assert len(out.splitlines()) == 2
    assert err.endswith(f"2 done; results in {workflow.parent / 'out'}\n")


def test_a_dry_run_lists_the_jobs(workflow: Path, capsys):
    with fake_comfyui() as fake:
        assert main(arguments(fake, workflow, "--dry-run", "--set", "seed=1..3")) == 0
        assert fake.posted == []
    out, err = capsys.readouterr()
    assert out.splitlines() == [f"job {n} (seed={n})" for n in (1, 2, 3)]
    assert err == "jobs to queue: 3; queued: none (--dry-run)\n"


def test_images_are_uploaded_once_whatever_their_names(workflow: Path, tmp_path: Path, capsys):
    nodes = graph()
    nodes["load"] = {"class_type": "LoadImage", "inputs": {"image": "there.png"}}
    nodes["save"]["inputs"]["images"] = ["load", 0]
    workflow.write_text(json.dumps(nodes))
    for folder, color in (("a", "red"), ("b", "blue")):
        (tmp_path / folder).mkdir()
        Image.new("RGB", (8, 8), color).save(tmp_path / folder / "same näme.png")
    listed = tmp_path / "list.txt"
    listed.write_text("a/same näme.png\nb/same näme.png\n", encoding="utf-8")
    more = ("--set", f"image=@{listed}", "--set", "seed=1..3")
    with fake_comfyui() as fake:
        assert main(arguments(fake, workflow, *more)) == 0
        assert fake.requests.count("POST /upload/image") == 2
        used = {body["prompt"]["load"]["inputs"]["image"] for body in fake.posted}
        assert used == set(fake.uploads)
        assert set(fake.uploads.values()) == {
            (tmp_path / folder / "same näme.png").read_bytes() for folder in "ab"
        }


def test_an_upload_that_is_too_large_fails_its_job(workflow: Path, tmp_path: Path, capsys):
    nodes = graph()
    nodes["load"] = {"class_type": "LoadImage", "inputs": {"image": "a.png"}}
    nodes["save"]["inputs"]["images"] = ["load", 0]
    workflow.write_text(json.dumps(nodes))
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    with fake_comfyui(too_large=True) as fake:
        assert main(arguments(fake, workflow)) == 1
        assert fake.posted == []
    assert "a.png cannot be uploaded: " in (err := capsys.readouterr().err)
    assert "--max-upload-size" in err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_takes_our_jobs_off_the_server_and_nobody_elses(workflow: Path, number):
    with fake_comfyui() as fake:
        command = ("--json", "--set", "prompt=slow", "--set", "seed=1..3")
        process = started(fake, workflow, *command)
        until(lambda: len(fake.state.queue) == 1 and fake.state.running)
        running = fake.state.running[1]
        fake.state.queue.append([99, "other", graph(), {}, ["save"]])
        process.send_signal(number)
        out, err = process.communicate(timeout=SECONDS)
        until(lambda: "other" in fake.state.history)
        assert fake.interrupts == [running]
        assert fake.state.queue == []
        assert set(fake.state.history) == {running, "other"}
    assert process.returncode == 130
    assert [job["status"] for job in json.loads(out)["jobs"]] == ["cancelled"] * 3
    assert b"Traceback" not in err
    assert b"stopped; --resume continues this run" in err


def test_ctrl_c_while_an_answer_is_awaited_leaves_nothing_queued(workflow: Path):
    with fake_comfyui(paused=True, slow_answer=0.6) as fake:
        process = started(fake, workflow, "--set", "seed=1..3")
        until(lambda: fake.requests.count("POST /prompt") == 2)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=SECONDS)
        until(lambda: len(fake.state.queue) == 0)
        time.sleep(0.7)
        assert fake.state.queue == []
    assert process.returncode == 130


def test_ctrl_c_during_a_download_leaves_no_half_file_and_resume_fetches_it(workflow: Path):
    out = workflow.parent / "out"
    with fake_comfyui(slow_file=30) as fake:
        process = started(fake, workflow)
        until(lambda: list(out.glob(".*.part")))
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=SECONDS)
        assert process.returncode == 130
        assert [path.name for path in out.iterdir()] == ["work.submit.jsonl"]
        fake.faults.slow_file = 0
        assert main(arguments(fake, workflow, "--resume")) == 0
        assert len(fake.posted) == 1
    assert len(list(out.glob("*.png"))) == 1


def test_ctrl_c_while_a_server_is_waited_for(workflow: Path):
    with fake_comfyui(busy=10**6) as fake:
        process = started(fake, workflow, "--json")
        until(lambda: fake.requests)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 130
    assert out == b""
    assert err.endswith(b"qwen-l40s: stopped\n")


def test_a_second_ctrl_c_ends_at_once(workflow: Path):
    with fake_comfyui() as fake:
        process = started(fake, workflow, "--set", "prompt=slow")
        until(lambda: fake.state.running)
        fake.faults.busy = 10**6
        process.send_signal(signal.SIGINT)
        until(lambda: fake.faults.busy < 10**6)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=SECONDS)
    assert process.returncode == 130


def test_resume_after_a_kill_runs_only_what_is_missing(workflow: Path, capsys):
    with fake_comfyui(paused=True) as fake:
        process = started(fake, workflow, "--set", "seed=1..4")
        until(lambda: len(fake.state.queue) == 2)
        process.kill()
        process.communicate()
        fake.remove([fake.state.queue[1][1]])  # as if the server had never heard of it
        fake.faults.paused = False
        assert main(arguments(fake, workflow, "--resume", "--json", "--set", "seed=1..4")) == 0
        assert len(fake.posted) == 5
    out, err = capsys.readouterr()
    assert [job["status"] for job in json.loads(out)["jobs"]] == ["done"] * 4
    assert "0 of 4 jobs are done, 2 may still be on a server" in err
    assert len(list((workflow.parent / "out").glob("*.png"))) == 4


LORA = "style.safetensors"
LORA_LOADER = {
    "input": {"required": {"lora_name": [[LORA], {}]}},
    "output": ["MODEL"],
    "output_node": False,
}


def test_a_replaced_lora_and_again_run_jobs_that_are_done(workflow: Path, capsys):
    lora = workflow.parent / "loras" / LORA
    lora.parent.mkdir()
    lora.write_bytes(b"old")
    node = {"class_type": "LoraLoaderModelOnly", "inputs": {"lora_name": LORA}}
    workflow.write_text(json.dumps({**graph(), "lora": node}))
    journal = workflow.parent / "out" / "work.submit.jsonl"
    knows = {"LoraLoaderModelOnly": LORA_LOADER}
    with fake_comfyui(folders=(lora.parent, Path("/nowhere")), knows=knows) as fake:

        def ran(*more: str) -> tuple[int, str]:
            before = len(fake.posted)
            assert main(arguments(fake, workflow, "--set", "seed=1..2", "--json", *more)) == 0
            out, err = capsys.readouterr()
            assert [job["status"] for job in json.loads(out)["jobs"]] == ["done", "done"]
            return len(fake.posted) - before, err

        assert ran()[0] == 2
        assert ran()[0] == ran("--resume")[0] == 0
        lora.write_bytes(b"replaced")
        count, log = ran("--resume")
        assert count == 2 and f"{lora} was replaced since an earlier run; 2 jobs run again\n" in log
        assert ran()[0] == 0
        assert ran("--again")[0] == 2
        assert ran("--resume")[0] == 0
        entries = list(map(json.loads, journal.read_text().splitlines()))
        assert len({entry["key"] for entry in entries if "key" in entry}) == 2
        for entry in entries:
            entry.pop("local", None)  # as an older version wrote them
        journal.write_text("".join(f"{json.dumps(entry)}\n" for entry in entries))
        lora.write_bytes(b"replaced again")
        assert ran("--resume")[0] == 0


def test_again_and_resume_are_two_wishes(workflow: Path):
    with pytest.raises(SystemExit):
        main(arguments(None, workflow, "--again", "--resume"))


def test_a_reader_that_leaves_ends_no_run(workflow: Path):
    with fake_comfyui(paused=True) as fake:
        process = started(fake, workflow, "--set", "seed=1..4")
        process.stdout.close()
        process.stderr.close()
        until(lambda: len(fake.state.queue) == 2)
        fake.faults.paused = False
        assert process.wait(timeout=SECONDS) == 0
    assert len(list((workflow.parent / "out").glob("*.png"))) == 4


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full is a file of Linux")
def test_a_log_on_a_full_disk_ends_no_run(workflow: Path):
    with fake_comfyui() as fake, open("/dev/full", "w") as full:
        command = [sys.executable, str(ROOT), *arguments(fake, workflow, "--set", "seed=1..4")]
        assert subprocess.run(command, stdout=full, stderr=full, timeout=SECONDS).returncode == 0
    assert len(list((workflow.parent / "out").glob("*.png"))) == 4


def test_a_terminal_without_unicode_gets_escapes(workflow: Path):
    with fake_comfyui() as fake:
        listed = workflow.parent / "prompts.txt"
        listed.write_text("猫\nfail\n", encoding="utf-8")
        more = ("--set", f"prompt=@{listed}")
        process = started(fake, workflow, *more, PYTHONIOENCODING="ascii", PYTHONUTF8="0")
        out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 1
    assert b"job 1 (prompt=\\u732b): " in out
    assert b"job 2 (prompt=fail) failed" in err


def test_names_of_nodes_and_folders_cannot_steer_the_terminal(workflow: Path, capsys):
    steers, given = "\x1b[2J\x9b", graph()
    given |= {"x": {"class_type": f"Class{steers}", "inputs": {}, "_meta": {"title": steers}}}
    other = workflow.with_name(f"{steers}.json")
    for content in (given, {"x": {"class_type": steers}}, {steers: {}}):
        other.write_text(json.dumps(content))
        with fake_comfyui() as fake:
            assert main(arguments(fake, other)) == 2
    with fake_comfyui() as fake:
        more = ("--output", str(workflow.parent / f"to{steers}"))
        assert main(arguments(fake, workflow, *more)) == 0
    out, err = capsys.readouterr()
    assert err.count("\\x1b[2J") >= 4 and not {"\x1b", "\x9b"} & {*out, *err}


def test_without_the_packages_it_says_what_to_install(workflow: Path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert main(["submit", str(workflow)]) == 2
    err = capsys.readouterr().err
    assert f'pillow, which is not installed: run `pip install ".[client]"` in {ROOT}, or use' in err
