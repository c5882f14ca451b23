"""docs/fleet.md and the commands of all pages: each is read by the tool it is for."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from qwen_l40s.cli import COMMANDS, build_parser

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "fleet.md"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# However the command is called, up to what ends a command in a shell.
COMMAND = re.compile(
    r'(?:qwen-l40s|python \.|comfyui-qwen-image-l40s|"\$pack") '
    rf"((?:{'|'.join(COMMANDS)})\b[^\n>|&;)`]*)"
)


def text_of(page):
    return page.read_text(encoding="utf-8").replace("\\\n", " ")


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text("utf-8"), re.M | re.S)


def commands(page):
    """Finds whole commands: of a sentence those that have an option, of which N is a number."""
    fence = re.compile(r"^```.*?^```", re.M | re.S)
    text = text_of(page)
    inline = re.findall(r"`[^`\n]+ -[^`\n]+`", fence.sub("", text))
    return COMMAND.findall("\n".join((*fence.findall(text), *inline)))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_commands_have_the_parsers_options(page):
    for command in commands(page):
        words = shlex.split(re.sub(r"\bN\b", "1", command))
        build_parser(words).parse_args(words)


def test_the_shell_can_read_every_script():
    for script in blocks(PAGE, "bash"):
        done = subprocess.run(
            ["bash", "-n"], input=script, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{script}\n{done.stderr}"


@pytest.mark.skipif(sys.platform != "linux", reason="the tests have Ray on Linux alone")
def test_ray_start_has_the_options():
    scripts = pytest.importorskip("ray.scripts.scripts", reason="which is not installed")
    options = {option for each in scripts.start.params for option in each.opts}
    named = re.findall(r"ray start((?: [^`\n]*)?)", text_of(PAGE))
    assert {
        word.partition("=")[0] for part in named for word in part.split() if "--" in word
    } <= options
