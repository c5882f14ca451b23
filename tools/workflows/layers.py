"""A picture taken apart into layers with Qwen-Image-Layered."""

from __future__ import annotations

from ...planning.request import RunRequest
from ...spec.families import find_family
from .edit import PICTURE
from .graph import LAYERED, LAYERED_VAE, TEXT_ENCODER, Link, Workflow
from .parts import (
    IMAGE,
    MODEL,
    MODELS,
    PROMPT,
    SAMPLING,
    decode,
    encode,
    fast,
    load,
    note,
    sample,
    save,
)

IMAGES = "Picture"
FAMILY = "qwen-image-layered"
STEPS, CFG = find_family(FAMILY).steps, 4.0  # the model card's
SIDE, LAYERS = 640, 4  # the model card's
SHIFT = 1.0  # of ComfyUI's own template of Layered


def layered() -> Workflow:
    """One picture becomes several with transparency."""
    title = "Take a picture apart, Layered"
    workflow = Workflow(
        "layered",
        title,
        note(
            title,
            f"Splits a picture into {LAYERS} layers with transparency and saves each as a PNG.",
            (
                "**Load Image**: your picture.",
                "The prompt may stay empty. It describes the whole picture, hidden parts included; "
                "it does not choose the layers.",
                "**Empty Qwen Image Layered Latent**: `layers`; each takes as long as the picture.",
                f"**Scale Image to Max Dimension**: the model card uses {SIDE}; 1024 shows more "
                "detail.",
            ),
            files=(LAYERED, TEXT_ENCODER, LAYERED_VAE),
            request=RunRequest(
                family=FAMILY,
                precision="bf16",
                width=SIDE,
                height=SIDE,
                steps=STEPS,
                references=1,
                layers=LAYERS,
            ),
        ),
        columns=((MODELS,), (IMAGES, MODEL), (PROMPT,), (SAMPLING, IMAGE)),
    )
    loaded = load(workflow, LAYERED, vae=LAYERED_VAE, precision="bf16")
    picture = workflow.add("image", "LoadImage", IMAGES, image=PICTURE)
    scaled = workflow.add(
        "scale",
        "ImageScaleToMaxDimension",
        IMAGES,
        image=picture["IMAGE"],
        upscale_method="lanczos",
        largest_size=SIDE,
    )["IMAGE"]
    encoded = workflow.add(
        "encode", "QwenL40S_VAEEncode", PROMPT, folded=True, pixels=scaled, vae=loaded.vae
    )
    positive, negative = (
        _with_picture(workflow, id, encode(workflow, id, "", loaded.clip, about), encoded["LATENT"])
        for id, about in (("positive", ""), ("negative", "negative prompt"))
    )
    size = workflow.add("picture_size", "GetImageSize", PROMPT, folded=True, image=scaled)
    latent = workflow.add(
        "size",
        "EmptyQwenImageLayeredLatentImage",
        PROMPT,
        width=size["width"],
        height=size["height"],
        layers=LAYERS,
    )["LATENT"]
    model = fast(workflow, loaded.model, shift=SHIFT, group=MODEL, folded=True)
    guided = workflow.add("cfg_norm", "QwenL40S_CFGNorm", MODEL, folded=True, model=model)
    painted = sample(workflow, guided["MODEL"], positive, negative, latent, steps=STEPS, cfg=CFG)
    # The first of the images that are painted together is the whole picture again.
    cut = workflow.add(
        "layers_alone",
        "LatentCut",
        IMAGE,
        folded=True,
        samples=painted,
        dim="t",
        index=1,
        amount=16384,
    )
    apart = workflow.add(
        "apart", "LatentCutToBatch", IMAGE, folded=True, samples=cut["LATENT"], dim="t"
    )
    save(workflow, decode(workflow, apart["LATENT"], loaded.vae, folded=True))
    return workflow


def _with_picture(workflow: Workflow, id: str, conditioning: Link, latent: Link) -> Link:
    node = workflow.add(
        f"{id}_picture",
        "ReferenceLatent",
        PROMPT,
        about="prompt" if id == "positive" else "negative prompt",
        folded=True,
        conditioning=conditioning,
        latent=latent,
    )
    return node["CONDITIONING"]
