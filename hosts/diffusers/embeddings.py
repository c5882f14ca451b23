"""Prompts to embeddings; those of the last prompts are remembered."""

from __future__ import annotations

import torch

from ...optimizations.embedding_cache import content_key
from .load import LoadedPipeline
from .settings import Settings

MAX_PROMPT_TOKENS = 512  # the pipeline's default


@torch.no_grad()
def embed(
    pipeline: LoadedPipeline, settings: Settings, activations: int
) -> dict[str, torch.Tensor]:
    """Encodes the prompt and, with guidance, the negative one.

    When both are remembered the text encoder neither runs nor moves.

    Args:
        activations: Bytes that encoding takes on the card beside the weights.

    Returns:
        Keyword arguments of diffusers' pipeline, on the device where parts run: embeddings
        (1, tokens, joint_dim) and their masks (1, tokens).
    """
    prompts = {"prompt_embeds": settings.prompt}
    if settings.cfg > 1:
        prompts["negative_prompt_embeds"] = settings.negative_prompt
    found = {prompt: pipeline.embeddings.recall(content_key(prompt)) for prompt in prompts.values()}
    if None in found.values():
        pipe = pipeline.to_diffusers()
        with pipeline.placement.turn("text_encoder", activations) as device:
            for prompt in (prompt for prompt, known in found.items() if known is None):
                embeds, mask = pipe.encode_prompt(
                    prompt, device, max_sequence_length=MAX_PROMPT_TOKENS
                )
                if mask is None:  # as newer releases say that it is all ones
                    mask = torch.ones(embeds.shape[:2], dtype=torch.long, device=device)
                found[prompt] = embeds, mask
                pipeline.embeddings.keep(content_key(prompt), found[prompt])
    arguments = {}
    for name, prompt in prompts.items():
        embeds, mask = found[prompt]
        arguments[name] = embeds.to(pipeline.device)
        arguments[f"{name}_mask"] = mask.to(pipeline.device)
    return arguments
