"""Planned decoding and encoding against ComfyUI's own nodes."""

import contextlib
import weakref
from types import SimpleNamespace
from unittest import mock

import comfy.model_management as management
import comfy.nested_tensor
import comfy.sd
import comfy.taesd.taesd
import comfy.utils
import pytest
import torch
from comfyui_boot import MODE, ROOT, refused
from vae_cases import assert_close, core_decode, core_encode, core_encode_each, random, random_vae

from qwen_l40s.errors import SettingError, UnavailableError
from qwen_l40s.hosts.comfyui.decode import decode as planned_vae
from qwen_l40s.hosts.comfyui.decode import decode as vae_batch
from qwen_l40s.hosts.comfyui.decode.decode import decode, encode
from qwen_l40s.hosts.comfyui.load.vae import load_vae
from qwen_l40s.spec.formats import GIB, MIB

pytestmark = [
    pytest.mark.each_device,
    pytest.mark.usefixtures("exact_convolutions", "inference_mode"),
]
MICRO = ROOT / "models" / "micro"
CARD = MODE != "cpu"


VAES = {
    "micro": load_vae(MICRO)[0],
    "random": random_vae(dtype=None),
    "layered": random_vae(dtype=None, channels=4),
    "bf16": random_vae(dtype=torch.bfloat16),
}
EXACT = random_vae()


def assert_same(found, known):
    assert found.shape == known.shape, (found.shape, known.shape)
    assert (found.dtype, found.device) == (known.dtype, known.device)
    assert torch.isfinite(found).all()
    assert torch.equal(found, known), (found - known).abs().max()


@contextlib.contextmanager
def as_on_a_card(free, others=0, reserved=0, kept=0):
    """Plans as for a card on which `free` bytes are free, `kept` of the result to be kept there.

    Gives `asked`, the bytes that `load_models_gpu` is asked for, `free` and the `other` model.
    """
    card = SimpleNamespace(free=free, asked=[])
    load, really_free = management.load_models_gpu, management.get_free_memory

    def load_models_gpu(models, memory_required=0, force_full_load=False):
        card.asked.append(memory_required)
        with mock.patch.object(management, "get_free_memory", really_free):
            load(models, force_full_load=force_full_load)

    card.other = other = SimpleNamespace(loaded_size=lambda: other.size, size=others)
    other.load_device = management.vae_device()

    def get_free_memory(device, torch_free_too=False):
        return (card.free, 0) if torch_free_too else card.free

    patches = (
        mock.patch.object(vae_batch, "on_processor", return_value=False),
        mock.patch.object(vae_batch.VaeBatch, "_kept", kept),
        mock.patch.object(management, "load_models_gpu", load_models_gpu),
        mock.patch.object(management, "get_free_memory", get_free_memory),
        mock.patch.object(management, "extra_reserved_memory", return_value=reserved),
    )
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        loaded = [None, other] if others else []
        stack.enter_context(mock.patch.object(management, "loaded_models", lambda: loaded))
        yield card


@contextlib.contextmanager
def plans_run():
    plans = []
    pieces = planned_vae.pieces
    with contextlib.ExitStack() as stack:
        for name in ("decode", "encode"):
            real = getattr(pieces, name)

            def run(stages, source, plan, real=real, **settings):
                plans.append(plan)
                return real(stages, source, plan, **settings)

            stack.enter_context(mock.patch.object(pieces, name, run))
        yield plans


@contextlib.contextmanager
def out_of_memory(calls, name="decode"):
    """The card runs out in these calls (from 0) of the core's `decode` or `encode`."""
    real, held, count = getattr(planned_vae.pieces, name), [], iter(range(100))

    def run(stages, source, plan, **settings):
        # What a failed call left behind is gone before the next one starts.
        assert not [reference for reference in held if reference() is not None]
        activations = torch.zeros(10, device=source.device)
        held.append(weakref.ref(activations))
        if next(count) in calls:
            if (out := settings.get("out")) is not None:
                out.fill_(torch.nan)
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return real(stages, source, plan, **settings)

    with mock.patch.object(planned_vae.pieces, name, run):
        yield held


# ------------------------------------------------------------------------------- the host's results


