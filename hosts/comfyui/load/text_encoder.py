"""Loads a text encoder of Qwen-Image into a ComfyUI CLIP, with a choice of its place. By default
ComfyUI moves it to the card before each encoding, and leaves it there until something else needs
the room.
"""

from __future__ import annotations

import copy
import os
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import comfy.memory_management
import comfy.model_management
import comfy.model_patcher
import comfy.sd
import comfy.utils
import folder_paths
import torch

from ....errors import CheckpointError
from ....families import registry
from ....families.registry import text_encoder_titled, text_encoders
from ....loaders.source import Source, open_source
from ....optimizations.patches import put, switched
from ....planning.options import label_of, labelled
from ....planning.request import DROPPED, ON_PROCESSOR
from ....spec.formats import MULTIPLIED, QUANTIZED, format_gib
from ....spec.sizes import STAGING_BYTES
from ....spec.transformer import ON_CARD
from ...loading import AS_STORED, LOADER_PRECISIONS, LoadDecision, check_known
from ..encode import (
    ARITHMETIC,
    REUSE,
    STOCK,
    EncodeSettings,
    check_arithmetic,
    encoder_for,
)
from ..prepared import prepare_once
from ..record import MeasuredPhase, harmless, phase, running
from .encoder_kind import (
    EncoderKind,
    FolderTokenizer,
    find_tokenizer,
    text_only_class,
    tokenizer_class,
)
from .plan import check_host_memory
from .report import LoadReport
from .text_encoder_file import (
    LANGUAGE_LINEAR,
    VISION,
    TextEncoderLayout,
    TextEncoderTensors,
    read_layout,
    text_encoder_tensors,
)
from .weights import map_tensors

SAME = "the CLIP is left unchanged."
WHILE_THERE_IS_ROOM = "stays in VRAM while there is room"
# {placement, of `TEXT_ENCODER_PLACEMENTS`: what the report says of it}
PLACEMENTS = {
    "auto": WHILE_THERE_IS_ROOM,
    ON_CARD: WHILE_THERE_IS_ROOM,
    ON_PROCESSOR: "runs on the CPU and takes no VRAM",
    DROPPED: "leaves VRAM after each encoding, so that the transformer has all of it",
}


def device_options(placement: str) -> dict[str, torch.device]:
    """Returns what ComfyUI takes in `model_options` for a placement."""
    check_known("placement", placement, PLACEMENTS)
    cpu = torch.device("cpu")
    if placement == ON_PROCESSOR:
        return {"load_device": cpu, "offload_device": cpu}
    # Without these ComfyUI may read the weights onto the card at once, and --gpu-only keeps them.
    return {"offload_device": cpu, "initial_device": cpu} if placement == DROPPED else {}


class PlacedClip(comfy.sd.CLIP):
    """ComfyUI's CLIP with a placement, a key of `PLACEMENTS`, and how it encodes."""

    placement: str
    settings: EncodeSettings
    _run: MeasuredPhase | None = None  # of the one encoding for which this is a copy

    @classmethod
    def over(
        cls, clip: comfy.sd.CLIP, placement: str, settings: EncodeSettings = REUSE
    ) -> PlacedClip:
        placed = cls(no_init=True)
        placed.__dict__.update(vars(clip))
        placed.placement, placed.settings = placement, settings
        return placed

    def clone(self, disable_dynamic: bool = False) -> PlacedClip:
        made = super().clone(disable_dynamic=disable_dynamic)
        return self.over(made, self.placement, self.settings)

    def encode_from_tokens(
        self, tokens: Any, return_pooled: bool | str = False, return_dict: bool = False
    ) -> Any:
        try:
            # Leaving the card is no part of it.
            with self._phase() as run:
                one = copy.copy(self)
                one._run = run
                encode = super(PlacedClip, one).encode_from_tokens
                result = encode(tokens, return_pooled, return_dict)
                with harmless():
                    cond = result["cond"] if return_dict else result[0] if return_pooled else result
                    run.asked["tokens"] = cond.shape[1]
                return result
        finally:
            self._leave_card()

    def encode_from_tokens_scheduled(self, *args: Any, **kwargs: Any) -> Any:
        # With scheduled hooks it encodes without `encode_from_tokens`.
        scheduled = self.patcher.forced_hooks is not None and self.use_clip_schedule
        try:
            with self._phase() if scheduled else nullcontext():
                return super().encode_from_tokens_scheduled(*args, **kwargs)
        finally:
            self._leave_card()

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().generate(*args, **kwargs)
        finally:
            self._leave_card()

    def load_model(self, *args: Any, **kwargs: Any) -> comfy.model_patcher.ModelPatcher:
        patcher = super().load_model(*args, **kwargs)
        if run := running(self.patcher):
            run.begin()
        if (run := self._run) and self.settings != STOCK:

            def note(line: str) -> None:
                run.path += (line,)

            self.cond_stage_model = encoder_for(self, self.settings, note)
        return patcher

    def _phase(self) -> MeasuredPhase:
        device = self.patcher.load_device
        path = (f"on {device}, {labelled('placement', self.placement)}",)
        return phase("text", self.patcher, device, path)

    def _leave_card(self) -> None:
        if self.placement != DROPPED:
            return
        base = self.patcher.clone_base_uuid
        loaded = comfy.model_management.loaded_models()
        if any(model is not None and model.clone_base_uuid == base for model in loaded):
            comfy.model_management.unload_model_and_clones(self.patcher, all_devices=True)


