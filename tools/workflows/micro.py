"""The workflow that runs with nothing downloaded."""

from __future__ import annotations

from .graph import Workflow
from .notes import note


def micro_text_to_image() -> Workflow:
    """The bundled model of 7.8 M parameters: what `make demo` runs, in ComfyUI."""
    title = "Text to image, bundled micro model"
    workflow = Workflow(
        "micro_text_to_image",
        title,
        note(
            title,
            "Paints one or two coloured shapes with the small Qwen-Image that comes with this "
            "pack. Nothing to download, and it runs on a processor too: press Run to see that "
            "everything works.",
            (
                "**Prompt**: a size, a colour, a shape, a place and a background, such as `a small "
                "red star at the top left on a blue background`.",
                "**Model**: any file of `models/diffusion_models`; text encoder and VAE are then "
                "found in their folders.",
            ),
        ),
    )
    load = workflow.add(
        "load", "QwenL40S_Load", "Model", "Models", model="micro (bundled)", precision="auto"
    )
    positive = workflow.add(
        "positive",
        "CLIPTextEncode",
        "Prompt",
        "Prompt",
        text="a large green circle at the bottom right on a white background",
        clip=load["CLIP"],
    )
    negative = workflow.add(
        "negative", "CLIPTextEncode", "Negative prompt", "Prompt", text=" ", clip=load["CLIP"]
    )
    empty = workflow.add(
        "empty", "EmptySD3LatentImage", "Size", "Prompt", width=256, height=256, batch_size=1
    )
    sample = workflow.add(
        "sample",
        "KSampler",
        "Sample",
        "Sampling",
        model=load["MODEL"],
        positive=positive["CONDITIONING"],
        negative=negative["CONDITIONING"],
        latent_image=empty["LATENT"],
        seed=1,
        steps=20,
        cfg=4.0,
        sampler_name="euler",
        scheduler="simple",
        denoise=1.0,
    )
    decode = workflow.add(
        "decode", "VAEDecode", "Decode", "Image", samples=sample["LATENT"], vae=load["VAE"]
    )
    workflow.add(
        "save", "SaveImage", "Save", "Image", images=decode["IMAGE"], filename_prefix="micro"
    )
    return workflow
