"""Its VAEs through our layers against their own, which the nodes run with `fused` off."""

import copy
import math
from dataclasses import replace

import comfy.ldm.wan.vae
import comfy.ldm.wan.vae2_2
import comfy.model_management
import comfy.sd
import pytest
import torch
from comfyui_boot import MODE, ROOT
from vae_cases import assert_close, core_decode, core_encode_each, random, random_vae, wan, wan_21

from qwen_l40s.hosts.comfyui.decode import fused
from qwen_l40s.hosts.comfyui.decode.decode import decode, encode
from qwen_l40s.hosts.comfyui.decode.fused import FusedLayers, decoder_stages, encoder_stages
from qwen_l40s.hosts.comfyui.load.vae import load_vae
from qwen_l40s.loaders.source import MICRO_ADVICE
from qwen_l40s.nodes.vae import QwenL40SVAEDecode, QwenL40SVAEEncode
from qwen_l40s.optimizations.vae import flat, tiles
from qwen_l40s.optimizations.warm_up import warm_up
from qwen_l40s.planning import vae_work as vae_bytes
from qwen_l40s.planning.vae import plan_decode, plan_encode

newer = pytest.mark.host_has("comfy.model_base.QwenImage21")
pytestmark = [
    pytest.mark.each_device,
    pytest.mark.usefixtures("exact_convolutions", "inference_mode"),
]
DEVICE = comfy.model_management.get_torch_device()
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.fixture(params=["whole layers", "strips"])
def strips(request, monkeypatch):
    """Once with strips of a few rows."""
    if request.param == "strips":
        for module in (flat, vae_bytes):
            monkeypatch.setattr(module, "STRIP", 3000)


# On a card ComfyUI's attention refuses pixels that are no multiple of 4 in fp32.
SHAPES = (
    ((1, 16, 1, 9, 8), (3, 16, 6, 4))
    if DEVICE.type == "cuda"
    else ((1, 16, 1, 9, 7), (3, 16, 6, 4), (1, 16, 1, 1, 1))
)


def assert_near(found, known):
    """And not equal, which tells that other layers ran."""
    assert_close(found, known)
    assert not torch.equal(found, known)


@pytest.mark.usefixtures("strips")
@pytest.mark.parametrize("channels", [3, 4])
def test_images_are_the_host_s(channels):
    vae = random_vae(channels=channels)
    for shape in SHAPES:
        latents = random(*shape)
        known = core_decode(vae, latents if latents.ndim == 5 else latents.unsqueeze(2))
        for count in (0, 1, 4) if shape[-1] > 1 else (0,):
            images, report = decode(vae, latents, count, True)
            assert_near(images, known)
            assert "own layers" not in report
            assert ("exact tiles" in report) == (count == 4)
        pixels = known.clone()
        known = core_encode_each(vae, pixels)
        for count in (0, 4) if shape[-1] > 1 else (0,):
            assert_near(encode(vae, pixels, count, True)[0], known)


@newer
@pytest.mark.usefixtures("strips")
def test_images_of_21_are_the_host_s():
    vae = random_vae(wan_21)
    for shape in ((1, 64, 5, 4), (2, 64, 1, 4, 6)):
        latents = random(*shape)
        known = core_decode(vae, latents)
        for count, words in ((0, "2 exact tiles"), (1, "whole, "), (3, "3 exact tiles")):
            images, report = decode(vae, latents, count, True)
            assert_near(images, known)
            assert f"x{16 * shape[-2]}: {words}" in report, report
        pixels = known.clone()
        known = core_encode_each(vae, pixels)
        for count in (0, 1, 3):
            assert_near(encode(vae, pixels, count, True)[0], known)
    images, report = decode(vae, latents)
    assert torch.equal(images, core_decode(vae, latents))
    assert report.endswith("because it decodes Qwen-Image-2.1 in exact strips")
    vae.first_stage_model.decoder.register_forward_hook(lambda *_: None)
    images, report = decode(vae, latents, 0, True)
    assert torch.equal(images, core_decode(vae, latents))
    assert "because another extension has changed decoder" in report


def copy_of(model):
    """Without the host buffers of dynamic VRAM: a copy would free them once more."""
    buffers = (vars(model).get(name) for name in ("dynamic_pins", "dynamic_vbars"))
    return copy.deepcopy(model, {id(each): None for each in buffers if each is not None})


