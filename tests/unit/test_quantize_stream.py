"""Layers quantized one after the other: the same values, faults by name, nothing left behind."""

import gc
import weakref
from contextlib import nullcontext

import pytest
import torch
from gguf_files import random_blocks

from qwen_l40s.errors import CheckpointError, SettingError
from qwen_l40s.loaders import slabs
from qwen_l40s.loaders.gguf_blocks import BlockRows
from qwen_l40s.loaders.quantize import (
    expected_squares,
    measured_squares,
    quantize_rows,
    relative_error,
    rotate,
    row_format,
)
from qwen_l40s.loaders.slabs import IN_BF16, quantize_layers
from qwen_l40s.spec.formats import QUANTIZED, RowFormat

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
# Usual, odd, one row, one column, none.
SHAPES = [(64, 48), (33, 17), (1, 40), (40, 1), (0, 8)]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def layers() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    found = {
        f"{rows} x {columns}, {dtype}": torch.randn(rows, columns, generator=generator).to(dtype)
        for rows, columns in SHAPES
        for dtype in DTYPES
    }
    found["zeros"] = torch.zeros(3, 5)
    found["transformer_blocks.0.attn.to_q"] = torch.randn(12, 512, generator=generator)
    found["transformer_blocks.0.img_mlp.net.2"] = torch.randn(12, 192, generator=generator)
    # Not contiguous, as a view of a packed projection is.
    found["columns of another"] = torch.randn(20, 30, generator=generator)[:, 3:17]
    return found


def stream(weights, format, device=CPU, **options):
    """{layer: what the stream yields}; `weights` is {layer: weight}, or a function of a layer."""
    weight_of = weights if callable(weights) else weights.__getitem__
    names = options.pop("names", None) or list(weights)
    found = {}

    def take(rounded):
        found[rounded.layer] = rounded

    take = options.pop("take", take)
    quantize_layers(names, weight_of, format, device, take, CheckpointError, **options)
    return found


def same(found, expected):
    pairs = zip(found, expected, strict=True)
    return all(torch.equal(one.float(), other.float()) for one, other in pairs)


@pytest.mark.parametrize("format", QUANTIZED)
def test_every_layer_is_what_quantize_rows_makes_of_it(format, device, monkeypatch):
    weights, on_card = layers(), device.type == "cuda"
    # For slabs of many sizes: several to a layer, a last one that is smaller, a row that fits none.
    generator = torch.Generator().manual_seed(1)
    weights["large"] = torch.randn(3000, 777, generator=generator).bfloat16()
    weights["wide"] = torch.randn(3, 40_000, generator=generator)
    weights["on the device"] = weights["large"].to(device)
    before = {layer: weight.clone() for layer, weight in weights.items()}
    for slab in (slabs.SLAB_BYTES, 2**16):
        monkeypatch.setattr(slabs, "SLAB_BYTES", slab)
        found = stream(weights, format, device, squares=measured_squares)
        assert found.keys() == weights.keys()
        for layer, weight in weights.items():
            assert torch.equal(weight, before[layer])
            _, values, scale, form, error = found[layer]
            in_a_block = layer.startswith("transformer_blocks.")
            chosen = row_format(format, weight.shape[1]) if in_a_block else RowFormat(format)
            assert form == chosen
            expected = quantize_rows(weight.cpu(), format, rotation=form.rotation)
            assert values.device == scale.device == CPU
            assert (values.dtype, scale.dtype) == (expected[0].dtype, torch.float32)
            assert scale.shape == (len(weight), 1)
            assert same((values, scale), expected), (slab, layer)
            exact = relative_error(weight.cpu(), *expected, form.rotation)
            assert error == pytest.approx(exact, rel=1e-3 if on_card else 0, abs=0)


def test_one_scale_for_the_whole_weight():
    weights = {"a": torch.randn(5, 7, generator=torch.Generator().manual_seed(0))}
    _, values, scale, _, error = stream(weights, "fp8", per_row=False)["a"]
    assert values.shape == (5, 7) and scale.shape == () and error is None
    expected, one = quantize_rows(weights["a"].reshape(1, -1), "fp8")
    assert same((values, scale), (expected.reshape(5, 7), one.reshape(())))


class Cancelled(BaseException):
    """What ComfyUI raises is no Exception either."""


def test_results_do_not_pile_up():
    asked, taken = [], []

    def weight_of(layer):
        asked.append(layer)
        return torch.ones(4, 4)

    def take(rounded):
        taken.append(rounded.layer)
        assert len(asked) <= len(taken) + 3

    names = list(map(str, range(50)))
    stream(weight_of, "int8", names=names, take=take)
    assert asked == taken == names


def test_errors_reach_the_caller():
    def weight_of(layer):
        raise LookupError(layer)

    with pytest.raises(LookupError, match="only"):
        stream(weight_of, "fp8", names=["only"])
    with pytest.raises(SettingError, match="fp8 or int8"):
        stream({"a": torch.ones(2, 2)}, "nvfp4")
    assert stream({}, "fp8", names=[]) == {}


