"""The nodes between latents and images, in the memory that is free."""

from __future__ import annotations

from comfy_api.latest import io

from .common import needs, schema, with_report

MOST_TILES = 4096


TILES = io.Int.Input(
    "tiles",
    default=0,
    min=0,
    max=MOST_TILES,
    optional=True,
    advanced=True,
    tooltip="0: the whole image if it fits in free VRAM, else as few tiles as possible. 1: always "
    "the whole image; ComfyUI may offload other models for it. More: at least that many "
    "tiles.",
)
FUSED = io.Boolean.Input(
    "fused",
    default=True,
    optional=True,
    advanced=True,
    tooltip="On: 2-D convolutions with fused kernels between them, in about half the time and "
    "memory or less, the same up to rounding. Off: ComfyUI's layers, bit for bit.",
)


def _report_output() -> io.String.Output:
    return io.String.Output(
        "report", tooltip="Whole or in how many tiles, why, and how much VRAM it took."
    )


class QwenL40SVAEDecode(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="QwenL40S_VAEDecode",
            display_name="VAE Decode (Qwen-Image)",
            description="Turns latents into images in the free VRAM; the transformer stays there. "
            "Use it instead of VAE Decode. An image that does not fit whole is decoded "
            "in tiles, without seams. For other VAEs and for videos, ComfyUI's VAE "
            "Decode runs.",
            search_aliases=[
                "vae decode",
                "vae decode tiled",
                "tiled",
                "out of memory",
                "oom",
                "latent to image",
            ],
            has_intermediate_output=True,
            inputs=[
                io.Latent.Input("samples", tooltip="The latents from the sampler."),
                io.Vae.Input("vae", tooltip="From any loader."),
                TILES,
                FUSED,
            ],
            outputs=[
                io.Image.Output(tooltip="To Save Image, as from ComfyUI's VAE Decode."),
                _report_output(),
            ],
        )

    @classmethod
    @needs("VAE", "using a VAE")
    def execute(
        cls, samples: io.Latent.Type, vae: io.Vae.Type, tiles: int = 0, fused: bool = True
    ) -> io.NodeOutput:
        from ..hosts.comfyui.decode.decode import decode

        images, report = decode(vae, samples["samples"], tiles, fused)
        return with_report(images, report=report)


class QwenL40SVAEEncode(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="QwenL40S_VAEEncode",
            display_name="VAE Encode (Qwen-Image)",
            description="Turns images into latents in the free VRAM; the transformer stays there. "
            "Use it instead of VAE Encode. An image that does not fit whole is encoded "
            "in tiles, to the same latents. For other VAEs and for videos, ComfyUI's "
            "VAE Encode runs.",
            search_aliases=[
                "vae encode",
                "vae encode tiled",
                "tiled",
                "out of memory",
                "oom",
                "image to latent",
            ],
            has_intermediate_output=True,
            inputs=[
                io.Image.Input(
                    "pixels",
                    tooltip="Images to encode, each to its own latent. With this VAE, ComfyUI's "
                    "VAE Encode takes a batch as the frames of one video.",
                ),
                io.Vae.Input("vae", tooltip="From any loader."),
                TILES,
                FUSED,
            ],
            outputs=[
                io.Latent.Output(
                    tooltip="To the sampler, or to a node that takes a reference latent."
                ),
                _report_output(),
            ],
        )

    @classmethod
    @needs("VAE", "using a VAE")
    def execute(
        cls, pixels: io.Image.Type, vae: io.Vae.Type, tiles: int = 0, fused: bool = True
    ) -> io.NodeOutput:
        from ..hosts.comfyui.decode.decode import encode

        latents, report = encode(vae, pixels, tiles, fused)
        return with_report({"samples": latents}, report=report)
