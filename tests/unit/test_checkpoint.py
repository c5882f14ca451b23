"""What `inspect_checkpoint` says of headers with the real names and shapes, made sparse: 40 GB cost
nothing here.
"""

import json
import math
import os

import pytest
import torch
from accelerate import init_empty_weights
from diffusers import (
    AutoencoderKLQwenImage,
    AutoencoderTiny,
    FluxTransformer2DModel,
    QwenImageControlNetModel,
    QwenImageTransformer2DModel,
    WanTransformer3DModel,
    ZImageTransformer2DModel,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from published_text_encoder import published_shapes

from qwen_l40s.errors import CheckpointError
from qwen_l40s.families.identify import SIGNS
from qwen_l40s.families.parts import vae_name_to_native
from qwen_l40s.loaders.checkpoint import inspect_checkpoint
from qwen_l40s.loaders.header import DTYPE_BITS

MICRO = {"attention_head_dim": 16, "num_attention_heads": 2, "joint_attention_dim": 24}
MICRO_ROPE = {"axes_dims_rope": (4, 6, 6)}


def write(path, specs, metadata=None, contents=None):
    """Writes a sparse safetensors file of {name: (dtype, shape)} with real bytes only for
    `contents`.
    """
    header = {"__metadata__": metadata} if metadata else {}
    position = 0
    for name, (dtype, shape) in specs.items():
        end = position + math.prod(shape) * DTYPE_BITS[dtype] // 8
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, data in (contents or {}).items():
            file.seek(8 + len(text) + header[name]["data_offsets"][0])
            file.write(data)
    os.truncate(path, 8 + len(text) + position)
    return path


def specs_of(model, dtype="BF16", prefix=""):
    return {f"{prefix}{name}": (dtype, tuple(t.shape)) for name, t in model.state_dict().items()}


def empty(model_class, *args, **kwargs):
    with init_empty_weights(include_buffers=True):
        return model_class(*args, **kwargs)


def micro_transformer(**kwargs):
    return specs_of(
        empty(QwenImageTransformer2DModel, num_layers=3, **MICRO, **MICRO_ROPE, **kwargs)
    )


@pytest.fixture(scope="module")
def full_transformer():
    return specs_of(empty(QwenImageTransformer2DModel))


def only(checkpoint):
    assert len(checkpoint.parts) == 1
    assert checkpoint.errors == ()
    json.dumps(checkpoint.as_dict())
    return checkpoint.parts[0]


def inspect_specs(tmp_path, specs, name="file.safetensors", **kwargs):
    return only(inspect_checkpoint(write(tmp_path / name, specs, **kwargs)))


def native_vae(dim=96, channels=3):
    """Names as ComfyUI's class has them, which tests/host/test_clip_vae.py loads them into."""
    specs = specs_of(empty(AutoencoderKLQwenImage, base_dim=dim, input_channels=channels))
    return {vae_name_to_native(name): spec for name, spec in specs.items()}


# --- transformers


def test_the_full_size_qwen_image(tmp_path, full_transformer):
    part = inspect_specs(tmp_path, full_transformer)
    assert part.family == "Qwen-Image"
    assert "the header cannot tell" in part.variant
    assert part.parameters == 20_430_401_088
    assert part.dims == {
        "dim": 3072,
        "heads": 24,
        "head_dim": 128,
        "joint_dim": 3584,
        "in_channels": 64,
        "packed_out_channels": 64,
    }
    assert (part.blocks, part.folder, part.tensors) == (60, "diffusion_models", 1933)
    assert part.dtypes == {"BF16": {"tensors": 1933, "bytes": 40_860_802_176}}
    assert part.quantization.formats == {}
    assert part.cannot_run == ()
    assert part.licence is None


def test_a_file_name_is_a_hint_and_no_evidence(tmp_path):
    part = inspect_specs(
        tmp_path, micro_transformer(), name="qwen_image_edit_2509_bf16.safetensors"
    )
    assert part.family == "Qwen-Image"
    assert part.hint == "the file name says 2509 edit, which the file does not confirm"


def test_a_full_checkpoint_is_reported_as_its_parts(tmp_path):
    specs = {f"model.diffusion_model.{name}": value for name, value in micro_transformer().items()}
    specs |= {f"vae.{name}": value for name, value in native_vae(dim=8).items()}
    specs |= {
        f"text_encoders.qwen25_7b.transformer.{name}": value
        for name, value in qwen25(512, 2).items()
    }
    checkpoint = inspect_checkpoint(write(tmp_path / "all.safetensors", specs))
    assert [(part.name, part.family) for part in checkpoint.parts] == [
        ("diffusion model", "Qwen-Image"),
        ("vae", "Qwen-Image VAE"),
        ("text encoder", "Qwen2.5-VL text encoder"),
    ]
    assert sum(part.tensors for part in checkpoint.parts) == len(specs)


# --- text encoders


def qwen25(hidden, layers, language="model.", kv=512, bias=True):
    specs = {f"{language}embed_tokens.weight": ("BF16", (1000, hidden))}
    for layer in range(layers):
        prefix = f"{language}layers.{layer}"
        for name, out in (("q", hidden), ("k", kv), ("v", kv)):
            specs[f"{prefix}.self_attn.{name}_proj.weight"] = ("BF16", (out, hidden))
            if bias:
                specs[f"{prefix}.self_attn.{name}_proj.bias"] = ("BF16", (out,))
        specs[f"{prefix}.input_layernorm.weight"] = ("BF16", (hidden,))
    return specs | {f"{language}norm.weight": ("BF16", (hidden,))}


@pytest.fixture(scope="module")
def full_text_encoder():
    return {name: ("BF16", tuple(shape)) for name, shape in published_shapes().items()}


def flat(specs):
    return {
        name.replace("model.language_model.", "model.").replace("model.visual.", "visual."): value
        for name, value in specs.items()
    }


@pytest.mark.parametrize("rename", [dict, flat])
def test_the_full_size_text_encoder_in_both_styles(tmp_path, full_text_encoder, rename):
    part = inspect_specs(tmp_path, rename(full_text_encoder))
    assert (part.family, part.role) == ("Qwen2.5-VL text encoder", "text_encoder")
    assert part.variant.startswith("7B, with its vision tower, with lm_head, ")
    assert ("transformers 5" in part.variant) == (rename is dict)
    assert part.parameters == 8_292_166_656
    assert (part.blocks, part.dims["hidden"], part.dims["kv_dim"]) == (28, 3584, 512)
    assert (part.dims["vision_blocks"], part.dims["vision_dim"]) == (32, 1280)
    assert part.folder == "text_encoders"


def test_a_vision_tower_alone_is_an_mmproj(tmp_path, full_text_encoder):
    specs = {name: s for name, s in flat(full_text_encoder).items() if name.startswith("visual.")}
    part = inspect_specs(tmp_path, specs)
    assert (part.role, part.blocks) == ("vision_tower", 32)
    part = inspect_specs(tmp_path, {"v.blk.0.attn_q.weight": ("F16", (8, 8))})
    assert part.family.startswith("mmproj")


def test_other_language_models_are_not_taken_for_it(tmp_path):
    qwen3 = qwen25(4096, 2, bias=False) | {
        "model.layers.0.self_attn.q_norm.weight": ("BF16", (128,))
    }
    assert (
        inspect_specs(tmp_path, qwen3).family == "not Qwen-Image: looks like a Qwen3 text encoder"
    )
    visual = {"visual.deepstack_merger_list.0.norm.weight": ("BF16", (4608,))}
    part = inspect_specs(tmp_path, qwen3 | visual)
    assert part.family.startswith("Qwen3-VL") and part.dims["hidden"] == 4096


# --- VAEs


def test_both_forms_of_the_vae_hold_the_same_weights(tmp_path):
    diffusers = inspect_specs(tmp_path, specs_of(empty(AutoencoderKLQwenImage)))
    native = inspect_specs(tmp_path, native_vae())
    assert diffusers.family == native.family == "Qwen-Image VAE"
    assert diffusers.parameters == native.parameters == 126_892_531
    assert diffusers.dims == native.dims == {"dim": 96, "latent_channels": 16, "image_channels": 3}
    assert "diffusers" in diffusers.variant and "native" in native.variant
    assert diffusers.folder == "vae"


def test_the_layered_vae_is_rgba(tmp_path):
    for specs in (
        specs_of(empty(AutoencoderKLQwenImage, input_channels=4)),
        native_vae(channels=4),
    ):
        part = inspect_specs(tmp_path, specs)
        assert part.dims["image_channels"] == 4
        assert part.variant.startswith("RGBA, as Qwen-Image-Layered has it")


def test_wan_22_vae_is_not_taken_for_it(tmp_path):
    specs = native_vae() | {"decoder.upsamples.0.upsamples.0.residual.2.weight": ("F32", (1,))}
    assert inspect_specs(tmp_path, specs).family == "not Qwen-Image: looks like the Wan 2.2 VAE"


def test_tiny_vaes(tmp_path):
    """TAEHV, TAESD and TAESD in diffusers' names."""
    for specs in (
        {"decoder.1.weight": ("F16", (256, 16, 3, 3)), "decoder.22.bias": ("F16", (3,))},
        {"decoder.1.weight": ("F16", (64, 16, 3, 3)), "decoder.3.conv.0.weight": ("F16", (1,))},
        specs_of(empty(AutoencoderTiny, latent_channels=4)),
    ):
        found = inspect_specs(tmp_path, specs).family
        assert found == "not Qwen-Image: looks like a tiny VAE, for models/vae_approx"


# --- what sits beside the transformer


LORA_FORMS = {
    "diffusers (transformer.)": ("transformer.", "lora_A.weight", "lora_B.weight"),
    "bare (transformer_blocks.)": ("", "lora_down.weight", "lora_up.weight"),
    "ComfyUI (diffusion_model.)": ("diffusion_model.", "lora_A.weight", "lora_B.weight"),
    "kohya (lora_unet_)": ("lora_unet_", "lora_down.weight", "lora_up.weight"),
    "PEFT (base_model.model.)": (
        "base_model.model.",
        "lora_A.default.weight",
        "lora_B.default.weight",
    ),
}


def lora_specs(style, targets, blocks=2, rank=16, alpha=True):
    prefix, down, up = LORA_FORMS[style]
    specs = {}
    for block in range(blocks):
        for target in targets:
            module = f"transformer_blocks.{block}.{target}"
            module = prefix + (module.replace(".", "_") if prefix.endswith("_") else module)
            specs[f"{module}.{down}"] = ("BF16", (rank, 3072))
            specs[f"{module}.{up}"] = ("BF16", (3072, rank))
            if alpha:
                specs[f"{module}.alpha"] = ("F32", ())
    return specs


@pytest.mark.parametrize("style", LORA_FORMS)
def test_a_lora_in_every_key_style(tmp_path, style):
    part = inspect_specs(tmp_path, lora_specs(style, ["attn.to_out.0", "img_mlp.net.0.proj"]))
    assert (part.family, part.role, part.folder) == ("LoRA for Qwen-Image", "lora", "loras")
    assert part.variant == f"{style} keys, with alpha"
    assert part.dims == {"rank": 16, "modules": 4, "targets": "attn.to_out.0, img_mlp.net.0.proj"}
    assert part.blocks == 2


def test_lora_that_only_shares_names_is_not_claimed(tmp_path):
    style = "diffusers (transformer.)"
    shared = inspect_specs(tmp_path, lora_specs(style, ["attn.to_q"]))
    assert shared.family.startswith("LoRA for Qwen-Image, FLUX or SD 3")
    deep = inspect_specs(tmp_path, lora_specs(style, ["attn.to_q"], blocks=60))
    assert deep.family == "LoRA for Qwen-Image"
    flux = lora_specs(style, ["attn.to_q"]) | {
        "transformer.single_transformer_blocks.0.attn.to_q.lora_A.weight": ("BF16", (16, 3072))
    }
    assert inspect_specs(tmp_path, flux).family == "not Qwen-Image: a LoRA for another model"
    sd15 = {
        "lora_unet_down_blocks_0_attentions_0_proj_in.lora_down.weight": ("F16", (4, 320, 1, 1))
    }
    assert inspect_specs(tmp_path, sd15).family == "not Qwen-Image: a LoRA for another model"


def test_lokr_and_loha(tmp_path):
    module = "lycoris_transformer_blocks_0_img_mlp_net_2"
    lokr = {f"{module}.lokr_w1": ("BF16", (8, 8)), f"{module}.lokr_w2_a": ("BF16", (384, 4))}
    part = inspect_specs(tmp_path, lokr | {f"{module}.lokr_w2_b": ("BF16", (4, 1536))})
    assert (part.family, part.dims["rank"]) == ("LoKr for Qwen-Image", 4)
    loha = {f"{module}.hada_w1_a": ("BF16", (3072, 8)), f"{module}.hada_w1_b": ("BF16", (8, 12288))}
    part = inspect_specs(tmp_path, loha)
    assert (part.family, part.dims["rank"]) == ("LoHa for Qwen-Image", 8)
    assert part.dims["targets"] == "img_mlp.net.2"


def test_controlnets_and_model_patch(tmp_path):
    specs = specs_of(empty(QwenImageControlNetModel, num_layers=2, **MICRO, **MICRO_ROPE))
    part = inspect_specs(tmp_path, specs)
    assert (part.family, part.folder, part.blocks) == ("ControlNet for Qwen-Image", "controlnet", 2)
    fun = {
        "control_img_in.weight": ("BF16", (3072, 132)),
        "control_blocks.0.after_proj.weight": ("BF16", (3072, 3072)),
    }
    assert inspect_specs(tmp_path, fun).variant == "Fun layout"
    patch = {
        "controlnet_blocks.0.y_rms.weight": ("BF16", (3072,)),
        "img_in.weight": ("BF16", (3072, 64)),
    }
    assert inspect_specs(tmp_path, patch).folder == "model_patches"


def test_other_models_by_well_known_names(tmp_path):
    flux = empty(FluxTransformer2DModel, num_layers=1, num_single_layers=1)
    for name, tensors in {
        "Wan": list(specs_of(empty(WanTransformer3DModel, num_layers=1))),
        "Z-Image": list(specs_of(empty(ZImageTransformer2DModel, n_layers=1))),
        "FLUX": list(flux.state_dict()),
        "SDXL": [
            f"model.diffusion_model.{n}"
            for n in ("input_blocks.0.0.weight", "label_emb.0.0.weight")
        ],
        "Stable Diffusion": ["input_blocks.0.0.weight", "time_embed.0.weight"],
        "a T5 text encoder": ["encoder.block.0.layer.0.SelfAttention.k.weight"],
    }.items():
        part = inspect_specs(tmp_path, dict.fromkeys(tensors, ("F16", (2, 2))))
        assert (part.family, part.folder) == (f"not Qwen-Image: looks like {name}", None)
    mage = micro_transformer() | {
        "txt_norm.weight": ("BF16", (2560,)),
        "proj_out.weight": ("BF16", (128, 32)),
    }
    assert inspect_specs(tmp_path, mage).family == "not Qwen-Image: looks like Mage-Flow"
    assert inspect_specs(tmp_path, {}).family == "not Qwen-Image: it holds no tensors"
    unknown = inspect_specs(tmp_path, {"x": ("F16", (2,))})
    assert unknown.family == "not Qwen-Image: no known model has these tensors, x"
    long = inspect_specs(tmp_path, {f"{it}{'x' * 5000}": ("F16", (2,)) for it in "abc"})
    assert long.family.endswith(" and 2 more") and len(long.family) < 150


# --- quantization


def quantized(dtype, extra=()):
    """The micro transformer with the matrices of its blocks in `dtype`; `extra` lists what stands
    beside each: (suffix, (dtype, shape as a function of rows and columns)).
    """
    specs = {}
    for name, (_, shape) in micro_transformer().items():
        block = (
            name.startswith("transformer_blocks") and name.endswith(".weight") and len(shape) == 2
        )
        specs[name] = (dtype if block else "BF16", shape)
        if block:
            for suffix, (scale_dtype, scale_shape) in extra:
                scale = scale_shape(*shape)
                specs[f"{name.removesuffix('.weight')}.{suffix}"] = (scale_dtype, scale)
    return specs


MATRICES = 14 * 3  # in a block, times blocks
SCALE_SHAPES = {
    "per tensor": lambda rows, columns: (),
    "per row": lambda rows, columns: (rows, 1),
    "2 groups a row": lambda rows, columns: (rows, 2),
}


@pytest.mark.parametrize("granularity", SCALE_SHAPES)
@pytest.mark.parametrize("suffix", ["weight_scale", "scale_weight"])
def test_scaled_fp8_and_its_granularity(tmp_path, suffix, granularity):
    specs = quantized("F8_E4M3", extra=[(suffix, ("F32", SCALE_SHAPES[granularity]))])
    part = inspect_specs(tmp_path, specs | {"scaled_fp8": ("F8_E4M3", (2,))})
    assert part.quantization.formats == {"fp8 e4m3, scaled": MATRICES}
    assert part.quantization.granularity == {granularity: MATRICES}
    assert part.quantization.quantized["transformer_blocks.*.attn.to_q"] == 3
    assert part.quantization.kept["img_in"] == 1
    assert part.cannot_run == ()
    assert part.parameters == inspect_specs(tmp_path, micro_transformer()).parameters


def comfy_quant(tmp_path, layer_settings, dtype="I8"):
    text = (
        layer_settings if isinstance(layer_settings, bytes) else json.dumps(layer_settings).encode()
    )
    extra = [
        ("weight_scale", ("F32", lambda r, c: (r, 1))),
        ("comfy_quant", ("U8", lambda r, c: (len(text),))),
    ]
    specs = quantized(dtype, extra=extra)
    contents = {name: text for name in specs if name.endswith(".comfy_quant")}
    return write(tmp_path / "quant.safetensors", specs, contents=contents)


def test_comfy_quant_tensors_are_read(tmp_path):
    for layer_settings, dtype, name in (
        ({"format": "int8_tensorwise"}, "I8", "int8"),
        ({"format": "int8_tensorwise", "convrot": True}, "I8", "int8 ConvRot"),
        ({"format": "int8_tensorwise", "params": {"convrot": True}}, "I8", "int8 ConvRot"),
        # The package's own format, which `qwen-l40s quantize` writes.
        ({"format": "float8_e4m3fn_rowwise"}, "F8_E4M3", "fp8 e4m3, scaled per row"),
    ):
        part = only(inspect_checkpoint(comfy_quant(tmp_path, layer_settings, dtype)))
        assert part.quantization.formats == {name: MATRICES}
        assert part.quantization.granularity == {"per row": MATRICES}
        assert part.cannot_run == ()


def test_what_a_file_says_of_its_layers_is_at_hand(tmp_path):
    settings = {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 64}
    quantization = only(inspect_checkpoint(comfy_quant(tmp_path, settings))).quantization
    assert set(quantization.settings) == set(quantization.layers)
    assert quantization.settings["transformer_blocks.0.attn.to_q"] == settings
    quantization = inspect_specs(tmp_path, quantized("F8_E4M3")).quantization
    assert quantization.settings == {}


@pytest.mark.parametrize(
    "content", [b"\0" * 20, b"[1]", b'{"format": "int8_tensorwise"}' + b" " * 4096]
)
def test_a_broken_comfy_quant_tensor(tmp_path, content):
    with pytest.raises(
        CheckpointError, match=r"The tensor .* is broken .* download .*quant\.safetensors"
    ):
        inspect_checkpoint(comfy_quant(tmp_path, content))


def attention(tmp_path, *texts, dtype="U8"):
    prefix = "model.diffusion_model."
    names = [
        f"{prefix}transformer_blocks.{index}.attn.comfy_attention.config"
        for index in range(len(texts))
    ]
    specs = {f"{prefix}{name}": spec for name, spec in micro_transformer().items()}
    specs |= {name: (dtype, (len(text),)) for name, text in zip(names, texts, strict=True)}
    return write(
        tmp_path / "said.safetensors", specs, contents=dict(zip(names, texts, strict=True))
    )


def test_what_a_file_says_of_attention_is_read(tmp_path):
    int8 = b'{"attention": "comfy_kitchen_int8"}'
    both = b'[{"attention": "comfy_kitchen_sol", "tau": 0.8}, {"attention": "comfy_kitchen_int8"}]'
    part = only(inspect_checkpoint(attention(tmp_path, int8, both, b'{"attention": null}')))
    assert part.attention == {
        "comfy_kitchen_int8": 1,
        "comfy_kitchen_sol, else comfy_kitchen_int8": 1,
    }
    assert part.family == "Qwen-Image"
    plain = inspect_specs(tmp_path, micro_transformer())
    assert part.parameters == plain.parameters
    assert plain.attention == {}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"\0" * 20, "Expecting value"),
        (b'"comfy_kitchen_int8"', "it has a JSON str instead of an object"),
        (b"[3]", "it has a JSON int instead of an object"),
        (b'{"attention": 3}', "its attention is 3, not a name"),
        (b'{"attention": "sol"}' + b" " * 4096, "4,116 bytes of U8"),
    ],
)
def test_a_broken_attention_config(tmp_path, text, reason):
    with pytest.raises(CheckpointError) as error:
        inspect_checkpoint(attention(tmp_path, text))
    assert "transformer_blocks.0.attn.comfy_attention.config' is broken" in str(error.value)
    assert reason in str(error.value)
    assert str(error.value).endswith("said.safetensors).")


