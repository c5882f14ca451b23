"""The Triton kernels in Triton's CPU interpreter, against their twins and float64.

tests/unit/test_kernels.py runs this file in a process of its own: TRITON_INTERPRET=1 has to be set
before Triton is imported, and nothing can be compiled after that.
"""

import itertools

import pytest
import torch
import triton  # noqa: F401, whose interpreter the package asks for
import weight_cases as weights
from block_kernel_cases import Calls, with_kernels

from qwen_l40s import SettingError
from qwen_l40s.optimizations import kernels, reference
from qwen_l40s.optimizations.blocks import products
from qwen_l40s.optimizations.blocks.products import Operand, Read, Rows, StreamSlice
from qwen_l40s.optimizations.fused import choose_ops
from qwen_l40s.optimizations.kernels import rows as row_kernels
from qwen_l40s.optimizations.kernels import scaled_gemm as gemms
from qwen_l40s.optimizations.kernels.rows import WIDEST_ROW, launch_shape
from qwen_l40s.optimizations.kernels.scaled_gemm import TILES, TILES_SM90, TILES_SM90_INT8, Tile
from qwen_l40s.optimizations.linear import choose_gemm
from qwen_l40s.optimizations.reference import RowOrder
from qwen_l40s.spec.formats import RowFormat

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FORMATS = ("fp8", "int8")
CPU = torch.device("cpu")
KERNELS = Calls(choose_ops(CPU))
# The first three are held in three parts, the others in one.
ROWS = [((3, 3072), torch.bfloat16), ((2, 12288), torch.float16), ((2, 768), torch.float32)]
ROWS += [((2, 4096), torch.float32), ((5, 123), torch.bfloat16), ((2, 1), torch.float16)]
# M, N, K
SHAPES = {
    "one token": (1, 64, 64),
    "17 tokens": (17, 48, 80),
    "odd": (5, 24, 123),
    "several tiles": (131, 272, 336),
}

far_below_zero = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # of exp2


def operands(m, n, k, format):
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(m, k, generator=generator)
    b = torch.randn(n, k, generator=generator)
    bias = torch.randn(n, generator=generator).to(torch.bfloat16)
    rows = RowFormat(format)
    return *reference.row_quantize(a, rows), *reference.row_quantize(b, rows), bias


def test_it_is_the_interpreter():
    assert kernels.interpreted()
    assert kernels.missing() == ""


def test_each_run_has_the_same_kernels():
    """Graphs, comparisons and buffers of a run are for equal kernels alone."""
    assert choose_ops(CPU) == choose_ops(CPU)


@pytest.mark.parametrize("format", FORMATS)
def test_row_quantize_is_its_twin(format):
    for shape, dtype in ROWS:
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
        check_row_quantize(x, format)


@pytest.mark.parametrize("format", FORMATS)
def test_row_quantize_of_every_number_that_is_rounded(format):
    """Each e4m3 number or integer, each middle of two, and the fp32 numbers beside the middles."""
    largest = reference.largest_of(format)
    if format == "int8":
        held = torch.arange(128.0)
    else:
        held = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = (held[1:] + held[:-1]) / 2
    above = torch.nextafter(middles, torch.tensor(1e9))
    below = torch.nextafter(middles, torch.tensor(-1e9))
    x = torch.cat([held, middles, above, below])
    x = torch.stack([x, -x])
    assert x.amax() == largest  # the scale is one
    check_row_quantize(x, format)


