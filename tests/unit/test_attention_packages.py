"""Attention of other packages as they are published, and every way in which they are broken.

They run on a card alone: `published_attention.py` stands in for them.
"""

import importlib.util
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

import published_attention as published

from qwen_l40s import UnavailableError
from qwen_l40s.caches import forget
from qwen_l40s.machine.card import InstalledCards, State
from qwen_l40s.optimizations.attention import (
    BACKENDS,
    AttentionRequest,
    ChosenAttention,
    check_backends,
    choice,
    choose_attention,
    chosen,
)

CPU = torch.device("cpu")

PACKAGES = {
    "flash_attn_3": ("fa3_fwd_interface", published.FLASH, (9, 0)),
    "kitchen_int8": ("comfy_kitchen", published.KITCHEN, (8, 9)),
}
on_each = pytest.mark.parametrize("name", PACKAGES)


@pytest.fixture(autouse=True)
def nothing_remembered():
    forget()
    yield
    forget()


@pytest.fixture
def card(monkeypatch):
    """Makes the processor pass for a card of a compute capability and a CUDA version."""

    def set_up(sm, cuda="13.0"):
        monkeypatch.setattr(choice, "sm_of", lambda device: sm)
        monkeypatch.setattr(choice, "BUDGET_S", 10**6)  # however busy this machine is
        monkeypatch.setattr(torch.version, "cuda", cuda)
        forget()

    return set_up


def request(tokens=300, dtype=torch.bfloat16, head_dim=64, masked=False):
    return AttentionRequest(CPU, dtype, 2, 3, head_dim, tokens, masked)