def test_decoding_is_the_host_s():
    for name, vae in VAES.items():
        for shape in ((1, 16, 1, 8, 8), (1, 16, 1, 5, 7), (3, 16, 1, 6, 4), (1, 16, 1, 1, 1)):
            latents = random(*shape)
            before = latents.clone()
            images, report = decode(vae, latents)
            assert_same(images, core_decode(vae, before))
            assert torch.equal(latents, before)
            height, width, count = 8 * shape[3], 8 * shape[4], shape[0]
            assert images.shape == (count, height, width, 4 if name == "layered" else 3)
            noun = "image" if count == 1 else "images"
            assert report.startswith(f"decode {count} {noun} of {width}x{height}: whole, "), report
            assert images.min() >= 0 and images.max() <= 1 and images.std() > 0


def test_latents_of_any_form():
    latents = random(2, 16, 1, 6, 8)
    for other in (latents.half(), latents.transpose(3, 4), latents.expand(2, -1, -1, -1, -1)):
        assert_same(decode(VAES["micro"], other)[0], core_decode(VAES["micro"], other))
    for vae in VAES.values():  # an image's may have no frames
        assert_same(decode(vae, latents[:, :, 0])[0], core_decode(vae, latents))
    nested = comfy.nested_tensor.NestedTensor([latents, random(2, 8, 3)])
    assert_same(decode(VAES["micro"], nested)[0], core_decode(VAES["micro"], nested))


def test_videos_and_layers_are_the_host_s():
    for vae in VAES.values():
        latents = random(2, 16, 3, 4, 4)
        images, report = decode(vae, latents)
        assert_same(images, core_decode(vae, latents))
        assert images.shape[0] == 18
        assert report == (
            "decode: ComfyUI's code ran, because the latent has 3 frames, as of a video or of "
            "layers"
        )
    video = random(1, 8, 16, 16, 3).sigmoid()
    latents, report = encode(VAES["micro"], video)
    assert_same(latents, core_encode(VAES["micro"], video))
    assert report == "encode: ComfyUI's code ran, because the pixels are a video"


def test_encoding_is_the_host_s():
    for vae in VAES.values():
        for count, *shape in (
            (1, 64, 64, 3),
            (1, 70, 83, 3),
            (1, 8, 8, 3),
            (1, 48, 41, 4),
            (3, 40, 52, 3),
        ):
            pixels = random(count, *shape).sigmoid()
            before = pixels.clone()
            latents, report = encode(vae, pixels)
            assert_same(latents, core_encode_each(vae, before))
            assert torch.equal(pixels, before)
            height, width = shape[0] // 8, shape[1] // 8
            assert latents.shape == (count, 16, 1, height, width)
            noun = "image" if count == 1 else "images"
            words = f"encode {count} {noun} of {8 * width}x{8 * height}: whole, "
            assert report.startswith(words)


def test_other_vaes_are_the_host_s():
    tiny = comfy.taesd.taesd.TAESD().state_dict()
    vae = comfy.sd.VAE(sd={name: random(*t.shape) * 0.05 for name, t in tiny.items()})
    latents, pixels = random(2, 4, 6, 6), random(2, 52, 48, 3).sigmoid()
    images, report = decode(vae, latents)
    assert_same(images, core_decode(vae, latents))
    assert report == "decode: ComfyUI's code ran, because the VAE is a TAESD and not Qwen-Image's"
    encoded, report = encode(vae, pixels)
    assert_same(encoded, core_encode(vae, pixels))
    assert report == "encode: ComfyUI's code ran, because the VAE is a TAESD and not Qwen-Image's"

    class Other:
        def decode(self, latents):
            return latents.movedim(1, -1)

        def encode(self, pixels):
            return pixels.movedim(-1, 1)

    why = "because the VAE, a Other, decodes its own way"
    images, report = decode(Other(), latents)
    assert_same(images, latents.movedim(1, -1))
    assert report == f"decode: ComfyUI's code ran, {why}"
    assert encode(Other(), pixels)[1] == f"encode: ComfyUI's code ran, {why}"


def test_a_wan_vae_that_is_not_qwen_image_s():
    latents = random(1, 16, 1, 4, 4)
    upscaler = random_vae(gives=12)
    images, report = decode(upscaler, latents)
    assert_same(images, core_decode(upscaler, latents))
    assert "ComfyUI's code ran, because the VAE takes 3 channels and gives 12" in report
    altered = random_vae()
    altered.first_stage_model.attn_scales = [1.0]
    images, report = decode(altered, latents)
    assert_same(images, core_decode(altered, latents))
    assert "because the VAE is a WanVAE and its layers differ from Qwen-Image's" in report
    altered = random_vae()
    altered.encode = lambda pixels: pixels
    assert "because the VAE, a VAE, encodes its own way" in decode(altered, latents)[1]


# ---------------------------------------------------------------------------------- tiles and room


