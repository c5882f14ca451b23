"""Rounding weights to fp8 and int8, and reading them back, value for value."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from qwen_l40s.errors import SettingError
from qwen_l40s.loaders import quantize
from qwen_l40s.loaders.quantize import (
    comfy_quant_tensor,
    dequantize_rows,
    e4m3_as_float,
    e5m2_as_half,
    layers_to_quantize,
    quantize_rows,
    relative_error,
    rotate,
)
from qwen_l40s.spec.formats import QUANTIZED

pytestmark = pytest.mark.usefixtures("one_thread")
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
LIMITS = {"fp8": 448, "int8": 127}
BYTES = torch.arange(256).to(torch.uint8)


def bits(tensor):
    return tensor.float().view(torch.int32)


def same_values(one, other):
    """Bit for bit, sign of zero included, but for which NaN it is."""
    one = one.cpu()
    nan = one.isnan()
    return torch.equal(nan, other.isnan()) and torch.equal(bits(one)[~nan], bits(other)[~nan])


def weight(rows=7, columns=40, dtype=torch.bfloat16, seed=0):
    made = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.02
    return made.to(dtype)


def neighbours(values, format):
    """The numbers of the format next below and next above each value."""
    if format == "int8":
        grid = torch.arange(-127.0, 128)
    else:
        grid = BYTES.view(torch.float8_e4m3fn).float()
        grid = grid[~grid.isnan()].unique()
    above = torch.searchsorted(grid, values.contiguous()).clamp(max=len(grid) - 1)
    upper = grid[above]
    return torch.where(upper == values, upper, grid[(above - 1).clamp(min=0)]), upper


# --- bits


def test_every_byte_of_fp8_reads_as_torch_reads_it(device):
    e4m3, e5m2 = BYTES.view(torch.float8_e4m3fn), BYTES.view(torch.float8_e5m2)
    assert same_values(e4m3_as_float(e4m3.to(device)), e4m3.float())
    numbers = e4m3[~e4m3.float().isnan()]
    assert len(numbers) == 254  # without NaN another path is taken
    assert same_values(e4m3_as_float(numbers.to(device)), numbers.float())
    assert same_values(e5m2_as_half(e5m2.to(device)).float(), e5m2.float())
    scale = torch.full((2, 1), 0.5, device=device)
    for values in (e4m3, e5m2):
        rows = values.reshape(2, 128)
        read = dequantize_rows(rows.to(device), scale, torch.float32)
        assert same_values(read, rows.float() / 2)


# --- rounding


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", QUANTIZED)
def test_every_value_is_rounded_to_the_nearest(format, dtype, device):
    original = weight(rows=300, columns=1000, dtype=dtype)
    values, scale = (part.cpu() for part in quantize_rows(original.to(device), format))
    assert values.dtype == {"fp8": torch.float8_e4m3fn, "int8": torch.int8}[format]
    assert scale.dtype == torch.float32
    assert scale.shape == (300, 1)
    limit = LIMITS[format]
    assert torch.equal(scale, original.float().abs().amax(dim=1, keepdim=True) / limit)
    assert (values.float().abs().amax(dim=1) == limit).all()
    scaled = (original.float() / scale).clamp(-limit, limit)
    below, above = neighbours(scaled, format)
    nearest = torch.minimum(scaled - below, above - scaled)
    assert torch.equal((values.float() - scaled).abs(), nearest)


def test_a_tie_goes_to_the_even_neighbour(device):
    """The row's largest is 127, so that the scale is 1."""
    row = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5]], device=device)
    assert quantize_rows(row, "int8")[0].tolist() == [[127, 0, 2, 2, 0, -2]]
    row = torch.tensor([[448.0, 17, 19, -17, -19]], device=device)  # e4m3 has 16, 18 and 20 there
    assert quantize_rows(row, "fp8")[0].float().tolist() == [[448, 16, 20, -16, -20]]


@pytest.mark.parametrize("format", QUANTIZED)
def test_rows_are_independent_and_pieces_do_not_show(monkeypatch, format):
    original = weight(rows=13, columns=40)
    whole = quantize_rows(original, format)
    back, error = dequantize_rows(*whole, torch.bfloat16), relative_error(original, *whole)
    alone = [quantize_rows(row[None], format) for row in original]
    assert torch.equal(whole[0].float(), torch.cat([values.float() for values, _ in alone]))
    monkeypatch.setattr(quantize, "PIECE", {"cpu": 81})
    pieces = quantize_rows(original, format)
    assert torch.equal(pieces[0].float(), whole[0].float())
    assert torch.equal(pieces[1], whole[1])
    assert torch.equal(dequantize_rows(*pieces, torch.bfloat16), back)
    assert relative_error(original, *pieces) == pytest.approx(error, rel=1e-5)


