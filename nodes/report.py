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
            description="After a run: predicted and measured time and memory of each phase, and "
            "which path every part took. Measures MODELs of this pack's loaders, and of others "
            "that pass Optimize Qwen-Image.",
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
                    tooltip="The decoded images: they make the report come after the run, and pass "
                    "through.",
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
                io.Image.Output(display_name="images", tooltip="The images, unchanged."),
                io.String.Output(
                    display_name="report",
                    tooltip="The run in words: six lines, each phase, and the path it took.",
                ),
                io.String.Output(
                    display_name="json",
                    tooltip="The same figures for programs, in seconds, milliseconds and GiB.",
                ),
                io.Image.Output(
                    display_name="chart",
                    tooltip="Measured and predicted in one picture, as the node shows it.",
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
