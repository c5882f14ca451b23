"""Qwen-Image-2.1 beside Qwen-Image: parts of one that are wired to the other, and LoRAs.

A small model of ComfyUI's own classes, where it has them.
"""

import pkgutil
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from unittest import mock

import comfy.lora
import comfy.model_base
import comfy.sample
import comfy.sd
import comfy.supported_models
import comfy.utils
import comfyui_boot
import narrow_transformer as narrow
import pytest
import torch
from comfy.quant_ops import QuantizedTensor
from comfyui_boot import ROOT, folder
from narrow_21 import DIM, TEXT, model_21, random, weights_21
from safetensors.torch import save_file
from vae_cases import random_vae, random_weights, wan_21

from qwen_l40s.errors import CheckpointError, SettingError, UnavailableError
from qwen_l40s.families.parts import VAE_21
from qwen_l40s.hosts.comfyui.decode.decode import decode, encode
from qwen_l40s.hosts.comfyui.estimate.request import request_from
from qwen_l40s.hosts.comfyui.load.plan import check_settings
from qwen_l40s.hosts.comfyui.load.text_encoder import load_text_encoder
from qwen_l40s.hosts.comfyui.load.transformer import load_model
from qwen_l40s.hosts.comfyui.load.vae import load_vae
from qwen_l40s.hosts.comfyui.lora.apply import apply_lora
from qwen_l40s.hosts.comfyui.lora.bypass import bypass_models, sampling_patcher
from qwen_l40s.hosts.comfyui.sample.cfg_norm import rescale_by_token
from qwen_l40s.hosts.comfyui.sample.optimize import optimize, report_of
from qwen_l40s.hosts.comfyui.save import save_quantized
from qwen_l40s.loaders.quantized_file import plan_quantized, write_quantized
from qwen_l40s.loaders.source import open_source
from qwen_l40s.planning.options import request_settings
from qwen_l40s.spec.formats import FORMATS, QUANTIZED

pytestmark = pytest.mark.usefixtures("inference_mode")
newer = pytest.mark.host_has("comfy.model_base.QwenImage21")
VAE_KNOWN = hasattr(comfy.model_base, "QwenImage21")
FOLDER = folder("qwen_image_21")
MICRO = ROOT / "models" / "micro"
PATH = narrow.write(FOLDER / "qwen_image.safetensors", narrow.weights())
refused = partial(comfyui_boot.refused, SettingError)


def vae_21():
    return random_vae(wan_21, None)


def model_1():
    return narrow.load_patcher(PATH, "bf16", False)


def sample(model, latent, width, negative=None, **more):
    prompts = [[[torch.ones(1, 5, each), more]] for each in (width, negative or width)]
    noise = random(*latent.shape)
    settings = (noise, 1, 1.0, "euler", "simple", *prompts, latent)
    return comfy.sample.sample(model, *settings, seed=0, disable_pbar=True)


def lora(modules, rank=2):
    """{module: (rows, columns)}, in the plainest form."""
    path = FOLDER / "lora.safetensors"
    tensors = {}
    for module, (rows, columns) in modules.items():
        tensors[f"{module}.lora_A.weight"] = random(rank, columns)
        tensors[f"{module}.lora_B.weight"] = random(rows, rank)
    save_file(tensors, path)
    return path


BLOCK = "transformer_blocks.1"
OF_1 = {f"{BLOCK}.attn.to_q": (128, 128), f"{BLOCK}.img_mlp.net.2": (128, 512)}
OF_21 = {
    f"{BLOCK}.attn.to_q": (DIM, DIM),
    f"{BLOCK}.img_mlp.gate_layer": (3 * DIM, DIM),
    f"{BLOCK}.img_mlp.proj": (3 * DIM, DIM),
}


# --- the transformer


def write_21(fused=True, change=lambda weights: weights):
    path = FOLDER / "qwen_image_2.1.safetensors"
    save_file(change(weights_21(fused=fused)), path)
    return path


