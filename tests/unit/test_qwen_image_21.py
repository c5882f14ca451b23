"""Qwen-Image-2.1 in every published form: the transformer is read and quantized, the rest named.

Headers with the real names and shapes, from diffusers' and transformers' classes without weights;
quantized is a small one.
"""

import json
import math
import re
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from diffusers import AutoencoderKLQwenImage21, QwenImage21Transformer2DModel
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from test_checkpoint import (
    empty,
    inspect_specs,
    only,
    specs_of,
    write,
    write_sharded,
)
from test_source import refused
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from qwen_l40s.cli import main
from qwen_l40s.errors import CheckpointError
from qwen_l40s.families.parts import vae_21_name_to_native
from qwen_l40s.families.qwen_image_21 import SHAPE as SHAPE_21
from qwen_l40s.families.registry import shape_from_header
from qwen_l40s.loaders.checkpoint import inspect_checkpoint
from qwen_l40s.loaders.quantize import layers_to_quantize, quantize_rows
from qwen_l40s.loaders.sizes import read_sizes
from qwen_l40s.loaders.source import PLACES, check_complete, open_source
from qwen_l40s.planning.files import host_memory
from qwen_l40s.planning.request import RunRequest, Setting
from qwen_l40s.spec.formats import QUANTIZED

PARAMETERS = 7_115_124_736
GEMM = sum(rows * columns for rows, columns in SHAPE_21.quantizable_layers().values())
APART = SHAPE_21.blocks * 2 * 4096 * 12288
SHAPE_21_APART = replace(SHAPE_21, fused_mlp=False)
CONVROT = {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 256}


@pytest.fixture(scope="module")
def diffusers_form():
    return specs_of(empty(QwenImage21Transformer2DModel))


def fused(specs):
    """As ComfyUI's single files have it: the rows of the gate, then those of `proj`."""
    found = {}
    for name, (dtype, shape) in specs.items():
        if ".img_mlp.proj." in name:
            continue
        if ".img_mlp.gate_layer." in name:
            name, shape = name.replace("gate_layer", "gate_up"), (2 * shape[0], shape[1])
        found[name] = dtype, shape
    return found


@pytest.fixture(scope="module")
def single_file(diffusers_form):
    return fused(diffusers_form)


def native_vae_21():
    """Wan 2.2's names for the same layers: convolutions over one frame."""
    renames = (
        (r"^quant_conv", "conv1"),
        (r"^post_quant_conv", "conv2"),
        (r"\.conv_in\.", ".conv1."),
        (r"\.norm_out\.", ".head.0."),
        (r"\.conv_out\.", ".head.2."),
        (r"mid_block\.resnets\.0", "middle.0"),
        (r"mid_block\.attentions\.0", "middle.1"),
        (r"mid_block\.resnets\.1", "middle.2"),
        (r"down_blocks\.(\d)\.resnets\.(\d)", r"downsamples.\1.downsamples.\2"),
        (r"down_blocks\.(\d)\.downsampler", r"downsamples.\1.downsamples.2"),
        (r"up_blocks\.(\d)\.resnets\.(\d)", r"upsamples.\1.upsamples.\2"),
        (r"up_blocks\.(\d)\.upsampler", r"upsamples.\1.upsamples.3"),
        (r"\.norm1\.", ".residual.0."),
        (r"\.norm2\.", ".residual.3."),
        (r"\.conv_shortcut\.", ".shortcut."),
    )
    found = {}
    for name, (dtype, shape) in specs_of(empty(AutoencoderKLQwenImage21)).items():
        if ".resnets." in name:
            name = name.replace(".conv1.", ".residual.2.").replace(".conv2.", ".residual.6.")
        for pattern, to in renames:
            name = re.sub(pattern, to, name)
        plain = len(shape) == 4 and name.endswith("weight") and ".resample." not in name
        if plain and ".to_qkv." not in name and ".proj." not in name:
            shape = (*shape[:2], 1, *shape[2:])
        found[name] = dtype, shape
    return found


@pytest.fixture(scope="module")
def qwen3_vl():
    text = {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
    }
    vision = {"depth": 27, "hidden_size": 1152, "out_hidden_size": 4096}
    config = Qwen3VLConfig(text_config=text, vision_config=vision)
    return specs_of(empty(Qwen3VLForConditionalGeneration, config))


