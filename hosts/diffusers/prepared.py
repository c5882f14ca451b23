"""What the optimization knows of one diffusers transformer: which blocks fit, the check, the
modulation table.

Nothing in diffusers says that weights or modules have changed, so that all of it is looked at
again: the modules in every forward pass, the weights behind the table as every run begins.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from diffusers.models.transformers.transformer_qwenimage import QwenDoubleStreamAttnProcessor2_0

from ...optimizations.block_form import READ, is_changed, misfit, token_layers
from ...optimizations.modulation import Entry, ModulationTable, compute_entry
from ...optimizations.self_check import Check
from .layers import is_plain, kind_of, rounds

# Whose children a LoRA, a quantizer or another extension replaces.
CONTAINERS = ("", "attn", "img_mlp", "txt_mlp", "img_mlp.net", "txt_mlp.net")
# For summing up the bits of numbers of so many bytes.
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Call(NamedTuple):
    """What the transformer was called with, as far as a run is known by it.

    Attributes:
        latents: The packed latents, (batch, tokens, channels).
        timestep: (batch,), from 1 to 0.
        additional: Layered's further condition, or None.
        plain: Whether nothing else than these reaches the timestep embedding.
    """

    latents: torch.Tensor
    timestep: torch.Tensor
    additional: torch.Tensor | None
    plain: bool


class _Form(NamedTuple):
    """A block that fitted when it was looked at: its modules by place, and what the executor reads.
    Looking takes 80 us, which is 5 ms for a model; comparing takes 10 us.
    """

    dtype: torch.dtype
    children: tuple[tuple[torch.nn.Module, ...], ...]
    containers: tuple[torch.nn.Module, ...]
    read: tuple[torch.nn.Module, ...]


class Prepared:
    """What is known of one set of blocks.

    Args:
        blocks: The transformer's, in order.
        embed: Its `time_text_embed`.
        lossy_attention: Whether attention differs from exact attention by more than rounding.

    Attributes:
        check: Of the first fused block against the host's.
        table: The modulation of these weights; None where it is computed in each forward pass.
    """

    def __init__(
        self,
        blocks: Sequence[torch.nn.Module],
        embed: torch.nn.Module,
        lossy_attention: bool,
    ) -> None:
        self.blocks = blocks
        self.table: ModulationTable | None = None
        self._embed = embed
        self._lossy = lossy_attention
        self._forms: dict[torch.nn.Module, _Form] = {}
        self._sums: list[Any] = []
        self._kinds: list[str | None] = []
        self._latents: weakref.ref[torch.Tensor] | None = None
        self._time = -1.0
        self.check = self._new_check()

    def misfit(self, block: torch.nn.Module, dtype: torch.dtype) -> str:
        """Why the executor does not compute a block, in one clause; empty when it does."""
        form = self._forms.get(block)
        if form is None or form.dtype != dtype or form.children != _children(form.containers):
            fault = _why_not(block, dtype)
            if fault:
                return fault
            form = self._forms[block] = _form(block, dtype)
        if any(map(is_changed, form.read)):
            return "one of its modules has been changed by another extension"
        processor = processor_of(block)
        if type(processor) is not QwenDoubleStreamAttnProcessor2_0:
            return f"its attention processor is {type(processor).__name__}"
        if getattr(processor, "_parallel_config", None) is not None:
            return "its attention runs on several cards"
        return ""

    def forget(self) -> None:
        """Makes the next forward pass the first of a run."""
        self._latents, self._time = None, -1.0

    def begins_run(self, call: Call) -> bool:
        """Whether a forward pass is the first of a run: its time, which runs from 1 to 0, is later
        than that of the pass before, or the same with other latents. Both halves of guidance get
        the same latents.

        Reading the time waits for the card.
        """
        time = call.timestep.max().item()
        again = self._latents is not None and self._latents() is call.latents
        begins = time > self._time or (time == self._time and not again)
        self._latents, self._time = weakref.ref(call.latents), time
        return begins

    def start_run(self) -> None:
        """Drops what was known of weights that have changed since."""
        kinds = [kind_of(layer) for layer in token_layers(self.blocks[0])]
        if kinds != self._kinds:
            self._kinds, self.check = kinds, self._new_check()
        if not all(map(_has_plain_modulation, self.blocks)):
            self.table, self._sums = None, []
            return
        sums = _sums(self.blocks)
        if self.table is None or sums != self._sums:
            self.table, self._sums = ModulationTable(self.blocks), sums

    def fill(
        self,
        timesteps: Sequence[torch.Tensor],
        call: Call,
        arguments: dict[str, Any],
    ) -> None:
        """Adds the modulation of a schedule to the table, if it is the schedule of this run.

        Args:
            timesteps: Of every step, as the scheduler has them: from 1000 to 0.
            arguments: Of the first block.
        """
        embedding, hidden = arguments["temb"], arguments["hidden_states"]
        batch = len(hidden)
        if self.table is None or not call.plain or len(timesteps) < 2:
            return
        more = () if call.additional is None else (call.additional,)
        embeddings = []
        for time in timesteps:
            # As the pipelines and the transformer compute it.
            time = time.expand(batch).to(call.latents) / 1000
            time = time.to(hidden.dtype)
            if len(embedding) == 2 * batch:
                time = torch.cat([time, time * 0])
            embeddings.append(self._embed(time, hidden, *more))
        if torch.equal(embeddings[0], embedding):
            self.table.fill(embeddings, batch)

    def entry(self, embedding: torch.Tensor, batch: int) -> Entry:
        """The modulation of all blocks for a timestep embedding, as of `ModulationTable.entry`."""
        if self.table is None:
            return compute_entry(self.blocks, embedding, batch)
        return self.table.entry(embedding, batch)

    def _new_check(self) -> Check:
        layers = token_layers(self.blocks[0])
        return Check(quantized=self._lossy or any(map(rounds, layers)))


def processor_of(block: torch.nn.Module) -> object:
    """What computes a block's attention."""
    return getattr(block.attn, "processor", None)