def in_bf16(weights):
    return {name: weight.bfloat16() for name, weight in weights.items()}


def stored(model):
    found = {}
    for name, weight in model.model.diffusion_model.state_dict().items():
        if not name.endswith("comfy_quant"):
            found[name] = weight.float()
    return found


def assert_same(model, other):
    ours, theirs = stored(model), stored(other)
    assert ours.keys() == theirs.keys()
    for name, weight in ours.items():
        assert torch.equal(weight, theirs[name]), name


def paint(model):
    return sample(model, torch.zeros(1, 64, 8, 8), TEXT)


def test_an_older_comfyui_is_told(monkeypatch):
    runs = [partial(load_vae, vae_file_21())] if VAE_KNOWN else []
    for fused in (True, False):
        source = open_source(write_21(fused), "transformer")
        runs += [partial(load_model, source), partial(check_settings, source, "auto", ())]
    monkeypatch.delattr(comfy.supported_models, "QwenImage21", raising=False)
    for run in runs:
        comfyui_boot.refused(UnavailableError, "Qwen-Image-2.1", "ComfyUI 0.37", run=run)


@newer
@pytest.mark.parametrize("precision", ["as stored", "bf16"])
def test_the_model_is_comfyuis_own(precision):
    path = write_21(change=in_bf16)
    model, report = load_model(path, precision)
    own = comfy.sd.load_diffusion_model(str(path), model_options={"dtype": torch.bfloat16})
    assert type(model.model) is comfy.model_base.QwenImage21
    assert_same(model, own)
    assert torch.equal(paint(model), paint(own))
    assert (report.source.part.family, report.load.precision, report.where) == (
        "Qwen-Image-2.1",
        "bf16",
        "",
    )
    # Gate and up of a file that has them apart become one weight.
    assert_same(load_model(write_21(False, in_bf16), precision)[0], own)


@newer
@pytest.mark.parametrize("fused", [True, False])
def test_quantized_weights_are_those_of_comfyui(fused):
    """A file that `qwen-l40s quantize` wrote, and weights that are quantized as they load."""
    plain = write_21(fused, in_bf16)
    path = FOLDER / "qwen_image_2.1_int8.safetensors"
    write_quantized(plan_quantized(plain, "int8"), path, overwrite=True)
    model, report = load_model(path)
    assert report.load.precision == "int8"
    for again in (load_model(path, "int8")[0], load_model(plain, "int8")[0]):
        assert_same(again, model)
    whole = FOLDER / "qwen_image_2.1_int8_fused.safetensors"
    write_quantized(plan_quantized(write_21(True, in_bf16), "int8"), whole, overwrite=True)
    own = comfy.sd.load_diffusion_model(str(whole))
    assert_same(model, own)
    layer = model.model.diffusion_model.transformer_blocks[0].img_mlp.gate_up
    assert layer.weight._params.convrot_groupsize == 256
    ours, theirs = paint(model), paint(own)
    assert (ours - theirs).norm() / theirs.norm() < 0.02  # where products round differs
    exact = paint(load_model(plain, "bf16")[0])
    assert (ours - exact).norm() / exact.norm() < 0.05


@newer
@pytest.mark.parametrize("fused", [True, False])
def test_fp8_and_layers_kept_in_bf16(fused):
    path = write_21(fused, in_bf16)
    model, report = load_model(path, "fp8", keep=["*.gate_up", "transformer_blocks.0.*"])
    blocks = model.model.diffusion_model.transformer_blocks
    assert blocks[1].attn.to_q.layout_type == FORMATS["fp8"].layout
    assert not isinstance(blocks[1].img_mlp.gate_up.weight, QuantizedTensor)
    assert "7 layers kept" in report.text()
    exact = paint(load_model(path, "bf16")[0])
    assert (paint(model) - exact).norm() / exact.norm() < 0.1


