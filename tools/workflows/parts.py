"""What several workflows have in common: loaders, the sampler, the way to the picture."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

from ...charts.figures import duration, tenths
from ...charts.words import safer_setting, step_cache_lines, usable_bytes
from ...machine.card_list import BUNDLED, known_cards
from ...planning.cards import Card, find_card
from ...planning.estimate import Estimate, estimate
from ...planning.request import RunRequest
from ...spec.formats import GB, format_gib
from .graph import TEXT_ENCODER, VAE, Link, ModelFile, Node, Workflow

MODELS, PROMPT, SAMPLING, IMAGE = "Models", "Prompt", "Sampling", "Image"
LORA, MODEL = "LoRA", "Model"
SHIFT = 3.1  # of ComfyUI's own templates of 2512 and Edit-2511
LIGHTNING_SHIFT = 3.0  # the LoRAs were trained with it, not with the template's 3.1
ON_SMALLER_CARDS = (
    "On smaller cards: precision `int8` or `fp8`; lora_mode `auto` then computes the LoRA beside "
    "the 8-bit weights, which `merge` rounds once more."
)


class Loaded(NamedTuple):
    """What the loaders give."""

    model: Link
    clip: Link
    vae: Link


def load(
    workflow: Workflow,
    transformer: ModelFile,
    *,
    text_encoder: ModelFile = TEXT_ENCODER,
    vae: ModelFile = VAE,
    **settings: str,
) -> Loaded:
    """All three parts, from the loader that takes them in one node."""
    node = workflow.add(
        "load",
        "QwenL40S_Load",
        MODELS,
        models=[transformer, text_encoder, vae],
        model=transformer.name,
        text_encoder=text_encoder.name,
        vae=vae.name,
        **settings,
    )
    return Loaded(node["MODEL"], node["CLIP"], node["VAE"])


def with_lora(workflow: Workflow, model: Link, file: ModelFile) -> Link:
    """The MODEL with a LoRA."""
    node = workflow.add(
        "lora", "QwenL40S_LoadLora", LORA, models=[file], model=model, lora=file.name
    )
    return node["MODEL"]


def fast(
    workflow: Workflow,
    model: Link,
    *,
    shift: float | None = SHIFT,
    group: str = SAMPLING,
    folded: bool = False,
) -> Link:
    """The MODEL as it is sampled: optimized, with the noise schedule's shift; None: ComfyUI's."""
    optimize = workflow.add("optimize", "QwenL40S_Optimize", group, folded=folded, model=model)
    if shift is None:
        return optimize["MODEL"]
    node = workflow.add(
        "shift",
        "ModelSamplingAuraFlow",
        group,
        folded=folded or group != SAMPLING,
        model=optimize["MODEL"],
        shift=shift,
    )
    return node["MODEL"]


def cached(workflow: Workflow, model: Link, preset: str) -> Link:
    """The MODEL with a step cache."""
    node = workflow.add("cache", "QwenL40S_StepCache", MODEL, model=model, cache=preset)
    return node["MODEL"]


def encode(workflow: Workflow, id: str, text: str, clip: Link, about: str = "") -> Link:
    """A prompt as conditioning; ComfyUI's own name of the node says (Prompt)."""
    node = workflow.add(id, "CLIPTextEncode", PROMPT, about=about, text=text, clip=clip)
    return node["CONDITIONING"]


def no_negative(workflow: Workflow, positive: Link) -> Link:
    """What the sampler wants as a negative and at CFG 1 never looks at: no prompt is encoded."""
    node = workflow.add(
        "negative", "ConditioningZeroOut", PROMPT, folded=True, conditioning=positive
    )
    return node["CONDITIONING"]


def empty(
    workflow: Workflow,
    width: int,
    height: int,
    batch: int = 1,
    *,
    id: str = "size",
    group: str = PROMPT,
) -> Link:
    """Latents to begin with, of a size in pixels."""
    node = workflow.add(
        id, "EmptySD3LatentImage", group, width=width, height=height, batch_size=batch
    )
    return node["LATENT"]


