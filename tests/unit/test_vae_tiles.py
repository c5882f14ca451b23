"""Decoding and encoding in tiles, against the whole and against diffusers' own code."""

import math
from dataclasses import replace
from functools import partial

import pytest

from qwen_l40s.errors import SettingError, UnavailableError

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")

from diffusers_encoder import encoder_stages

from qwen_l40s.hosts.diffusers import sample as host
from qwen_l40s.hosts.diffusers.sample import decoder_stages, vae_shape
from qwen_l40s.loaders.source import bundled_micro_folder
from qwen_l40s.optimizations.vae.tiles import decode, encode
from qwen_l40s.planning.vae import plan_decode, plan_encode
from qwen_l40s.spec.vae import VaeLayer

pytestmark = pytest.mark.usefixtures("one_thread")
EXACT_DB = 80
# Whole, or in slices, which the planner takes only of images larger than a test's.
MIDDLES = [{}, {"middle_rows": 3}, {"middle_rows": 1}]
# (batch, latent height, latent width, tiles, middle): odd, long, in one row or column, a latent
# pixel each.
GRIDS = [
    (1, 24, 24, 4, {"middle_rows": 3}),
    (2, 17, 31, 6, {}),
    (1, 40, 13, 3, {"middle_rows": 1}),
    (1, 8, 50, 5, {}),
    (1, 9, 11, 99, {"middle_rows": 3}),
    (1, 1, 2, 2, {"middle_rows": 1}),
]


@pytest.fixture(scope="module")
def micro():
    return diffusers.AutoencoderKLQwenImage.from_pretrained(bundled_micro_folder() / "vae").eval()


@pytest.fixture(scope="module")
def wide():
    torch.manual_seed(0)
    return diffusers.AutoencoderKLQwenImage(base_dim=16).eval()


@pytest.fixture(scope="module")
def layered():
    torch.manual_seed(0)
    return diffusers.AutoencoderKLQwenImage(base_dim=8, input_channels=4).eval()


@pytest.fixture(scope="module")
def of_21():
    torch.manual_seed(0)
    return diffusers.AutoencoderKLQwenImage21(base_dim=4, decoder_base_dim=8).eval()


def smooth_image(height: int, width: int, channels: int = 3, batch: int = 1) -> torch.Tensor:
    """(batch, channels, 1, height, width) from -1 to 1, of waves."""
    y, x = torch.meshgrid(torch.arange(height) / 90, torch.arange(width) / 90, indexing="ij")
    waves = [torch.sin((1 + k % 3) * x + k * y) * torch.cos(y - k) for k in range(channels * batch)]
    return 0.8 * torch.stack(waves).reshape(batch, channels, 1, height, width)


