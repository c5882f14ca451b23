"""Loads a Qwen-Image diffusers folder: our streaming where it can be, theirs elsewhere."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from diffusers import (
    AutoencoderKLQwenImage,
    ConfigMixin,
    FlowMatchEulerDiscreteScheduler,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)
from transformers import Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

from ...errors import CheckpointError, SettingError
from ...loaders.precision import BYTES_PER_WEIGHT, PrecisionChoice, choose_precision
from ...loaders.shards import Shards, read_shards
from ...loaders.strict_json import read_object
from ...optimizations.embedding_cache import EmbeddingCache
from ...optimizations.resources import available_memory
from ...planning.memory import USUAL_SIDE
from .device import available_bytes, choose_device
from .offload import NONE, OffloadChoice, choose_offload, part_activations, transformer_shape
from .patch import Optimized, check_attention, optimize
from .placement import PlacedPipeline, Placement, device_of
from .settings import Settings
from .text_encoder import load_text_encoder, load_tokenizer
from .weights import build_empty, check_dtypes, check_fits, fill, stream_tensors

logger = logging.getLogger(__name__)

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
MODEL_CLASSES = {"transformer": QwenImageTransformer2DModel, "vae": AutoencoderKLQwenImage}
WEIGHT_FOLDERS = (*MODEL_CLASSES, "text_encoder")
PIPELINE_CLASS = "QwenImagePipeline"


@dataclass(frozen=True)
class LoadedPipeline:
    """The parts of a Qwen-Image folder, ready to sample; one run at a time.

    Attributes:
        device: Where the parts run.
        placement: Where they are, and whose turn it is.
        optimized: What makes the transformer fast; None where diffusers' own code runs.
        embeddings: Of the last prompts. Who changes the text encoder's weights clears them.
    """

    folder: Path
    transformer: QwenImageTransformer2DModel
    vae: AutoencoderKLQwenImage
    text_encoder: Qwen2_5_VLForConditionalGeneration
    tokenizer: Qwen2Tokenizer
    scheduler: FlowMatchEulerDiscreteScheduler
    device: str
    precision: PrecisionChoice
    placement: Placement
    optimized: Optimized | None = None
    embeddings: EmbeddingCache = field(default_factory=EmbeddingCache)

    def to_diffusers(
        self, scheduler: FlowMatchEulerDiscreteScheduler | None = None
    ) -> QwenImagePipeline:
        """diffusers' pipeline over these parts; its scheduler, which has state, is its own.

        It moves no part: with an offload only `sample.generate` runs all of it.
        """
        offloaded = self.placement.choice.name != NONE
        pipeline = (PlacedPipeline if offloaded else QwenImagePipeline)(
            transformer=self.transformer,
            vae=self.vae,
            text_encoder=self.text_encoder,
            tokenizer=self.tokenizer,
            scheduler=scheduler
            or FlowMatchEulerDiscreteScheduler.from_config(self.scheduler.config),
        )
        if offloaded:
            pipeline.run_device = torch.device(self.device)
        return pipeline


def load_pipeline(
    folder: str | os.PathLike[str],
    *,
    precision: str = "auto",
    device: str = "auto",
    optimized: bool | None = False,
    attention: str | None = None,
    offload: str = NONE,
    settings: Settings | None = None,
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
        offload: which parts wait in host memory while another runs: `none`, `text-encoder`,
            `model`, or `auto` for the first of them that fits.
        settings: of the largest run that `auto` leaves room for; None for an image of 1328x1328.

    Raises:
        CheckpointError: a file is missing, damaged, or of another model.
        SettingError: the precision, the device, the attention or the offload is unknown or cannot
            be had here.
        UnavailableError: the card is not there, the weights do not fit in its memory or the host's,
            or the attention cannot run there.
    """
    if attention is not None and optimized is False:
        raise SettingError(
            f"attention {attention!r} is one of the optimized transformer's, which is off: switch "
            "it on, or name no attention."
        )
    folder = Path(folder)
    _check_pipeline_class(folder)
    shards = {part: read_shards(folder / part) for part in WEIGHT_FOLDERS}
    where = choose_device(device)
    parameters = {
        part: sum(info.elements for info in found.tensors.values())
        for part, found in shards.items()
    }
    free = available_bytes(where)
    choice = choose_precision(
        precision, where, parameters=sum(parameters.values()), available_bytes=free
    )
    if choice.name not in DTYPES:
        raise SettingError(
            f"precision {choice.name!r} is not available with diffusers loading yet: choose auto, "
            f"{', '.join(DTYPES)}."
        )
    size = BYTES_PER_WEIGHT[choice.name]

    def place(transformer: QwenImageTransformer2DModel) -> OffloadChoice:
        return choose_offload(
            offload,
            what=f"{folder} in {choice.name}",
            device=where,
            weights={part: count * size for part, count in parameters.items()},
            activations=part_activations(
                transformer_shape(transformer.config),
                width=settings.width if settings else USUAL_SIDE,
                height=settings.height if settings else USUAL_SIDE,
                batch=settings.batch if settings else 1,
                itemsize=size,
            ),
            free=free,
            host_free=available_memory(),
        )

    if optimized is None:
        optimized = where != "cpu" or attention is not None
    attention = (attention or "auto") if optimized else None
    return _load_parts(folder, shards, choice, where, attention, place)


