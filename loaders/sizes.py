"""Counts what the parts of a checkpoint take in memory, from its headers, for estimates."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from pathlib import Path

from ..errors import CheckpointError, SettingError
from ..families.registry import (
    is_modulation,
    is_quantizable,
    may_be,
    member_titled,
    shape_from_header,
    vae_titled,
)
from ..planning.bytes import BF16, TransformerBytes, weight_bytes
from ..planning.request import TEXT_ENCODER, TRANSFORMER, VAE, W4A8, Parts
from ..spec.formats import BYTES_PER_SCALE, BYTES_PER_WEIGHT, QUANTIZED
from ..spec.transformer import TransformerShape
from ..spec.vae import VaeShape
from .checkpoint import CheckpointPart, inspect_checkpoint, read_index, sample_sigmas
from .quantization import (
    DECODING,
    GGUF,
    GGUF_IN_W4A8,
    PACKED,
    STORAGE_ONLY,
    W4A8_GROUP,
    computed_precision,
    unpacked_shape,
)
from .source import PIPELINE_INDEX, Source, joined_bytes, open_source


@dataclass(frozen=True)
class CheckpointSizes:
    path: str  # as it was named
    # a name in `families.registry.members`; None where the tensors leave it open
    family: str | None
    shape: TransformerShape
    transformer: CheckpointPart  # what its header says
    loaded: TransformerBytes  # bytes of the transformer that is loaded as stored
    # the same where weights in 4 bits stay so; None where there are none
    packed: TransformerBytes | None
    text_encoder: CheckpointPart | None  # None where the checkpoint has none, as `vae`
    vae: CheckpointPart | None
    converted: int = 0  # bytes of the transformer that a load makes anew, if it loads as stored
    steps: int = 0  # that a Turbo is trained for; 0 of any other

    def family_for(self, requested: str | None) -> str:
        """Returns the family of an estimate."""
        found = self.family or self.shape.family.members[0].name
        if requested is None:
            return found
        if not may_be(requested, found):
            raise SettingError(
                f"--family is {requested!r}, but the file's tensors are those of {found}: leave "
                "it out, or name a file of that model.",
                Path(self.path),
            )
        return requested

    def settled(self, precision: str, text_encoder: str) -> tuple[str, str, Parts]:
        """Returns precisions as the loaders take them, and the bytes that follow: a quantized file
        stays as it is unless another precision is named.
        """
        named = {TRANSFORMER: self.transformer, TEXT_ENCODER: self.text_encoder, VAE: self.vae}
        files = tuple((name, part.bytes) for name, part in named.items() if part is not None)
        gguf = self.transformer.quantization.gguf
        stored, converted = stored_precision(self.transformer), self.converted
        if stored in QUANTIZED and precision == "bf16":
            converted = weight_bytes(self.shape, precision).gemm
        parts = Parts(transformer=self.shape, file_bytes=files, gguf=gguf, converted=converted)
        if stored in QUANTIZED and precision in ("auto", stored):
            kept, precision = stored if precision == "auto" else "", stored
            parts = replace(
                parts,
                kept=kept,
                cast=is_cast(self.transformer),
                transformer_bytes=self.loaded.total,
                modulation_bytes=self.loaded.modulation,
                packed=self.packed,
            )
        if self.text_encoder is not None and text_encoder != W4A8:  # which is another file
            text_encoder, count = _text_encoder(self.text_encoder, text_encoder)
            parts = replace(parts, text_encoder_bytes=count)
        if self.vae is not None:
            in_bf16 = BYTES_PER_WEIGHT["bf16"] * self.vae.parameters
            parts = replace(parts, vae=vae_shape(self.vae), vae_bytes=in_bf16)
        return precision, text_encoder, parts


# The oldest ComfyUI that this package runs in holds weights of 4 bits, and not those of 6.
HELD = "int4 asymmetric (w4a8)"


def read_sizes(path: str | os.PathLike[str]) -> CheckpointSizes:
    """Reads the headers of a transformer, a full checkpoint or a diffusers folder.

    Raises:
        CheckpointError: there is no Qwen-Image transformer in it that this package runs; the
            message says what it is instead.
    """
    transformer = open_source(path, "transformer")
    part = transformer.part
    try:
        shape = shape_from_header(part.family, part.dims, part.blocks)
    except CheckpointError as error:
        raise CheckpointError(error, transformer.path) from error
    roles = {other.role for other in inspect_checkpoint(path).parts}
    others = {
        role: open_source(path, role).part if role in roles else None
        for role in ("text_encoder", "vae")
    }
    index = Path(path) / PIPELINE_INDEX
    return CheckpointSizes(
        path=str(path),
        family=member.name if (member := member_titled(part.family)) else None,
        shape=shape,
        transformer=part,
        loaded=loaded_bytes(transformer),
        packed=loaded_bytes(transformer, packed=True)
        if not GGUF_IN_W4A8.union({HELD}).isdisjoint(part.quantization.formats)
        else None,
        converted=converted_bytes(transformer),
        steps=len(sample_sigmas(read_index(Path(path))[0], index)) if index.is_file() else 0,
        **others,
    )


def stored_precision(part: CheckpointPart) -> str:
    """Returns the precision that most of a part's weights are in once they are loaded: bf16, fp8 or
    int8; fp16 and fp32 are rounded to bf16, and e5m2 is converted to it.
    """
    return computed_precision(part.quantization.layers.values()) or "bf16"


def is_cast(part: CheckpointPart) -> bool:
    """Tells whether all quantized weights of a part are e4m3 without scales."""
    return set(part.quantization.formats) == {"fp8 e4m3, unscaled"}


def vae_shape(part: CheckpointPart) -> VaeShape:
    """Returns the sizes that fix a VAE's activations."""
    sizes = [part.dims.get(name) for name in ("dim", "latent_channels", "image_channels")]
    numbers = [size for size in sizes if isinstance(size, int)]
    if len(numbers) < len(sizes):
        raise CheckpointError(
            "The tensors do not give the VAE's sizes: download the VAE from the model's publisher."
        )
    return vae_titled(part.family).read_shape(part.dims)