@newer
def test_gates_that_are_stored_in_two_ways_become_bf16():
    path = FOLDER / "qwen_image_2.1_mixed.safetensors"
    plan = plan_quantized(write_21(False, in_bf16), "int8", keep=["*.gate_layer"])
    write_quantized(plan, path, overwrite=True)
    model = load_model(path)[0]
    gate_up = model.model.diffusion_model.transformer_blocks[1].img_mlp.gate_up.weight
    whole = weights_21()["transformer_blocks.1.img_mlp.gate_up.weight"].bfloat16()
    assert torch.equal(gate_up[: 3 * DIM], whole[: 3 * DIM].to(gate_up.dtype))
    assert (gate_up - whole).norm() / whole.norm() < 0.02


@newer
def test_the_licence_and_the_modulation_are_told():
    source = open_source(write_21(), "transformer")
    licence = "Qwen Research License"
    source = replace(source, part=replace(source.part, licence=licence))
    report = load_model(source, modulation="off card")[1]
    assert f"{licence}." in report.text() and report.summary().endswith(licence)
    assert "stays with the other weights" in report.text()


# --- LoRAs


HALVES = tuple(f"{BLOCK}.img_mlp.{name}" for name in ("gate_layer", "proj"))
STYLES = ("", "transformer.", "diffusion_model.", "base_model.model.", "lora_unet_", "lycoris_")


def with_lora(model, path, how, strength=0.7, applied=None):
    patched, report = apply_lora(model, path, strength, how=how)
    assert not report.not_applied and applied in (None, report.applied)
    return patched


def merged_by_core(model, path, strength=0.7):
    return comfy.sd.load_lora_for_models(
        model, None, comfy.utils.load_torch_file(str(path)), strength, 0
    )[0]


def distance(one, other):
    return ((one - other).norm() / other.norm()).item()


def of_another(lora_of, model, family):
    for how in ("merge", "bypass"):
        comfyui_boot.refused(
            CheckpointError,
            f"but the MODEL is {family}: choose a LoRA for {family}",
            "lora.safetensors)",
            run=partial(apply_lora, model, lora(lora_of), 1.0, how=how),
        )


def test_a_lora_of_21_in_another_model():
    of_another(OF_21, model_1(), "Qwen-Image 1.x")


@newer
def test_a_lora_of_another_model_in_21():
    of_another(OF_1, model_21(), "Qwen-Image-2.1")
    path = lora({"transformer_blocks.1.attn.to_q": (128, 128)})
    comfyui_boot.refused(
        CheckpointError,
        "the shape (128, 128), but the model's has (256, 256)",
        run=partial(apply_lora, model_21(), path, 1.0, how="merge"),
    )
    path = FOLDER / "fun_acc.safetensors"
    whole = comfy.utils.load_torch_file(str(lora(OF_21))) | {"proj_out.weight": random(64, DIM)}
    save_file(whole, path)
    comfyui_boot.refused(
        CheckpointError,
        "holds whole tensors such as proj_out.weight",
        "use the nodes of the LoRA's publisher",
        run=partial(apply_lora, model_21(), path, 1.0, how="merge"),
    )


@newer
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("how", ["merge", "bypass"])
def test_a_lora_does_what_cores_does(fused, how):
    path = lora(OF_21, rank=3)
    model = model_21(fused)
    plain, core = paint(model), paint(merged_by_core(model, path))
    assert distance(core, plain) > 1e-3
    ours = paint(with_lora(model, path, how, applied=3))
    assert torch.equal(ours, core) if how == "merge" else distance(ours, core) < 1e-5
    assert torch.equal(paint(model), plain)
    # One half alone, and two LoRAs of one weight.
    first, second = (
        lora({half: (3 * DIM, DIM)}, rank=2).rename(FOLDER / f"{half}.safetensors")
        for half in HALVES
    )
    core = paint(merged_by_core(merged_by_core(model, first), second, -0.4))
    both = with_lora(with_lora(model, first, how, applied=1), second, how, -0.4, applied=1)
    assert distance(paint(both), core) < 1e-5


