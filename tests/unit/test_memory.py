"""The counted bytes against tensors that exist, if only on torch's meta device."""

import re
from dataclasses import asdict, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen_l40s.errors import CheckpointError
from qwen_l40s.families.qwen_image import QwenImageShape
from qwen_l40s.families.registry import shape_from_header
from qwen_l40s.planning.bytes import weight_bytes
from qwen_l40s.spec import formats

REAL = QwenImageShape(
    blocks=60,
    dim=3072,
    heads=24,
    head_dim=128,
    joint_dim=3584,
    in_channels=64,
    packed_out_channels=64,
)
ODD = QwenImageShape(
    blocks=3,
    dim=120,
    heads=5,
    head_dim=24,
    joint_dim=77,
    in_channels=20,
    packed_out_channels=28,
)
ROPE_AXES = {128: (16, 56, 56), 24: (8, 8, 8), 8: (4, 2, 2)}
QUANTIZABLE = re.compile(
    r"transformer_blocks\.\d+\.(attn\.(to_[qkv]|to_out\.0|add_[qkv]_proj|to_add_out)"
    r"|(img|txt)_mlp\.net\.(0\.proj|2))"
)


def build(shape, **options):
    """The real class without memory behind it."""
    torch = pytest.importorskip("torch")
    diffusers = pytest.importorskip("diffusers")
    with torch.device("meta"):
        return diffusers.QwenImageTransformer2DModel(
            patch_size=2,
            in_channels=shape.in_channels,
            out_channels=shape.packed_out_channels // 4,
            num_layers=shape.blocks,
            attention_head_dim=shape.head_dim,
            num_attention_heads=shape.heads,
            joint_attention_dim=shape.joint_dim,
            axes_dims_rope=ROPE_AXES[shape.head_dim],
            use_additional_t_cond=shape.addition_t_cond,
            **options,
        ).eval()


def summed(shapes, precision, keep=frozenset()):
    """The same four sums, tensor by tensor; shapes is {name: shape} of the real class."""
    quantized = precision in ("fp8", "int8")
    width = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8": 2, "int8": 2}[precision]
    sums = dict.fromkeys(("gemm", "modulation", "rest", "scales"), 0)
    for name, sizes in shapes.items():
        layer = name.removesuffix(".weight")
        count = 1
        for size in sizes:
            count *= size
        if len(sizes) == 2 and QUANTIZABLE.fullmatch(layer):
            small = quantized and layer not in keep
            sums["gemm"] += count if small else count * width
            sums["scales"] += 4 * sizes[0] if small else 0
        elif "_mod." in name:
            sums["modulation"] += count * width
        else:
            sums["rest"] += count * width
    return sums


def shapes_of(model):
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


# --- weights ---


@pytest.mark.parametrize("precision", formats.BYTES_PER_WEIGHT)
@pytest.mark.parametrize(
    "shape",
    [pytest.param(REAL, marks=pytest.mark.slow), ODD, replace(ODD, addition_t_cond=True)],
    ids=["real", "odd", "odd layered"],
)
def test_weights_equal_the_sum_over_the_tensors(shape, precision):
    shapes = shapes_of(build(shape))
    assert asdict(weight_bytes(shape, precision)) == summed(shapes, precision)
    keep = frozenset({"transformer_blocks.1.img_mlp.net.2", "transformer_blocks.0.attn.to_q"})
    counted = weight_bytes(shape, precision, keep)
    assert asdict(counted) == summed(shapes, precision, keep)
    assert counted.total == sum(summed(shapes, precision, keep).values())


@pytest.mark.slow
@settings(deadline=None, max_examples=40)
@given(
    blocks=st.integers(1, 3),
    heads=st.integers(1, 5),
    joint=st.integers(1, 50),
    channels=st.integers(1, 40),
    out=st.integers(1, 9),
    layered=st.booleans(),
)
def test_weights_at_any_sizes(blocks, heads, joint, channels, out, layered):
    shape = QwenImageShape(blocks, 8 * heads, heads, 8, joint, channels, 4 * out, layered)
    assert asdict(weight_bytes(shape, "int8")) == summed(shapes_of(build(shape)), "int8")


# --- from what header inspection finds ---


def test_layered_has_one_more_embedding():
    dims = {name: size for name, size in asdict(ODD).items() if name != "blocks"}
    assert shape_from_header("Qwen-Image", dims, 3) == ODD
    layered = shape_from_header("Qwen-Image-Layered", dims, 3)
    assert weight_bytes(layered, "bf16").rest - weight_bytes(ODD, "bf16").rest == 2 * 120 * 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"in_channels": None}, "do not show the Qwen-Image transformer's in_channels"),
        ({"dim": "3072"}, "do not show the Qwen-Image transformer's dim"),
        ({"joint_dim": 0}, "do not show the Qwen-Image transformer's joint_dim"),
        ({"blocks": None}, "do not show the Qwen-Image transformer's blocks"),
        ({"head_dim": 23}, "120 wide with heads of 23"),
    ],
)
def test_sizes_that_do_not_fix_the_tensors(change, message):
    dims = asdict(ODD) | change
    blocks = dims.pop("blocks")
    dims = {name: value for name, value in dims.items() if value is not None}
    with pytest.raises(CheckpointError, match=message):
        shape_from_header("Qwen-Image", dims, blocks)


# --- words ---
