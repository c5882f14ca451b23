"""The node that gives samplers the schedule that a model is trained for."""

from __future__ import annotations

from typing import Any

import torch
from comfy_api.latest import io

from ..families.registry import schedule_names
from ..planning.options import MOST_PIXELS
from ..planning.request import AUTO
from .common import needs, schema, with_report


class QwenL40SSigmas(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="QwenL40S_Sigmas",
            display_name="Qwen-Image Scheduler",
            description="Gives SamplerCustomAdvanced and SamplerCustom the schedule of diffusers "
            "for the size, or of a few-step model. Use it for Qwen-Image-2.1: "
            "ComfyUI's schedule is the same at every size, which gives grids and bands "
            "in large images.",
            search_aliases=["scheduler", "manual sigmas", "shift", "turbo", "viggle", "lightning"],
            has_intermediate_output=True,
            inputs=[
                io.Model.Input("model", tooltip="The MODEL of the sampler, after its LoRAs."),
                io.Combo.Input(
                    "preset",
                    options=[AUTO, *schedule_names()],
                    default=AUTO,
                    tooltip="auto: the schedule of the few-step LoRA or model in the MODEL, else "
                    "official. official: as diffusers, for any number of steps. The others "
                    "are for models and LoRAs trained for them, at CFG 1.",
                ),
                io.Int.Input(
                    "steps",
                    default=0,
                    min=0,
                    max=10_000,
                    tooltip="0: the model card's, 40 or 50, or the steps in the schedule's name.",
                ),
                *(
                    io.Int.Input(
                        side,
                        default=0,
                        min=0,
                        max=MOST_PIXELS,
                        step=16,
                        tooltip="In pixels; for 2.1 a multiple of 32. 0: the trained size. A "
                        "connected LATENT replaces it.",
                    )
                    for side in ("width", "height")
                ),
                io.Latent.Input(
                    "latent", optional=True, tooltip="The latent to sample, for its size."
                ),
            ],
            outputs=[
                io.Sigmas.Output(tooltip="To sigmas of SamplerCustomAdvanced or SamplerCustom."),
                io.String.Output(
                    display_name="report",
                    tooltip="Steps and size, which file decided, and what has to be loaded.",
                ),
            ],
        )

    @classmethod
    @needs("models")
    def execute(
        cls,
        model: io.Model.Type,
        preset: str,
        steps: int,
        width: int,
        height: int,
        latent: dict[str, Any] | None = None,
    ) -> io.NodeOutput:
        from ..hosts.comfyui.sigmas import sigmas_for

        sigmas, report = sigmas_for(model, preset, steps, width, height, latent)
        return with_report(torch.tensor(sigmas), report=report)
