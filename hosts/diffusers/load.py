"""Loads a Qwen-Image diffusers folder: by our streaming where it can, else by diffusers.

A model is built empty and compared with the file headers, so that a folder that does not fit is
refused in milliseconds; then system RAM never holds more than the model itself and one tensor.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from accelerate import init_empty_weights
from diffusers import (
    ConfigMixin,
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    ModelMixin,
)
from safetensors import safe_open
from transformers import PreTrainedModel, Qwen2Tokenizer
from transformers.processing_utils import ProcessorMixin

from ...errors import CheckpointError, SettingError, UnavailableError
from ...families.registry import in_diffusers, is_related
from ...loaders.checkpoint import sample_sigmas
from ...loaders.header import PLAIN_DTYPES, read_object
from ...loaders.quantize import check_finite
from ...loaders.shards import Shards, read_shards
from ...loaders.source import check_names, shapes_of
from ...machine.device import available_bytes, choose_device
from ...machine.memory import available_memory
from ...optimizations.patches import put
from ...spec.formats import BYTES_PER_WEIGHT
from ...spec.transformer import USUAL_SIDE
from .parts import PipelineParts
from .patch import Optimized, is_lossy_attention, optimize
from .settings import OffloadChoice, PrecisionChoice, choose_offload, choose_precision

logger = logging.getLogger(__name__)

PRECISION_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
# What decoding takes for a pixel in bf16, more than the other parts take for activations;
# measured on an H200 from 1024x1024 to 3072x3072 as allocated memory.
DECODE_BYTES_PER_PIXEL = 1259


def _check_dtypes(shards: Shards) -> None:
    for name, info in shards.tensors.items():
        # Quantized: without its scales a cast would give a wrong image and no error.
        if info.dtype not in PLAIN_DTYPES:
            raise CheckpointError(
                f"The tensor {name!r} is {info.dtype}, but diffusers takes only "
                f"{', '.join(PLAIN_DTYPES)}: use the unquantized folder.",
                shards.header_of(name).path,
            )


def _fill(model: ModelMixin, shards: Shards, dtype: torch.dtype, device: str) -> None:
    for header in shards.headers:
        with safe_open(header.path, framework="pt") as file:
            for name in header.tensors:
                tensor = file.get_tensor(name)  # a view of the mapped file
                check_finite(header.path, name, tensor)
                value = tensor.to(device=device, dtype=dtype)
                weight = torch.nn.Parameter(value, requires_grad=False)
                owner, _, leaf = name.rpartition(".")
                put(model.get_submodule(owner), **{leaf: weight})


@dataclass(frozen=True)
class LoadedPipeline:
    """Holds the parts of a Qwen-Image folder, ready to sample; one run at a time.

    Attributes:
        device: Where the parts run.
        offload: Whether they wait in system RAM for their turn, and why.
        optimized: What makes the transformer fast; None where diffusers' own code runs.
    """

    folder: Path
    family: PipelineParts
    transformer: ModelMixin
    vae: ModelMixin
    text_encoder: PreTrainedModel
    words: Qwen2Tokenizer | ProcessorMixin
    scheduler: FlowMatchEulerDiscreteScheduler
    device: str
    precision: PrecisionChoice
    offload: OffloadChoice
    optimized: Optimized | None = None

    def to_diffusers(
        self, scheduler: FlowMatchEulerDiscreteScheduler | None = None
    ) -> DiffusionPipeline:
        """Makes diffusers' pipeline of these parts; its scheduler has state, and is its own."""
        pipeline = self.family.pipeline(
            transformer=self.transformer,
            vae=self.vae,
            text_encoder=self.text_encoder,
            **{self.family.words: self.words},
            scheduler=scheduler
            or FlowMatchEulerDiscreteScheduler.from_config(self.scheduler.config),
        )
        if self.offload.name == "model":
            pipeline.enable_model_cpu_offload(device=self.device)
        return pipeline


def load_pipeline(
    folder: str | os.PathLike[str],
    *,
    precision: str = "auto",
    device: str = "auto",
    optimized: bool | None = False,
    attention: str | None = None,
    offload: str = "none",
) -> LoadedPipeline:
    """Loads a text-to-image Qwen-Image folder; all file headers are checked before any weight.

    Args:
        folder: a diffusers folder (`model_index.json`, `transformer/`, `vae/`, ...), weights single
            or sharded.
        precision: `auto`, `bf16` or `fp32`.
        device: `auto`, `cpu`, `cuda` or `cuda:N`.
        optimized: whether `patch.optimize` makes the transformer fast; None on a card, or where an
            attention is named.
        attention: of the optimized transformer, as `patch.optimize` takes it; None for `auto`.
        offload: `model` has diffusers move each part to the card for its turn, `none` has all of
            them there, `auto` takes `model` where they do not fit together.

    Raises:
        CheckpointError: a file is missing, damaged, or of another model.
        SettingError: the precision, the device, the attention or the offload is unknown or cannot
            be had here.
        UnavailableError: the card is not there, the weights do not fit in its memory or the host's,
            or the attention cannot run there.
    """
    if attention is not None and optimized is False:
        raise SettingError(
            f"attention {attention!r} needs the optimized transformer, which is off: switch it "
            "on, or leave attention out."
        )
    folder = Path(folder)
    family = _family(folder)
    shards = {part: read_shards(folder / part) for part in (*family.models, "text_encoder")}
    where = choose_device(device)
    parameters = {
        part: sum(info.elements for info in found.tensors.values())
        for part, found in shards.items()
    }
    free = available_bytes(where)
    choice = choose_precision(
        precision, where, parameters=sum(parameters.values()), available_bytes=free
    )
    size = BYTES_PER_WEIGHT[choice.name]

    chosen = choose_offload(
        offload,
        what=f"{folder} in {choice.name}",
        device=where,
        weights={part: count * size for part, count in parameters.items()},
        work=DECODE_BYTES_PER_PIXEL * USUAL_SIDE**2 * size // 2,
        free=free,
        host_free=available_memory(),
    )
    logger.info("offload %s: %s", chosen.name, chosen.reason)
    if optimized is None:
        optimized = where != "cpu" or attention is not None
    attention = (attention or "auto") if optimized else None
    return _load_parts(folder, family, shards, choice, where, attention, chosen)


