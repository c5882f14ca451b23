"""True sizes of what is wired into the estimator."""

from functools import partial
from types import SimpleNamespace
from unittest import mock

import comfy.ldm.wan.vae
import comfy.memory_management
import comfy.model_base
import comfy.model_management as management
import comfy.model_patcher
import comfy.nested_tensor
import comfy.sd
import comfy.supported_models
import comfy.taesd.taesd
import comfyui_boot
import narrow_transformer as narrow
import pytest
import torch
from comfy.text_encoders import hunyuan_image, kandinsky5, qwen_image
from comfy_extras import nodes_qwen
from comfyui_boot import MODE, ROOT, folder
from safetensors.torch import save_file

import nodes as core
from qwen_l40s.errors import SettingError
from qwen_l40s.families.registry import find_member
from qwen_l40s.hosts.comfyui.estimate.request import latent_sizes, request_from
from qwen_l40s.hosts.comfyui.estimate.sizes import clip_sizes, model_sizes, vae_sizes
from qwen_l40s.hosts.comfyui.load.encoder_kind import QWEN25_VL
from qwen_l40s.hosts.comfyui.load.text_encoder import load_text_encoder
from qwen_l40s.hosts.comfyui.load.vae import load_vae
from qwen_l40s.hosts.comfyui.lora.apply import apply_lora
from qwen_l40s.hosts.comfyui.sample.step_cache import cache_steps
from qwen_l40s.planning.bytes import weight_bytes
from qwen_l40s.planning.options import request_settings
from qwen_l40s.planning.step_cache import PRESETS, CacheSettings, computed_with
from qwen_l40s.spec.formats import QUANTIZED
from qwen_l40s.spec.sizes import RANKS_AT_ONCE
from qwen_l40s.spec.vae import VaeShape

pytestmark = pytest.mark.each_device
FOLDER = folder("true_sizes")
CARD = MODE != "cpu"
MICRO = ROOT / "models" / "micro"
WEIGHTS = narrow.weights()
PATH = narrow.write(FOLDER / "bf16.safetensors", WEIGHTS)
ON_CARD = "on card" if CARD else "auto"  # on the processor nothing has decided it


def load(form="bf16", off_card=False, path=PATH):
    with torch.inference_mode():  # as loader nodes run
        return narrow.load_patcher(path, form, off_card)


def published(family, **config):
    shape = find_member(family).transformer
    made = comfy.supported_models.QwenImage(
        {"image_model": "qwen_image", "in_channels": 64, "num_layers": shape.blocks, **config}
    )
    made.set_inference_dtype(torch.bfloat16, None)
    # Under dynamic VRAM layers get their weights only from a file.
    with mock.patch.object(comfy.memory_management, "aimdo_enabled", False):
        model = made.get_model({}, "", device="meta")
    device = management.get_torch_device()
    return comfy.model_patcher.ModelPatcher(model, load_device=device, offload_device=device)


def request(model=None, clip=None, vae=None, latent=None, **settings):
    return request_from(
        request_settings(**settings), model=model, clip=clip, vae=vae, latent=latent
    )


refused = partial(comfyui_boot.refused, SettingError)


def empty(*shape, **more):
    return {"samples": torch.zeros(shape), **more}


# --- MODEL


def test_published_sizes_are_counted_to_the_byte():
    for family, config in (
        ("qwen-image", {}),
        ("qwen-image-edit-2511", {"default_ref_method": "index_timestep_zero"}),
        ("qwen-image-layered", {"use_additional_t_cond": True}),
    ):
        found = model_sizes(published(family, **config))
        expected = weight_bytes(find_member(family).transformer, "bf16")
        assert found.shape == find_member(family).transformer, found.shape
        assert (found.bytes, found.modulation_bytes) == (expected.total, expected.modulation)
        assert found.timestep_zero == find_member(family).timestep_zero
        assert (found.precision, found.stored) == ("bf16", "")
        assert request(published(family, **config)).request.family == family


