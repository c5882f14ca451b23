"""The table of planted faults, and the runner without the tests that it runs."""

import re
import sys

import pytest

from qwen_l40s.tools import faults
from qwen_l40s.tools.faults import Fault

FAULTS = faults.read_faults(faults.TABLE.read_text(encoding="utf-8"))
FAULT = Fault("a one too many", "product.py", ("tests/unit/test_a.py",), "one = 1", "one = 2")
TEXT = "one = 1\ntwo = 2\n"


def test_the_table_is_whole():
    assert len(FAULTS) >= 65
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    assert all(len({test.split("/")[1] for test in fault.tests}) == 1 for fault in FAULTS)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_of_the_table(fault):
    assert (faults.ROOT / fault.file).read_text(encoding="utf-8").count(fault.old) == 1
    assert fault.new.strip() and fault.new != fault.old
    for test in fault.tests:
        file, _, name = test.partition("::")
        text = (faults.ROOT / file).read_text(encoding="utf-8")
        assert not name or re.search(rf"^def {re.escape(name)}\(", text, re.MULTILINE)


@pytest.mark.parametrize(
    ("code", "output", "expected"),
    [
        (1, "FAILED tests/unit/test_a.py::test_b - assert 2 == 1\n1 failed in 0.1s", "caught by "),
        (0, "..\n3 passed in 0.1s\n", "NOT CAUGHT: 3 passed in 0.1s"),
        (4, "ERROR: not found: test_a.py\n\nno tests ran in 0.1s", "NOT CAUGHT: no tests ran"),
    ],
)
def test_what_pytest_says(tmp_path, monkeypatch, code, output, expected):
    def run_tests(copy, arguments):
        assert (copy, arguments) == (tmp_path, ("-x", *FAULT.tests))
        assert path.read_text() == "one = 2\ntwo = 2\n"
        return code, output

    path = tmp_path / FAULT.file
    path.write_text(TEXT)
    monkeypatch.setattr(faults, "run_tests", run_tests)
    caught, words = faults.run_one(tmp_path, FAULT)
    assert caught == (code == 1) and words.startswith(expected)


@pytest.mark.parametrize("text", ["", TEXT + TEXT, None])
def test_a_text_that_is_not_there_once(tmp_path, text):
    if text is not None:
        (tmp_path / FAULT.file).write_text(text)
    assert faults.run_one(tmp_path, FAULT)[1].startswith("TEXT NOT FOUND")


@pytest.mark.parametrize("caught", [True, False])
def test_each_fault_has_a_line_and_the_answer_is_the_exit_code(monkeypatch, capsys, caught):
    def run_all(chosen):
        yield from ((fault, caught, "words") for fault in chosen)

    monkeypatch.setattr(faults, "run_all", run_all)
    monkeypatch.setattr(sys, "argv", ["faults", "--only", FAULTS[0].name])
    assert faults.main() == (not caught)
    assert f"{FAULTS[0].name}: words\n{int(caught)} of 1 caught" in capsys.readouterr().out
