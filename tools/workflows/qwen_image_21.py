"""Qwen-Image-2.1: text to image, its Turbo, editing, and the bundled micro model of its kind.

Without guidance, as its model card samples it. ComfyUI gives its schedule the model's own shift.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...planning.request import RunRequest
from ...spec.families import LICENCE_21, SINGLE_STREAM_FAMILY
from ...spec.transformer import COMFYUI_21
from .edit import IMAGES, PICTURE
from .graph import (
    QWEN_21,
    QWEN_21_INT8,
    TEXT_ENCODER_21,
    TURBO_21,
    VAE_21,
    Link,
    ModelFile,
    Workflow,
)
from .parts import (
    IMAGE,
    MODEL,
    MODELS,
    PROMPT,
    SAMPLING,
    Loaded,
    decode,
    empty,
    encode,
    fast,
    load,
    no_negative,
    note,
    sample,
    save,
)
from .text_to_image import EXAMPLE, micro

HOST = f"**Needs ComfyUI {COMFYUI_21} or newer.**"
FAMILY = SINGLE_STREAM_FAMILY.name
STEPS = SINGLE_STREAM_FAMILY.steps
SIDE = 1024
MICRO = "micro 2.1 (bundled)"
# The checkpoint's own, from its model_index.json.
TURBO = "1.0, 0.978453, 0.95418, 0.926626, 0.89508, 0.845148, 0.704534, 0.414568, 0.0"
TURBO_STEPS = TURBO.count(",")
COLUMNS = ((MODELS,), (IMAGES, MODEL), (PROMPT,), (SAMPLING, IMAGE))
PROMPT_FIRST = "The prompt. CFG is 1, so there is no negative prompt."
SIZES = "**EmptySD3LatentImage**: any size in multiples of 32, up to 2048x2048."
STEPS_LAST = f"**KSampler**: the model card uses {STEPS} steps; ComfyUI's own template takes 25."
COMBINE = "Put the object of <image2> into the scene of <image1>, in the light of that scene"


def qwen_image_21() -> Workflow:
    """Text to image, in bf16."""
    return _text_to_image(
        "qwen_image_21",
        "Qwen-Image-2.1, text to image",
        "Text to image with Qwen-Image-2.1 in bf16.",
        SIDE,
        (PROMPT_FIRST, SIZES, STEPS_LAST),
    )


def qwen_image_21_2048() -> Workflow:
    """Four megapixels, which it was trained for."""
    return _text_to_image(
        "qwen_image_21_2048",
        "Qwen-Image-2.1, 2048x2048",
        "Four megapixels, a size that Qwen-Image-2.1 was trained for. ComfyUI decodes it in exact "
        "strips.",
        2048,
        (PROMPT_FIRST, STEPS_LAST),
    )


def qwen_image_21_turbo() -> Workflow:
    """Eight steps, with the checkpoint's own sigmas."""
    title = f"Qwen-Image-2.1-Turbo, {TURBO_STEPS} steps"
    workflow = _workflow(
        "qwen_image_21_turbo",
        title,
        f"An image in {TURBO_STEPS} steps with Qwen-Image-2.1-Turbo in int8.",
        (
            PROMPT_FIRST,
            SIZES,
            f"**ManualSigmas**: keep these {TURBO_STEPS} steps; the checkpoint was trained for "
            "them.",
        ),
        TURBO_21,
        _request("int8", steps=TURBO_STEPS),
    )
    loaded = _load(workflow, TURBO_21, "int8")
    positive = encode(workflow, "positive", EXAMPLE, loaded.clip)
    negative = no_negative(workflow, positive)
    latent = empty(workflow, SIDE, SIDE)
    model = fast(workflow, loaded.model, shift=None)
    sampler = workflow.add("sampler", "KSamplerSelect", SAMPLING, folded=True, sampler_name="euler")
    sigmas = workflow.add("sigmas", "ManualSigmas", SAMPLING, folded=True, sigmas=TURBO)
    painted = workflow.add(
        "sample",
        "SamplerCustom",
        SAMPLING,
        model=model,
        add_noise=True,
        noise_seed=1,
        cfg=1.0,
        positive=positive,
        negative=negative,
        sampler=sampler["SAMPLER"],
        sigmas=sigmas["SIGMAS"],
        latent_image=latent,
    )
    save(workflow, decode(workflow, painted["output"], loaded.vae))
    return workflow


