"""Workflows that predict, compare and prepare: estimate, report, advise, save quantized."""

from __future__ import annotations

from ...loaders.source import MICRO_SIDE, MICRO_STEPS
from ...planning.request import RunRequest
from .graph import QWEN_2512, TEXT_ENCODER, VAE, Link, Workflow
from .parts import (
    IMAGE,
    MODELS,
    PROMPT,
    SAMPLING,
    Loaded,
    decode,
    empty,
    encode,
    fast,
    load,
    note,
    sample,
    save,
)
from .text_to_image import (
    CFG,
    EXAMPLE,
    FAMILY,
    MICRO_PROMPT,
    NEGATIVE,
    PROMPT_FIRST,
    SIDE,
    STEPS,
    load_micro,
)

ESTIMATE, REPORT, ADVICE, FILE = "Estimate", "Report", "Advice", "File"
CHART_WIDTH = 520  # to read its figures
TABLE_WIDTH, TABLE_HEIGHT = 660, 860  # of a report, with its lines unbroken
PICTURE_HEIGHT = 540
REPORTED = ((MODELS,), (PROMPT,), (SAMPLING, IMAGE), (ESTIMATE, REPORT))
REPORT_WIDTH, REPORT_HEIGHT = 440, 270  # of a picture next to a graph


def estimate() -> Workflow:
    """Only the estimator: no model, no card."""
    title = "Estimate memory, time and cost"
    workflow = Workflow(
        "estimate",
        title,
        note(
            title,
            "Predicts whether a run fits a card, how long it takes and what it costs. Needs no "
            "model and no card.",
            (
                "`card`: `this card` is the card in this machine, or an L40S if there is none.",
                "Size, batch, steps and references: the run you plan. 0 is the family's own.",
                "Cards we have not measured get a range of times. `qwen-l40s bench --calibrate`, "
                "run on the card, narrows it to one figure.",
            ),
        ),
        columns=((), (ESTIMATE,), (REPORT,)),
    )
    estimated = workflow.add("estimate", "QwenL40S_EstimateVRAM", ESTIMATE, wide=CHART_WIDTH)
    workflow.add(
        "picture",
        "PreviewImage",
        REPORT,
        wide=TABLE_WIDTH,
        shown=PICTURE_HEIGHT,
        images=estimated["chart"],
    )
    _words(workflow, estimated["report"], TABLE_HEIGHT - PICTURE_HEIGHT - 110)
    return workflow


def advise() -> Workflow:
    """Which card to rent: no model, no card."""
    title = "Advise which card to rent"
    workflow = Workflow(
        "advise",
        title,
        note(
            title,
            "Ranks rented cards by the cost of an image at your load. Needs no model and no card.",
            (
                "`images_per_hour`: your load, around the clock.",
                "Size, steps and references: the images you plan. 0 is the family's own.",
                "`prices`: your own prices in USD an hour, one card a line: `L40S = 0.79`.",
            ),
        ),
        columns=((), (ADVICE,), (REPORT,)),
    )
    advised = workflow.add("advise", "QwenL40S_AdviseGPU", ADVICE, wide=CHART_WIDTH, shown=330)
    _words(workflow, advised["report"], TABLE_HEIGHT)
    return workflow


def save_quantized() -> Workflow:
    """A smaller file for every later start."""
    title = "Save a model in int8 or fp8"
    workflow = Workflow(
        "save_quantized",
        title,
        note(
            title,
            "Writes a model in int8 or fp8 to `models/diffusion_models`, once. Later starts read "
            "two thirds of the bytes. Needs no text encoder and no VAE.",
            (
                "**Load Qwen-Image Model**: any bf16 file, so each weight is rounded only once.",
                "`precision`: int8 is closer to bf16; fp8 needs an Ada card or newer.",
                "After the run, press R and choose the new file in **Load Qwen-Image**.",
                "To merge a LoRA into the file, put **Load Qwen-Image LoRA** between the nodes.",
            ),
            files=(QWEN_2512,),
        ),
        columns=((MODELS,), (FILE,)),
    )
    model = workflow.add(
        "model",
        "QwenL40S_LoadModel",
        MODELS,
        models=[QWEN_2512],
        model=QWEN_2512.name,
        precision="bf16",
    )
    workflow.add(
        "save_quantized",
        "QwenL40S_SaveQuantized",
        FILE,
        wide=520,
        shown=12,  # of "Nodes 2.0", which draws the switch a little taller
        model=model["MODEL"],
        filename="qwen_image_2512_int8.safetensors",
    )
    return workflow


