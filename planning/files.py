"""Counts a run's disk space (in decimal GB), its system RAM and the time of its load."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ..spec.formats import GB, GIB, QUANTIZED
from ..spec.sizes import RING_BYTES, STAGING_BYTES
from .bytes import BF16, FP32, text_encoder_bytes, weight_bytes
from .phases import Range, transformer_bytes, vae_bytes
from .plan import PlanOption
from .rates import Rates
from .request import ON_PROCESSOR, TEXT_ENCODER, TRANSFORMER, VAE, RunRequest, Setting

# Software, and what a run writes: in GB a CUDA base image 4, torch 8 (7.8 measured), ComfyUI 2,
# package caches 4, outputs and compiled kernels 2.
SOFTWARE_BYTES = 20 * GB


def model_files(request: RunRequest, setting: Setting) -> dict[str, int]:
    """Counts {model file that a run reads: bytes on the disk}, the transformer's first."""
    known = dict(request.parts.file_bytes)
    transformer = _transformer_file(request, setting.precision, known)
    # As published in its precision, else quantized on load from bf16.
    encoders = request.member.text_encoder.files
    file = encoders.get(setting.text_encoder) or encoders.get("bf16")
    text = file.bytes if file else text_encoder_bytes(request, "bf16")
    text = known.get(TEXT_ENCODER, request.parts.text_encoder_bytes or text)
    vae = known.get(VAE, vae_bytes(request))
    files = {f"{request.family} transformer": transformer, "text encoder": text, "VAE": vae}
    if request.controlnet_bytes:
        files["ControlNet"] = request.controlnet_bytes
    if request.loras.count:  # rank x (K + N) in bf16 for every layer that can have one
        layers = request.transformer.quantizable_layers().values()
        files["LoRAs"] = BF16 * request.loras.count * request.loras.rank * sum(map(sum, layers))
    return files


def made_on_load(request: RunRequest, setting: Setting) -> bool:
    """Tells whether the transformer is quantized on each load, from a file that is not."""
    ready = request.parts.transformer_bytes is not None and not request.parts.gguf
    return setting.precision in QUANTIZED and not ready


def stored_precision(request: RunRequest, precision: str) -> str:
    """Names what the file holds of which a load makes a precision."""
    files, file = request.member.files, request.member.file(precision)
    return next(
        (name for name in files if files[name] == file and not request.parts.at_hand), "bf16"
    )


def _transformer_file(request: RunRequest, precision: str, known: Mapping[str, int]) -> int:
    # Of the file that is read: as stored, as loaded, or as published.
    loaded, file = request.parts.transformer_bytes, request.member.file(precision)
    if (count := known.get(TRANSFORMER, loaded)) is None:
        shape = request.parts.transformer
        count = weight_bytes(shape or request.transformer, "bf16").total
        count = file.bytes if file and shape is None else count
    return count


# What waits in system RAM.

# Python, torch with CUDA, ComfyUI and its nodes. Predicted.
PROGRAM_BYTES = 3 * GIB
# An image as it comes from the VAE, and as it is saved.
IMAGE_COPIES = 2


def host_memory(request: RunRequest, setting: Setting, *, moved_bytes: int = 0) -> dict[str, int]:
    """Counts {what it is for: bytes of system RAM}: copies, and what streams to the card in each
    forward pass, `moved_bytes`, unless it is a copy already. The system maps and caches files.
    """
    weights = transformer_bytes(request, setting)
    parts = {"ComfyUI, torch and CUDA": PROGRAM_BYTES}
    copied = 0
    if made_on_load(request, setting):
        counted = weight_bytes(request.transformer, setting.precision)
        copied = 0 if setting.packed else counted.gemm + counted.scales
        parts["transformer, quantized on load"] = copied
        parts["staging while it is quantized"] = STAGING_BYTES
    if request.parts.gguf:
        others = max(0, weights.total - copied)
        parts["transformer, expanded from GGUF"] = others
        copied += others
    elif not (copied or setting.packed):
        parts["transformer, converted on load"] = copied = request.parts.converted
    if setting.off_card:
        parts["pinned ring"] = RING_BYTES
    if setting.text_encoder_place == ON_PROCESSOR:
        parts["text encoder on the CPU"] = text_encoder_bytes(request, setting.text_encoder)
    elif encoder_made_on_load(request, setting):
        parts["text encoder, quantized on load"] = request.member.text_encoder.quantized_bytes
    parts["transformer that is moved in each pass"] = max(0, moved_bytes - copied)
    pixels = request.batch * request.frames * request.width * request.height
    parts["images"] = IMAGE_COPIES * FP32 * request.vae.image_channels * pixels
    return {name: count for name, count in parts.items() if count}


