"""Which tensors a transformer of given sizes has, against diffusers' own class, and what a file
that lacks one is told.
"""

import re
from dataclasses import replace

import pytest
from accelerate import init_empty_weights
from diffusers import QwenImageTransformer2DModel
from hypothesis import given, settings
from hypothesis import strategies as st
from test_checkpoint import write

from qwen_l40s.errors import CheckpointError
from qwen_l40s.families.qwen_image import FULL_SIZE, QwenImageShape
from qwen_l40s.loaders.source import check_complete, open_source

ODD = QwenImageShape(3, 5 * 12, 5, 12, 17, 20, 28)
LAYER = "transformer_blocks.1.attn.to_add_out"


def diffusers_tensors(shape: QwenImageShape) -> dict[str, tuple[int, ...]]:
    with init_empty_weights(include_buffers=True):
        model = QwenImageTransformer2DModel(
            in_channels=shape.in_channels,
            out_channels=shape.packed_out_channels // 4,
            num_layers=shape.blocks,
            attention_head_dim=shape.head_dim,
            num_attention_heads=shape.heads,
            joint_attention_dim=shape.joint_dim,
            axes_dims_rope=(shape.head_dim - 4, 2, 2),
            use_additional_t_cond=shape.addition_t_cond,
        )
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def test_the_published_ones_are_those_of_diffusers():
    assert FULL_SIZE.tensors() == diffusers_tensors(FULL_SIZE)


@settings(max_examples=25, deadline=None)
@given(
    blocks=st.integers(1, 3),
    heads=st.integers(1, 4),
    half_head=st.integers(3, 8),
    joint=st.integers(1, 40),
    channels=st.integers(1, 9),
    out=st.integers(1, 9),
    layered=st.booleans(),
)
def test_they_are_those_of_diffusers_at_any_size(
    blocks, heads, half_head, joint, channels, out, layered
):
    head = 2 * half_head
    sizes = (blocks, heads * head, heads, head, joint, channels, 4 * out)
    shape = QwenImageShape(*sizes, addition_t_cond=layered)
    assert shape.tensors() == diffusers_tensors(shape)


# --- files


def specs(shape: QwenImageShape = ODD) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {name: ("BF16", sizes) for name, sizes in shape.tensors().items()}


def check(tmp_path, tensors, prefix=""):
    tensors = {f"{prefix}{name}": spec for name, spec in tensors.items()}
    return check_complete(open_source(write(tmp_path / "file.safetensors", tensors), "transformer"))


@pytest.mark.parametrize(
    "prefix", ["", "model.diffusion_model.", "diffusion_model.", "transformer."]
)
@pytest.mark.parametrize("layered", [False, True])
def test_a_complete_file_gives_its_sizes(tmp_path, prefix, layered):
    shape = replace(ODD, addition_t_cond=layered)
    assert check(tmp_path, specs(shape), prefix) == shape


def test_scales_and_markers_are_for_others_to_judge(tmp_path):
    tensors = specs() | {
        f"{LAYER}.weight": ("F8_E4M3", (60, 60)),
        f"{LAYER}.weight_scale": ("F32", (60, 1)),
        f"{LAYER}.input_scale": ("F32", ()),
        "transformer_blocks.0.attn.to_q.weight": ("I8", (60, 60)),
        "transformer_blocks.0.attn.to_q.weight_scale": ("F32", ()),
        "scaled_fp8": ("F8_E4M3", (0,)),
        "__index_timestep_zero__": ("F32", (0,)),
    }
    assert check(tmp_path, tensors) == ODD


OF_THE_SIZES = ("img_in.", "txt_norm.", "proj_out.", "transformer_blocks.0.attn.norm_")


def test_a_missing_tensor_is_named(tmp_path):
    path, whole = tmp_path / "file.safetensors", specs()
    for name in whole:
        with pytest.raises(CheckpointError) as error:
            check(tmp_path, {other: spec for other, spec in whole.items() if other != name})
        if name.startswith(OF_THE_SIZES):  # then a size is not known
            assert re.search(r": (download|get|choose) .*\.$|so get .*\.$", str(error.value)), name
            continue
        assert str(error.value) == (
            f"This file lacks the tensor {name!r} (1 in all) of a transformer with 3 blocks: "
            f"download it again ({path})."
        )


def test_a_whole_block_that_is_missing_counts_its_tensors(tmp_path):
    # The last block's place is empty, and a number above it is taken.
    tensors = {
        name.replace("transformer_blocks.2.", "transformer_blocks.7."): spec
        for name, spec in specs().items()
    }
    first = "transformer_blocks.2.attn.add_k_proj.bias"
    with pytest.raises(CheckpointError, match=rf"lacks the tensor '{first}' \(32 in all\) of"):
        check(tmp_path, tensors)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        (f"{LAYER}.weight", (60, 59)),
        (f"{LAYER}.weight", (3600, 1)),
        (f"{LAYER}.bias", (61,)),
        ("transformer_blocks.2.img_mod.1.weight", (60, 60)),
        ("transformer_blocks.2.attn.norm_added_k.weight", (24,)),
        ("txt_in.weight", (60, 18)),
        ("norm_out.linear.bias", (60,)),
    ],
)
def test_a_tensor_of_another_shape_is_named(tmp_path, name, shape):
    expected = ODD.tensors()[name]
    with pytest.raises(CheckpointError) as error:
        check(tmp_path, specs() | {name: ("BF16", shape)})
    assert str(error.value) == (
        f"The tensor {name!r} has the shape {shape}, but a transformer with 3 blocks has "
        f"{expected}: download the file from the model's publisher "
        f"({tmp_path / 'file.safetensors'})."
    )


def test_heads_that_do_not_make_up_the_width(tmp_path):
    tensors = specs() | {"transformer_blocks.0.attn.norm_q.weight": ("BF16", (13,))}
    with pytest.raises(CheckpointError, match="head size") as error:
        check(tmp_path, tensors)
    assert str(tmp_path / "file.safetensors") in str(error.value)