def random(tokens, head_dim=64, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(tokens)
    return torch.randn(2, tokens, 3, 3, head_dim, generator=generator).to(dtype).unbind(2)


def distance(out, q, k, v):
    expected = choice.attend_float64(q, k, v, None)
    return ((out.double() - expected).norm() / expected.norm()).item()


# -------------------------------------------------------------------------------- published calls


@pytest.mark.parametrize(
    ("name", "module", "change"),
    [
        ("flash_attn_3", "fa3_fwd_interface", None),
        # Built from source. Its first releases gave the log-sum-exp too.
        ("flash_attn_3", "flash_attn_interface", lambda out: (out, out.sum())),
    ],
)
def test_flash_attention_is_taken_where_it_is_fastest(
    monkeypatch, set_settings, card, tmp_path, name, module, change
):
    set_settings(cache=str(tmp_path))
    monkeypatch.setattr(choice, "_measured", {})
    monkeypatch.setattr(choice, "_machine", lambda device: name)
    monkeypatch.setattr(choice, "timed_ms", lambda call, *_: 2.0 - (call is fastest))
    fastest = BACKENDS[name].attend
    card((9, 0))
    assert choose_attention(request()).name != name
    card((9, 0))
    calls = published.install(monkeypatch, module, published.FLASH, change)
    assert choose_attention(request(), name).reason == "requested"
    attention = choose_attention(request(tokens=1300))
    assert attention.name == name and attention.reason.startswith("fastest exact of ")
    calls.clear()
    q, k, v = random(1300)
    out = attention(q, k, v)
    assert out.shape == (2, 1300, 3 * 64) and out.is_contiguous()
    assert distance(out, q, k, v) < 8e-3
    assert len(calls) == 1


def test_kitchen_rounds_as_far_as_fast_allows(monkeypatch, card):
    """Also where there are fewer queries than keys, as beside a prefix."""
    card((8, 9))
    calls = published.install(monkeypatch, "comfy_kitchen", published.KITCHEN)
    attention = choose_attention(request(tokens=1300), "kitchen_int8")
    q, k, v = random(1300)
    for first in (0, 200):
        calls.clear()
        out = attention(q[:, first:], k, v)
        assert out.shape == (2, 1300 - first, 3 * 64) and out.is_contiguous()
        assert 1e-3 < distance(out, q[:, first:], k, v) < chosen.MOST_ERROR
        ((_, given),) = calls
        assert [given[it].shape[1:] for it in "qkv"] == [(3, 1300 - first, 64)] + [
            (3, 1300, 64)
        ] * 2


@pytest.mark.parametrize(
    ("about", "reason"),
    [
        *(({"tokens": count}, "needs 1025 tokens") for count in (2, 3, 64, 128, 300, 1024)),
        *(({"head_dim": width}, "takes heads of 64, 128, 256") for width in (16, 32, 80, 96)),
        ({"head_dim": 320}, "takes heads of 64, 128, 256, not 320"),
        ({"dtype": torch.float32}, "takes bfloat16 and float16, not float32"),
        ({"masked": True}, "takes no mask"),
    ],
)
def test_what_kitchen_would_pad_mask_or_compute_in_another_way_is_exact(
    monkeypatch, card, about, reason
):
    card((8, 9))
    calls = published.install(monkeypatch, "comfy_kitchen", published.KITCHEN)
    asked = replace(request(tokens=1300), **about)
    with pytest.raises(UnavailableError, match=reason):
        choose_attention(asked, "kitchen_int8")
    monkeypatch.setattr(choice, "_may_launch", lambda *_: False)
    found = ChosenAttention("kitchen_int8", lossy=True).choose(asked)
    assert BACKENDS[found.name].exact and reason in found.reason and not calls


def test_prompts_references_and_guidance_stay_exact(monkeypatch, card, set_settings):
    card((8, 9))
    published.install(monkeypatch, "comfy_kitchen", published.KITCHEN)
    monkeypatch.setattr(choice, "measure", lambda *_: (None, []))
    set_settings(attention="kitchen_int8")
    for name in ("auto", "kitchen_int8"):
        attention = ChosenAttention(name, lossy=True)
        assert attention.choose(request(tokens=1300)).name == "kitchen_int8"
        assert BACKENDS[attention.choose(request(tokens=1300), exact=True).name].exact
    named = ChosenAttention("math")
    assert named.choose(request(), exact=True).name == "math"


# --------------------------------------------------------------------------- missing and broken


@on_each
def test_a_package_that_is_not_installed(monkeypatch, card, name):
    module, _, sm = PACKAGES[name]
    if importlib.util.find_spec(module) is not None:
        pytest.skip(f"{module} is installed")
    card(sm)
    package = BACKENDS[name].package.distribution
    assert str(choice.refusal(name, request(tokens=1300))) == f"{package} not installed"


@on_each
def test_a_package_whose_import_raises(monkeypatch, card, tmp_path, name):
    module, _, sm = PACKAGES[name]
    (tmp_path / f"{module}.py").write_text("raise ImportError('undefined symbol: _ZN3c10\\nmore')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(published.sys.modules, module, raising=False)
    card(sm)
    with pytest.raises(UnavailableError, match="import fails: undefined symbol: _ZN3c10; use auto"):
        choose_attention(request(tokens=1300), name)


@on_each
def test_a_package_that_lacks_its_function(monkeypatch, card, name):
    """As an older comfy-kitchen, or flash-attn-4 alone, which brings the same top folder."""
    module, _, sm = PACKAGES[name]
    card(sm)
    published.install(monkeypatch, module, {})
    assert "has no attribute" in choice.refusal(name, request(tokens=1300)).fact


@on_each
def test_a_package_that_computes_wrongly(monkeypatch, card, name):
    module, functions, sm = PACKAGES[name]
    for change, reason in (
        (lambda out: 1 / 0, "a trial failed: division by zero"),
        (lambda out: scaled(out, torch.nan), "a trial gave values that are not finite"),
        (lambda out: scaled(out, 0.7), "a trial had a relative error of"),
    ):
        card(sm)
        published.install(monkeypatch, module, functions, change)
        assert str(choice.refusal(name, request(tokens=1300))).startswith(reason)


def scaled(result, factor):
    if isinstance(result, tuple):
        return result[0] * factor, result[1]
    return result * factor


def test_declared_limits(monkeypatch, card):
    for module, functions, _ in PACKAGES.values():
        published.install(monkeypatch, module, functions)
    for name, sm, about, reason in (
        ("flash_attn_3", (12, 0), {}, "sm_120, has code for sm_90"),
        ("sdpa_flash", (8, 9), {"masked": True}, "takes no mask"),
        ("sdpa_cudnn", (7, 5), {}, "sm_75, needs sm_80 or newer"),
        ("sdpa_cudnn", (8, 9), {"head_dim": 20}, "takes heads of a multiple of 8, not 20"),
        ("sdpa_cudnn", (8, 9), {"head_dim": 256}, "takes heads of at most 128, not 256"),
        ("sdpa_cudnn", (8, 9), {"tokens": 1}, "needs 2 tokens, there are 1"),
    ):
        card(sm)
        assert str(choice.refusal(name, request(**about))).startswith(reason)


def test_cudnn_is_left_alone_where_torch_is_to_be_deterministic(monkeypatch, card):
    """As torch does in choosing a kernel; a warning alone is for its backward pass."""
    card((8, 9))
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    reason = "torch counts it as not deterministic"
    assert str(choice.refusal("sdpa_cudnn", request())) == reason
    monkeypatch.setattr(torch, "is_deterministic_algorithms_warn_only_enabled", lambda: True)
    assert str(choice.refusal("sdpa_cudnn", request())) != reason


# ------------------------------------------------------------------------------------------- doctor


def test_nothing_of_a_package_is_imported_without_a_card(monkeypatch, tmp_path):
    for module, _, _ in PACKAGES.values():
        (tmp_path / f"{module}.py").write_text("raise AssertionError('imported')")
        monkeypatch.delitem(published.sys.modules, module, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    checks = {check.name: check for check in check_backends(InstalledCards())}
    assert list(checks) == [f"attention {name}" for name in BACKENDS]
    for name in PACKAGES:
        assert checks[f"attention {name}"] == State.NOT_USABLE.of(
            f"attention {name}", "needs an NVIDIA GPU"
        )
    assert checks["attention math"].why.fact == "exact; with and without a mask"


def test_each_backend_has_its_state_and_reason(monkeypatch, card):
    card((8, 9))
    for module, functions, _ in PACKAGES.values():
        published.install(monkeypatch, module, functions)
    checks = {
        check.name.removeprefix("attention "): check for check in check_backends(InstalledCards())
    }
    assert checks["flash_attn_3"].state is State.NOT_USABLE
    assert checks["flash_attn_3"].why.fact == "sm_89, has code for sm_90"
    assert checks["sdpa_flash"].state is State.LIMITED
    assert checks["sdpa_cudnn"].why.fact.startswith("a trial failed: ")
    assert checks["math"].state is State.USABLE
    assert checks["kitchen_int8"].state is State.LIMITED
    assert "quantized, by name or with fast; not with a mask" in checks["kitchen_int8"].why.fact
