"""The runner of `make test-next`, without its environment: what it reads, and what is broken."""

from subprocess import CalledProcessError
from types import SimpleNamespace

import pytest

from qwen_l40s.tools import newest

REPORT = """<testsuites><testsuite>
<testcase classname="tests.unit.test_a" name="test_passes"/>
<testcase classname="tests.unit.test_a" name="test_skipped"><skipped message="no card"/></testcase>
<testcase classname="tests.unit.test_a" name="test_fails"><failure message="1 is&#10;  not 2"/>
</testcase>
<testcase classname="tests.unit.test_b" name="test_b"><error message="no module"/></testcase>
</testsuite></testsuites>"""
FAULTS = [
    ("tests.unit.test_a::test_fails", "1 is not 2"),
    ("tests.unit.test_b::test_b", "no module"),
]
EMPTY = "<testsuites/>"
PASSED = '<testsuites><testcase classname="a" name="b"/></testsuites>'


def test_no_index(monkeypatch):
    def pip(_):
        raise CalledProcessError(1, ["pip"])

    monkeypatch.setattr(newest, "install", pip)
    monkeypatch.setattr("sys.argv", ["newest"])
    with pytest.raises(SystemExit, match=r"^pip could not install .*: connect a package index$"):
        newest.main()


def test_names_of_requirements():
    text = """# comment
comfyui-frontend-package==1.49.6
torch
numpy>=1.25.0

SQLAlchemy>=2.0.0,<3
av ; sys_platform == "linux"
--extra-index-url https://example.org
git+https://example.org/a.git
glfw
"""
    names = ["comfyui-frontend-package", "torch", "numpy", "SQLAlchemy", "av", "glfw"]
    assert newest.names_in(text) == names


def test_a_report(tmp_path):
    path = tmp_path / "unit.xml"
    path.write_text(REPORT)
    assert newest.read_report(path) == (3, FAULTS)


@pytest.mark.parametrize(
    ("code", "report", "expected"),
    [
        (0, PASSED, (1, [])),
        (1, REPORT, (3, FAULTS)),
        (3, PASSED, (1, [("tests/page", "pytest ended with 3: the end")])),
        (5, EMPTY, (0, [("tests/page", "pytest ended with 5: the end")])),
        (0, EMPTY, (0, [("tests/page", "pytest ended with 0: the end")])),
        (0, None, (0, [("tests/page", "pytest ended with 0: the end")])),
    ],
)
def test_a_suite(tmp_path, monkeypatch, code, report, expected):
    def pytest_run(command, **more):
        assert "tests/page" in command
        if report is not None:
            (tmp_path / "page.xml").write_text(report)
        return SimpleNamespace(returncode=code, stdout="first\nthe end\n", stderr="")

    monkeypatch.setattr(newest, "ENVIRONMENT", tmp_path)
    monkeypatch.setattr(newest.subprocess, "run", pytest_run)
    assert newest.run("page", "2") == expected
