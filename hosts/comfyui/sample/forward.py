"""Describes one call of ComfyUI's Qwen-Image for the run of an optimized model.

ComfyUI's own loop over the blocks stays: it calls each block, and what other nodes do between two
blocks or around one happens as ever.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Collection, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import comfy.cli_args
import comfy.model_base
import comfy.ops
import torch

from ....caches import cached
from ....families.comfyui import imported_code
from ....families.registry import blocks_of
from ....optimizations.blocks.block import Step
from ....optimizations.blocks.host import BlockInputs, DoubleStream, Streams
from ....optimizations.inventory import called_by
from ....optimizations.modulation import Entry
from ....optimizations.reference import Rotary, Tokens
from ....verdict import Verdict
from ..contract import BLOCK_ARGUMENTS, unknown_attention_arguments, unsupported_host
from ..lora.bypass import state_of
from .attention import (
    SLOT,
    GuidedAttention,
    SlotAttention,
    file_choice,
    host_attention,
    unguided,
    without_choice,
)
from .held import HeldWeights
from .layers import ComfyLayers
from .modulation import ModelModulation, weak_identity

# What the executor computes itself is that of ComfyUI as it is imported.
for module in imported_code():
    called_by(module)
ARGUMENTS = set(BLOCK_ARGUMENTS)
OTHER_ARGUMENTS = Verdict("ComfyUI passes its blocks unknown arguments")
COMPILED = Verdict("torch.compile runs the model; without it, the fused kernels would run")
SWITCHED_OFF = Verdict("ComfyUI runs with --disable-cuda-graphs")
INPUT_PATCH = Verdict("another node changes what attention reads (attn1_patch)")
# Of transformer_options: how many steps of a run call the model, where a step cache skips others.
COMPUTED_STEPS = "qwen_l40s_computed_steps"
# {BaseModel that works: the BaseModels of cards that have nothing to do meanwhile}.
IDLE = "qwen_l40s_idle"


def is_skipped(options: Mapping[str, Any]) -> bool:
    """Returns whether ComfyUI's EasyCache has answered a call in the transformer's place."""
    # LazyCache, which keeps the same mark, has no wrapper there and skips the whole evaluation.
    wrapped = "easycache" in options.get("wrappers", {}).get("diffusion_model", {})
    return wrapped and bool(getattr(options.get("easycache"), "skip_current_step", False))


def is_compiled(options: dict[str, Any]) -> bool:
    """Returns whether TorchCompileModel has a compiled model called in its place."""
    # The key of comfy_api.torch_helpers.
    return bool(options.get("wrappers", {}).get("apply_model", {}).get("torch.compile"))


# The Comfy Compiler, which a ComfyUI since 0.34 has: it records what a loop over blocks allocates
# from CUDA's asynchronous allocator in one block, and gives the same addresses to the next.
#
# What outlives a block has to come from elsewhere: a tensor that is recorded and still there when
# the block ends is a rogue, and a block that allocates something else than the one before is a
# break.

COMPILER_FAILED = Verdict(
    "ComfyUI's compiler stopped with an aimdo memory compile error: start ComfyUI with "
    "--disable-comfy-compiler",
    final=True,
)

_pauses = threading.local()


@contextmanager
def unrecorded(capturing: bool = False) -> Iterator[None]:
    """Keeps the compiler, where there is one, from recording what is allocated meanwhile."""
    pause = getattr(_prefetch(), "pause_malloc_graph", None)
    if pause is None:
        yield
        return
    outer = getattr(_pauses, "depth", 0)
    _pauses.depth = outer + 1
    try:
        with pause(sync=capturing):
            yield
    finally:
        _pauses.depth = outer
        if outer:  # ComfyUI's pauses do not count: the inner one has ended both
            pause().__enter__()


def _prefetch() -> Any:
    # Only for cleaning up: where ComfyUI has it no more, there is nothing to clean up.
    return getattr(comfy, "model_prefetch", None)


def clean_up(blocks: Collection[torch.nn.Module]) -> None:
    """Ends what a loop over these blocks that raised has left open: what the compiler records in
    this thread, and the pages of weights that ComfyUI has pinned for a block.
    """
    prefetch = _prefetch()
    if hasattr(prefetch, "cleanup_malloc_graph"):
        prefetch.cleanup_malloc_graph()
    release = getattr(prefetch, "cleanup_prefetched_modules", None)
    # Not cleanup_prefetch_queues, which takes the queues of cards at work in other threads too.
    for queue in getattr(prefetch, "PREFETCH_QUEUES", ()) if release else ():
        states = [entry[1] for entry in queue if isinstance(entry, tuple)]
        if any(module in blocks for module, _ in states):
            for module, layers in states:
                release(module, layers or ())
            queue.clear()


class ComfyPass(DoubleStream):
    """Implements `optimizations.blocks.host.HostPass`.

    Args:
        attention: What computes attention as long as it is in ComfyUI's slot; None for whatever is.
        held: What the run knows of where each model's weights are; None outside of a run.
        idle: BaseModels of cards that have nothing to do in this pass.

    Attributes:
        additions: What ControlNets add after each block.
        masked: Whether the attention of text rows has a mask of its own.
    """

    masked = False

    def __init__(
        self,
        model: Any,
        attention: SlotAttention | None,
        latents: torch.Tensor,
        options: dict[str, Any],
        control: Mapping[str, Sequence[torch.Tensor | None]] | None = None,
        held: MutableMapping[Any, HeldWeights] | None = None,
        idle: Sequence[Any] = (),
    ) -> None:
        self.owner = model
        self.layers = ComfyLayers(model, latents.shape, held)
        self.blocks = blocks_of(model.diffusion_model)
        self.latents = latents
        self.modulation = ModelModulation.of(model)
        self._own_attention = attention
        self._options = options  # of the block that runs, once one does
        self._block: torch.nn.Module | None = None  # that runs
        self._control = control
        # of these models, with the same options and attention
        self.peers: Sequence[ComfyPass] = tuple(
            ComfyPass(peer, attention, latents, options, held=held) for peer in idle
        )

    @property
    def state(self) -> Any:
        """The set of patches on the weights, and the LoRAs beside them."""
        patches = getattr(self.owner.current_patcher, "patches_uuid", None)
        return weak_identity(patches), state_of(self.owner.current_patcher)

    @property
    def dtype(self) -> torch.dtype:
        return self.owner.get_dtype_inference()

    @property
    def device(self) -> torch.device:
        patcher = self.owner.current_patcher
        return next(self.owner.parameters()).device if patcher is None else patcher.load_device

    @property
    def attention(self) -> SlotAttention | None:
        """This package's, where ComfyUI's slot still holds it and it works."""
        filled = unguided(self._options).get(SLOT)
        own = filled is not None and filled is self._own_attention and not filled.fallback
        return filled if own else None

    @property
    def additions(self) -> Sequence[torch.Tensor | None]:
        """As QwenImageTransformer2DModel adds them: (batch or 1, rows, D), in any dtype."""
        if self._control is None:
            return ()
        given = self._control.get("input", ())
        return [given[index] if index < len(given) else None for index in range(len(self.blocks))]

    @property
    def in_turns(self) -> bool:
        """Whether ComfyUI's MultiGPU CFG Split, or ours, has prompts on more cards than this, each
        launched by a thread of its own.
        """
        return "multigpu_thread_device" in self._options and len(self._options.get(IDLE, ())) != 1

    @property
    def steps(self) -> int | None:
        """Of the schedule, without those that a step cache skips; None of a sampler that does not
        tell.
        """
        if computed := self._options.get(COMPUTED_STEPS):
            return computed
        sigmas = self._options.get("sample_sigmas")
        return None if sigmas is None else len(sigmas) - 1

    def no_graphs(self) -> Verdict | None:
        off = getattr(comfy.cli_args.args, "disable_cuda_graphs", False)
        return SWITCHED_OFF if off else None

    lasting = staticmethod(unrecorded)

    def failed(self, error: RuntimeError) -> Verdict | None:
        return COMPILER_FAILED if "aimdo memory compile error" in str(error) else None

    def clean_up(self) -> None:
        clean_up(self.blocks)
        if isinstance(slot := self._options.get(SLOT), GuidedAttention):
            slot.again()

    def fallback(self) -> Verdict | None:
        if fault := unsupported_host(("blocks",)):
            return Verdict(fault.fact, final=True)
        if is_compiled(self._options):
            return COMPILED
        if new := unknown_attention_arguments():
            return Verdict(f"ComfyUI gives attention an unknown {', '.join(new)}")
        return INPUT_PATCH if self._options.get("patches", {}).get("attn1_patch") else None

    def inputs(
        self, block: torch.nn.Module, positional: tuple, arguments: dict[str, Any]
    ) -> BlockInputs | Verdict:
        if arguments.keys() < ARGUMENTS:  # another pack's loop may be older
            arguments = {**_defaults(type(block)), **arguments}
        if positional or arguments.keys() != ARGUMENTS or arguments["image_rotary_emb"] is None:
            return OTHER_ARGUMENTS
        # A wrapper inside of the call may have added to them.
        for host in (self, *self.peers):
            host._options, host._block = arguments["transformer_options"], block
        options = self._options
        patches = options.get("patches", {})
        if patches.get("attn1_patch"):
            return INPUT_PATCH
        text, image, embedding = map(arguments.get, self.streams)
        shared = arguments["image_rotary_emb"], arguments["encoder_hidden_states_mask"]
        zero, rows = arguments["timestep_zero_index"], image.shape[1]
        tokens = Tokens(len(image), text.shape[1], rows, rows if zero is None else zero)
        make = partial(_step, tokens, image.dtype, *shared)
        step = self.kept_step(shared, (tokens, image.dtype), make)
        intercepted = patches.get("double_block") or options.get("patches_replace", {}).get("dit")
        comfy.ops.run_every_op()
        return BlockInputs(text, image, embedding, self.guided(step), bool(intercepted))

    def entry(self, embedding: torch.Tensor, batch: int) -> Entry:
        return self.modulation.entry(embedding)

    def host_attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Attends with ComfyUI's attention, or what other nodes or the file have chosen."""
        # What is in the slot wins over the file, even where it has failed.
        options = unguided(self._options)
        said = None if SLOT in options else file_choice(self._block)
        return host_attention(q, k, v, mask, options, said)

    def guided(self, step: Step) -> Step:
        """Has a negative prompt guide the attention of the block that runs, where one does."""
        slot = self._options.get(SLOT)
        if not isinstance(slot, GuidedAttention):
            return step
        return step._replace(guidance=slot.begin(self._options["block_index"]))

    def host_block(self, block: torch.nn.Module, arguments: dict[str, Any]) -> Streams:
        """Runs the block's forward, without this package's attention."""
        options = without_choice(arguments["transformer_options"])
        return type(block).forward(block, **{**arguments, "transformer_options": options})


@cached
def _defaults(block: Any) -> dict[str, Any]:
    known = (inspect.signature(block.forward).parameters[name] for name in BLOCK_ARGUMENTS)
    return {it.name: it.default for it in known if it.default is not it.empty}


def rotary_of(matrices: torch.Tensor) -> Rotary:
    """Converts ComfyUI's (batch, 1, joint, head_dim / 2, 2, 2) of [[cos, -sin], [sin, cos]]."""
    cos, sin = matrices[:, 0, :, :, 0, 0], matrices[:, 0, :, :, 1, 0]
    return Rotary(cos.contiguous(), sin.contiguous())


def _step(
    tokens: Tokens, dtype: torch.dtype, matrices: torch.Tensor, text_mask: torch.Tensor | None
) -> Step:
    mask = None
    if text_mask is not None:
        mask = text_mask.new_zeros((tokens.batch, 1, 1, tokens.joint), dtype=dtype)
        mask[:, 0, 0, : tokens.text] = text_mask
    return Step(tokens, rotary_of(matrices), mask)
