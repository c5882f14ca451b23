"""The Triton kernels between a block's GEMMs in Triton's CPU interpreter, against float64.

tests/unit/test_kernels.py runs this file in a process of its own: TRITON_INTERPRET=1 has to be set
before Triton is imported, and nothing can be compiled after that.
"""

import block_kernel_cases as cases
import pytest
import torch
import triton  # noqa: F401, whose interpreter the package asks for

from qwen_l40s.optimizations import reference
from qwen_l40s.optimizations.fused import choose_ops
from qwen_l40s.optimizations.kernels.qk_norm_rope import launch_shape
from qwen_l40s.optimizations.kernels.rows import WIDEST_ROW
from qwen_l40s.optimizations.reference import QKNorm, Tokens
from qwen_l40s.spec.formats import RowFormat

KERNELS = cases.Calls(choose_ops(torch.device("cpu")))
FEW = cases.TOKENS["batch of two with a reference"]
# A row of text, of the image, and of the image at timestep zero: of wide rows each takes seconds.
THREE = Tokens(1, 1, 2, 1)
# The first two are held in three parts, the others in one.
WIDTHS = [pytest.param(3072, torch.bfloat16, marks=pytest.mark.slow)]
WIDTHS += [(768, torch.float16), (256, torch.float32)]
WIDTHS += [(123, torch.bfloat16), (1, torch.float16)]
# The interpreter casts to bf16 without rounding; ptxas' and every card's cast rounds.
IN_INTERPRETER = {"truncated": True}
# numpy: exp of what is far below zero, and the arithmetic of NaN and inf.
quiet = pytest.mark.filterwarnings(
    "ignore:(overflow|invalid value) encountered:RuntimeWarning", "ignore:All-NaN:RuntimeWarning"
)


@pytest.mark.parametrize("tokens", cases.TOKENS.values(), ids=cases.TOKENS)
def test_residual_norm_of_every_kind_of_batch(tokens):
    cases.check_residual_norm(KERNELS.residual_norm, tokens, 96, torch.float32)


@pytest.mark.parametrize(("width", "dtype"), WIDTHS, ids=str)
def test_residual_norm_of_every_dtype(width, dtype):
    cases.check_residual_norm(KERNELS.residual_norm, THREE, width, dtype, **IN_INTERPRETER)


def test_residual_norm_of_a_modulation_wider_than_the_stream():
    x = cases.random(FEW.rows, 96).to(torch.bfloat16)
    _, norms = cases.halves(FEW, 96)
    h, _ = KERNELS.residual_norm(x, None, None, norms, FEW, cases.EPS)
    exact, _ = reference.residual_norm(x.double(), None, None, cases.doubled(norms), FEW, cases.EPS)
    cases.assert_rounded(h, exact, 3e-5, **IN_INTERPRETER)


def test_residual_norm_of_rows_far_from_zero():
    """mean(x * x) - mean**2 would leave nothing of this variance in fp32."""
    x = cases.random(FEW.rows, 3072) + 3000
    _, norms = cases.halves(FEW, 3072)
    h, _ = KERNELS.residual_norm(x, None, None, norms, FEW, cases.EPS)
    exact, _ = reference.residual_norm(x.double(), None, None, cases.doubled(norms), FEW, cases.EPS)
    # The mean itself is rounded to 2**-13.
    cases.assert_rounded(h, exact, 2e-3)


