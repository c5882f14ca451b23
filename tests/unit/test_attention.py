"""Attention backends: their numbers, layouts and limits."""

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from qwen_l40s import SettingError
from qwen_l40s.caches import forget
from qwen_l40s.optimizations.attention import (
    BACKENDS,
    AttentionRequest,
    aligned_mask,
    attend_causal,
    choice,
    choose_attention,
)
from qwen_l40s.optimizations.attention.backends import FLOATS, SDPA_FLASH
from qwen_l40s.optimizations.reference import merge_attention

CPU = torch.device("cpu")
CARD = torch.device("cuda", 0)
# torch tells which kernels it passes over.
on_card = [pytest.mark.cuda, pytest.mark.filterwarnings("ignore::UserWarning")]
CASES = [pytest.param(name, CPU) for name, backend in BACKENDS.items() if backend.cpu]
CASES += [pytest.param(name, CARD, marks=on_card) for name in BACKENDS]
on_each = pytest.mark.parametrize(("name", "device"), CASES, ids=str)
EXACT = {torch.bfloat16: 8e-3, torch.float16: 1.5e-3, torch.float32: 2e-3}


@pytest.fixture(autouse=True)
def nothing_remembered():
    forget()
    yield
    forget()


def chosen(name, device, dtype=torch.bfloat16, *, shape, masked=False):
    """The backend; None where this machine cannot, and a skip where a package is missing."""
    batch, tokens, heads, head_dim = shape
    request = AttentionRequest(device, dtype, batch, heads, head_dim, tokens, masked)
    refusal = choice.refusal(name, request)
    reason = str(refusal or "")
    # An older comfy-kitchen lacks the function, and another build its kernel.
    lacks = "not installed", "has no attribute", "INT8 attention requires"
    if any(part in reason for part in lacks):
        pytest.skip(reason)
    assert not reason or device != CPU
    return None if reason else choose_attention(request, name)


def enough(name, tokens):
    """As many tokens as a backend needs on a card, at least."""
    return max(tokens, BACKENDS[name].card.fewest)


def random(*shape, device=CPU, dtype=torch.bfloat16):
    batch, tokens, heads, head_dim = shape
    joint = torch.randn(
        (batch, tokens, 3, heads, head_dim), generator=torch.Generator().manual_seed(tokens)
    )
    return joint.to(device, dtype).unbind(2)


def padding(batch, tokens, padded, device=CPU, dtype=torch.bfloat16):
    mask = torch.zeros(batch, 1, 1, tokens, device=device, dtype=dtype)
    mask[-1, ..., tokens - padded :] = -torch.inf
    return mask


def distance(out, q, k, v, mask=None):
    expected = choice.attend_float64(q, k, v, mask)
    return ((out.double() - expected).norm() / expected.norm()).item()


def most(attention, dtype=torch.bfloat16):
    return EXACT[dtype] if BACKENDS[attention.name].exact else choice.LOSSY_ERROR


# ----------------------------------------------------------------------------------------- numerics


@on_each
def test_result_is_the_softmax_of_the_scores_times_the_values(name, device):
    usual = 2, enough(name, 300), 3, 64
    cases = [(dtype, masked, usual) for dtype in FLOATS for masked in (False, True)]
    lengths = {enough(name, tokens) for tokens in (1, 2, 17, 127, 129, 640, 1280, 1301)}
    cases += [(torch.bfloat16, False, (1, tokens, 2, 128)) for tokens in sorted(lengths)]
    widths = (8, 20, 96, 256)
    cases += [(torch.bfloat16, False, (1, enough(name, 150), 2, width)) for width in widths]
    ran = 0
    for dtype, masked, shape in cases:
        attention = chosen(name, device, dtype, shape=shape, masked=masked)
        if attention is None:
            continue
        q, k, v = random(*shape, device=device, dtype=dtype)
        mask = padding(shape[0], shape[1], 45, device, dtype) if masked else None
        before = [x.clone() for x in (q, k, v)]
        out = attention(q, k, v, mask)
        assert all(map(torch.equal, (q, k, v), before))
        assert (out.shape, out.dtype) == ((*shape[:2], shape[2] * shape[3]), dtype)
        assert out.is_contiguous()
        assert distance(out, q, k, v, mask) < most(attention, dtype), (dtype, masked, shape)
        ran += 1
    assert ran >= 4


