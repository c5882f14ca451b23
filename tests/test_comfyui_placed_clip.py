"""The text encoder's placement and memory in the real ComfyUI: tests/comfyui_placed_clip.py, one
test for each check, on the processor and, where there is one, on a card.

Needs a ComfyUI that COMFYUI_PATH names, or one in ~/ComfyUI.
"""

import json

import pytest
from comfyui_host import MODES, checks_in, run_in_comfyui

SCRIPT = "comfyui_placed_clip.py"
CHECKS = checks_in(SCRIPT)


@pytest.fixture(scope="module", params=MODES)
def results(request, tmp_path_factory) -> dict[str, str | None]:
    """{check: None or its traceback}"""
    printed = run_in_comfyui(SCRIPT, tmp_path_factory.mktemp("placed_clip"), request.param)
    return json.loads(printed.splitlines()[-1])


@pytest.mark.parametrize("check", CHECKS)
def test_in_comfyui(results, check):
    assert results[check] is None, results[check]


def test_every_check_ran(results):
    assert set(results) == set(CHECKS)
