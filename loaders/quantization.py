"""Recognizes how weights are quantized, and how finely they are scaled, by the names that ComfyUI
0.33, nunchaku, bitsandbytes and transformers write. A `.comfy_quant` tensor is a short JSON text
among the weights: those few bytes are the only ones outside the header that are read to inspect.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..files import parse_json
from ..spec.formats import FORMATS
from .gguf import BLOCK_TYPES
from .header import PLAIN_DTYPES, TensorInfo

MAX_COMFY_QUANT_BYTES = 4096  # the longest that ComfyUI 0.33 writes is under 200
# What ComfyUI 0.40 reads of a block's attention, JSON as uint8 too: no weight, and kept as it is.
ATTENTION_CONFIG = ".comfy_attention.config"
Infos = Mapping[str, TensorInfo]

FP8_NAMES = {
    "F8_E4M3": "fp8 e4m3",
    "F8_E5M2": "fp8 e5m2",
    "F8_E4M3FNUZ": "fp8 e4m3fnuz",
    "F8_E5M2FNUZ": "fp8 e5m2fnuz",
}
COMFY_FORMATS = {
    "float8_e4m3fn": "fp8 e4m3, scaled",
    FORMATS["fp8"].marker: "fp8 e4m3, scaled per row",
    "float8_e5m2": "fp8 e5m2, scaled",
    FORMATS["int8"].marker: "int8",
    "nvfp4": "nvfp4",
    "mxfp8": "mxfp8",
    "convrot_w4a4": "int4 ConvRot (w4a4)",
    "asym_w4a8_int8": "int4 asymmetric (w4a8)",
    "w6a8_int8": "int6 (w6a8)",
}
# What runs the formats that are decoded to int8.
HOSTS = {
    "int4 asymmetric (w4a8)": "ComfyUI 0.33 and comfy-kitchen 0.2.27, or newer",
    "int6 (w6a8)": "ComfyUI 0.38 and comfy-kitchen 0.2.36, or newer",
}
FUTURE = "format from the future: "

# Suffixes of tensors that describe a quantized weight and hold no weights themselves.
AUXILIARY = re.compile(
    r"\.(comfy_quant|weight_scale(_2|_inv)?|scale_weight|scale_input|input_scale|pre_quant_scale"
    r"|weight_s_rel|weight_s_channel|weight_codebook|weight_correction"
    r"|wscales|wzeros|wcscales|wtscale|smooth_factor(_orig)?|proj_down|proj_up|SCB"
    r"|weight\.(absmax|quant_map|nested_absmax|nested_quant_map|quant_state\..*))$|(^|\.)scaled_fp8$"
)
# {format that stores several weights in an element: bits of each}
PACKED_BITS = {
    "nvfp4": 4,
    "int4 ConvRot (w4a4)": 4,
    "int4 asymmetric (w4a8)": 4,
    "int6 (w6a8)": 6,
    "SVDQuant (nunchaku)": 4,
    "AWQ int4 (nunchaku)": 4,
    "bitsandbytes nf4": 4,
    "bitsandbytes 4-bit": 4,
}
ELEMENT_BITS = {"I8": 8, "U8": 8, "I32": 32}
# What the package computes with, or, for e5m2, converts to bf16 first.
RUNNABLE = frozenset(
    {
        "fp8 e4m3, scaled",
        "fp8 e4m3, scaled per row",
        "fp8 e4m3, unscaled",
        "int8",
        "int8 ConvRot",
    }
)
STORAGE_ONLY = frozenset({"fp8 e5m2, scaled", "fp8 e5m2, unscaled"})
# What a transformer's loader decodes to int8 ConvRot, value for value.
PACKED = frozenset(HOSTS)
# {format: its type}, which a transformer's loader expands and rounds anew.
GGUF = {f"GGUF {name}": name for name in BLOCK_TYPES if name not in PLAIN_DTYPES}
# Those whose error grows at most 1.5 times in w4a8: from 1.03 (Q2_K) to 1.43 (Q4_K), and 1.98 for
# Q5_0 (Gaussian rows of 3,072; ggml's quantizer, comfy-kitchen 0.2.40).
GGUF_IN_W4A8 = frozenset(f"GGUF {name}" for name in ("Q4_K", "Q4_1", "Q4_0", "Q3_K", "Q2_K"))
W4A8_GROUP, W4A8_ROTATION = 16, 256  # columns with one scale, and that are rotated together
# What their codes mean, beside one scale for each row.
DECODING = (".weight_s_rel", ".weight_codebook")
# What to take on an L40S instead of formats of which nothing is gained there.
BETTER = "get the model in int8 ConvRot or fp8"
_BLACKWELL = (
    "weights do not run in this package; ComfyUI's layers multiply them on Blackwell and expand "
    f"them on Ada: for an L40S {BETTER}, or use ComfyUI's loader."
)
_NUNCHAKU = (
    "SVDQuant and AWQ weights of nunchaku need nunchaku's compiled extension, which this package "
    f"does not use: {BETTER}, or use nunchaku's nodes."
)
# {format: why it is not run, and what to do}, where that is known
REFUSALS = {
    "nvfp4": f"nvfp4 {_BLACKWELL}",
    "mxfp8": f"mxfp8 {_BLACKWELL}",
    "int4 ConvRot (w4a4)": (
        "int4 ConvRot (w4a4) weights cannot run, because activations in 4 bits without "
        f"calibration give noise in Qwen-Image: {BETTER}."
    ),
    "SVDQuant (nunchaku)": _NUNCHAKU,
    "AWQ int4 (nunchaku)": _NUNCHAKU,
}


@dataclass(frozen=True)
class Quantization:
    """Tells how the weights of one part are stored."""

    # {layer: format}; empty when nothing is quantized
    layers: Mapping[str, str] = field(default_factory=dict)
    # {what one scale covers: number of layers}
    granularity: Mapping[str, int] = field(default_factory=dict)
    # {layer name with block numbers as `*`: number of layers}
    quantized: Mapping[str, int] = field(default_factory=dict)
    # the same for the weight matrices that are not quantized, when others are
    kept: Mapping[str, int] = field(default_factory=dict)
    # {layer: what `.comfy_quant` or `_quantization_metadata` says of it}
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def formats(self) -> dict[str, int]:
        return dict(Counter(self.layers.values()))

    @property
    def gguf(self) -> bool:
        return not GGUF.keys().isdisjoint(self.formats)

    def in_w4a8(self, layer: str, columns: int) -> bool:
        """Tells whether a layer in GGUF's blocks becomes w4a8 where int8 does not fit the card."""
        return self.layers.get(layer) in GGUF_IN_W4A8 and columns % W4A8_ROTATION == 0

    def cannot_run(self, role: str) -> list[str]:
        """Says one sentence for every format that this package does not compute a part with."""
        sentences = []
        for name in sorted(self.formats):
            if name in REFUSALS:
                sentences.append(REFUSALS[name])
            elif name not in RUNNABLE | STORAGE_ONLY and (
                name not in PACKED | GGUF.keys() or role != "transformer"
            ):
                host = HOSTS.get(name)
                other = f", or load it with ComfyUI's nodes ({host})" if host else ""
                sentences.append(
                    f"{name} weights cannot run in this package, which computes in bf16, fp8 e4m3 "
                    f"and int8: get the model in one of these{other}."
                )
        return [*dict.fromkeys(sentences)]

    def as_dict(self) -> dict[str, Any]:
        return {
            "formats": self.formats,
            "granularity": dict(self.granularity),
            "quantized": dict(self.quantized),
            "kept": dict(self.kept),
        }


