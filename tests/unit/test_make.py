"""`make install`: one set-up for everyone, and one sentence with the way on where it ends."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest brings it on 3.10

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CONSTRAINTS = [
    Requirement(line)
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    if not line.startswith("#")
]
OF_TORCH = re.compile(r"torch|triton|nvidia-|cuda-")
# For `-c` it is of that version; its virtual environments are empty, as pip comes from PYTHONPATH.
STAND_IN = """#!/bin/sh
case "$1 $2" in
--version*) echo Python {version} ;;
-c*) exec {python} -c "import sys; sys.version_info = *map(int, '{version}'.split('.')),; $2" ;;
"-m venv") shift 2; exec {python} -m venv --without-pip "$@" ;;
esac
"""


def install(folder, version="3.12.1", **variables):
    """What `make install` writes to stderr in a clone where pip has only the clone's own files."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, folder)
    python, packages = folder / "stand-in", folder / "packages"
    python.write_text(STAND_IN.format(version=version, python=shlex.quote(sys.executable)))
    python.chmod(0o755)
    packages.mkdir()
    pip = pytest.importorskip("pip")
    (packages / "pip").symlink_to(Path(pip.__file__).parent)
    local = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": ".", "PIP_CONFIG_FILE": "/dev/null"}
    done = subprocess.run(
        ["make", "install", "PYTHON=./stand-in", *(f"{n}={v}" for n, v in variables.items())],
        cwd=folder,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(packages), **local},
        capture_output=True,
        text=True,
    )
    assert done.returncode and not (folder / ".venv" / "built-for").exists()
    [sentence, made] = done.stderr.splitlines()
    assert sentence.startswith("make: ") and made.startswith("make: ***")
    return sentence


@pytest.fixture
def clone(tmp_path):
    folder = tmp_path / "a clone"
    folder.mkdir()
    return folder


@pytest.mark.parametrize("version", ["3.9.25", "3.15.0"])
def test_a_python_without_versions(clone, version):
    sentence = install(clone, version)
    assert f"Python {version}" in sentence and "PYTHON=" in sentence


@pytest.mark.slow
def test_an_index_that_lacks_what_is_asked_for(clone):
    with zipfile.ZipFile(clone / "torch-1.0-py3-none-any.whl", "w") as file:
        file.writestr("torch-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: torch\n")
    sentence = install(clone, TORCH="torch==99")
    assert "torch==99" in sentence and "TORCH=" in sentence
    assert "1.0" in (clone / ".venv" / "pip.log").read_text()


def test_torch_has_its_version_in_the_makefile_alone():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert re.search(r"^TORCH \?= torch==[0-9.]+$", makefile, re.MULTILINE)
    for name in (".ci/run", ".github/workflows/test.yml"):
        assert "TORCH" not in (ROOT / name).read_text(encoding="utf-8")
    assert not [line for line in CONSTRAINTS if OF_TORCH.match(line.name)]


@pytest.mark.parametrize("python", ["3.10", "3.11", "3.12", "3.13", "3.14"])
def test_one_exact_version_of_everything_else(python):
    """For each package that `.[dev]` names; what these bring is in the file that resolved them."""
    here = {"python_version": python, "python_full_version": f"{python}.0"}
    versions = {
        line.name: str(line.specifier)
        for line in CONSTRAINTS
        if line.marker is None or line.marker.evaluate(here)
    }
    assert all(re.fullmatch(r"==[0-9.]+", version) for version in versions.values())
    extras = PROJECT["optional-dependencies"]
    for text in extras["standalone"] + extras["client"] + extras["dev"]:
        asked = Requirement(text)
        if not OF_TORCH.match(asked.name) and asked.name != PROJECT["name"]:
            assert versions[asked.name].removeprefix("==") in SpecifierSet(str(asked.specifier))
