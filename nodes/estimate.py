"""The nodes that predict memory, time and cost of a run, and compare them with the measured."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from comfy_api.latest import io

from ..charts.text import Refusal, cards_answer, estimate_json, estimate_text, summary_lines
from ..errors import DoesNotFitError, QwenL40SError
from ..hosts.comfyui.estimate.cards import (
    THIS_CARD,
    card_choices,
    card_of,
    own_files_changed_at,
)
from ..hosts.comfyui.on_node import shown
from ..machine.memory import total_memory
from ..planning.estimate import DOES_NOT_FIT, FITS
from ..planning.options import request_settings, todays
from .common import (
    loader_settings,
    needs,
    request_inputs,
    schema,
    setting_outputs,
    shown_picture,
    with_picture,
)

WIRES = ("model", "clip", "vae", "latent")
MODEL = ("models", "layers", "runs", "sizes")
# What of ComfyUI tells the sizes of what is connected.
SIZES = {"model": MODEL, "clip": (*MODEL, "text encoder"), "vae": (*MODEL, "VAE")}


class QwenL40SEstimateVRAM(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="QwenL40S_EstimateVRAM",
            display_name="Estimate Qwen-Image VRAM",
            description="Predicts whether a run fits in VRAM, its time and its cost, and "
            "recommends settings. Use it alone before you download a model, or connect "
            "MODEL, CLIP, VAE and LATENT for their true sizes. The node loads and "
            "moves nothing.",
            search_aliases=[
                "vram",
                "memory estimate",
                "does it fit",
                "out of memory",
                "oom",
                "vram usage",
                "vram debug",
                "gpu memory",
                "gpu cost",
                "time estimate",
            ],
            is_output_node=True,
            accept_all_inputs=True,  # older names
            inputs=[
                io.Combo.Input(
                    "card",
                    options=card_choices(),
                    default=THIS_CARD,
                    tooltip="this card: the GPU of ComfyUI, with its actual memory, or an L40S if "
                    "there is no GPU. Other GPUs: the figures of their data sheets.",
                ),
                *request_inputs(),
                io.Model.Input(
                    "model",
                    optional=True,
                    lazy=True,
                    tooltip="A Qwen-Image MODEL from any loader, for its true size, precision and "
                    "LoRAs. Its weights are not moved.",
                ),
                io.Clip.Input(
                    "clip",
                    optional=True,
                    lazy=True,
                    tooltip="A Qwen-Image CLIP, for its true size, precision and placement.",
                ),
                io.Vae.Input(
                    "vae",
                    optional=True,
                    lazy=True,
                    tooltip="A Qwen-Image VAE, for its true size.",
                ),
                io.Latent.Input(
                    "latent",
                    optional=True,
                    lazy=True,
                    tooltip="The latent to sample. Its width, height, batch and layers replace "
                    "those of the widgets.",
                ),
                io.Float.Input(
                    "price_per_hour",
                    default=0.0,
                    min=0.0,
                    max=10_000.0,
                    step=0.01,
                    optional=True,
                    advanced=True,
                    tooltip="USD for an hour of the GPU. 0: the lowest on-demand price in the "
                    "list; the report shows its date.",
                ),
                *request_inputs(rare=True),
                *request_inputs(added=True),
            ],
            outputs=[
                io.Image.Output(
                    display_name="chart",
                    tooltip="VRAM of each phase, and how much the GPU has.",
                ),
                io.String.Output(
                    display_name="report",
                    tooltip="Whether the run fits, and the phases, times, cost and plan in words.",
                ),
                io.Boolean.Output(
                    display_name="fits",
                    tooltip="True if each phase fits in VRAM.",
                ),
                io.String.Output(
                    display_name="json",
                    tooltip="The same figures as `qwen-l40s estimate --json`.",
                ),
                *setting_outputs(),
                io.String.Output(
                    display_name="verdict",
                    tooltip="`fits`, `runs slowly` (fits with offloading) or `does not fit`.",
                ),
            ],
        )

    @classmethod
    def validate_inputs(cls, card: str | None = None) -> bool | str:
        # Only the one input: ComfyUI repeats the sentence for each that is named here.
        if card is None:  # a linked input is known only when it runs
            return True
        try:
            with needs("estimate"):
                card_of(card)
        except QwenL40SError as error:
            return str(error)
        return True

    @classmethod
    def fingerprint_inputs(cls, **inputs: Any) -> Any:
        return own_files_changed_at()

    @classmethod
    @needs("estimate")
    def check_lazy_status(cls, card: str, price_per_hour: float = 0.0, **inputs: Any) -> list[str]:
        """Refuses settings that contradict each other before anything is loaded."""
        from ..hosts.comfyui.estimate.request import NO_LATENT, request_from

        card_of(card)
        settings = todays(inputs)
        if "latent" in inputs:
            settings |= NO_LATENT
        request_from(request_settings(**settings))
        return [name for name in WIRES if name in inputs and inputs[name] is None]

    @classmethod
    @needs("estimate")
    def execute(
        cls,
        card: str,
        price_per_hour: float = 0.0,
        model: io.Model.Type | None = None,
        clip: io.Clip.Type | None = None,
        vae: io.Vae.Type | None = None,
        latent: io.Latent.Type | None = None,
        **settings: Any,
    ) -> io.NodeOutput:
        from ..charts.picture import memory_chart, refusal_chart
        from ..hosts.comfyui.estimate.request import estimate_on, request_from

        chosen, note = card_of(card)
        parts = {"model": model, "clip": clip, "vae": vae}
        with needs(*(it for name, part in parts.items() if part is not None for it in SIZES[name])):
            wired = request_from(request_settings(**todays(settings)), **parts, latent=latent)
        try:
            ram = total_memory() if card == THIS_CARD and not note else None
            found = replace(estimate_on(chosen, wired, price_per_hour or None, ram), card_note=note)
        except DoesNotFitError as error:
            from comfy_execution.graph_utils import ExecutionBlocker

            refusal = Refusal(chosen, wired.request, str(error), note)
            return with_picture(
                cls,
                refusal_chart(refusal),
                refusal.summary,
                refusal.text,
                False,
                json.dumps(refusal.as_dict(), indent=2),
                # What is to load with these settings does not run, and shows the reason.
                *[ExecutionBlocker(refusal.reason)] * len(setting_outputs()),
                DOES_NOT_FIT,
            )
        lines, answer = cards_answer(found, wired.cards) if wired.cards > 1 else ((), {})
        return with_picture(
            cls,
            memory_chart(found),
            "\n".join(summary_lines(found)),
            estimate_text(found, lines),
            found.verdict == FITS,
            json.dumps({**estimate_json(found), **answer}, indent=2),
            *loader_settings(found),
            found.verdict,
        )


class QwenL40SReport(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="QwenL40S_Report",
            display_name="Qwen-Image Run Report",
            description="After a run, reports the measured time and memory of each phase, the "
            "prediction and the code paths. Use it to check that a run is as fast as "
            "predicted. It measures MODELs from this pack's loaders, and any MODEL "
            "after Qwen-Image Optimize.",
            search_aliases=[
                "benchmark",
                "timing",
                "execution time",
                "measured memory",
                "peak vram",
                "vram debug",
                "profile",
            ],
            is_output_node=True,
            inputs=[
                io.Image.Input(
                    "images",
                    tooltip="The decoded images. They are left unchanged; the report comes after "
                    "them.",
                ),
                io.Model.Input("model", tooltip="The MODEL connected to the sampler."),
                io.Clip.Input(
                    "clip",
                    optional=True,
                    tooltip="The CLIP that encodes the prompts, from this pack's loaders.",
                ),
                io.Vae.Input(
                    "vae",
                    optional=True,
                    tooltip="The VAE connected to this pack's VAE Decode and VAE Encode.",
                ),
            ],
            outputs=[
                io.Image.Output(display_name="images", tooltip="The images, unchanged."),
                io.String.Output(
                    display_name="report",
                    tooltip="A summary of six lines, a table of the phases, and the code paths.",
                ),
                io.String.Output(
                    display_name="json",
                    tooltip="The same figures for programs, in seconds, milliseconds and GiB.",
                ),
                io.Image.Output(
                    display_name="chart",
                    tooltip="Measured and predicted figures in one chart, as shown on the node.",
                ),
            ],
        )

    @classmethod
    @needs(*MODEL)
    def execute(
        cls,
        images: io.Image.Type,
        model: io.Model.Type,
        clip: io.Clip.Type | None = None,
        vae: io.Vae.Type | None = None,
    ) -> io.NodeOutput:
        from ..charts.picture import run_chart
        from ..hosts.comfyui.report import report_run

        report = report_run(model, clip, vae)
        chart, picture = shown_picture(cls, run_chart(report.picture))
        ui = picture | shown(report.text, report.summary)
        return io.NodeOutput(images, report.text, json.dumps(report.data), chart, ui=ui)
