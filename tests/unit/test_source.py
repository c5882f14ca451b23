"""What `open_source` finds in every form of a model, and how it refuses everything else.

Headers only, as in test_checkpoint.py: real names, small shapes, no weights.
"""

import json
import os
import pickle

import pytest
from test_checkpoint import (
    PIPELINES,
    comfy_quant,
    lora_specs,
    micro_transformer,
    native_vae,
    quantized,
    qwen25,
    write,
    write_folder,
    write_sharded,
)

from qwen_l40s.errors import CheckpointError
from qwen_l40s.families.identify import WRAPPERS
from qwen_l40s.loaders.quantized_file import plan_quantized
from qwen_l40s.loaders.sizes import read_sizes
from qwen_l40s.loaders.source import PLACES, fingerprint, open_source
from qwen_l40s.spec.formats import METADATA_KEY

ROLES = tuple(PLACES)
FAMILIES = {
    "transformer": "Qwen-Image",
    "text_encoder": "Qwen2.5-VL text encoder",
    "vae": "Qwen-Image VAE",
}
PREFIXES = {
    "transformer": "model.diffusion_model.",
    "text_encoder": "text_encoders.qwen25_7b.transformer.",
    "vae": "vae.",
}
MMPROJ = {"visual.blocks.0.attn.qkv.weight": ("BF16", (24, 8))}
FLUX = {
    "double_blocks.0.img_attn.qkv.weight": ("BF16", (24, 8)),
    "img_in.weight": ("BF16", (8, 64)),
}


@pytest.fixture(scope="module")
def specs():
    return {
        "transformer": micro_transformer(),
        "text_encoder": qwen25(24, 2),
        "vae": native_vae(dim=8),
    }


def prefixed(specs, role):
    return {f"{PREFIXES[role]}{name}": spec for name, spec in specs.items()}


# --- every form


@pytest.mark.parametrize("role", ROLES)
def test_a_single_file_with_and_without_a_prefix(tmp_path, specs, role):
    for prefix, tensors in (("", specs[role]), (PREFIXES[role], prefixed(specs[role], role))):
        path = write(tmp_path / "any name.safetensors", tensors)
        for given in (path, str(path)):
            source = open_source(given, role)
            assert (source.path, source.role, source.files) == (path, role, (path,))
            assert (source.part.family, source.part.prefix) == (FAMILIES[role], prefix)
            assert source.part.tensors == len(source.shards.tensors) == len(specs[role])
            assert source.config == {}


@pytest.mark.parametrize("prefix", ["", *WRAPPERS])
def test_a_transformer_under_each_prefix_with_what_a_lora_left_in_it(tmp_path, specs, prefix):
    layer = "transformer_blocks.0.attn.to_q"
    left = {f"{layer}.lora_{side}.weight": ("BF16", (4, 4)) for side in "AB"}
    path = write(tmp_path / "file.safetensors", specs["transformer"])
    known = read_sizes(path).shape, plan_quantized(path, "int8").quantized
    tensors = {f"{prefix}{name}": spec for name, spec in (specs["transformer"] | left).items()}
    path = write(tmp_path / "left.safetensors", tensors)
    source = open_source(path, "transformer")
    assert (source.part.family, source.part.prefix) == (FAMILIES["transformer"], prefix)
    assert layer + ".weight" in source.tensors
    assert (read_sizes(path).shape, plan_quantized(path, "int8").quantized) == known


@pytest.mark.parametrize("role", ROLES)
def test_a_sharded_folder_and_its_index(tmp_path, specs, role):
    index = write_sharded(tmp_path / "sharded", specs[role], shards=3)
    for path in (index, index.parent):
        source = open_source(path, role)
        assert source.part.family == FAMILIES[role]
        assert source.part.tensors == len(specs[role])
        assert source.files == tuple(sorted(index.parent.glob("*.safetensors")))


@pytest.mark.parametrize("role", ROLES)
def test_a_component_folder_with_its_config(tmp_path, role):
    folder = write_folder(tmp_path / "model") / role
    for path in (folder, *folder.glob("*.index.json"), *folder.glob("model.safetensors")):
        source = open_source(path, role)
        assert source.part.family == FAMILIES[role]
        assert source.config == json.loads((folder / "config.json").read_text())
        assert {file.parent for file in source.files} == {folder}


@pytest.mark.parametrize(
    ("pipeline", "kwargs", "family"), [*PIPELINES, ("SomebodysPipeline", {}, "Qwen-Image")]
)
def test_a_diffusers_folder_names_the_family(tmp_path, pipeline, kwargs, family):
    folder = write_folder(tmp_path / "model", pipeline, **kwargs)
    for role in ROLES:
        source = open_source(folder, role)
        assert source.path == folder / role
        assert source.part.family == (family if role == "transformer" else FAMILIES[role])
        assert source.config == json.loads((folder / role / "config.json").read_text())


