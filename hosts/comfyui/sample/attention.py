"""Puts a backend of this package into ComfyUI's one slot for a MODEL's attention.

The slot is `transformer_options["optimized_attention_override"]`. Whoever writes it last is heard:
a node after this one replaces this choice, and a choice that was there before stays where this one
is "auto". So does what the model's file says of its blocks, which ComfyUI asks after the slot.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import takewhile
from operator import ne
from typing import Any

import comfy.ldm.modules.attention
import torch

from ....families.registry import attention_names
from ....optimizations.attention import MOST_ERROR, ChosenAttention

# As ComfyUI's blocks have it, whoever replaces it later; `contract` says where it is gone.
optimized_attention_masked = getattr(
    comfy.ldm.modules.attention, "optimized_attention_masked", None
)
SLOT = "optimized_attention_override"
# As in the names of ComfyUI's functions, `attention_pytorch`. Its others quantize or leave out.
EXACT = frozenset({"basic", "flash", "pytorch", "split", "sub_quad", "xformers"})

# What ComfyUI passes beside the named ones without changing the result.
HARMLESS = {"transformer_options", "_inside_attn_wrapper"}


class SlotAttention(ChosenAttention):
    """Attention by the backend that is chosen for the shapes of the call; fills the slot."""

    host = "ComfyUI's"

    def __init__(
        self,
        name: str,
        lossy: bool = False,
        before: Callable | None = None,
        most_error: float = MOST_ERROR,
    ) -> None:
        super().__init__(name, lossy, most_error)
        self.before = before

    def __call__(
        self,
        default: Callable[..., torch.Tensor],
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        heads: int,
        mask: torch.Tensor | None = None,
        attn_precision: torch.dtype | None = None,
        skip_reshape: bool = False,
        skip_output_reshape: bool = False,
        **others: Any,
    ) -> torch.Tensor:
        """Attends, as ComfyUI calls it; `default` takes calls of other forms than Qwen-Image's."""
        as_qwen = (
            skip_reshape
            and not skip_output_reshape
            and attn_precision is None
            and q.shape == k.shape == v.shape
            and (mask is None or mask.shape == (q.shape[0], 1, q.shape[2]))
            and others.keys() <= HARMLESS
            and self.fallback is None
            and not torch.compiler.is_compiling()
            # Checkpointing keeps what a second forward pass has to keep again.
            and not torch.is_grad_enabled()
        )
        if not as_qwen:
            return default(
                q,
                k,
                v,
                heads,
                mask,
                attn_precision=attn_precision,
                skip_reshape=skip_reshape,
                skip_output_reshape=skip_output_reshape,
                **others,
            )
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        return self.attend(q, k, v, None if mask is None else mask.unsqueeze(1))


class GuidedAttention:
    """Attention that a negative prompt guides; fills the slot during one call of a transformer, and
    what was there before computes each part.
    """

    def __init__(self, before: Callable | None, of: Callable[[int], Any]) -> None:
        self.before = before  # what was in the slot
        self.of = of  # gives the guidance of a block, of `optimizations.nag`, by its index
        # the block whose attention was guided: after it, a ControlNet of 2.1 calls the slot for one
        # of its own
        self.last: int | None = None

    def begin(self, index: int) -> Any:
        """Returns the guidance of a block that our executor runs."""
        self.last = index
        return self.of(index)

    def again(self) -> None:
        """Guides the same block once more, which runs again to be compared."""
        self.last = None

    def __call__(
        self,
        default: Callable[..., torch.Tensor],
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        heads: int,
        mask: torch.Tensor | None = None,
        skip_reshape: bool = False,
        **others: Any,
    ) -> torch.Tensor:
        """Attends, as ComfyUI calls it in its own blocks."""
        inner = default if self.before is None else partial(self.before, default)

        def attend(*given: torch.Tensor | None, lse: bool = False) -> torch.Tensor | None:
            if lse:
                return None
            *parts, mask = given
            parts = [it.transpose(1, 2) if skip_reshape else it.flatten(2) for it in parts]
            return inner(*parts, heads, mask=mask, skip_reshape=skip_reshape, **others)

        split = (heads, q.shape[-1] // heads)
        parts = [it.transpose(1, 2) if skip_reshape else it.unflatten(2, split) for it in (q, k, v)]
        index = others["transformer_options"]["block_index"]
        guidance = self.of(index)
        if index == self.last or not guidance.guides(*parts[:2]):
            return attend(*parts, mask)
        self.last = index
        return guidance.attend(attend, *parts, mask)


def unguided(options: dict[str, Any]) -> dict[str, Any]:
    """Returns transformer_options whose slot holds what a `GuidedAttention` has found there."""
    filled = options.get(SLOT)
    return _with_slot(options, filled.before) if isinstance(filled, GuidedAttention) else options


def without_choice(options: dict[str, Any]) -> dict[str, Any]:
    """Returns transformer_options without a `SlotAttention` in the slot; still guided."""
    filled, inner = options.get(SLOT), unguided(options)
    if isinstance(inner.get(SLOT), SlotAttention):
        inner = _with_slot(options, None)
    if not isinstance(filled, GuidedAttention):
        return inner
    return _with_slot(options, GuidedAttention(inner.get(SLOT), filled.of))


def _with_slot(options: dict[str, Any], attention: Callable | None) -> dict[str, Any]:
    rest = {name: value for name, value in options.items() if name != SLOT}
    return rest if attention is None else rest | {SLOT: attention}


def host_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    options: dict[str, Any],
    preferred: torch.nn.Module | None = None,
) -> torch.Tensor:
    """Attends as `Attend`, with ComfyUI's attention, or what other nodes or the file have chosen;
    `options` are the block's transformer_options, `preferred` its `file_choice`.
    """
    heads, options = q.shape[2], without_choice(options)
    q, k, v = (part.transpose(1, 2) for part in (q, k, v))
    mask = None if mask is None else mask.squeeze(1)
    file = {} if preferred is None else {"preferred_attention": preferred}
    return optimized_attention_masked(
        q, k, v, heads, mask, transformer_options=options, skip_reshape=True, **file
    )