def _text_encoder(part: CheckpointPart, requested: str) -> tuple[str, int]:
    """Returns (precision, bytes) of a text encoder without the lm_head, which is not loaded."""
    stored = stored_precision(part)
    if requested in ("auto", stored) and stored in QUANTIZED:
        return stored, part.bytes
    precision = "bf16" if requested == "auto" else requested
    parameters = part.parameters
    rows, hidden = part.dims.get("lm_head"), part.dims.get("hidden")
    if isinstance(rows, int) and isinstance(hidden, int):
        parameters -= rows * hidden
    # Without scales, of fp8 and int8.
    return precision, BYTES_PER_WEIGHT[precision] * parameters


def loaded_bytes(source: Source, packed: bool = False) -> TransformerBytes:
    """Counts the bytes of a transformer that is loaded as stored."""
    quantization, total, modulation = source.part.quantization, 0, 0
    gguf = quantization.gguf
    for name, info in source.tensors.items():
        count = info.nbytes
        if f"GGUF {info.dtype}" in GGUF:  # expanded, whatever it is
            count = info.elements * BYTES_PER_WEIGHT["bf16"]
        if gguf and len(info.shape) == 2:
            layer = name.removesuffix(".weight")
            rounded = is_quantizable(layer)
            scales = info.shape[0] * BYTES_PER_SCALE if rounded else 0
            count = info.elements * BYTES_PER_WEIGHT["int8" if rounded else "bf16"] + scales
            if packed and rounded and quantization.in_w4a8(layer, info.shape[1]):
                count = info.elements // 2 + info.elements // W4A8_GROUP + scales
        if not packed and quantization.layers.get(name.rpartition(".")[0]) in PACKED:
            if name.endswith(".weight"):
                count = math.prod(unpacked_shape(quantization, name, info))
            elif name.endswith(DECODING):
                count = 0
        total += count
        modulation += count if is_modulation(name.rpartition(".")[0]) else 0
    return TransformerBytes(total, modulation)


def converted_bytes(source: Source) -> int:
    """Counts what a load as stored makes anew in system RAM, of a file that is not GGUF."""
    quantization, count = source.part.quantization, joined_bytes(source)
    for name, info in source.tensors.items():
        form = quantization.layers.get(name.removesuffix(".weight"))
        if form in STORAGE_ONLY:
            count += BF16 * info.elements
        elif form in PACKED:
            count += math.prod(unpacked_shape(quantization, name, info))
    return count
