"""Editing with Qwen-Image-Edit-2511: one picture, several, inside a mask, in four steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ...planning.request import Loras, RunRequest
from ...spec.families import find_family
from .graph import EDIT_2511, EDIT_LIGHTNING_4, TEXT_ENCODER, VAE, Link, Workflow
from .parts import (
    IMAGE,
    LIGHTNING_SHIFT,
    LORA,
    MODEL,
    MODELS,
    ON_SMALLER_CARDS,
    PROMPT,
    SAMPLING,
    Loaded,
    decode,
    empty,
    fast,
    load,
    no_negative,
    note,
    sample,
    save,
    with_lora,
)

IMAGES, MASK = "Images", "Mask"
PICTURE = "example.png"  # ComfyUI brings it in its input folder
FAMILY = "qwen-image-edit-2511"
STEPS, CFG = find_family(FAMILY).steps, 4.0  # the model card's
LIGHTNING_STEPS = 4
COLUMNS = ((MODELS,), (IMAGES, MASK, MODEL), (PROMPT,), (SAMPLING, IMAGE))
STEPS_LAST = f"**KSampler**: the model card uses {STEPS} steps; 20 take half the time."
LIGHTNING_COLUMNS = ((MODELS,), (IMAGES,), (PROMPT, LORA, MODEL), (SAMPLING, IMAGE))
KEEP_STEPS = f"**KSampler**: keep {LIGHTNING_STEPS} steps and CFG 1; the LoRA was trained for them."
FILES = (EDIT_2511, TEXT_ENCODER, VAE)
LIGHTNING_FILES = (*FILES, EDIT_LIGHTNING_4)
WATERCOLOUR = "Turn the picture into a watercolour painting on rough paper, keep the composition"
LARGE, SMALL = (720, 1280), (480, 720)  # of a try-on
TRY_ON = (
    "The person in image 1 wears the garment of image 2. Keep the face, hair, body, pose and "
    "background of image 1, and the colour, pattern and cut of the garment"
)


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
        prompt=WATERCOLOUR,
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


def edit_2511_lightning() -> Workflow:
    """One picture changed in four steps without guidance."""
    title = f"Edit a picture in {LIGHTNING_STEPS} steps, Edit-2511"
    workflow = Workflow(
        "edit_2511_lightning",
        title,
        note(
            title,
            f"Changes a picture in {LIGHTNING_STEPS} steps, with the Lightning LoRA. CFG is 1, so "
            "there is no negative prompt. **FluxKontextImageScale** scales the picture to one "
            "megapixel and crops it to the nearest standard aspect ratio.",
            (
                "**Load Image**: your picture.",
                "The prompt: what to change and what to keep.",
                KEEP_STEPS,
                ON_SMALLER_CARDS,
            ),
            files=LIGHTNING_FILES,
            request=_lightning_request(1, 1024, 1024),
        ),
        columns=LIGHTNING_COLUMNS,
    )
    loaded = load(workflow, EDIT_2511, precision="bf16")
    (image,) = _images(workflow, count=1)
    positive = _prompt(workflow, loaded, [image], "positive", "prompt", WATERCOLOUR)
    _lightning(workflow, loaded, positive, _encode(workflow, image, loaded.vae))
    return workflow


def try_on() -> Workflow:
    """A person in a garment, in four steps without guidance."""
    title = f"Try on clothes in {LIGHTNING_STEPS} steps, Edit-2511"
    large, small = ("x".join(map(str, size)) for size in (LARGE, SMALL))
    workflow = Workflow(
        "try_on",
        title,
        note(
            title,
            f"Dresses a person in a garment in {LIGHTNING_STEPS} steps, with the Lightning LoRA. "
            "CFG is 1, so there is no negative prompt. Both pictures count as one megapixel each, "
            "whatever the size of the result, and take most of the time.",
            (
                "**Load Image**: image 1 is the person, image 2 the garment, alone or worn; at "
                "first, both are ComfyUI's example.",
                "The prompt: name the garment, such as `the red dress`.",
                f"**EmptySD3LatentImage**: {large}, or {small} for drafts. Take the aspect ratio "
                "of the person's picture; sides are multiples of 16.",
                KEEP_STEPS,
                ON_SMALLER_CARDS,
            ),
            files=LIGHTNING_FILES,
            request=_lightning_request(2, *LARGE),
            also=(_lightning_request(2, *SMALL),),
        ),
        columns=LIGHTNING_COLUMNS,
    )
    loaded = load(workflow, EDIT_2511, precision="bf16")
    images = [
        workflow.add(about, "LoadImage", IMAGES, about=about, image=PICTURE)["IMAGE"]
        for about in ("person", "garment")
    ]
    positive = _prompt(workflow, loaded, images, "positive", "prompt", TRY_ON)
    _lightning(workflow, loaded, positive, empty(workflow, *LARGE, group=IMAGES))
    return workflow


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


def _lightning_request(references: int, width: int, height: int) -> RunRequest:
    return RunRequest(
        family=FAMILY,
        precision="bf16",
        width=width,
        height=height,
        steps=LIGHTNING_STEPS,
        cfg="off",
        references=references,
        loras=Loras(count=1),
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
    """Both see the pictures."""
    return EncodedPrompts(
        _prompt(workflow, loaded, images, "positive", "prompt", text),
        _prompt(workflow, loaded, images, "negative", "negative prompt", " "),
    )


def _prompt(
    workflow: Workflow, loaded: Loaded, images: Sequence[Link], id: str, about: str, text: str
) -> Link:
    """A prompt that sees the pictures; each token of a picture has its own timestep, 0."""
    encoded = workflow.add(
        id,
        "TextEncodeQwenImageEditPlus",
        PROMPT,
        about=about,
        folded=id == "negative",
        clip=loaded.clip,
        vae=loaded.vae,
        prompt=text,
        **{f"image{index}": image for index, image in enumerate(images, start=1)},
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
    return method["CONDITIONING"]


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


def _lightning(workflow: Workflow, loaded: Loaded, positive: Link, latent: Link) -> None:
    """From the prompt to the file; CFG Norm changes nothing at CFG 1."""
    model = with_lora(workflow, loaded.model, EDIT_LIGHTNING_4)
    model = fast(workflow, model, shift=LIGHTNING_SHIFT, group=MODEL, folded=True)
    negative = no_negative(workflow, positive)
    painted = sample(workflow, model, positive, negative, latent, steps=LIGHTNING_STEPS, cfg=1.0)
    save(workflow, decode(workflow, painted, loaded.vae, folded=True))