def encode_with(clip: comfy.sd.CLIP, settings: EncodeSettings) -> tuple[comfy.sd.CLIP, str]:
    """Returns a CLIP like another one that encodes by these settings, and what it will do.

    It is the same CLIP where its text encoder is not Qwen-Image's, or another extension has its
    own way to encode.

    Raises:
        SettingError: the arithmetic is unknown, or the text encoder cannot multiply so.
    """
    check_known("arithmetic", settings.arithmetic, ARITHMETIC)
    encoder = getattr(clip, "cond_stage_model", None)
    if not any(registry.load(it.comfyui).is_one(encoder) for it in text_encoders()):
        return clip, f"The text encoder is a {type(encoder).__name__}, not Qwen-Image's: {SAME}"
    known = type(clip) in (comfy.sd.CLIP, PlacedClip)
    if not known or any(callable(getattr(type(clip), name, None)) for name in vars(clip)):
        return clip, (
            f"Another extension has replaced how this {type(clip).__name__} encodes: {SAME}"
        )
    check_arithmetic(encoder, settings.arithmetic)
    placement = getattr(clip, "placement", "auto")
    changed = PlacedClip.over(clip.clone(), placement, settings)
    return changed, "\n".join(words_of(settings))


def words_of(settings: EncodeSettings) -> list[str]:
    kept = (
        "Images, and the text before the instruction, are encoded once and kept in up to "
        f"{format_gib(settings.room)} of system RAM."
        if settings.room
        else "Every prompt is encoded as a whole."
    )
    return [kept, f"Arithmetic {settings.arithmetic}: {ARITHMETIC[settings.arithmetic]}."]


# What the published file is goes through ComfyUI's own loading, so that every encoder node works on
# it. Other sizes and a folder's own tokenizer go in through the places that ComfyUI has for them.

# ComfyUI's own tokenizer knows ids up to this, and its padding.
PUBLISHED_TOKENS = 151_666
PUBLISHED_PAD = 151_643
# What ComfyUI's classes have and encoding a prompt does not need.
UNUSED = ("lm_head.weight", "logit_scale", "text_projection.weight")
ENDINGS = (".safetensors", ".sft")
STORED_KINDS = {"F8_E4M3": "fp8", "F8_E5M2": "fp8", "I8": "int8"}


