"""`qwen-l40s bench` on the CPU and small, without ComfyUI."""

import json
import re
from pathlib import Path

import pytest
import torch

from qwen_l40s.bench import rows as bench_run
from qwen_l40s.bench import timing as measure
from qwen_l40s.bench.forward import (
    group_of,
    group_sums,
    input_tensors,
    kernel_table,
    quantizable_weights,
    random_tensor,
    random_tensors,
    schedule,
)
from qwen_l40s.bench.inputs import Inputs, forward_work, rope_axes
from qwen_l40s.bench.report import draw_chart, waterfall
from qwen_l40s.bench.rows import BLOCK, FORWARD, IMAGE
from qwen_l40s.cli import main
from qwen_l40s.spec.transformer import FULL_SIZE, SMALL

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
SMALL_RUN = ["--device", "cpu", "--width", "small", "--layers", "1", "--size", "64x32"]
SMALL_RUN += ["--text", "5", "--repeats", "2", "--warm-up", "1"]


@pytest.fixture
def without_comfyui(monkeypatch, tmp_path):
    """Keeps this process from importing one."""
    monkeypatch.setenv("COMFYUI_PATH", str(tmp_path / "nowhere"))


def bench(*arguments):
    return main(["bench", *map(str, arguments)])


def last_line(capsys):
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_what_cannot_run_is_left_out_in_one_line(without_comfyui, capsys, tmp_path):
    file = tmp_path / "results.json"
    assert bench("forward", *SMALL_RUN, "--json", file) == 0
    lines = capsys.readouterr().out.splitlines()
    left_out, _, cpu = lines[:3]
    assert re.match(r"Left out: comfyui bf16, .*\(ComfyUI: .*; set COMFYUI_PATH", left_out)
    assert "diffusers bf16 compiled (needs an NVIDIA card)" in left_out
    assert cpu.startswith("These are CPU figures")
    results = json.loads(lines[-1])
    assert json.loads(file.read_text()) == results
    rows = {row["name"]: row for row in results["rows"]}
    assert set(rows) == {"diffusers bf16 eager", "ours bf16 in diffusers"}
    for row in rows.values():
        assert row["ms"] > 0
        assert row["rel_error"] is None  # without stock ComfyUI
    assert "blocks: fused" in rows["ours bf16 in diffusers"]["paths"]
    assert len(results["conditions"]["left_out"]) == len(FORWARD) - 2


def test_operations_are_measured_or_left_out_with_a_reason(without_comfyui, capsys):
    assert (
        bench("ops", *SMALL_RUN, "--only", "*torch", "gemm 128x512*", "attention *", "*kit*") == 0
    )
    rows = {row["name"]: row for row in last_line(capsys)["rows"]}
    assert rows["gemm 128x512 bf16"]["tflops"] > 0
    assert rows["residual+norm+modulate ours torch"]["gbs"] > 0
    assert rows["residual+norm+modulate ours torch"]["tflops"] is None
    assert rows["attention math"]["ms"] > 0
    assert "needs an NVIDIA card" in rows["attention sdpa_cudnn"]["left_out"]
    assert all(("ms" in row) != ("left_out" in row) for row in rows.values())


def test_a_row_that_fails_is_one_line_and_the_others_go_on(without_comfyui, capsys, monkeypatch):
    def broken(*_arguments):
        raise RuntimeError("out of order\nmore")

    monkeypatch.setattr(bench_run.RandomModels, "measure", broken)
    arguments = ["forward", *SMALL_RUN, "--size", "32x32", "--only", "diffusers bf16 eager"]
    assert bench(*arguments) == 1
    output = capsys.readouterr().out
    assert output.count("failed: RuntimeError: out of order") == 2
    rows = json.loads(output.splitlines()[-1])["rows"]
    assert [(row["size"], row["error"]) for row in rows] == [
        ("64x32", "RuntimeError: out of order"),
        ("32x32", "RuntimeError: out of order"),
    ]


