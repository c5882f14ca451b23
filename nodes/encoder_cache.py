"""The node that has a text encoder reuse what it has encoded."""

from __future__ import annotations

from comfy_api.latest import io

from ..spec.formats import GIB
from .common import needs, schema, with_report

ARITHMETIC_CHOICES = ["auto", "exact", "bf16x2", "bf16", "int8"]
MOST_GIB = 4096.0


class QwenL40SEncoderCache(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="QwenL40S_EncoderCache",
            display_name="Qwen-Image Text Encoder Cache",
            description="Encodes reference images once; a new instruction or a negative prompt "
            "reuses the result. The loaders of this pack do so by default. Use the "
            "node to change the settings, or with a CLIP from another loader. The kept "
            "results take system RAM. Other CLIPs are left unchanged.",
            search_aliases=[
                "text encoder cache",
                "prompt cache",
                "prefix cache",
                "clip cache",
                "kv cache",
                "encode faster",
                "edit faster",
                "text encoder bf16",
            ],
            has_intermediate_output=True,
            inputs=[
                io.Clip.Input("clip", tooltip="From any loader, before or after a LoRA loader."),
                io.Boolean.Input(
                    "reuse",
                    default=True,
                    tooltip="On: images, and all text before the instruction, are encoded once. "
                    "Prompts with images differ from ComfyUI's by rounding in fp32, in any "
                    "order. Off: ComfyUI's encoding, bit for bit where arithmetic is "
                    "exact.",
                ),
                io.Float.Input(
                    "memory",
                    default=4.0,
                    min=0.0,
                    max=MOST_GIB,
                    step=0.5,
                    tooltip="System RAM for the kept results, in GiB; the oldest result leaves "
                    "first. A reference of one megapixel takes 0.4 GiB in Qwen-Image-2.1. "
                    "0: as reuse off.",
                ),
                io.Combo.Input(
                    "arithmetic",
                    options=ARITHMETIC_CHOICES,
                    default="auto",
                    tooltip="exact: matrix products in fp32, as ComfyUI. bf16x2: each fp32 input "
                    "as the sum of two bf16 numbers, which loses 2**-17 of it; faster. auto: "
                    "bf16x2, or exact on a CPU or an older GPU. bf16: products in bf16, the rest "
                    "in fp32; lossy. int8: as bf16, and the layers of an int8 file in int8.",
                ),
            ],
            outputs=[
                io.Clip.Output(tooltip="To the text encode nodes."),
                io.String.Output(
                    display_name="report", tooltip="What this node will do, or why it does nothing."
                ),
            ],
        )

    @classmethod
    @needs("text encoder", "encoding")
    def execute(
        cls, clip: io.Clip.Type, reuse: bool, memory: float, arithmetic: str
    ) -> io.NodeOutput:
        from ..hosts.comfyui.encode import EncodeSettings
        from ..hosts.comfyui.load.text_encoder import encode_with

        settings = EncodeSettings(int(memory * GIB) if reuse else 0, arithmetic)
        found, report = encode_with(clip, settings)
        return with_report(found, report=report)
