"""The inputs of the estimator's nodes that say what is to run."""

from __future__ import annotations

from comfy_api.latest import io

from ..planning.request import (
    CFG_MODES,
    LORA_MODES,
    PRECISIONS,
    TEXT_ENCODER_PLACES,
    TEXT_ENCODER_PRECISIONS,
)
from ..spec import FAMILIES

MOST_PIXELS = 16384
MOST = 4096  # of everything that is counted


def request_inputs() -> list[io.Input]:
    """What everybody chooses."""
    return [
        io.Combo.Input(
            "family",
            options=["auto", *FAMILIES],
            default="auto",
            tooltip="auto: what a wired MODEL tells, else Qwen-Image, Edit-2511 with references, "
            "Layered with layers. Edit-2511 computes the modulation of references twice; Layered "
            "paints several images at once.",
        ),
        io.Combo.Input(
            "precision",
            options=list(PRECISIONS),
            default="auto",
            tooltip="Of the transformer. auto: what a wired MODEL holds, else the most faithful "
            "that stays on the card. bf16: 38 GiB of weights, int8 and fp8: 25; 12.7 less on the "
            "card with tables. int8 is closer to bf16, fp8 is fast from Ada on only.",
        ),
        _side("width"),
        _side("height"),
        io.Int.Input(
            "batch",
            default=1,
            min=1,
            max=MOST,
            tooltip="Images that are sampled together: activations and time grow with it, weights "
            "do not. A wired LATENT tells it.",
        ),
        io.Int.Input(
            "steps",
            default=20,
            min=1,
            max=MOST,
            tooltip="Of the sampler: time grows with them, memory does not.",
        ),
        io.Combo.Input(
            "cfg",
            options=list(CFG_MODES),
            default="two passes",
            tooltip="two passes: positive and negative prompt one after the other, as ComfyUI does "
            "at CFG above 1; twice the time. one pass: both at once, as it does for prompts of one "
            "length; more memory. off: CFG 1, as with Lightning LoRAs.",
        ),
        io.Int.Input(
            "references",
            default=0,
            min=0,
            max=max(family.most_references for family in FAMILIES.values()),
            tooltip="Reference images of an edit, of one megapixel each: every one adds as many "
            "tokens as an image of 1024x1024.",
        ),
    ]


def rare_request_inputs() -> list[io.Input]:
    """What few people change."""
    return [
        io.Int.Input(
            "layers",
            default=0,
            min=0,
            max=MOST,
            optional=True,
            advanced=True,
            tooltip="Of Qwen-Image-Layered, beside the whole image: each costs as many tokens as "
            "the image. A wired LATENT tells it.",
        ),
        io.Int.Input(
            "text_tokens",
            default=200,
            min=1,
            max=2**16,
            optional=True,
            advanced=True,
            tooltip="Of the longest prompt, about 1.3 a word. Next to an image's thousands they "
            "cost little.",
        ),
        io.Combo.Input(
            "tables",
            options=["auto", "on", "off"],
            default="auto",
            optional=True,
            advanced=True,
            tooltip="on: a table stands in for the modulation weights, which wait in host memory; "
            "12.7 GiB less on the card in bf16, and a pass over the bus for each new schedule. off:"
            " they stay on the card. auto: what a wired MODEL does, else on where it is needed.",
        ),
        io.Combo.Input(
            "text_encoder",
            options=list(TEXT_ENCODER_PRECISIONS),
            default="auto",
            optional=True,
            advanced=True,
            tooltip="How the text encoder's weights are held. auto: as a wired CLIP holds them, "
            "else bf16, 14.4 GiB; fp8 and int8 take 8.4.",
        ),
        io.Combo.Input(
            "text_encoder_place",
            options=list(TEXT_ENCODER_PLACES),
            default="auto",
            optional=True,
            advanced=True,
            tooltip="auto: where a wired CLIP stays, else on the card where all fits. drop after "
            "encoding: free for the transformer, loaded again for each new prompt. cpu: takes no "
            "room on the card, and is slow.",
        ),
        io.Int.Input(
            "loras",
            default=0,
            min=0,
            max=MOST,
            optional=True,
            advanced=True,
            tooltip="LoRAs on the transformer. A wired MODEL tells those that it has.",
        ),
        io.Int.Input(
            "lora_rank",
            default=32,
            min=1,
            max=MOST,
            optional=True,
            advanced=True,
            tooltip="Of each LoRA that runs beside the weights: memory and time grow with it.",
        ),
        io.Combo.Input(
            "lora_mode",
            options=list(LORA_MODES),
            default="merged",
            optional=True,
            advanced=True,
            tooltip="merged: into the weights, which costs nothing in a step. bypass: computed in "
            "each step next to weights that stay as they are, exact on quantized ones.",
        ),
        io.Float.Input(
            "controlnet_gb",
            default=0.0,
            min=0.0,
            max=1000.0,
            step=0.1,
            optional=True,
            advanced=True,
            tooltip="The size of a ControlNet's file in GB, whose weights are on the card in each "
            "step; 0 for none.",
        ),
        io.Int.Input(
            "tiles",
            default=0,
            min=0,
            max=MOST,
            optional=True,
            advanced=True,
            tooltip="Of the VAE's decoding. 0: whole where that fits, else the fewest. 1: always "
            "whole. More: at least so many; slower, and less memory.",
        ),
    ]


def _side(name: str) -> io.Int.Input:
    return io.Int.Input(
        name,
        default=1328,
        min=16,
        max=MOST_PIXELS,
        step=16,
        tooltip="Pixels, a multiple of 16: time grows with the area and faster. A wired LATENT "
        "tells it.",
    )