def stored(specs, suffix, width=1.0, settings=CONVROT):
    """Layers as `comfy_quant` ones: those of the blocks, and what holds the vocabulary in int8."""
    found, contents = {}, {}
    for name, (dtype, shape) in specs.items():
        layer = name.removesuffix(".weight")
        vocabulary = layer.endswith(("embed_tokens", "lm_head"))
        in_block = re.search(r"blocks\.|model\.(language_model\.)?layers\.", layer)
        if len(shape) != 2 or "visual." in name or not (in_block or vocabulary):
            found[name] = dtype, shape
            continue
        rows, columns = shape
        if suffix == "int8" or vocabulary:
            text = json.dumps(CONVROT).encode()
            found[name] = "I8", shape
            found[f"{layer}.weight_scale"] = "F32", (rows, 1)
        else:
            text = json.dumps(settings).encode()
            found[name] = "I8", (rows, int(columns * width))
            found[f"{layer}.weight_s_rel"] = "F8_E4M3", (rows, columns // settings["group_size"])
            found[f"{layer}.weight_s_channel"] = "F32", (rows,)
            if width == 0.5:
                found[f"{layer}.weight_codebook"] = "F32", (16,)
        found[f"{layer}.comfy_quant"] = "U8", (len(text),)
        contents[f"{layer}.comfy_quant"] = text
    return found, contents


def int8(specs):
    return stored(specs, "int8")


def w4a8(specs):
    settings = {"convrot": True, "convrot_groupsize": 256, "format": "asym_w4a8_int8"}
    return stored(specs, "w4a8", 0.5, settings | {"group_size": 16})


def w6a8(specs):
    return stored(specs, "w6a8", 0.75, {"format": "w6a8_int8", "group_size": 32})


def turbo(specs):
    """With the attention that the published file asks for in all blocks but the first."""
    found, contents = int8(specs)
    text = b'{"attention": "comfy_kitchen_int8"}'
    for block in range(1, 32):
        name = f"transformer_blocks.{block}.attn.comfy_attention.config"
        found[name], contents[name] = ("U8", (len(text),)), text
    return found, contents


def plain(specs):
    return specs, None


# --- the transformer


# {form: (tensors, bytes of data)} as published, where it is.
FORMS = {
    "diffusers": (plain, 297, 14_230_249_472),
    "single file": (lambda specs: plain(fused(specs)), 265, 14_230_249_472),
    "under a prefix": (
        lambda specs: plain(
            {f"model.diffusion_model.{name}": spec for name, spec in fused(specs).items()}
        ),
        265,
        14_230_249_472,
    ),
    "int8 ConvRot": (lambda specs: int8(fused(specs)), 649, 7_256_708_608),
    "Turbo": (lambda specs: turbo(fused(specs)), 680, 7_256_708_608 + 31 * 35),
    "w4a8": (lambda specs: w4a8(fused(specs)), None, None),
    "w6a8": (lambda specs: w6a8(fused(specs)), None, None),
}


@pytest.mark.parametrize(
    ("form", "precision", "copied"),
    [
        ("single file", "auto", 0),
        ("diffusers", "auto", 2 * APART),  # which ComfyUI's model has in one
        ("int8 ConvRot", "auto", 0),
        ("int8 ConvRot", "bf16", 2 * GEMM),
        ("w4a8", "auto", GEMM),
        ("w6a8", "auto", GEMM),
    ],
)
def test_an_estimate_counts_what_a_load_makes_anew(
    tmp_path, diffusers_form, form, precision, copied
):
    specs, contents = FORMS[form][0](diffusers_form)
    path = write(tmp_path / "a.safetensors", specs, contents=contents)
    precision, _, parts = read_sizes(path).settled(precision, "auto")
    setting = Setting("bf16" if precision == "auto" else precision)
    found = host_memory(RunRequest("qwen-image-2.1", width=None, height=None, parts=parts), setting)
    assert found.get("transformer, converted on load", 0) == copied
    assert not {name for name in found if "quantized" in name}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_the_transformer(tmp_path, diffusers_form, form, capsys):
    make, tensors, size = FORMS[form]
    specs, contents = make(diffusers_form)
    path = write(tmp_path / "qwen_image_2.1_turbo.safetensors", specs, contents=contents)
    part = only(inspect_checkpoint(path))
    assert (part.family, part.role, part.blocks) == ("Qwen-Image-2.1", "transformer", 32)
    assert part.parameters == PARAMETERS
    assert tensors is None or (part.tensors, part.bytes) == (tensors, size)
    assert part.dims == {
        "dim": 4096,
        "heads": 32,
        "head_dim": 128,
        "joint_dim": 4096,
        "in_channels": 64,
        "packed_out_channels": 64,
        "mlp": "img_mlp.gate_layer" if form == "diffusers" else "img_mlp.gate_up",
        "mlp_ratio": 3,
    }
    shape = shape_from_header(part.family, part.dims, part.blocks)
    assert shape == replace(SHAPE_21, fused_mlp=form != "diffusers")
    if form in ("diffusers", "single file"):
        assert shape.tensors() == {name: sizes for name, (_, sizes) in specs.items()}
    assert "2.1-Turbo has the same tensors" in part.variant
    assert "the file name says turbo" in part.hint
    assert part.licence.startswith("Qwen Research License: research, not commercial use")
    assert "Qwen-Image-2512 and Edit-2511 are Apache-2.0" in part.licence
    assert part.cannot_run == part.errors == ()
    source = open_source(path, "transformer")
    assert check_complete(source) == shape
    layers = [name.removesuffix(".weight") for name in source.tensors if name.endswith(".weight")]
    chosen = shape.quantizable_layers()
    assert layers_to_quantize(layers) == chosen.keys()
    assert len(chosen) == 32 * (6 + (form == "diffusers"))
    assert part.quantization.layers.keys() == (chosen.keys() if part.quantization.layers else set())
    assert main(["inspect", str(path)]) == 0
    rows = capsys.readouterr().out
    assert "Qwen Research License" in rows
    assert ("loads as" in rows) == (form in ("w4a8", "w6a8"))


def test_gate_up_and_gate_layer_in_one_file(tmp_path, diffusers_form, single_file, capsys):
    path = write(tmp_path / "merged.safetensors", diffusers_form | single_file)
    sentence = "img_mlp.gate_up and img_mlp.gate_layer, which are the same weights in two forms"
    refused(path, "transformer", sentence, "download it again")
    assert main(["inspect", str(path)]) == 1
    assert sentence in capsys.readouterr().out


CLASSES = {
    "transformer": ["diffusers", "QwenImage21Transformer2DModel"],
    "text_encoder": ["transformers", "Qwen3VLForConditionalGeneration"],
    "vae": ["diffusers", "AutoencoderKLQwenImage21"],
    "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    "processor": ["transformers", "Qwen3VLProcessor"],
}


def test_the_diffusers_folder(tmp_path, diffusers_form, qwen3_vl, capsys):
    folder = tmp_path / "Qwen-Image-2.1"
    write_sharded(folder / "transformer", diffusers_form)
    write_sharded(folder / "text_encoder", qwen3_vl, stem="model")
    vae = empty(AutoencoderKLQwenImage21)
    write(folder / "vae" / "diffusion_pytorch_model.safetensors", specs_of(vae, "F32"))
    for name in ("scheduler", "processor"):
        (folder / name).mkdir()
    index = {"_class_name": "QwenImage21Pipeline"} | CLASSES
    (folder / "model_index.json").write_text(json.dumps(index))
    config = dict(empty(QwenImage21Transformer2DModel).config)
    (folder / "transformer" / "config.json").write_text(json.dumps(config))
    (folder / "vae" / "config.json").write_text(json.dumps(dict(vae.config)))
    assert main(["inspect", str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    parts = {part["name"]: part for part in found["parts"]}
    assert list(parts) == list(PLACES) and found["errors"] == []
    assert [part["family"] for part in parts.values()] == [
        "Qwen-Image-2.1",
        "Qwen3-VL text encoder (Qwen-Image-2.1's among others)",
        "Qwen-Image-2.1 VAE",
    ]
    for role, part in parts.items():
        assert bool(part["licence"]) == (role != "text_encoder")
        assert not part["cannot_run"]
    assert check_complete(open_source(folder, "transformer")) == SHAPE_21_APART
    assert main(["inspect", str(folder)]) == 0
    rows = capsys.readouterr().out
    assert rows.count("Qwen Research License") == 2
    (folder / "transformer" / "config.json").write_text(json.dumps(config | {"num_layers": 60}))
    assert "num_layers as 60, but the tensors give 32" in inspect_checkpoint(folder).errors[0]


CONFIG = {
    "num_layers": 2,
    "attention_head_dim": 32,
    "num_attention_heads": 8,
    "context_in_dim": 96,
    "axes_dims_rope": (8, 12, 12),
    "mlp_ratio": 2,
}


@pytest.mark.parametrize("format", QUANTIZED)
def test_quantizing_both_forms(tmp_path, format, capsys):
    torch.manual_seed(0)
    model = QwenImage21Transformer2DModel(**CONFIG).to(torch.bfloat16)
    folder, single = tmp_path / "transformer", tmp_path / "single.safetensors"
    model.save_pretrained(folder, max_shard_size="1MB")
    apart = model.state_dict()
    gates = {
        name.replace("gate_layer", "gate_up"): torch.cat(
            [apart[name], apart[name.replace("gate_layer", "proj")]]
        )
        for name in apart
        if ".gate_layer." in name
    }
    config = {name: apart[name] for name in apart if not re.search("gate_layer|mlp.proj", name)}
    choice = "transformer_blocks.1.attn.comfy_attention.config"
    asked = {choice: torch.tensor(list(b'{"attention": "pytorch"}'), dtype=torch.uint8)}
    save_file(config | gates | asked, single)
    for source, weights in ((folder, apart), (single, config | gates | asked)):
        path = tmp_path / f"{source.stem}_{format}.safetensors"
        command = ["quantize", str(source), str(path), "--precision", format, "--device", "cpu"]
        assert main(command) == 0
        done = json.loads(capsys.readouterr().out)
        found = load_file(path)
        part = only(inspect_checkpoint(path))
        shape = check_complete(open_source(path, "transformer"))
        chosen = shape.quantizable_layers()
        assert done["quantized"] == len(chosen) == 2 * (7 if source is folder else 6)
        assert part.quantization.layers.keys() == chosen.keys()
        assert (part.family, part.licence) == ("Qwen-Image-2.1", None)  # no published size
        rotation = 256 if format == "int8" else 0
        for name, weight in weights.items():
            layer = name.removesuffix(".weight")
            if layer not in chosen:
                assert torch.equal(found[name], weight)
                continue
            values, scale = quantize_rows(weight, format, rotation=rotation)
            assert torch.equal(found[name].float(), values.float())
            assert torch.equal(found[f"{layer}.weight_scale"], scale)
            if format == "int8":
                marker = json.loads(bytes(found[f"{layer}.comfy_quant"].tolist()))
                assert marker == CONVROT


# --- the text encoder and the VAE


def single_file_names(specs):
    return {name.replace("model.language_model.", "model."): spec for name, spec in specs.items()}


def flat_names(specs):
    found = single_file_names(specs)
    return {name.replace("model.visual.", "visual."): spec for name, spec in found.items()}


@pytest.mark.parametrize("rename", [dict, single_file_names, flat_names])
@pytest.mark.parametrize(("form", "tensors"), [(plain, 750), (int8, 1258), (w4a8, 1762)])
def test_every_form_of_the_text_encoder(tmp_path, qwen3_vl, rename, form, tensors):
    specs, contents = form(rename(qwen3_vl))
    path = write(tmp_path / "file.safetensors", specs, contents=contents)
    part = only(inspect_checkpoint(path))
    assert part.family == "Qwen3-VL text encoder (Qwen-Image-2.1's among others)"
    assert (part.role, part.blocks, part.folder) == ("text_encoder", 36, "text_encoders")
    assert (part.parameters, part.tensors) == (8_767_123_696, tensors)
    assert part.dims == {
        "hidden": 4096,
        "intermediate": 12288,
        "q_dim": 4096,
        "kv_dim": 1024,
        "vocabulary": 151936,
        "vision_dim": 1152,
    }
    assert part.variant.startswith("8B, ")
    if form is w4a8:
        needed = "ComfyUI 0.33 and comfy-kitchen 0.2.27, or newer"
        words = f"get the model in one of these, or load it with ComfyUI's nodes ({needed})"
        refused(path, "text_encoder", "int4 asymmetric (w4a8) weights cannot run", words)
    else:
        assert part.cannot_run == ()
        assert open_source(path, "text_encoder").part == part
    refused(path, "vae", "This is a Qwen3-VL text", "not the Qwen-Image VAE: move it to")


def test_another_size_of_qwen3_vl(tmp_path):
    specs = {
        "model.language_model.norm.weight": ("BF16", (2560,)),
        "model.visual.deepstack_merger_list.0.norm.weight": ("BF16", (8,)),
    }
    path = write(tmp_path / "file.safetensors", specs)
    words = "Qwen-Image-2.1 needs the 8B"
    refused(path, "text_encoder", f"This is the 4B of Qwen3-VL. {words}")


def test_its_prompt_enhancer_is_not_taken_for_it(tmp_path):
    specs = {
        "model.language_model.layers.0.linear_attn.A_log": ("F32", (32,)),
        "model.language_model.norm.weight": ("BF16", (4096,)),
        "model.visual.blocks.0.attn.qkv.weight": ("BF16", (8, 8)),
    }
    path = write(tmp_path / "qwen3.5_9b_qwen_image_2.1_pe_t2i.safetensors", specs)
    words = "a Qwen3.5 language model, as the prompt enhancers of Qwen-Image-2.1 are"
    refused(path, "text_encoder", words, "choose the Qwen2.5-VL text encoder")


def test_both_forms_of_the_vae(tmp_path):
    diffusers = specs_of(empty(AutoencoderKLQwenImage21))
    parts = [inspect_specs(tmp_path, specs) for specs in (diffusers, native_vae_21())]
    assert parts[1].bytes == 675_480_808  # as published
    for part, style in zip(parts, ("diffusers", "native"), strict=True):
        assert (part.family, part.role, part.folder) == ("Qwen-Image-2.1 VAE", "vae", "vae")
        assert part.dims == {"dim": 96, "latent_channels": 64, "image_channels": 4}
        assert part.variant.startswith(style)
        assert (part.parameters, part.tensors) == (337_740_404, 238)
    names = {vae_21_name_to_native(name): sizes for name, (_, sizes) in diffusers.items()}
    native = {name: sizes for name, (_, sizes) in native_vae_21().items()}
    assert names.keys() == native.keys()
    for name, sizes in native.items():  # diffusers convolves in 2 dimensions
        assert math.prod(names[name]) == math.prod(sizes) and names[name][:2] == sizes[:2]
    path = write(tmp_path / "file.safetensors", native_vae_21())
    assert open_source(path, "vae").part.licence.startswith("Qwen Research License")
    refused(path, "transformer", "This is a Qwen-Image-2.1 VAE, not", "models/vae")


# --- what is trained for it


PREFIXES = (
    "",
    "transformer.",
    "diffusion_model.",
    "model.diffusion_model.",
    "base_model.model.",
    "base_model.model.transformer.",
    "pipe.dit.",
)
FLAT_PREFIXES = ("lora_unet_", "lycoris_", "lora_transformer_")
PAIRS = (
    ("lora_A.weight", "lora_B.weight"),
    ("lora_A.default.weight", "lora_B.default.weight"),
    ("lora_down.weight", "lora_up.weight"),
    ("lora.down.weight", "lora.up.weight"),
    ("lora_down", "lora_up"),
)
SHAPES = {
    **{f"attn.{name}": (4096, 4096) for name in ("to_q", "to_k", "to_v", "to_out.0")},
    "img_mlp.proj": (12288, 4096),
    "img_mlp.gate_layer": (12288, 4096),
    "img_mlp.gate_up": (24576, 4096),
    "img_mlp.out": (4096, 12288),
}
ATTENTION = tuple(SHAPES)[:4]


def lora_21(prefix, pair, targets, blocks=(0, 31), rank=16, shapes=SHAPES):
    down, up = pair
    specs = {}
    for block in blocks:
        for target in targets:
            module = f"transformer_blocks.{block}.{target}"
            module = prefix + (module.replace(".", "_") if prefix in FLAT_PREFIXES else module)
            rows, columns = shapes[target]
            specs[f"{module}.{down}"] = ("BF16", (rank, columns))
            specs[f"{module}.{up}"] = ("BF16", (rows, rank))
    return specs


@pytest.mark.parametrize("prefix", (*PREFIXES, *FLAT_PREFIXES))
def test_a_lora_in_every_key_style(tmp_path, prefix):
    for pair in PAIRS:
        for targets in (ATTENTION, *((name,) for name in SHAPES if "mlp" in name)):
            part = inspect_specs(tmp_path, lora_21(prefix, pair, targets))
            assert (part.family, part.role) == ("LoRA for Qwen-Image-2.1", "lora")
            assert part.dims["targets"] == ", ".join(sorted(targets))
            assert not part.variant.startswith("unknown")
            assert part.licence == "of Qwen-Image-2.1: research, not commercial use"
            assert part.cannot_run == ()


def test_a_bundle_with_whole_tensors(tmp_path):
    specs = lora_21("", PAIRS[-1], SHAPES) | {
        "img_in.lora_down": ("BF16", (16, 64)),
        "img_in.lora_up": ("BF16", (4096, 16)),
        "modulation.1.lora_down": ("BF16", (16, 4096)),
        "modulation.1.lora_up": ("BF16", (16384, 16)),
        "proj_out.weight": ("BF16", (4, 64, 4096)),
        "transformer_blocks.3.attn.norm_q.weight": ("BF16", (128,)),
    }
    part = inspect_specs(tmp_path, specs)
    assert part.family == "LoRA for Qwen-Image-2.1"
    assert part.cannot_run[0].endswith("use the nodes of the LoRA's publisher.")


def test_the_turbo_lora(tmp_path):
    """Ranks of its own for each module, norms as differences, alpha, and an attention."""
    specs, prefix = {}, "diffusion_model.transformer_blocks"
    for number, target in enumerate((*ATTENTION, "img_mlp.gate_up", "img_mlp.out")):
        specs |= lora_21("diffusion_model.", PAIRS[2], [target], rank=64 + number)
        specs[f"{prefix}.0.{target}.alpha"] = ("F32", ())
    specs |= {
        f"{prefix}.0.attn.norm_q.diff": ("BF16", (128,)),
        f"{prefix}.1.attn.comfy_attention.config": ("U8", (35,)),
        "diffusion_model.txt_in.text_norm.diff": ("BF16", (4096,)),
    }
    part = inspect_specs(
        tmp_path,
        specs,
        contents={
            f"{prefix}.1.attn.comfy_attention.config": b'{"attention": "comfy_kitchen_int8"}'
        },
    )
    assert (part.family, part.blocks) == ("LoRA for Qwen-Image-2.1", 2)
    assert (part.dims["rank"], part.dims["largest_rank"]) == (64, 69)
    assert part.cannot_run == ()


def lokr_21(halves):
    specs = {}
    for block in range(32):
        for target in ATTENTION:
            for name, shape in halves.items():
                specs[f"lycoris_transformer_blocks_{block}_{target.replace('.', '_')}.{name}"] = (
                    "BF16",
                    shape,
                )
    return specs


def test_attention_alone_in_other_forms(tmp_path):
    whole = {"lokr_w1": (16, 16), "lokr_w2": (256, 256)}
    factored = {"lokr_w1": (16, 16), "lokr_w2_a": (256, 8), "lokr_w2_b": (8, 256)}
    for specs, family in (
        (lora_21("", PAIRS[0], ["attn.to_out.0"]), "LoRA for Qwen-Image-2.1"),
        (lokr_21(whole), "LoKr for Qwen-Image-2.1"),
        (lokr_21(factored), "LoKr for Qwen-Image-2.1"),
        (lokr_21(whole | {"lokr_w1": (12, 12)}), "LoKr for Qwen-Image, FLUX or SD 3"),
    ):
        assert inspect_specs(tmp_path, specs).family.startswith(family)


def klein():
    """FLUX.2 klein 9B's attention, which is as wide as Qwen-Image-2.1's."""
    specs = lora_21("transformer.", PAIRS[0], ATTENTION, range(8))
    for block in range(24):
        for name, rows, columns in (("to_qkv_mlp_proj", 36864, 4096), ("to_out", 4096, 16384)):
            module = f"transformer.single_transformer_blocks.{block}.attn.{name}"
            specs[f"{module}.lora_A.weight"] = ("BF16", (16, columns))
            specs[f"{module}.lora_B.weight"] = ("BF16", (rows, 16))
    return specs


def test_loras_of_others_are_not_taken_for_one(tmp_path):
    narrow = dict.fromkeys(ATTENTION, (3072, 3072))
    for specs, family in (
        (lora_21("", PAIRS[0], ATTENTION, shapes=narrow), "LoRA for Qwen-Image, FLUX or SD 3"),
        (lora_21("", PAIRS[0], ATTENTION, (0, 59), shapes=narrow), "LoRA for Qwen-Image"),
        (lora_21("", PAIRS[0], ATTENTION, (0, 7)), "LoRA for Qwen-Image, FLUX or SD 3"),
        (klein(), "not Qwen-Image: a LoRA for another model"),
    ):
        part = inspect_specs(tmp_path, specs)
        assert part.family.startswith(family) and "2.1" not in part.family
        assert part.licence is None and part.cannot_run == ()


def test_the_fun_controlnet(tmp_path, diffusers_form):
    block = {
        name.replace("transformer_blocks.", "control_blocks."): spec
        for name, spec in diffusers_form.items()
        if name.startswith("transformer_blocks.0.")
    }
    for specs in (block, fused(block)):
        specs |= {
            "control_img_in.weight": ("BF16", (4096, 129)),
            "control_img_in.bias": ("BF16", (4096,)),
            "control_blocks.0.before_proj.weight": ("BF16", (4096, 4096)),
            "control_blocks.0.after_proj.weight": ("BF16", (4096, 4096)),
        }
        path = write(tmp_path / "file.safetensors", specs)
        part = only(inspect_checkpoint(path))
        assert (part.family, part.folder) == ("ControlNet for Qwen-Image-2.1", "model_patches")
        assert "of Qwen-Image-2.1: use ComfyUI's Load Model Patch (" in part.cannot_run[0]
        refused(path, "transformer", "This is a ControlNet for Qwen-Image-2.1, not")


SMALL = specs_of(empty(QwenImage21Transformer2DModel, num_layers=2))
POOL = sorted(
    {
        *(*SMALL, *fused(SMALL)),
        *lora_21("transformer.", PAIRS[0], SHAPES, blocks=(0, 9)),
        *("control_img_in.weight", "control_blocks.0.after_proj.weight", "proj_out.comfy_quant"),
        *("control_blocks.0.img_mlp.gate_up.weight", "transformer.img_in.lora_down"),
        *(f"model.visual.deepstack_merger_list.0.norm.{end}" for end in ("weight", "bias")),
        *("model.norm.weight", "model.language_model.norm.weight", "model.embed_tokens.weight"),
    }
)


@settings(
    deadline=None,
    max_examples=100,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    specs=st.dictionaries(
        st.sampled_from(POOL),
        st.tuples(
            st.sampled_from(["BF16", "I8", "U8", "F32", "F8_E4M3"]),
            st.lists(st.sampled_from([0, 1, 3, 64, 128, 4096]), max_size=5).map(tuple),
        ).filter(lambda spec: math.prod(spec[1]) < 10**9),
        max_size=40,
    ),
    prefix=st.sampled_from(["", "model.diffusion_model."]),
)
def test_what_is_left_of_a_file_never_loads(tmp_path, specs, prefix):
    path = write(
        tmp_path / "file.safetensors", {prefix + name: spec for name, spec in specs.items()}
    )
    with pytest.raises(CheckpointError):
        check_complete(open_source(path, "transformer"))
    with suppress(CheckpointError):  # ComfyUI's class is compared where it loads
        open_source(path, "text_encoder")
