"""The kernels: their plain-torch twins, and Triton's in the interpreter and on a card."""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

import weight_cases as weights
from block_kernel_cases import Calls

from qwen_l40s import SettingError
from qwen_l40s.optimizations import kernels, reference
from qwen_l40s.optimizations.fused import choose_ops
from qwen_l40s.spec.formats import RowFormat

FORMATS = ("fp8", "int8")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# M, N, K: image and text tokens of the real model, then what no tile divides.
SHAPES = [(4296, 3072, 12288), (256, 12288, 3072), (17, 3072, 3072), (1, 3072, 3072)]
SHAPES += [(130, 272, 336), (600, 48, 80), (37, 24, 123)]
# Rows that are held in three parts, then in one.
ROWS = [(4296, 3072), (17, 12288), (9, 768), (7, 4096), (5, 123), (3, 16384)]
with_triton = pytest.mark.skipif(bool(kernels.missing()), reason=kernels.missing() or "-")
# Triton 3.9 announces another default with every kernel.
quiet = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")


def random(*shape, device="cpu", seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


# ------------------------------------------------------------------------------------------- twins


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_come_back_within_half_a_step(dtype, format):
    x = random(7, 123).to(dtype)
    q, scale = reference.row_quantize(x, RowFormat(format))
    assert (q.shape, q.dtype) == (x.shape, reference.storage_of(RowFormat(format)))
    assert (scale.shape, scale.dtype) == ((7, 1), torch.float32)
    back = q.double() * scale
    # e4m3 keeps 4 significant bits down to its smallest step, 2**-9.
    step = scale.double() * (1 if format == "int8" else (q.double().abs() / 8).clamp(min=2.0**-9))
    assert ((back - x.double()).abs() <= step * 0.5001).all()
    assert (q.float().abs().amax(1) == reference.largest_of(format)).all()


@pytest.mark.parametrize("format", FORMATS)
def test_rows_without_a_scale_of_their_own(format):
    x = random(4, 64)
    x[0] = 0
    x[1] = 1e-38
    x[2, 5] = torch.nan
    x[3, 5] = torch.inf
    q, scale = reference.row_quantize(x, RowFormat(format))
    assert scale[0] == scale[1] == 1
    assert (q[:2].float() == 0).all()
    assert scale[2].isnan()
    assert scale[3].isinf()


def test_ties_are_rounded_to_even():
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -3.5]])
    q, _ = reference.row_quantize(x, RowFormat("int8"))
    assert q.tolist() == [[127, 0, 2, 2, 0, -4]]


def test_a_format_that_is_none():
    with pytest.raises(SettingError, match="'int4': use fp8 or int8"):
        reference.row_quantize(torch.zeros(1, 16), RowFormat("int4"))


@pytest.mark.parametrize("format", FORMATS)
def test_scaled_gemm_is_the_product_of_what_the_rows_mean(format):
    a, scale_a = reference.row_quantize(random(5, 80), RowFormat(format))
    b, scale_b = reference.row_quantize(random(24, 80), RowFormat(format))
    bias = random(24).to(torch.bfloat16)
    exact = (a.double() * scale_a) @ (b.double() * scale_b).t()
    out = reference.scaled_gemm(a, b, scale_a, scale_b, None, torch.float32)
    torch.testing.assert_close(out.double(), exact, rtol=1e-6, atol=1e-5)
    out = reference.scaled_gemm(a, b, scale_a, scale_b, bias, torch.bfloat16)
    torch.testing.assert_close(out, (exact + bias).to(torch.bfloat16), rtol=1e-2, atol=1e-2)


def test_int8_sums_are_exact():
    """On the way to a small sum the partial sums exceed 2**24, where fp32 drops ones."""
    a = torch.full((1, 12288), 127, dtype=torch.int8)
    b = torch.full((1, 12288), 127, dtype=torch.int8)
    b[0, 6000:] = -121
    b[0, 1::2] -= 1
    one = torch.ones(1, 1)
    total = sum(127 * value for value in b[0].tolist())
    assert reference.scaled_gemm(a, b, one, one, None, torch.float32).item() == total
    assert abs(total) < 2**24 < 127 * 127 * 6000


# ----------------------------------------------------------------------------------------- launches


