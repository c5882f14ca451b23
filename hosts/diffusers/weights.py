"""Fills a diffusers model from safetensors shards, one tensor at a time.

The model is built empty and compared with the file headers, so that a folder that does not fit is
refused in milliseconds; then host memory never holds more than the model itself and one tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from accelerate import init_empty_weights
from diffusers import ModelMixin
from safetensors import safe_open

from ...errors import CheckpointError
from ...loaders.shards import Shards
from ...loaders.tensor_checks import check_finite

# Other dtypes are quantized: without their scales a cast would give a wrong image and no error.
PLAIN_DTYPES = ("F32", "F16", "BF16")


def build_empty(model_class: type[ModelMixin], config: Mapping[str, Any]) -> ModelMixin:
    """Builds the model with its parameters on the meta device and everything else real.

    QwenEmbedRope keeps its complex tables as plain attributes, which no checkpoint would fill
    again.
    """
    with init_empty_weights(include_buffers=False):
        return model_class.from_config(config)


def check_dtypes(shards: Shards) -> None:
    """Raises CheckpointError when a tensor is quantized."""
    for name, info in shards.tensors.items():
        if info.dtype not in PLAIN_DTYPES:
            raise CheckpointError(
                f"{shards.header_of(name).path} holds {name!r} as {info.dtype} and diffusers "
                f"loading takes {', '.join(PLAIN_DTYPES)} only: use the unquantized folder."
            )


def check_fits(model: ModelMixin, shards: Shards) -> None:
    """Compares the names and shapes in the file headers with the model.

    Raises:
        CheckpointError: a tensor is missing, unexpected, or of another shape.
    """
    expected = model.state_dict()
    found = shards.tensors
    if missing := expected.keys() - found.keys():
        raise CheckpointError(
            f"{shards.path} lacks the tensor {min(missing)!r} ({len(missing)} in all) that its "
            "config.json asks for: download the folder again."
        )
    if unexpected := found.keys() - expected.keys():
        raise CheckpointError(
            f"{shards.path} holds the tensor {min(unexpected)!r} ({len(unexpected)} in all) that "
            "its config.json has no place for: download the folder again."
        )
    for name, info in found.items():
        if info.shape != tuple(expected[name].shape):
            raise CheckpointError(
                f"{shards.header_of(name).path} holds {name!r} with shape {info.shape} and "
                f"config.json asks for {tuple(expected[name].shape)}: download the folder again."
            )


def stream_tensors(shards: Shards) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (name, tensor on the CPU) file by file; the tensors are views of the mapped files.

    Raises:
        CheckpointError: a tensor holds NaN or infinity.
    """
    for header in shards.headers:
        with safe_open(header.path, framework="pt") as file:
            for name in header.tensors:
                tensor = file.get_tensor(name)
                check_finite(header.path, name, tensor)
                yield name, tensor


def fill(
    model: ModelMixin,
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    dtype: torch.dtype,
    device: str,
) -> None:
    """Puts every tensor into its place in the empty model, cast to `dtype` on `device`."""
    for name, tensor in tensors:
        owner, _, leaf = name.rpartition(".")
        value = tensor.to(device=device, dtype=dtype)
        setattr(model.get_submodule(owner), leaf, torch.nn.Parameter(value, requires_grad=False))