@pytest.mark.parametrize("device", [CPU, pytest.param(CARD, marks=on_card)], ids=str)
def test_a_causal_segment_reads_what_is_before_it(device):
    for queries, keys, width in ((1, 1, 64), (7, 7, 64), (4, 31, 128), (61, 1157, 128)):
        q, k, v = random(2, keys, 3, width, device=device)
        q = q[:, -queries:]
        out = attend_causal(q, k, v)
        mask = torch.full((queries, keys), -torch.inf, device=device).triu_(keys - queries + 1)
        assert out.shape == (2, queries, 3 * width) and out.is_contiguous()
        assert distance(out, q, k, v, mask) < EXACT[torch.bfloat16], (queries, keys)


def test_causal_segments_are_the_hosts_where_flash_is_wrong(monkeypatch):
    """As a build whose FlashAttention counts from the first key would be."""
    attend = lambda q, k, v, mask=None, causal=False: SDPA_FLASH.attend(q, k, v, mask)  # noqa: E731
    monkeypatch.setitem(BACKENDS, "sdpa_flash", replace(SDPA_FLASH, attend=attend))
    q, k, v = random(1, 20, 2, 64)
    assert attend_causal(q, k, v) is None


@on_each
def test_strides_do_not_matter(name, device):
    tokens = enough(name, 256)
    shape = (2, tokens, 2, 64)
    attention = chosen(name, device, shape=shape)
    q, k, v = random(*shape, device=device)
    packed = attention(*(x.contiguous() for x in (q, k, v)))
    longer = torch.zeros(2, tokens + 44, 3, 2, 64, device=device, dtype=torch.bfloat16)
    longer[:, 20:-24] = torch.stack((q, k, v), dim=2)
    views = [
        (q, k, v),
        [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)],
        longer[:, 20:-24].unbind(2),
    ]
    for view in views:
        torch.testing.assert_close(attention(*view), packed, rtol=1e-2, atol=1e-2)


