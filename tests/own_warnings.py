"""Warnings of this project are errors in its tests; those of other packages fail none."""

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
# Modules by their name; a file that is compiled, by its path.
OURS = "|".join(
    [
        r"(qwen_l40s|tests|test_\w+)(\.|$)",
        f"({'|'.join(file.stem for file in TESTS.glob('*.py'))})$",
        rf"{re.escape(str(TESTS.parent))}/(?!\.)",
    ]
)
# What these tell of is an exception in a thread or as an object ends.
UNCAUGHT = "UnhandledThreadException", "UnraisableException"


def fail_tests(config: pytest.Config) -> None:
    """Makes our warnings errors, after the filters of the ini file."""
    for line in (f"error:::{OURS}", *(f"error::pytest.Pytest{name}Warning" for name in UNCAUGHT)):
        config.addinivalue_line("filterwarnings", line)
