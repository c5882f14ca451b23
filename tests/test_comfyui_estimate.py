"""The estimator's nodes in the real ComfyUI: what tests/comfyui_estimate.py checks of them, and
tests/comfyui_true_sizes.py of what is wired into them, one test for each check.

Needs a ComfyUI: the one that COMFYUI_PATH names, or one in ~/ComfyUI.
"""

import json

import pytest
from comfyui_host import MODES, checks_in, run_in_comfyui

NODES, SIZES = "comfyui_estimate.py", "comfyui_true_sizes.py"


@pytest.fixture(scope="module")
def of_nodes(tmp_path_factory) -> dict[str, str | None]:
    """{check: None or its traceback}"""
    folder = tmp_path_factory.mktemp("base")
    return json.loads(run_in_comfyui(NODES, folder).splitlines()[-1])


@pytest.fixture(scope="module", params=MODES)
def of_sizes(request, tmp_path_factory) -> dict[str, str | None]:
    """The same, on the processor and where there is one on a card."""
    folder = tmp_path_factory.mktemp("sizes")
    return json.loads(run_in_comfyui(SIZES, folder, request.param).splitlines()[-1])


@pytest.mark.parametrize("check", checks_in(NODES))
def test_nodes(of_nodes, check):
    assert of_nodes[check] is None, of_nodes[check]


@pytest.mark.parametrize("check", checks_in(SIZES))
def test_true_sizes(of_sizes, check):
    assert of_sizes[check] is None, of_sizes[check]


def test_every_check_ran(of_nodes, of_sizes):
    assert sorted(of_nodes) == sorted(checks_in(NODES))
    assert sorted(of_sizes) == sorted(checks_in(SIZES))
