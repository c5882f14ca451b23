"""What is measured, as graphs in the form that ComfyUI's /prompt takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

Graph = dict[str, dict]

MICRO = "micro (bundled)"
# What memory_weights.py writes.
TRANSFORMER = "qwen_image_random_bf16.safetensors"
TEXT_ENCODER = "qwen_2.5_vl_7b_random_bf16.safetensors"
VAE = "qwen_image_vae_random_bf16.safetensors"
TEXT_WIDTH = 3584
# Weights that do not fit come over PCIe in each step.
PRESSURE_STEPS = 4
PROMPTS = (
    "A lighthouse keeper in a yellow raincoat stands on wet rocks at dusk and holds a brass lamp "
    "while waves break behind him; far out a three-masted ship leans into the wind, gulls circle "
    "above the tower, and the beam of light cuts through low clouds. On the wall a painted sign "
    'reads "NORTH POINT 1871" in white letters. Oil painting, thick strokes, warm lamp light '
    "against cold blue water, fine detail in rope, stone and cloth.",
    "A watchmaker's bench from above: tiny gears in rows on green felt, a half-open pocket watch, "
    "tweezers, a loupe and a cup of black tea whose steam curls over a handwritten ledger. Morning "
    "light falls from the left through a window with small panes and throws long shadows. "
    "Photograph, shallow depth of field, natural colours, sharp metal edges, visible dust.",
)
# Which of a prompt's phases a node belongs to; what is missing here is "other".
PHASES = {
    "CLIPTextEncode": "encode",
    "KSampler": "sample",
    "VAEDecode": "decode",
    "QwenL40S_VAEDecode": "decode",
    "PreviewImage": "save",
    "UNETLoader": "load",
    "CLIPLoader": "load",
    "VAELoader": "load",
    "QwenL40S_LoadModel": "load",
    "QwenL40S_LoadTextEncoder": "load",
    "QwenL40S_LoadVAE": "load",
}
# What a node that the server lacks is replaced by: same outputs, fewer inputs.
REPLACEMENTS = {"QwenL40S_VAEDecode": "VAEDecode"}


class Case(NamedTuple):
    """What one server runs.

    Args:
        loader: "ours" or "stock".
        precision: of our loader.
        kind: "images" (three of each size), "alone" (two of the smallest, without text encoder and
            VAE) or "pressure" (one while another process holds memory, one after).
        ballast: under pressure, the arguments of the second ballast.
    """

    loader: str
    precision: str
    kind: str
    ballast: tuple[str, str] | None = None


CASES = {
    "ours-bf16": Case("ours", "bf16", "images"),
    "ours-fp8": Case("ours", "fp8", "images"),
    "ours-int8": Case("ours", "int8", "images"),
    "stock": Case("stock", "bf16", "images"),
    "alone-bf16": Case("ours", "bf16", "alone"),
    "alone-fp8": Case("ours", "fp8", "alone"),
    "alone-int8": Case("ours", "int8", "alone"),
    "alone-stock": Case("stock", "bf16", "alone"),
    "pressure-half": Case("ours", "bf16", "pressure", ("--share", "0.5")),
    "pressure-4gib": Case("ours", "bf16", "pressure", ("--free-gib", "4")),
}
DEFAULT_CASES = tuple(name for name in CASES if name not in ("ours-fp8", "ours-int8", "alone-int8"))


@dataclass(frozen=True)
class Settings:
    """What all graphs share.

    Args:
        transformer, text_encoder, vae: as the loaders list them.
        width: the text encoder's.
        modulation, placement: of our loaders' widgets; None leaves them as they are.
        tiles: of our decoder's widget.
    """

    transformer: str = MICRO
    text_encoder: str = MICRO
    vae: str = MICRO
    width: int = 512
    steps: int = 20
    cfg: float = 4.0
    modulation: str | None = "off card"
    placement: str | None = None
    tiles: int = 0


class Image(NamedTuple):
    """One prompt of a case."""

    name: str
    size: int
    seed: int = 1
    text: str = PROMPTS[0]


def images_of(case: Case, sizes: list[int], pressure_size: int) -> list[Image]:
    """The prompts of a case, in order."""
    if case.kind == "images":
        return [
            image
            for size in sizes
            for image in (
                Image("first", size),
                Image("other seed", size, 2),
                Image("other prompt", size, 2, PROMPTS[1]),
            )
        ]
    if case.kind == "alone":
        return [Image("first", min(sizes)), Image("other seed", min(sizes), 2)]
    return [Image("under pressure", pressure_size), Image("after", pressure_size, 2)]


def graph_of(case: Case, settings: Settings, image: Image) -> Graph:
    """The graph of one prompt."""
    nodes = _loaders(case, settings)
    model = "model"
    if case.loader == "ours":
        nodes["optimize"] = _node("QwenL40S_Optimize", model=["model", 0])
        model = "optimize"
    nodes["latent"] = _node(
        "EmptySD3LatentImage", width=image.size, height=image.size, batch_size=1
    )
    nodes["sample"] = _node(
        "KSampler",
        model=[model, 0],
        positive=["positive", 0],
        negative=["negative", 0],
        latent_image=["latent", 0],
        seed=image.seed,
        steps=settings.steps if case.ballast is None else min(settings.steps, PRESSURE_STEPS),
        cfg=settings.cfg,
        sampler_name="euler",
        scheduler="simple",
        denoise=1.0,
    )
    nodes["check"] = _node("L40SProbe_LatentEnd", samples=["sample", 0])
    if case.kind == "alone":
        # Of different lengths, as prompts are: ComfyUI would run equal ones as one batch.
        for tokens, name in ((200, "positive"), (20, "negative")):
            nodes[name] = _node(
                "L40SProbe_RandomConditioning", tokens=tokens, width=settings.width, seed=tokens
            )
        del nodes["text_encoder"], nodes["vae"]
        return nodes
    nodes["positive"] = _node("CLIPTextEncode", text=image.text, clip=["text_encoder", 0])
    nodes["negative"] = _node("CLIPTextEncode", text=" ", clip=["text_encoder", 0])
    decoded = {"samples": ["sample", 0], "vae": ["vae", 0]}
    if case.loader == "ours":
        nodes["decode"] = _node("QwenL40S_VAEDecode", **decoded, tiles=settings.tiles)
    else:
        nodes["decode"] = _node("VAEDecode", **decoded)
    nodes["save"] = _node("PreviewImage", images=["decode", 0])
    return nodes


def _node(kind: str, **inputs: object) -> dict:
    given = {name: value for name, value in inputs.items() if value is not None}
    return {"class_type": kind, "inputs": given}


def _loaders(case: Case, settings: Settings) -> Graph:
    if case.loader == "stock":
        return {
            "model": _node("UNETLoader", unet_name=settings.transformer, weight_dtype="default"),
            "text_encoder": _node(
                "CLIPLoader", clip_name=settings.text_encoder, type="qwen_image", device="default"
            ),
            "vae": _node("VAELoader", vae_name=settings.vae),
        }
    return {
        "model": _node(
            "QwenL40S_LoadModel",
            model=settings.transformer,
            precision=case.precision,
            modulation=settings.modulation,
        ),
        "text_encoder": _node(
            "QwenL40S_LoadTextEncoder",
            text_encoder=settings.text_encoder,
            precision="bf16",
            placement=settings.placement,
        ),
        "vae": _node("QwenL40S_LoadVAE", vae=settings.vae, precision="auto"),
    }


@dataclass
class Fitted:
    """A graph as a server takes it, and a note on each difference from what was asked for."""

    graph: Graph
    notes: list[str] = field(default_factory=list)


def fit(graph: Graph, known: Mapping[str, dict]) -> Fitted:
    """Leaves out the inputs that a server's nodes lack, and fills in those that they ask for.

    Args:
        known: what the server answers to /object_info.

    Raises:
        LookupError: the server lacks a node for which there is no replacement.
    """
    fitted = Fitted({})
    for name, node in graph.items():
        kind = node["class_type"]
        if kind not in known and kind in REPLACEMENTS:
            fitted.notes.append(f"{kind} is not there: {REPLACEMENTS[kind]} in its place")
            kind = REPLACEMENTS[kind]
        if kind not in known:
            raise LookupError(f"the server has no node {kind}")
        described = known[kind]["input"]
        required = described.get("required") or {}
        taken = {*required, *(described.get("optional") or {})}
        inputs = {}
        for key, value in node["inputs"].items():
            if key in taken:
                inputs[key] = value
            else:
                fitted.notes.append(f"{kind} has no input {key}: left out")
        for key, entry in required.items():
            if key not in inputs:
                inputs[key] = default_of(entry)
        fitted.graph[name] = {"class_type": kind, "inputs": inputs}
    return fitted


def default_of(entry: list) -> object:
    """The default of an input as /object_info describes it; of a choice without one, the first."""
    kind, options = entry[0], entry[1] if len(entry) > 1 else {}
    if "default" in options:
        return options["default"]
    choices = kind if isinstance(kind, list) else options.get("options")
    if not choices:
        raise LookupError(f"an input of type {kind} has no default")
    return choices[0]
