"""Text encoders and VAEs loaded by the package's loaders."""

import functools
import json
import math
import os
import shutil
from functools import partial
from unittest import mock

import comfy.sd
import narrow_text_encoder as narrow
import pytest
import torch
from comfy.text_encoders import llama
from comfy.text_encoders.qwen_image import Qwen2Tokenizer
from comfyui_boot import ROOT, folder, refused
from diffusers import AutoencoderKLQwenImage, QwenImagePipeline
from published_text_encoder import published_shapes
from safetensors.torch import load_file, save_file

from qwen_l40s.errors import CheckpointError, SettingError, UnavailableError
from qwen_l40s.families.parts import vae_name_to_native
from qwen_l40s.hosts.comfyui.encode import STOCK
from qwen_l40s.hosts.comfyui.load.text_encoder import encode_with, load_text_encoder
from qwen_l40s.hosts.comfyui.load.text_encoder_file import read_layout, text_encoder_tensors
from qwen_l40s.hosts.comfyui.load.vae import load_vae
from qwen_l40s.hosts.comfyui.load.weights import map_tensors
from qwen_l40s.loaders.source import open_source

pytestmark = pytest.mark.usefixtures("inference_mode", "published_tokenizer_once")
FOLDER = folder("clip_vae")
MICRO = ROOT / "models" / "micro"
PROMPT = "a small red star at the top left"
PROMPTS = [
    "a small red star at the top left",
    "",
    "a large blue circle, " * 60 + "on a white background",
    "(a red:1.3) [square] with (brackets) and no weights",
    "ein grüner Kreis — 绿色的圆 🟢",
]
TOLERANCE = 1e-4
WEIGHTS = narrow.weights()


@pytest.fixture(scope="module")
def published_tokenizer_once():
    """Reading 150,000 tokens takes longer than everything else here, and it is done 20 times."""
    read = Qwen2Tokenizer.from_pretrained
    once = functools.lru_cache(read)

    def from_pretrained(folder, **options):
        return (once if "qwen25_tokenizer" in str(folder) else read)(folder, **options)

    with mock.patch.object(Qwen2Tokenizer, "from_pretrained", from_pretrained):
        yield


@functools.cache
def known():
    """What transformers makes of the prompts and diffusers of latents and pixels, in fp32; writes
    the VAEs that it comes from.
    """
    pipeline = QwenImagePipeline.from_pretrained(MICRO, local_files_only=True).to(torch.float32)
    known = {
        f"prompt.{index}": pipeline.encode_prompt(prompt)[0] for index, prompt in enumerate(PROMPTS)
    }
    generator = torch.Generator().manual_seed(0)
    known["latents"] = torch.randn(1, 16, 1, 8, 8, generator=generator)
    torch.manual_seed(0)
    layered = AutoencoderKLQwenImage(base_dim=8, input_channels=4).eval()
    layered.save_pretrained(FOLDER / "layered" / "vae")
    for prefix, vae, channels in (("", pipeline.vae, 3), ("layered_", layered, 4)):
        pixels = torch.rand(1, 64, 64, channels, generator=generator)
        decoded = vae.decode(known["latents"]).sample.movedim(1, -1)
        scaled = pixels.movedim(-1, 1).unsqueeze(2) * 2 - 1
        known[f"{prefix}decoded"] = ((decoded + 1) / 2).clamp(0, 1)
        known[f"{prefix}pixels"] = pixels
        known[f"{prefix}encoded"] = vae.encode(scaled).latent_dist.mode()
        assert known[f"{prefix}decoded"].std() > 0.01
    native = {vae_name_to_native(name): w for name, w in pipeline.vae.state_dict().items()}
    save_file(native, FOLDER / "native_vae.safetensors")
    return known


def encode(clip, prompt=PROMPT, **options):
    [[conditioning, extra]] = clip.encode_from_tokens_scheduled(clip.tokenize(prompt, **options))
    assert "attention_mask" not in extra
    assert conditioning.dtype == torch.float32
    return conditioning


