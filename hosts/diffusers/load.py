"""What one generation is asked to do, checked before anything heavy is imported or loaded."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from diffusers import (
    AutoencoderKLQwenImage,
    ConfigMixin,
    FlowMatchEulerDiscreteScheduler,
    ModelMixin,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)
from safetensors import safe_open
from transformers import Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

from ...errors import CheckpointError, SettingError
from ...loaders.convert import check_finite
from ...loaders.header import read_object
from ...loaders.precision import BYTES_PER_WEIGHT, PrecisionChoice, choose_precision
from ...loaders.shards import Shards, read_shards
from ...machine.memory import available_memory
from ...optimizations.embedding_cache import EmbeddingCache
from ...spec import USUAL_SIDE
from .offload import (
    NONE,
    OffloadChoice,
    PlacedPipeline,
    Placement,
    available_bytes,
    choose_device,
    choose_offload,
    device_of,
    part_activations,
    transformer_shape,
)
from .patch import Optimized, check_attention, optimize
from .text_encoder import load_text_encoder, load_tokenizer

SIZE_STEP = 16  # 8 from the VAE times 2 from the transformer's patches
MAX_SEED = 2**63 - 1


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of one generation.

    Attributes:
        width, height: pixels, divisible by 16.
        cfg: classifier-free guidance scale; at most 1 switches it off and halves the work.
        seed: image i of the batch starts from the noise of `seed + i`.

    Raises:
        SettingError: a value breaks its rule.
    """

    prompt: str
    negative_prompt: str = " "
    width: int
    height: int
    steps: int = 20
    cfg: float = 4.0
    seed: int = 0
    batch: int = 1

    def __post_init__(self) -> None:
        _check_text("prompt", self.prompt)
        _check_text("negative_prompt", self.negative_prompt)
        _check_size("width", self.width)
        _check_size("height", self.height)
        _check_count("steps", self.steps)
        _check_count("batch", self.batch)
        if not isinstance(self.seed, int) or not 0 <= self.seed <= MAX_SEED:
            raise SettingError(
                f"seed must be a whole number from 0 to 2**63 - 1, got {self.seed!r}."
            )
        if not isinstance(self.cfg, int | float) or not math.isfinite(self.cfg) or self.cfg < 0:
            raise SettingError(
                f"cfg must be a finite number of at least 0, got {self.cfg!r}: use 4.0, or 1 to "
                "switch guidance off."
            )


def _check_text(name: str, value: str) -> None:
    if not isinstance(value, str):
        raise SettingError(f"{name} must be one string, got {value!r}.")
    try:
        value.encode()
    except UnicodeEncodeError:
        # A terminal that is not UTF-8 hands over lone surrogates, which the tokenizer cannot take.
        raise SettingError(
            f"{name} is not valid Unicode, got {value!r}: type it in UTF-8."
        ) from None


def _check_size(name: str, value: int) -> None:
    if isinstance(value, int) and value >= SIZE_STEP and value % SIZE_STEP == 0:
        return
    rule = f"{name} must be a whole number of pixels divisible by {SIZE_STEP}, at least {SIZE_STEP}"
    nearest = (
        max(SIZE_STEP, SIZE_STEP * round(value / SIZE_STEP)) if isinstance(value, int) else 1024
    )
    raise SettingError(f"{rule}, got {value!r}: use {nearest}.")


def _check_count(name: str, value: int) -> None:
    if not isinstance(value, int) or value < 1:
        raise SettingError(
            f"{name} must be a whole number of at least 1, got {value!r}: use 1 or more."
        )


# Fills a diffusers model from safetensors shards, one tensor at a time.
#
# The model is built empty and compared with the file headers, so that a folder that does not fit is
# refused in milliseconds; then host memory never holds more than the model itself and one tensor.

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


# Loads a Qwen-Image diffusers folder: our streaming where it can be, theirs elsewhere.

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