@newer
def test_every_style_of_keys_is_applied():
    model = model_21()
    expected = paint(with_lora(model, lora(OF_21), "merge"))
    for style in STYLES:
        flat = style.endswith("_")
        names = {style + (it.replace(".", "_") if flat else it): OF_21[it] for it in OF_21}
        assert torch.equal(paint(with_lora(model, lora(names), "merge", applied=3)), expected)
    # Turbo's names the whole weight.
    for style in STYLES:
        name = f"{BLOCK}.img_mlp.gate_up"
        name = style + (name.replace(".", "_") if style.endswith("_") else name)
        for how in ("merge", "bypass"):
            with_lora(model, lora({name: (6 * DIM, DIM)}), how, applied=1)


@newer
def test_halves_beside_a_quantized_weight_keep_their_ranks():
    path = write_21(change=in_bf16)
    model = load_model(path, "int8")[0]
    patched, report = apply_lora(model, lora(OF_21, rank=3), 1.0, how="auto")
    assert (report.how, report.applied, report.quantized) == ("bypass", 3, 3)
    (layers,) = bypass_models(sampling_patcher(patched))
    changes = dict(zip(layers.names, layers.changes, strict=True))
    up = changes[f"diffusion_model.{BLOCK}.img_mlp.gate_up"].up.weight[:, :6]
    assert not up[3 * DIM :, :3].any() and not up[: 3 * DIM, 3:].any()
    exact = merged_by_core(load_model(path, "bf16")[0], lora(OF_21, rank=3), 1.0)
    assert distance(paint(patched), paint(exact)) < 0.05


@newer
@pytest.mark.parametrize("cache", ["gpu", "cpu", "off"])
def test_the_executor_computes_halves_beside_int8(cache):
    model = load_model(write_21(change=in_bf16), "int8")[0]
    model.model_options["transformer_options"]["qwen_image21_cache"] = {"device": cache}
    patched = with_lora(model, lora(OF_21, rank=3), "bypass", applied=3)
    fast = optimize(patched)
    assert distance(paint(fast), paint(patched)) < 0.02
    assert "blocks: fused, 2 of 2" in report_of(fast)


@newer
def test_lokr_on_halves():
    path = FOLDER / "lokr.safetensors"
    tensors = {}
    for half in HALVES:
        tensors[f"{half}.lokr_w1"] = random(12, 8) * 0.3
        tensors[f"{half}.lokr_w2"] = random(64, 32) + 0.01
    save_file(tensors, path)
    model = model_21()
    core = paint(merged_by_core(model, path))
    assert distance(core, paint(model)) > 1e-3
    assert torch.equal(paint(with_lora(model, path, "merge", applied=2)), core)
    assert distance(paint(with_lora(model, path, "bypass", applied=2)), core) < 1e-5


def test_a_module_inside_a_larger_weight_in_another_form():
    """As ComfyUI maps what it transposes, here for a model that it does this to nowhere."""
    key = f"diffusion_model.{BLOCK}.attn.to_q.weight"
    for target in ((key, (1, 0, 64)), (key, (0, 64, 64), lambda change: change)):
        keys = {f"{BLOCK}.attn.to_q": target, f"{BLOCK}.img_mlp.net.2": key}
        for how in ("merge", "bypass"):
            with mock.patch.object(comfy.lora, "model_lora_keys_unet", lambda model, _, k=keys: k):
                refused(
                    f"This LoRA changes '{BLOCK}.attn.to_q'",
                    "inside a larger weight",
                    run=lambda how=how: apply_lora(model_1(), lora(OF_1), 1.0, how=how),
                )


