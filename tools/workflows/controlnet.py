"""Text to image along the edges of a picture, with a ControlNet."""

from __future__ import annotations

from ...planning.request import RunRequest
from ...spec.formats import GB
from .edit import PICTURE
from .graph import CONTROL_UNION, QWEN_2512, TEXT_ENCODER, VAE, Workflow
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
from .text_to_image import CFG, FAMILY, NEGATIVE, PROMPT_FIRST, SIDE, STEPS, STEPS_LAST

EDGES, CONTROL = "Edges", "ControlNet"
EDGES_HEIGHT = 150  # as shown
MEGAPIXELS = round(SIDE**2 / 2**20, 2)  # as ComfyUI counts them
THRESHOLDS = {"low_threshold": 0.33, "high_threshold": 0.35}  # of ComfyUI's own template
PIXELS = 16  # of a token, in both directions
EXAMPLE = (
    "A felt doll with long yellow hair and a pink dress, handmade of wool, stands on a green hill "
    "under a blue sky with white clouds, soft daylight, photograph, 50 mm"
)


def controlnet() -> Workflow:
    """The outlines of a picture, filled anew."""
    title = "Text to image with a ControlNet"
    workflow = Workflow(
        "controlnet",
        title,
        note(
            title,
            "Paints the prompt along the edges of a picture, in its aspect ratio. The ControlNet "
            "was made for Qwen-Image-2512 and also takes depth maps, poses, straight lines, "
            "sketches and grey pictures.",
            (
                "**Load Image**: your picture. For a depth map or a pose, connect that image "
                "instead of **Detect Edges (Canny)**.",
                "**Detect Edges (Canny)**: lower thresholds keep more edges.",
                PROMPT_FIRST,
                "**Apply ControlNet**: `strength`, and `end_percent` below 1 to leave the last "
                "steps free.",
                STEPS_LAST,
            ),
            files=(QWEN_2512, TEXT_ENCODER, VAE, CONTROL_UNION),
            request=RunRequest(
                family=FAMILY,
                precision="bf16",
                steps=STEPS,
                controlnet_bytes=round(CONTROL_UNION.gb * GB),
            ),
        ),
        columns=((MODELS,), (EDGES, MODEL), (PROMPT, CONTROL), (SAMPLING, IMAGE)),
    )
    # With the ControlNet, an L40S has no room for the text encoder while it samples.
    loaded = load(workflow, QWEN_2512, precision="bf16", placement="drop after encoding")
    net = workflow.add(
        "control_net",
        "ControlNetLoader",
        CONTROL,
        models=[CONTROL_UNION],
        control_net_name=CONTROL_UNION.name,
    )
    picture = workflow.add("image", "LoadImage", EDGES, image=PICTURE)
    scaled = workflow.add(
        "scale",
        "ImageScaleToTotalPixels",
        EDGES,
        folded=True,
        image=picture["IMAGE"],
        upscale_method="lanczos",
        megapixels=MEGAPIXELS,
        resolution_steps=PIXELS,
    )["IMAGE"]
    edges = workflow.add("edges", "Canny", EDGES, image=scaled, **THRESHOLDS)["IMAGE"]
    workflow.add("edges_picture", "PreviewImage", EDGES, shown=EDGES_HEIGHT, images=edges)
    size = workflow.add("picture_size", "GetImageSize", PROMPT, folded=True, image=scaled)
    latent = workflow.add(
        "size",
        "EmptySD3LatentImage",
        PROMPT,
        folded=True,
        width=size["width"],
        height=size["height"],
        batch_size=1,
    )["LATENT"]
    controlled = workflow.add(
        "control",
        "ControlNetApplyAdvanced",
        CONTROL,
        positive=encode(workflow, "positive", EXAMPLE, loaded.clip),
        negative=encode(workflow, "negative", NEGATIVE, loaded.clip, "negative prompt"),
        control_net=net["CONTROL_NET"],
        image=edges,
        vae=loaded.vae,
    )
    painted = sample(
        workflow,
        fast(workflow, loaded.model, group=MODEL, folded=True),
        controlled["positive"],
        controlled["negative"],
        latent,
        steps=STEPS,
        cfg=CFG,
    )
    save(workflow, decode(workflow, painted, loaded.vae, folded=True))
    return workflow