def _load_parts(
    folder: Path,
    shards: Mapping[str, Shards],
    choice: PrecisionChoice,
    device: str,
    attention: str | None,
    place: Callable[[QwenImageTransformer2DModel], OffloadChoice],
) -> LoadedPipeline:
    """Reads what `load_pipeline` has checked; without an attention nothing is optimized."""
    dtype = DTYPES[choice.name]
    # What is cheap to check comes first: a wrong folder is then refused before minutes of reading.
    tokenizer = load_tokenizer(folder / "tokenizer")
    scheduler_config = _config(folder, "scheduler", FlowMatchEulerDiscreteScheduler)
    models = {
        part: build_empty(model_class, _config(folder, part, model_class))
        for part, model_class in MODEL_CLASSES.items()
    }
    for part in shards.values():
        check_dtypes(part)
    for part, model in models.items():
        check_fits(model, shards[part])
    if attention is not None:
        check_attention(models["transformer"], attention, torch.device(device), dtype)
    offload = place(models["transformer"])
    logger.info("offload %s: %s", offload.name, offload.reason)
    text_encoder = load_text_encoder(
        folder / "text_encoder", dtype=dtype, device=device_of("text_encoder", offload, device)
    )
    for part, model in models.items():
        there = device_of(part, offload, device)
        fill(model, stream_tensors(shards[part]), dtype=dtype, device=there)
        model.eval()
    transformer = models["transformer"]
    return LoadedPipeline(
        folder=folder,
        **models,
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        scheduler=FlowMatchEulerDiscreteScheduler.from_config(scheduler_config),
        device=device,
        precision=choice,
        placement=Placement({**models, "text_encoder": text_encoder}, offload, device),
        optimized=None if attention is None else optimize(transformer, attention=attention),
    )


def _config(folder: Path, part: str, expected: type[ConfigMixin]) -> dict[str, object]:
    path = folder / part / expected.config_name
    config = read_object(path, f"the {part} config")
    if config.get("_class_name") != expected.__name__:
        raise CheckpointError(
            f"{path} describes a {config.get('_class_name')} and a {expected.__name__} must be "
            "there: use a Qwen-Image folder."
        )
    return config


def _check_pipeline_class(folder: Path) -> None:
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder} is not a folder: name a diffusers folder, with model_index.json in it."
        )
    path = folder / "model_index.json"
    name = str(read_object(path, "the list of a diffusers folder's parts").get("_class_name"))
    if name == PIPELINE_CLASS:
        return
    if name.startswith(("QwenImageEdit", "QwenImageLayered")):
        raise CheckpointError(
            f"{path} is of a {name}, and only text-to-image ({PIPELINE_CLASS}) is loaded so far: "
            "use a Qwen-Image or Qwen-Image-2512 folder."
        )
    raise CheckpointError(
        f"{path} is of a {name}, not of a {PIPELINE_CLASS}: use a Qwen-Image folder."
    )