SDPA = {
    "sdpa_flash": SDPBackend.FLASH_ATTENTION,
    "sdpa_cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa_efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
on_each_of_torch = pytest.mark.parametrize(
    ("name", "device"),
    [
        *(pytest.param(name, CPU) for name in ("sdpa_flash", "math")),
        *(pytest.param(name, CARD, marks=on_card) for name in SDPA),
    ],
    ids=str,
)


@on_each_of_torch
@pytest.mark.parametrize("masked", [False, True])
def test_operators_of_torch_give_the_bits_of_its_public_function(monkeypatch, name, device, masked):
    """And set no flag of the process, which a thread on another card would see."""
    flags = [name for name in dir(torch._C) if name.startswith("_set_sdp")]
    assert len(flags) > 3

    def expected(q, k, v, mask):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        with sdpa_kernel(SDPA[name]):
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return out.transpose(1, 2).flatten(2)

    cases = [(dtype, (2, 333, 3, 128)) for dtype in FLOATS]
    cases += [(torch.bfloat16, shape) for shape in ((1, 17, 2, 64), (2, 150, 2, 20))]
    ran = 0
    for dtype, shape in cases:
        views = random(*shape, device=device, dtype=dtype)
        mask = padding(shape[0], shape[1], 5, device, dtype) if masked else None
        for q, k, v in (views, [x.contiguous() for x in views]):
            attention = chosen(name, device, dtype, shape=shape, masked=masked)
            if attention is None:
                continue
            with monkeypatch.context() as direct:
                for flag in flags:
                    direct.setattr(torch._C, flag, None)
                out = attention(q, k, v, mask)
            assert torch.equal(out, expected(q, k, v, mask)), (dtype, shape)
            assert out.is_contiguous()
            ran += 1
    assert ran >= 4 or (masked and not BACKENDS[name].card.masks)


class Copies(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        copies = ("clone", "copy_", "_to_copy", "contiguous", "cat", "constant_pad_nd")
        self.count += function.overloadpacket.__name__ in copies
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("name", "device"),
    [
        pytest.param("sdpa_flash", CPU),
        *(
            pytest.param(name, CARD, marks=on_card)
            for name in ("sdpa_flash", "sdpa_cudnn", "sdpa_efficient")
        ),
    ],
    ids=str,
)
def test_the_result_is_a_view_and_nothing_is_copied(name, device):
    shape = (2, 256, 4, 64)
    attention = chosen(name, device, shape=shape)
    q, k, v = random(*shape, device=device)
    with Copies() as copies:
        out = attention(q, k, v)
    assert copies.count == 0
    assert out.is_contiguous()


@pytest.mark.parametrize(
    ("name", "device"), [it for it in CASES if BACKENDS[it.values[0]].gives_lse], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_of_the_keys_add_up_by_their_log_sum_exps(name, device, dtype):
    """A few keys and many, as a prompt's and an image's; heads of a multiple of 8 and others."""
    ran = 0
    for masked, width, cut in ((False, 128, 40), (False, 20, 1), (True, 64, 45)):
        shape = (2, 333, 3, width)
        if chosen(name, device, dtype, shape=shape, masked=masked) is None:
            continue
        q, k, v = random(*shape, device=device, dtype=dtype)
        mask = padding(2, 333, 30, device, dtype) if masked else None
        parts = []
        for part in (slice(cut), slice(cut, None)):
            given = q, k[:, part], v[:, part], None if mask is None else mask[..., part]
            out, lse = BACKENDS[name].attend(*given, lse=True)
            assert torch.equal(out, BACKENDS[name].attend(*given))
            assert (lse.shape, lse.dtype) == ((2, 3, 333), torch.float32)
            parts.append((out, lse))
        merged = merge_attention(*parts)
        assert (merged.shape, merged.dtype) == (parts[0][0].shape, dtype)
        found = distance(merged, q, k, v, mask)
        assert found < (1e-5 if (dtype, device) == (torch.float32, CPU) else EXACT[dtype])
        ran += 1
    assert ran or dtype not in BACKENDS[name].card.dtypes


# -------------------------------------------------------------------------------------------- mask


def test_a_mask_is_aligned_once():
    mask = torch.arange(2 * 333.0).view(2, 1, 1, 333).to(torch.bfloat16)
    aligned = aligned_mask(mask)
    assert torch.equal(aligned, mask)
    assert aligned.stride() == (336, 336, 336, 1)
    assert aligned_mask(aligned) is aligned
    even = torch.zeros(2, 1, 1, 64)
    assert aligned_mask(even) is even
    apart = torch.randn(64, 2).t()[:, None, None]
    assert aligned_mask(apart).stride() == (64, 64, 64, 1)
    assert torch.equal(aligned_mask(apart), apart)
    part = torch.randn(1, 1, 1, 64)[..., 24:56][..., 4:]  # whose rows alone are aligned
    for mask in (part, part[..., :24]):
        assert aligned_mask(mask).data_ptr() % 32 == 0
        assert torch.equal(aligned_mask(mask), mask)


def test_a_mask_is_never_dropped():
    attention = chosen("sdpa_flash", CPU, shape=(1, 50, 2, 32))
    with pytest.raises(SettingError, match="chosen for calls without a mask"):
        attention(*random(1, 50, 2, 32), padding(1, 50, 5))


# ------------------------------------------------------------------------------------------- limits


def test_the_trial_finds_every_kind_of_fault(monkeypatch):
    request = AttentionRequest(CPU, torch.bfloat16, 1, 2, 64, 100, True)
    attend = BACKENDS["math"].attend

    def no_image(*_):
        raise RuntimeError("no kernel image\nstack")

    faults = {
        "a trial failed: no kernel image": no_image,
        "a trial gave values that are not finite": lambda *x: attend(*x) * torch.nan,
        "a trial had a relative error of": lambda *x: attend(*x) * 1.02,
        "a trial gave (2, 333, 2, 64)": lambda *x: attend(*x).unflatten(2, (2, 64)),
        "a trial gave (2, 333, 128) in torch.float32": lambda *x: attend(*x).float(),
    }
    for expected, faulty in faults.items():
        monkeypatch.setitem(BACKENDS, "math", replace(BACKENDS["math"], attend=faulty))
        forget()
        assert str(choice.refusal("math", request)).startswith(expected)


def test_a_trial_is_made_once_per_kind_of_request(monkeypatch):
    calls = []
    attend = BACKENDS["math"].attend
    counted = replace(BACKENDS["math"], attend=lambda *x: calls.append(1) or attend(*x))
    monkeypatch.setitem(BACKENDS, "math", counted)
    for count, (tokens, masked) in zip(
        (1, 1, 2), ((100, False), (300, False), (300, True)), strict=True
    ):
        asked = AttentionRequest(CPU, torch.bfloat16, 1, 2, 64, tokens, masked)
        assert choice.refusal("math", asked) is None and len(calls) == count


def test_a_trial_that_found_no_memory_is_made_again(monkeypatch):
    def full(*_):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    request = AttentionRequest(CPU, torch.bfloat16, 1, 2, 64, 100)
    with monkeypatch.context() as short:
        short.setitem(BACKENDS, "math", replace(BACKENDS["math"], attend=full))
        assert choice.refusal("math", request).fact == "too little memory is free for a trial"
    assert choice.refusal("math", request) is None


def test_a_trial_leaves_the_random_numbers_of_a_seed_alone():
    torch.manual_seed(5)
    expected = torch.randn(4)
    torch.manual_seed(5)
    for name in BACKENDS:
        choice.refusal(name, AttentionRequest(CPU, torch.bfloat16, 1, 2, 64, 100))
    assert torch.equal(torch.randn(4), expected)