def qwen_image_21_edit() -> Workflow:
    """Two pictures in one."""
    title = "Qwen-Image-2.1, edit with two pictures"
    workflow = _workflow(
        "qwen_image_21_edit",
        title,
        "Combines parts of two pictures with Qwen-Image-2.1 in int8. The result has the aspect "
        "ratio of image 1. The pictures are computed in the first step alone: ComfyUI keeps what "
        "later steps read of them.",
        (
            "**Load Image**: your two pictures; at first, both are ComfyUI's example. Up to ten: "
            "connect more to **Text Encode Qwen Image 2.1**.",
            "The prompt: `<image1>` and `<image2>` name the pictures. `resolution` is the side of "
            "a square of as many pixels.",
            STEPS_LAST,
        ),
        QWEN_21_INT8,
        _request("int8", references=2),
    )
    workflow.columns = COLUMNS
    loaded = _load(workflow, QWEN_21_INT8, "int8")
    first, second = (
        workflow.add(f"image_{index}", "LoadImage", IMAGES, about=f"image {index}", image=PICTURE)
        for index in (1, 2)
    )
    prompt = workflow.add(
        "prompt",
        "TextEncodeQwenImage21",
        PROMPT,
        clip=loaded.clip,
        prompt=COMBINE,
        negative_prompt="",
        resolution=SIDE,
        vae=loaded.vae,
        **{"images.image_1": first["IMAGE"], "images.image_2": second["IMAGE"]},
    )
    model = fast(workflow, loaded.model, shift=None, group=MODEL, folded=True)
    _sample_and_save(
        workflow, model, prompt["positive"], prompt["negative"], prompt["latent"], loaded.vae
    )
    return workflow


def micro_qwen_image_21() -> Workflow:
    """The bundled micro model of 2.1, which runs anywhere."""
    return micro(
        "micro_qwen_image_21",
        "Qwen-Image-2.1, bundled micro model",
        f"{HOST} Press **Run**: a tiny Qwen-Image-2.1 that comes with this pack paints coloured "
        "shapes. It needs no download and also runs on a CPU.",
        MICRO,
    )


def _request(
    precision: str, side: int = SIDE, steps: int = STEPS, references: int = 0
) -> RunRequest:
    """Without guidance, with the published text encoder in int8."""
    return RunRequest(
        family=FAMILY,
        precision=precision,
        width=side,
        height=side,
        steps=steps,
        cfg="off",
        references=references,
        text_encoder="int8",
    )


def _text_to_image(name: str, title: str, what: str, side: int, change: Sequence[str]) -> Workflow:
    workflow = _workflow(name, title, what, change, QWEN_21, _request("bf16", side))
    loaded = _load(workflow, QWEN_21, "bf16")
    positive = encode(workflow, "positive", EXAMPLE, loaded.clip)
    negative = no_negative(workflow, positive)
    latent = empty(workflow, side, side)
    model = fast(workflow, loaded.model, shift=None)
    _sample_and_save(workflow, model, positive, negative, latent, loaded.vae)
    return workflow


def _workflow(
    name: str,
    title: str,
    what: str,
    change: Sequence[str],
    transformer: ModelFile,
    request: RunRequest,
) -> Workflow:
    files = (transformer, TEXT_ENCODER_21, VAE_21)
    text = note(title, f"{HOST} {what} {LICENCE_21}.", change, files=files, request=request)
    return Workflow(name, title, text)


def _load(workflow: Workflow, transformer: ModelFile, precision: str) -> Loaded:
    return load(
        workflow, transformer, text_encoder=TEXT_ENCODER_21, vae=VAE_21, precision=precision
    )


def _sample_and_save(
    workflow: Workflow, model: Link, positive: Link, negative: Link, latent: Link, vae: Link
) -> None:
    painted = sample(workflow, model, positive, negative, latent, steps=STEPS, cfg=1.0)
    save(workflow, decode(workflow, painted, vae))
