"""The nodes in the real ComfyUI: what tests/comfyui_nodes.py checks of the loaders and
tests/comfyui_save.py of SaveQuantized, one test for each check.

Needs a ComfyUI: the one that `qwen-l40s doctor` finds, through COMFYUI_PATH or in ~/ComfyUI.
"""

import json

import pytest
from comfyui_host import checks_in, run_in_comfyui

SCRIPTS = ("comfyui_nodes.py", "comfyui_save.py")
CHECKS = {script: checks_in(script) for script in SCRIPTS}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str | None]]:
    """{script: {check: None or its traceback}}"""
    return {
        script: json.loads(run_in_comfyui(script, tmp_path_factory.mktemp("base")).splitlines()[-1])
        for script in SCRIPTS
    }


@pytest.mark.parametrize(
    ("script", "check"), [(script, check) for script in SCRIPTS for check in CHECKS[script]]
)
def test_in_comfyui(results, script, check):
    assert results[script][check] is None, results[script][check]


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_check_ran(results, script):
    assert list(results[script]) == CHECKS[script]
