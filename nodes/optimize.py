"""The nodes that change how a MODEL samples: faster, on several cards, guided as diffusers does."""

from __future__ import annotations

from comfy_api.latest import io

from ..optimizations.attention import BACKENDS, FAST, MOST_ERROR
from ..options import todays
from .common import choice_input, model_and_report, needs, schema, with_report

ATTENTION_CHOICES = ["auto", FAST, "comfyui", *BACKENDS]


class QwenL40SOptimize(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="QwenL40S_Optimize",
            display_name="Qwen-Image Optimize",
            description="Makes any Qwen-Image MODEL faster and keeps the picture: fused blocks, "
            "modulation from a table, and the card's fastest exact attention. Place it after LoRA "
            "loaders and before the sampler. The first step compares one block with ComfyUI's own, "
            "and falls back to ComfyUI's if they disagree. Other models pass through unchanged.",
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
                    tooltip="auto: measures the card's exact backends once and uses the fastest. "
                    "fast: also allows attention in 8 bits, up to max_8bit_error. comfyui: "
                    "ComfyUI's own. int8, int8_fp8, kitchen_int8: 8 bits, whatever the error.",
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
            description="Paints one image on several cards of one kind, without NVLink. With CFG "
            "above 1, each prompt runs on a card of its own, as with MultiGPU CFG Split. At CFG "
            "1, or with more cards than prompts, the cards share the image rows of each pass. "
            "For many images, one ComfyUI for each card makes more of them in an hour.",
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
                    "model", tooltip="From Qwen-Image Optimize, without which no rows are shared."
                ),
                io.Int.Input(
                    "cards",
                    default=2,
                    min=1,
                    max=16,
                    tooltip="How many cards to use, the MODEL's own with them. Each holds all "
                    "weights. 1: as without this node.",
                ),
            ],
            outputs=[
                io.Model.Output(tooltip="To the sampler."),
                io.String.Output(
                    display_name="report",
                    tooltip="Which cards are used, and why others are not. Qwen-Image Run Report "
                    "and ComfyUI's log say what a run did.",
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
