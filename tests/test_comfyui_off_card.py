"""Modulation weights that stay off the card, in the real ComfyUI: tests/comfyui_off_card.py, one
test for each of its checks, on the processor, on a card, and under dynamic VRAM.

Needs a ComfyUI: the one that COMFYUI_PATH names, or one in ~/ComfyUI.
"""

import json

import pytest
from comfyui_host import MODES, checks_in, run_in_comfyui

SCRIPT = "comfyui_off_card.py"
CHECKS = checks_in(SCRIPT)
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module", params=MODES)
def results(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("off_card")
    return json.loads(run_in_comfyui(SCRIPT, folder, request.param))


def test_every_check_has_run(results):
    assert sorted(results) == sorted(CHECKS)


@pytest.mark.parametrize("check", CHECKS)
def test_off_card(results, check):
    assert results[check] is None, results[check]