def _load_parts(
    folder: Path,
    family: PipelineParts,
    shards: Mapping[str, Shards],
    choice: PrecisionChoice,
    device: str,
    attention: str | None,
    offload: OffloadChoice,
) -> LoadedPipeline:
    dtype = PRECISION_DTYPES[choice.name]
    # What is cheap to check comes first: a wrong folder is then refused before minutes of reading.
    words = family.load_words(folder / family.words)
    scheduler_config = _config(folder, "scheduler", FlowMatchEulerDiscreteScheduler)
    # Weights alone are empty: QwenEmbedRope keeps its complex tables as plain attributes, which no
    # checkpoint would fill again.
    with init_empty_weights(include_buffers=False):
        models = {
            part: model_class.from_config(_config(folder, part, model_class))
            for part, model_class in family.models.items()
        }
    for each in shards.values():
        _check_dtypes(each)
    for part, model in models.items():
        found = {name: info.shape for name, info in shards[part].tensors.items()}
        check_names(shards[part].path, found, shapes_of(model), f"the {part} of its config.json")
    if attention is not None:
        is_lossy_attention(models["transformer"], attention, torch.device(device), dtype)
    place = device if offload.name == "none" else "cpu"
    text_encoder = load_text_encoder(
        family.text_encoder, folder / "text_encoder", dtype=dtype, device=place
    )
    for part, model in models.items():
        _fill(model, shards[part], dtype, place)
        model.eval()
    transformer = models["transformer"]
    return LoadedPipeline(
        folder=folder,
        family=family,
        **models,
        text_encoder=text_encoder,
        words=words,
        scheduler=FlowMatchEulerDiscreteScheduler.from_config(scheduler_config),
        device=device,
        precision=choice,
        offload=offload,
        optimized=None if attention is None else optimize(transformer, attention=attention),
    )


def _config(folder: Path, part: str, expected: type[ConfigMixin]) -> dict[str, object]:
    path = folder / part / expected.config_name
    config = read_object(path, f"the {part} config")
    if config.get("_class_name") != expected.__name__:
        raise CheckpointError(
            f"This is a {config.get('_class_name')}, not a {expected.__name__}: use a Qwen-Image "
            "folder.",
            path,
        )
    return config


def _family(folder: Path) -> PipelineParts:
    path = folder / "model_index.json"
    if not os.path.isfile(path):
        raise CheckpointError(
            f"{path.name} is missing, so this is not a diffusers folder: name the folder that has "
            f"{path.name} and the parts.",
            folder,
        )
    index = read_object(path, "the list of a diffusers folder's parts")
    name = str(index.get("_class_name"))
    if module := in_diffusers().get(name):
        try:
            family = module.parts()
        except ImportError as error:
            raise UnavailableError(
                f"This is a {name}, which needs diffusers 0.42 and transformers 4.57 or newer: "
                'run pip install --upgrade "diffusers>=0.42" "transformers>=4.57".',
                folder,
            ) from error
        sigmas = sample_sigmas(index, path)
        if not sigmas:
            return family
        return replace(family, arguments={**family.arguments, "sigmas": sigmas})
    known = " or ".join(in_diffusers())
    if is_related(name):
        raise CheckpointError(
            f"This is a {name}, but only text to image ({known}) runs here: use a Qwen-Image or "
            "Qwen-Image-2512 folder, or the ComfyUI nodes.",
            folder,
        )
    raise CheckpointError(f"This is a {name}, not a {known}: use a Qwen-Image folder.", folder)


# The prompt side through transformers.
#
# It fills what a checkpoint lacks with random numbers and a tokenizer folder without files with an
# empty vocabulary, and only logs it. Both would generate a wrong image, so both are errors here.


def load_text_encoder(
    model_class: type[PreTrainedModel], folder: Path, *, dtype: torch.dtype, device: str
) -> PreTrainedModel:
    with _quiet_report():
        model, report = model_class.from_pretrained(
            folder,
            dtype=dtype,
            device_map=device,
            local_files_only=True,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # so that the report has them
            output_loading_info=True,
        )
    mismatched = {name for name, *_ in report["mismatched_keys"]}
    faults = (
        ("lacks the tensor", report["missing_keys"]),
        ("has no place in its config.json for the tensor", report["unexpected_keys"]),
        ("has another shape than in its config.json for the tensor", mismatched),
    )
    for fault, names in faults:
        if names:
            raise CheckpointError(
                f"The text encoder {fault} {min(names)!r} ({len(names)} in all): download the "
                "folder again, unquantized.",
                folder,
            )
    for name, weight in model.named_parameters():
        check_finite(folder, name, weight)
    return model


@contextmanager
def _quiet_report() -> Iterator[None]:
    # The same facts become our one sentence.
    theirs = logging.getLogger("transformers.modeling_utils")
    theirs.addFilter(_is_no_report)
    try:
        yield
    finally:
        theirs.removeFilter(_is_no_report)


def _is_no_report(record: logging.LogRecord) -> bool:
    message = record.getMessage()
    return "LOAD REPORT" not in message and "checkpoint seem corrupted" not in message
