"""The node that spreads one image over several cards."""

from __future__ import annotations

from comfy_api.latest import io

from .common import CATEGORY, require_host, with_report


class QwenL40SSplitCards(io.ComfyNode):
    """Runs a Qwen-Image MODEL on several cards of one kind."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="QwenL40S_SplitCards",
            display_name="Split Qwen-Image over Cards",
            category=CATEGORY,
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
                    "model", tooltip="From Optimize Qwen-Image, without which no rows are shared."
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
                    tooltip="Which cards are used, and why others are not. Report Qwen-Image Run "
                    "and ComfyUI's log say what a run did.",
                ),
            ],
        )

    @classmethod
    def execute(cls, model: io.Model.Type, cards: int) -> io.NodeOutput:
        require_host()
        from ..hosts.comfyui.sample.cards import split_cards

        split, report = split_cards(model, cards)
        return with_report(split, report=report)