def test_what_is_no_slice_is_applied_beside_the_keys_of_slices():
    known = comfy.lora.model_lora_keys_unet

    def with_slices(model, keys):
        found = known(model, keys)
        return found | {"transformer.elsewhere": (next(iter(found.values())), (0, 0, 1))}

    with mock.patch.object(comfy.lora, "model_lora_keys_unet", with_slices):
        _, report = apply_lora(model_1(), lora(OF_1), 1.0, how="merge")
    assert (report.applied, report.modules) == (2, 2)


@newer
@pytest.mark.parametrize("precision", QUANTIZED)
def test_saving_with_a_lora(precision):
    source = write_21(change=in_bf16)
    model = load_model(source, "bf16")[0]
    path = FOLDER / "saved.safetensors"
    saved = save_quantized(model, path, precision, overwrite=True)
    assert (saved.quantized, saved.twice, saved.merged) == (12, 0, 0)
    written = FOLDER / "written.safetensors"
    write_quantized(plan_quantized(source, precision), written, overwrite=True)
    assert_same(load_model(path)[0], load_model(written)[0])
    patched = with_lora(model, lora(OF_21), "merge")
    saved = save_quantized(patched, path, precision, overwrite=True)
    assert (saved.quantized, saved.merged) == (12, 2)  # gate and up are one
    exact = paint(patched)
    assert distance(paint(load_model(path)[0]), exact) < (0.05 if precision == "int8" else 0.1)
    own = comfy.sd.load_diffusion_model(str(source), model_options={"dtype": torch.bfloat16})
    save_quantized(own, path, precision, overwrite=True)
    assert_same(load_model(path)[0], load_model(written)[0])


# --- a MODEL


@newer
def test_guidance_is_not_rescaled():
    model = model_21()
    assert rescale_by_token(model) is model  # diffusers does not rescale this one


@newer
def test_an_estimate_reads_the_parts_of_21():
    model, vae = model_21(), vae_21()
    settings = request_settings(width=1024, height=1024)
    latent = {"samples": torch.ones(1, 64, 8, 10)}
    request = request_from(settings, model=model, vae=vae, latent=latent).request
    assert (request.family, request.width, request.height) == ("qwen-image-2.1", 160, 128)
    for other in (model, model_21(fused=False), model_21(ratio=1)):
        found = other.model.diffusion_model.named_parameters()
        shape = request_from(settings, model=other).request.transformer
        assert shape.tensors() == {name: tuple(it.shape) for name, it in found}
    assert request.vae == VAE_21
    kind = pkgutil.resolve_name("comfy.text_encoders.qwen_image21.QwenImage21TEModel")
    encoder = kind.__new__(kind)
    torch.nn.Module.__init__(encoder)
    patcher = SimpleNamespace(load_device=torch.device("cpu"))
    clip = SimpleNamespace(cond_stage_model=encoder, patcher=patcher)
    request_from(settings, model=model, clip=clip)
    words = "the CLIP is Qwen3-VL 8B, but qwen-image needs Qwen2.5-VL 7B"
    refused(words, run=lambda: request_from(settings, clip=clip))
    words = "the VAE has 64 latent channels, but qwen-image uses 16"
    refused(words, run=lambda: request_from(settings, vae=vae))
    words = "the VAE has 16 latent channels, but qwen-image-2.1 uses 64"
    own = load_vae(MICRO)[0]
    refused(words, run=lambda: request_from(settings, model=model, vae=own))
    other = {**settings, "family": "qwen-image-2512"}
    words = "contradicts the connected MODEL, which is 'qwen-image-2.1'"
    refused(words, run=lambda: request_from(other, model=model))
    refused("takes 10 reference images, got 11", run=eleven)


def eleven():
    request_from(request_settings(family="qwen-image-2.1", width=1024, height=1024, references=11))


# --- the parts of one wired to the other


