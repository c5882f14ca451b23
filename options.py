"""The options that say what is to run: one table behind the nodes and the command line."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .errors import SettingError
from .planning.request import (
    AUTO,
    CFG_MODES,
    LORA_MODES,
    PRECISIONS,
    TEXT_ENCODER_PLACES,
    TEXT_ENCODER_PRECISIONS,
    Loras,
)
from .spec import FAMILIES, GB, OFF_CARD, ON_CARD

MOST_PIXELS = 16384
MOST = 4096  # of everything that is counted
# {option: place of the modulation weights}: a table stands in for weights that are off the card.
TABLES = {AUTO: AUTO, "on": OFF_CARD, "off": ON_CARD}


@dataclass(frozen=True)
class Option:
    """One option of a request.

    Attributes:
        name: of a node's input.
        default: its type is the option's.
        help: the tooltip and the text of `--help`.
        choices: of a text.
        least, most, step: of a number; no step is the type's own.
        wired: what nodes say as well: what a wired part decides.
        flag: of the command line; None where it has none, empty for `--name`.
        rare: whether few people change it.
    """

    name: str
    default: Any
    help: str
    choices: tuple[str, ...] = ()
    least: float = 0
    most: float = MOST
    step: float | None = None
    wired: str = ""
    flag: str | None = ""
    rare: bool = False


OPTIONS = (
    Option(
        "family",
        AUTO,
        "auto: as a given MODEL is, else Qwen-Image, Edit-2511 with references, Layered with "
        "layers. Edit-2511 computes the modulation of references twice; Layered paints several "
        "images at once.",
        choices=(AUTO, *FAMILIES),
    ),
    Option(
        "precision",
        AUTO,
        "Of the transformer. auto: as a given MODEL is, else the most faithful that stays on "
        "the card. bf16: 38 GiB of weights, int8 and fp8: 25; 12.7 less on the card with tables. "
        "int8 is closer to bf16, fp8 is fast from Ada on only.",
        choices=PRECISIONS,
    ),
    *(
        Option(
            side,
            1328,
            "Pixels, a multiple of 16: time grows with the area and faster.",
            least=16,
            most=MOST_PIXELS,
            step=16,
            wired="A wired LATENT tells it.",
            flag=None,
        )
        for side in ("width", "height")
    ),
    Option(
        "batch",
        1,
        "Images that are sampled together: activations and time grow with it, weights do not.",
        least=1,
        wired="A wired LATENT tells it.",
    ),
    Option("steps", 20, "Of the sampler: time grows with them, memory does not.", least=1),
    Option(
        "cfg",
        "two passes",
        "two passes: positive and negative prompt one after the other, as ComfyUI does at CFG "
        "above 1; twice the time. one pass: both at once, as it does for prompts of one length; "
        "more memory. off: CFG 1, as with Lightning LoRAs.",
        choices=CFG_MODES,
    ),
    Option(
        "references",
        0,
        "Reference images of an edit, of one megapixel each: every one adds as many tokens as an "
        "image of 1024x1024.",
        most=max(family.most_references for family in FAMILIES.values()),
    ),
    Option(
        "layers",
        0,
        "Of Qwen-Image-Layered, besides the whole image: each costs as many tokens as the image.",
        wired="A wired LATENT tells it.",
        rare=True,
    ),
    Option(
        "text_tokens",
        200,
        "Of the longest prompt, about 1.3 a word. Next to an image's thousands they cost little.",
        least=1,
        most=2**16,
        flag="--text",
        rare=True,
    ),
    Option(
        "tables",
        AUTO,
        "on: a table stands in for the modulation weights, which wait in host memory; 12.7 GiB "
        "less on the card in bf16, and a pass over the bus for each new schedule. off: they stay "
        "on the card. auto: as a given MODEL does, else on where it is needed.",
        choices=tuple(TABLES),
        rare=True,
    ),
    Option(
        "text_encoder",
        AUTO,
        "How the text encoder's weights are stored. auto: as a given CLIP has them, else bf16, "
        "14.4 GiB; fp8 and int8 take 8.4.",
        choices=TEXT_ENCODER_PRECISIONS,
        rare=True,
    ),
    Option(
        "text_encoder_place",
        AUTO,
        "auto: where a given CLIP stays, else on the card where all fits. drop after encoding: "
        "free for the transformer, loaded again for each new prompt. cpu: takes no room on the "
        "card, and is slow.",
        choices=TEXT_ENCODER_PLACES,
        rare=True,
    ),
    Option(
        "loras",
        0,
        "LoRAs on the transformer.",
        wired="A wired MODEL tells those that it has.",
        rare=True,
    ),
    Option(
        "lora_rank",
        32,
        "Of each LoRA in bypass mode: memory and time grow with it.",
        least=1,
        rare=True,
    ),
    Option(
        "lora_mode",
        "merged",
        "merged: into the weights, which costs nothing in a step. bypass: computed in each step "
        "next to weights that stay as they are, exact on quantized ones.",
        choices=LORA_MODES,
        rare=True,
    ),
    Option(
        "controlnet_gb",
        0.0,
        "The size of a ControlNet's file in GB, whose weights are on the card in each step; 0 for "
        "none.",
        most=1000.0,
        step=0.1,
        flag="--controlnet",
        rare=True,
    ),
    Option(
        "tiles",
        0,
        "Of the VAE's decoding. 0: whole where that fits, else the fewest. 1: always whole. More: "
        "at least so many; slower, and less memory.",
        rare=True,
    ),
)


def options(*, rare: bool) -> Iterator[Option]:
    """What everybody chooses, or what few people change."""
    return (option for option in OPTIONS if option.rare == rare)


def request_settings(
    *,
    tables: str = AUTO,
    loras: int = 0,
    lora_rank: int = 32,
    lora_mode: str = "merged",
    controlnet_gb: float = 0.0,
    **settings: Any,
) -> dict[str, Any]:
    """Arguments of `RunRequest` from values of options; what is left out keeps its default.

    Args:
        tables: a key of `TABLES`.
        controlnet_gb: 10**9 bytes, as files are sold; other options are named as the request's.

    Raises:
        SettingError: `tables` is unknown, or the ControlNet's size is no size.
    """
    if tables not in TABLES:
        raise SettingError(f"tables {tables!r} is unknown: choose {', '.join(TABLES)}.")
    if not 0 <= controlnet_gb < math.inf:
        raise SettingError(f"a ControlNet of {controlnet_gb} GB is no size: give 0 or more.")
    return {
        "family": AUTO,
        "precision": AUTO,
        "text_encoder": AUTO,
        "text_encoder_place": AUTO,
        "references": 0,
        "layers": 0,
        **settings,
        "modulation": TABLES[tables],
        "loras": Loras(loras, lora_rank, lora_mode),
        "controlnet_bytes": round(min(controlnet_gb, 1e6) * GB),
    }


def likely_family(references: int, layers: int) -> str:
    """The family of `AUTO` where nothing but the request tells it."""
    if layers:
        return "qwen-image-layered"
    return "qwen-image-edit-2511" if references else "qwen-image"