def find_quantization(
    tensors: Infos,
    metadata_layers: Mapping[str, Any],
    read_comfy_quant: Callable[[str], Mapping[str, Any]],
) -> Quantization:
    """Looks at every layer of one part."""
    formats: dict[str, str] = {}
    scales: Counter[str] = Counter()
    declared: dict[str, Mapping[str, Any]] = {}
    for layer, weight in _layers(tensors):
        if f"{layer}.comfy_quant" in tensors:
            declared[layer] = read_comfy_quant(f"{layer}.comfy_quant")
        elif layer in metadata_layers:
            declared[layer] = metadata_layers[layer]
        if layer in declared:
            found: str | None = _comfy_format(declared[layer])
        else:
            found = _format(tensors, layer, weight)
        if found is not None:
            formats[layer] = found
            scales[_granularity(tensors, layer, weight)] += 1
    matrices = [
        layer
        for layer, weight in _layers(tensors)
        if len(weight.shape) == 2 and layer not in formats
    ]
    return Quantization(
        layers=formats,
        granularity=dict(scales),
        quantized=_patterns(formats),
        kept=_patterns(matrices) if formats else {},
        settings=declared,
    )


def parse_attention(data: bytes) -> str:
    """Returns which attention a `.comfy_attention.config` asks for, of a list the first that runs;
    "" for none.

    Raises:
        ValueError: with the reason, when it cannot be read.
    """
    value = parse_json(data)
    names = []
    for config in value if isinstance(value, list) else [value]:
        if not isinstance(config, dict):
            raise ValueError(f"it has a JSON {type(config).__name__} instead of an object")
        name = config.get("attention") or ""
        if not isinstance(name, str):
            raise ValueError(f"its attention is {name!r:.40}, not a name")
        names.append(name)
    return ", else ".join(filter(None, names))


def computed_precision(formats: Iterable[str]) -> str | None:
    """Returns int8 or fp8, whichever most layers are computed in; None for neither.

    GGUF's blocks are rounded to int8 anew.
    """
    for name, _ in Counter(formats).most_common():
        # No tensor cores multiply GGUF's blocks.
        if name.startswith("int8") or name in PACKED or name in GGUF:
            return "int8"
        if name.startswith("fp8 e4m3"):
            return "fp8"
    return None


