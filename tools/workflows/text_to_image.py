"""Text to image with Qwen-Image-2512: precisions, a LoRA, a batch, a large picture."""

from __future__ import annotations

from collections.abc import Sequence

from ...planning.bytes import weight_bytes
from ...planning.request import Loras, Parts, RunRequest
from ...spec import find_family
from .graph import (
    LIGHTNING_4,
    LIGHTNING_8,
    PANORAMA_360,
    QWEN_2512,
    QWEN_2512_FP8,
    TEXT_ENCODER,
    TEXT_ENCODER_FP8,
    VAE,
    ModelFile,
    Workflow,
)
from .parts import IMAGE, MODELS, PROMPT, decode, empty, encode, load, note, sample, save, shifted

FAMILY = "qwen-image-2512"
STEPS, CFG = 50, 4.0  # of ComfyUI's own template of 2512, and of the model card
SIDE = 1328  # the model card's square
EXAMPLE = (
    "A rainy evening street in a small harbour town, a bookshop with warm light in its window and "
    'a hand-painted sign that reads "Tide & Page", wet cobblestones, a cyclist with a yellow '
    "raincoat, photograph, 35 mm"
)
PANORAMA = (
    "360 degree panorama with equirectangular projection, photograph of a glass greenhouse full of "
    "tropical plants at sunrise, a stone path, morning mist, warm light through the panes"
)
# The model card's own: low resolution and quality, deformed limbs and fingers, oversaturated, waxy,
# faces without detail, too smooth, a look of AI; confused composition; text blurred, distorted.
NEGATIVE = (
    "低分辨率，低画质，肢体畸形，手指畸形，画面过饱和，蜡像感，人脸无细节，过度光滑，画面具有AI感。"
    "构图混乱。文字模糊，扭曲。"
)
PROMPT_FIRST = "**Prompt**, and **Size**: 1328x1328, 1664x928, 1472x1104, 1584x1056 or upright."
NEGATIVE_STAYS = "**Negative prompt** is the model card's own, in Chinese: leave it at first."
FEWER_STEPS = f"**Sample**: 20 steps instead of {STEPS} take 0.4 of the time."


def text_to_image_bf16() -> Workflow:
    """bf16, and everything stays on the card."""
    return _text_to_image(
        "text_to_image_bf16",
        "Text to image, bf16",
        "Qwen-Image-2512 as it was trained, in bf16. All parts stay on a 48 GB card between "
        "pictures, so that nothing is loaded twice.",
        (
            PROMPT_FIRST,
            FEWER_STEPS,
            "**Model**: precision `auto` takes int8 where the card is too small for bf16.",
        ),
    )


def text_to_image_fp8() -> Workflow:
    """The published fp8 files, half the download."""
    return _text_to_image(
        "text_to_image_fp8",
        "Text to image, fp8",
        "Qwen-Image-2512 from the fp8 files that ComfyUI's own template uses: half the download, "
        "and fp8 arithmetic on Ada cards and newer. bf16 is more faithful.",
        (
            PROMPT_FIRST,
            FEWER_STEPS,
            f"**Model**: from `{QWEN_2512.name}` the same precision makes weights with a scale for "
            "each row, which the published fp8 file has not.",
        ),
        transformer=QWEN_2512_FP8,
        text_encoder=TEXT_ENCODER_FP8,
        precision="fp8",
        request=RunRequest(
            family=FAMILY,
            precision="fp8",
            steps=STEPS,
            text_encoder="fp8",
            parts=_stored_in_fp8(),
        ),
    )


def text_to_image_int8() -> Workflow:
    """int8, made from the bf16 file while it is loaded."""
    return _text_to_image(
        "text_to_image_int8",
        "Text to image, int8",
        "Qwen-Image-2512 in int8, with a scale for each row and each token, made from the bf16 "
        "file while it is loaded.",
        (
            PROMPT_FIRST,
            FEWER_STEPS,
            "To load two thirds of the bytes from then on, connect MODEL to **Save Quantized "
            "Qwen-Image** once and choose its file in **Model**.",
        ),
        precision="int8",
        request=RunRequest(family=FAMILY, precision="int8", steps=STEPS),
    )


def lora() -> Workflow:
    """A LoRA of somebody's: 360 degree panoramas."""
    width, height = 2048, 1024
    return _text_to_image(
        "lora",
        "Text to image with a LoRA",
        "Qwen-Image-2512 with a LoRA that paints 360 degree panoramas, merged into the weights, so "
        "that a step takes no longer. The node says how many of the LoRA's keys were applied.",
        (
            "**LoRA**: any of `models/loras` for this model; its prompt may need trigger words, "
            "as here `360 degree panorama with equirectangular projection`.",
            "**LoRA**: `bypass` instead of `merge` leaves quantized weights as they are.",
            FEWER_STEPS,
        ),
        lora_file=PANORAMA_360,
        prompt=PANORAMA,
        size=(width, height),
        request=RunRequest(
            family=FAMILY,
            precision="bf16",
            width=width,
            height=height,
            steps=STEPS,
            loras=Loras(count=1, rank=128),
        ),
    )