@quiet
@pytest.mark.parametrize("width", [96, 768], ids=["one part", "three parts"])
@pytest.mark.parametrize("format", cases.FORMATS)
def test_what_is_not_finite_shows_in_the_scale(format, width):
    _, norms = cases.halves(FEW, width)
    x = cases.random(FEW.rows, width)
    x[3, 5], x[4, -5], x[5, width // 2] = torch.nan, torch.inf, torch.nan
    _, scale = KERNELS.residual_norm(x, None, None, norms, FEW, cases.EPS, format)
    assert scale.flatten().isfinite().tolist() == [True] * 3 + [False] * 3 + [True] * 4
    x = cases.random(4, width)
    x[0, 5], x[1, -5], x[2, width // 2] = torch.nan, torch.inf, -torch.inf
    _, scale = KERNELS.gelu_quantize(x, format)
    assert scale[0].isnan()
    assert scale[1].isinf()
    assert scale[2].isnan()
    assert scale[3].isfinite()


def test_residual_norm_refuses_what_does_not_fit():
    x = torch.zeros(FEW.rows, 16)
    gates, norms = cases.halves(FEW, 16)

    def call(x=x, branch=x, gates=gates, norms=norms, tokens=FEW):
        KERNELS.residual_norm(x, branch, gates, norms, tokens, cases.EPS)

    with pytest.raises(ValueError, match=r"\(9, 16\)"):
        call(x=x[1:])
    with pytest.raises(ValueError, match="contiguous"):
        call(x=torch.zeros(16, FEW.rows).t())
    with pytest.raises(ValueError, match=str(WIDEST_ROW)):
        call(x=torch.zeros(FEW.rows, WIDEST_ROW + 1))
    with pytest.raises(ValueError, match=r"rows to \(10, 16\), got \(9, 16\)"):
        call(branch=x[1:])
    with pytest.raises(ValueError, match=r"got \(10, 16\) with strides \(1, 10\)"):
        call(branch=torch.zeros(16, FEW.rows).t())
    with pytest.raises(ValueError, match="4 x 48 for images"):
        call(norms=norms._replace(image=norms.image[:2]))
    with pytest.raises(ValueError, match="2 x 48 for text"):
        call(gates=gates._replace(text=gates.text[:, :32]))
    with pytest.raises(ValueError, match=r"torch\.float16"):
        call(gates=gates._replace(text=gates.text.half()))


@pytest.mark.parametrize("tokens", cases.TOKENS.values(), ids=cases.TOKENS)
def test_qk_norm_rope_of_every_kind_of_batch(tokens):
    cases.check_qk_norm_rope(KERNELS.qk_norm_rope, tokens, 3, 32, torch.float32)


@pytest.mark.parametrize(
    ("heads", "dtype"), [*zip(cases.HEADS.values(), cases.DTYPES * 2, strict=False)], ids=str
)
def test_qk_norm_rope_of_every_dtype(dtype, heads):
    cases.check_qk_norm_rope(KERNELS.qk_norm_rope, FEW, *heads, dtype, **IN_INTERPRETER)


def test_qk_norm_rope_with_a_rotation_for_each_item():
    cases.check_qk_norm_rope(KERNELS.qk_norm_rope, FEW, 3, 64, torch.float32, items=2)


def test_qk_norm_rope_with_a_rotation_in_bf16():
    half = torch.bfloat16
    cases.check_qk_norm_rope(KERNELS.qk_norm_rope, FEW, 3, 64, half, angles=half, **IN_INTERPRETER)


def test_heads_of_one_program_divide_the_heads():
    assert launch_shape(24, 128) == (8, 4)
    assert launch_shape(24, 256) == (8, 8)
    assert launch_shape(64, 128) == (16, 8)
    assert launch_shape(3, 32) == (1, 1)


def test_qk_norm_rope_refuses_what_does_not_fit():
    tokens = Tokens(1, 3, 5, 5)
    q = torch.zeros(1, 8, 2, 32)
    weights, rotary = cases.norm_weights(32), cases.rotation(1, 8, 32)

    def call(q=q, k=q, norm=weights, rotary=rotary):
        KERNELS.qk_norm_rope(q, k, norm, rotary, tokens, cases.EPS)

    with pytest.raises(ValueError, match="got 48"):
        call(q=torch.zeros(1, 8, 2, 48))
    with pytest.raises(ValueError, match=r"\(1, 8, 1, 32\)"):
        call(k=q[:, :, :1])
    with pytest.raises(ValueError, match=r"1 x 8 tokens, q from token 0 on, got \(2, 8"):
        call(q=q.expand(2, -1, -1, -1), k=q.expand(2, -1, -1, -1))
    with pytest.raises(ValueError, match=r"strides \(512, 32, 256, 1\)"):
        call(q=torch.zeros(1, 2, 8, 32).transpose(1, 2))
    with pytest.raises(ValueError, match=r"1 x 8 x 16, got \(1, 7, 16\)"):
        call(rotary=cases.rotation(1, 7, 32))
    with pytest.raises(ValueError, match=r"\(16,\)"):
        call(norm=QKNorm(*weights[:3], weights.key[:16]))


@pytest.mark.slow
@quiet
def test_gelu_quantize_of_every_dtype():
    shapes = (2, 12288), (2, 3072), (2, 4096), (5, 123), (2, 1)
    for shape, dtype in zip(shapes, (*cases.DTYPES, *cases.DTYPES[:2]), strict=True):
        cases.check_gelu_quantize(KERNELS.gelu_quantize, cases.random(*shape, dtype=dtype) * 3)


@quiet
def test_gelu_quantize_where_the_curve_is_flat():
    """Far out on both sides, and numbers whose cube exceeds fp32."""
    x = torch.linspace(-12, 12, 4096).reshape(512, 8).t().contiguous()
    cases.check_gelu_quantize(KERNELS.gelu_quantize, x)
    x = cases.random(4, 96)
    x[0, :2] = torch.tensor([-3e38, -1e20])
    x[1] = -20
    x[2, 7] = 1e30
    x[3] = 0
    cases.check_gelu_quantize(KERNELS.gelu_quantize, x)


def test_gelu_quantize_of_rows_apart():
    wide = cases.random(4, 3, 768)
    cases.check_gelu_quantize(KERNELS.gelu_quantize, wide[:, 1])
    cases.check_gelu_quantize(KERNELS.gelu_quantize, wide[:, 1, :40])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_swiglu_quantize_of_halves_and_of_two_matrices(dtype):
    for rows, width in ((5, 96), (3, 768), (2, 40)):
        both = cases.random(rows, 2 * width, dtype=dtype) * 3
        cases.check_swiglu_quantize(KERNELS.swiglu_quantize, both[:, :width], both[:, width:])
        gate, up = (half.contiguous() for half in both.chunk(2, 1))
        cases.check_swiglu_quantize(KERNELS.swiglu_quantize, gate, up)


@quiet
def test_swiglu_quantize_far_out():
    gate = torch.tensor([[1e4, -1e4, 0.0, -88.0]]).expand(2, -1).repeat(1, 16).contiguous()
    cases.check_swiglu_quantize(KERNELS.swiglu_quantize, gate, torch.ones_like(gate))


def test_swiglu_quantize_refuses_what_does_not_fit():
    gate, up = torch.zeros(2, 8), torch.zeros(8, 2).t()
    with pytest.raises(ValueError, match="one shape and row stride"):
        KERNELS.swiglu_quantize(gate, up, RowFormat("int8"))
    with pytest.raises(ValueError, match=str(WIDEST_ROW)):
        KERNELS.swiglu_quantize(*torch.zeros(2, 1, WIDEST_ROW + 1), RowFormat("int8"))


def test_gelu_quantize_refuses_rows_that_it_cannot_hold():
    with pytest.raises(ValueError, match=str(WIDEST_ROW)):
        KERNELS.gelu_quantize(torch.zeros(1, WIDEST_ROW + 1), RowFormat("int8"))


def test_rotation_of_some_queries():
    cases.check_some_queries(KERNELS, dtype=torch.float16)


GUIDED = {
    "all rows": ((2, 5, 3, 32), (0, 0)),
    "between the rows of two prompts": ((1, 9, 5, 16), (2, 6)),
    "heads of another width": ((3, 4, 2, 20), (1, 3)),
}


@pytest.mark.parametrize(("shape", "cuts"), GUIDED.values(), ids=GUIDED)
def test_guided_rows(shape, cuts):
    guided = KERNELS.ops.guided_rows
    for dtype in (torch.float32, torch.bfloat16):
        for merged in (True, False):
            for on in ((), tuple(item % 2 == 0 for item in range(shape[0]))):
                how = {"on": on, "merged": merged, **IN_INTERPRETER}
                cases.check_guided_rows(guided, shape, cuts, dtype, **how)


def test_guided_rows_of_what_the_kernel_does_not_take():
    guided = KERNELS.ops.guided_rows
    cases.check_guided_rows(guided, (1, 3, 33, 128), (1, 2), torch.float32)
    cases.check_guided_rows(
        guided, (33, 3, 1, 16), (1, 2), torch.float32, on=(True,) * 32 + (False,)
    )
