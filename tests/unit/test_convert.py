"""Names of the VAE's and the text encoder's tensors: every name has its own native one, and others
stay.
"""

import pytest
from accelerate import init_empty_weights
from diffusers import AutoencoderKLQwenImage
from hypothesis import given
from hypothesis import strategies as st
from test_checkpoint import flat
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from qwen_l40s.families.parts import (
    text_encoder_name_to_native,
    vae_21_name_to_native,
    vae_name_to_native,
)


def test_each_tensor_of_the_vae_gets_a_name_of_its_own():
    """tests/host/test_clip_vae.py loads them by these into ComfyUI's class."""
    with init_empty_weights(include_buffers=True):
        names = AutoencoderKLQwenImage().state_dict()
    assert len(set(map(vae_name_to_native, names))) == len(names) == 194


@pytest.mark.parametrize(
    "name",
    [
        "",
        "encoder",
        "decoder.",
        "conv1.weight",
        "encoder.conv1.weight",
        "encoder.downsamples.0.residual.2.weight",
        "encoder.mid_block.resnets.2.conv1.weight",
        "encoder.mid_block.attentions.1.to_qkv.weight",
        "decoder.up_blocks.0.upsamplers.weight",
        "decoder.up_blocks.x.resnets.0.conv1.weight",
        "transformer_blocks.0.attn.to_q.weight",
        "vae.encoder.conv_in.weight",
    ],
)
def test_a_name_of_something_else_stays(name):
    for to_native in (vae_name_to_native, vae_21_name_to_native):
        assert to_native(name) == name


@given(st.text())
def test_any_text_has_a_name(name):
    for to_native in (vae_name_to_native, vae_21_name_to_native, text_encoder_name_to_native):
        assert isinstance(to_native(name), str)


def nested_text_encoder():
    config = Qwen2_5_VLConfig()
    config.text_config.num_hidden_layers = config.vision_config.depth = 2
    config.text_config.layer_types = config.text_config.layer_types[:2]
    with init_empty_weights(include_buffers=True):
        model = Qwen2_5_VLForConditionalGeneration(config)
    return dict.fromkeys(model.state_dict())


def test_both_forms_of_the_text_encoder_become_the_same_native_names():
    nested = nested_text_encoder()
    native = [text_encoder_name_to_native(name) for name in nested]
    assert len(set(native)) == len(nested) == 57
    assert native == [text_encoder_name_to_native(name) for name in flat(nested)]
    # ComfyUI's names are flat; only the head, which it does not use, is inside the model.
    assert set(native) == set(flat(nested)) - {"lm_head.weight"} | {"model.lm_head.weight"}
    assert native == [text_encoder_name_to_native(name) for name in native]


@pytest.mark.parametrize(
    ("name", "native"),
    [
        ("model.language_model.norm.weight", "model.norm.weight"),
        (
            "model.language_model.layers.3.mlp.up_proj.comfy_quant",
            "model.layers.3.mlp.up_proj.comfy_quant",
        ),
        ("model.visual.blocks.0.attn.qkv.weight", "visual.blocks.0.attn.qkv.weight"),
        ("lm_head.weight_scale", "model.lm_head.weight_scale"),
        ("scaled_fp8", "scaled_fp8"),
    ],
)
def test_a_scale_goes_with_its_layer(name, native):
    assert text_encoder_name_to_native(name) == native


@pytest.mark.parametrize(
    "name",
    [
        "",
        "model",
        "model.",
        "lm_head",
        "transformer.model.norm.weight",
        "vision_model.embeddings.patch_embedding.weight",
        "transformer_blocks.0.attn.to_q.weight",
        "scaled_fp8.weight",
    ],
)
def test_a_name_that_is_not_the_text_encoders_stays(name):
    assert text_encoder_name_to_native(name) == name