def batch_of_8() -> Workflow:
    """Eight pictures of one prompt at once."""
    batch, steps = 8, 20
    return _text_to_image(
        "batch_of_8",
        "Eight images at once",
        "Eight pictures of one prompt in one run, to choose from. A step reads the weights once "
        "for all of them.",
        (
            "**Prompt**, and **Size**: `batch_size` as the card has room for.",
            f"**Sample**: 20 steps are for drafts; pictures to keep take {STEPS}.",
        ),
        # Eight images leave an L40S no room for the text encoder while they are sampled.
        placement="drop after encoding",
        steps=steps,
        batch=batch,
        request=RunRequest(family=FAMILY, precision="bf16", batch=batch, steps=steps),
    )


def text_to_image_2048() -> Workflow:
    """Four megapixels, decoded as the free memory allows."""
    side = 2048
    return _text_to_image(
        "text_to_image_2048",
        "Text to image, 2048x2048",
        "Four megapixels. **Decode** plans for the memory that is free: where the whole picture "
        "does not fit beside the transformer, exact tiles do, without seams.",
        (
            "**Prompt**. The sizes of the model card have 1.8 megapixels: look whether things are "
            "repeated at more than twice that.",
            "**Decode**: `tiles` 0 decides by itself and its report says why.",
            FEWER_STEPS,
        ),
        size=(side, side),
        request=RunRequest(family=FAMILY, precision="bf16", width=side, height=side, steps=STEPS),
    )


def _text_to_image(
    name: str,
    title: str,
    what: str,
    change: Sequence[str],
    *,
    transformer: ModelFile = QWEN_2512,
    text_encoder: ModelFile = TEXT_ENCODER,
    precision: str = "bf16",
    placement: str = "auto",
    lora_file: ModelFile | None = None,
    prompt: str = EXAMPLE,
    size: tuple[int, int] = (SIDE, SIDE),
    steps: int = STEPS,
    batch: int = 1,
    request: RunRequest | None = None,
) -> Workflow:
    """Guided text to image; `request` is what it runs, for what the note says of it."""
    files = [transformer, text_encoder, VAE, *([lora_file] if lora_file else [])]
    request = request or RunRequest(family=FAMILY, precision="bf16", steps=STEPS)
    workflow = Workflow(
        name, title, note(title, what, (*change, NEGATIVE_STAYS), files=files, request=request)
    )
    loaded = load(
        workflow,
        transformer,
        precision=precision,
        text_encoder=text_encoder,
        placement=placement,
        lora=lora_file,
    )
    positive = encode(workflow, "positive", "Prompt", prompt, loaded.clip)
    negative = encode(workflow, "negative", "Negative prompt", NEGATIVE, loaded.clip)
    latent = empty(workflow, *size, batch)
    model = shifted(workflow, loaded.model)
    painted = sample(workflow, model, positive, negative, latent, steps=steps, cfg=CFG)
    save(workflow, decode(workflow, painted, loaded.vae))
    return workflow


def _stored_in_fp8() -> Parts:
    """The published fp8 file: one byte a weight throughout, modulation included."""
    bf16 = weight_bytes(find_family(FAMILY).transformer, "bf16")
    return Parts(
        transformer_bytes=bf16.total // 2,
        modulation_bytes=bf16.modulation // 2,
    )


# Text to image in a few steps: Qwen-Image-2512 with the Lightning LoRAs made for it.


def lightning_4_steps() -> Workflow:
    """Four steps without guidance."""
    return _lightning("lightning_4_steps", 4, LIGHTNING_4)


def lightning_8_steps() -> Workflow:
    """Eight steps without guidance."""
    return _lightning("lightning_8_steps", 8, LIGHTNING_8)


def _lightning(name: str, steps: int, lora_file: ModelFile) -> Workflow:
    title = f"Lightning, {steps} steps"
    workflow = Workflow(
        name,
        title,
        note(
            title,
            f"Qwen-Image-2512 with the Lightning LoRA of {steps} steps: euler, simple, shift 3, "
            "CFG 1. Without guidance there is no negative prompt.",
            (
                PROMPT_FIRST,
                f"**Sample**: leave {steps} steps and CFG 1, which the LoRA was trained for.",
                "**Model**: precision `int8` or `fp8` with **LoRA** `bypass` for smaller cards; "
                "merged into 8 bits, a LoRA is rounded once more.",
            ),
            files=(QWEN_2512, TEXT_ENCODER, VAE, lora_file),
            request=RunRequest(
                family=FAMILY, precision="bf16", steps=steps, cfg="off", loras=Loras(count=1)
            ),
        ),
    )
    loaded = load(workflow, QWEN_2512, precision="bf16", lora=lora_file)
    positive = encode(workflow, "positive", "Prompt", EXAMPLE, loaded.clip)
    # The sampler wants a negative and at CFG 1 never looks at it: no second prompt is encoded.
    negative = workflow.add(
        "negative",
        "ConditioningZeroOut",
        "No negative",
        PROMPT,
        conditioning=positive,
    )["CONDITIONING"]
    latent = empty(workflow, SIDE, SIDE)
    # The LoRA was trained with this shift, not with the template's 3.1.
    model = shifted(workflow, loaded.model, 3.0)
    painted = sample(workflow, model, positive, negative, latent, steps=steps, cfg=1.0)
    save(workflow, decode(workflow, painted, loaded.vae))
    return workflow


# The workflow that runs with nothing downloaded.


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
