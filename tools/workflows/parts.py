"""What several workflows have in common: loaders, the sampler, the way to the picture."""

from __future__ import annotations

from typing import NamedTuple

from .graph import Link, Node, Workflow
from .models import TEXT_ENCODER, VAE, ModelFile

MODELS, PROMPT, SAMPLING, IMAGE = "Models", "Prompt", "Sampling", "Image"
LORA = "LoRA"
SHIFT = 3.1  # of ComfyUI's own templates of 2512 and Edit-2511


class Loaded(NamedTuple):
    """What the loaders give."""

    model: Link
    clip: Link
    vae: Link


def load(
    workflow: Workflow,
    transformer: ModelFile,
    *,
    precision: str,
    text_encoder: ModelFile = TEXT_ENCODER,
    placement: str = "auto",
    lora: ModelFile | None = None,
) -> Loaded:
    """The three loaders, a LoRA where there is one, and Optimize behind it."""
    model = workflow.add(
        "model",
        "QwenL40S_LoadModel",
        "Model",
        MODELS,
        models=[transformer],
        model=transformer.name,
        precision=precision,
    )["MODEL"]
    clip = workflow.add(
        "clip",
        "QwenL40S_LoadTextEncoder",
        "Text encoder",
        MODELS,
        models=[text_encoder],
        text_encoder=text_encoder.name,
        placement=placement,
    )
    vae = workflow.add("vae", "QwenL40S_LoadVAE", "VAE", MODELS, models=[VAE], vae=VAE.name)
    if lora:
        model = workflow.add(
            "lora",
            "QwenL40S_LoadLora",
            "LoRA",
            LORA,
            models=[lora],
            model=model,
            lora=lora.name,
        )["MODEL"]
    optimize = workflow.add("optimize", "QwenL40S_Optimize", "Optimize", SAMPLING, model=model)
    return Loaded(optimize["MODEL"], clip["CLIP"], vae["VAE"])


def encode(workflow: Workflow, id: str, title: str, text: str, clip: Link) -> Link:
    """A prompt as conditioning."""
    node = workflow.add(id, "CLIPTextEncode", title, PROMPT, text=text, clip=clip)
    return node["CONDITIONING"]


def empty(workflow: Workflow, width: int, height: int, batch: int = 1, *, id: str = "size") -> Link:
    """Latents to begin with, of a size in pixels."""
    node = workflow.add(
        id, "EmptySD3LatentImage", "Size", PROMPT, width=width, height=height, batch_size=batch
    )
    return node["LATENT"]


def shifted(workflow: Workflow, model: Link, shift: float = SHIFT) -> Link:
    """The MODEL with the noise schedule's shift."""
    node = workflow.add(
        "shift", "ModelSamplingAuraFlow", "Shift", SAMPLING, model=model, shift=shift
    )
    return node["MODEL"]


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
        "Sample",
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


def decode(workflow: Workflow, latent: Link, vae: Link) -> Link:
    """Latents to images, planned for the memory that is free."""
    node = workflow.add("decode", "QwenL40S_VAEDecode", "Decode", IMAGE, samples=latent, vae=vae)
    return node["IMAGE"]


def save(workflow: Workflow, images: Link, prefix: str = "") -> Node:
    """Images to files that are called as the workflow is, or otherwise."""
    prefix = prefix or workflow.name
    return workflow.add("save", "SaveImage", "Save", IMAGE, images=images, filename_prefix=prefix)