def _form(block: torch.nn.Module, dtype: torch.dtype) -> _Form:
    containers = tuple(map(block.get_submodule, CONTAINERS))
    read = tuple(map(block.get_submodule, READ))
    return _Form(dtype, _children(containers), containers, read)


def _why_not(block: torch.nn.Module, dtype: torch.dtype) -> str:
    fault = misfit(block, dtype)
    if not fault and any(hasattr(layer.weight, "device_mesh") for layer in token_layers(block)):
        return "its weights are spread over several cards"
    return fault


def _children(containers: Sequence[torch.nn.Module]) -> tuple[tuple[torch.nn.Module, ...], ...]:
    return tuple(tuple(container._modules.values()) for container in containers)


def _has_plain_modulation(block: torch.nn.Module) -> bool:
    """Whether the modulation of a block depends on its weights and the timestep alone."""
    for part in (block.img_mod, block.txt_mod):
        if type(part) is not torch.nn.Sequential or len(part) != 2:
            return False
        if type(part[0]) is not torch.nn.SiLU or not is_plain(part[1]):
            return False
        if any(map(is_changed, (part, *part))):
            return False
    return True


def _sums(blocks: Sequence[torch.nn.Module]) -> list[Any]:
    """Where the modulation weights are, and of each the sum of its bits, as whole numbers.

    Merging a LoRA writes through `Parameter.data`, which neither moves the weight nor counts its
    version up. This reads all of the weights, as one forward pass without a table does.
    """
    weight = blocks[0].img_mod[1].weight
    sums = []
    for block in blocks:
        for part in (block.img_mod, block.txt_mod):
            for tensor in (part[1].weight, part[1].bias):
                if tensor is not None:
                    bits = tensor.detach().view(INTEGERS[tensor.element_size()])
                    sums.append(bits.sum(dtype=torch.int64))
    return [weight.device, weight.dtype, *torch.stack(sums).tolist()]