def estimate_generate_report() -> Workflow:
    """Predicted and measured."""
    title = "Estimate, generate, report"
    workflow = Workflow(
        "estimate_generate_report",
        title,
        note(
            title,
            "Predicts a run from the loaded parts, paints the image, and compares the prediction "
            "with the measurement.",
            (
                "**Estimate Qwen-Image VRAM** takes models, size and batch from its connections. "
                "Click its dot to open it, and set `steps` as in **KSampler**.",
                "The first run also loads and compiles: read the report of the second run.",
                PROMPT_FIRST,
            ),
            files=(QWEN_2512, TEXT_ENCODER, VAE),
            request=RunRequest(family=FAMILY, precision="bf16", steps=STEPS),
        ),
        columns=REPORTED,
    )
    loaded = load(workflow, QWEN_2512, precision="bf16")
    _predict_and_report(workflow, loaded, EXAMPLE, NEGATIVE, SIDE, STEPS)
    return workflow


def micro_report() -> Workflow:
    """The same with the bundled model."""
    title = "Estimate, generate, report with the micro model"
    workflow = Workflow(
        "micro_report",
        title,
        note(
            title,
            "Predicts a run, paints with the bundled micro model, and compares the prediction with "
            "the measurement. Without an NVIDIA card it only measures. No download: press **Run**.",
            (
                "**Load Qwen-Image**: your own file. Set the size and steps of its model card in "
                "**EmptySD3LatentImage**, **Estimate Qwen-Image VRAM** and **KSampler**.",
                "The first run also loads and compiles: read the report of the second run.",
            ),
        ),
        columns=REPORTED,
    )
    _predict_and_report(workflow, load_micro(workflow), MICRO_PROMPT, " ", MICRO_SIDE, MICRO_STEPS)
    return workflow


def _predict_and_report(
    workflow: Workflow, loaded: Loaded, prompt: str, negative_prompt: str, side: int, steps: int
) -> None:
    positive = encode(workflow, "positive", prompt, loaded.clip)
    negative = encode(workflow, "negative", negative_prompt, loaded.clip, "negative prompt")
    latent = empty(workflow, side, side)
    model = fast(workflow, loaded.model, folded=True)
    # Most of its settings come by wire; in the classic page it would be as tall as the graph.
    estimated = workflow.add(
        "estimate",
        "QwenL40S_EstimateVRAM",
        ESTIMATE,
        folded=True,
        model=model,
        clip=loaded.clip,
        vae=loaded.vae,
        latent=latent,
        steps=steps,
    )
    workflow.add(
        "estimate_picture",
        "PreviewImage",
        ESTIMATE,
        wide=REPORT_WIDTH,
        shown=REPORT_HEIGHT,
        images=estimated["chart"],
    )
    painted = sample(workflow, model, positive, negative, latent, steps=steps, cfg=CFG)
    images = decode(workflow, painted, loaded.vae, folded=True)
    save(workflow, images)
    workflow.add(
        "report",
        "QwenL40S_Report",
        REPORT,
        wide=REPORT_WIDTH,
        shown=REPORT_HEIGHT,
        images=images,
        model=model,
        clip=loaded.clip,
        vae=loaded.vae,
    )


def _words(workflow: Workflow, text: Link, height: int) -> None:
    """All of a report, in lines that do not break."""
    workflow.add("text", "PreviewAny", REPORT, wide=TABLE_WIDTH, shown=height, source=text)
