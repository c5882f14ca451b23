"""The node that lays what was measured beside what was predicted."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io, ui

from .host import CATEGORY, require_host


class QwenL40SReport(io.ComfyNode):
    """Reports the run that has just ended."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="QwenL40S_Report",
            display_name="Report Qwen-Image Run (L40S)",
            category=CATEGORY,
            description="After a run: predicted beside measured time and memory of each phase, and "
            "which path every part took. Measures MODELs of this pack's loaders, and of others "
            "that pass Optimize Qwen-Image (L40S).",
            search_aliases=["benchmark", "timing", "measured memory", "peak vram", "profile"],
            is_output_node=True,
            inputs=[
                io.Image.Input(
                    "images",
                    optional=True,
                    tooltip="The images of the run, which pass through: they make the report come "
                    "after it. Without them it is made in each run, before or after the sampler.",
                ),
                io.Model.Input("model", tooltip="The MODEL that the sampler takes."),
                io.Clip.Input(
                    "clip",
                    optional=True,
                    tooltip="The CLIP that encodes the prompts, of this pack's loaders.",
                ),
                io.Vae.Input(
                    "vae",
                    optional=True,
                    tooltip="The VAE that this pack's VAE Decode and VAE Encode nodes take.",
                ),
            ],
            outputs=[
                io.Image.Output(display_name="images"),
                io.String.Output(display_name="report"),
                io.String.Output(display_name="JSON"),
            ],
        )

    @classmethod
    def fingerprint_inputs(cls, images: Any = (), **parts: Any) -> Any:
        # Images that are linked are None here, and part of what ComfyUI keeps the report by:
        # where nothing ran for them, the report of the run that made them still holds.
        return "" if images is None else float("nan")

    @classmethod
    def execute(
        cls,
        model: io.Model.Type,
        images: io.Image.Type | None = None,
        clip: io.Clip.Type | None = None,
        vae: io.Vae.Type | None = None,
    ) -> io.NodeOutput:
        require_host()
        from ..hosts.comfyui.run_report import report_run

        report = report_run(model, clip, vae)
        return io.NodeOutput(images, report.text, report.json(), ui=ui.PreviewText(report.text))
