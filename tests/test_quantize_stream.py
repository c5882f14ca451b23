"""Layers quantized in other threads: the same values, faults by name, and nothing left behind."""

import threading
import time

import pytest
import torch

from qwen_l40s.errors import CheckpointError, SettingError
from qwen_l40s.loaders import quantize as quantize_stream
from qwen_l40s.loaders.quantize import FORMATS, quantize_layers, quantize_rows

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
    # Not contiguous, as a view of a packed projection is.
    found["columns of another"] = torch.randn(20, 30, generator=generator)[:, 3:17]
    return found


def workers() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("quantize")]


def same(found, expected):
    pairs = zip(found, expected, strict=True)
    return all(torch.equal(one.float(), other.float()) for one, other in pairs)


@pytest.mark.parametrize("format", FORMATS)
def test_every_layer_is_what_quantize_rows_makes_of_it(format):
    weights = layers()
    found = quantize_layers(weights, weights.__getitem__, format, CPU)
    assert found.keys() == weights.keys()
    for layer, weight in weights.items():
        values, scale = found[layer]
        expected = quantize_rows(weight, format)
        assert (values.dtype, scale.dtype) == (expected[0].dtype, torch.float32)
        assert scale.shape == (len(weight), 1)
        assert same(found[layer], expected), layer


def test_weights_are_asked_for_once_and_not_changed():
    weights, asked = layers(), []

    def weight_of(layer):
        asked.append(layer)
        return weights[layer]

    quantize_layers(iter(weights), weight_of, "int8", CPU)
    assert sorted(asked) == sorted(weights)
    assert all(torch.equal(weight, layers()[layer]) for layer, weight in weights.items())


def test_no_layers():
    assert quantize_layers([], {}.__getitem__, "fp8", CPU) == {}
    assert workers() == []


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("format", FORMATS)
def test_nan_and_infinity_name_their_layer(format, bad):
    weights = layers()
    broken = weights["transformer_blocks.3.attn.to_q"] = torch.ones(6, 7)
    broken[5, 2] = bad
    with pytest.raises(CheckpointError) as error:
        quantize_layers(weights, weights.__getitem__, format, CPU)
    assert str(error.value) == (
        "the tensor 'transformer_blocks.3.attn.to_q.weight' holds NaN or infinity: download the "
        "file again."
    )
    assert workers() == []


def test_done_is_called_once_a_layer_in_the_caller_s_thread():
    weights, calls = layers(), []
    quantize_layers(
        weights, weights.__getitem__, "int8", CPU, lambda: calls.append(threading.get_ident())
    )
    assert calls == [threading.get_ident()] * len(weights)


class Cancelled(BaseException):
    """What ComfyUI raises is no Exception either."""


def test_what_done_raises_ends_the_work():
    asked, calls = [], []

    def weight_of(layer):
        asked.append(layer)
        time.sleep(0.02)
        return torch.ones(4, 4)

    def done():
        calls.append(len(asked))
        if len(calls) == 2:
            raise Cancelled

    with pytest.raises(Cancelled):
        quantize_layers(map(str, range(50)), weight_of, "int8", CPU, done)
    assert len(calls) == 2
    # What was in work is finished, and what was waiting is not begun.
    assert len(asked) < 10
    assert workers() == []


def test_an_error_of_a_weight_is_the_caller_s():
    def weight_of(layer):
        raise LookupError(layer)

    with pytest.raises(LookupError, match="only"):
        quantize_layers(["only"], weight_of, "fp8", CPU)
    assert workers() == []


def test_an_unknown_format():
    with pytest.raises(SettingError, match="fp8 or int8"):
        quantize_layers(["a"], lambda _layer: torch.ones(2, 2), "nvfp4", CPU)


@pytest.mark.cuda
@pytest.mark.parametrize("format", FORMATS)
def test_a_card_gives_what_the_processor_gives(format, monkeypatch):
    if not torch.cuda.is_available():
        pytest.skip("no NVIDIA GPU here")
    card = torch.device("cuda")
    weights = layers()
    # Slabs of many sizes: several to a layer, a last one that is smaller, a row that fits in none.
    generator = torch.Generator().manual_seed(1)
    weights["large"] = torch.randn(3000, 777, generator=generator).bfloat16()
    weights["wide"] = torch.randn(3, 40_000, generator=generator)
    weights["on the card"] = weights["large"].to(card)
    expected = {layer: quantize_rows(weight.cpu(), format) for layer, weight in weights.items()}
    for slab in (quantize_stream.SLAB_BYTES, 2**16):
        monkeypatch.setattr(quantize_stream, "SLAB_BYTES", slab)
        found = quantize_layers(weights, weights.__getitem__, format, card)
        for layer, (values, scale) in found.items():
            assert values.device == scale.device == CPU
            assert same((values, scale), expected[layer]), (slab, layer)
    weights["large"][2500, 3] = float("nan")
    with pytest.raises(CheckpointError, match=r"'large\.weight' holds NaN"):
        quantize_layers(weights, weights.__getitem__, format, card)
    assert workers() == []
