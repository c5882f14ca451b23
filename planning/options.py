"""Lists the options that describe a run, in one table for the nodes and the command line."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import SettingError
from ..families.qwen_image import TEXT_TO_IMAGE
from ..families.registry import (
    family_of_schedule,
    find_member,
    find_schedule,
    likely_member,
    members,
    schedule_names,
)
from ..families.schedules import OFFICIAL
from ..spec.formats import GIB, KITCHEN_INT8
from ..spec.transformer import OFF_CARD, ON_CARD, PLACES
from .request import (
    ATTENTIONS,
    AUTO,
    CFG_MODES,
    DROPPED,
    EXACT,
    FAST,
    LORA_MODES,
    PRECISIONS,
    TEXT_ENCODER_PLACEMENTS,
    TEXT_ENCODER_PRECISIONS,
    Loras,
)
from .step_cache import CHOICES, OFF

MOST_PIXELS = 16384
MOST = 4096  # of everything that is counted


@dataclass(frozen=True)
class Option:
    name: str
    default: Any  # its type is the option's
    help: str
    choices: tuple[str, ...] = ()
    # least, most, step: of a number; no step is the type's own.
    least: float = 0
    most: float = MOST
    step: float | None = None
    wired: str = ""  # what a node with sockets adds: what a connected part changes
    flag: str | None = ""  # of the command line; None where it has none, empty for `--name`
    rare: bool = False
    # Whether it came later. Nodes have it last and optional, because saved graphs hold the values
    # of widgets by their places.
    added: bool = False


OPTIONS = (
    Option(
        "family",
        AUTO,
        "The model. auto: qwen-image, or qwen-image-edit-2511 if there are references.",
        choices=(AUTO, *members()),
        wired="With a MODEL connected, auto takes the MODEL's.",
    ),
    Option(
        "precision",
        AUTO,
        "Precision of the transformer. auto: int8 with rotation where the GPU has int8 products, "
        "else bf16. bf16: 38 GiB of weights. int8, fp8: 25 GiB. fp8 needs an Ada GPU or newer.",
        choices=PRECISIONS,
        wired="With a MODEL connected, auto takes the MODEL's.",
    ),
    *(
        Option(
            side,
            0,
            "In pixels, a multiple of 16. Time grows faster than the area. 0: the model's, "
            f"{TEXT_TO_IMAGE.default_side}; for 2.1 {find_member('qwen-image-2.1').default_side}.",
            most=MOST_PIXELS,
            step=16,
            wired="A connected LATENT replaces it.",
            flag=None,
        )
        for side in ("width", "height")
    ),
    Option(
        "batch",
        1,
        "Images sampled together. Time and working memory grow with the batch; the weights do not.",
        least=1,
        wired="A connected LATENT replaces it.",
    ),
    Option(
        "steps",
        0,
        "Sampling steps. Time grows with the steps; memory does not. 0: the model card's, 50 "
        "(Edit-2509, Edit-2511 and 2.1: 40). Lightning LoRAs use 4, 2.1 Turbo 8.",
    ),
    Option(
        "cfg",
        AUTO,
        "auto: CFG 1 for 2.1, else above 1. two passes: CFG above 1, one prompt after the other, "
        "in twice the time. one pass: both prompts at once, as ComfyUI does for equal lengths; "
        "more memory. off: CFG 1, as with Lightning LoRAs.",
        choices=(AUTO, *CFG_MODES),
    ),
    Option(
        "references",
        0,
        "Reference images of an edit, one megapixel each. Each adds as many tokens as a 1024x1024 "
        "image.",
        most=max(family.most_references for family in members().values()),
    ),
    Option(
        "layers",
        0,
        "Layers of qwen-image-layered, which auto then chooses as the model. Each adds as many "
        "tokens as the whole image. 0: the model's, "
        f"{find_member('qwen-image-layered').layers} of Layered.",
        wired="A connected LATENT replaces it.",
        rare=True,
    ),
    Option(
        "text_tokens",
        200,
        "Tokens of the longest prompt, about 1.3 for each word. They cost little.",
        least=1,
        most=2**16,
        flag="--text",
        rare=True,
    ),
    Option(
        "modulation",
        AUTO,
        "Where the modulation weights stay, a third of the transformer. off card: in system RAM, "
        "with a small table of their results on the GPU. auto: in system RAM if VRAM is short.",
        choices=PLACES,
        wired="With a MODEL connected, auto takes the MODEL's.",
        rare=True,
    ),
    Option(
        "text_encoder_precision",
        AUTO,
        "Precision of the text encoder's file. auto: the one with the shortest time for a new "
        "prompt. bf16: 14.4 GiB. fp8, int8: 8.4 GiB. w4a8: 5.7 GiB, in ComfyUI's Load CLIP.",
        choices=TEXT_ENCODER_PRECISIONS,
        wired="With a CLIP connected, auto takes the CLIP's.",
        rare=True,
    ),
    Option(
        "text_encoder_placement",
        AUTO,
        "Where the text encoder stays. auto: on the GPU if everything fits. cpu: runs on the CPU, "
        "slowly. drop after encoding: leaves the GPU to the transformer and returns for each new "
        "prompt.",
        choices=TEXT_ENCODER_PLACEMENTS,
        wired="With a CLIP connected, auto takes the CLIP's.",
        rare=True,
    ),
    Option(
        "loras",
        0,
        "Number of LoRAs on the transformer.",
        wired="A connected MODEL counts its own.",
        rare=True,
    ),
    Option(
        "lora_rank",
        32,
        "Rank of each LoRA. In bypass mode, memory and time grow with it.",
        least=1,
        rare=True,
    ),
    Option(
        "lora_mode",
        "auto",
        "auto: bypass on int8 and fp8 weights, else merge. merge: added to the weights; steps take "
        "no longer. bypass: computed in each step; accurate on quantized weights, but slower.",
        choices=LORA_MODES,
        rare=True,
    ),
    Option(
        "controlnet_gib",
        0.0,
        "Size of a ControlNet's file in GiB; its weights are in VRAM in each step. 0: no "
        "ControlNet.",
        most=1000.0,
        step=0.1,
        rare=True,
    ),
    Option(
        "tiles",
        0,
        "Tiles of the VAE decoder. 0: as few as fit. 1: the whole image at once. More: at least "
        "that many; slower, less memory.",
        rare=True,
    ),
    Option(
        "cache",
        OFF,
        "Skips some steps as Qwen-Image Step Cache; the image changes slightly. Computed steps of "
        "50: faithful: 34, balanced: 26, fast: 20. No effect with Lightning LoRAs.",
        choices=CHOICES,
        wired="With a MODEL connected, off takes the MODEL's.",
        added=True,
    ),
    Option(
        "attention",
        EXACT,
        "Attention of Qwen-Image Optimize. kitchen_int8: in 8 bits, which changes the image "
        "slightly; predicted from instruction counts. fast: as kitchen_int8 if that is faster.",
        choices=ATTENTIONS,
        wired="With a MODEL connected, exact takes the MODEL's.",
        rare=True,
        added=True,
    ),
    Option(
        "schedule",
        OFFICIAL.name,
        "Noise schedule. Every choice but official sets the steps in its name, and CFG 1 unless "
        "cfg is set; use it only with the model or LoRA trained for it.",
        choices=schedule_names(),
        rare=True,
        added=True,
    ),
    Option(
        "nag_tokens",
        0,
        "Tokens of the negative prompt of Qwen-Image NAG. 0: no NAG.",
        most=2**16,
        wired="With a MODEL connected, 0 takes the MODEL's.",
        rare=True,
        added=True,
    ),
)


@dataclass(frozen=True)
class Older:
    """What a setting was called in an earlier release."""

    name: str
    values: Mapping[str, str] = field(default_factory=dict)  # {older value: the value of today}
    flag: str | None = None  # of the command line; None where it had none


# {name of today: what it was before}, for nodes, command line and page. A node that has one of them
# accepts all inputs: ComfyUI drops those that are not declared.
OLDER = {
    "attention": Older(
        "attention",
        {
            **dict.fromkeys(("flash_attn_2", "sliced"), "auto"),
            **dict.fromkeys(("int8", "int8_fp8"), KITCHEN_INT8),
            "sage_2": FAST,
        },
    ),
}


# {input: what the page calls it}. Prompts, saved graphs and the command line keep the names.
LABELS = {
    "keep_in_bf16": "bf16_layers",
    "modulation": "offload_modulation",
    "keep_quantized": "cache_quantized_file",
    "placement": "text_encoder_device",
    "text_encoder_placement": "text_encoder_device",
    "attention_error": "max_8bit_error",
    "fused_blocks": "fused_kernels",
    "fused": "fused_kernels",
    "cards": "gpus",
    "card": "gpu",
    "scale": "nag_scale",
    "tau": "nag_tau",
    "alpha": "nag_alpha",
    "preset": "schedule",
    "budget": "max_skip_ratio",
    "head": "start_percent",
    "tail": "final_percent",
    "longest": "max_consecutive",
    "gain": "extrapolation",
    "family": "base_model",
    "references": "reference_images",
}
_DEVICES = {ON_CARD: "gpu", DROPPED: "gpu (offload after encode)"}
# {input: {choice: what the page calls it}}
CHOICE_LABELS = {
    "precision": {"bf16": "bf16 (most accurate)", "as stored": "default (as in file)"},
    "modulation": {OFF_CARD: "on", ON_CARD: "off"},
    "placement": _DEVICES,
    "text_encoder_placement": _DEVICES,
    "attention": {"auto": "auto (exact)", FAST: "auto (allow 8-bit)", "comfyui": "ComfyUI default"},
    "cache": {"faithful": "quality", "fast": "speed"},
    "cfg": {"two passes": "above 1", "one pass": "above 1 (one batch)", "off": "1"},
}


def label_of(name: str, choice: Any) -> Any:
    """Returns what the page calls a choice of an input, such as `on`."""
    return CHOICE_LABELS.get(name, {}).get(choice, choice)


def labelled(name: str, choice: str) -> str:
    """Returns an input and its choice as the page has them, such as `offload_modulation on`."""
    return f"{LABELS.get(name, name)} {label_of(name, choice)}"


def todays(given: Mapping[str, Any]) -> dict[str, Any]:
    """Gives settings today's names and values; raises SettingError where both names differ."""
    found = {}
    for option in OPTIONS:
        older = OLDER.get(option.name)
        if option.name in given:
            found[option.name] = _todays_value(given[option.name], older)
        value = _todays_value(given.get(older.name), older) if older else None
        if older is None or value in (None, option.default):
            continue
        if found.get(option.name, option.default) not in (option.default, value):
            raise SettingError(
                f"{option.name} is {found[option.name]!r}, but {older.name}, its older name, is "
                f"{given[older.name]!r}. Give only {option.name}."
            )
        found[option.name] = value
    return found


