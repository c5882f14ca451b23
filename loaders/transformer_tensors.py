"""Which tensors a Qwen-Image transformer of given sizes has, and whether a file has them all.

The names and shapes are those of diffusers' `QwenImageTransformer2DModel`, which ComfyUI keeps.
"""

from __future__ import annotations

from ..errors import CheckpointError
from ..planning.memory import BLOCK_GEMMS, TIME_CHANNELS, TransformerShape
from .source import Source
from .tensor_checks import check_names


def expected_tensors(shape: TransformerShape) -> dict[str, tuple[int, ...]]:
    """Returns {name: shape} of every parameter."""
    dim = shape.dim
    shapes: dict[str, tuple[int, ...]] = {"txt_norm.weight": (shape.joint_dim,)}

    def linear(name: str, rows: int, columns: int) -> None:
        shapes[f"{name}.weight"] = (rows, columns)
        shapes[f"{name}.bias"] = (rows,)

    linear("img_in", dim, shape.in_channels)
    linear("txt_in", dim, shape.joint_dim)
    linear("time_text_embed.timestep_embedder.linear_1", dim, TIME_CHANNELS)
    linear("time_text_embed.timestep_embedder.linear_2", dim, dim)
    if shape.addition_t_cond:
        shapes["time_text_embed.addition_t_embedding.weight"] = (2, dim)
    for block in (f"transformer_blocks.{index}" for index in range(shape.blocks)):
        for name, (rows, columns) in BLOCK_GEMMS.items():
            linear(f"{block}.{name}", rows * dim, columns * dim)
        for name in ("norm_q", "norm_k", "norm_added_q", "norm_added_k"):
            shapes[f"{block}.attn.{name}.weight"] = (shape.head_dim,)
        for stream in ("img", "txt"):
            linear(f"{block}.{stream}_mod.1", 6 * dim, dim)
    linear("norm_out.linear", 2 * dim, dim)
    linear("proj_out", shape.packed_out_channels, dim)
    return shapes


def check_complete(source: Source) -> TransformerShape:
    """Compares a transformer's header with what its sizes ask for, and returns the sizes.

    Raises:
        CheckpointError: a tensor is missing or has another shape; hosts only log that, and would
            run on random memory.
    """
    part = source.part
    try:
        shape = TransformerShape.from_dims(part.dims, part.blocks, part.family)
    except CheckpointError as error:
        raise CheckpointError(f"{source.path}: {error}") from error
    found = {name: info.shape for name, info in source.tensors.items()}
    expected = expected_tensors(shape)
    # What else a file holds, such as scales and markers, is for others to judge.
    known = {name: sizes for name, sizes in found.items() if name in expected}
    check_names(source.path, known, expected, f"a transformer with {shape.blocks} blocks")
    return shape
