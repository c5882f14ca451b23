"""What a run takes of a disk: model files on the volume, software on the container.

Sizes are decimal, GB, as disks and downloads are sold.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ..spec import GB, QUANTIZED
from .bytes import text_encoder_bytes, weight_bytes
from .phases import transformer_bytes, vae_bytes
from .request import TEXT_ENCODER, TRANSFORMER, VAE, RunRequest, Setting

CARD_MEMORY = "card memory"
LM_HEAD_BYTES = 2 * 152_064 * 3584  # in the published text encoder; encoding never reads it
# Software, predicted but for torch's environment: 7.8 GB with torch 2.11.0+cu130 on a machine that
# was measured.
CONTAINER = {
    "operating system and CUDA base image": 4 * GB,
    "Python, torch and its CUDA libraries": 8 * GB,
    "ComfyUI and its packages": 2 * GB,
    "package caches while installing": 4 * GB,
    "outputs, logs and compiled kernels": 2 * GB,
}


class Advice(NamedTuple):
    """A figure that guides for rented machines give, beside what is needed."""

    what: str
    advised_bytes: int
    needed_bytes: int
    why: str


@dataclass(frozen=True)
class Disk:
    """What a disk holds for a run, in bytes.

    Attributes:
        files: The model files that a run reads.
        container: Software, and what a run writes.
        once: Files that are there only until the first run is prepared.
    """

    files: Mapping[str, int]
    container: Mapping[str, int]
    once: Mapping[str, int]

    @property
    def files_bytes(self) -> int:
        return sum(self.files.values())

    @property
    def transformer_bytes(self) -> int:
        """Of its file, which comes first."""
        return next(iter(self.files.values()))

    @property
    def container_bytes(self) -> int:
        return sum(self.container.values())

    @property
    def total_bytes(self) -> int:
        """Of every run; `once` comes on top, the first time."""
        return self.files_bytes + self.container_bytes

    @property
    def most_bytes(self) -> int:
        """With what is there once."""
        return self.total_bytes + sum(self.once.values())


def disk(request: RunRequest, setting: Setting, *, quantized_file: bool = False) -> Disk:
    """What a run needs on disk.

    Args:
        quantized_file: whether fp8 and int8 come from a file that SaveQuantized or
            `qwen-l40s quantize` has written, for which the bf16 file is there once; else the bf16
            file is read and quantized on each load.
    """
    known = dict(request.parts.file_bytes)
    files, once = _transformer_file(request, known), {}
    if quantized_file and made_on_load(request, setting):
        name = f"{request.family} transformer, {setting.precision}, written once"
        files, once = {name: transformer_bytes(request, setting).total}, files
    # As published, with lm_head; quantized on load from it.
    text = request.parts.text_encoder_bytes or text_encoder_bytes(request, "bf16") + LM_HEAD_BYTES
    text, vae = known.get(TEXT_ENCODER, text), known.get(VAE, vae_bytes(request))
    files = {**files, "text encoder": text, "VAE": vae}
    if request.controlnet_bytes:
        files["ControlNet"] = request.controlnet_bytes
    if loras := _lora_files(request):
        files["LoRAs"] = loras
    return Disk(files, CONTAINER, once)


def made_on_load(request: RunRequest, setting: Setting) -> bool:
    """Whether the transformer is quantized on each load, from a file that is not."""
    return setting.precision in QUANTIZED and request.parts.transformer_bytes is None


def against_guides(found: Disk, setting: Setting, card_bytes: int) -> tuple[Advice, ...]:
    """What guides for rented machines advise, and what is needed.

    They add up a container of 40 GB, a volume of 80 GB, and 88 GB of card memory for bf16 or 44 GB
    for 8 bits: 8 to 18 GB of it activations, of which a step takes half a gigabyte.

    Args:
        card_bytes: of the worst phase, with everything that is on the card.
    """
    quantized = setting.precision in QUANTIZED
    return (
        Advice(
            "container",
            40 * GB,
            found.container_bytes,
            "torch's libraries are counted once, and installing leaves no gigabytes behind",
        ),
        Advice(
            "volume",
            80 * GB,
            found.files_bytes,
            "model files are read where they lie: no second cache, and no activations on disk",
        ),
        Advice(
            CARD_MEMORY,
            44 * GB if quantized else 88 * GB,
            card_bytes,
            "activations are counted and measured, and the modulation can wait in host memory",
        ),
    )


def _transformer_file(request: RunRequest, known: Mapping[str, int]) -> dict[str, int]:
    """{name: bytes} of the file that is read: as stored, as held, or as published."""
    held = request.parts.transformer_bytes
    if (count := known.get(TRANSFORMER, held)) is not None:
        return {f"{request.family} transformer": count}
    return {f"{request.family} transformer, bf16": weight_bytes(request.transformer, "bf16").total}


def _lora_files(request: RunRequest) -> int:
    """Of rank x (K + N) in bf16 for every layer that can have one, whether merged or beside."""
    layers = request.transformer.quantizable_layers().values()
    return 2 * request.loras.count * request.loras.rank * sum(map(sum, layers))