def latents_of(vae, batch: int, height: int, width: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(height * width)
    noise = torch.randn(batch, vae.config.z_dim, 1, height, width, generator=generator)
    mean, std = (
        torch.tensor(values).view(1, -1, 1, 1, 1)
        for values in (vae.config.latents_mean, vae.config.latents_std)
    )
    return noise * std + mean


def collect(seen: list):
    return lambda done, total: seen.append((done, total))


def decibels(found: torch.Tensor, known: torch.Tensor) -> float:
    error = float((found.double() - known.double()).square().mean())
    return 10 * math.log10(float(known.max() - known.min()) ** 2 / error) if error else math.inf


# ------------------------------------------------------------------------------------------- whole


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("micro", torch.float32),
        ("wide", torch.bfloat16),
        ("layered", torch.float32),
        ("of_21", torch.float32),
        ("of_21", torch.bfloat16),
    ],
)
def test_the_whole_is_the_hosts_own_bit_for_bit(request, name, dtype):
    vae = request.getfixturevalue(name)
    vae = type(vae).from_config(vae.config).to(dtype).eval()
    latents = latents_of(vae, 3, 7, 12).to(dtype)
    with torch.no_grad():
        known = vae.decode(latents).sample
    shape = vae_shape(vae)
    for batch in (2, 3):
        plan = replace(plan_decode(shape, 7, 12, batch=3, budget=None), batch=batch)
        seen = []
        found = decode(decoder_stages(vae), latents, plan, progress=collect(seen))
        assert found.shape == known.shape and found.dtype == dtype
        # A batch in other parts goes through other kernels.
        together = [vae.decode(part).sample for part in latents.split(batch)]
        assert torch.equal(found.clamp(-1, 1), torch.cat(together))
        assert seen == [(i + 1, -(-3 // batch)) for i in range(-(-3 // batch))]
    pixels = known.clamp(-1, 1)
    with torch.no_grad():
        mean = vae.encode(pixels).latent_dist.mode()
    plan = plan_encode(shape, 7, 12, batch=3, budget=None)
    assert torch.equal(encode(encoder_stages(vae), pixels, plan), mean)


# ------------------------------------------------------------------------------------- exact tiles


def seen_in_tiles(run, source, plan):
    """What a run in tiles gives; tells each of them."""
    seen, parts = [], len(source) * plan.count
    found = run(source, plan, progress=collect(seen))
    assert seen == [(i + 1, parts) for i in range(parts)]
    return found


def assert_tiles_are_the_whole(vae, batch, height, width, tiles, way):
    stages, back = decoder_stages(vae), encoder_stages(vae)
    shape, latents = stages.shape, latents_of(vae, batch, height, width)
    sizes = {"batch": batch, "budget": None}
    image = decode(stages, latents, plan_decode(shape, height, width, **sizes))
    sides = shape.pixels * height, shape.pixels * width
    assert image.shape == (batch, shape.image_channels, 1, *sides)
    plan = replace(plan_decode(shape, height, width, **sizes, tiles=tiles), **way)
    assert plan.count >= tiles
    found = seen_in_tiles(partial(decode, stages), latents, plan)
    assert decibels(found, image) >= EXACT_DB
    mean = encode(back, image, plan_encode(shape, height, width, **sizes))
    assert mean.shape == latents.shape
    plan = replace(plan_encode(shape, height, width, **sizes, tiles=tiles), **way)
    found = seen_in_tiles(partial(encode, back), image, plan)
    assert decibels(found, mean) >= EXACT_DB


@pytest.mark.parametrize(
    ("name", "batch", "height", "width", "tiles", "way"),
    [("micro", *GRIDS[0])]
    + [pytest.param("micro", *grid, marks=pytest.mark.slow) for grid in GRIDS[1:]]
    + [pytest.param("of_21", *GRIDS[it], marks=pytest.mark.slow) for it in (0, 1, -2, -1)],
)
def test_tiles_give_the_whole(request, name, batch, height, width, tiles, way):
    assert_tiles_are_the_whole(request.getfixturevalue(name), batch, height, width, tiles, way)


@pytest.mark.parametrize(("name", "way"), [("wide", MIDDLES[1]), ("layered", MIDDLES[0])])
def test_tiles_of_other_vaes(request, name, way):
    """Wider, and with an alpha channel."""
    assert_tiles_are_the_whole(request.getfixturevalue(name), 1, 15, 19, 4, way)


def test_tiles_in_bf16_differ_by_rounding(wide):
    """Tiles err against fp32 as the whole does, up to a tenth."""
    exact = latents_of(wide, 1, 20, 28)
    rounded = diffusers.AutoencoderKLQwenImage.from_config(wide.config)
    rounded.load_state_dict(wide.state_dict())
    rounded.bfloat16().eval()
    shape = vae_shape(wide)
    whole = plan_decode(shape, 20, 28, budget=None)
    tiled = [replace(plan_decode(shape, 20, 28, budget=None, tiles=4), **way) for way in MIDDLES]
    known = decode(decoder_stages(wide), exact, whole)
    error, *errors = [
        float((decode(decoder_stages(rounded), exact.bfloat16(), plan).float() - known).norm())
        for plan in (whole, *tiled)
    ]
    assert error > 0 and max(errors) <= 1.1 * error


@pytest.mark.parametrize(
    ("name", "kind"),
    [("micro", "convolution"), ("micro", "residual"), ("micro", "head"), ("of_21", "residual")],
)
def test_a_margin_of_less_would_not_do(request, monkeypatch, name, kind):
    """The tests above notice a layer that reads further than its step says."""
    reads = VaeLayer.reads

    def less(self, low, high):
        cut = self.kind == kind
        return reads(self, low + cut, high - cut)

    vae = request.getfixturevalue(name)
    stages, latents = decoder_stages(vae), latents_of(vae, 1, 16, 16)
    known = decode(stages, latents, plan_decode(stages.shape, 16, 16, budget=None))
    plan = replace(plan_decode(stages.shape, 16, 16, budget=None, tiles=4), middle_rows=4)
    assert decibels(decode(stages, latents, plan), known) >= EXACT_DB
    monkeypatch.setattr(VaeLayer, "reads", less)
    assert decibels(decode(stages, latents, plan), known) < EXACT_DB


def test_an_output_in_another_place_and_dtype(micro):
    stages, latents = decoder_stages(micro), latents_of(micro, 2, 12, 9)
    whole = plan_decode(stages.shape, 12, 9, batch=2, budget=None)
    known = decode(stages, latents, whole)
    for plan in (
        whole,
        replace(whole, batch=1),
        plan_decode(stages.shape, 12, 9, tiles=4, budget=None),
    ):
        out = torch.empty(known.shape, dtype=torch.float64)
        assert decode(stages, latents, plan, out=out) is out
        assert decibels(out, known) >= EXACT_DB
    pixels = smooth_image(96, 72).double()
    plan = plan_encode(stages.shape, 12, 9, budget=None, tiles=4)
    found = encode(encoder_stages(micro), pixels, plan, device="cpu", dtype=torch.float32)
    assert found.dtype == torch.float32
    assert torch.equal(found, encode(encoder_stages(micro), pixels.float(), plan))


# ------------------------------------------------------------------------------------ what is wrong


def test_what_is_refused(micro):
    stages, latents = decoder_stages(micro), latents_of(micro, 1, 4, 5)
    plan = plan_decode(stages.shape, 4, 5, budget=None)
    with pytest.raises(SettingError, match="make a plan for this size"):
        decode(stages, latents[..., :4], plan)
    with pytest.raises(SettingError, match="make a plan for this size"):
        decode(stages, latents[:, :, 0], plan)
    with pytest.raises(SettingError, match="the plan is to decode"):
        encode(encoder_stages(micro), smooth_image(32, 40), plan)
    with pytest.raises(SettingError, match="`out` is"):
        decode(stages, latents, plan, out=torch.empty(1, 3, 32, 40))
    with pytest.raises(SettingError, match="use Qwen-Image's VAE"):
        replace(stages, outer=stages.outer[1:])
    other = diffusers.AutoencoderKLQwenImage(base_dim=8, num_res_blocks=1)
    others = [{"num_res_blocks": 1}, {"is_residual": False}, {"patch_size": 2}]
    of_21 = [diffusers.AutoencoderKLQwenImage21(4, 8, **changed) for changed in others]
    for name, vaes in (("Qwen-Image", [other]), ("Qwen-Image-2.1", of_21)):
        for vae in vaes:
            with pytest.raises(SettingError, match=f"use {name}'s VAE"):
                decoder_stages(vae)


# ---------------------------------------------------------------------------------- diffusers' host


@pytest.mark.parametrize(("name", "size"), [("micro", "128x128"), ("of_21", "256x256")])
def test_the_host_decodes_whole_in_all_the_room_and_in_tiles_in_less(
    request, monkeypatch, name, size
):
    vae = request.getfixturevalue(name)
    latent = latents_of(vae, 1, 16, 16)
    with torch.no_grad():
        known = vae.decode(latent).sample
        assert torch.equal(host.decode_latent(vae, latent), known)
        least = plan_decode(vae_shape(vae), 16, 16, itemsize=4, budget=None).peak_bytes
        monkeypatch.setattr(host, "free_bytes", lambda device: least // 2)
        tiled = host.decode_latent(vae, latent)
    assert decibels(tiled, known) >= EXACT_DB
    monkeypatch.setattr(host, "free_bytes", lambda device: 0)
    with pytest.raises(UnavailableError, match=f"{size} pixels"):
        host.decode_latent(vae, latent)


def test_what_is_free_is_asked_of_the_card(monkeypatch):
    monkeypatch.setattr("qwen_l40s.machine.device.available_memory", lambda: 300)
    assert host.free_bytes(torch.device("cpu")) == 300
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 700)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 200)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 5000))
    assert host.free_bytes(torch.device("cuda", 0)) == 1500