def test_every_precision_is_known_by_its_weights():
    for form in ("bf16", "int8", "fp8"):
        for off_card in (False, True):
            model = load(form, off_card)
            found, expected = model_sizes(model), weight_bytes(narrow.SHAPE, form)
            # On the processor ComfyUI holds in fp32 what is not quantized.
            twice = model.model.diffusion_model.img_in.weight.dtype.itemsize // 2
            markers = 24 * 72 if form in QUANTIZED else 0  # a `comfy_quant` for each layer
            plain = twice * (expected.modulation + expected.rest)
            more = found.bytes - plain - (expected.scales + expected.gemm)
            assert found.shape == narrow.SHAPE
            assert 0 <= more <= markers, more
            assert found.modulation_bytes == twice * expected.modulation
            assert (found.precision, found.stored) == (form, "")
            assert (found.modulation or "auto") == ("off card" if off_card else ON_CARD)


def test_what_is_counted_as_bf16_is_named_as_it_is_held_and_computed():
    model, computed = load(), torch.bfloat16
    for dtype, name in ((torch.float32, "fp32"), (torch.float8_e4m3fn, "float8_e4m3fn")):
        model.model.diffusion_model.to(dtype)
        found = model_sizes(model)
        assert (found.precision, found.stored) == ("bf16", name)
        with mock.patch.object(model.model, "get_dtype_inference", return_value=computed):
            assert name in request(model).notes[1]
    for block in model.model.diffusion_model.transformer_blocks:
        for linear in (each for each in block.modules() if hasattr(each, "in_features")):
            rows, columns = linear.out_features, linear.in_features
            packed = torch.zeros(rows, columns * 18 // 32, dtype=torch.uint8)  # as GGUF's Q4_0
            linear.weight = torch.nn.Parameter(packed, requires_grad=False)
    assert model_sizes(model).precision == "bf16"
    assert "another extension's quantization" in request(model).notes[1]
    for form in ("bf16", "int8"):
        model = load(form)
        for computed, notes in ((torch.bfloat16, 1), (torch.float32, 2)):
            with mock.patch.object(model.model, "get_dtype_inference", return_value=computed):
                assert len(request(model).notes) == notes, (form, computed)


def test_loras_are_told():
    rank = 3
    tensors = {}
    for name, (rows, columns) in narrow.SHAPE.quantizable_layers().items():
        tensors[f"{name}.lora_A.weight"] = torch.randn(rank, columns)
        tensors[f"{name}.lora_B.weight"] = torch.randn(rows, rank)
    path = FOLDER / "lora.safetensors"
    save_file(tensors, path)
    model = load()
    assert request(model).request.loras.count == 0
    for mode in ("merge", "bypass"):
        one = apply_lora(model, path, 1.0, how=mode)[0]
        two = apply_lora(one, path, 0.5, how=mode)[0]
        assert model_sizes(one).bytes == model_sizes(model).bytes
        for count, changed in ((1, one), (2, two)):
            found = request(changed).request.loras
            assert (found.count, found.mode) == (count, mode), found
            padded = RANKS_AT_ONCE // count  # of 3 or 6, in bf16 or fp32
            assert mode == "merge" or found.rank in (padded, 2 * padded), found
        words = ("1 LoRAs are set", "already has LoRAs", "set 0")
        refused(*words, run=lambda one=one: request(one, loras=1))


def test_a_step_cache_is_told():
    model = load()
    fast = cache_steps(model, PRESETS["fast"])
    assert request(model, steps=50).request.cache == "off"
    assert request(model, steps=50, cache="fast").request.computed_steps == 20
    custom = CacheSettings(budget=0.3)
    for settings, cache, computed, words in (
        (PRESETS["fast"], "fast", 20, ""),
        (custom, "custom", computed_with(50, custom), ""),
    ):
        wired = request(cache_steps(model, settings), steps=50)
        assert (wired.request.cache, wired.request.computed_steps) == (cache, computed)
        assert any(words in note for note in wired.notes)
    words = ("cache is 'quality'", "has 'speed'", "choose off, or disconnect")
    refused(*words, run=lambda: request(fast, cache="faithful"))
    refused("steps must be at least 1", run=lambda: request(fast, steps=-1))


def test_other_models_are_refused():
    other = SimpleNamespace(diffusion_model=torch.nn.Linear(2, 2))
    words = ("MODEL is SimpleNamespace", "only for Qwen-Image", "connect one of these, or none")
    refused(*words, run=lambda: request(SimpleNamespace(model=other)))


# --- CLIP, VAE, LATENT


def test_clips_tell_bytes_and_place():
    for place, known in (("auto", "auto"), ("cpu", "cpu"), ("drop after encoding",) * 2):
        clip = load_text_encoder(MICRO, placement=place)[0]
        found = request(clip=clip).request
        assert found.text_encoder_place == known
        assert found.parts.text_encoder_bytes == clip.patcher.model_size()
        assert found.text_encoder == "bf16"
    quantized = load_text_encoder(MICRO, "int8")[0]
    assert request(clip=quantized).request.text_encoder == "int8"
    assert clip_sizes(quantized).bytes < clip_sizes(clip).bytes
    words = ("text_encoder_device is 'cpu'", "has 'gpu (offload after encode)'", "choose auto")
    refused(*words, run=lambda: request(clip=clip, text_encoder_placement="cpu"))
    words = ("text_encoder_precision is 'fp8'", "CLIP", "has 'int8'")
    refused(*words, run=lambda: request(clip=quantized, text_encoder_precision="fp8"))


def test_other_text_encoders_are_refused():
    encoders = (
        torch.nn.Linear(2, 2),
        hunyuan_image.HunyuanImageTEModel.__new__(hunyuan_image.HunyuanImageTEModel),
        kandinsky5.te().__new__(kandinsky5.te()),
    )
    for encoder in encoders:
        clip = SimpleNamespace(cond_stage_model=encoder)
        words = ("CLIP's text encoder is a", "Qwen2.5-VL", "connect Qwen-Image's CLIP")
        refused(*words, run=lambda clip=clip: request(clip=clip))
    refused("NoneType", run=lambda: request(clip=SimpleNamespace(cond_stage_model=None)))
    assert QWEN25_VL.is_one(qwen_image.te().__new__(qwen_image.te()))


def test_vaes_tell_shape_and_bytes():
    vae, report = load_vae(MICRO)
    found = request(vae=vae).request
    assert found.parts.vae_bytes == report.bytes
    assert found.vae == VaeShape(dim=vae.first_stage_model.dim)
    tiny = comfy.sd.VAE(sd=comfy.taesd.taesd.TAESD().state_dict())
    for other in (tiny, SimpleNamespace()):
        refused(
            "the VAE is a", "Qwen-Image needs its own VAE", run=lambda other=other: vae_sizes(other)
        )


def test_latents_tell_size_batch_and_layers():
    for latent, size in (
        (empty(2, 16, 1, 166, 104), (832, 1328, 2, 0)),
        (empty(1, 16, 128, 128), (1024, 1024, 1, 0)),
        ({"samples": torch.ones(3, 16, 128, 128)}, (1024, 1024, 3, 0)),
        (empty(1, 16, 1, 135, 90), (720, 1088, 1, 0)),  # 1080 is padded by the model
        (nodes_qwen.EmptyQwenImageLayeredLatentImage.execute(640, 512, 3)[0], (640, 512, 1, 3)),
        # What the samplers turn into Qwen-Image's.
        (core.EmptyLatentImage().generate(1024, 512, 4)[0], (1024, 512, 4, 0)),
        (empty(1, 128, 64, 32, downscale_ratio_spacial=16), (512, 1024, 1, 0)),
    ):
        found = request(latent=latent, width=16, batch=7).request
        assert (found.width, found.height, found.batch, found.layers) == size, found
        assert found.family == ("qwen-image-layered" if size[3] else "qwen-image")


def test_other_latents_are_refused():
    nested = comfy.nested_tensor.NestedTensor([torch.zeros(1, 16, 1, 8, 8), torch.zeros(1, 8, 4)])
    for samples, shape in (
        (torch.ones(1, 4, 64, 64), "(1, 4, 64, 64)"),
        (torch.zeros(1, 64, 1024), "(1, 64, 1024)"),
        (nested, "of several tensors"),
    ):
        words = (f"LATENT is {shape}", "(batch, 16, height / 8, width / 8)", "or none")
        refused(*words, run=lambda samples=samples: latent_sizes({"samples": samples}))


# --- what contradicts the settings, and what they leave open


def test_settings_that_contradict_the_model_are_refused():
    int8 = load("int8", off_card=True)
    assert request(int8, precision="int8", modulation="off card").request.precision == "int8"
    words = ("precision is 'bf16 (most accurate)'", "has 'int8'", "disconnect the MODEL")
    refused(*words, run=lambda: request(int8, precision="bf16"))
    words = ("offload_modulation is 'off'", "has 'on'")
    refused(*words, run=lambda: request(int8, modulation="on card"))
    layered = published("qwen-image-layered", use_additional_t_cond=True)
    newest = published("qwen-image-edit-2511", default_ref_method="index_timestep_zero")
    for model, family, words in (
        (layered, "qwen-image", ("'qwen-image'", "'qwen-image-layered'")),
        (int8, "qwen-image-layered", ("'qwen-image-layered'", "'one without layers'")),
        (newest, "qwen-image-edit", ("'qwen-image-edit'", "'qwen-image-edit-2511'")),
    ):
        refused(
            *words,
            "disconnect",
            run=lambda model=model, family=family: request(model, family=family),
        )
    assert request(int8, family="qwen-image-edit-2511").request.family == "qwen-image-edit-2511"
    refused("2 references", "takes 1", run=lambda: request(layered, references=2))


def test_a_family_that_is_left_open_is_what_is_told():
    model = load()
    for known, settings in (
        ("qwen-image", {}),
        ("qwen-image-edit-2511", {"references": 2}),
        ("qwen-image-layered", {"layers": 4}),
        ("qwen-image-layered", {"layers": 4, "references": 1}),
    ):
        assert request(**settings).request.family == known
    assert request(model).request.family == "qwen-image"
    assert not any("family" in note or "Edit" in note for note in request(model).notes)
    with_reference = request(model, references=1)
    assert with_reference.request.family == "qwen-image-edit-2509"
    assert "Edit has the same weights" in with_reference.notes[-1]
    refused("got 3", "generates no layers", run=lambda: request(model, layers=3))


# --- nothing is loaded or moved


def test_nothing_is_loaded_or_moved():
    parts = {"model": load("int8", True), "clip": load_text_encoder(MICRO)[0]}
    parts["vae"] = load_vae(MICRO)[0]
    modules = [parts["model"].model, parts["clip"].cond_stage_model, parts["vae"].first_stage_model]

    def places():
        return [
            (parameter.device, parameter.data_ptr())
            for module in modules
            for parameter in module.parameters()
        ]

    def allocated():
        return torch.cuda.memory_allocated() if CARD else 0

    before = places(), allocated(), list(management.current_loaded_models)
    with (
        mock.patch.object(management, "load_models_gpu", side_effect=AssertionError),
        mock.patch.object(management, "free_memory", side_effect=AssertionError),
    ):
        found = request(**parts, latent=empty(1, 16, 1, 64, 64)).request
    assert found.parts.transformer == narrow.SHAPE
    assert (places(), allocated(), list(management.current_loaded_models)) == before


def test_a_model_on_the_card_tells_what_it_told_before():
    model = load()
    before = model_sizes(model)
    management.load_models_gpu([model])
    assert model_sizes(model) == before
