"""`qwen-l40s bench` and its programs with ComfyUI, on the CPU and small."""

import contextlib
import io
import json
import re

import pytest

from qwen_l40s.bench.rows import FORWARD
from qwen_l40s.cli import main

SMALL = ["--device", "cpu", "--width", "small", "--text", "5", "--repeats", "2"]
RUNS = {
    "forward": "forward --size 64x32 --layers 2 --batch 2",
    "edit": "forward --size 32x32 --layers 1 --references 1 --repeats 1 --only *?bf16",
    "image": "image --size 256x256 --layers 1 --steps 11 --repeats 1 --only *?bf16",
}


@pytest.fixture(scope="module")
def in_comfyui():
    """{what is measured: (exit code, the command's last line)}"""
    results = {}
    for name, arguments in RUNS.items():
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            code = main(["bench", *SMALL, *arguments.split()])
        results[name] = code, json.loads(printed.getvalue().splitlines()[-1])
    return results


def rows_of(in_comfyui, name):
    code, results = in_comfyui[name]
    rows = {row["name"]: row for row in results["rows"]}
    assert [row for row in rows.values() if "error" in row] == []
    assert code == 0
    return rows


def test_every_row_of_a_forward_pass_is_measured(in_comfyui):
    rows = rows_of(in_comfyui, "forward")
    assert set(rows) == {row.name for row in FORWARD}
    conditions = in_comfyui["forward"][1]["conditions"]
    assert conditions["left_out"] == {}
    assert conditions["card"] == "CPU"
    assert conditions["software"]["ComfyUI"] and conditions["commit"]
    assert conditions["layers"] == 2
    for row in rows.values():
        assert (row["size"], row["batch"]) == ("64x32", 2)
        assert len(row["samples_ms"]) == 2
        assert min(row["samples_ms"]) <= row["ms"] <= max(row["samples_ms"])


def test_errors_are_those_of_the_same_weights_and_inputs(in_comfyui):
    rows = rows_of(in_comfyui, "forward")
    limits = {"comfyui bf16": 0, "ours bf16": 0.004, "diffusers bf16": 0.01}
    limits |= {row.name: 0.03 for row in FORWARD if row.precision != "bf16" and row.name in rows}
    for name, limit in limits.items():
        assert rows[name]["rel_error_blocks"] <= limit
    assert rows["ours fp8"]["rel_error_blocks"] > 10 * 1e-4


def test_ours_ran_fused_with_tables(in_comfyui):
    rows = rows_of(in_comfyui, "forward")
    for name, row in rows.items():
        if not name.startswith("ours"):
            assert "paths" not in row
        else:
            # Two calls before, the measured one, and the one whose output is read.
            assert "blocks: fused, 8 of 8 in 4 forward passes" in row["paths"]
    assert "attention: sdpa_flash" in rows["ours int8, attention sdpa_flash"]["paths"]
    table = r"modulation: (\d+) timesteps in a table .*, (\d+) computed in this run"
    known, computed = map(int, re.search(table, rows["ours bf16"]["paths"]).groups())
    assert known >= 20 and computed >= 19


def test_references_are_modulated_as_at_timestep_zero_in_both_hosts(in_comfyui):
    rows = rows_of(in_comfyui, "edit")
    assert set(rows) == {"comfyui bf16", "ours bf16", "diffusers bf16"}
    for row in rows.values():
        assert row["rel_error_blocks"] <= 0.01


def test_a_prompt_is_followed_to_its_file_in_a_server(in_comfyui):
    """Eleven steps, so with CFG and the step cache; stock ComfyUI cannot load the micro model."""
    (row,) = rows_of(in_comfyui, "image").values()
    assert row["name"] == "ours bf16"
    assert row["first_ms"] > row["ms"] > 0 and row["text_ms"] > 0
