"""The node that makes a MODEL fast."""

from __future__ import annotations

from comfy_api.latest import io

from ..optimizations.attention import BACKENDS, FAST, MOST_ERROR
from .common import CATEGORY, require_host, with_report

ATTENTION_CHOICES = ["auto", FAST, "comfyui", *BACKENDS]


class QwenL40SOptimize(io.ComfyNode):
    """Runs a Qwen-Image MODEL with fused blocks and the fastest attention of the card."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="QwenL40S_Optimize",
            display_name="Optimize Qwen-Image",
            category=CATEGORY,
            description="Makes any Qwen-Image MODEL faster and keeps the picture: fused blocks, "
            "modulation from a table, and the card's fastest exact attention. Place it after LoRA "
            "loaders and before the sampler. The first step compares one block with ComfyUI's own, "
            "and falls back to ComfyUI's if they disagree. Other models pass through unchanged.",
            search_aliases=[
                "speed up",
                "faster",
                "torch compile model",
                "model attention backend",
                "patch sage attention kj",
                "flash attention",
                "sage attention",
                "fused kernels",
            ],
            has_intermediate_output=True,
            inputs=[
                io.Model.Input("model", tooltip="From any loader, in bf16, fp8 or int8."),
                io.Combo.Input(
                    "attention",
                    options=ATTENTION_CHOICES,
                    default="auto",
                    tooltip="auto: measures the card's exact backends once and uses the fastest. "
                    "fast: also allows attention in 8 bits, up to attention_error. comfyui: "
                    "ComfyUI's own. int8, int8_fp8, sage_2: 8 bits, whatever the error.",
                ),
                io.Boolean.Input(
                    "fused_blocks",
                    default=True,
                    tooltip="Off: ComfyUI's own blocks. With attention comfyui as well, the "
                    "picture is stock ComfyUI's, bit for bit.",
                ),
                io.Boolean.Input(
                    "tf32",
                    default=False,
                    optional=True,
                    advanced=True,
                    tooltip="Rounds fp32 matrix products to TF32 during the run. A bf16 model has "
                    "almost none.",
                ),
                io.Boolean.Input(
                    "cudnn_benchmark",
                    default=False,
                    optional=True,
                    advanced=True,
                    tooltip="Lets cuDNN time its convolution algorithms during the run. The "
                    "transformer has no convolutions; a ControlNet may have.",
                ),
                io.Float.Input(
                    "attention_error",
                    default=MOST_ERROR,
                    min=0.001,
                    max=0.1,
                    step=0.001,
                    optional=True,
                    advanced=True,
                    tooltip="The largest relative error that attention fast allows, measured in "
                    "the run. 0.02 allows int8, 0.045 also int8_fp8.",
                ),
            ],
            outputs=[
                io.Model.Output(tooltip="To the sampler."),
                io.String.Output(
                    display_name="report",
                    tooltip="What this node will do. Report Qwen-Image Run and ComfyUI's log say "
                    "what a run did.",
                ),
            ],
        )

    @classmethod
    def execute(
        cls,
        model: io.Model.Type,
        attention: str,
        fused_blocks: bool,
        tf32: bool = False,
        cudnn_benchmark: bool = False,
        attention_error: float = MOST_ERROR,
    ) -> io.NodeOutput:
        require_host()
        from ..hosts.comfyui.sample.optimize import OptimizeSettings, optimize, report_of

        settings = OptimizeSettings(fused_blocks, attention, tf32, cudnn_benchmark, attention_error)
        optimized = optimize(model, settings)
        return with_report(optimized, report=report_of(optimized))