def encoded(path, precision="auto"):
    clip, report = load_text_encoder(path, precision)
    return encode(clip), report


def stock_clip(path):
    """The same file through ComfyUI's own loader, which has to be told the sizes."""
    options = {"qwen25_7b_model_config": narrow.CONFIG}
    kind = comfy.sd.CLIPType.QWEN_IMAGE
    return comfy.sd.load_clip([str(path)], clip_type=kind, model_options=options)


def stock(path):
    return encode(stock_clip(path))


def relative_error(found, exact):
    return float((found - exact).norm() / exact.norm())


def file(name, tensors, metadata=None):
    path = FOLDER / f"{name}.safetensors"
    return path if path.exists() else narrow.write(path, tensors, metadata)


# --- text encoders


def test_prompts_give_what_transformers_gives():
    clip, _ = load_text_encoder(MICRO)
    first = encode(clip, PROMPTS[0])
    for index, prompt in enumerate(PROMPTS):
        found, expected = encode(clip, prompt), known()[f"prompt.{index}"]
        assert found.shape == expected.shape, prompt
        # Rotations of far positions differ in the last bits: 1.3e-6 for the prompt of 309 tokens.
        assert relative_error(found, expected) <= 1e-5, prompt
        if len(prompt) < 100:
            assert (found - expected).abs().max() <= TOLERANCE, prompt
    assert torch.equal(encode(clip, PROMPTS[0]), first)


def test_padding_is_masked_with_every_tokenizer():
    for path in (MICRO, file("flat", WEIGHTS)):
        clip, _ = load_text_encoder(path)
        tokens = clip.tokenize(f"{PROMPT}<|endoftext|>")
        [[conditioning, extra]] = clip.encode_from_tokens_scheduled(tokens)
        mask = extra["attention_mask"]
        assert mask.shape == conditioning.shape[:2] and 0 < mask.sum() < mask.numel()


def test_a_component_folder_and_its_file_are_the_same():
    whole, _ = encoded(MICRO)
    for path in (MICRO / "text_encoder", MICRO / "text_encoder" / "model.safetensors"):
        assert torch.equal(encoded(path)[0], whole)


def test_every_naming_loads_the_same():
    flat = file("flat", WEIGHTS)
    expected, report = encoded(flat)
    assert expected.std() > 0.1
    assert torch.equal(stock(flat), expected)
    assert report.load.precision == "bf16" and "no vision tower" in report.text()
    nested = narrow.nested(WEIGHTS) | narrow.toy_tower("model.visual")
    full = {f"text_encoders.qwen25_7b.transformer.{name}": t for name, t in WEIGHTS.items()}
    paths = [
        file("nested", nested),
        narrow.write_shards(FOLDER / "shards", WEIGHTS | narrow.toy_tower("visual")),
        file("full", full | {"vae.conv1.bias": torch.zeros(1)}),
    ]
    for path in paths:
        found, report = encoded(path)
        assert torch.equal(found, expected), path
    assert "lm_head left out" in encoded(paths[0])[1].text()
    assert "32 wide" in encoded(paths[1])[1].text()


def test_nothing_is_copied_as_stored():
    for path in (file("flat", WEIGHTS), file("scaled", narrow.scaled_fp8(WEIGHTS))):
        source = open_source(path, "text_encoder")
        mapped = map_tensors(source)
        ready = text_encoder_tensors(source, read_layout(source), mapped, "auto").tensors
        addresses = {tensor.data_ptr() for tensor in mapped.values() if tensor.numel() > 1}
        large = [tensor for tensor in ready.values() if tensor.numel() > 1000]
        assert large and all(tensor.data_ptr() in addresses for tensor in large)