@pytest.mark.parametrize("sliced", [{}, {"middle_rows": 2}], ids=["whole middle", "sliced"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_error_of_each_dtype_is_the_host_s(dtype, sliced):
    exact = random_vae().first_stage_model.to(DEVICE, torch.float32)
    model = copy_of(exact).to(dtype)
    latents = random(1, 16, 1, 12, 9).to(DEVICE)
    pixels, mean = exact.decode(latents), exact.encode(exact.decode(latents).clamp(-1, 1))
    shape, given = FusedLayers.shape(model), latents.to(dtype)
    plan = plan_decode(shape, 12, 9, budget=None, tiles=2 if sliced else None)
    image = tiles.decode(decoder_stages(model, FusedLayers(DEVICE)), given, replace(plan, **sliced))
    plan = plan_encode(shape, 12, 9, budget=None, tiles=2 if sliced else None)
    given = pixels.clamp(-1, 1).to(dtype)
    back = tiles.encode(encoder_stages(model, FusedLayers(DEVICE)), given, replace(plan, **sliced))
    # The processor's own kernels add a convolution's bias before they round.
    most, least = 1.5 if MODE == "cpu" else 1.05, 1e-5
    for found, known, own in (
        (image, pixels, model.decode(latents.to(dtype))),
        (back, mean, model.encode(given)),
    ):
        error, host = ((x.float() - known).norm() / known.norm() for x in (found, own))
        assert error <= max(least, most * host), (error, host)


def test_weights_of_another_dtype_and_place_are_cast_as_the_host_casts_them():
    model = random_vae().first_stage_model.to("cpu", torch.float32)
    latents = random(1, 16, 1, 6, 5).to(DEVICE, torch.bfloat16)
    plan = plan_decode(FusedLayers.shape(model), 6, 5, budget=None)
    found = tiles.decode(decoder_stages(model, FusedLayers(DEVICE)), latents, plan)
    there = copy_of(model).to(DEVICE, torch.bfloat16)
    assert torch.equal(
        found, tiles.decode(decoder_stages(there, FusedLayers(DEVICE)), latents, plan)
    )
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}


def test_weights_that_give_nan():
    vae = random_vae()
    vae.first_stage_model.decoder.middle[0].residual[2].weight.data[0, 0] = math.nan
    vae.first_stage_model.encoder.conv1.weight.data[3] = math.nan
    latents, pixels = random(1, 16, 1, 6, 4), random(1, 48, 32, 3).sigmoid()
    for count in (0, 2):
        assert decode(vae, latents, count, True)[0].isnan().all()
        assert encode(vae, pixels, count, True)[0].isnan().all()
    assert core_decode(vae, latents).isnan().all()


@pytest.mark.parametrize("build", [wan, pytest.param(wan_21, marks=newer)])
def test_decoding_compiles_nothing_that_is_not_compiled_ahead(build, monkeypatch):
    def wait(device, work, model):
        begun = warm_up(device, work, model)
        # Without a card the pass has to go through as well.
        begun.result() if begun else work(model)

    monkeypatch.setattr(fused, "warm_up", wait)
    vae = random_vae(build, torch.bfloat16)
    fused.compile_ahead(vae)
    compiled = []
    if DEVICE.type == "cuda":
        from triton import knobs

        record = lambda **found: compiled.append(found["repr"])  # noqa: E731
        monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", record)
    latents = random(1, vae.first_stage_model.z_dim, 1, 10, 12)
    _, report = decode(vae, latents if build is wan else latents[:, :, 0], 0, True)
    assert "own layers" not in report
    assert compiled == []


def test_the_nodes():
    vae, latents = random_vae(), random(1, 16, 1, 6, 4)
    known = core_decode(vae, latents)
    output = QwenL40SVAEDecode.execute({"samples": latents}, vae)
    assert_near(output.args[0], known)
    assert output.ui["text"] == [output.args[1]] and MICRO_ADVICE not in output.args[1]
    off = QwenL40SVAEDecode.execute({"samples": latents}, vae, fused=False).args[0]
    assert torch.equal(off, known)
    encoded = core_encode_each(vae, known)
    assert_near(QwenL40SVAEEncode.execute(known, vae).args[0]["samples"], encoded)
    off = QwenL40SVAEEncode.execute(known, vae, fused=False).args[0]["samples"]
    assert torch.equal(off, encoded)
    micro = load_vae(ROOT / "models" / "micro")[0]
    output = QwenL40SVAEDecode.execute({"samples": latents}, micro, 4)
    assert MICRO_ADVICE in output.args[1] and "4 exact tiles" in output.ui["qwen_l40s"][0]
    assert MICRO_ADVICE not in decode(micro, random(1, 16, 1, 32, 32))[1]
