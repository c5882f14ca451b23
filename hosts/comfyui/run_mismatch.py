"""What makes a run another one than the estimator can predict, in sentences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...planning.vae_steps import PIXELS_PER_LATENT
from ...planning.wish import Wish
from ...planning.work import REFERENCE_SIDE

# A reference that differs by more from one megapixel takes other memory and time.
LIKE_A_MEGAPIXEL = 0.1
# A step in which CFG batching measures takes another pass; more of them are another run.
LIKE_THE_PASSES = 0.25
FUSED = "blocks: fused, "


def passes_of(asked: Mapping[str, Any]) -> float:
    """Forward passes of one evaluation of the sampler, on average."""
    return asked["passes"] / max(1, asked["evaluations"])


def prompts_of(asked: Mapping[str, Any]) -> float:
    """Prompts that one evaluation computed for each image, on average."""
    return asked["computed"] / (max(1, asked["evaluations"]) * asked["latent"][0])


def mismatches(asked: Mapping[str, Any], path: Sequence[str], wish: Wish) -> list[str]:
    """Of a sampling record and what was predicted of it."""
    notes = []
    if not any(line.startswith(FUSED) for line in path):
        notes.append("times are predicted of fused blocks, which did not run")
    if asked["controlnet"]:
        notes.append("a ControlNet ran, which the prediction leaves out")
    found = passes_of(asked), prompts_of(asked)
    known = wish.passes, wish.passes * wish.items / wish.batch
    if any(abs(one - other) > LIKE_THE_PASSES for one, other in zip(found, known, strict=True)):
        notes.append(
            f"a step took {found[0]:.3g} forward passes with {found[1]:.3g} prompts in all, and "
            f"the prediction is of {known[0]} with {known[1]:.0f}"
        )
    area = (REFERENCE_SIDE // PIXELS_PER_LATENT) ** 2
    sizes = [height * width / area for height, width in asked["references"]]
    if any(abs(size - 1) > LIKE_A_MEGAPIXEL for size in sizes):
        megapixels = ", ".join(f"{size:.2g}" for size in sizes)
        notes.append(f"references had {megapixels} megapixels and are predicted with one")
    return notes