@pytest.mark.parametrize("width", [96, 768], ids=["one part", "three parts"])
@pytest.mark.parametrize("format", FORMATS)
def test_row_quantize_of_strange_rows(format, width):
    x = torch.randn(4, width, generator=torch.Generator().manual_seed(0))
    x[0] = 0
    x[1] = 1e-38
    x[2, :96] = torch.arange(96) - 47.5  # halves: ties, whose rounding has to be the twin's
    x[2, -1] = 127
    x[3, -96:] = 2.0 ** torch.arange(-80, 16)  # down to the subnormals of e4m3, and below
    scale = check_row_quantize(x, format)
    assert scale[0] == scale[1] == 1


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy, of inf * 0
@pytest.mark.parametrize("width", [96, 768], ids=["one part", "three parts"])
@pytest.mark.parametrize("format", FORMATS)
def test_what_is_not_finite_shows_in_the_scale_from_every_part(format, width):
    x = torch.randn(7, width, generator=torch.Generator().manual_seed(0))
    for row, column in enumerate((0, width // 2, width - 1)):
        x[row, column], x[row + 3, column] = torch.nan, -torch.inf
    x[3, width // 2] = torch.nan  # beside an infinity
    _, scale = KERNELS.row_quantize(x, RowFormat(format))
    assert scale.isnan().flatten().tolist() == [True] * 4 + [False] * 3
    assert scale.isinf().flatten().tolist() == [False] * 4 + [True] * 2 + [False]


def test_three_parts_are_for_rows_that_they_fit():
    shapes = {k: launch_shape(k) for k in (1, 123, 384, 768, 3072, 3073, 4096, 12288, 16384)}
    assert shapes == {
        1: (256, 1, 1),
        123: (256, 1, 1),
        384: (512, 1, 1),
        768: (256, 3, 1),
        3072: (1024, 3, 4),
        3073: (4096, 1, 4),
        4096: (4096, 1, 4),
        12288: (4096, 3, 16),
        16384: (16384, 1, 16),
    }


def test_row_quantize_of_rows_apart():
    wide = torch.randn(4, 3, 40, generator=torch.Generator().manual_seed(0))
    check_row_quantize(wide[:, 1], "int8")
    with pytest.raises(ValueError, match=r"contiguous rows .* strides \(1, 40\)"):
        KERNELS.row_quantize(wide[0].t(), RowFormat("fp8"))


def test_row_quantize_refuses_rows_that_it_cannot_hold():
    with pytest.raises(ValueError, match=str(WIDEST_ROW)):
        KERNELS.row_quantize(torch.zeros(1, WIDEST_ROW + 1), RowFormat("int8"))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy, of inf - inf
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize(
    "columns",
    [
        pytest.param(columns, marks=[pytest.mark.slow] if columns >= 3072 else [])
        for columns in weights.WIDTHS
    ],
)
@pytest.mark.parametrize("format", FORMATS)
def test_weights_are_rounded_to_the_bits_of_the_processor(format, columns):
    calls = []
    with pytest.MonkeyPatch.context() as patch:
        kernel = row_kernels.quantize_weight
        counted = lambda *about: calls.append(about) or kernel(*about)  # noqa: E731
        patch.setattr(row_kernels, "quantize_weight", counted)
        dtypes = weights.DTYPES if columns < 768 else (torch.bfloat16,)
        for dtype in dtypes:
            weights.check_rounding(columns, format, dtype, CPU)
    assert len(calls) >= 2 * len(dtypes)  # the kernel and its trial


SLOW = [pytest.param(size, marks=pytest.mark.slow) for size in (1024, 4096)]


@pytest.mark.parametrize("size", [4, 16, 64, 256, *SLOW])
def test_rows_are_rotated_as_comfy_kitchen_does(size):
    """Its matrix in float64, whatever part of a row a group is in."""
    four = torch.tensor([[1, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]]).double()
    matrix = four
    while len(matrix) < size:
        matrix = torch.kron(matrix, four)
    for shape, dtype in (((2, 3 * size), torch.float32), ((3, 7 * size), torch.bfloat16)):
        if shape[1] > WIDEST_ROW:
            continue
        x = torch.randn(shape, generator=torch.Generator().manual_seed(size)).to(dtype)
        x[:, 3] *= 30
        exact = (x.double().unflatten(1, (-1, size)) @ matrix / size**0.5).flatten(1)
        torch.testing.assert_close(reference.rotate(x.double(), size), exact)
        torch.testing.assert_close(reference.rotate(exact, size), x.double())  # its own inverse
        q, scale = KERNELS.row_quantize(x, RowFormat("int8", size))
        twin_q, twin_scale = reference.row_quantize(exact, RowFormat("int8"))
        torch.testing.assert_close(scale, twin_scale, rtol=2e-6, atol=0)
        apart = (q.int() - twin_q.int()).abs()
        assert apart.max() <= 1
        assert apart.sum() <= q.numel() // 1000


def test_a_rotation_that_does_not_fit():
    for size in (-4, 3, 8, 64, 128):
        for quantize in (KERNELS.row_quantize, reference.row_quantize):
            with pytest.raises(SettingError, match=f"96 columns cannot be .* in groups of {size}:"):
                quantize(torch.zeros(1, 96), RowFormat("int8", size))


def check_row_quantize(x, format):
    q, scale = KERNELS.row_quantize(x, RowFormat(format))
    twin_q, twin_scale = reference.row_quantize(x, RowFormat(format))
    assert (q.dtype, scale.dtype) == (twin_q.dtype, torch.float32)
    assert torch.equal(scale, twin_scale)
    assert torch.equal(q.float(), twin_q.float())
    return scale


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("format", FORMATS)
def test_scaled_gemm_is_its_twin_and_float64(format, shape):
    a, scale_a, b, scale_b, bias = operands(*shape, format)
    exact = (a.double() * scale_a) @ (b.double() * scale_b).t()
    for added in (None, bias) if shape[0] < 100 else (bias,):
        out = KERNELS.scaled_gemm(a, b, scale_a, scale_b, added, torch.float32)
        twin = reference.scaled_gemm(a, b, scale_a, scale_b, added, torch.float32)
        torch.testing.assert_close(out, twin, rtol=1e-6, atol=1e-5)
        truth = exact if added is None else exact + added.double()
        assert (out - truth).norm() < 1e-6 * truth.norm()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scaled_gemm_writes_the_dtype_that_is_asked_for(dtype):
    a, scale_a, b, scale_b, bias = operands(17, 48, 80, "int8")
    out = KERNELS.scaled_gemm(a, b, scale_a, scale_b, bias, dtype)
    twin = reference.scaled_gemm(a, b, scale_a, scale_b, bias, dtype)
    assert out.dtype == dtype
    torch.testing.assert_close(out, twin)


# The last one is for many tiles of few rows: three groups, the last of them not full.
EVERY_TILE = [tile for _, tile in (*TILES, *TILES_SM90, TILES_SM90_INT8[-2])]
EVERY_TILE.append(Tile(16, 32, 32, 4, 2, 1))


@pytest.mark.parametrize("tile", EVERY_TILE, ids=str)
def test_every_tile_computes_the_same(tile, monkeypatch):
    monkeypatch.setattr(gemms, "choose_tile", lambda *_: tile)
    m, n, k = (275, 80, 144) if tile is EVERY_TILE[-1] else (tile.m + 1, tile.n + 1, 144)
    a, scale_a, b, scale_b, bias = operands(m, n, k, "int8")
    out = KERNELS.scaled_gemm(a, b, scale_a, scale_b, bias, torch.float32)
    twin = reference.scaled_gemm(a, b, scale_a, scale_b, bias, torch.float32)
    torch.testing.assert_close(out, twin, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format", FORMATS)
def test_scaled_gemm_adds_loras(format, dtype):
    for (m, n, k), rank in zip(SHAPES.values(), (16, 64, 5, 40), strict=True):
        a, scale_a, b, scale_b, bias = operands(m, n, k, format)
        t, up = torch.randn(m, rank + 3).to(dtype)[:, 1:-2], torch.randn(n, rank).to(dtype)
        out = KERNELS.scaled_gemm(a, b, scale_a, scale_b, bias, torch.float32, beside=(t, up))
        twin = reference.scaled_gemm(a, b, scale_a, scale_b, bias, torch.float32, (t, up))
        torch.testing.assert_close(out, twin, rtol=1e-5, atol=1e-4)
        truth = (a.double() * scale_a) @ (b.double() * scale_b).t() + bias.double()
        truth += t.double() @ up.double().t()
        assert (out - truth).norm() < 1e-6 * truth.norm()
    with pytest.raises(ValueError, match=r"up \(N, R\)"):
        KERNELS.scaled_gemm(a, b, scale_a, scale_b, bias, dtype, beside=(t, up[:, 1:]))


@pytest.mark.parametrize("format", FORMATS)
def test_scaled_gemm_has_the_bits_of_a_product_and_swiglu_quantize(format):
    for (m, n, k), rank in zip(SHAPES.values(), (0, 64, 5, 40), strict=True):
        a, scale_a, b, scale_b, bias = operands(m, n, k, format)
        t, up = torch.randn(m, rank).bfloat16(), torch.randn(n, rank).bfloat16()
        for added, beside in ((None, None), (bias, (t, up) if rank else None)):
            given = a, b, scale_a, scale_b, added
            out = KERNELS.scaled_gemm(*given, torch.bfloat16, beside, swiglu=True)
            gate, *others = KERNELS.scaled_gemm(*given, torch.bfloat16, beside).chunk(2, 1)
            KERNELS.swiglu_quantize(gate, *others, None)
            assert torch.equal(out, gate)
            wide = KERNELS.scaled_gemm(*given, torch.float32, beside, swiglu=True)
            twin = reference.scaled_gemm(*given, torch.float32, beside, swiglu=True)
            torch.testing.assert_close(wide, twin, rtol=1e-5, atol=1e-4)
            truth = (a.double() * scale_a) @ (b.double() * scale_b).t()
            truth += 0 if added is None else added.double()
            truth += t.double() @ up.double().t() if beside else 0
            gate, other = truth.chunk(2, 1)
            truth = torch.nn.functional.silu(gate) * other
            assert (wide - truth).norm() < 2e-6 * truth.norm()
    with pytest.raises(ValueError, match="rows of"):
        gemms.scaled_gemm(a, b, scale_a, scale_b, None, wide[:, 1:], swiglu=True)


@far_below_zero
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_scaled_gemm_of_rows_that_are_not_quantized(dtype):
    for (m, n, k), rank in zip(SHAPES.values(), (16, 64, 5, 40), strict=True):
        a, b, t, up = (
            torch.randn(*size, generator=torch.Generator().manual_seed(i)).to(dtype)
            for i, size in enumerate([(m, k), (n, k), (m, rank), (n, rank)])
        )
        bias = torch.randn(n, generator=torch.Generator().manual_seed(4)).to(dtype)
        truth = a.double() @ b.double().t() + t.double() @ up.double().t()
        for added, gelu in ((None, False), (bias, False), (bias, True)):
            how = {"beside": (t, up), "gelu": gelu}
            out = KERNELS.scaled_gemm(a, b, None, None, added, torch.float32, **how)
            twin = reference.scaled_gemm(a, b, None, None, added, torch.float32, **how)
            torch.testing.assert_close(out, twin, rtol=1e-5, atol=1e-4)
            exact = truth if added is None else truth + added.double()
            if gelu:
                exact = torch.nn.functional.gelu(exact, approximate="tanh")
            assert (out - exact).norm() < 1e-6 * exact.norm()
            narrow = KERNELS.scaled_gemm(a, b, None, None, added, dtype, **how)
            torch.testing.assert_close(narrow, out.to(dtype))


@far_below_zero
def test_plain_layers_of_many_rows_take_loras_in_the_epilogue(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    sizes = (100, 40), (24, 40), (24,), (100, 8), (24, 8)
    x, weight, bias, low, up = (
        torch.randn(size, generator=generator).to(torch.bfloat16) for size in sizes
    )
    ops, launched = choose_ops(CPU), []
    prepare = ops.scaled_gemm

    def prepare_and_tell(a, *rest):
        launched.append(tuple(a.shape))
        return prepare(a, *rest)

    ops = with_kernels(ops, scaled_gemm=prepare_and_tell)
    part = StreamSlice(5, 2, 40, 50)
    for fixed, added, gelu, many in itertools.product(
        (True, False), (bias, None), (True, False), (40, 41)
    ):
        monkeypatch.setattr(products, "MANY_ROWS", many)
        rows, out = Rows(x if fixed else None), torch.zeros(2, 40, 24, dtype=torch.bfloat16)
        product = products.dense_product(Read(rows, part, out, gelu, low), ops)
        for factor in (1, 2):  # prepared once, and taken again with other rows
            rows.matrix = x if fixed else x * factor
            product(Operand.of(weight, None, added, up))
            for i, start in enumerate((5, 55)):
                cut = slice(start, start + 40)
                beside = low[cut], up
                expected = reference.scaled_gemm(
                    rows.matrix[cut], weight, None, None, added, torch.bfloat16, beside, gelu
                )
                torch.testing.assert_close(out[i], expected, rtol=2e-2, atol=5e-2)
        assert launched == ([(40, 40)] * 2 if many == 40 else [])
        launched.clear()


ORDERS = [RowOrder(1, 5, 70), RowOrder(3, 2, 9), RowOrder(1, 1, 1)]


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_low_rank_rows_is_its_twin_and_float64(dtype, order):
    rows = order.items * (order.text + order.image)
    generator = torch.Generator().manual_seed(0)
    for k, ranks in (
        (256, (16, 16)),
        (2048, (16, 16)),
        (4100, (9, 7)),
        (80, (5, 200)),
        (144, (0, 24)),
        (64, (32, 0)),
    ):
        x = torch.randn(rows, k + 8, generator=generator).to(dtype)[:, :k]
        downs = [torch.randn(r, k, generator=generator).to(dtype) if r else None for r in ranks]
        out = torch.full((rows, max(ranks) + 3), 2.0**30, dtype=dtype)
        twin = out.clone()
        KERNELS.low_rank_rows(x, *downs, order, out)
        reference.low_rank_rows(x, *downs, order, twin)
        rtol, atol = (1e-5, 2e-3) if dtype is torch.float32 else (1e-2, 0.5)
        torch.testing.assert_close(out, twin, rtol=rtol, atol=atol)
        assert torch.equal(out == 2.0**30, twin == 2.0**30)  # what is not to be written
        if ranks[0] and dtype is torch.float32:
            truth = x[: order.text].double() @ downs[0].double().t()
            assert (out[: order.text, : ranks[0]] - truth).norm() < 1e-6 * truth.norm()


def test_scaled_gemm_refuses_operands_that_do_not_fit():
    a, scale_a, b, scale_b, _ = operands(4, 16, 32, "int8")
    with pytest.raises(ValueError, match=r"\(4, 32\), \(16, 16\)"):
        KERNELS.scaled_gemm(a, b[:, :16], scale_a, scale_b, None, torch.float32)
    with pytest.raises(ValueError, match="1 scales"):
        KERNELS.scaled_gemm(a, b, scale_a, scale_b[:1], None, torch.float32)
    with pytest.raises(ValueError, match="0 and 0 scales"):
        KERNELS.scaled_gemm(a, b, None, None, None, torch.float32)
    with pytest.raises(ValueError, match="4 and 16 scales"):
        KERNELS.scaled_gemm(a.bfloat16(), b.bfloat16(), scale_a, scale_b, None, torch.float32)


@pytest.mark.parametrize("format", FORMATS)
def test_linear_through_triton(format):
    gemm = choose_gemm(format, CPU, backend="triton")
    assert gemm.row_quantizer == "triton"
    rows, generator = RowFormat(format), torch.Generator().manual_seed(0)
    x = torch.randn(2, 9, 2, 80, generator=generator)[:, :, 1].to(torch.bfloat16)
    weight, scale = reference.row_quantize(torch.randn(48, 80, generator=generator), rows)
    out = gemm.linear(x, weight, scale)
    q, x_scale = reference.row_quantize(x.reshape(18, 80), rows)
    twin = reference.scaled_gemm(q, weight, x_scale, scale, None, torch.bfloat16)
    assert out.shape == (2, 9, 48)
    torch.testing.assert_close(out.reshape(18, 48), twin)
    assert gemm.linear(x[:, :0], weight, scale).shape == (2, 0, 48)


def test_decode_weight_is_its_twin():
    generator = torch.Generator().manual_seed(0)
    e4m3 = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)  # each, with subnormals
    for bits, rows, k, group, dtype, with_codebook in (
        (4, 8, 4096, 16, torch.float8_e4m3fn, True),
        (4, 5, 96, 48, torch.float32, True),
        (4, 3, 160, 4, torch.float8_e4m3fn, False),
        (6, 8, 4096, 16, torch.float8_e4m3fn, False),
        (6, 3, 192, 64, torch.float32, False),
    ):
        codes = torch.randint(-128, 128, (rows, k * bits // 8), generator=generator).to(torch.int8)
        places = torch.randint(0, len(e4m3), (rows, k // group), generator=generator)
        scale = e4m3.view(torch.uint8)[places].view(torch.float8_e4m3fn).to(dtype)
        codebook = torch.randn(16, generator=generator).mul_(3) if with_codebook else None
        twin = reference.decode_weight(codes, scale, codebook, bits)
        scale = scale if dtype == torch.float32 else scale.view(torch.uint8)
        assert torch.equal(KERNELS.decode_weight(codes, scale, codebook, bits), twin)
        assert torch.equal(reference.decode_weight(codes, scale, codebook, bits), twin)
        assert twin.float().std() > 10 and {-127, 127} <= set(twin.flatten().tolist())


def test_decode_weight_refuses_what_does_not_fit():
    codes = torch.zeros(2, 16, dtype=torch.int8)
    for scale in (torch.ones(2, 3), torch.ones(1, 2), torch.ones(2, 16)):
        with pytest.raises(ValueError, match=r"are no codes and scales of \(2, 32\) in 4 bits"):
            KERNELS.decode_weight(codes, scale, None, 4)
