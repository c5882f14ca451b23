"""The kernels between a block's GEMMs: their twins against published code, and Triton's on a card.

tests/interpreted_block_kernels.py has Triton's without a card.
"""

import pytest

torch = pytest.importorskip("torch")

import block_kernel_cases as cases

from qwen_l40s import SettingError
from qwen_l40s.optimizations import kernels, reference
from qwen_l40s.optimizations.fused import TORCH, choose_ops
from qwen_l40s.optimizations.reference import Tokens
from qwen_l40s.spec.formats import RowFormat

TWINS = cases.Calls(TORCH)

# ------------------------------------------------------------------------------- what the twins are


def test_residual_norm_is_torchs_layer_norm_between_gate_and_modulation():
    """Token by token, its item and stream counted off by hand."""
    for tokens in cases.TOKENS.values():
        check_token_by_token(tokens)


def check_token_by_token(tokens):
    gates, norms = (cases.doubled(half) for half in cases.halves(tokens, 48))
    before = cases.random(tokens.rows, 48, dtype=torch.float64)
    branch = cases.random(tokens.rows, 48, dtype=torch.float64, seed=1)
    x = before.clone()
    h, _ = reference.residual_norm(x, branch, gates, norms, tokens, cases.EPS)
    row = 0
    for stream, length in (("text", tokens.text), ("image", tokens.image)):
        for item in range(tokens.batch):
            for token in range(length):
                zero = stream == "image" and token >= tokens.zero_from
                entry = item + (tokens.batch if zero else 0)
                gate = getattr(gates, stream)[entry].chunk(3)[2]
                shift, scale, _ = getattr(norms, stream)[entry].chunk(3)
                new = before[row] + gate * branch[row]
                norm = torch.nn.functional.layer_norm(new, (48,), eps=cases.EPS)
                torch.testing.assert_close(x[row], new)
                torch.testing.assert_close(h[row], norm * (1 + scale) + shift)
                row += 1
    assert row == tokens.rows


def test_qk_norm_rope_is_what_diffusers_computes():
    """Its RMSNorm and its rotation by complex numbers, each stream on its own."""
    pytest.importorskip("diffusers")
    from diffusers.models.normalization import RMSNorm
    from diffusers.models.transformers.transformer_qwenimage import apply_rotary_emb_qwen

    tokens, heads, head_dim = Tokens(2, 3, 5, 5), 24, 128
    shape = tokens.batch, tokens.joint, heads, head_dim
    rotary, weights = cases.rotation(1, tokens.joint, head_dim), cases.norm_weights(head_dim)
    turns = torch.complex(rotary.cos[0], rotary.sin[0])

    def published(x, text_weight, image_weight):
        text, image = slice(0, tokens.text), slice(tokens.text, None)
        parts = []
        for here, weight in ((text, text_weight), (image, image_weight)):
            norm = RMSNorm(head_dim, eps=cases.EPS)
            norm.weight.data = weight
            parts.append(apply_rotary_emb_qwen(norm(x[:, here]), turns[here], use_real=False))
        return torch.cat(parts, dim=1).detach()

    q, k = cases.random(*shape, seed=1), cases.random(*shape, seed=2)
    expected_q = published(q, weights.text_query, weights.query)
    expected_k = published(k, weights.text_key, weights.key)
    reference.qk_norm_rope(q, k, weights, rotary, tokens, cases.EPS)
    torch.testing.assert_close(q, expected_q)
    torch.testing.assert_close(k, expected_k)


@pytest.mark.parametrize("format", cases.FORMATS)
def test_gelu_quantize_is_the_tanh_form_quantized_by_rows(format):
    x = cases.random(5, 123) * 3
    wide = x.double()
    tanh = ((wide + 0.044715 * wide**3) * (2 / torch.pi) ** 0.5).tanh()
    twin = reference.row_quantize(0.5 * wide * (1 + tanh), format)
    cases.assert_quantized(*reference.gelu_quantize(x, format), *twin)


