"""Editing pictures with Qwen-Image-Edit-2511: one reference, three, and inside a mask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ...planning.request import RunRequest
from .graph import EDIT_2511, TEXT_ENCODER, VAE, Link, Workflow
from .parts import (
    IMAGE,
    MODELS,
    PROMPT,
    SAMPLING,
    Loaded,
    decode,
    load,
    note,
    sample,
    save,
    shifted,
)

IMAGES, MASK = "Images", "Mask"
PICTURE = "example.png"  # ComfyUI brings it in its input folder
STEPS, CFG = 40, 4.0  # of ComfyUI's own template of Edit-2511
COLUMNS = ((MODELS,), (IMAGES,), (PROMPT,), (SAMPLING,), (IMAGE,))
FEWER_STEPS = f"**Sample**: 20 steps instead of {STEPS} take half of the time."
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
        "Changes **Image 1** as the prompt says, in bf16. **Scale** brings the picture to one "
        "megapixel in the nearest of the usual shapes, and cuts what sticks out.",
        ("**Image 1**: your picture.", "**Prompt**: what to change, and what to keep."),
        pictures=1,
        prompt="Turn the picture into a watercolour painting on rough paper, keep the composition",
    )


def edit_2511_three_references() -> Workflow:
    """Things of three pictures in one."""
    return _edit(
        "edit_2511_three_references",
        "Edit with three pictures, Edit-2511",
        "Brings things of three pictures together, in bf16. The result has the shape of "
        "**Image 1**; the prompt calls them image 1, image 2 and image 3.",
        (
            "**Image 1**, **Image 2**, **Image 3**: your pictures. Delete the third one and "
            "two are taken, faster.",
            "**Prompt**: what comes from which image.",
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
            "Paints anew what you mask. Every pixel outside the mask stays exactly as **Scale** "
            "gives it: one megapixel in the nearest of the usual shapes.\n\n"
            "**Right-click Image 1 > Open in MaskEditor**, paint over what is to change, save. "
            "Without a mask nothing changes. Over the API, the transparent part of a PNG is the "
            "mask.",
            (
                "**Image 1** and its mask.",
                "**Prompt**: what is to be there.",
                FEWER_STEPS,
            ),
            files=FILES,
            request=_request(references=1),
        ),
        columns=((MODELS,), (IMAGES, MASK), (PROMPT,), (SAMPLING,), (IMAGE,)),
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
        "Masked latent",
        SAMPLING,
        samples=_encode(workflow, scaled, loaded.vae),
        mask=mask,
    )
    painted = decode(workflow, _sample(workflow, loaded, prompts, masked["LATENT"]), loaded.vae)
    composite = workflow.add(
        "composite",
        "ImageCompositeMasked",
        "Composite",
        IMAGE,
        destination=scaled,
        source=painted,
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
        note(title, what, (*change, FEWER_STEPS), files=FILES, request=_request(pictures)),
        columns=COLUMNS,
    )
    loaded = load(workflow, EDIT_2511, precision="bf16")
    images = _images(workflow, count=pictures)
    prompts = _prompts(workflow, loaded, images, prompt)
    latent = _encode(workflow, images[0], loaded.vae)
    painted = _sample(workflow, loaded, prompts, latent)
    save(workflow, decode(workflow, painted, loaded.vae))
    return workflow


def _request(references: int) -> RunRequest:
    # example.png is square, and FluxKontextImageScale makes a square megapixel of it.
    return RunRequest(
        family="qwen-image-edit-2511",
        precision="bf16",
        width=1024,
        height=1024,
        steps=STEPS,
        references=references,
    )


def _images(workflow: Workflow, count: int) -> list[Link]:
    """Pictures to look at; the first at the size that is painted."""
    loaded = [
        workflow.add(f"image_{index}", "LoadImage", f"Image {index}", IMAGES, image=PICTURE)
        for index in range(1, count + 1)
    ]
    first, *others = [node["IMAGE"] for node in loaded]
    scale = workflow.add("scale", "FluxKontextImageScale", "Scale", PROMPT, image=first)
    return [scale["IMAGE"], *others]


def _scaled_mask(workflow: Workflow, mask: Link) -> Link:
    """A mask cut and scaled as its picture is, which only images can be."""
    picture = workflow.add("mask_image", "MaskToImage", "Mask as image", MASK, mask=mask)
    scale = workflow.add(
        "mask_scale", "FluxKontextImageScale", "Scale mask", MASK, image=picture["IMAGE"]
    )
    back = workflow.add("mask", "ImageToMask", "Mask", MASK, image=scale["IMAGE"], channel="red")
    return back["MASK"]


def _prompts(
    workflow: Workflow, loaded: Loaded, images: Sequence[Link], text: str
) -> EncodedPrompts:
    """Both prompts see the pictures, and each token of a picture its own timestep, 0."""
    seen = {f"image{index}": image for index, image in enumerate(images, start=1)}
    found = []
    for id, title, prompt in (("positive", "Prompt", text), ("negative", "Negative prompt", "")):
        encoded = workflow.add(
            id,
            "TextEncodeQwenImageEditPlus",
            title,
            PROMPT,
            clip=loaded.clip,
            vae=loaded.vae,
            prompt=prompt,
            **seen,
        )
        method = workflow.add(
            f"{id}_method",
            "FluxKontextMultiReferenceLatentMethod",
            "Reference method" if id == "positive" else "Negative reference method",
            PROMPT,
            conditioning=encoded["CONDITIONING"],
            reference_latents_method="index_timestep_zero",
        )
        found.append(method["CONDITIONING"])
    return EncodedPrompts(*found)


def _encode(workflow: Workflow, image: Link, vae: Link) -> Link:
    return workflow.add("encode", "QwenL40S_VAEEncode", "Encode", SAMPLING, pixels=image, vae=vae)[
        "LATENT"
    ]


def _sample(workflow: Workflow, loaded: Loaded, prompts: EncodedPrompts, latent: Link) -> Link:
    # Guided as the model's authors do it; ComfyUI's template comes near with its own CFGNorm.
    guided = workflow.add(
        "cfg_norm", "QwenL40S_CFGNorm", "CFG norm", SAMPLING, model=shifted(workflow, loaded.model)
    )
    return sample(workflow, guided["MODEL"], *prompts, latent, steps=STEPS, cfg=CFG)