def test_quantized_files_give_what_comfyui_gives():
    rotated = {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 64}
    declared = {layer: {"format": "int8_tensorwise"} for layer in narrow.linear_layers(WEIGHTS)}
    metadata = {"_quantization_metadata": json.dumps({"layers": declared})}
    int8 = narrow.int8_rows(WEIGHTS, None)
    paths = {
        "fp8": file("scaled", narrow.scaled_fp8(WEIGHTS)),
        "int8": file("metadata", int8, metadata),
        "int8 ConvRot": file("rotated", narrow.int8_rows(WEIGHTS, rotated)),
    }
    for form, path in paths.items():
        found, report = encoded(path)
        assert report.load.precision == form.split()[0], report
        assert torch.equal(found, stock(path)), form
        # Rounding to bf16 instead of dequantizing to fp32 is all that differs.
        assert 0 < relative_error(encoded(path, "bf16")[0], found) <= 4e-3, form
    nested = {
        layer.replace("model.", "model.language_model.", 1): s for layer, s in declared.items()
    }
    metadata = {"_quantization_metadata": json.dumps({"layers": nested})}
    found, _ = encoded(file("nested_int8", narrow.nested(int8), metadata))
    assert torch.equal(found, encoded(paths["int8"])[0])


def test_forms_that_comfyui_misreads():
    exact, _ = encoded(file("flat", WEIGHTS))
    scaled = narrow.scaled_fp8(WEIGHTS)
    expected, _ = encoded(file("scaled", scaled))
    # Without the marker ComfyUI takes the scaled values for the weights.
    del scaled["scaled_fp8"]
    assert torch.equal(encoded(file("unmarked", scaled))[0], expected)
    rows, report = encoded(file("rows", narrow.fp8_rows(WEIGHTS)))
    assert report.load.precision == "bf16" and "a scale for each row became bf16" in report.text()
    assert 0 < relative_error(rows, exact) <= 0.05
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        cast = narrow.unscaled_fp8(WEIGHTS, dtype)
        found, report = encoded(file(f"unscaled_{dtype}", cast))
        assert "no scales" in report.text() and report.load.precision == "fp8"
        wide = file(f"wide_{dtype}", {name: t.bfloat16() for name, t in cast.items()})
        assert relative_error(found, encoded(wide)[0]) <= 1e-6


def test_quantizing_on_load():
    exact, bf16 = encoded(MICRO)
    assert torch.equal(encoded(MICRO, "bf16")[0], exact)
    assert torch.equal(encoded(MICRO, "as stored")[0], exact)
    # Measured on the micro model: 0.022 and 0.0057.
    for precision, limit in (("fp8", 0.03), ("int8", 0.008)):
        found, report = encoded(MICRO, precision)
        assert 0 < relative_error(found, exact) <= limit, precision
        assert report.load.precision == precision and "14 layers quantized" in report.text()
        assert report.bytes < 0.6 * bf16.bytes
    scaled = file("scaled", narrow.scaled_fp8(WEIGHTS))
    assert torch.equal(encoded(scaled, "fp8")[0], encoded(scaled)[0])
    twice, report = encoded(scaled, "int8")
    assert 0 < relative_error(twice, encoded(scaled)[0]) <= 0.02
    assert "both errors add up" in report.text()


def test_an_image_without_a_vision_tower_is_refused():
    image = torch.rand(1, 56, 56, 3)
    for path in (MICRO, file("flat", WEIGHTS)):
        clip, _ = load_text_encoder(path)
        refused(UnavailableError, "vision tower", run=lambda c=clip: encode(c, images=[image]))