def test_quantization_metadata(tmp_path):
    specs = {f"model.diffusion_model.{name}": value for name, value in quantized("F8_E4M3").items()}
    layer = "model.diffusion_model.transformer_blocks.0.attn.to_q"
    layers = {"format_version": "1.0", "layers": {layer: {"format": "mxfp8"}}}
    metadata = {"_quantization_metadata": json.dumps(layers)}
    part = inspect_specs(tmp_path, specs, metadata=metadata)
    assert part.quantization.formats == {"mxfp8": 1, "fp8 e4m3, unscaled": MATRICES - 1}
    with pytest.raises(CheckpointError, match=r"_quantization_metadata is broken"):
        inspect_specs(tmp_path, specs, metadata={"_quantization_metadata": '{"layers": 3}'})


def test_nunchaku_and_bitsandbytes_are_named_and_not_run(tmp_path):
    specs = {
        "txt_norm.weight": ("BF16", (3584,)),
        "transformer_blocks.0.attn.norm_added_q.weight": ("BF16", (128,)),
        "transformer_blocks.0.attn.to_qkv.qweight": ("I8", (96, 16)),
        "transformer_blocks.0.attn.to_qkv.wscales": ("BF16", (2, 96)),
        "transformer_blocks.0.attn.to_qkv.proj_down": ("BF16", (32, 8)),
        "transformer_blocks.0.attn.to_qkv.proj_up": ("BF16", (96, 8)),
    }
    part = inspect_specs(tmp_path, specs)
    assert (part.family, part.quantization.formats) == ("Qwen-Image", {"SVDQuant (nunchaku)": 1})
    assert part.parameters == 3584 + 128 + 96 * 32
    awq = {
        "transformer_blocks.0.img_mod.1.qweight": ("I32", (48, 16)),
        "transformer_blocks.0.img_mod.1.wscales": ("BF16", (2, 192)),
        "transformer_blocks.0.img_mod.1.wzeros": ("BF16", (2, 192)),
    }
    part = inspect_specs(tmp_path, specs | awq)
    assert part.quantization.formats == {"SVDQuant (nunchaku)": 1, "AWQ int4 (nunchaku)": 1}
    (sentence,) = part.cannot_run
    assert "nunchaku's compiled extension" in sentence

    layer = "transformer_blocks.0.attn.to_q.weight"
    full = micro_transformer()
    packed = full | {
        layer: ("U8", (32 * 32 // 2, 1)),
        f"{layer}.absmax": ("F32", (16,)),
        f"{layer}.quant_map": ("F32", (16,)),
        f"{layer}.quant_state.bitsandbytes__nf4": ("U8", (80,)),
    }
    part = inspect_specs(tmp_path, packed)
    assert part.quantization.formats == {"bitsandbytes nf4": 1}
    assert part.quantization.granularity == {"blocks of 64": 1}
    assert part.parameters == inspect_specs(tmp_path, full).parameters
    assert "bitsandbytes nf4 weights cannot run in this package" in part.cannot_run[0]


# --- anything


POOL = sorted(
    {
        *(sign for signs in SIGNS.values() for sign in signs),
        *micro_transformer(use_additional_t_cond=True),
        *native_vae(dim=8),
        *(f"visual.{name}" for name in ("blocks.0.x", "deepstack_merger_list.0.norm.weight")),
        *(f"model.layers.0.self_attn.k_proj.{end}" for end in ("bias", "weight", "weight.absmax")),
        *(f"img_in.{end}" for end in ("weight_scale", "scale_weight", "weight_scale_inv", "SCB")),
        *(f"txt_in.{end}" for end in ("qweight", "wscales", "weight.absmax", "weight.quant_map")),
        *(f"{name}.lora_down.weight" for name in ("a", f"transformer_blocks.{'9' * 5000}.img_mlp")),
        *(
            "decoder.1.weight",
            "decoder.22.bias",
            "control_img_in.weight",
            "txt_norm.weight",
            "vae.",
        ),
    }
)


@pytest.mark.slow
@settings(
    deadline=None,
    max_examples=300,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    specs=st.dictionaries(
        st.sampled_from(POOL) | st.text(max_size=5).filter(lambda name: name != "__metadata__"),
        st.tuples(
            st.sampled_from(["BF16", "I8", "U8", "I32", "F8_E4M3"]),
            st.lists(st.integers(0, 3), max_size=5).map(tuple),
        ),
        max_size=12,
    ),
    prefix=st.sampled_from(["", "model.diffusion_model.", "vae."]),
)
def test_known_names_with_nonsense_shapes_never_break_the_inspection(tmp_path, specs, prefix):
    path = write(
        tmp_path / "any.safetensors", {prefix + name: spec for name, spec in specs.items()}
    )
    checkpoint = inspect_checkpoint(path)
    json.dumps(checkpoint.as_dict())
    assert sum(part.tensors for part in checkpoint.parts) == len(specs)


# --- shards and folders


def write_sharded(folder, specs, shards=2, stem="diffusion_pytorch_model"):
    weight_map = {}
    items = list(specs.items())
    for number in range(shards):
        name = f"{stem}-{number + 1:05d}-of-{shards:05d}.safetensors"
        own = dict(items[number::shards])
        write(folder / name, own)
        weight_map |= dict.fromkeys(own, name)
    index = folder / f"{stem}.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    return index


@pytest.mark.parametrize(
    "name", ["diffusion_pytorch_model.fp16.safetensors", "anything.safetensors"]
)
def test_a_folder_with_one_file(tmp_path, name):
    write(tmp_path / name, micro_transformer())
    assert only(inspect_checkpoint(tmp_path)).family == "Qwen-Image"


def refused(path, rule, remedy):
    with pytest.raises(CheckpointError) as error:
        inspect_checkpoint(path)
    message = str(error.value)
    assert message.endswith(f"({path}).") or str(path.parent) in message
    assert rule in message
    assert remedy in message
    assert message.endswith(".") and "\n" not in message


def test_folders_that_cannot_be_read(tmp_path):
    refused(tmp_path, "holds neither", "name a folder or file with weights")
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    refused(tmp_path, "holds pickled weights only", "get the safetensors version")
    write(tmp_path / "one.safetensors", {"a": ("F16", (1,))})
    write(tmp_path / "two.safetensors", {"a": ("F16", (1,))})
    refused(tmp_path, "holds 2 safetensors files and no index", "name the one to read")


def test_shards_without_index(tmp_path):
    write_sharded(tmp_path, micro_transformer()).unlink()
    refused(tmp_path, "numbered shards but no index", "download the *.safetensors.index.json")


@pytest.mark.parametrize(
    "name",
    [
        "../x.safetensors",
        "/etc/x.safetensors",
        "a/b.safetensors",
        "a\\b.safetensors",
        "C:x.safetensors",
    ],
)
def test_an_index_that_points_outside_its_folder(tmp_path, name):
    index = tmp_path / "model.safetensors.index.json"
    write(tmp_path.parent / "x.safetensors", {"a": ("F16", (1,))})
    index.write_text(json.dumps({"weight_map": {"a": name}}))
    refused(index, "is outside its folder", "from the model's publisher")


def test_indexes_that_are_none(tmp_path):
    index = tmp_path / "model.safetensors.index.json"
    for text, rule, remedy in (
        ("[]", "is not readable JSON", "download it again"),
        ("{", "is not readable JSON", "download it again"),
        ("{}", "is not a shard index", "download it again"),
        ('{"weight_map": {"a": 3}}', "is not a shard index", "download it again"),
        (
            '{"weight_map": {"a": "x.bin"}}',
            "only .safetensors files can be read",
            "safetensors version",
        ),
    ):
        index.write_text(text)
        refused(index, rule, remedy)
    refused(tmp_path / "no.safetensors.index.json", "No such file", "download it again")


def test_an_index_and_shards_that_disagree(tmp_path):
    index = write_sharded(tmp_path, micro_transformer())
    content = json.loads(index.read_text())
    content["weight_map"]["ghost"] = content["weight_map"]["img_in.weight"]
    index.write_text(json.dumps(content))
    refused(index, "lacks the tensor 'ghost'", "download index and shards again")
    del content["weight_map"]["ghost"], content["weight_map"]["img_in.weight"]
    index.write_text(json.dumps(content))
    refused(index, "has the tensor 'img_in.weight'", "download index and shards again")


# --- diffusers folders


def write_folder(path, pipeline="QwenImagePipeline", config=None, hidden=24, **kwargs):
    (path / "scheduler").mkdir(parents=True)
    (path / "tokenizer").mkdir()
    model_index = {
        "_class_name": pipeline,
        "_diffusers_version": "0.36.0",
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
        "text_encoder": ["transformers", "Qwen2_5_VLForConditionalGeneration"],
        "tokenizer": ["transformers", "Qwen2Tokenizer"],
        "transformer": ["diffusers", "QwenImageTransformer2DModel"],
        "vae": ["diffusers", "AutoencoderKLQwenImage"],
        "image_encoder": [None, None],
    }
    (path / "model_index.json").write_text(json.dumps(model_index))
    write_sharded(path / "transformer", micro_transformer(**kwargs))
    values = {"num_layers": 3, "in_channels": 64, **MICRO, **kwargs, **(config or {})}
    (path / "transformer" / "config.json").write_text(json.dumps(values))
    write(path / "text_encoder" / "model.safetensors", qwen25(hidden, 2))
    text_config = {"text_config": {"hidden_size": hidden, "num_hidden_layers": 2}}
    (path / "text_encoder" / "config.json").write_text(json.dumps(text_config))
    vae = specs_of(empty(AutoencoderKLQwenImage, base_dim=8))
    write(path / "vae" / "diffusion_pytorch_model.safetensors", vae)
    (path / "vae" / "config.json").write_text(json.dumps({"base_dim": 8, "z_dim": 16}))
    return path


PIPELINES = [
    ("QwenImagePipeline", {}, "Qwen-Image or 2512"),
    ("QwenImageEditPipeline", {}, "Qwen-Image-Edit"),
    ("QwenImageEditPlusPipeline", {}, "Qwen-Image-Edit-2509"),
    ("QwenImageEditPlusPipeline", {"zero_cond_t": True}, "Qwen-Image-Edit-2511"),
    ("QwenImageLayeredPipeline", {"use_additional_t_cond": True}, "Qwen-Image-Layered"),
]


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"num_layers": 60}, "num_layers as 60, but the tensors give 3"),
        ({"attention_head_dim": 128}, "attention_head_dim as 128, but the tensors give 16"),
        ({"use_additional_t_cond": True}, "use_additional_t_cond as True"),
    ],
)
def test_a_config_that_contradicts_its_tensors_is_an_error_of_the_part(tmp_path, config, sentence):
    checkpoint = inspect_checkpoint(write_folder(tmp_path / "model", config=config))
    assert len(checkpoint.errors) == 1
    assert checkpoint.errors[0].startswith("transformer: ")
    assert sentence in checkpoint.errors[0] and "from one source" in checkpoint.errors[0]