@pytest.mark.cuda
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("format", QUANTIZED)
def test_a_card_s_kernel_gives_the_layers_of_the_processor(format, monkeypatch):
    generator = torch.Generator().manual_seed(2)
    shapes = {"attn.to_q": (3072, 3072), "img_mlp.net.2": (300, 12288), "attn.to_out.0": (5, 192)}
    weights = {
        f"transformer_blocks.{block}.{end}": torch.randn(shape, generator=generator).bfloat16()
        for block in range(4)
        for end, shape in shapes.items()
    }
    weights |= layers()
    expected = stream(weights, format)
    for slab in (slabs.SLAB_BYTES, 2**20):
        monkeypatch.setattr(slabs, "SLAB_BYTES", slab)
        found = stream(weights, format, torch.device("cuda"))
        assert found.keys() == expected.keys()
        for layer, one in found.items():
            assert same(one[1:3], expected[layer][1:3]), (layer, slab)
            assert one.values.device == one.scale.device == CPU


# A card whose copies and kernels run at once, in host memory.


@pytest.fixture
def simulated(monkeypatch):
    """Weak references to what was pinned."""
    empty, convert, pinned = torch.empty, torch.Tensor.to, []

    def there(self, to):
        return self if isinstance(to, torch.device) else convert(self, to)

    def on_host(*shape, device=None, pin_memory=False, **about):
        found = empty(*shape, **about)
        if pin_memory:
            pinned.append(weakref.ref(found))
        return found

    monkeypatch.setattr(torch, "empty", on_host)
    monkeypatch.setattr(torch.Tensor, "to", there)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(slabs, "SLAB_BYTES", 1000)
    return pinned


@pytest.mark.parametrize("format", QUANTIZED)
def test_slabs_that_are_used_again_lose_no_rows(format, simulated):
    weights = {f"{number}": torch.randn(9 * number, 31).bfloat16() for number in range(12)}
    weights |= layers()
    expected = stream(weights, format, squares=measured_squares)
    assert not simulated
    found = stream(weights, format, torch.device("cuda"), squares=measured_squares)
    assert len(simulated) == 2 * slabs.SLABS
    assert found.keys() == expected.keys()
    for layer, (_, values, scale, form, error) in found.items():
        assert same((values, scale), expected[layer][1:3]) and form == expected[layer].form
        assert error == pytest.approx(expected[layer].error, rel=1e-6)


def test_the_expected_error_of_int8_is_near_the_measured_one(simulated):
    noise = torch.Generator().manual_seed(2)
    name = "transformer_blocks.0.img_mlp.net.2"
    flat = torch.randn(40, 512, generator=noise)
    spiked = flat.clone()
    spiked[:, ::64] *= 50
    for weight, error in ((flat, 0.007), (rotate(spiked, 256), 0.03)):
        for device in (CPU, torch.device("cuda")):
            found, known = (
                stream({name: weight}, "int8", device, squares=squares)[name].error
                for squares in (expected_squares, measured_squares)
            )
            assert known > error and found == pytest.approx(known, rel=0.1)


def test_blocks_of_gguf_pass_slabs_in_bf16(simulated):
    matrices = {}
    for dtype, at in {"Q8_0": (0,), "Q4_K": (0, 2), "Q6_K": (208,)}.items():
        blocks = torch.from_numpy(random_blocks(dtype, 36))
        for scale in at:
            blocks[:, scale : scale + 2] = torch.tensor([0, 0x3C], dtype=torch.uint8)  # 1.0
        matrices[dtype] = BlockRows(blocks.view(9, -1), dtype)
    found = stream(matrices, IN_BF16, torch.device("cuda"))
    assert len(simulated) == 2 * slabs.SLABS
    for name, blocks in matrices.items():
        assert torch.equal(found[name].values, blocks.dequantized())
    matrices["Q8_0"].values[-1, :2] = torch.tensor([0, 0x7C], dtype=torch.uint8)  # infinity
    with pytest.raises(CheckpointError, match=r"Q8_0\.weight"):
        stream(matrices, IN_BF16, torch.device("cuda"))


def test_without_pinned_memory_slabs_give_the_same(simulated, monkeypatch):
    """As a system with a limit to it: some is given, then no more."""
    expected, empty = stream(layers(), "int8"), torch.empty

    def limited(*shape, pin_memory=False, **about):
        if pin_memory and simulated:
            raise RuntimeError("CUDA error: out of memory")
        return empty(*shape, pin_memory=pin_memory, **about)

    monkeypatch.setattr(torch, "empty", limited)
    found = stream(layers(), "int8", torch.device("cuda"))
    assert len(simulated) == 1
    assert all(same(found[it][1:3], expected[it][1:3]) for it in expected)


def test_a_cancel_takes_no_other_layer_and_leaves_nothing_pinned(simulated):
    taken = []

    def take(rounded):
        taken.append(rounded.layer)
        raise Cancelled

    with pytest.raises(Cancelled):
        stream(layers(), "int8", torch.device("cuda"), take=take)
    gc.collect()
    assert len(taken) == 1 and simulated
    assert not any(pinned() is not None for pinned in simulated)


def test_results_outlive_the_mode_of_a_prompt():
    with torch.inference_mode():
        found = stream(layers(), "int8")
        assert torch.is_inference_mode_enabled()
    for rounded in found.values():
        assert not rounded.values.is_inference() and not rounded.scale.is_inference()