def sample(
    workflow: Workflow,
    model: Link,
    positive: Link,
    negative: Link,
    latent: Link,
    *,
    steps: int,
    cfg: float,
) -> Link:
    """The sampler; euler and simple, as in ComfyUI's own templates."""
    node = workflow.add(
        "sample",
        "KSampler",
        SAMPLING,
        model=model,
        positive=positive,
        negative=negative,
        latent_image=latent,
        seed=1,
        steps=steps,
        cfg=cfg,
        sampler_name="euler",
        scheduler="simple",
        denoise=1.0,
    )
    return node["LATENT"]


def decode(workflow: Workflow, latent: Link, vae: Link, *, folded: bool = False) -> Link:
    """Latents to images, planned for the memory that is free."""
    node = workflow.add(
        "decode", "QwenL40S_VAEDecode", IMAGE, folded=folded, samples=latent, vae=vae
    )
    return node["IMAGE"]


def save(workflow: Workflow, images: Link, prefix: str = "") -> Node:
    """Images to files that are called as the workflow is, or otherwise."""
    prefix = prefix or workflow.name
    return workflow.add("save", "QwenL40S_SaveImage", IMAGE, images=images, filename_prefix=prefix)


# The note in each workflow: what it does, which files, what it takes, what to change first.


def note(
    title: str,
    what: str,
    change: Sequence[str],
    *,
    files: Sequence[ModelFile] = (),
    request: RunRequest | None = None,
    also: Sequence[RunRequest] = (),
) -> str:
    """Markdown.

    Args:
        what: it does, in a sentence or two.
        change: what to change first, a sentence each.
        files: that have to be downloaded.
        request: what the workflow runs, for what it takes of an L40S.
        also: other sizes, of which the time is said.
    """
    parts = [f"## {title}", what]
    if files:
        lines = [f"- [{file.name}]({file.url}){_size(file)}" for file in files]
        folders = [f"  in `models/{file.directory}`" for file in files]
        both = [text for pair in zip(lines, folders, strict=True) for text in pair]
        parts.append("\n".join(["**Files**", "", *both]))
    if request:
        parts.append(f"**What it takes**\n\n{takes(request, also)}")
    parts.append("\n".join(["**Change first**", "", *(f"- {sentence}" for sentence in change)]))
    return "\n\n".join(parts) + "\n"


def takes(request: RunRequest, also: Sequence[RunRequest] = ()) -> str:
    """Memory and time on an L40S, as `qwen-l40s estimate` says them; nothing is typed."""
    found = estimate(request, _l40s())
    option = found.option
    peak, usable = tenths(option.peak_bytes), format_gib(usable_bytes(found.card))
    fits = "tight, not measured" if found.tight else f"it {found.verdict}"
    sentences = [f"On an L40S, predicted: {peak} of {usable}: {fits}."]
    if found.safer:
        spare = format_gib(found.safer.headroom_bytes)
        # As the loader names it, which loads nothing but Qwen-Image's text encoder.
        setting = safer_setting(found).replace("text_encoder_placement", "placement")
        sentences.append(f"Safer: {setting} in **Load Qwen-Image**, with {spare} to spare.")
    if option.setting.modulation == "off card":
        sentences.append(
            "The modulation weights (a third of the transformer, which see only the timestep) stay "
            "in host memory."
        )
    if option.setting.text_encoder_place == "drop after encoding":
        sentences.append("The text encoder leaves the card after encoding.")
    if option.tiles > 1:
        sentences.append(f"The VAE decodes in {option.tiles} tiles.")
    sentences += [
        _time(request, found),
        *(_time(other, estimate(other, _l40s())) for other in also),
    ]
    sentences += step_cache_lines(found)
    return " ".join(sentence for sentence in sentences if sentence)


def _time(request: RunRequest, found: Estimate) -> str:
    if found.image_seconds is None:
        return ""
    size = f"{request.width}x{request.height} in {request.steps} steps"
    if request.batch > 1:
        whole = duration(found.image_seconds.times(request.batch))
        return f"{request.batch} images of {size}: {whole}."
    return f"An image of {size}: {duration(found.image_seconds)}."


@functools.cache
def _l40s() -> Card:
    # The list that comes with the package: a list of the user's own decides no file.
    return find_card("L40S", known_cards(BUNDLED))


def _size(file: ModelFile) -> str:
    return "" if file.gb is None else f", {format_gib(file.gb * GB)}"