def _todays_value(value: Any, older: Older | None) -> Any:
    return older.values.get(value, value) if older and isinstance(value, str) else value


def options(*, rare: bool = False, added: bool = False) -> Iterator[Option]:
    """Lists what everybody chooses, what few people change, or all that came later."""
    if added:
        return (option for option in OPTIONS if option.added)
    return (option for option in OPTIONS if not option.added and option.rare == rare)


def request_settings(**given: Any) -> dict[str, Any]:
    """Makes arguments of `RunRequest` of options and their defaults, or raises SettingError."""
    settings = {option.name: option.default for option in OPTIONS} | given
    _take_schedule(settings, settings.pop("schedule"))
    controlnet_gib = settings.pop("controlnet_gib")
    if not 0 <= controlnet_gib < math.inf:
        raise SettingError(
            f"controlnet_gib is {controlnet_gib}, but must be 0 or more: give the file's size, or "
            "0 for no ControlNet."
        )
    settings["controlnet_bytes"] = round(min(controlnet_gib, 1e6) * GIB)
    settings["loras"] = Loras(*map(settings.pop, ("loras", "lora_rank", "lora_mode")))
    settings["text_encoder"] = settings.pop("text_encoder_precision")
    settings["text_encoder_place"] = settings.pop("text_encoder_placement")
    for name in ("width", "height", "steps", "layers"):
        settings[name] = settings[name] or None
    return settings


def _take_schedule(settings: dict[str, Any], name: str) -> None:
    """Sets the steps of a few-step schedule, and CFG and family where they are left open."""
    if name == OFFICIAL.name:
        return
    likely = likely_member(settings["references"], settings["layers"])
    owner = family_of_schedule(name)
    if settings["family"] == AUTO and owner and likely not in owner.members:
        settings["family"] = owner.members[0].name
    chosen = likely if settings["family"] == AUTO else find_member(settings["family"])
    settings["steps"] = find_schedule(name, chosen.family).steps(settings["steps"], 0)
    if settings["cfg"] == AUTO:
        settings["cfg"] = "off"