def test_2511_by_its_marker_or_by_its_folder_s_config(tmp_path, specs):
    marked = specs["transformer"] | {"__index_timestep_zero__": ("F32", (0,))}
    path = write(tmp_path / "marked.safetensors", marked)
    assert open_source(path, "transformer").part.family == "Qwen-Image-Edit-2511"
    path = write(tmp_path / "told" / "file.safetensors", specs["transformer"])
    (path.parent / "config.json").write_text('{"zero_cond_t": true}')
    source = open_source(path.parent, "transformer")
    assert source.part.family == "Qwen-Image-Edit-2511"
    assert source.config == {"zero_cond_t": True}
    # By its name, the file may be one of many that have nothing to do with that config.json.
    source = open_source(path, "transformer")
    assert (source.part.family, source.config) == ("Qwen-Image", {})


def test_what_this_package_wrote_into_a_file_of_its_own(tmp_path, specs):
    config = {"axes_dims_rope": [4, 6, 6]}
    metadata = {METADATA_KEY: json.dumps({"config": config, "precision": "int8"})}
    path = write(tmp_path / "own.safetensors", specs["transformer"], metadata)
    assert open_source(path, "transformer").config == config
    bare = write(tmp_path / "bare.safetensors", specs["transformer"], {METADATA_KEY: "{}"})
    assert open_source(bare, "transformer").config == {}
    # Another model's config.json in the same folder is not about this file.
    (tmp_path / "config.json").write_text('{"axes_dims_rope": [8, 12, 12], "zero_cond_t": true}')
    assert open_source(path, "transformer").config == config


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"config": 3}', '{"config": [1]}'])
def test_broken_metadata_of_our_own(tmp_path, specs, text):
    path = write(tmp_path / "own.safetensors", specs["transformer"], {METADATA_KEY: text})
    refused(path, "transformer", "qwen_l40s metadata is broken (", "): write the file again")


# --- what is converted, and so no reason to refuse


def test_fp8_of_any_kind_is_converted(tmp_path):
    paths = [write(tmp_path / f"{it}.safetensors", quantized(it)) for it in ("F8_E4M3", "F8_E5M2")]
    for name in ("float8_e4m3fn", "float8_e4m3fn_rowwise", "float8_e5m2"):
        dtype = "F8_E5M2" if "e5m2" in name else "F8_E4M3"
        (tmp_path / name).mkdir()
        paths.append(comfy_quant(tmp_path / name, {"format": name}, dtype))
    for path in paths:
        assert len(open_source(path, "transformer").part.quantization.layers) == 42


# --- the wrong file in a slot


def refused(path, role, *fragments):
    with pytest.raises(CheckpointError) as error:
        open_source(path, role)
    message = str(error.value)
    assert str(path) in message, message
    assert message.endswith(".") and "\n" not in message, message
    position = 0
    for fragment in fragments:
        assert fragment in message[position:], f"{fragment!r} is missing, or late: {message}"
        position = message.index(fragment, position) + len(fragment)
    return message


TRANSFORMER, TEXT_ENCODER, VAE = (
    "the Qwen-Image transformer",
    "the Qwen2.5-VL text encoder",
    "the Qwen-Image VAE",
)
SD_VAE = ("decoder.conv_in.weight", "decoder.mid.block_1.norm1.weight")
LORA_STYLE = "diffusers (transformer.)"
WRONG = {
    "a VAE as model": (
        native_vae(dim=8),
        "transformer",
        ("This is a Qwen-Image VAE, not ", TRANSFORMER, ": move it to models/vae ("),
    ),
    "a text encoder as model": (
        qwen25(24, 2),
        "transformer",
        ("This is a Qwen2.5-VL text encoder, not ", TRANSFORMER, "to models/text_encoders"),
    ),
    "a model as text encoder": (
        micro_transformer(),
        "text_encoder",
        ("is a Qwen-Image transformer (Qwen-Image), not ", TEXT_ENCODER, "models/diffusion_models"),
    ),
    "a model as VAE": (
        micro_transformer(use_additional_t_cond=True),
        "vae",
        ("transformer (Qwen-Image-Layered), not ", VAE, ": move it to models/diffusion_models"),
    ),
    "an mmproj as text encoder": (
        MMPROJ,
        "text_encoder",
        ("This is mmproj: a vision tower of Qwen-VL", ": choose ", TEXT_ENCODER),
    ),
    "a FLUX checkpoint": (
        {f"model.diffusion_model.{name}": spec for name, spec in FLUX.items()},
        "transformer",
        ("This looks like FLUX, not Qwen-Image: choose ", TRANSFORMER),
    ),
    "a LoRA as model": (
        lora_specs(LORA_STYLE, ["img_mlp.net.2"]),
        "transformer",
        ("This is a LoRA for Qwen-Image, not ", TRANSFORMER, ": move it to models/loras"),
    ),
    "a FLUX LoRA as model": (
        {"lora_unet_single_blocks_0_linear1.lora_down.weight": ("BF16", (4, 8))},
        "transformer",
        ("This is a LoRA for another model, not ", TRANSFORMER, ": move it to models/loras"),
    ),
    "another VAE": (
        dict.fromkeys(SD_VAE, ("F16", (1,))),
        "vae",
        ("This looks like a FLUX or Stable Diffusion VAE, not Qwen-Image: choose ", VAE),
    ),
    "a tiny VAE": (
        {"decoder.1.weight": ("F16", (256, 16, 3, 3)), "decoder.22.bias": ("F16", (3,))},
        "vae",
        ("This looks like a tiny VAE, for models/vae_approx, not Qwen-Image: choose ", VAE),
    ),
    "no tensors": ({}, "transformer", ("It holds no tensors: choose ", TRANSFORMER)),
}