def load_text_encoder(
    path: str | os.PathLike[str] | Source,
    precision: str = "auto",
    placement: str = "auto",
    *,
    disable_dynamic: bool = False,
) -> tuple[PlacedClip, LoadReport]:
    """Loads the text encoder behind `path`.

    Args:
        path: ComfyUI's single file, a text_encoder/ folder, a diffusers folder, or one of them as
            `open_source` read it.
        precision: auto or "as stored", bf16, fp8 or int8: how the weights of the language model
            are stored. ComfyUI computes in fp32 whatever it is.
        placement: a key of `PLACEMENTS`: whether it is on the card, and for how long.
        disable_dynamic: loads without dynamic VRAM, as ComfyUI's own loaders take it.

    Raises:
        CheckpointError: the file is not a text encoder of Qwen-Image that ComfyUI can run, is
            damaged, or its tokenizer is missing.
        SettingError: the precision or the placement is unknown.
        UnavailableError: system RAM does not suffice, or this ComfyUI is older than the model.
    """
    check_known("text encoder precision", precision, LOADER_PRECISIONS)
    devices = device_options(placement)
    source = open_source(path, "text_encoder")
    try:
        layout = read_layout(source)
        published = layout.vocabulary >= PUBLISHED_TOKENS  # which ComfyUI's own tokenizer fits
        found = (source, layout.vocabulary, layout.kind.fixed_prefix)
        tokenizer = None if published else find_tokenizer(*found)
    except CheckpointError as fault:
        clip = load_as_comfyui(source, devices, disable_dynamic)
        if clip is None:
            raise
        return _as_comfyui(clip, source, placement, fault)
    # ComfyUI has no dynamic VRAM for what computes on the CPU.
    mapped = (
        comfy.memory_management.aimdo_enabled and not disable_dynamic and placement != ON_PROCESSOR
    )
    _check_memory(source, layout, precision, mapped)
    prepared = text_encoder_tensors(source, layout, map_tensors(source), precision)
    options = _model_options(layout, tokenizer, prepared) | devices
    clip = _build(source, layout.kind, tokenizer, prepared, options, disable_dynamic)
    arguments = source, precision, placement
    prepare_once(clip.patcher)
    put(clip.patcher, cached_patcher_init=(load_text_encoder_patcher, arguments))
    as_it_is = label_of("precision", AS_STORED)
    reason = {"auto": "auto: as in the file", AS_STORED: as_it_is}.get(precision, "requested")
    encoder = text_encoder_titled(source.part.family)
    size = encoder.published.get((source.part.dims["hidden"], source.part.blocks), "")
    reason = f"{reason}; ComfyUI computes this encoder in fp32"
    stays = _stays(placement, clip.patcher.load_device)
    return PlacedClip.over(clip, placement), LoadReport(
        what="text encoder",
        source=source,
        load=LoadDecision(prepared.precision, reason, stays),
        bytes=clip.patcher.model_size(),
        size=size,
        where="computed in fp32",
        hint=next((note for note in layout.notes if "vision tower" in note), ""),
        notes=(
            _where(placement),
            *(words_of(REUSE)[:1] if layout.vision else ()),
            *layout.notes,
            *prepared.notes,
        ),
    )


def _as_comfyui(
    clip: comfy.sd.CLIP, source: Source, placement: str, fault: CheckpointError
) -> tuple[PlacedClip, LoadReport]:
    unknown = "ComfyUI loaded this file, because its form is unknown to this package"
    stays = _stays(placement, clip.patcher.load_device)
    return PlacedClip.over(clip, placement), LoadReport(
        what="text encoder",
        source=source,
        load=LoadDecision(AS_STORED, "ComfyUI chose precision and size", stays),
        bytes=clip.patcher.model_size(),
        hint=unknown,
        notes=(_where(placement), f"{unknown}: {fault}"),
    )


def _where(placement: str) -> str:
    return f"{labelled('placement', placement)}: {PLACEMENTS[placement]}"


def _stays(placement: str, device: torch.device) -> str:
    if device.type == "cpu":
        return "on the CPU"
    return "leaves VRAM after each encoding" if placement == DROPPED else "on the GPU"


def load_text_encoder_patcher(
    source: Source, precision: str, placement: str, disable_dynamic: bool = False
) -> comfy.model_patcher.ModelPatcher:
    """Loads the same text encoder once more, for ComfyUI's clones on other devices and without
    dynamic VRAM.
    """
    clip, _ = load_text_encoder(source, precision, placement, disable_dynamic=disable_dynamic)
    return clip.patcher


