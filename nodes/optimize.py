"""The nodes that change how a MODEL samples: faster, on several cards, guided as diffusers does."""

from __future__ import annotations

from comfy_api.latest import io

from ..optimizations.attention import BACKENDS, FAST, MOST_ERROR
from ..planning.options import todays
from .common import choice_input, model_and_report, needs, schema, with_report

ATTENTION_CHOICES = ["auto", FAST, "comfyui", *BACKENDS]


class QwenL40SOptimize(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="QwenL40S_Optimize",
            display_name="Qwen-Image Optimize",
            description="Makes any Qwen-Image MODEL faster; the image stays the same up to "
            "rounding. Use it after LoRA loaders and before the sampler. It runs fused "
            "kernels, a modulation table and the GPU's fastest exact attention. The "
            "first run compiles for some seconds and compares one block with "
            "ComfyUI's. Other models are left unchanged.",
            search_aliases=[
                "qwen fast",
                "qwen image fast",
                "speed up",
                "faster",
                "accelerate",
                "accelerator",
                "加速",
                "triton",
                "int8",
                "sage",
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
                choice_input(
                    "attention",
                    ATTENTION_CHOICES,
                    default="auto",
                    tooltip="auto: measures the GPU's exact backends once and uses the fastest. "
                    "fast: also allows 8-bit attention up to max_8bit_error. comfyui: "
                    "ComfyUI's attention. kitchen_int8: 8 bits, with any error.",
                ),
                io.Boolean.Input(
                    "fused_blocks",
                    default=True,
                    tooltip="Off: ComfyUI's blocks. With attention ComfyUI default as well, the "
                    "image is stock ComfyUI's, bit for bit.",
                ),
                io.Boolean.Input(
                    "tf32",
                    default=False,
                    optional=True,
                    advanced=True,
                    tooltip="Rounds fp32 matrix products to TF32 during the run, for models that "
                    "compute in fp32. A bf16 model has almost none.",
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
                    tooltip="The largest relative error that auto (allow 8-bit) allows, measured "
                    "in the run. kitchen_int8 is off by 0.017 on random input.",
                ),
            ],
            outputs=model_and_report(),
        )

    @classmethod
    @needs("models", "layers", "runs")
    def execute(
        cls,
        model: io.Model.Type,
        attention: str,
        fused_blocks: bool,
        tf32: bool = False,
        cudnn_benchmark: bool = False,
        attention_error: float = MOST_ERROR,
    ) -> io.NodeOutput:
        from ..hosts.comfyui.sample.optimize import OptimizeSettings, optimize, report_of

        attention = todays({"attention": attention})["attention"]
        settings = OptimizeSettings(fused_blocks, attention, tf32, cudnn_benchmark, attention_error)
        optimized = optimize(model, settings)
        return with_report(optimized, report=report_of(optimized))


class QwenL40SSplitCards(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="QwenL40S_SplitCards",
            display_name="Qwen-Image MultiGPU Split",
            description="Generates one image on several GPUs of one kind, without NVLink. Use it "
            "if one image takes too long; for many images, run one ComfyUI for each "
            "GPU. With CFG above 1, each prompt runs on its own GPU. At CFG 1, or with "
            "more GPUs than prompts, the GPUs share the image tokens. Each GPU holds "
            "all weights.",
            search_aliases=[
                "multi gpu",
                "multigpu cfg split",
                "two gpus",
                "second gpu",
                "parallel",
                "raylight",
                "xdit",
                "tensor parallel",
                "sequence parallel",
            ],
            has_intermediate_output=True,
            inputs=[
                io.Model.Input(
                    "model",
                    tooltip="From Qwen-Image Optimize; without it, the GPUs share no image tokens.",
                ),
                io.Int.Input(
                    "cards",
                    default=2,
                    min=1,
                    max=16,
                    tooltip="How many GPUs to use, with the MODEL's. Each GPU holds all weights. "
                    "1: as without this node.",
                ),
            ],
            outputs=[
                io.Model.Output(tooltip="To the sampler."),
                io.String.Output(
                    display_name="report",
                    tooltip="Which GPUs are used, and why others are not. Qwen-Image Run Report "
                    "and ComfyUI's log show what a run did.",
                ),
            ],
        )

    @classmethod
    @needs("models", "layers", "runs", "cards")
    def execute(cls, model: io.Model.Type, cards: int) -> io.NodeOutput:
        from ..hosts.comfyui.sample.cards import split_cards

        split, report = split_cards(model, cards)
        return with_report(split, report=report)


class QwenL40SCFGNorm(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="QwenL40S_CFGNorm",
            display_name="Qwen-Image CFG Rescale",
            description="Applies CFG as diffusers does: with CFG above 1, each token of the guided "
            "prediction gets the norm of the positive prediction. Use it to get the "
            "image of diffusers. No effect at CFG 1.",
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
                    tooltip="From any loader, LoRA loader or Qwen-Image Optimize. This node "
                    "replaces a RescaleCFG before it; do not add CFGNorm as well.",
                )
            ],
            outputs=[io.Model.Output(tooltip="To the sampler.")],
        )

    @classmethod
    @needs("models")
    def execute(cls, model: io.Model.Type) -> io.NodeOutput:
        from ..hosts.comfyui.sample.cfg_norm import rescale_by_token

        return io.NodeOutput(rescale_by_token(model))
