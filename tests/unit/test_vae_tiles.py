"""Decoding and encoding in tiles, against the whole and against diffusers' own code."""

import logging
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest

from qwen_l40s.errors import SettingError, UnavailableError

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")

from qwen_l40s.hosts.diffusers import decode as host
from qwen_l40s.hosts.diffusers.decode import decoder_stages, encoder_stages, vae_shape
from qwen_l40s.loaders.source import bundled_micro_folder
from qwen_l40s.optimizations.vae import DecoderStages, decode, encode
from qwen_l40s.planning.vae import plan_decode, plan_encode
from qwen_l40s.planning.vae_bytes import Step

pytestmark = pytest.mark.usefixtures("one_thread")
EXACT_DB = 80
# Ways that the planner takes only of images larger than a test's.
MIDDLES = [{}, {"middle_rows": 3}, {"middle_rows": 1}]
# (batch, latent height, latent width, tiles): odd, long, in one row or column, a latent pixel each.
GRIDS = [
    (1, 24, 24, 4),
    (2, 17, 31, 6),
    (1, 40, 13, 3),
    (1, 8, 50, 5),
    (1, 9, 11, 99),
    (1, 1, 2, 2),
]


@pytest.fixture(scope="module")
def micro():
    """The bundled VAE, 8 channels wide."""
    return diffusers.AutoencoderKLQwenImage.from_pretrained(bundled_micro_folder() / "vae").eval()


@pytest.fixture(scope="module", params=["bundled", "random", "layered"])
def vae(request, micro):
    """Also one with random weights, 16 wide; and one with 4 channels, as Layered has it."""
    if request.param == "bundled":
        return micro
    torch.manual_seed(0)
    channels = 4 if request.param == "layered" else 3
    dim = 8 if request.param == "layered" else 16
    return diffusers.AutoencoderKLQwenImage(base_dim=dim, input_channels=channels).eval()


def smooth_image(height: int, width: int, channels: int = 3, batch: int = 1) -> torch.Tensor:
    """(batch, channels, 1, height, width) from -1 to 1, of waves."""
    y, x = torch.meshgrid(torch.arange(height) / 90, torch.arange(width) / 90, indexing="ij")
    waves = [torch.sin((1 + k % 3) * x + k * y) * torch.cos(y - k) for k in range(channels * batch)]
    return 0.8 * torch.stack(waves).reshape(batch, channels, 1, height, width)


