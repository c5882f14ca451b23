"""Its VAEs through our layers against their own, which the nodes run with `fused` off."""

import copy
import itertools
import math
from dataclasses import replace
from unittest import mock

import comfy.ldm.wan.vae
import comfy.ldm.wan.vae2_2
import comfy.model_management
import comfy.sd
import pytest
import torch
from comfyui_boot import MODE
from tracked_allocations import Allocations

import nodes as core
from qwen_l40s.hosts.comfyui.decode import fused
from qwen_l40s.hosts.comfyui.decode.decode import decode, encode
from qwen_l40s.hosts.comfyui.decode.fused import FusedLayers
from qwen_l40s.hosts.comfyui.decode.stages import decoder_stages, encoder_stages
from qwen_l40s.nodes.vae import QwenL40SVAEDecode, QwenL40SVAEEncode
from qwen_l40s.optimizations.vae import flat, tiles
from qwen_l40s.optimizations.warm_up import warm_up
from qwen_l40s.planning import vae as vae_bytes
from qwen_l40s.planning.vae import plan_decode, plan_encode

newer = pytest.mark.host_has("comfy.model_base.QwenImage21")
pytestmark = [pytest.mark.each_device, pytest.mark.usefixtures("inference")]
DEVICE = comfy.model_management.get_torch_device()
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
OTHER = "ComfyUI's own layers, because another extension has changed"


@pytest.fixture
def inference():
    """Without TF32, which rounds fp32 to ten bits."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    with torch.inference_mode():
        yield
    torch.backends.cudnn.allow_tf32 = before


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


def random(*shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


def wan(channels=3, dim=16):
    return comfy.ldm.wan.vae.WanVAE(
        dim=dim,
        z_dim=16,
        dim_mult=[1, 2, 4, 4],
        num_res_blocks=2,
        attn_scales=[],
        temperal_downsample=[False, True, True],
        image_channels=channels,
        conv_out_channels=channels,
    )


def wan_21(dim=8, decoder=12):
    return comfy.ldm.wan.vae2_2.WanVAE(
        dim=dim,
        dec_dim=decoder,
        z_dim=64,
        dim_mult=[1, 2, 4, 8, 8],
        num_res_blocks=2,
        attn_scales=[],
        temperal_downsample=[False, True, True, True],
        image_channels=4,
        patch_size=1,
        temporal_kernel=1,
    )


def host_vae(build=wan, dtype=torch.float32):
    """ComfyUI's VAE with weights that neither fade nor grow."""
    with torch.device("meta"):
        shapes = build().state_dict()
    weights = {}
    for seed, (name, weight) in enumerate(shapes.items()):
        values = torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed))
        if name.endswith("gamma"):
            weights[name] = 1 + 0.1 * values
        else:
            weights[name] = values * (weight[0].numel() ** -0.5 if weight.ndim > 1 else 0.05)
    return comfy.sd.VAE(sd=weights, dtype=dtype)


def core_decode(vae, latents):
    return core.VAEDecode().decode(vae, {"samples": latents})[0]


def core_encode(vae, pixels):
    images = pixels.split(1)
    return torch.cat([core.VAEEncode().encode(vae, image)[0]["samples"] for image in images])


def assert_close(found, known, decibels=80):
    assert (found.shape, found.dtype, found.device) == (known.shape, known.dtype, known.device)
    error = float((found - known).double().square().mean())
    span = float(known.max() - known.min())
    assert error == 0 or 10 * math.log10(span**2 / error) >= decibels, error
    assert error > 0  # which tells that other layers ran


@pytest.mark.usefixtures("strips")
@pytest.mark.parametrize("build", [wan, lambda: wan(4)], ids=["RGB", "RGBA"])
def test_images_are_the_host_s(build):
    vae = host_vae(build)
    for shape in SHAPES:
        latents = random(*shape)
        known = core_decode(vae, latents if latents.ndim == 5 else latents.unsqueeze(2))
        for count in (0, 1, 4) if shape[-1] > 1 else (0,):
            images, report = decode(vae, latents, count, True)
            assert_close(images, known)
            assert "own layers" not in report
            assert ("exact tiles" in report) == (count == 4)
        pixels = known.clone()
        known = core_encode(vae, pixels)
        for count in (0, 4) if shape[-1] > 1 else (0,):
            assert_close(encode(vae, pixels, count, True)[0], known)


