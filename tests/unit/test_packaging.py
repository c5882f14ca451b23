"""What the wheel holds, and that the package works installed, from a clone and as a custom node."""

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

import qwen_l40s
from qwen_l40s.machine import packages as software

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest brings it on 3.10

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
# Neither in the wheel nor, for the most part, Python.
NOT_PACKAGES = {"tests", "bench", "tools", "docs", "build", "dist", "out"}
LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "out")
NO_PYTHONPATH = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
FROM_SOURCE = "from setuptools.build_meta import build_sdist; build_sdist('sdist')"


def run(command, *, folder, expect=0, **environment):
    """Runs a command in an empty place and gives its stdout."""
    env = {**NO_PYTHONPATH, **environment}
    command = [str(part) for part in command]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=env, check=False)
    assert done.returncode == expect, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A copy of the tree, as a clone has it; building would write into the tree itself."""
    return shutil.copytree(ROOT, tmp_path_factory.mktemp("clone") / "source", ignore=LEFT_OUT)


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory):
    """The wheel, built without asking an index for anything."""
    folder = tmp_path_factory.mktemp("wheel")
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--wheel-dir", folder]
    run([sys.executable, "-m", "pip", "wheel", *options, source], folder=folder)
    [built] = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """A folder to put on PYTHONPATH, with the wheel and none of its dependencies in it."""
    folder = tmp_path_factory.mktemp("installed")
    options = ["--no-deps", "--no-index", "--quiet", "--target", folder]
    run([sys.executable, "-m", "pip", "install", *options, wheel], folder=folder)
    return folder


@pytest.fixture(scope="module")
def custom_node(tmp_path_factory):
    """The tree as ComfyUI users have it, in a folder whose name is no Python name."""
    folder = tmp_path_factory.mktemp("comfyui") / "custom_nodes" / "my-pack.v2"
    return shutil.copytree(ROOT, folder, ignore=LEFT_OUT)


def python_folders():
    """Every folder of the package that holds Python files, by its import name."""
    found = set()
    for file in ROOT.rglob("*.py"):
        parts = file.relative_to(ROOT).parts[:-1]
        if not any(part in NOT_PACKAGES or part.startswith(".") for part in parts):
            found.add(".".join(("qwen_l40s", *parts)))
    return found


def test_every_folder_with_python_files_is_a_listed_package():
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == python_folders()


def test_versions_agree():
    assert PROJECT["project"]["version"] == qwen_l40s.__version__


def test_one_package_is_installed_into_a_comfyui():
    """It needs no other, and only where it has a wheel."""
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    [line] = [line for line in lines if line.strip() and not line.startswith("#")]
    assert PROJECT["project"]["dependencies"] == [line.replace('"', "'")]
    name, _, marker = line.partition("; ")
    assert name == software.ISAL.requirement
    machines = re.fullmatch(r'platform_machine in "(.+)"', marker)[1].split()
    assert machines == ["x86_64", "AMD64", "aarch64", "arm64"]  # Linux, Windows, Linux, macOS
    try:
        assert all("extra ==" in each for each in importlib.metadata.requires("isal") or ())
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("isal is not installed here")


def test_doctor_asks_for_what_the_standalone_extra_installs():
    listed = set(PROJECT["project"]["optional-dependencies"]["standalone"])
    assert listed == {package.requirement for package in (software.TORCH, *software.STANDALONE)}


def test_comfyui_floor_is_the_one_that_doctor_checks():
    floor = ".".join(map(str, software.COMFYUI_FLOOR))
    assert PROJECT["tool"]["comfy"]["requires-comfyui"] == f">={floor}"


@pytest.mark.slow
def test_wheel_holds_the_package_the_micro_model_and_nothing_else(wheel, source):
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    expected = {
        f"qwen_l40s/{file.relative_to(source).as_posix()}"
        for file in [
            *source.rglob("*.py"),
            *(source / "models").rglob("*"),
            *(source / "planning").glob("*.json"),
        ]
        if file.is_file() and file.relative_to(source).parts[0] not in NOT_PACKAGES
    }
    assert names == expected
    assert "qwen_l40s/models/micro/model_index.json" in names
    assert "qwen_l40s/planning/gpus.json" in names


@pytest.mark.slow
def test_wheel_metadata(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        [metadata] = [name for name in names if name.endswith(".dist-info/METADATA")]
        text = archive.read(metadata).decode()
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    assert "License-Expression: Apache-2.0" in text
    required = re.findall(r"^Requires-Dist: (.*)$", text, re.MULTILINE)
    always = [line.partition(">")[0] for line in required if "extra ==" not in line]
    assert always == ["isal"] and len(required) > 1


@pytest.mark.slow
def test_source_distribution_builds_the_same_wheel(source, wheel, tmp_path):
    copy = shutil.copytree(source, tmp_path / "copy")
    run([sys.executable, "-c", FROM_SOURCE], folder=copy)
    [archive] = (copy / "sdist").glob("*.tar.gz")
    with tarfile.open(archive) as file:
        names = [name.partition("/")[2] for name in file.getnames()]
        file.extractall(tmp_path / "unpacked")
    assert not [name for name in names if name.startswith(("tests", ".", "out", "build"))]
    [unpacked] = (tmp_path / "unpacked").iterdir()
    options = [
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "--quiet",
        "--wheel-dir",
        tmp_path,
    ]
    run([sys.executable, "-m", "pip", "wheel", *options, unpacked], folder=tmp_path)
    with zipfile.ZipFile(wheel) as first, zipfile.ZipFile(tmp_path / wheel.name) as second:
        assert sorted(first.namelist()) == sorted(second.namelist())


@pytest.mark.slow
def test_installed_command(installed, tmp_path):
    script = installed / "bin" / "qwen-l40s"
    check_command(
        [sys.executable, script], tmp_path, installed / "qwen_l40s", PYTHONPATH=str(installed)
    )


@pytest.mark.slow
def test_installed_audit_and_benchmarks(installed, tmp_path):
    """The micro model's judge is in the wheel; benchmarks are not, which is one sentence."""
    pytest.importorskip("torch")
    environment = {**NO_PYTHONPATH, "PYTHONPATH": str(installed)}
    command = [sys.executable, "-m", "qwen_l40s"]
    bench = subprocess.run(
        [*command, "bench", "forward"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
    )
    assert (bench.returncode, bench.stdout) == (2, "")
    [sentence] = bench.stderr.splitlines()
    assert (
        "bench forward is not in the installed package: run `python FOLDER bench forward`"
        in sentence
    )
    audit = [*command, "audit", "--device", "cpu", "--steps", "1", "--prompt", "a red circle"]
    painted = run([*audit, "--json"], folder=tmp_path, PYTHONPATH=str(installed))
    assert json.loads(painted.splitlines()[-1])


@pytest.mark.slow
def test_folder_of_any_name(custom_node, tmp_path):
    check_version_of_folder(custom_node, tmp_path)
    check_command([sys.executable, custom_node], tmp_path, custom_node)


def check_version_of_folder(folder, tmp_path):
    """`python folder` runs the folder's own code, also where another copy is installed."""
    copy = shutil.copytree(folder, tmp_path / folder.name)
    file = copy / "version.py"
    file.write_text('__version__ = "99.1.2"\n', encoding="utf-8")
    assert run([sys.executable, copy, "--version"], folder=tmp_path) == "qwen-l40s 99.1.2\n"


def check_command(command, tmp_path, package, **environment):
    """The command says its version, inspects the micro model beside it and paints with it."""
    version = run([*command, "--version"], folder=tmp_path, **environment)
    assert version == f"qwen-l40s {qwen_l40s.__version__}\n"
    micro = package / "models" / "micro"
    inspect = run([*command, "inspect", micro, "--json"], folder=tmp_path, **environment)
    assert str(micro) in json.dumps(json.loads(inspect))
    if find_spec("torch") is None:
        return
    painting = [*command, "demo", "--steps", "2", "--json", "--output", tmp_path / "two steps.png"]
    report = json.loads(run(painting, folder=tmp_path, **environment).splitlines()[-1])
    assert report["steps"] == 2
    assert Path(report["image"]).read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_comfyui_imports_it_under_a_path_for_a_name(custom_node, tmp_path):
    """As ComfyUI's nodes.py does: the module's name is its path, with each dot replaced."""
    code = """
import importlib, importlib.util, os, sys
path = sys.argv[1]
name = path.replace(".", "_x_")
spec = importlib.util.spec_from_file_location(name, os.path.join(path, "__init__.py"))
module = sys.modules[name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
cli = importlib.import_module(name + ".cli")
cli.build_parser(cli.COMMANDS)
heavy = {"torch", "numpy", "diffusers", "transformers", "aiohttp", "PIL", "tqdm"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
copies = [other for other in sys.modules if other.partition(".")[0] == "qwen_l40s"]
assert not copies, copies
"""
    run([sys.executable, "-c", code, custom_node], folder=tmp_path)