def count_parameters(tensors: Infos, quantization: Quantization) -> int:
    """Counts weights: scales and other descriptions are left out, weights that share a byte
    are counted one by one.
    """
    packed = {
        f"{layer}.{suffix}": PACKED_BITS[name]
        for layer, name in quantization.layers.items()
        if name in PACKED_BITS
        for suffix in ("weight", "qweight")
    }
    return sum(
        _weights_in(info, packed.get(name))
        for name, info in tensors.items()
        if not (AUXILIARY.search(name) or name.endswith(ATTENTION_CONFIG))
    )


def unpacked_shape(quantization: Quantization, name: str, info: TensorInfo) -> tuple[int, ...]:
    """Returns a tensor's shape with the weights that share a byte counted one by one."""
    bits = PACKED_BITS.get(quantization.layers.get(name.removesuffix(".weight"), ""))
    if bits is None or not name.endswith(".weight") or len(info.shape) != 2:
        return info.shape
    return info.shape[0], info.shape[1] * ELEMENT_BITS.get(info.dtype, bits) // bits


def _weights_in(info: TensorInfo, bits: int | None) -> int:
    whole = ELEMENT_BITS.get(info.dtype)
    return info.elements if bits is None or whole is None else info.elements * whole // bits


def _layers(tensors: Infos) -> Iterable[tuple[str, TensorInfo]]:
    for name, info in tensors.items():
        for suffix in (".weight", ".qweight"):
            if name.endswith(suffix):
                yield name.removesuffix(suffix), info


def _comfy_format(settings: Mapping[str, Any]) -> str:
    name = settings.get("format")
    if not isinstance(name, str) or name not in COMFY_FORMATS:
        return f"{FUTURE}{name}"
    params = settings.get("params")
    rotated = settings.get("convrot", params.get("convrot") if isinstance(params, dict) else False)
    return "int8 ConvRot" if name == FORMATS["int8"].marker and rotated else COMFY_FORMATS[name]


def _format(tensors: Infos, layer: str, weight: TensorInfo) -> str | None:
    def has(*suffixes: str) -> bool:
        return all(f"{layer}.{suffix}" in tensors for suffix in suffixes)

    if has("qweight", "wscales"):
        return "SVDQuant (nunchaku)" if has("proj_down") else "AWQ int4 (nunchaku)"
    if has("weight.absmax", "weight.quant_map"):
        return f"bitsandbytes {'nf4' if has('weight.quant_state.bitsandbytes__nf4') else '4-bit'}"
    if has("SCB"):
        return "bitsandbytes int8"
    if f"GGUF {weight.dtype}" in GGUF and len(weight.shape) == 2:  # others are expanded when read
        return f"GGUF {weight.dtype}"
    if weight.dtype in FP8_NAMES:
        if has("weight_scale_inv"):
            return f"{FP8_NAMES[weight.dtype]}, block-scaled"
        scaled = has("weight_scale") or has("scale_weight")
        return f"{FP8_NAMES[weight.dtype]}, {'scaled' if scaled else 'unscaled'}"
    if weight.dtype in ("I8", "U8") and has("weight_scale"):
        return "int8" if weight.dtype == "I8" else "packed 4-bit or 8-bit of an unnamed format"
    return None


def _granularity(tensors: Infos, layer: str, weight: TensorInfo) -> str:
    names = (
        "weight_scale",
        "scale_weight",
        "weight_scale_inv",
        "weight_s_rel",
        "wscales",
        "weight.absmax",
        "SCB",
    )
    name = next((name for name in names if f"{layer}.{name}" in tensors), None)
    if name is None:
        block = BLOCK_TYPES.get(weight.dtype)
        return f"blocks of {block.elements}" if block and block.elements > 1 else "no scale"
    scale = tensors[f"{layer}.{name}"]
    rows = weight.shape[0] if weight.shape else 1
    if name == "wscales":  # (groups, rows)
        return f"{scale.shape[0] if scale.shape else 1} groups a row"
    if name == "weight.absmax":
        return f"blocks of {_weights_in(weight, 4) // max(scale.elements, 1)}"
    if name == "weight_scale_inv" and len(scale.shape) == 2 and len(weight.shape) == 2:
        sides = (
            -(-full // max(part, 1)) for full, part in zip(weight.shape, scale.shape, strict=True)
        )
        return "blocks of {} x {}".format(*sides)
    if scale.elements == 1:
        return "per tensor"
    if scale.elements == rows:
        return "per row"
    return f"{scale.elements / max(rows, 1):g} groups a row"


def _patterns(layers: Iterable[str]) -> dict[str, int]:
    return dict(Counter(re.sub(r"(?<=\.)\d+(?=\.)", "*", layer, count=1) for layer in layers))
