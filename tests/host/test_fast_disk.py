"""Which loaders tell ComfyUI that weights can be read from a fast disk again."""

from unittest import mock

import comfy.model_patcher
import comfy.utils
import narrow_text_encoder
import narrow_transformer as narrow
import pytest
import torch
from comfyui_boot import MODE, ROOT, folder

from qwen_l40s.hosts.comfyui.load import transformer
from qwen_l40s.hosts.comfyui.load.text_encoder import load_text_encoder
from qwen_l40s.hosts.comfyui.load.vae import load_vae
from qwen_l40s.hosts.comfyui.sample.off_card import OffCardDynamicPatcher, off_card_layers
from qwen_l40s.loaders.quantize import comfy_quant_tensor, quantize_rows

pytestmark = pytest.mark.usefixtures("inference_mode")
decided = pytest.mark.host_has("comfy.storage.state_dict_fast_disk")
FOLDER = folder("fast_disk")
WEIGHTS = narrow.weights()
PATH = narrow.write(FOLDER / "bf16.safetensors", WEIGHTS)
SLOW = "on_a_slow_disk"


@pytest.fixture
def disks():
    """Every disk is fast, but of one for files with SLOW in their path nothing is known."""
    with mock.patch("comfy.storage.fast_storage", lambda path: None if SLOW in path else True):
        yield


def sharded(name: str, *parts: str):
    return narrow.sharded(FOLDER / name, WEIGHTS, parts).parent


def by_row(precision: str) -> narrow.Tensors:
    found = dict(WEIGHTS)
    for layer in narrow.layers(WEIGHTS):
        values, scale = quantize_rows(WEIGHTS[f"{layer}.weight"], precision)
        found |= {f"{layer}.weight": values, f"{layer}.weight_scale": scale}
        found[f"{layer}.comfy_quant"] = comfy_quant_tensor(precision)
    return found


def unscaled(dtype: torch.dtype) -> narrow.Tensors:
    """As most public fp8 files: matrices outside the blocks too."""
    return {name: w.to(dtype) if w.dim() == 2 else w for name, w in WEIGHTS.items()}


@decided
@pytest.mark.each_device
@pytest.mark.usefixtures("disks")
def test_a_transformer():
    slow = narrow.write(FOLDER / f"{SLOW}.safetensors", WEIGHTS)
    stored = narrow.write(FOLDER / "int8.safetensors", by_row("int8"))
    some, fp8 = narrow.layers(WEIGHTS)[:5], by_row("fp8")
    two = {
        name: fp8[name] if name.rpartition(".")[0] in some else w
        for name, w in by_row("int8").items()
    }
    two = narrow.write(FOLDER / "two_formats.safetensors", two)
    e5m2 = narrow.write(FOLDER / "e5m2.safetensors", unscaled(torch.float8_e5m2))
    mixed = sharded("mixed", "first", SLOW)
    for path, form, fast in (
        (PATH, "bf16", True),
        (slow, "bf16", False),
        (stored, "int8", True),
        (sharded("fast", "first", "second"), "bf16", True),
        (mixed, "bf16", False),
        # Made at load, although norms and biases come from the file.
        (PATH, "int8", False),
        (PATH, "fp8", False),
        (stored, "bf16", False),
        (two, "int8", True),
        (e5m2, "bf16", False),
    ):
        for off_card in (False, True):
            model = narrow.load_patcher(path, form, off_card)
            assert bool(off_card_layers(model.model)) == off_card
            assert model.is_dynamic() == (MODE == "dynamic")
            again = model.cached_patcher_init[0](*model.cached_patcher_init[1])
            for patcher in (model, model.clone(), again):
                assert patcher.fast_disk is fast, (path.name, form, off_card)
                if MODE == "dynamic":
                    pins = patcher.model.dynamic_pins[patcher.load_device]
                    assert pins["fast_disk"] is fast
    # Asked for by name, the five layers of the other format are made.
    assert transformer.load_model(two, "int8")[0].fast_disk is False


@decided
@pytest.mark.usefixtures("disks")
def test_a_patcher_for_dynamic_vram_on_the_processor():
    """ComfyUI gives one without."""
    model = narrow.load_patcher(PATH, off_card=True)
    cpu = torch.device("cpu")
    assert OffCardDynamicPatcher(model.model, cpu, cpu, fast_disk=True).fast_disk


def test_a_patcher_that_lacks_it():
    """As in ComfyUI 0.33, or another extension's."""

    class Without(comfy.model_patcher.ModelPatcher):
        def __init__(self, model, load_device, offload_device, size=0, weight_inplace_update=False):
            super().__init__(model, load_device, offload_device, size, weight_inplace_update)

    storage = mock.Mock()
    with (
        mock.patch.object(transformer, "ModelPatcher", Without),
        mock.patch.object(transformer.comfy, "storage", storage, create=True),
    ):
        model = narrow.load_patcher(PATH, disable_dynamic=True)
    assert type(model) is Without
    storage.state_dict_fast_disk.assert_not_called()


@decided
@pytest.mark.usefixtures("disks")
def test_text_encoder_and_vae():
    """ComfyUI's own CLIP and VAE ask for themselves, by marks on what `load_torch_file` gives."""
    for name, fast in (("text_encoder", True), (f"text_encoder_{SLOW}", False)):
        path = narrow_text_encoder.write(
            FOLDER / f"{name}.safetensors", narrow_text_encoder.weights()
        )
        clip, _ = load_text_encoder(path)
        assert clip.patcher.fast_disk is clip.clone().patcher.fast_disk is fast
    with mock.patch("comfy.storage.fast_storage", return_value=False):
        assert load_vae(ROOT / "models" / "micro")[0].patcher.fast_disk is False
    assert load_vae(ROOT / "models" / "micro")[0].patcher.fast_disk is True
