"""Workflows of the estimator: alone, and with the report of a run."""

from __future__ import annotations

from ...planning.request import RunRequest
from .graph import QWEN_2512, TEXT_ENCODER, VAE, Workflow
from .parts import (
    IMAGE,
    MODELS,
    PROMPT,
    SAMPLING,
    decode,
    empty,
    encode,
    load,
    note,
    sample,
    save,
    shifted,
)
from .text_to_image import CFG, EXAMPLE, FAMILY, NEGATIVE, NEGATIVE_STAYS, PROMPT_FIRST, SIDE

ESTIMATE, REPORT = "Estimate", "Report"
STEPS = 20
CHART_WIDTH = 720  # to read its figures
TABLE_WIDTH, TABLE_HEIGHT = 980, 600  # of a report, with its lines unbroken


def estimate() -> Workflow:
    """Only the estimator: no model, no card."""
    title = "Estimate memory, time and cost"
    workflow = Workflow(
        "estimate",
        title,
        note(
            title,
            "Says whether a run fits a card, what each phase takes, how long it lasts and what it "
            "costs. Needs no model and no card, and loads nothing.",
            (
                "**Estimate**: `card`, then size, batch, steps and references of what you want to "
                "run. `this card` is the one of this machine, or an L40S where there is none.",
                "Times of a card that was not measured are a range: `qwen-l40s bench --calibrate` "
                "on it makes them one figure.",
            ),
        ),
        columns=((ESTIMATE,), (REPORT,)),
        note_above=1,
    )
    estimated = workflow.add(
        "estimate", "QwenL40S_EstimateVRAM", "Estimate", ESTIMATE, wide=CHART_WIDTH
    )
    workflow.add(
        "text",
        "PreviewAny",
        "Estimate in words",
        REPORT,
        wide=TABLE_WIDTH,
        shown=TABLE_HEIGHT,
        source=estimated["report"],
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
            "Predicts a run from the parts that are loaded, paints the picture, and lays what was "
            "measured beside what was predicted.",
            (
                "**Estimate** takes model, text encoder, VAE, size and batch from its wires; give "
                "it the `steps` of **Sample**, and `cfg` `off` where its CFG is 1.",
                "The first run loads and prepares: read the report of the second one.",
                PROMPT_FIRST,
                NEGATIVE_STAYS,
            ),
            files=(QWEN_2512, TEXT_ENCODER, VAE),
            request=RunRequest(family=FAMILY, precision="bf16", steps=STEPS),
        ),
        columns=((MODELS,), (PROMPT,), (SAMPLING,), (ESTIMATE,), (IMAGE, REPORT)),
    )
    loaded = load(workflow, QWEN_2512, precision="bf16")
    positive = encode(workflow, "positive", "Prompt", EXAMPLE, loaded.clip)
    negative = encode(workflow, "negative", "Negative prompt", NEGATIVE, loaded.clip)
    latent = empty(workflow, SIDE, SIDE)
    model = shifted(workflow, loaded.model)
    estimated = workflow.add(
        "estimate",
        "QwenL40S_EstimateVRAM",
        "Estimate",
        ESTIMATE,
        model=model,
        clip=loaded.clip,
        vae=loaded.vae,
        latent=latent,
        steps=STEPS,
    )
    workflow.add(
        "estimate_text", "PreviewAny", "Estimate in words", ESTIMATE, source=estimated["report"]
    )
    painted = sample(workflow, model, positive, negative, latent, steps=STEPS, cfg=CFG)
    images = decode(workflow, painted, loaded.vae)
    save(workflow, images)
    report = workflow.add(
        "report",
        "QwenL40S_Report",
        "Report",
        REPORT,
        images=images,
        model=model,
        clip=loaded.clip,
        vae=loaded.vae,
    )
    workflow.add("report_text", "PreviewAny", "Report in words", REPORT, source=report["report"])
    return workflow