def load_as_comfyui(
    source: Source, devices: dict[str, Any], disable_dynamic: bool
) -> comfy.sd.CLIP | None:
    """Loads a file as ComfyUI's Load CLIP; None where that is no whole text encoder of Qwen-Image.

    A first try, which takes no memory, tells: ComfyUI only logs what a file lacks.
    """
    if source.shards.index or source.path.suffix not in ENDINGS:
        return None
    missing: list[str] = []
    own = comfy.sd.CLIP.load_sd

    def load_sd(*args: Any, **kwargs: Any) -> Any:
        found = own(*args, **kwargs)
        missing.extend(name for name in found[0] if not name.endswith(UNUSED))
        return found

    def load(**more: Any) -> comfy.sd.CLIP:
        return comfy.sd.load_clip(
            [str(source.path)],
            embedding_directory=folder_paths.get_folder_paths("embeddings"),
            clip_type=comfy.sd.CLIPType.QWEN_IMAGE,
            model_options={**devices, **more},
            disable_dynamic=disable_dynamic,
        )

    is_one = registry.load(text_encoder_titled(source.part.family).comfyui).is_one
    try:
        with switched([(comfy.sd.CLIP, "load_sd", load_sd)]):
            tried = load(initial_device=torch.device("meta"))
    except Exception:  # of any kind, as its classes meet tensors that they do not know
        return None
    return None if missing or not is_one(tried.cond_stage_model) else load()


def _model_options(
    layout: TextEncoderLayout, tokenizer: FolderTokenizer | None, prepared: TextEncoderTensors
) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if layout.config:
        options[f"{layout.kind.name}_model_config"] = dict(layout.config)
    if not layout.vision:
        pad = tokenizer.pad if tokenizer else PUBLISHED_PAD
        options[f"{layout.kind.name}_class"] = text_only_class(layout.kind.clip_model, pad)
    if prepared.converted:
        # These layers take a weight over, where the plain ones would copy it.
        options["quantization_metadata"] = {"mixed_ops": True}
    return options


def _build(
    source: Source,
    kind: EncoderKind,
    tokenizer: FolderTokenizer | None,
    prepared: TextEncoderTensors,
    options: dict[str, Any],
    disable_dynamic: bool,
) -> comfy.sd.CLIP:
    tensors = prepared.tensors
    if kind.nested and tokenizer is None:
        tensors = {f"model.{it}" if it.startswith(VISION) else it: tensors[it] for it in tensors}
    embeddings = folder_paths.get_folder_paths("embeddings")
    if tokenizer is None:
        if comfy.sd.detect_te_model(tensors) is not comfy.sd.TEModel[kind.name.upper()]:
            raise CheckpointError(
                "ComfyUI does not recognize this file as the text encoder of Qwen-Image: download "
                "it from the model's publisher.",
                source.path,
            )
        return comfy.sd.load_text_encoder_state_dicts(
            [tensors],
            embedding_directory=embeddings,
            clip_type=comfy.sd.CLIPType.QWEN_IMAGE,
            model_options=options,
            disable_dynamic=disable_dynamic,
        )
    base, width = kind.te(**comfy.sd.llama_detect([tensors])), int(source.part.dims["hidden"])
    target = SimpleNamespace(
        params={},
        clip=kind.own_encoder(base, tokenizer),
        tokenizer=tokenizer_class(tokenizer, width, kind.tokenizer, kind.name),
    )
    return comfy.sd.CLIP(
        target,
        embedding_directory=embeddings,
        parameters=comfy.utils.calculate_parameters(tensors),
        state_dict=[tensors],
        model_options=options,
        disable_dynamic=disable_dynamic,
    )


def _check_memory(source: Source, layout: TextEncoderLayout, precision: str, mapped: bool) -> None:
    # Where it is mapped, what needs no conversion stays in the file.
    target = precision if precision in MULTIPLIED else None
    needed = converted = 0
    for name, stored in layout.names.items():
        info = source.tensors[stored]
        rounded = target in QUANTIZED and LANGUAGE_LINEAR.fullmatch(name)
        if rounded and STORED_KINDS.get(info.dtype) != target:
            converted += info.elements
        elif info.dtype in STORED_KINDS:  # taken over as it is mapped, or dequantized
            converted += 2 * info.elements if target == "bf16" else 0
        elif target and info.dtype != "BF16":
            converted += 2 * info.elements
        elif not mapped:
            needed += info.nbytes
    needed += converted + (STAGING_BYTES if converted else 0)
    check_host_memory(needed, f"{source.path.name} in {precision}")
