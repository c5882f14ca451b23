"""Names of the VAE's tensors: every diffusers name has its own native one, and nothing else has."""

import contextlib

import pytest
from accelerate import init_empty_weights
from diffusers import AutoencoderKLQwenImage
from hypothesis import given
from hypothesis import strategies as st
from test_checkpoint import native_vae

from qwen_l40s.errors import CheckpointError
from qwen_l40s.loaders.convert import vae_name_to_native


def diffusers_vae(base_dim):
    """Name to shape of every tensor of diffusers' class."""
    with init_empty_weights(include_buffers=True):
        vae = AutoencoderKLQwenImage(base_dim=base_dim)
    return {name: tuple(tensor.shape) for name, tensor in vae.state_dict().items()}


@pytest.mark.parametrize("base_dim", [8, 96], ids=["micro", "real"])
def test_names_map_one_to_one_onto_the_native_ones_with_their_shapes(base_dim):
    shapes = diffusers_vae(base_dim)
    native = {name: shape for name, (_, shape) in native_vae(dim=base_dim).items()}
    assert len(native) == len(shapes) == 194
    assert {vae_name_to_native(name): shape for name, shape in shapes.items()} == native


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
def test_a_name_of_something_else_is_refused(name):
    with pytest.raises(CheckpointError, match="not one of a Qwen-Image VAE") as error:
        vae_name_to_native(name)
    assert repr(name) in str(error.value)


@given(st.text())
def test_any_text_is_a_name_or_refused(name):
    with contextlib.suppress(CheckpointError):
        assert vae_name_to_native(name)
