"""Text to image with Qwen-Image-2512: precisions, a LoRA, a batch, a large picture."""

from __future__ import annotations

from collections.abc import Sequence

from ...loaders.source import MICRO_SIDE, MICRO_STEPS
from ...planning.bytes import weight_bytes
from ...planning.request import Loras, Parts, RunRequest
from ...spec.families import find_family
from ...step_cache import OFF, computed_steps
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
from .parts import (
    IMAGE,
    LIGHTNING_SHIFT,
    MODEL,
    MODELS,
    ON_SMALLER_CARDS,
    PROMPT,
    SAMPLING,
    Loaded,
    cached,
    decode,
    empty,
    encode,
    fast,
    load,
    no_negative,
    note,
    sample,
    save,
    with_lora,
)

FAMILY = "qwen-image-2512"
STEPS, CFG = find_family(FAMILY).steps, 4.0  # the model card's
CACHE = "balanced"
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
MICRO = "micro (bundled)"
MICRO_PROMPT = "a large green circle at the bottom right on a white background"
SIZES = "**EmptySD3LatentImage**: 1328x1328, 1664x928, 1472x1104, 1584x1056, or portrait."
PROMPT_FIRST = "The prompt. The negative prompt is the model card's, in Chinese."
STEPS_LAST = f"**KSampler**: the model card uses {STEPS} steps; 20 take 40 % of the time."
CHANGE = (PROMPT_FIRST, SIZES, STEPS_LAST)


def text_to_image_bf16() -> Workflow:
    """bf16, and everything stays on the card."""
    return _text_to_image(
        "text_to_image_bf16",
        "Text to image, bf16",
        "Qwen-Image-2512 in bf16, as trained. On a 48 GB card, all parts stay loaded.",
        (
            *CHANGE,
            "**Load Qwen-Image**: precision `auto` takes int8 if bf16 does not fit your card.",
            "The template **text_to_image_cached** gives nearly the same picture in about half "
            "the sampling time.",
        ),
    )


def text_to_image_cached() -> Workflow:
    """bf16, with half of the steps forecast."""
    computed = computed_steps(STEPS, CACHE)
    return _text_to_image(
        "text_to_image_cached",
        "Text to image, step cache",
        "Nearly the picture of **text_to_image_bf16** in about half the sampling time: "
        f"**Step Cache Qwen-Image** with `{CACHE}` lets {computed} of {STEPS} steps call the "
        "transformer and forecasts the others.",
        (
            PROMPT_FIRST,
            SIZES,
            "**Step Cache Qwen-Image**: `faithful` stays closer to that picture, `fast` is sooner "
            "and may change small text. `off` gives that picture, bit for bit.",
            f"Where another picture will do: **text_to_image_bf16** with {computed} steps, or "
            "**lightning_8_steps**; the cache has no effect on Lightning.",
        ),
        cache=CACHE,
    )