def test_a_launch_switches_the_card_only_where_another_one_is_current(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "device", lambda index: f"card {index}")

    def switch(index):
        return kernels.on_card_of(SimpleNamespace(get_device=lambda: index))

    assert switch(0) == "card 0"
    assert switch(2) == "card 2"
    with switch(1), switch(1), kernels.on_card_of(torch.ones(1)) as switched:
        assert switched is None


# -------------------------------------------------------------------------------------- interpreted


@with_triton
@pytest.mark.parametrize(
    ("name", "which"),
    [
        # A third of a minute to a minute each.
        pytest.param("interpreted_vae_kernels.py", "not slow", marks=pytest.mark.slow),
        pytest.param("interpreted_kernels.py", "not slow", marks=pytest.mark.slow),
        pytest.param("interpreted_kernels.py", "slow", marks=pytest.mark.slow),
        pytest.param("interpreted_block_kernels.py", "not slow", marks=pytest.mark.slow),
        pytest.param("interpreted_block_kernels.py", "slow", marks=pytest.mark.slow),
    ],
)
def test_kernels_in_the_interpreter(name, which):
    file = Path(__file__).parents[1] / name
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)]
    command += ["-m", which]
    command += ["-W", "ignore::pytest.PytestConfigWarning"]  # where pytest-timeout is missing
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=file.parent.parent, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^\d+ passed(, \d+ deselected)? in", done.stdout, re.MULTILINE), done.stdout


def test_without_triton_the_reason_is_kept_and_layers_run():
    """In another process: this one may have Triton imported."""
    code = """
import sys
sys.modules["triton"] = None
sys.path.insert(0, sys.argv[1])
import conftest, torch
from qwen_l40s.optimizations import kernels, linear
assert kernels.missing() == "triton: not installed", kernels.missing()
gemm = linear.choose_gemm("int8", torch.device("cpu"), backend="int_mm")
assert gemm.row_quantizer == "torch"
weight = torch.ones(8, 16, dtype=torch.int8)
print(gemm.linear(torch.ones(3, 16), weight, torch.ones(8, 1)).tolist()[2][7])
"""
    command = [sys.executable, "-W", "error", "-c", code, str(Path(__file__).parents[1])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "16.0\n"), done.stderr


# -------------------------------------------------------------------------------------- on the card


def on_the_card():
    return Calls(choose_ops(torch.device("cuda")))


def runnable(format):
    """Skips what the card's tensor cores do not multiply."""
    if torch.cuda.get_device_capability() < {"fp8": (8, 9), "int8": (8, 0)}[format]:
        pytest.skip(f"this card has no {format} tensor cores")


@pytest.mark.cuda
@with_triton
@quiet
@pytest.mark.parametrize("format", FORMATS)
def test_row_quantize_on_the_card_is_its_twin(format):
    runnable(format)
    for shape in ROWS:
        x = random(*shape, device="cuda").to(torch.bfloat16)
        x[0] = 0
        q, scale = on_the_card().row_quantize(x, RowFormat(format))
        twin_q, twin_scale = reference.row_quantize(x, RowFormat(format))
        assert torch.equal(scale, twin_scale)
        assert torch.equal(q.float(), twin_q.float())


@pytest.mark.cuda
@with_triton
@quiet
@pytest.mark.parametrize("columns", weights.WIDTHS)
@pytest.mark.parametrize("format", FORMATS)
def test_weights_are_rounded_on_the_card_to_the_bits_of_the_processor(format, columns, caplog):
    runnable(format)
    for dtype in weights.DTYPES:
        weights.check_rounding(columns, format, dtype, torch.device("cuda"))
    assert "trial" not in caplog.text


@pytest.mark.cuda
@with_triton
@quiet
@pytest.mark.parametrize("format", FORMATS)
def test_scaled_gemm_on_the_card_is_its_twin(format):
    runnable(format)
    for m, n, k in SHAPES:
        a, scale_a = reference.row_quantize(random(m, k, device="cuda"), RowFormat(format))
        b, scale_b = reference.row_quantize(random(n, k, device="cuda", seed=1), RowFormat(format))
        bias = random(n, device="cuda").to(torch.bfloat16)
        out = on_the_card().scaled_gemm(a, b, scale_a, scale_b, bias, torch.float32)
        twin = reference.scaled_gemm(a, b, scale_a, scale_b, bias, torch.float32)
        # Hopper adds e4m3 products with fewer bits than fp32.
        most = 1e-6 if format == "int8" else 4e-3
        assert (out - twin).norm() < most * twin.norm(), (m, n, k)