def test_an_image_with_a_vision_tower():
    """ComfyUI's own tower with fewer blocks, at its own width."""
    whole = llama.qwen_vl.Qwen2VLVisionTransformer
    small = partial(whole, num_layers=2, intermediate_size=64)
    with mock.patch.object(llama.qwen_vl, "Qwen2VLVisionTransformer", small):
        tower = small(1280, narrow.HIDDEN, device="cpu", dtype=torch.bfloat16, ops=torch.nn)
        tensors = {f"visual.{name}": tensor for name, tensor in tower.state_dict().items()}
        path = file("tower", WEIGHTS | tensors)
        image = torch.rand(1, 56, 84, 3, generator=torch.Generator().manual_seed(0))
        clip, report = load_text_encoder(path)
        clip, _ = encode_with(clip, STOCK)
        found = encode(clip, images=[image])
        assert found.shape[1] > encode(clip).shape[1] and "vision" not in report.text()
        assert torch.equal(found, encode(stock_clip(path), images=[image]))
        assert not torch.equal(found, encode(clip, images=[1 - image]))
        path = file("tower_cut", WEIGHTS | tensors | {"visual.merger.ln_q.weight": torch.ones(9)})
        refused(
            CheckpointError,
            "visual.merger.ln_q.weight",
            "shape",
            run=partial(load_text_encoder, path),
        )


def test_the_published_7b_fits_as_it_is():
    """Names and shapes of the real file, in both styles, sparse: nothing but headers is read."""
    shapes = published_shapes()
    for nested in (True, False):
        header, start = {}, 0
        for name, shape in shapes.items():
            if not nested:
                name = name.replace("language_model.", "").replace("model.visual.", "visual.")
            end = start + 2 * math.prod(shape)
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
            start = end
        text = json.dumps(header).encode()
        path = FOLDER / "published.safetensors"
        path.write_bytes(len(text).to_bytes(8, "little") + text)
        os.truncate(path, 8 + len(text) + start)
        layout = read_layout(open_source(path, "text_encoder"))
        assert (layout.config, layout.vision) == ({}, True)
        assert layout.notes == ("lm_head left out, because prompts are encoded and not continued",)
        assert len(layout.names) == len(shapes) - 1
        path.unlink()


PREFIXES = "text_encoders.", ""
# What other packs, older transformers and ComfyUI's own savers leave beside the weights.
LEFT = {
    "model.rotary_emb.inv_freq": torch.ones(8),
    "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
    "visual.rotary_pos_emb.inv_freq": torch.ones(8),
    "logit_scale": torch.tensor(4.6),
    "text_projection": torch.zeros(4, 4),
    "text_projection.weight": torch.zeros(4, 4),
    "tokenizer_json": torch.zeros(9, dtype=torch.uint8),
    "spiece_model": torch.zeros(9, dtype=torch.uint8),
    "tekken_model": torch.zeros(9, dtype=torch.uint8),
    "position_ids": torch.zeros(1, 9, dtype=torch.int64),
    "model.other.weight": torch.zeros(4, 4, dtype=torch.float8_e4m3fn),
    "model.other.weight_scale": torch.tensor(float("nan")),
    "model.layers.0.self_attn.q_proj.lora_A.weight": torch.zeros(4, narrow.HIDDEN),
    "model.layers.0.self_attn.q_proj.lora_B.weight": torch.zeros(narrow.QKV, 4),
    "loss.logvar": torch.full((), float("nan")),
}


@pytest.mark.parametrize("form", [dict, narrow.scaled_fp8])
@pytest.mark.parametrize("prefix", ["", *(f"{it}qwen25_7b.transformer." for it in PREFIXES)])
def test_a_text_encoder_with_tensors_that_comfyui_ignores(prefix, form):
    known, _ = encoded(narrow.write(FOLDER / "plain.safetensors", form(WEIGHTS)))
    tensors = {f"{prefix}{name}": it for name, it in (form(WEIGHTS) | LEFT).items()}
    found, report = encoded(narrow.write(FOLDER / "left.safetensors", tensors))
    assert torch.equal(found, known)
    assert f"{len(LEFT) - 1} tensors such as" in report.text()  # the vision tower has its own line


@pytest.mark.parametrize("name", LEFT)
def test_what_comfyui_ignores_is_told(name):
    path = narrow.write(FOLDER / "left.safetensors", WEIGHTS | {name: LEFT[name]})
    notes = "".join(read_layout(open_source(path, "text_encoder")).notes)
    assert (repr(name) in notes) == (not name.startswith("visual."))


