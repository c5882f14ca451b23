"""Editing pictures with Qwen-Image-Edit-2511: one reference, three, and inside a mask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ...planning.request import RunRequest
from ...spec import find_family
from .graph import EDIT_2511, TEXT_ENCODER, VAE, Link, Workflow
from .parts import (
    IMAGE,
    MODEL,
    MODELS,
    PROMPT,
    SAMPLING,
    Loaded,
    decode,
    fast,
    load,
    note,
    sample,
    save,
)

IMAGES, MASK = "Images", "Mask"
PICTURE = "example.png"  # ComfyUI brings it in its input folder
FAMILY = "qwen-image-edit-2511"
STEPS, CFG = find_family(FAMILY).steps, 4.0  # the model card's
COLUMNS = ((MODELS,), (IMAGES, MASK, MODEL), (PROMPT,), (SAMPLING, IMAGE))
STEPS_LAST = f"**KSampler**: the model card uses {STEPS} steps; 20 take half the time."
FILES = (EDIT_2511, TEXT_ENCODER, VAE)


class EncodedPrompts(NamedTuple):
    """What the sampler is guided by."""

    positive: Link
    negative: Link


def edit_2511() -> Workflow:
    """One picture changed as the prompt says."""
    return _edit(
        "edit_2511",
        "Edit a picture, Edit-2511",
        "Changes a picture as the prompt says. **FluxKontextImageScale** scales it to one "
        "megapixel and crops it to the nearest standard aspect ratio.",
        ("**Load Image**: your picture.", "The prompt: what to change and what to keep."),
        pictures=1,
        prompt="Turn the picture into a watercolour painting on rough paper, keep the composition",
    )


def edit_2511_three_references() -> Workflow:
    """Things of three pictures in one."""
    return _edit(
        "edit_2511_three_references",
        "Edit with three pictures, Edit-2511",
        "Combines parts of three pictures. The result has the aspect ratio of image 1.",
        (
            "**Load Image**: your three pictures; at first, all are ComfyUI's example. For two "
            "pictures, delete image 3; that is faster.",
            "The prompt: what to take from image 1, image 2 and image 3.",
        ),
        pictures=3,
        prompt="The scene of image 1 in the light of image 2, with the colours of image 3",
    )


def inpaint() -> Workflow:
    """What a mask covers is painted anew; the rest stays, pixel for pixel."""
    title = "Inpaint, Edit-2511"
    workflow = Workflow(
        "inpaint",
        title,
        note(
            title,
            "Repaints what you mask. The picture is scaled to one megapixel and cropped to the "
            "nearest standard aspect ratio; all pixels outside the mask then stay as they are.\n\n"
            "**Right-click Load Image > Open in MaskEditor**, paint over the area to change, and "
            "save. Without a mask nothing changes. Over the API, the transparent part of a PNG is "
            "the mask.",
            (
                "**Load Image**: your picture and its mask.",
                "The prompt: what to paint there.",
                STEPS_LAST,
            ),
            files=FILES,
            request=_request(references=1),
        ),
        columns=COLUMNS,
    )
    loaded = load(workflow, EDIT_2511, precision="bf16")
    (scaled,) = _images(workflow, count=1)
    mask = _scaled_mask(workflow, workflow.nodes["image_1"]["MASK"])
    prompts = _prompts(
        workflow, loaded, [scaled], "A small red hot-air balloon, the rest stays as it is"
    )
    masked = workflow.add(
        "latent_mask",
        "SetLatentNoiseMask",
        PROMPT,
        folded=True,
        samples=_encode(workflow, scaled, loaded.vae),
        mask=mask,
    )
    painted = _sample(workflow, loaded, prompts, masked["LATENT"], folded=True)
    composite = workflow.add(
        "composite",
        "ImageCompositeMasked",
        IMAGE,
        folded=True,
        destination=scaled,
        source=decode(workflow, painted, loaded.vae, folded=True),
        mask=mask,
    )
    save(workflow, composite["IMAGE"])
    return workflow


def _edit(
    name: str, title: str, what: str, change: Sequence[str], *, pictures: int, prompt: str
) -> Workflow:
    workflow = Workflow(
        name,
        title,
        note(title, what, (*change, STEPS_LAST), files=FILES, request=_request(pictures)),
        columns=COLUMNS,
    )
    loaded = load(workflow, EDIT_2511, precision="bf16")
    images = _images(workflow, count=pictures)
    prompts = _prompts(workflow, loaded, images, prompt)
    latent = _encode(workflow, images[0], loaded.vae)
    # Three pictures leave no room for what nobody changes.
    folded = pictures > 1
    painted = _sample(workflow, loaded, prompts, latent, folded=folded)
    save(workflow, decode(workflow, painted, loaded.vae, folded=folded))
    return workflow


def _request(references: int) -> RunRequest:
    # example.png is square, and FluxKontextImageScale makes a square megapixel of it.
    return RunRequest(
        family=FAMILY,
        precision="bf16",
        width=1024,
        height=1024,
        steps=STEPS,
        references=references,
    )


def _images(workflow: Workflow, count: int) -> list[Link]:
    """Pictures to look at; the first at the size that is painted."""
    loaded = [
        workflow.add(
            f"image_{index}",
            "LoadImage",
            PROMPT if index > 2 else IMAGES,
            about=f"image {index}" if count > 1 else "",
            image=PICTURE,
        )
        for index in range(1, count + 1)
    ]
    first, *others = [node["IMAGE"] for node in loaded]
    scale = workflow.add("scale", "FluxKontextImageScale", IMAGES, folded=True, image=first)
    return [scale["IMAGE"], *others]


def _scaled_mask(workflow: Workflow, mask: Link) -> Link:
    """A mask cut and scaled as its picture is, which only images can be."""
    picture = workflow.add("mask_image", "MaskToImage", MASK, folded=True, mask=mask)
    scale = workflow.add(
        "mask_scale",
        "FluxKontextImageScale",
        MASK,
        about="mask",
        folded=True,
        image=picture["IMAGE"],
    )
    back = workflow.add(
        "mask", "ImageToMask", MASK, folded=True, image=scale["IMAGE"], channel="red"
    )
    return back["MASK"]


def _prompts(
    workflow: Workflow, loaded: Loaded, images: Sequence[Link], text: str
) -> EncodedPrompts:
    """Both prompts see the pictures, and each token of a picture its own timestep, 0."""
    seen = {f"image{index}": image for index, image in enumerate(images, start=1)}
    found = []
    for id, about, prompt in (("positive", "prompt", text), ("negative", "negative prompt", " ")):
        encoded = workflow.add(
            id,
            "TextEncodeQwenImageEditPlus",
            PROMPT,
            about=about,
            folded=id == "negative",
            clip=loaded.clip,
            vae=loaded.vae,
            prompt=prompt,
            **seen,
        )
        method = workflow.add(
            f"{id}_method",
            "FluxKontextMultiReferenceLatentMethod",
            PROMPT,
            about=about,
            folded=True,
            conditioning=encoded["CONDITIONING"],
            reference_latents_method="index_timestep_zero",
        )
        found.append(method["CONDITIONING"])
    return EncodedPrompts(*found)


def _encode(workflow: Workflow, image: Link, vae: Link) -> Link:
    node = workflow.add("encode", "QwenL40S_VAEEncode", PROMPT, folded=True, pixels=image, vae=vae)
    return node["LATENT"]


def _sample(
    workflow: Workflow, loaded: Loaded, prompts: EncodedPrompts, latent: Link, *, folded: bool
) -> Link:
    # Guided as the model's authors do it; ComfyUI's template comes near with its own CFGNorm.
    group = SAMPLING if folded else MODEL
    guided = workflow.add(
        "cfg_norm",
        "QwenL40S_CFGNorm",
        group,
        folded=True,
        model=fast(workflow, loaded.model, group=group, folded=folded),
    )
    return sample(workflow, guided["MODEL"], *prompts, latent, steps=STEPS, cfg=CFG)