# ---------------------------------------------------------------- the twins in fewer bits than that


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
def test_the_twin_of_residual_norm_rounds_once(dtype):
    for tokens in cases.TOKENS.values():
        cases.check_residual_norm(TWINS.residual_norm, tokens, 96, dtype)


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
def test_the_twin_of_qk_norm_rope_rounds_once(dtype):
    tokens = cases.TOKENS["batch of two with a reference"]
    for heads in cases.HEADS.values():
        cases.check_qk_norm_rope(TWINS.qk_norm_rope, tokens, *heads, dtype, items=2)


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
def test_the_twin_of_gelu_quantize_computes_in_fp32(dtype):
    cases.check_gelu_quantize(TWINS.gelu_quantize, cases.random(5, 1000, dtype=dtype) * 3)


def test_the_twin_rotates_some_queries_as_all():
    cases.check_some_queries(TWINS)


def test_a_format_that_is_none():
    tokens = cases.TOKENS["one item"]
    _, norms = cases.halves(tokens, 16)
    x = torch.zeros(tokens.rows, 16)
    with pytest.raises(SettingError, match="'int4': use fp8 or int8"):
        reference.residual_norm(x, None, None, norms, tokens, cases.EPS, RowFormat("int4"))
    with pytest.raises(SettingError, match="'int4': use fp8 or int8"):
        reference.gelu_quantize(x, RowFormat("int4"))


# -------------------------------------------------------------------------------------- on the card


def on_card(test):
    for mark in (
        # Triton 3.9 announces another default with every kernel.
        pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION"),
        pytest.mark.skipif(bool(kernels.missing()), reason=kernels.missing() or "-"),
        pytest.mark.cuda,
    ):
        test = mark(test)
    return test


# 1024x1024 with 200 text tokens, the same with a reference image, two images, and few tokens.
REAL = {
    "1024x1024": Tokens(1, 200, 4096, 4096),
    "1024x1024 with a reference": Tokens(1, 200, 8192, 4096),
    "batch of two": Tokens(2, 77, 1024, 1024),
    "batch of five, one text token": Tokens(5, 1, 17, 9),
}


# Of the MLP, then rows in three parts and in one.
GELU_SHAPES = [(4296, 12288), (17, 3072), (9, 768), (7, 4096), (5, 123), (3, 16384)]


def on_the_card():
    return cases.Calls(choose_ops(torch.device("cuda")))


def needs_e4m3():
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("Triton converts to e4m3 from compute capability 8.9 on")


@on_card
@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
def test_residual_norm_on_the_card(dtype):
    needs_e4m3()
    for tokens in REAL.values():
        cases.check_residual_norm(on_the_card().residual_norm, tokens, 3072, dtype, device="cuda")


@on_card
@pytest.mark.parametrize("width", [123, 96, 768, 4096, 12288, 16384])
def test_residual_norm_of_other_widths_on_the_card(width):
    needs_e4m3()
    tokens, half = REAL["batch of five, one text token"], torch.bfloat16
    cases.check_residual_norm(on_the_card().residual_norm, tokens, width, half, device="cuda")


@on_card
@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
def test_qk_norm_rope_on_the_card(dtype):
    for tokens in REAL.values():
        cases.check_qk_norm_rope(on_the_card().qk_norm_rope, tokens, 24, 128, dtype, device="cuda")


@on_card
def test_qk_norm_rope_of_other_heads_on_the_card():
    tokens, half = REAL["batch of five, one text token"], torch.bfloat16
    for heads in cases.HEADS.values():
        for angles, items in ((half, 5), (torch.float32, 1)):
            how = {"items": items, "angles": angles, "device": "cuda"}
            cases.check_qk_norm_rope(on_the_card().qk_norm_rope, tokens, *heads, half, **how)


@on_card
@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("shape", GELU_SHAPES, ids=str)
def test_gelu_quantize_on_the_card(shape, dtype):
    needs_e4m3()
    x = cases.random(*shape, dtype=dtype, device="cuda") * 3
    cases.check_gelu_quantize(on_the_card().gelu_quantize, x)