# What the file of a model or of a LoRA says of a block's attention, in
# `.attn.comfy_attention.config`.


def file_choice(block: torch.nn.Module) -> Any:
    """Returns a block's `ComfyAttention`: what the file says in `config`, and in `function` what
    ComfyUI runs for it, or None. None where ComfyUI does not read it, as 0.33.
    """
    # Past Module.__getattr__, which takes 4 us where there is none: it is asked in every pass.
    for name in attention_names():
        attn = block._modules.get(name)
        if attn is not None:
            return attn._modules.get("comfy_attention")
    return None


class FileAttention:
    """What files say of the attention of a model's blocks."""

    def __init__(self, blocks: Sequence[torch.nn.Module]) -> None:
        self.runs: Counter[str] = Counter()  # {ComfyUI's name: blocks that run it}
        # {name: blocks that ask for it where ComfyUI cannot run it}
        self.missing: Counter[str] = Counter()
        self._blocks = len(blocks)
        for choice in map(file_choice, blocks):
            if choice is None or choice.config is None:
                continue
            runs = None if choice.function is None else _name(choice.function)
            if runs is not None:
                self.runs[runs] += 1
            asked = takewhile(partial(ne, runs), _asked(choice))
            self.missing.update(dict.fromkeys(asked, 1))

    @property
    def lossy(self) -> bool:
        """Whether one that runs differs from exact attention by more than rounding."""
        return bool(self.runs.keys() - EXACT)

    def lines(self, otherwise: list[str]) -> list[str]:
        lines = [
            f"attention: {name}, {'exact' if name in EXACT else 'lossy'}: chosen for {count} of "
            f"{self._blocks} blocks by the model's or a LoRA's file"
            for name, count in self.runs.items()
        ]
        rest = self._blocks - self.runs.total()
        if lines and rest:
            lines.append(f"attention: ComfyUI's in the other {rest}")
        missing = [
            f"attention: not {name}, which a file requests for {count} of {self._blocks} blocks: "
            f"{_why_missing(name)}"
            for name, count in self.missing.items()
        ]
        return (lines or otherwise) + missing


def _asked(choice: torch.nn.Module) -> list[str]:
    configs = choice.config if isinstance(choice.config, list) else [choice.config or {}]
    return [str(config["attention"]) for config in configs if "attention" in config]


def _name(function: Callable[..., torch.Tensor]) -> str:
    function = getattr(function, "func", function)  # of a partial, with the file's settings
    return getattr(function, "__name__", str(function)).removeprefix("attention_")


def _why_missing(name: str) -> str:
    known = hasattr(comfy.ldm.modules.attention, f"attention_{name}")
    if known and name.startswith("comfy_kitchen_"):
        return "the installed comfy-kitchen cannot run it on this device"
    return "this ComfyUI does not let a file choose this attention"