# --- what is refused


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--size", "1000x1024"], "--size 1000x1024: both sides must be divisible by 16: use 992x"),
        (["--size", "big"], "must be WIDTHxHEIGHT in pixels"),
        (["--size", "0x16"], "divisible by 16"),
        (["--layers", "0"], "--layers must be 1 to 60, which the published models have, got 0"),
        (["--layers", "61"], "got 61"),
        (["--width", "wide"], "--width 'wide' is unknown: choose full or small"),
        (["--batch", "0"], "--batch must be at least 1, got 0"),
        (["--text", "0"], "--text must be at least 1"),
        (["--references", "-1"], "--references must be at least 0"),
        (["--repeats", "0"], "--repeats must be at least 1"),
        (["--only", "ours fp4"], "--only 'ours fp4' names no row: choose from 'comfyui bf16', "),
        (["--json", "nowhere/results.json"], "(nowhere)"),
        (["--json", "."], "--json names a folder"),
        (["--plot", "chart.jpg"], "must end in .png"),
        (["--device", "tpu"], "device 'tpu' is unknown"),
        (["--models", "models"], "--models goes with `image` alone"),
        (["--only", "comfyui bf16 cudnn"], "nothing can be measured here: comfyui bf16 cudnn ("),
    ],
)
def test_bad_input_is_one_sentence(
    without_comfyui, monkeypatch, tmp_path, capsys, arguments, sentence
):
    monkeypatch.chdir(tmp_path)
    assert bench("forward", "--device", "cpu", "--width", "small", *arguments) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert sentence in output.err
    assert len(output.err.splitlines()) == 1


def test_a_block_needs_two_layers_and_an_operation_its_name(without_comfyui, capsys):
    assert bench("block", *SMALL_RUN) == 2
    assert "--layers must be 2 to 60" in capsys.readouterr().err
    assert bench("ops", *SMALL_RUN, "--only", "gemm 1x1") == 2
    assert "'gemm 128x128 bf16'" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch sees a card")
def test_a_machine_without_a_card_is_told_how_to_try(capsys):
    assert bench("forward") == 2
    assert "--device cpu --width small --layers 1" in capsys.readouterr().err


def test_the_memory_that_is_needed_is_told_before_anything_is_built(
    without_comfyui, monkeypatch, capsys
):
    from qwen_l40s.machine import device

    monkeypatch.setattr(device, "available_bytes", lambda _: 2**30)
    assert bench("forward", "--device", "cpu", "--only", "diffusers bf16 eager") == 2
    # 40.9 GB of weights are 38.1 GiB.
    assert "needs 39.4 GiB and 1.0 GiB are free" in capsys.readouterr().err


# --- the parts


def test_counted_work_of_the_full_size():
    work = forward_work(FULL_SIZE, Inputs(1024, 1024))
    attention = 4 * 4296**2 * 3072 * 60
    assert work.flops == pytest.approx(58.4e12 + attention, rel=1e-3)
    # Of the weights, 226.5 M in each block.
    assert work.bytes > 2 * 226.5e6 * 60
    half = forward_work(FULL_SIZE, Inputs(1024, 1024), "fp8")
    assert half.flops == work.flops
    assert work.bytes / 2 < half.bytes < work.bytes
    edit = forward_work(FULL_SIZE, Inputs(1024, 1024, references=1))
    assert edit.flops > 2 * work.flops


def test_the_heads_of_the_published_models_and_of_the_small_one_split_evenly():
    assert rope_axes(128) == (16, 56, 56)
    assert rope_axes(SMALL.head_dim) == (4, 14, 14)


def test_random_weights_do_not_depend_on_their_neighbours():
    tensors = dict(random_tensors(SMALL, CPU))
    name = "transformer_blocks.59.img_mlp.net.2.weight"
    assert torch.equal(tensors[name], random_tensor(name, (128, 512), CPU))
    assert tensors[name].std().item() == pytest.approx(0.5 / 512**0.5, rel=0.05)
    assert (tensors["txt_norm.weight"] == 1).all()
    assert tensors["proj_out.bias"].std().item() == pytest.approx(0.02, rel=0.3)
    assert len(quantizable_weights(SMALL)) == 60 * 12


def test_a_schedule_is_what_every_host_can_take():
    sigmas = schedule()
    assert len(set(sigmas)) == 20
    assert sigmas[0] == 1
    assert sigmas == sorted(sigmas, reverse=True)
    assert torch.tensor(sigmas).bfloat16().tolist() == sigmas
    tensors = input_tensors(SMALL, Inputs(64, 32, batch=3, text=5, references=2), CPU)
    assert tensors.latents.shape == (3, 16, 1, 4, 8)
    assert [tuple(each.shape) for each in tensors.references] == [(3, 16, 1, 128, 128)] * 2
    announced = {float(sigma[0]) for sigma in tensors.sigmas}
    unannounced = {float(sigma[0]) for sigma in tensors.between}
    assert len(unannounced) == 160
    assert not announced & unannounced


