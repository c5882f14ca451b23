"""The node that compares what was predicted with what was measured."""

from __future__ import annotations

from comfy_api.latest import io

from .common import CATEGORY, require_host, said, shown_picture


class QwenL40SReport(io.ComfyNode):
    """Reports the last run of a MODEL."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="QwenL40S_Report",
            display_name="Report Qwen-Image Run",
            category=CATEGORY,
            description="After a run, compares the predicted and measured time and memory of each "
            "phase and says which code path each part took. Measures MODELs from this pack's "
            "loaders, and any MODEL behind Optimize Qwen-Image.",
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
                    tooltip="The decoded images. They pass through, so the report comes after the "
                    "run.",
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
                    tooltip="Measured and predicted figures in one picture, as shown on the node.",
                ),
            ],
        )

    @classmethod
    def execute(
        cls,
        images: io.Image.Type,
        model: io.Model.Type,
        clip: io.Clip.Type | None = None,
        vae: io.Vae.Type | None = None,
    ) -> io.NodeOutput:
        require_host()
        from ..charts.run_chart import run_chart
        from ..hosts.comfyui.report.table import report_run

        report = report_run(model, clip, vae)
        chart, shown = shown_picture(cls, run_chart(report.picture))
        ui = shown | said(report.text, report.summary)
        return io.NodeOutput(images, report.text, report.json(), chart, ui=ui)