@pytest.mark.parametrize("case", WRONG)
def test_the_wrong_file_in_a_slot(tmp_path, case):
    specs, role, fragments = WRONG[case]
    refused(write(tmp_path / "file.safetensors", specs), role, *fragments)


def test_a_component_folder_in_the_wrong_slot(tmp_path):
    folder = write_folder(tmp_path / "model")
    refused(folder / "vae", "transformer", "This is a Qwen-Image VAE, not", "models/vae (")
    refused(folder / "transformer", "vae", "a Qwen-Image transformer (Qwen-Image), not")


def test_two_transformers_in_one_file(tmp_path, specs):
    both = {
        f"{prefix}{name}": spec
        for name, spec in specs["transformer"].items()
        for prefix in ("model.diffusion_model.", "transformer.")
    }
    path = write(tmp_path / "file.safetensors", both)
    refused(path, "transformer", "has 2 parts that could be the Qwen-Image transformer", "with one")


# --- what this package does not run


RULE = "which computes in bf16, fp8 e4m3 and int8: get the model in one of these"


BETTER = "get the model in int8 ConvRot or fp8"


def test_a_quantization_that_is_not_run(tmp_path, specs):
    path = comfy_quant(tmp_path, {"format": "fp3_spiral"})
    refused(path, "transformer", "format from the future: fp3_spiral weights cannot run in", RULE)
    for name, reason in (
        ("nvfp4", "multiply them on Blackwell and expand them on Ada"),
        ("mxfp8", "multiply them on Blackwell and expand them on Ada"),
        ("convrot_w4a4", "activations in 4 bits without calibration give noise in Qwen-Image"),
    ):
        path = comfy_quant(tmp_path, {"format": name})
        assert "future" not in refused(path, "transformer", reason, BETTER)
    packed = specs["text_encoder"]
    layer = "model.layers.0.self_attn.q_proj"
    text = json.dumps({"format": "w6a8_int8"}).encode()
    packed = packed | {f"{layer}.comfy_quant": ("U8", (len(text),))}
    contents = {f"{layer}.comfy_quant": text}
    path = write(tmp_path / "encoder.safetensors", packed, contents=contents)
    words = "get the model in one of these, or load it with ComfyUI's nodes (ComfyUI 0.38 and"
    refused(path, "text_encoder", "int6 (w6a8) weights cannot run", words)


# --- files that are none, or not whole


def test_an_error_that_is_told_again_names_its_place_once(tmp_path):
    first = CheckpointError("This is broken: download it again.", tmp_path / "part")
    again = pickle.loads(pickle.dumps(CheckpointError(first, tmp_path / "whole")))
    assert str(again) == str(first) and again.path == tmp_path / "part"
    assert str(CheckpointError(ValueError("bad."), tmp_path)) == f"bad ({tmp_path})."


def test_shards_that_are_not_whole(tmp_path, specs):
    index = write_sharded(tmp_path, specs["vae"])
    first, second = sorted(tmp_path.glob("*.safetensors"))
    refused(first, "vae", "is one shard of several")
    os.truncate(second, 100)
    for path in (tmp_path, index):
        with pytest.raises(CheckpointError, match=r"is truncated .*: download .*00002-of-00002"):
            open_source(path, "vae")
    second.unlink()
    for path in (tmp_path, index):
        with pytest.raises(CheckpointError, match=r"is missing, .*: finish the"):
            open_source(path, "vae")


@pytest.mark.parametrize("role", ROLES)
def test_a_missing_component(tmp_path, role):
    folder = write_folder(tmp_path / "model")
    (folder / role).rename(folder / "elsewhere")
    missing = f"The folder {role}/ with "
    refused(folder, role, missing, PLACES[role][0], "finish the down")
    for other in ROLES:
        if other != role:
            open_source(folder, other)


# --- what changes when a file is replaced


def test_the_fingerprint_of_files(tmp_path, specs):
    path = write(tmp_path / "file.safetensors", specs["vae"])
    files = open_source(path, "vae").files
    first = fingerprint(files)
    assert first == fingerprint(files) and hash(first)
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))
    touched = fingerprint(files)
    assert touched != first
    write(path, {name: ("F32", shape) for name, (_, shape) in specs["vae"].items()})
    os.utime(path, ns=(0, touched[0][1]))
    assert fingerprint(files) != touched