def test_a_text_encoder_of_another_width_is_an_error(tmp_path):
    checkpoint = inspect_checkpoint(write_folder(tmp_path / "model", hidden=32))
    assert checkpoint.errors == (
        "transformer: the transformer takes text 24 wide, but text_encoder gives 32: use both from "
        "one model.",
    )


def test_a_diffusers_folder_with_a_missing_component(tmp_path):
    folder = write_folder(tmp_path / "model")
    (folder / "tokenizer").rmdir()
    refused(folder, "tokenizer/ in model_index.json is missing", "finish the download")


def test_a_model_index_that_is_none_or_points_outside(tmp_path):
    folder = write_folder(tmp_path / "model")
    (folder / "model_index.json").write_text("[1]")
    refused(folder, "is not readable JSON", "download it again")
    remedy = "from the model's publisher"
    (folder / "model_index.json").write_text('{"_class_name": ["QwenImagePipeline"]}')
    refused(folder, "does not name its pipeline", remedy)
    for name in ("../vae", "..", "a/b"):
        model_index = {"_class_name": "A", name: ["diffusers", "B"]}
        (folder / "model_index.json").write_text(json.dumps(model_index))
        refused(folder, "is outside the folder", remedy)


def test_a_folder_that_diffusers_itself_wrote(tmp_path):
    torch.manual_seed(0)
    model = QwenImageTransformer2DModel(num_layers=2, **MICRO, **MICRO_ROPE)
    model.to(torch.bfloat16).save_pretrained(tmp_path / "transformer", max_shard_size="20KB")
    part = only(inspect_checkpoint(tmp_path / "transformer"))
    assert part.parameters == sum(p.numel() for p in model.parameters())
    assert (part.blocks, list(part.dtypes)) == (2, ["BF16"])
