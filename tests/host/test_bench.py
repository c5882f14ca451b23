"""`qwen-l40s bench` with ComfyUI, on the CPU and small."""

import contextlib
import io
import json
import os
import re

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from qwen_l40s.bench import timing as measure
from qwen_l40s.bench.rows import FORWARD, TABLE
from qwen_l40s.cli import main
from qwen_l40s.loaders.convert import check_complete
from qwen_l40s.loaders.source import open_source
from qwen_l40s.loaders.writer import SafetensorsLayout
from qwen_l40s.spec.transformer import FULL_SIZE

SMALL = ["--device", "cpu", "--width", "small", "--text", "5", "--repeats", "2", "--warm-up", "1"]
RUNS = {
    "forward": "--size 64x32 --layers 2 --batch 2",
    "edit": "--size 32x32 --layers 1 --references 1 --repeats 1 --only *?bf16 *diffusers *eager",
    "block": "--size 32x32 --layers 3 --profile --only *?bf16",
    "image": "--size 32x32 --layers 1 --steps 1 --only *?bf16",
    "prompt": "--size 256x256 --layers 1 --steps 11 --repeats 1 --models . --only *?bf16",
}


@pytest.fixture(scope="module")
def chart(tmp_path_factory):
    return tmp_path_factory.mktemp("bench") / "chart.png"


@pytest.fixture(scope="module")
def in_comfyui(chart):
    """{what is measured: (exit code, the command's last line)}"""
    results = {}
    for name, arguments in RUNS.items():
        what = {"edit": "forward", "prompt": "image"}.get(name, name)
        more = ["--plot", str(chart)] if name == "forward" else []
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            code = main(["bench", what, *SMALL, *arguments.split(), *more])
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
    on_a_card = {row.name for row in FORWARD if row.needs_card}
    assert set(rows) == {row.name for row in FORWARD} - on_a_card
    conditions = in_comfyui["forward"][1]["conditions"]
    assert set(conditions["left_out"]) == on_a_card
    assert conditions["card"] == "CPU"
    assert conditions["software"]["ComfyUI"]
    assert conditions["layers"] == 2
    assert conditions["ceilings"]["copy GB/s"] > 0
    for row in rows.values():
        assert (row["size"], row["batch"]) == ("64x32", 2)
        assert len(row["samples_ms"]) == 2
        assert min(row["samples_ms"]) <= row["ms_p10"] <= row["ms"] <= row["ms_p90"]


def test_errors_are_those_of_the_same_weights_and_inputs(in_comfyui):
    rows = rows_of(in_comfyui, "forward")
    limits = {"comfyui bf16": 0, "ours bf16": 0.004, "ours bf16 attention": 0.004}
    limits |= {"ours bf16 blocks": 0.004, "diffusers bf16 eager": 0.01}
    limits["ours bf16 in diffusers"] = 0.01
    limits |= {row.name: 0.03 for row in FORWARD if row.precision != "bf16" and row.name in rows}
    for name, limit in limits.items():
        assert rows[name]["rel_error"] <= limit
        assert rows[name]["rel_error_blocks"] <= limit
    assert rows["ours fp8"]["rel_error"] > 10 * 1e-4


def test_ours_ran_fused_with_and_without_tables(in_comfyui):
    rows = rows_of(in_comfyui, "forward")
    for name in (row.name for row in FORWARD if row.variant in ("unscheduled", "ours")):
        if name not in rows or "diffusers" in name:
            continue
        # First call, two repetitions, and the call whose output is compared.
        assert "blocks: fused, 8 of 8 in 4 forward passes" in rows[name]["paths"]
    assert "modulation: 20 timesteps" in rows["ours bf16 in diffusers"]["paths"]
    assert "attention: int8_fp8" in rows["ours int8, attention int8_fp8"]["paths"]
    # In ComfyUI the table outlives a run: of 20 timesteps one was there, for another row.
    table = r"modulation: (\d+) timesteps in a table .*, (\d+) computed in this run"
    known, computed = map(int, re.search(table, rows["ours bf16"]["paths"]).groups())
    assert known >= 20 and computed >= 19
    assert re.search(table, rows["ours bf16 blocks"]["paths"])[2] == "4"
    assert "blocks: ComfyUI's own" in rows["ours bf16 attention"]["paths"]
    assert "paths" not in rows["comfyui bf16"]
    assert rows[TABLE]["steps"] == 20


