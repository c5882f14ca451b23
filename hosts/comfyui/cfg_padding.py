"""Which prompts of a step one forward pass could take if their texts were of one length.

ComfyUI puts the prompts of a step into one forward pass where every condition of theirs has one
shape. Qwen-Image's texts are as long as their prompts, so that a guided step is nearly always two
passes. Zeros behind the shorter text and an attention mask change no result: the positions of the
real tokens stay, and no token reads the padding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from comfy.conds import CONDRegular
from comfy.samplers import can_concat_cond, get_area_and_mult
from torch.nn import functional as F

TEXT, MASK = "c_crossattn", "attention_mask"
# The masks that ComfyUI's model reads as 1 for a token and 0 for none. It adds any other to the
# scores, so that the two kinds do not go together.
WHOLE_NUMBERS = (torch.int32, torch.int64)

Conds = Sequence[list[dict[str, Any]] | None]


@dataclass(frozen=True)
class Merge:
    """Prompts that make one forward pass when they are padded, and two or more otherwise.

    Attributes:
        places: Where each is in ComfyUI's lists: (list, index in it).
        lengths: The text tokens of each.
        latent: Shape of the latents that each is given, (batch, channels, ...).
        others: Their other conditions, which agree: (name, shape).
    """

    places: tuple[tuple[int, int], ...]
    lengths: tuple[int, ...]
    latent: tuple[int, ...]
    others: tuple[tuple[str, tuple[int, ...]], ...]

    @property
    def longest(self) -> int:
        return max(self.lengths)


@dataclass(frozen=True, eq=False)
class _Prompt:
    """One prompt of a step; `bare` is ComfyUI's record of it without text and mask."""

    place: tuple[int, int]
    bare: Any
    text: torch.Tensor
    masked: bool

    def merges_with(self, other: _Prompt) -> bool:
        """Whether ComfyUI would batch the two if their texts agreed."""
        return (
            self.bare.hooks == other.bare.hooks
            and self.text.device == other.text.device
            and self.text.shape[::2] == other.text.shape[::2]
            and can_concat_cond(self.bare, other.bare)
        )


def find_merges(conds: Conds, latent: torch.Tensor, sigma: torch.Tensor) -> tuple[Merge, ...]:
    """What padding would merge; nothing that ComfyUI merges by itself.

    Args:
        conds: The prompts of each kind as ComfyUI's CALC_COND_BATCH wrappers get them.
        latent, sigma: Of the step, likewise.
    """
    merges, rest = [], list(_prompts(conds, latent, sigma))
    while rest:
        first, rest_before = rest[0], rest[1:]
        rest, together = [], [first]
        for prompt in rest_before:
            (together if first.merges_with(prompt) else rest).append(prompt)
        lengths = tuple(prompt.text.shape[1] for prompt in together)
        if len(set(lengths)) > 1 or len({prompt.masked for prompt in together}) > 1:
            sizes = {name: cond.size() for name, cond in first.bare.conditioning.items()}
            others = tuple(sorted((name, tuple(size)) for name, size in sizes.items()))
            places = tuple(prompt.place for prompt in together)
            merges.append(Merge(places, lengths, tuple(first.bare.input_x.shape), others))
    return tuple(merges)


def padded(conds: Conds, merges: Sequence[Merge]) -> list[list[dict[str, Any]] | None]:
    """The same prompts with the texts that are to merge of one length, each with its mask.

    What is changed is copied: the caller's lists and dicts stay as they are.
    """
    result = [None if entries is None else list(entries) for entries in conds]
    for merge in merges:
        for kind, index in merge.places:
            result[kind][index] = _padded(result[kind][index], merge.longest)
    return result


def _padded(entry: dict[str, Any], length: int) -> dict[str, Any]:
    model_conds = entry["model_conds"]
    text, mask = model_conds[TEXT].cond, model_conds.get(MASK)
    if mask is None:
        tokens = torch.ones(text.shape[:2], dtype=torch.int64, device=text.device)
    else:
        tokens = mask.cond.to(text.device, torch.int64)
    missing = length - text.shape[1]
    changed = {
        TEXT: CONDRegular(F.pad(text, (0, 0, 0, missing))),
        MASK: CONDRegular(F.pad(tokens, (0, missing))),
    }
    return {**entry, "model_conds": {**model_conds, **changed}}


def _prompts(conds: Conds, latent: torch.Tensor, sigma: torch.Tensor) -> Iterator[_Prompt]:
    for kind, entries in enumerate(conds):
        for index, entry in enumerate(entries or ()):
            model_conds = entry["model_conds"]
            if _stands_alone(entry) or not _can_be_padded(model_conds):
                continue
            whole = get_area_and_mult(entry, latent, sigma)
            if whole is None:  # not in this step
                continue
            kept = {name: c for name, c in whole.conditioning.items() if name not in (TEXT, MASK)}
            text = whole.conditioning[TEXT].cond
            bare = whole._replace(conditioning=kept)
            yield _Prompt((kind, index), bare, text, MASK in model_conds)


def _stands_alone(entry: dict[str, Any]) -> bool:
    """Whether something reads this prompt that knows no mask.

    A ControlNet gets the text without it. A default prompt's share is known only after the others.
    """
    return "default" in entry or "gligen" in entry or entry.get("control") is not None


def _can_be_padded(model_conds: dict[str, Any]) -> bool:
    text, mask = model_conds.get(TEXT), model_conds.get(MASK)
    if type(text) is not CONDRegular or text.cond.ndim != 3:
        return False
    return mask is None or (
        type(mask) is CONDRegular
        and mask.cond.dtype in WHOLE_NUMBERS
        and mask.cond.shape == text.cond.shape[:2]
    )
