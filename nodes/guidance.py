"""The node for guidance as diffusers computes it."""

from __future__ import annotations

from comfy_api.latest import io

from .common import CATEGORY, require_host


class QwenL40SCFGNorm(io.ComfyNode):
    """Makes KSampler guide a MODEL the way diffusers does."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="QwenL40S_CFGNorm",
            display_name="CFG Norm Qwen-Image",
            category=CATEGORY,
            description="Guides a Qwen-Image MODEL as diffusers does: with CFG above 1, each token "
            "of the guided prediction gets the norm it has in the positive prediction. No effect "
            "at CFG 1.",
            search_aliases=[
                "cfg norm",
                "cfg rescale",
                "rescale cfg",
                "true cfg",
                "diffusers guidance",
            ],
            inputs=[
                io.Model.Input(
                    "model",
                    tooltip="From any loader, LoRA loader or Optimize Qwen-Image. This node "
                    "replaces a RescaleCFG before it; do not add CFGNorm as well.",
                )
            ],
            outputs=[io.Model.Output(tooltip="To the sampler.")],
        )

    @classmethod
    def execute(cls, model: io.Model.Type) -> io.NodeOutput:
        require_host()
        from ..hosts.comfyui.sample.guidance import rescale_by_token

        return io.NodeOutput(rescale_by_token(model))