def test_text_and_latents_of_21_in_qwen_image():
    width = narrow.SHAPE.joint_dim
    empty, of_21 = torch.zeros(1, 16, 1, 8, 8), torch.ones(1, 64, 8, 8)
    own = load_model(PATH)[0]
    for model in (optimize(model_1()), own, optimize(own)):
        sample(model, empty, width)
        # KSampler makes an empty one fit.
        fixed = comfy.sample.fix_empty_latent_channels(model, torch.zeros(1, 64, 8, 8))
        sample(model, fixed, width)
        refused(
            f"The prompt is {TEXT} wide, but the MODEL takes text {width} wide",
            run=partial(sample, model, empty, TEXT),
        )
        negative = partial(sample, model, empty, width, negative=TEXT)
        refused(f"The prompt is {TEXT} wide", run=negative)
        words = "The latent has 64 channels, but the MODEL takes 16"
        refused(words, run=partial(sample, model, of_21, width))
        refused(words, run=partial(sample, model, empty, width, reference_latents=[of_21]))
        sample(model, empty, width, reference_latents=[empty + 1])


@newer
def test_text_and_latents_of_qwen_image_in_21():
    model = optimize(model_21())
    empty = torch.zeros(1, 64, 8, 8)
    words = f"The prompt is {TEXT + 8} wide, but the MODEL takes text {TEXT} wide"
    encoder = "Qwen3-VL 8B for Qwen-Image-2.1"
    refused(words, encoder, run=partial(sample, model, empty, TEXT + 8))
    words = "The latent has 16 channels, but the MODEL takes 64"
    run = partial(sample, model, empty, TEXT, reference_latents=[torch.ones(1, 16, 1, 8, 8)])
    refused(words, run=run)


@newer
def test_vaes_and_latents():
    of_21, own = vae_21(), load_vae(MICRO)[0]
    latent_21, latent = random(1, 64, 4, 4), random(1, 16, 1, 4, 4)
    assert decode(of_21, latent_21)[0].shape == (1, 64, 64, 4)
    latents, report = encode(of_21, torch.rand(1, 64, 64, 3))
    assert latents.shape == (1, 64, 4, 4)
    assert "ComfyUI's code ran, because it decodes Qwen-Image-2.1 in exact strips" in report
    words = "connect the VAE of the model"
    for vae, wrong in ((of_21, latent), (of_21, latent[:, :, 0]), (own, latent_21)):
        refused(f"the latents are {tuple(wrong.shape)}", words, run=partial(decode, vae, wrong))


@pytest.mark.parametrize("fused", [True, False])
def test_a_file_of_the_model_in_another_place(fused):
    path = write_21(fused)
    for load, other in ((load_text_encoder, "text encoder"), (load_vae, "VAE")):
        comfyui_boot.refused(
            CheckpointError, "not the" if other == "VAE" else "", other, run=partial(load, path)
        )


def vae_file_21():
    path = FOLDER / "qwen_image_2.1_vae.safetensors"
    save_file(random_weights(wan_21()), path)
    return path


@newer
def test_a_file_of_the_vae():
    path = vae_file_21()
    vae, report = load_vae(path, "fp32")
    host = comfy.sd.VAE(sd=comfy.utils.load_torch_file(str(path)), dtype=torch.float32)
    latents, pixels = random(1, 64, 4, 6), torch.rand(1, 64, 96, 4)
    assert torch.equal(vae.decode(latents), host.decode(latents))
    assert torch.equal(vae.encode(pixels), host.encode(pixels))
    assert (report.source.part.family, report.load.precision) == ("Qwen-Image-2.1 VAE", "fp32")
    weights = random_weights(wan_21())
    del weights["decoder.middle.0.residual.2.weight"]
    save_file(weights, FOLDER / "lacking.safetensors")
    words = "lacks", "'decoder.middle.0.residual.2.weight'"
    run = partial(load_vae, FOLDER / "lacking.safetensors")
    comfyui_boot.refused(CheckpointError, *words, run=run)
