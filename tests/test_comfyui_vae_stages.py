"""ComfyUI's VAE in pieces against its own decode and encode: tests/comfyui_vae_stages.py, one test
for each check.

Needs a ComfyUI that COMFYUI_PATH names, or one in ~/ComfyUI.
"""

import json

import pytest
from comfyui_host import MODES, checks_in, run_in_comfyui

SCRIPT = "comfyui_vae_stages.py"
CHECKS = checks_in(SCRIPT)


@pytest.fixture(scope="module", params=MODES)
def results(request) -> dict[str, str | None]:
    """{check: None or its traceback}"""
    return json.loads(run_in_comfyui(SCRIPT, request.param).splitlines()[-1])


@pytest.mark.parametrize("check", CHECKS)
def test_in_comfyui(results, check):
    assert results[check] is None, results[check]


def test_every_check_ran(results):
    assert set(results) == set(CHECKS)
