"""The node that gives few-step models a negative prompt."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from .common import model_and_report, needs, schema, with_report

LAST_STEP = 10_000  # as of ComfyUI's KSampler (Advanced)


class QwenL40SNAG(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        def number(name: str, default: float, most: float, step: float, tooltip: str) -> io.Input:
            least = 0 if name == "alpha" else 1
            return io.Float.Input(
                name, default=default, min=least, max=most, step=step, tooltip=tooltip
            )

        def step(name: str, default: int, tooltip: str) -> io.Input:
            about = {"optional": True, "advanced": True, "tooltip": tooltip}
            return io.Int.Input(name, default=default, min=0, max=LAST_STEP, **about)

        return schema(
            node_id="QwenL40S_NAG",
            display_name="Qwen-Image NAG",
            description="Gives Qwen-Image a negative prompt at CFG 1, by normalized attention "
            "guidance. Use it with Lightning, Turbo and Viggle, where the sampler's "
            "negative prompt does nothing. Each step stays one forward pass and takes "
            "a few percent longer.",
            search_aliases=[
                "normalized attention guidance",
                "nag guidance",
                "negative prompt cfg 1",
                "negative prompt lightning",
            ],
            has_intermediate_output=True,
            inputs=[
                io.Model.Input("model", tooltip="From any loader, LoRA loader or Optimize node."),
                io.Conditioning.Input(
                    "negative",
                    tooltip="What to keep out of the image. For an edit, encode it with the same "
                    "images.",
                ),
                number(
                    "scale", 5.0, 100, 0.1, "How strongly the negative prompt is avoided. 1: off."
                ),
                number("tau", 2.5, 100, 0.1, "How many times the norm of a token may grow."),
                number("alpha", 0.25, 1, 0.01, "The share of the result that is guided. 0: off."),
                step("start_at_step", 0, "The first guided step; 0 is the first step of the run."),
                step("end_at_step", LAST_STEP, "The first step after it without guidance."),
            ],
            outputs=model_and_report(),
        )

    @classmethod
    @needs("models", "layers", "runs", "NAG")
    def execute(
        cls,
        model: io.Model.Type,
        negative: list[Any],
        scale: float,
        tau: float,
        alpha: float,
        start_at_step: int = 0,
        end_at_step: int = LAST_STEP,
    ) -> io.NodeOutput:
        from ..hosts.comfyui.sample.nag import NagSettings, guide_attention

        settings = NagSettings(scale, tau, alpha, start_at_step, end_at_step)
        guided, report = guide_attention(model, negative, settings)
        return with_report(guided, report=report)