def text_to_image_fp8() -> Workflow:
    """The published fp8 files, half the download."""
    return _text_to_image(
        "text_to_image_fp8",
        "Text to image, fp8",
        "Qwen-Image-2512 from ComfyUI's fp8 files: half the download, and fp8 matrix products on "
        "Ada cards and newer. bf16 is more exact.",
        (
            *CHANGE,
            f"**Load Qwen-Image**: `{QWEN_2512.name}` with precision `fp8` is more exact, because "
            "each row gets its own scale.",
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
        "Qwen-Image-2512 in int8, quantized from the bf16 file while it loads, with a scale for "
        "each row and each token.",
        (
            *CHANGE,
            "The template **save_quantized** writes the int8 file once, so that later starts read "
            "two thirds of the bytes.",
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
        "Qwen-Image-2512 with a LoRA for 360 degree panoramas, merged into the weights: steps take "
        "no longer. **Load Qwen-Image LoRA** reports how many of its keys were applied.",
        (
            "**Load Qwen-Image LoRA**: any LoRA for this model. `bypass` leaves quantized weights "
            "unchanged.",
            "The prompt: a LoRA may need trigger words, here `360 degree panorama with "
            "equirectangular projection`.",
            STEPS_LAST,
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
    batch = 8
    return _text_to_image(
        "batch_of_8",
        "Eight images at once",
        "Eight images of one prompt in one run. Each step reads the weights once for all eight.",
        (
            PROMPT_FIRST,
            "**EmptySD3LatentImage**: `batch_size`, as large as fits your card.",
            f"**KSampler**: the model card uses {STEPS} steps; 20 are enough for drafts.",
        ),
        # Eight images leave an L40S no room for the text encoder while they are sampled.
        placement="drop after encoding",
        batch=batch,
        request=RunRequest(family=FAMILY, precision="bf16", batch=batch, steps=STEPS),
    )


def text_to_image_2048() -> Workflow:
    """Four megapixels, decoded as the free memory allows."""
    side = 2048
    return _text_to_image(
        "text_to_image_2048",
        "Text to image, 2048x2048",
        "Four megapixels. **VAE Decode Qwen-Image** decodes in tiles, without seams, if the whole "
        "image does not fit in free memory.",
        (
            "The prompt. The model card's sizes have 1.8 megapixels; at four, objects may repeat.",
            STEPS_LAST,
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
    lora_file: ModelFile | None = None,
    cache: str = OFF,
    prompt: str = EXAMPLE,
    size: tuple[int, int] = (SIDE, SIDE),
    batch: int = 1,
    request: RunRequest | None = None,
    **settings: str,
) -> Workflow:
    """Guided text to image; `request` is what it runs, for what the note says of it."""
    files = [transformer, text_encoder, VAE, *([lora_file] if lora_file else [])]
    request = request or RunRequest(family=FAMILY, precision="bf16", steps=STEPS, cache=cache)
    workflow = Workflow(name, title, note(title, what, change, files=files, request=request))
    loaded = load(
        workflow,
        transformer,
        text_encoder=text_encoder,
        precision=precision,
        **settings,
    )
    model = with_lora(workflow, loaded.model, lora_file) if lora_file else loaded.model
    positive = encode(workflow, "positive", prompt, loaded.clip)
    negative = encode(workflow, "negative", NEGATIVE, loaded.clip, "negative prompt")
    latent = empty(workflow, *size, batch)
    if cache == OFF:
        model = fast(workflow, model)
    else:  # one more node than a column has room for
        workflow.columns = ((MODELS,), (PROMPT,), (MODEL,), (SAMPLING, IMAGE))
        model = cached(workflow, fast(workflow, model, group=MODEL), cache)
    painted = sample(workflow, model, positive, negative, latent, steps=STEPS, cfg=CFG)
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
            f"Qwen-Image-2512 in {steps} steps, with the Lightning LoRA. CFG is 1, so there is no "
            "negative prompt.",
            (
                "The prompt.",
                SIZES,
                f"**KSampler**: keep {steps} steps and CFG 1; the LoRA was trained for them.",
                ON_SMALLER_CARDS,
            ),
            files=(QWEN_2512, TEXT_ENCODER, VAE, lora_file),
            request=RunRequest(
                family=FAMILY, precision="bf16", steps=steps, cfg="off", loras=Loras(count=1)
            ),
        ),
    )
    loaded = load(workflow, QWEN_2512, precision="bf16")
    model = with_lora(workflow, loaded.model, lora_file)
    positive = encode(workflow, "positive", EXAMPLE, loaded.clip)
    negative = no_negative(workflow, positive)
    latent = empty(workflow, SIDE, SIDE)
    model = fast(workflow, model, shift=LIGHTNING_SHIFT)
    painted = sample(workflow, model, positive, negative, latent, steps=steps, cfg=1.0)
    save(workflow, decode(workflow, painted, loaded.vae))
    return workflow


# The workflow that runs with nothing downloaded.


def micro_text_to_image() -> Workflow:
    """The bundled model of 7.8 M parameters: what `make demo` runs, in ComfyUI."""
    return micro(
        "micro_text_to_image",
        "Text to image, bundled micro model",
        "Press **Run**: the tiny Qwen-Image that comes with this pack paints coloured shapes. "
        "It needs no download and also runs on a CPU.",
        MICRO,
    )


def micro(name: str, title: str, what: str, model: str) -> Workflow:
    """Text to image with a bundled model, through ComfyUI's own decoder."""
    workflow = Workflow(
        name,
        title,
        note(
            title,
            what,
            (
                "The prompt: a size, a colour, a shape, a place and a background, such as `a small "
                "red star at the top left on a blue background`.",
                "Keep 256x256: the model was trained at that size.",
            ),
        ),
    )
    loaded = load_micro(workflow, model)
    positive = encode(workflow, "positive", MICRO_PROMPT, loaded.clip)
    negative = encode(workflow, "negative", " ", loaded.clip, "negative prompt")
    latent = empty(workflow, MICRO_SIDE, MICRO_SIDE, id="empty")
    painted = sample(workflow, loaded.model, positive, negative, latent, steps=MICRO_STEPS, cfg=CFG)
    images = workflow.add("decode", "VAEDecode", IMAGE, samples=painted, vae=loaded.vae)["IMAGE"]
    save(workflow, images, "micro")
    return workflow


def load_micro(workflow: Workflow, model: str = MICRO) -> Loaded:
    """A bundled model, which needs no file."""
    node = workflow.add("load", "QwenL40S_Load", MODELS, model=model)
    return Loaded(node["MODEL"], node["CLIP"], node["VAE"])