def test_tiles_on_request():
    latents, pixels = random(2, 16, 1, 24, 17), random(2, 192, 136, 3).sigmoid()
    known = core_decode(EXACT, latents)
    for tiles in (2, 5, 6):
        images, report = decode(EXACT, latents, tiles)
        assert_close(images, known)
        assert " exact tiles of " in report and "as requested" in report, report
        assert int(report.split(": ")[1].split()[0]) >= tiles, report
    known = core_encode_each(EXACT, pixels)
    latents, report = encode(EXACT, pixels, 6)
    assert_close(latents, known)
    assert "6 exact tiles of " in report and "as requested" in report


@pytest.mark.parametrize(
    ("run", "by_core", "shape", "parts"),
    [(decode, core_decode, (1, 16, 1, 32, 24), 2), (encode, core_encode, (1, 256, 200, 3), 1)],
    ids=["decode", "encode"],
)
def test_what_is_free_decides(run, by_core, shape, parts):
    source = random(*shape).sigmoid()
    known = by_core(EXACT, source)
    with as_on_a_card(free=100 * GIB) as card, plans_run() as plans:
        report = run(EXACT, source)[1]
    assert "whole, " in report and " of 100.0 GiB free" in report and "tile" not in report
    whole = plans[0].peak_bytes
    assert card.asked == [whole] and plans[0].whole
    with as_on_a_card(free=whole) as card, plans_run() as plans:
        run(EXACT, source)
    assert plans[0].whole
    for least in range(1, parts + 1):
        with as_on_a_card(free=whole // least - 1) as card, plans_run() as plans:
            found, report = run(EXACT, source)
        assert_close(found, known)
        assert not plans[0].whole and plans[0].peak_bytes <= whole // least
        assert card.asked == [plans[0].peak_bytes]
        assert f"{plans[0].count} exact tiles of " in report, report
        assert "because the whole needs " in report and "moved" not in report, report
        assert "predicted" in report


def test_weights_that_wait_and_a_reserve_take_room():
    latents = random(1, 16, 1, 32, 24)
    decode(EXACT, latents)
    size = EXACT.patcher.model_size()
    with as_on_a_card(free=GIB):
        assert vae_batch.free_bytes(EXACT) == GIB - int(1.1 * vae_batch.waiting_bytes(EXACT))
        EXACT.patcher.detach()
        assert vae_batch.waiting_bytes(EXACT) == size
        assert vae_batch.free_bytes(EXACT) == int(GIB - 1.1 * size)
    with as_on_a_card(free=GIB, reserved=2 * GIB):
        assert vae_batch.free_bytes(EXACT) == 0
    elsewhere = SimpleNamespace(
        current_loaded_device=lambda: torch.device("cpu"), model_size=lambda: 7, loaded_size=int
    )
    vae = SimpleNamespace(device=torch.device("cuda:0"), patcher=elsewhere)
    assert vae_batch.waiting_bytes(vae) == 7


def test_other_models_leave_only_where_no_plan_fits():
    latents = random(1, 16, 1, 32, 24)
    with as_on_a_card(free=100_000, others=10 * GIB) as card, plans_run() as plans:
        real = planned_vae.pieces.decode

        def run(*arguments, **settings):
            card.other.size -= 3 * GIB
            return real(*arguments, **settings)

        with mock.patch.object(planned_vae.pieces, "decode", run):
            images, report = decode(EXACT, latents)
    assert_close(images, core_decode(EXACT, latents))
    (plan,) = plans
    assert card.asked == [plan.peak_bytes] and plan.peak_bytes > 100_000
    assert "0 MiB is free: ComfyUI offloads other models first" in report, report
    assert "ComfyUI offloaded 3.0 GiB of other models" in report, report


def test_whole_on_request():
    latents = random(2, 16, 1, 12, 8)
    with as_on_a_card(free=100_000) as card, plans_run() as plans:
        images, report = decode(EXACT, latents, 1)
    assert_close(images, core_decode(EXACT, latents))
    assert [plan.whole for plan in plans] == [True, True]
    assert card.asked == [plans[0].peak_bytes]
    assert "whole, " in report and "0 MiB is free\n" in report, report


def test_a_result_that_stays_on_the_card_takes_room():
    latents = random(1, 16, 1, 32, 24)
    with as_on_a_card(free=100 * GIB), plans_run() as plans:
        decode(EXACT, latents)
    whole = plans[0].peak_bytes
    for kept, fits in ((50 * MIB, True), (50 * MIB + 1, False)):
        with as_on_a_card(free=whole + 50 * MIB, kept=kept) as card, plans_run() as plans:
            decode(EXACT, latents)
        assert plans[0].whole == fits and card.asked == [plans[0].peak_bytes + kept]


def test_a_batch_goes_in_parts():
    latents = random(5, 16, 1, 12, 8)
    with as_on_a_card(free=100 * GIB), plans_run() as plans:
        decode(EXACT, latents[:1])
    with as_on_a_card(free=int(3 * plans[0].peak_bytes)), plans_run() as plans:
        images, _ = decode(EXACT, latents)
    assert_close(images, core_decode(EXACT, latents))
    assert [plan.batch for plan in plans] == [2, 2, 2]


def test_torch_s_cache_is_cleared_only_where_it_is_in_the_way():
    patcher = SimpleNamespace(
        current_loaded_device=lambda: vae.device, model_size=lambda: 300, loaded_size=lambda: 200
    )
    vae = SimpleNamespace(device=torch.device("cuda:0"), patcher=patcher, disable_offload=True)
    # (free in all, of that cached, needed, cleared); 100 of the weights are not there yet
    for total, cached, needed, cleared in (
        (2000, 0, 9000, False),
        (2000, 900, 1000, False),
        (2000, 900, 1001, True),
    ):
        with (
            mock.patch.object(management, "load_models_gpu") as load,
            mock.patch.object(management, "get_free_memory", return_value=(total, cached)),
            mock.patch.object(management, "soft_empty_cache") as clear,
        ):
            assert vae_batch.make_room(vae, needed) == cleared
        assert clear.called == cleared
        load.assert_called_once_with([patcher], memory_required=needed, force_full_load=True)


def test_the_bar_counts_tiles_and_items():
    seen = []
    latents = random(2, 16, 1, 24, 16)
    comfy.utils.set_progress_bar_global_hook(
        lambda done, total, *_, **__: seen.append((done, total))
    )
    try:
        decode(EXACT, latents, 6)
        encode(EXACT, random(3, 16, 16, 3).sigmoid())
    finally:
        comfy.utils.set_progress_bar_global_hook(None)
    assert (12, 12) in seen and seen[-1] == (3, 3), seen


# ---------------------------------------------------------------------------------- what goes wrong


def test_out_of_memory_once_is_done_again_in_tiles():
    latents = random(1, 16, 1, 32, 24)
    known = core_decode(EXACT, latents)
    before = latents.clone()
    with out_of_memory([0]), mock.patch.object(vae_batch.logger, "warning") as warning:
        images, report = decode(EXACT, latents)
    assert_close(images, known)
    assert torch.equal(latents, before)
    assert "the GPU ran out of memory; repeated in half of the free VRAM: in " in report
    assert " exact tiles\n" in report, report
    warning.assert_called_once()
    pixels = random(2, 256, 192, 3).sigmoid()
    known = core_encode_each(EXACT, pixels)
    with out_of_memory([1], "encode"):
        encoded, report = encode(EXACT, pixels)
    assert_close(encoded, known)
    assert "the GPU ran out of memory" in report


def test_out_of_memory_late_in_a_batch_keeps_what_is_done():
    latents = random(3, 16, 1, 32, 24)
    with as_on_a_card(free=100 * GIB), plans_run() as plans:
        decode(EXACT, latents[:1])
    free = int(1.5 * plans[0].peak_bytes)
    with as_on_a_card(free=free) as card, plans_run() as plans, out_of_memory([1]) as calls:
        images, _ = decode(EXACT, latents)
    assert_close(images, core_decode(EXACT, latents))
    assert [plan.whole for plan in plans] == [True, False, False] and len(calls) == 4
    assert card.asked == [plans[0].peak_bytes, plans[1].peak_bytes]
    assert plans[1].peak_bytes <= plans[0].peak_bytes // 2


def test_the_second_try_takes_half_of_what_is_free_then():
    latents = random(1, 16, 1, 32, 24)
    known = core_decode(EXACT, latents)
    with as_on_a_card(free=100 * GIB), plans_run() as plans:
        decode(EXACT, latents)
    whole = plans[0].peak_bytes
    with as_on_a_card(free=whole) as card, plans_run() as plans, out_of_memory([0]):
        run = planned_vae.pieces.decode

        def less_and_less(*arguments, **settings):
            card.free = whole // 2
            return run(*arguments, **settings)

        with mock.patch.object(planned_vae.pieces, "decode", less_and_less):
            images, _ = decode(EXACT, latents)
    assert_close(images, known)
    assert plans[0].peak_bytes <= whole // 4


LATENT = random(1, 16, 1, 32, 24)
# {what: (what is short, latents, tiles, words of the sentence)}
NO_ROOM = {
    "fits nowhere": (
        *(lambda: as_on_a_card(free=0), torch.zeros(1).expand(1, 16, 1, 512, 512)),
        *(0, ("4096x4096", "0 MiB is free")),
    ),
    "out of memory twice": (lambda: out_of_memory([0, 1]), LATENT, 0, ("192x256", "is free now")),
    "whole on request": (
        lambda: out_of_memory([0]),
        LATENT,
        1,
        ("192x256 whole", "set tiles to 0"),
    ),
    # On a card ComfyUI's attention refuses a single pixel in fp32.
    "too small for tiles": (lambda: out_of_memory([0]), random(1, 16, 1, 4, 1), 0, ("8x32 whole",)),
}


@pytest.mark.parametrize("name", NO_ROOM)
def test_a_decode_without_room_is_one_sentence(name):
    short, latents, tiles, words = NO_ROOM[name]
    with short() as tried:
        refused(UnavailableError, *words, run=lambda: decode(EXACT, latents, tiles))
    if name == "fits nowhere":
        assert not tried.asked
        return
    assert len(tried) == (1 if "whole" in words[0] else 2)
    assert_same(decode(EXACT, latents)[0], core_decode(EXACT, latents))


def test_more_than_host_memory_is_refused_before_anything_is_loaded():
    small = torch.zeros(1)
    refusals = (
        (decode, small.expand(1000, 16, 1, 512, 512), "decode 1000 images of 4096x4096"),
        (decode, small.expand(1, 16, 1, 6250, 6250), "decode 1 image of 50000x50000"),
        (encode, small.expand(1, 50000, 50000, 3), "encode 1 image of 50000x50000"),
    )
    with (
        mock.patch.object(vae_batch, "available_memory", return_value=20 * GIB),
        mock.patch.object(management, "load_models_gpu") as load,
    ):
        for run, source, what in refusals:
            words = (f"system RAM to {what}: ", "20.0 GiB is available", "smaller")
            refused(UnavailableError, *words, run=lambda run=run, s=source: run(EXACT, s))
    load.assert_not_called()


def test_too_much_for_the_processor_goes_in_tiles():
    if CARD:
        return
    latents = random(1, 16, 1, 32, 24)
    with plans_run() as plans:
        known, _ = decode(EXACT, latents)
    free = plans[0].peak_bytes
    with mock.patch.object(vae_batch, "available_memory", return_value=free), plans_run() as plans:
        images, report = decode(EXACT, latents)
        words = ("decode 1 image of 192x256 whole", "system RAM")
        refused(UnavailableError, *words, run=lambda: decode(EXACT, latents, 1))
    assert_close(images, known)
    assert not any(plan.whole for plan in plans) and " exact tiles" in report


def test_an_interruption_stops_it():
    latents = random(1, 16, 1, 24, 16)
    with plans_run() as plans:
        management.interrupt_current_processing(True)  # every layer of ComfyUI's asks for it
        with pytest.raises(management.InterruptProcessingException):
            decode(EXACT, latents, 6)
        management.interrupt_current_processing(False)
    assert len(plans) == 1


def test_what_is_no_latent_or_image_is_refused():
    vae = VAES["micro"]
    for shape in ((1, 4, 8, 8), (16, 8, 8), (1, 16, 1, 1, 8, 8)):
        words = (f"the latents are {shape}", "(batch, 16, height, width)", "the VAE of the model")
        refused(SettingError, *words, run=lambda shape=shape: decode(vae, torch.zeros(shape)))
    refused(SettingError, "(8, 8, 3)", "IMAGE", run=lambda: encode(vae, torch.zeros(8, 8, 3)))
    refused(SettingError, "height", run=lambda: encode(vae, torch.zeros(1, 7, 8, 3)))
    refused(SettingError, "width", run=lambda: decode(vae, torch.zeros(1, 16, 1, 4, 0)))
    refused(SettingError, "batch", run=lambda: decode(vae, torch.zeros(0, 16, 1, 4, 4)))
    for tiles in (-1, 65):
        words = ("number of tiles", "64 latent pixels", str(tiles))
        latents = torch.zeros(1, 16, 1, 8, 8)
        refused(SettingError, *words, run=lambda t=tiles, x=latents: decode(vae, x, t))