def encoder_made_on_load(request: RunRequest, setting: Setting) -> bool:
    loaded = request.parts.text_encoder_bytes
    stored = dict(request.parts.file_bytes).get(TEXT_ENCODER, loaded)
    published = loaded is None and setting.text_encoder in request.member.text_encoder.files
    ready = published or (loaded is not None and loaded == stored)
    return setting.text_encoder in QUANTIZED and not ready


# How long loads take.

# Bytes/s that the NVMe disk of a rented machine gives one reader; predicted.
DISK = 3e9
# A mapped file that is not in memory is read in the order in which it is asked for: 1.04 times as
# long as from end to end in bf16, 1.3 in int8 (a disk of 2.1 GB/s at an H200).
MAPPED = 1.3
# Seconds a byte on the host of an H200, of whole files, `loads` and `first_prompts` of
# `measured.json`: of a file in memory in full precision, or quantized; and from there to the card,
# where ComfyUI maps and copies pages one by one, so that the link is not what limits it. A file of
# 27.3 GB in int8 that is only mapped takes 4.5 s with that way, 1.0 more than its short end.
READ, READ_QUANTIZED = Range(1.47 / 57.7e9, 0.48 / 6.88e9), Range(1.0 / 27.3e9, 2.6 / 27.3e9)
TO_CARD = Range(5.2 / 40.9e9, 2.9 / 15.5e9)
# Of `first_prompts` alone. Of a transformer, which this package brings past ComfyUI's pinned
# copies, in bf16 or in 8 bits: how much longer sampling takes than in the next prompt, with its
# checks and choices (the next takes 1.03 s in bf16, 0.87 in int8, and in fp8 0.8, predicted from
# int8's). And how much longer the load takes of 27.2 GB of bf16 that become fp8 or int8.
BRINGING, BRINGING_8_BITS = Range(2.8 / 40.9e9, 2.8 / 40.9e9), Range(2.6 / 27.3e9, 3.4 / 27.3e9)
QUANTIZING = Range(2.7 / 27.2e9, 2.8 / 27.2e9)
# ComfyUI until it answers: interpreter, torch, its nodes and this package (eight starts on the
# host of an H200, files in its page cache). A machine's first run also compiles the kernels, which
# takes some seconds more.
START = Range(12.6, 17.4)


class Load(NamedTuple):
    """The work of a load, in bytes."""

    read: int  # of the files that hold full precision
    read_quantized: int = 0  # of the files that are quantized already
    quantized: int = 0  # in bf16, of the weights that are quantized on load
    brought: int = 0  # of the transformer's weights that go to the card, in full precision
    brought_8_bits: int = 0  # of those of a transformer in 8 bits, as loaded
    to_card: int = 0  # as loaded, of the others


def load_of(option: PlanOption) -> Load:
    request, setting, phase = option.request, option.setting, option.phases["load"]
    files = model_files(request, setting)
    made = made_on_load(request, setting)
    eight_bits = setting.precision in QUANTIZED
    ready = next(iter(files.values())) if eight_bits and not made else 0
    quantized = weight_bytes(request.transformer, "bf16").gemm if made else 0
    if encoder_made_on_load(request, setting):
        encoder = request.member.text_encoder
        quantized += BF16 * encoder.layers * sum(n * k for n, k in encoder.linears)
    return Load(
        read=sum(files.values()) - ready,
        read_quantized=ready,
        quantized=quantized,
        brought=0 if eight_bits else phase.weights,
        brought_8_bits=phase.weights if eight_bits else 0,
        to_card=sum(phase.resident.values()),
    )


def load_seconds(load: Load, rates: Rates, *, cold: bool = False) -> Range:
    """Predicts the time of weights from their files to where they stay. A `cold` file takes at
    least the disk's time, and at most that and the way from memory, without dynamic VRAM.
    """
    memory = READ.times(load.read) + READ_QUANTIZED.times(load.read_quantized)
    memory += _linked(QUANTIZING, rates).times(load.quantized)
    memory += _linked(BRINGING, rates).times(load.brought)
    memory += _linked(BRINGING_8_BITS, rates).times(load.brought_8_bits)
    memory += _linked(TO_CARD, rates).times(load.to_card)
    if not cold:
        return memory
    disk = (load.read + load.read_quantized) / DISK
    return Range(max(disk, memory.low), MAPPED * disk + memory.high)


def _linked(per_byte: Range, rates: Rates) -> Range:
    # No shorter than a byte's way over the link.
    return Range(*(max(seconds, 1 / rates.pcie) for seconds in per_byte))