@pytest.mark.parametrize("format", QUANTIZED)
def test_zeros_and_what_is_no_number(format, device):
    original = weight(rows=5).to(device)
    original[1] = 0
    original[2, 3], original[3, 0], original[4, 39] = float("nan"), float("inf"), float("-inf")
    values, scale = quantize_rows(original, format)
    assert scale[1] == 1
    assert not values[1].float().any()
    assert scale.isfinite().flatten().tolist() == [True, True, False, False, False]
    assert torch.equal(scale[0], quantize_rows(original[:1], format)[1][0])


@pytest.mark.parametrize("format", QUANTIZED)
@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (1, 1)])
def test_small_shapes(format, shape):
    original = torch.full(shape, -0.25)
    values, scale = quantize_rows(original, format)
    assert values.shape == shape
    assert scale.shape == (shape[0], 1)
    assert torch.equal(dequantize_rows(values, scale, torch.float32), original)
    assert relative_error(original, values, scale) == 0


@pytest.mark.parametrize("format", QUANTIZED)
def test_stochastic_rounding_keeps_the_mean_and_takes_a_neighbour(format):
    original = weight(rows=3, columns=50, dtype=torch.float32)
    limit = LIMITS[format]
    scaled = (original / quantize_rows(original, format)[1]).clamp(-limit, limit)
    below, above = neighbours(scaled, format)
    draws = torch.stack([quantize_rows(original, format, seed=s)[0].float() for s in range(400)])
    assert ((draws == below) | (draws == above)).all()
    step = (above - below).clamp(min=1e-9)
    assert ((draws.mean(0) - scaled) / step).abs().max() < 0.12  # 4.8 standard deviations
    again = quantize_rows(original, format, seed=7)[0].float()
    assert torch.equal(again, draws[7])
    assert not torch.equal(draws[7], draws[8])


def test_stochastic_rounding_keeps_the_mean_of_subnormal_numbers():
    """e4m3 has steps of 2^-9 below 2^-6; beside 448 the scale is 1."""
    small = torch.tensor([0.1, 0.25, 0.5, 1.75, 3.3, 7.9, -0.3, -5.5]) * 2.0**-9
    row = torch.cat([torch.tensor([448.0]), small])[None]
    draws = torch.cat([quantize_rows(row, "fp8", seed=s)[0].float() for s in range(1000)])[:, 1:]
    assert ((draws.mean(0) - small) * 2**9).abs().max() < 0.08  # 5 standard deviations
    assert (draws * 2**9 == (draws * 2**9).round()).all()


def test_relative_error_is_the_norm_of_the_difference(device):
    original = weight(rows=64, columns=512, dtype=torch.float32).to(device)
    for format, expected in (("int8", 0.007), ("fp8", 0.0265)):
        values, scale = quantize_rows(original, format)
        rounded = dequantize_rows(values, scale, torch.float32)
        exact = ((rounded - original).norm() / original.norm()).item()
        assert relative_error(original, values, scale) == pytest.approx(exact, rel=1e-4)
        assert exact == pytest.approx(expected, rel=0.1)  # of Gaussian weights


def test_temporaries_are_pieces():
    """A 12288 x 3072 weight takes 75 MB in bf16 and must not take a float32 copy of 151 MB."""
    sizes = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            outputs = result if isinstance(result, (tuple, list)) else [result]
            views = function.is_view or function._schema.is_mutable
            sizes.extend(
                (tensor.numel(), function)
                for tensor in outputs
                if isinstance(tensor, torch.Tensor) and not views
            )
            return result

    original = torch.zeros(1024, 3072, dtype=torch.bfloat16)
    with Sizes():
        for format in QUANTIZED:
            values, scale = quantize_rows(original, format)
            dequantize_rows(values, scale, torch.bfloat16)
            relative_error(original, values, scale)
    large = [str(function) for size, function in sizes if size > quantize.PIECE["cpu"]]
    assert len(sizes) > 50
    # The results themselves: values and weight of both formats.
    assert large == ["aten.empty.memory_format"] * 4


def test_unknown_format():
    for call in (lambda: quantize_rows(weight(), "fp4"), lambda: comfy_quant_tensor("fp4")):
        with pytest.raises(SettingError, match="'fp4' is unknown: choose fp8 or int8"):
            call()


# --- which layers


def test_names_that_only_look_alike_are_not_quantized():
    names = ["x.transformer_blocks.0.attn.to_q", "transformer_blocks.0.attn.to_q.lora_A"]
    names += ["transformer_blocks.٣.attn.to_q", "transformer_blocks.0.attn.to_q\n"]
    assert layers_to_quantize(names) == frozenset()


# --- names


# --- ConvRot


@pytest.mark.parametrize("size", [4, 16, 64, 256])
def test_rotation_is_its_own_inverse_and_keeps_lengths(size):
    original = weight(rows=3, columns=512, dtype=torch.float32)
    rotated = rotate(original, size)
    assert (rotated - original).norm() > original.norm() / 2
    assert torch.allclose(rotate(rotated, size), original, atol=1e-6)
    lengths = rotated.reshape(3, -1, size).norm(dim=2)
    assert torch.allclose(lengths, original.reshape(3, -1, size).norm(dim=2), rtol=1e-5)