def latents_of(vae, batch: int, height: int, width: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(height * width)
    noise = torch.randn(batch, 16, 1, height, width, generator=generator)
    mean, std = (
        torch.tensor(values).view(1, -1, 1, 1, 1)
        for values in (vae.config.latents_mean, vae.config.latents_std)
    )
    return noise * std + mean


def collect(seen: list):
    """A `progress` that keeps what it is told."""
    return lambda done, total: seen.append((done, total))


def decibels(found: torch.Tensor, known: torch.Tensor) -> float:
    """Peak signal-to-noise ratio over the range of `known`."""
    error = float((found.double() - known.double()).square().mean())
    return 10 * math.log10(float(known.max() - known.min()) ** 2 / error) if error else math.inf


# ------------------------------------------------------------------------------------------- whole


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_whole_is_the_hosts_own_bit_for_bit(vae, dtype):
    vae = diffusers.AutoencoderKLQwenImage.from_config(vae.config).to(dtype).eval()
    latents = latents_of(vae, 3, 7, 12).to(dtype)
    with torch.no_grad():
        known = vae.decode(latents).sample
    shape = vae_shape(vae)
    for batch in (1, 2, 3):
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


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("way", MIDDLES)
def test_decoding_in_tiles_gives_the_whole(micro, grid, way):
    batch, height, width, tiles = grid
    stages, latents = decoder_stages(micro), latents_of(micro, batch, height, width)
    shape = stages.shape
    known = decode(stages, latents, plan_decode(shape, height, width, batch=batch, budget=None))
    plan = replace(plan_decode(shape, height, width, batch=batch, budget=None, tiles=tiles), **way)
    assert plan.count >= tiles
    seen = []
    found = decode(stages, latents, plan, progress=collect(seen))
    assert decibels(found, known) >= EXACT_DB
    assert seen == [(i + 1, batch * plan.count) for i in range(batch * plan.count)]


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("way", MIDDLES)
def test_encoding_in_tiles_gives_the_whole(micro, grid, way):
    batch, height, width, tiles = grid
    stages = encoder_stages(micro)
    shape = stages.shape
    pixels = smooth_image(8 * height, 8 * width, shape.image_channels, batch)
    known = encode(stages, pixels, plan_encode(shape, height, width, batch=batch, budget=None))
    plan = replace(plan_encode(shape, height, width, batch=batch, budget=None, tiles=tiles), **way)
    seen = []
    found = encode(stages, pixels, plan, progress=collect(seen))
    assert decibels(found, known) >= EXACT_DB
    assert seen == [(i + 1, batch * plan.count) for i in range(batch * plan.count)]


@pytest.mark.parametrize("way", MIDDLES)
def test_tiles_of_other_vaes(vae, way):
    """Wider, and with an alpha channel."""
    shape, latents = vae_shape(vae), latents_of(vae, 1, 15, 19)
    known = decode(decoder_stages(vae), latents, plan_decode(shape, 15, 19, budget=None))
    plan = replace(plan_decode(shape, 15, 19, budget=None, tiles=4), **way)
    assert decibels(decode(decoder_stages(vae), latents, plan), known) >= EXACT_DB
    mean = encode(encoder_stages(vae), known, plan_encode(shape, 15, 19, budget=None))
    plan = replace(plan_encode(shape, 15, 19, budget=None, tiles=4), **way)
    assert decibels(encode(encoder_stages(vae), known, plan), mean) >= EXACT_DB


@pytest.mark.parametrize("way", MIDDLES)
def test_tiles_in_bf16_differ_by_rounding(vae, way):
    """Tiles err against fp32 as the whole does, up to a tenth."""
    exact = latents_of(vae, 1, 20, 28)
    rounded = diffusers.AutoencoderKLQwenImage.from_config(vae.config)
    rounded.load_state_dict(vae.state_dict())
    rounded.bfloat16().eval()
    shape = vae_shape(vae)
    whole = plan_decode(shape, 20, 28, budget=None)
    tiled = replace(plan_decode(shape, 20, 28, budget=None, tiles=4), **way)
    known = decode(decoder_stages(vae), exact, whole)
    errors = [
        float((decode(decoder_stages(rounded), exact.bfloat16(), plan).float() - known).norm())
        for plan in (whole, tiled)
    ]
    assert errors[0] > 0 and errors[1] <= 1.1 * errors[0]


@pytest.mark.parametrize("kind", ["convolution", "residual", "head"])
def test_a_margin_of_less_would_not_do(micro, monkeypatch, kind):
    """The tests above notice a layer that reads further than its step says."""
    reads = Step.reads

    def less(self, low, high):
        cut = self.kind == kind
        return reads(self, low + cut, high - cut)

    stages, latents = decoder_stages(micro), latents_of(micro, 1, 16, 16)
    known = decode(stages, latents, plan_decode(stages.shape, 16, 16, budget=None))
    plan = replace(plan_decode(stages.shape, 16, 16, budget=None, tiles=4), middle_rows=4)
    assert decibels(decode(stages, latents, plan), known) >= EXACT_DB
    monkeypatch.setattr(Step, "reads", less)
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
        DecoderStages(stages.shape, stages.before, stages.middle, stages.up[1:])
    other = diffusers.AutoencoderKLQwenImage(base_dim=8, num_res_blocks=1)
    with pytest.raises(SettingError, match="use Qwen-Image's VAE"):
        decoder_stages(other)


# ---------------------------------------------------------------------------------- diffusers' host


def test_the_host_decodes_whole_in_all_the_room_and_in_tiles_in_less(micro, monkeypatch):
    latent = latents_of(micro, 1, 16, 16)
    with torch.no_grad():
        known = micro.decode(latent).sample
        assert torch.equal(host.decode_latent(micro, latent), known)
        least = plan_decode(vae_shape(micro), 16, 16, itemsize=4, budget=None).peak_bytes
        monkeypatch.setattr(host, "free_bytes", lambda device: least // 2)
        tiled = host.decode_latent(micro, latent)
    assert decibels(tiled, known) >= EXACT_DB
    monkeypatch.setattr(host, "free_bytes", lambda device: 0)
    with pytest.raises(UnavailableError, match="128x128 pixels"):
        host.decode_latent(micro, latent)


def test_the_host_tries_once_more_in_half_the_memory(micro, monkeypatch, caplog):
    latent = latents_of(micro, 1, 16, 16)
    with torch.no_grad():
        known = micro.decode(latent).sample
    plans = []

    def fail(times):
        def run(stages, latents, plan, **options):
            plans.append(plan)
            if len(plans) <= times:
                raise torch.cuda.OutOfMemoryError("out of memory")
            return decode(stages, latents, plan, **options)

        plans.clear()
        monkeypatch.setattr(host, "planned", SimpleNamespace(decode=run))

    whole = plan_decode(vae_shape(micro), 16, 16, itemsize=4, budget=None).peak_bytes
    monkeypatch.setattr(host, "free_bytes", lambda device: 10 * whole)
    fail(1)
    with caplog.at_level(logging.WARNING):
        found = host.decode_latent(micro, latent)
    assert decibels(found, known) >= EXACT_DB
    assert [plan.whole for plan in plans] == [True, False]
    assert plans[1].peak_bytes <= plans[0].peak_bytes // 2
    assert "ran out of memory while decoding" in caplog.text and "exact tiles" in caplog.text
    fail(2)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        host.decode_latent(micro, latent)


def test_what_is_free_is_asked_of_the_card(monkeypatch):
    monkeypatch.setattr("qwen_l40s.hosts.diffusers.offload.available_memory", lambda: 300)
    assert host.free_bytes(torch.device("cpu")) == 300
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 700)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 200)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 5000))
    assert host.free_bytes(torch.device("cuda", 0)) == 1500
