"""Text to image in a few steps: Qwen-Image-2512 with the Lightning LoRAs made for it."""

from __future__ import annotations

from ...planning.wish import Loras, Wish
from .graph import Workflow
from .models import LIGHTNING_4, LIGHTNING_8, QWEN_2512, TEXT_ENCODER, VAE, ModelFile
from .notes import note
from .parts import PROMPT, decode, empty, encode, load, sample, save, shifted
from .text_to_image import EXAMPLE, FAMILY, PROMPT_FIRST, SIDE


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
                "**Model**: precision `int8` or `fp8` with **LoRA** `beside` for smaller cards; "
                "merged into 8 bits, a LoRA is rounded once more.",
            ),
            files=(QWEN_2512, TEXT_ENCODER, VAE, lora_file),
            wish=Wish(
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