@pytest.mark.parametrize("names", ["native", "diffusers"])
def test_a_vae_with_tensors_that_comfyui_ignores(names):
    latents = known()["latents"]
    [path] = (MICRO / "vae").glob("*.safetensors")
    tensors = load_file(path if names == "diffusers" else FOLDER / "native_vae.safetensors")
    vae, report = load_vae(narrow.write(FOLDER / "left_vae.safetensors", tensors | LEFT))
    assert torch.equal(vae.decode(latents), load_vae(path)[0].decode(latents))
    assert f"{len(LEFT)} tensors such as" in report.text()


# --- wrong text encoders


def test_wrong_text_encoders_are_refused():
    def load(name, tensors, *, precision="auto"):
        return load_text_encoder(file(f"wrong_{name}", tensors), precision)

    def without(*names):
        return {name: t for name, t in WEIGHTS.items() if name not in names}

    norm, layer = "model.layers.1.input_layernorm.weight", "model.layers.1.mlp.up_proj"
    bad = WEIGHTS[norm].clone()
    bad[3] = float("nan")
    bad_matrix = WEIGHTS[f"{layer}.weight"].clone()
    bad_matrix[5, 6] = float("inf")
    scaled = narrow.scaled_fp8(WEIGHTS)
    attention = "model.layers.0.self_attn"
    other_size = {f"model.layers.{index}.self_attn.k_proj.bias": bad.clone() for index in range(36)}
    other_size["model.norm.weight"] = torch.ones(2048)
    cases = [
        ("missing", without(norm), [norm, "lacks"]),
        ("width", without("model.embed_tokens.weight"), ["vocab_size"]),
        ("heads", WEIGHTS | {f"{attention}.q_proj.bias": bad[:3]}, ["heads of 128"]),
        ("tower", narrow.toy_tower("visual") | {"visual.blocks.0.x": bad}, ["mmproj"]),
        ("3B", other_size, ["3B", "3584 wide"]),
        ("shape", WEIGHTS | {norm: bad[:5]}, [norm, "shape"]),
        ("nan", WEIGHTS | {norm: bad}, [norm, "NaN"]),
        ("scale", scaled | {f"{layer}.scale_weight": torch.zeros(())}, [layer, "zero"]),
        ("scales", scaled | {f"{layer}.scale_weight": torch.ones(3)}, [layer, "3 scales"]),
        ("twice", WEIGHTS | {f"model.language_model.{norm[6:]}": bad}, ["twice"]),
        ("plain", WEIGHTS | {f"{layer}.weight_scale": torch.full((), 2.0)}, [layer, "scale"]),
    ]
    for name, tensors, fragments in cases:
        refused(CheckpointError, *fragments, run=partial(load, name, tensors))
    for precision in ("fp8", "int8"):
        tensors = WEIGHTS | {f"{layer}.weight": bad_matrix}
        fragments = [f"{layer}.weight", "infinity", "wrong_matrix"]
        refused(
            CheckpointError,
            *fragments,
            run=lambda p=precision, t=tensors: load("matrix", t, precision=p),
        )
    refused(SettingError, "fp16", "as stored", run=partial(load_text_encoder, MICRO, "fp16"))
    refused(CheckpointError, "VAE", run=partial(load_text_encoder, MICRO / "vae"))
    refused(CheckpointError, "text encoder", run=partial(load_vae, MICRO / "text_encoder"))


def test_a_truncated_shard_is_refused():
    folder = narrow.write_shards(FOLDER / "truncated", WEIGHTS)
    shard = folder / "model-00002-of-00002.safetensors"
    os.truncate(shard, shard.stat().st_size - 1)
    refused(CheckpointError, shard.name, "truncated", run=partial(load_text_encoder, folder))