def test_references_are_modulated_as_at_timestep_zero_in_both_hosts(in_comfyui):
    rows = rows_of(in_comfyui, "edit")
    hosts = {"comfyui bf16", "ours bf16", "diffusers bf16 eager", "ours bf16 in diffusers"}
    assert set(rows) == hosts
    for row in rows.values():
        assert row["rel_error_blocks"] <= 0.01


def test_a_block_is_a_share_of_the_difference(in_comfyui):
    rows = rows_of(in_comfyui, "block")
    for row in rows.values():
        first = measure.quantile(row["samples_ms_of_1_block"], 0.5)
        whole = measure.quantile(row["samples_ms"], 0.5)
        assert row["ms"] == pytest.approx((whole - first) / 2, rel=1e-3, abs=1e-3)
        assert row["kernels"]


def test_an_image_is_sampled_and_decoded(in_comfyui):
    rows = rows_of(in_comfyui, "image")
    assert set(rows) == {"comfyui bf16", "ours bf16"}
    for row in rows.values():
        # Medians of two samples are means.
        assert row["ms"] == pytest.approx(row["sample_ms"] + row["decode_ms"], rel=1e-3)
        assert row["rel_error"] <= 0.05
    assert "fused" in rows["ours bf16"]["paths"]


def test_a_prompt_is_followed_to_its_file_in_a_server(in_comfyui):
    """Eleven steps, so with CFG and the step cache; stock ComfyUI cannot load the micro model."""
    (row,) = rows_of(in_comfyui, "prompt").values()
    parts = [row[f"{part}_ms"] for part in ("sample", "decode", "save", "rest")]
    assert row["name"] == "ours bf16"
    assert min(parts[:3]) > 0 and sum(parts) == pytest.approx(row["ms"], rel=1e-3)
    assert row["first_ms"] > row["ms"] and row["encode_ms"] > 0


def test_the_chart_is_a_picture(in_comfyui, chart):
    assert in_comfyui["forward"][0] == 0
    with Image.open(chart) as image:
        assert image.width == 1280
        assert image.height > 300


# --- the random weights of whole files


def header_only(path, shapes):
    """A sparse file of the right size: nothing but its header is written."""
    layout = SafetensorsLayout({name: ("BF16", tuple(s)) for name, s in shapes.items()}, {})
    path.write_bytes(layout.header)
    os.truncate(path, layout.file_bytes)
    return path


def test_the_random_weights_are_those_of_the_published_files(tmp_path):
    from qwen_l40s.bench.comfyui import text_encoder_shapes
    from qwen_l40s.hosts.comfyui.load.vae import vae_shapes

    shapes = FULL_SIZE.tensors(), text_encoder_shapes(), vae_shapes(96)
    roles = ("transformer", "text_encoder", "vae")
    files = [
        header_only(tmp_path / f"{role}.safetensors", found)
        for role, found in zip(roles, shapes, strict=True)
    ]
    sizes = [round(file.stat().st_size / 1e9, 2) for file in files]
    assert sizes == [40.86, 16.58, 0.25]
    assert check_complete(open_source(files[0], "transformer")).blocks == 60
    variant = open_source(files[1], "text_encoder").part.variant
    assert "7B, with its vision tower, with lm_head, flat names" in variant
    assert open_source(files[2], "vae").part.dims["dim"] == 96


def test_random_weights_are_written_once(tmp_path):
    from qwen_l40s.bench.comfyui import write_random

    shapes = {"a.weight": (64, 256), "a.bias": (64,), "norm.weight": (8,), "b.gamma": (4, 1, 1, 1)}
    path = tmp_path / "models" / "file.safetensors"
    write_random(path, shapes, torch.device("cpu"))
    found = load_file(path)
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == shapes
    assert found["a.weight"].float().std().item() == pytest.approx(0.5 / 16, rel=0.05)
    assert found["a.bias"].abs().max() > 0
    assert all(torch.equal(found[n], torch.ones_like(found[n])) for n in ("norm.weight", "b.gamma"))
    before = path.stat().st_mtime_ns
    write_random(path, shapes, torch.device("cpu"))
    assert path.stat().st_mtime_ns == before
