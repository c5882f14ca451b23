"""The nodes between latents and images, in the memory that is free."""

from __future__ import annotations

from comfy_api.latest import io

from .common import CATEGORY, require_host, with_report

MOST_TILES = 4096


def _tiles_input() -> io.Int.Input:
    return io.Int.Input(
        "tiles",
        default=0,
        min=0,
        max=MOST_TILES,
        optional=True,
        advanced=True,
        tooltip="0: whole where that fits the memory that is free, else the fewest tiles. 1: "
        "always whole, for which ComfyUI may have to move other models off the card. More: at "
        "least so many.",
    )


def _report_output() -> io.String.Output:
    return io.String.Output(
        "report", tooltip="Whole or in how many tiles, why, and what it took of memory."
    )


class QwenL40SVAEDecode(io.ComfyNode):
    """Latents to images."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="QwenL40S_VAEDecode",
            display_name="VAE Decode Qwen-Image",
            category=CATEGORY,
            description="ComfyUI's VAE Decode for Qwen-Image that plans its memory: the "
            "transformer stays on the card, and where the whole image does not fit, tiles give the "
            "same image without seams. Other VAEs, and videos, are decoded by ComfyUI itself.",
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
                io.Latent.Input("samples", tooltip="What the sampler gives."),
                io.Vae.Input("vae", tooltip="From any loader."),
                _tiles_input(),
            ],
            outputs=[
                io.Image.Output(tooltip="As ComfyUI's VAE Decode gives them: to Save Image."),
                _report_output(),
            ],
        )

    @classmethod
    def execute(cls, samples: io.Latent.Type, vae: io.Vae.Type, tiles: int = 0) -> io.NodeOutput:
        require_host()
        from ..hosts.comfyui.decode.decode import decode

        images, report = decode(vae, samples["samples"], tiles)
        return with_report(images, report=report)


class QwenL40SVAEEncode(io.ComfyNode):
    """Images to latents."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="QwenL40S_VAEEncode",
            display_name="VAE Encode Qwen-Image",
            category=CATEGORY,
            description="ComfyUI's VAE Encode for Qwen-Image that plans its memory: the "
            "transformer stays on the card, and where the whole image does not fit, tiles give the "
            "same latents. Other VAEs, and videos, are encoded by ComfyUI itself.",
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
                    tooltip="Each image of a batch becomes a latent of its own. ComfyUI's VAE "
                    "Encode takes the batch as the frames of one video with this VAE.",
                ),
                io.Vae.Input("vae", tooltip="From any loader."),
                _tiles_input(),
            ],
            outputs=[
                io.Latent.Output(tooltip="To the sampler, or to a node that takes a reference."),
                _report_output(),
            ],
        )

    @classmethod
    def execute(cls, pixels: io.Image.Type, vae: io.Vae.Type, tiles: int = 0) -> io.NodeOutput:
        require_host()
        from ..hosts.comfyui.decode.decode import encode

        latents, report = encode(vae, pixels, tiles)
        return with_report({"samples": latents}, report=report)
