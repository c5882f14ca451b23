"""Measures of lossy settings: the arithmetic, and what to keep in bf16."""

import math
import random
import sys
import types

import pytest

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")


from qwen_l40s.families.qwen_image import BLOCK_GEMMS
from qwen_l40s.hosts.diffusers.quantized import (
    PlainProduct,
    plain_product,
    tensor_core_product,
)
from qwen_l40s.loaders.quantize import layers_to_quantize
from qwen_l40s.measure.fidelity import (
    LayerError,
    keep_patterns,
    load_lpips,
    propose_keep,
    psnr,
    relative_error,
)
from qwen_l40s.optimizations.linear import Gemm

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
LAYERS = [f"transformer_blocks.{block}.{kind}" for block in range(11) for kind in BLOCK_GEMMS]


def random_tensor(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


# --- errors


def test_relative_error_is_the_frobenius_norm_of_what_is_lost():
    exact = random_tensor(30, 7)
    assert relative_error(exact, exact) == 0
    assert relative_error(1.25 * exact, exact) == pytest.approx(0.25)
    found = exact.clone()
    found[3, 2] += 2
    assert relative_error(found, exact) == pytest.approx(2 / exact.norm().item())


def test_errors_of_zeros_and_nan():
    zeros = torch.zeros(3)
    assert relative_error(zeros, zeros) == 0
    assert relative_error(zeros + 1, zeros) == math.inf
    assert math.isnan(relative_error(zeros * math.nan, zeros + 1))


def test_psnr_of_known_differences():
    exact = np.full((4, 4, 3), 100, np.uint8)
    assert psnr(exact, exact) == math.inf
    assert psnr(exact + np.uint8(1), exact) == pytest.approx(20 * math.log10(255))
    # in uint8 the difference would wrap around
    assert psnr(np.zeros((4, 4, 3), np.uint8), exact + np.uint8(155)) == 0


# --- outliers


# --- what multiplies


def test_the_reference_stands_in_where_torch_has_no_integer_product(monkeypatch):
    from qwen_l40s.errors import UnavailableError
    from qwen_l40s.hosts.diffusers import quantized

    def refuse(*args, **kwargs):
        raise UnavailableError("no _int_mm")

    monkeypatch.setattr(quantized, "choose_gemm", refuse)
    assert plain_product("int8", CPU) == PlainProduct("int8")


def test_a_card_without_the_format_is_measured_in_plain_torch(monkeypatch):
    from qwen_l40s.hosts.diffusers import quantized

    weight_only = Gemm("fp8", "dequantize", "sm_80")
    monkeypatch.setattr(quantized, "choose_gemm", lambda format, device: weight_only)
    assert tensor_core_product("fp8", CPU) == PlainProduct("fp8")


# --- LPIPS


def stand_in(monkeypatch, tmp_path, *, backbone):
    """A `lpips` that measures the mean difference, and a torchvision that names the backbone."""

    class LPIPS(torch.nn.Module):
        def __init__(self, net, verbose):
            super().__init__()
            assert (net, verbose) == ("alex", False)

        def forward(self, found, exact, normalize):
            assert normalize and found.shape == exact.shape == (1, 3, 8, 6)
            assert found.min() >= 0 and found.max() <= 1
            return (found - exact).abs().mean()

    models = types.ModuleType("torchvision.models")
    address = types.SimpleNamespace(url="https://x.invalid/models/backbone.pth")
    models.AlexNet_Weights = types.SimpleNamespace(IMAGENET1K_V1=address)
    package = types.ModuleType("lpips")
    package.LPIPS = LPIPS
    found = {"lpips": package, "torchvision": types.ModuleType("torchvision")}
    for name, module in {**found, "torchvision.models": models}.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr("qwen_l40s.measure.fidelity.find_spec", found.get)
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    if backbone:
        (tmp_path / "checkpoints").mkdir()
        (tmp_path / "checkpoints" / "backbone.pth").touch()
    return package


def test_lpips_runs_where_package_and_backbone_are_there(monkeypatch, tmp_path):
    package = stand_in(monkeypatch, tmp_path, backbone=True)
    distance, by = load_lpips()
    assert by == "lpips, AlexNet"
    image = np.full((8, 6, 3), 51, np.uint8)
    assert distance(image, image) == 0
    assert distance(image, 0 * image) == pytest.approx(0.2)
    del package.LPIPS  # broken, then not installed
    distance, why = load_lpips()
    assert distance is None and "LPIPS" in why
    monkeypatch.setattr("qwen_l40s.measure.fidelity.find_spec", lambda name: None)
    distance, why = load_lpips()
    assert distance is None and "pip install lpips torchvision" in why


def test_lpips_without_its_backbone_is_never_built(monkeypatch, tmp_path):
    stand_in(monkeypatch, tmp_path, backbone=False).LPIPS = None  # calling it would be an error
    distance, why = load_lpips()
    assert distance is None
    assert "backbone.pth" in why and str(tmp_path / "checkpoints") in why


# --- what to keep


def test_patterns_match_the_kept_layers_and_no_others():
    numbers = random.Random(0)
    for _ in range(200):
        share = numbers.choice((0.02, 0.3, 0.9))
        kept = {layer for layer in LAYERS if numbers.random() < share}
        kinds = numbers.sample(sorted(BLOCK_GEMMS), numbers.randrange(3))
        kept |= {layer for layer in LAYERS if layer.split(".", 2)[2] in kinds}
        patterns = keep_patterns([layer for layer in LAYERS if layer in kept], LAYERS)
        assert layers_to_quantize(LAYERS, patterns) == set(LAYERS) - kept
        assert {f"*.{kind}" for kind in kinds} <= set(patterns)
        assert len(patterns) <= len(kept)
    assert keep_patterns(LAYERS, LAYERS) == [f"*.{kind}" for kind in BLOCK_GEMMS]


def test_the_proposal_takes_small_layers_before_large_ones_of_the_same_error():
    large = LayerError("transformer_blocks.0.img_mlp.net.2", 3.0, 1.0, 4000)
    small = LayerError("transformer_blocks.0.attn.to_q", 3.0, 1.0, 1000)
    rest = LayerError("transformer_blocks.1.attn.to_q", 1.0, 1.0, 1000)
    assert propose_keep([large, rest, small], 3.5) == [small]
    assert propose_keep([large, rest, small], 5) == []
    assert propose_keep([large, rest, small], 0) == [large, rest, small]