def test_a_missing_tokenizer_is_refused():
    copy = FOLDER / "alone" / "text_encoder"
    shutil.copytree(MICRO / "text_encoder", copy)
    refused(CheckpointError, "608 tokens", "tokenizer.json", run=partial(load_text_encoder, copy))
    shutil.copytree(MICRO / "tokenizer", copy.parent / "tokenizer")
    assert torch.equal(encoded(copy)[0], encoded(MICRO)[0])
    settings = copy.parent / "tokenizer" / "tokenizer.json"
    text = settings.read_text(encoding="utf-8")
    content = json.loads(text)
    content["model"]["merges"] = content["model"]["merges"][:100]
    settings.write_text(json.dumps(content), encoding="utf-8")
    refused(CheckpointError, "34", "chat template", run=partial(load_text_encoder, copy))
    settings.write_text(text.replace('"Ġspatial"', '"Ġspatiam"'), encoding="utf-8")
    refused(CheckpointError, "cannot be read", "Ġspatial", run=partial(load_text_encoder, copy))


# --- VAEs


def test_both_forms_of_the_vae_give_what_diffusers_gives():
    known()
    for path in (MICRO, FOLDER / "native_vae.safetensors"):
        vae, report = load_vae(path)
        assert report.load.precision == "fp32" and "auto" in report.load.reason
        decoded = vae.decode(known()["latents"])
        assert decoded.shape == known()["decoded"].shape
        assert (decoded - known()["decoded"]).abs().max() <= TOLERANCE
        assert (vae.encode(known()["pixels"]) - known()["encoded"]).abs().max() <= TOLERANCE


def test_the_layered_vae_gives_what_diffusers_gives():
    known()
    vae, report = load_vae(FOLDER / "layered" / "vae", "fp32")
    assert "RGBA" in report.text() and report.load.reason == "as requested"
    decoded = vae.decode(known()["latents"])
    assert (decoded - known()["layered_decoded"]).abs().max() <= TOLERANCE
    found = vae.encode(known()["layered_pixels"])
    assert (found - known()["layered_encoded"]).abs().max() <= TOLERANCE


def test_a_vae_in_bf16_and_reloaded():
    vae, report = load_vae(MICRO, "bf16")
    expected = vae.decode(known()["latents"])
    assert report.load.precision == "bf16"
    assert 0 < (expected - known()["decoded"]).abs().mean() <= 0.02
    again = vae.patcher.clone(force_deepcopy=True)
    assert again.model is not vae.first_stage_model
    vae.patcher, vae.first_stage_model = again, again.model
    assert torch.equal(vae.decode(known()["latents"]), expected)


def test_wrong_vaes_are_refused():
    known()
    native = load_file(FOLDER / "native_vae.safetensors")
    name = "decoder.middle.0.residual.0.gamma"
    gamma = native[name].clone()
    gamma[0] = float("nan")
    cases = [
        ("missing", {n: t for n, t in native.items() if n != "conv2.bias"}, ["conv2.bias"]),
        (
            "width",
            {n: t for n, t in native.items() if n != "decoder.head.0.gamma"},
            ["VAE's width"],
        ),
        ("shape", native | {"conv1.bias": gamma[:3]}, ["conv1.bias", "shape"]),
        ("nan", native | {name: gamma}, [name, "NaN"]),
        ("infinity", native | {name: gamma.nan_to_num(torch.inf)}, [name, "NaN"]),
        ("fp8", native | {name: gamma.to(torch.float8_e4m3fn)}, [name, "unquantized"]),
    ]
    for case, tensors, fragments in cases:
        path = file(f"wrong_vae_{case}", tensors)
        refused(CheckpointError, *fragments, run=partial(load_vae, path))
    refused(SettingError, "int8", "fp32", run=partial(load_vae, MICRO, "int8"))
    refused(CheckpointError, "transformer", run=partial(load_vae, MICRO / "transformer"))