def test_quantiles_lie_between_the_samples():
    assert measure.quantile([3.0, 1.0, 2.0], 0.5) == 2
    assert measure.quantile([1.0, 2.0], 0.1) == pytest.approx(1.1)
    assert measure.quantile([5.0], 0.9) == 5


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("pytorch_flash::flash_fwd_kernel<cutlass::bfloat16_t>", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7", "attention"),
        ("nvjet_tst_256x128_64x4_2x1_v_bz_coopA_bias_TNT", "GEMM"),
        ("void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x<...", "GEMM"),
        ("_scaled_gemm_kernel", "GEMM"),
        ("_residual_norm_kernel", "norm+modulate"),
        ("void at::native::(anonymous namespace)::vectorized_layer_norm_kernel", "norm+modulate"),
        ("triton_red_fused__to_copy_add_mul_native_layer_norm_0", "norm+modulate"),
        ("_qk_norm_rope_kernel", "rope"),
        ("_gelu_quantize_kernel", "quantize"),
        ("void at::native::(anonymous namespace)::CatArrayBatchedCopy_contig", "copies"),
        ("Memcpy DtoD (Device -> Device)", "copies"),
        ("aten::mm", "GEMM"),
        ("aten::add", "other"),
    ],
)
def test_kernels_are_told_apart_by_their_names(name, group):
    assert group_of(name) == group


def test_kernels_are_summed_by_name_and_by_group():
    kernels = kernel_table([("aten::mm", 1.0), ("aten::add", 4.0), ("aten::mm", 2.0)])
    assert [(kernel.name, kernel.ms, kernel.count) for kernel in kernels] == [
        ("aten::add", 4.0, 1),
        ("aten::mm", 3.0, 2),
    ]
    assert group_sums(kernels)["GEMM"] == 3
    events = measure.device_events(lambda: torch.ones(8, 8) @ torch.ones(8, 8), CPU)
    assert "aten::mm" in dict(events)


def result(name, ms, **more):
    return {"name": name, "size": "16x16", "batch": 1, "ms": ms, "rel_error": 0.0, **more}


def test_a_waterfall_names_techniques_only_where_all_before_them_were_measured():
    steps = [("comfyui bf16", 200), ("ours bf16 attention", 160), ("ours bf16 blocks", 120)]
    steps += [("ours bf16", 100), ("ours fp8", 80), ("ours int8", 90)]
    lines = waterfall([result(name, ms) for name, ms in steps])
    assert [line.split("  ")[1] for line in lines[2:]] == [
        "stock ComfyUI, bf16",
        "+ attention choice",
        "+ fused blocks",
        "+ modulation tables",
        "+ fp8",
        "or int8",
    ]
    assert [line.split()[-2] for line in lines[3:]] == ["+20.0", "+25.0", "+16.7", "+20.0", "+10.0"]
    fewer = waterfall([result(*steps[0]), result(*steps[3])])
    assert fewer[-1].split("  ")[1] == "ours bf16"
    assert waterfall([result(*steps[3])]) == []


def test_a_chart_takes_any_rows():
    rows = [result("comfyui bf16", 2.0), result("x" * 99, 1.0, ms_p10=0.5, ms_p90=1.5)]
    image = draw_chart([*rows, {**result("ours bf16", 0), "error": "no"}], {"card": "A card"})
    assert image.size[0] == 1280
    assert draw_chart([], {}).size[1] > 0


def test_every_image_and_block_row_is_a_forward_row():
    names = {row.name for row in FORWARD}
    assert {row.name for row in (*BLOCK, *IMAGE)} <= names
    assert len(names) == len(FORWARD)
    assert [row.name for row in IMAGE if row.variant == "ours"] == [
        "ours bf16",
        "ours fp8",
        "ours int8",
    ]


@pytest.mark.cuda
def test_a_card_s_kernels_and_memory_are_seen(without_comfyui, capsys):
    arguments = ["forward", "--layers", "2", "--size", "256x256", "--only", "diffusers bf16 eager"]
    assert bench(*arguments, "--profile") == 0
    (row,) = last_line(capsys)["rows"]
    assert 0 < row["kernel_ms"] <= 1.2 * row["ms"]
    assert row["kernel_groups_ms"]["GEMM"] > 0
    assert row["peak_gib"] > row["extra_gib"] > 0
    assert Path(row["kernels"][0]["name"]).name
