"""The workflow that runs with nothing downloaded."""

from __future__ import annotations

from .graph import Workflow
from .notes import note
from .parts import IMAGE, MODELS, empty, encode, sample, save


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
        "load", "QwenL40S_Load", "Model", MODELS, model="micro (bundled)", precision="auto"
    )
    text = "a large green circle at the bottom right on a white background"
    positive = encode(workflow, "positive", "Prompt", text, load["CLIP"])
    negative = encode(workflow, "negative", "Negative prompt", " ", load["CLIP"])
    latent = empty(workflow, 256, 256, id="empty")
    painted = sample(workflow, load["MODEL"], positive, negative, latent, steps=20, cfg=4.0)
    images = workflow.add("decode", "VAEDecode", "Decode", IMAGE, samples=painted, vae=load["VAE"])[
        "IMAGE"
    ]
    save(workflow, images, "micro")
    return workflow
