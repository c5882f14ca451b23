"""What the Comfy registry would publish: git's files but for .comfyignore's, and what its scan
would say of them.

The rules are a replica from what authors report, applied as plain text to each file. No finding is
removed by another spelling; `.train(False)` for `.eval()` would be the one exception, and nothing
that ships needs it.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from comfyui_host import comfyui_folder, comfyui_python

ROOT = Path(__file__).resolve().parents[2]
RULES = {
    "environment": r"os\.environ|os\.getenv|(?<![\w.])getenv\(|environ\[|environ\.get",
    "network": r"\.connect\s*\(|\.bind\s*\(|\.(?:send(?:all|to)?|recv(?:from|_into)?)\s*\(|"
    r"aiohttp\s*\.\s*ClientSession|urllib\.request|urlopen|urlretrieve|http\.client|"
    r"socket\.socket\s*\(|create_connection|requests\.(?:get|post)",
    "process": r"subprocess\.(?:run|Popen|call|check_output|check_call)|os\.system\s*\(|"
    r"os\.popen\s*\(|create_subprocess",
    "dynamic code": r"(?<!\w)(?:eval|exec)\s*\(|__import__\s*\(|marshal\.loads|pickle\.loads",
    "bytecode": r"(?<![\w.])compile\s*\(|sys\.modules\.get",
    "privilege": r"(?<![\w-])(?:sudo|doas|pkexec|runas|setuid)(?![\w-])",
    "windows processes": r"kernel32|OpenProcess|CreateProcess",
    "address": r"raw\.githubusercontent\.com",
}
LEFT_OUT = (
    "client",
    "fleet",
    "hosts/diffusers",
    "tests",
    "bench",
    "tools",
    "docs",
    ".ci",
    ".github",
)


def published() -> list[str]:
    """The files of the archive, as paths from the root."""

    def listed(*options: str) -> set[str]:
        command = ["git", "-C", str(ROOT), "ls-files", "-z", *options]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip("no git repository")
        return set(done.stdout.split("\0")) - {""}

    out = listed("-i", "-c", f"--exclude-from={ROOT / '.comfyignore'}")
    return sorted(name for name in listed() - out if (ROOT / name).is_file())


def findings(name: str) -> list[str]:
    try:
        text = (ROOT / name).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return []
    return [
        f"{rule}: {found.group()}" for rule, it in RULES.items() for found in re.finditer(it, text)
    ]


def test_the_scan_finds_nothing_in_what_is_published():
    assert {name: found for name in published() if (found := findings(name))} == {}


def test_nothing_that_is_left_out_is_published_and_nothing_else_is_left_out():
    names = published()
    assert [name for name in names if name.startswith(tuple(f"{it}/" for it in LEFT_OUT))] == []
    assert {"README.md", "LICENSE", "pyproject.toml", "requirements.txt", "web/qwen_l40s.js"} < {
        *names
    }
    assert {"models/micro/README.md", "workflows/estimate.json", "measure/calibrate.py"} < {*names}


@pytest.fixture(scope="module")
def pack(tmp_path_factory):
    """What is published, alone, in a folder that ComfyUI might have."""
    folder = tmp_path_factory.mktemp("我的 ComfyUI") / "custom_nodes" / "qwen image.v2"
    for name in published():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, folder / name)
    return folder


def command(pack: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, str(pack), *arguments]
    return subprocess.run(
        words, capture_output=True, text=True, encoding="utf-8", cwd=pack.parent, check=False
    )


@pytest.mark.slow
def test_its_command_works_alone(pack):
    estimate = command(pack, "estimate", "--card", "L40S", "--size", "1024x1024", "--json")
    assert estimate.returncode == 0, estimate.stderr
    inspect = command(pack, "inspect", str(pack / "models" / "micro"))
    assert inspect.returncode == 0 and "Qwen-Image" in inspect.stdout, inspect.stderr
    doctor = command(pack, "doctor")
    file = pack.parents[1] / "user" / "qwen-l40s.json"
    assert f"settings: all default (no {file})" in doctor.stdout
    assert "limited     folder: qwen image.v2: the page may not find" in doctor.stdout
    assert command(pack, "quantize", "--help").returncode == 0


@pytest.mark.slow
def test_rates_are_measured_alone(pack):
    pytest.importorskip("torch")
    small = command(pack, "bench", "--calibrate", "--device", "cpu", "--width", "small")
    assert small.returncode == 0 and "launch_seconds" in small.stdout, small.stderr


@pytest.mark.slow
def test_comfyui_imports_it_alone_and_under_two_names(pack):
    """A second copy lies in a folder with another name; a settings file is damaged."""
    comfyui = comfyui_folder()
    twin = pack.with_name("另一个")
    if not twin.exists():
        shutil.copytree(pack, twin, ignore=shutil.ignore_patterns("__pycache__"))
    settings = pack.parents[1] / "user" / "qwen-l40s.json"
    settings.parent.mkdir(exist_ok=True)
    settings.write_text('{"version": 9}', encoding="utf-8")
    words = ["--cpu", "--quick-test-for-ci", "--base-directory", str(pack.parents[1])]
    words += ["--database-url", "sqlite:///:memory:"]
    done = subprocess.run(
        [str(comfyui_python(comfyui)), str(comfyui / "main.py"), *words],
        capture_output=True,
        text=True,
        encoding="utf-8",
        cwd=pack.parents[1],
        check=False,
    )
    settings.unlink()
    said = done.stdout + done.stderr
    assert done.returncode == 0 and "IMPORT FAILED" not in said, said[-3000:]
    for folder in (pack, twin):
        assert re.search(rf"seconds: {re.escape(str(folder))}\n", said), said[-3000:]


@pytest.mark.parametrize("name", ["audit", "demo", "fleet", "generate", "submit"])
def test_a_command_that_was_left_out_says_where_it_is(pack, name):
    done = command(pack, name, "--help")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert (
        f"error: {name} is not in an install by ComfyUI's manager: run `python FOLDER "
        in done.stderr
    )
    listed = " ".join(command(pack, "--help").stdout.split())
    assert f"{name} " in listed and listed.count("(in a clone)") == 5


def test_the_archive_is_small():
    assert sum((ROOT / name).stat().st_size for name in published()) < 30 * 2**20