@newer
@pytest.mark.usefixtures("strips")
def test_images_of_21_are_the_host_s():
    vae = host_vae(wan_21)
    for shape in ((1, 64, 5, 4), (2, 64, 1, 4, 6)):
        latents = random(*shape)
        known = core_decode(vae, latents)
        for count, words in ((0, "2 exact tiles"), (1, "whole, "), (3, "3 exact tiles")):
            images, report = decode(vae, latents, count, True)
            assert_close(images, known)
            assert f"x{16 * shape[-2]}: {words}" in report, report
        pixels = known.clone()
        known = core_encode(vae, pixels)
        for count in (0, 1, 3):
            assert_close(encode(vae, pixels, count, True)[0], known)
    images, report = decode(vae, latents)
    assert torch.equal(images, core_decode(vae, latents))
    assert report.endswith("because it cuts the images of Qwen-Image-2.1 into exact strips")
    vae.first_stage_model.decoder.register_forward_hook(lambda *_: None)
    images, report = decode(vae, latents, 0, True)
    assert torch.equal(images, core_decode(vae, latents))
    assert "because another extension has changed decoder, and it cuts" in report


@pytest.mark.parametrize("sliced", [{}, {"middle_rows": 2}], ids=["whole middle", "sliced"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_error_of_each_dtype_is_the_host_s(dtype, sliced):
    exact = host_vae().first_stage_model.to(DEVICE, torch.float32)
    model = copy.deepcopy(exact).to(dtype)
    latents = random(1, 16, 1, 12, 9).to(DEVICE)
    pixels, mean = exact.decode(latents), exact.encode(exact.decode(latents).clamp(-1, 1))
    shape, given = fused.fused_shape(model), latents.to(dtype)
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
    model = host_vae().first_stage_model.to("cpu", torch.float32)
    latents = random(1, 16, 1, 6, 5).to(DEVICE, torch.bfloat16)
    plan = plan_decode(fused.fused_shape(model), 6, 5, budget=None)
    found = tiles.decode(decoder_stages(model, FusedLayers(DEVICE)), latents, plan)
    there = copy.deepcopy(model).to(DEVICE, torch.bfloat16)
    assert torch.equal(
        found, tiles.decode(decoder_stages(there, FusedLayers(DEVICE)), latents, plan)
    )
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}


def test_weights_that_give_nan():
    vae = host_vae()
    vae.first_stage_model.decoder.middle[0].residual[2].weight.data[0, 0] = math.nan
    vae.first_stage_model.encoder.conv1.weight.data[3] = math.nan
    latents, pixels = random(1, 16, 1, 6, 4), random(1, 48, 32, 3).sigmoid()
    for count in (0, 2):
        assert decode(vae, latents, count, True)[0].isnan().all()
        assert encode(vae, pixels, count, True)[0].isnan().all()
    assert core_decode(vae, latents).isnan().all()


def wrapped_forward(model):
    layer = model.decoder.conv1
    own = layer.forward
    layer.forward = lambda *given, **more: own(*given, **more)
    return "decoder.conv1"


def hooked(model):
    model.decoder.head.register_forward_hook(lambda *_: None)
    return "decoder.head"


def weight_function(model):
    model.decoder.middle[1].proj.weight_function = [lambda weight: weight]
    return "decoder.middle.1.proj"


def own_decode(model):
    model.decode = model.decode
    return "WanVAE"


CHANGES = (wrapped_forward, hooked, weight_function, own_decode)


@pytest.mark.parametrize("change", CHANGES, ids=[change.__name__ for change in CHANGES])
def test_what_another_extension_has_changed_is_the_host_s(change):
    vae, latents = host_vae(), random(1, 16, 1, 5, 4)
    name = change(vae.first_stage_model)
    images, report = decode(vae, latents, 0, True)
    assert torch.equal(images, core_decode(vae, latents))
    assert report.endswith(f"{OTHER} {name}"), report
    vae = host_vae()  # ComfyUI takes weight functions away where it loads a model
    change(vae.first_stage_model)
    found, report = encode(vae, images, 0, True)
    assert torch.equal(found, core_encode(vae, images))
    assert report.endswith(f"{OTHER} {name}"), report


def test_classes_that_another_extension_has_changed():
    vae, latents = host_vae(), random(1, 16, 1, 5, 4)
    kind = comfy.ldm.wan.vae.AttentionBlock
    with mock.patch.object(kind, "forward", lambda self, x, **_: x):
        images, report = decode(vae, latents, 0, True)
        assert torch.equal(images, core_decode(vae, latents))
    assert report.endswith(f"{OTHER} AttentionBlock.forward"), report
    assert "own layers" not in decode(vae, latents, 0, True)[1]

    class Conv(comfy.ldm.wan.vae.CausalConv3d):
        pass

    vae.first_stage_model.decoder.conv1.__class__ = Conv
    images, report = decode(vae, latents, 0, True)
    assert torch.equal(images, core_decode(vae, latents))
    assert report.endswith("because decoder.conv1 is another extension's Conv"), report


@pytest.mark.parametrize("build", [wan, pytest.param(wan_21, marks=newer)])
def test_decoding_compiles_nothing_that_is_not_compiled_ahead(build, monkeypatch):
    def wait(device, work):
        begun = warm_up(device, work)
        begun.result() if begun else work()  # without a card the pass has to go through as well

    monkeypatch.setattr(fused, "warm_up", wait)
    vae = host_vae(build, torch.bfloat16)
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
    vae, latents = host_vae(), random(1, 16, 1, 6, 4)
    known = core_decode(vae, latents)
    assert_close(QwenL40SVAEDecode.execute({"samples": latents}, vae).args[0], known)
    off = QwenL40SVAEDecode.execute({"samples": latents}, vae, fused=False).args[0]
    assert torch.equal(off, known)
    encoded = core_encode(vae, known)
    assert_close(QwenL40SVAEEncode.execute(known, vae).args[0]["samples"], encoded)
    off = QwenL40SVAEEncode.execute(known, vae, fused=False).args[0]["samples"]
    assert torch.equal(off, encoded)


def convolved(x, weight, bias=None, stride=1, padding=0):
    """Channels last, as processors and cards give it, and tensors without memory do not."""
    sides = ((side + 2 * padding - weight.shape[-1]) // stride + 1 for side in x.shape[2:])
    return x.new_empty((len(x), *sides, len(weight))).permute(0, 3, 1, 2)


def held(model, plan, channels):
    """Bytes that a plan holds at most, with latents and image."""
    like = {"device": "meta", "dtype": model.conv2.weight.dtype}
    shape = fused.fused_shape(model)
    latents = torch.empty(1, channels, 1, *plan.latent, **like)
    sides = (shape.pixels * side for side in plan.latent)
    pixels = torch.empty(1, shape.image_channels, 1, *sides, **like)
    device, made = latents.device, Allocations(0)
    with made, mock.patch.object(flat.F, "conv2d", convolved):
        if plan.direction == "decode":
            tiles.decode(decoder_stages(model, FusedLayers(device)), latents, plan, out=pixels)
        else:
            tiles.encode(encoder_stages(model, FusedLayers(device)), pixels, plan)
    inside = latents.nbytes if plan.direction == "encode" else 0
    return made.peak + latents.nbytes + pixels.nbytes - inside


def predicted(shape, plan, itemsize):
    """Bytes of a plan whose middle may be sliced otherwise than planned."""
    sizes = (plan.direction, shape, plan.latent, itemsize)
    kept = vae_bytes.latent_bytes(*sizes[1:]) + vae_bytes.image_bytes(*sizes[1:])
    middle = vae_bytes.middle_bytes(*sizes, plan.middle_rows)
    return kept + max(middle, vae_bytes.outside_middle_bytes(*sizes, plan.tile))


PUBLISHED = [lambda: wan(dim=96), pytest.param(lambda: wan_21(96, 144), marks=newer)]
# Latent pixels, tiles and rows of a slice of the middle.
PLANS = [((128, 128), 1, 128), ((33, 70), 1, 33), ((96, 72), 12, 96), ((96, 72), 12, 8)]


@pytest.mark.parametrize("build", PUBLISHED, ids=["1.x", "2.1"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_predicted_peak(build, dtype):
    with torch.device("meta"):
        model = build().to(dtype)
    shape, size = fused.fused_shape(model), dtype.itemsize
    for (latent, count, rows), plan in itertools.product(PLANS, (plan_decode, plan_encode)):
        made = plan(shape, *latent, itemsize=size, budget=None, tiles=count, image_on_card=True)
        made = replace(made, middle_rows=rows)
        peak, tracked = predicted(shape, made, size), held(model, made, shape.latent_channels)
        assert rows < latent[0] or peak == made.peak_bytes
        assert tracked <= peak <= 1.25 * tracked, (made, peak / tracked)
