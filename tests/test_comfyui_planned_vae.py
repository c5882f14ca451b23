"""Planned decoding and encoding against ComfyUI's own nodes, in the real ComfyUI:
tests/comfyui_planned_vae.py, one test for each check, on the processor and, where there is one, on
a card.

Needs a ComfyUI that COMFYUI_PATH names, or one in ~/ComfyUI.
"""

import json

import pytest
from comfyui_host import MODES, checks_in, run_in_comfyui

SCRIPT = "comfyui_planned_vae.py"
CHECKS = checks_in(SCRIPT)


@pytest.fixture(scope="module", params=MODES)
def results(request) -> dict[str, str | None]:
    """{check: None or its traceback}"""
    return json.loads(run_in_comfyui(SCRIPT, request.param).splitlines()[-1])


@pytest.mark.parametrize("check", CHECKS)
def test_in_comfyui(results, check):
    assert results[check] is None, results[check]


def test_every_check_ran(results):
    assert set(results) >= set(CHECKS)