@on_card
@pytest.mark.parametrize("merged", [True, False])
def test_guided_rows_on_the_card(merged):
    function = on_the_card().ops.guided_rows
    for dtype in cases.DTYPES:
        for shape, cuts in (((2, 300, 24, 128), (60, 110)), ((1, 1000, 28, 128), (0, 0))):
            on = (True, False)[: shape[0]]
            how = {"on": on, "merged": merged, "device": "cuda"}
            cases.check_guided_rows(function, shape, cuts, dtype, **how)


@on_card
def test_rows_past_2_to_the_31_elements():
    """Offsets of 64 bits: 8 images of 3072x3072 have that many elements in the MLP."""
    if torch.cuda.mem_get_info()[0] < 24 * 2**30:
        pytest.skip("needs 24 GiB of free memory on the card")
    half = torch.bfloat16
    last = cases.random(8, 12288, dtype=half, device="cuda")

    x = torch.zeros(2**31 // 12288 + 9, 12288, dtype=half, device="cuda")
    x[-8:] = last
    int8 = RowFormat("int8")
    q, scale = on_the_card().gelu_quantize(x, int8)
    cases.assert_quantized(q[-8:], scale[-8:], *reference.gelu_quantize(last.double(), int8))
    del x, q

    tokens = Tokens(1, 1, 2**31 // 3072 + 8, 9)
    _, norms = cases.halves(tokens, 3072, half, "cuda")
    x = torch.zeros(tokens.rows, 3072, dtype=half, device="cuda")
    x[-8:] = last[:, :3072]
    h, _ = on_the_card().residual_norm(x, None, None, norms, tokens, cases.EPS)
    few = Tokens(1, 0, 8, 0)
    exact, _ = reference.residual_norm(
        x[-8:].double(), None, None, cases.doubled(norms), few, cases.EPS
    )
    cases.assert_rounded(h[-8:], exact, 3e-5)
    del x, h

    tokens = Tokens(8, 1, 2**31 // (8 * 9216) + 8, 0)
    joint = torch.zeros(8, tokens.joint, 3, 24, 128, dtype=half, device="cuda")
    q, k, _ = joint.unbind(2)
    q[-1, -8:] = k[-1, -8:] = last[:, :3072].unflatten(1, (24, 128))
    rotary, norm = cases.rotation(1, tokens.joint, 128, device="cuda"), cases.norm_weights(128)
    norm = type(norm)(*(weight.to("cuda") for weight in norm))
    end = type(rotary)(*(part[:, -8:] for part in rotary))
    exact_q, exact_k = (x[-1:, -8:].double() for x in (q, k))
    reference.qk_norm_rope(exact_q, exact_k, norm, end, Tokens(1, 0, 8, 0), cases.EPS)
    on_the_card().qk_norm_rope(q, k, norm, rotary, tokens, cases.EPS)
    cases.assert_rounded(q[-1:, -8:], exact_q, 1e-5)
    cases.assert_rounded(k[-1:, -8:], exact_k, 1e-5)


@on_card
def test_a_prompt_of_another_length_compiles_nothing():
    from qwen_l40s.optimizations.kernels import qk_norm_rope, residual_norm

    watched = qk_norm_rope._qk_norm_rope_kernel, residual_norm._residual_norm_kernel
    if not hasattr(watched[0], "device_caches"):
        pytest.skip("this Triton keeps its compiled kernels elsewhere")

    def compiled():
        return [sum(len(cache[0]) for cache in k.device_caches.values()) for k in watched]

    half, seen = torch.bfloat16, []
    for text in (7, 1, 16, 32, 200):
        tokens = Tokens(1, text, 17 * text, 16 * text)
        gates, norms = cases.halves(tokens, 3072, half, "cuda")
        x = cases.random(tokens.rows, 3072, dtype=half, device="cuda")
        on_the_card().residual_norm(x, x, gates, norms, tokens, cases.EPS)
        cases.check_qk_norm_rope(on_the_card().qk_norm_rope, tokens, 24, 128, half, device="cuda")
        seen.append(compiled())
    assert seen[0] == seen[-1]


@on_card
def test_rotation_of_some_queries_on_the_card():
    cases.check_some_queries(on_the_card(), device="cuda")
