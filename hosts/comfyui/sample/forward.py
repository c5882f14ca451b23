"""One call of ComfyUI's Qwen-Image, as the run of an optimized model sees it.

ComfyUI's own loop over the blocks stays: it calls each block, and what other nodes do between two
blocks or around one happens as ever.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import comfy.cli_args
import comfy.model_base
import comfy.ops
import torch

from ....optimizations.blocks.block import Step
from ....optimizations.blocks.block_form import blocks_of, called_by
from ....optimizations.blocks.host import BlockInputs, DoubleStream
from ....optimizations.blocks.self_check import Streams
from ....optimizations.blocks.workspace import Prefix
from ....optimizations.fallback import Fallback
from ....optimizations.modulation import Entry, shared_entry
from ....optimizations.reference import Rotary, Tokens
from ..contract import (
    BLOCK_ARGUMENTS,
    SINGLE_STREAM_ARGUMENTS,
    knows_single_stream,
    unknown_attention_arguments,
)
from ..lora.bypass import bypass_models
from .attention import SLOT, SlotAttention, file_choice, host_attention, without_choice
from .call import (
    COMPUTED_STEPS,
    clean_up,
    compiler_failed,
    is_compiled,
    several_work,
    unrecorded,
)
from .held import HeldWeights
from .layers import ComfyLayers
from .modulation import ModelModulation

QWEN_IMAGE_21 = getattr(comfy.model_base, "QwenImage21", ())  # since ComfyUI 0.37
# What the executor computes itself is that of ComfyUI as it is imported.
called_by("comfy.ldm.qwen_image.model")
if QWEN_IMAGE_21:
    called_by("comfy.ldm.qwen_image21.model")
ARGUMENTS, ARGUMENTS_21 = set(BLOCK_ARGUMENTS), set(SINGLE_STREAM_ARGUMENTS)
SHARED = ("image_rotary_emb", "encoder_hidden_states_mask", "timestep_zero_index")
OTHER_ARGUMENTS = Fallback("ComfyUI passes its blocks arguments that are unknown here")
OTHER_MODEL = Fallback("this ComfyUI calls its Qwen-Image-2.1 in a way that is unknown here")
COMPILED = Fallback("torch.compile runs the model; without it the fused blocks would")
NO_PREFIX_CACHE = Fallback(
    "ComfyUI's prefix cache is off: a node switches it off, hooks into the blocks, or leaves it no "
    "memory"
)
INPUT_PATCH = Fallback("another node changes what attention reads (attn1_patch)")


class ComfyPass(DoubleStream):
    """Implements `optimizations.blocks.host.HostPass`.

    Args:
        model: ComfyUI's BaseModel.
        attention: What computes attention as long as it is in ComfyUI's slot; None for whatever is.
        latents: As APPLY_MODEL wrappers get them.
        options: The call's transformer_options.
        control: The output of ControlNets, which the host adds between two blocks; None without.
        weights: What the run knows of where each model's are; None outside of a run.
        idle: BaseModels of cards that have nothing to do in this pass.

    Attributes:
        peers: Of these models, with the same options and attention.
        additions: What ControlNets add after each block.
    """

    def __init__(
        self,
        model: Any,
        attention: SlotAttention | None,
        latents: torch.Tensor,
        options: dict[str, Any],
        control: Mapping[str, Sequence[torch.Tensor | None]] | None = None,
        weights: MutableMapping[Any, HeldWeights] | None = None,
        idle: Sequence[Any] = (),
    ) -> None:
        self.owner = model
        self.layers = ComfyLayers(model, latents.shape, weights)
        self.blocks = blocks_of(model.diffusion_model)
        self.latents = latents
        self.modulation = ModelModulation.of(model)
        self._own_attention = attention
        self._options = options  # of the block that runs, once one does
        self._block: torch.nn.Module | None = None  # that runs
        self._control = control
        self._shared: _Shared | None = None
        self.peers: Sequence[ComfyPass] = tuple(
            ComfyPass(peer, attention, latents, options, weights=weights) for peer in idle
        )

    @property
    def state(self) -> Any:
        """The set of patches on the weights, and the LoRAs beside them."""
        patches = getattr(self.owner.current_patcher, "patches_uuid", None)
        return patches, *map(weakref.ref, bypass_models(self.owner.current_patcher))

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
        filled = self._options.get(SLOT)
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
        """Whether ComfyUI's MultiGPU CFG Split, or ours, has prompts on more cards than this."""
        return several_work(self._options)

    @property
    def steps(self) -> int | None:
        """Of the schedule, without those that a step cache skips; None of a sampler that does not
        tell.
        """
        if computed := self._options.get(COMPUTED_STEPS):
            return computed
        sigmas = self._options.get("sample_sigmas")
        return None if sigmas is None else len(sigmas) - 1

    def no_graphs(self) -> str:
        if getattr(comfy.cli_args.args, "disable_cuda_graphs", False):
            return "ComfyUI runs with --disable-cuda-graphs"
        return ""

    lasting = staticmethod(unrecorded)
    failed = staticmethod(compiler_failed)

    def clean_up(self) -> None:
        """As of `HostPass`."""
        clean_up(self.blocks)

    def fallback(self) -> Fallback | None:
        if is_compiled(self._options):
            return COMPILED
        if new := unknown_attention_arguments():
            return Fallback(f"ComfyUI gives attention {', '.join(new)}, which is unknown here")
        return INPUT_PATCH if self._options.get("patches", {}).get("attn1_patch") else None

    def unsupported(self, block: torch.nn.Module) -> Fallback | None:
        """Nothing beyond its form."""

    def inputs(
        self, block: torch.nn.Module, positional: tuple, arguments: dict[str, Any]
    ) -> BlockInputs | Fallback:
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
        image, text = arguments["hidden_states"], arguments["encoder_hidden_states"]
        shared = self._shared
        if shared is None or not shared.holds(arguments, text, image):
            with self.lasting():
                shared = self._shared = _Shared(arguments, text, image)
        watched = patches.get("double_block") or options.get("patches_replace", {}).get("dit")
        comfy.ops.run_every_op()
        return BlockInputs(text, image, arguments["temb"], shared.step, bool(watched))

    def entry(self, embedding: torch.Tensor, batch: int) -> Entry:
        return self.modulation.entry(embedding)

    def host_attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """ComfyUI's own, with what other nodes have put into the slot, or what the file says."""
        # What is in the slot wins over the file, even where it has failed.
        said = None if SLOT in self._options else file_choice(self._block)
        return host_attention(q, k, v, mask, self._options, said)

    def host_block(self, block: torch.nn.Module, arguments: dict[str, Any]) -> Streams:
        """The block's own forward, without this package's attention."""
        options = without_choice(arguments["transformer_options"])
        return type(block).forward(block, **{**arguments, "transformer_options": options})


class SingleStreamPass(ComfyPass):
    """The same of Qwen-Image-2.1, whose blocks run with the rows of the image alone, beside the
    keys and values in ComfyUI's prefix cache. What fills the cache is ComfyUI's own.
    """

    names = SINGLE_STREAM_ARGUMENTS
    additions = ()

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.peers = ()  # other cards have no part in a pass
        self._fills = False
        self._turned: torch.Tensor | None = None  # what the step's rotation was made of
        self._step: Step | None = None
        self._slot: Any = None  # of the prefix cache
        self._prefixes: Sequence[Prefix] | None = None

    def fallback(self) -> Fallback | None:
        return super().fallback() or (None if knows_single_stream() else OTHER_MODEL)

    def no_graphs(self) -> str:
        # Where the cache is filled or moves, nobody knows what later blocks read.
        if self._fills:
            return "ComfyUI fills its prefix cache"
        if self.prefixes is None:
            return "ComfyUI's prefix cache is in host memory or in 8 or 4 bits"
        return super().no_graphs()

    def inputs(
        self, block: torch.nn.Module, positional: tuple, arguments: dict[str, Any]
    ) -> BlockInputs | Fallback | None:
        if positional or arguments.keys() != ARGUMENTS_21:
            return OTHER_ARGUMENTS
        x, mod, pe, attend, before, options = map(arguments.get, SINGLE_STREAM_ARGUMENTS)
        if before:
            self._fills = before == x.shape[1]
            return None if self._fills else NO_PREFIX_CACHE
        prefix = _prefix_of(attend)
        if prefix is None:
            return NO_PREFIX_CACHE
        self._options, self._block = options, block
        tokens = Tokens(len(x), 0, x.shape[1], x.shape[1])
        if self._turned is not pe or self._step.tokens != tokens:
            with self.lasting():
                self._turned, self._step = pe, Step(tokens, _rotary(pe.transpose(1, 2)), None)
        comfy.ops.run_every_op()
        return BlockInputs(x[:, :0], x, mod, self._step._replace(prefix=prefix), False)

    def unchanged(
        self,
        index: int,
        positional: tuple,
        arguments: dict[str, Any],
        inputs: tuple[torch.Tensor, torch.Tensor, object],
    ) -> bool:
        """As of `HostPass`."""
        _, image, mod = inputs
        if positional or arguments["x"] is not image or arguments["mod"] is not mod:
            return False
        prefix, expected = _prefix_of(arguments["attn_fn"]), self.prefixes
        return (
            prefix is not None
            and expected is not None
            and prefix.keys.data_ptr() == expected[index].keys.data_ptr()
        )

    def output(self, streams: Streams) -> torch.Tensor:
        return streams[1]

    @property
    def prefixes(self) -> Sequence[Prefix] | None:
        """Of ComfyUI's prefix cache, where it lies on the card as it is read."""
        cache = self.owner.diffusion_model.prefix_cache
        try:
            # A pack may call the transformer with several prompts, each of which has a slot.
            if self._slot is cache.slot and self._prefixes is not None:
                return self._prefixes
            self._slot, self._prefixes = cache.slot, None
            blocks = cache.slot["blocks"]
            if cache.dtype == "default" and cache.store_device == self.device:
                self._prefixes = [Prefix(*blocks[i].unbind(1)) for i in range(len(self.blocks))]
        except (AttributeError, KeyError, TypeError):  # it is off, or another
            return None
        return self._prefixes

    def entry(self, embedding: Any, batch: int) -> Entry:
        """From the modulation of all blocks: (scale, tanh of the gate) twice, and a zero."""
        scale1, gate1, scale2, gate2 = (target.squeeze(1) for _, target in embedding[:4])
        return shared_entry((scale1, scale2), (gate1, gate2), len(self.blocks), batch)

    def host_block(self, block: torch.nn.Module, arguments: dict[str, Any]) -> Streams:
        """The block's own forward, which writes over its input."""
        x = arguments["x"]
        return x[:, :0], type(block).forward(block, **{**arguments, "x": x.clone()})


PASSES: dict[type, type[ComfyPass]] = {comfy.model_base.QwenImage: ComfyPass}
if QWEN_IMAGE_21:
    PASSES[QWEN_IMAGE_21] = SingleStreamPass


@functools.cache
def _defaults(block: type) -> dict[str, Any]:
    known = (inspect.signature(block.forward).parameters[name] for name in BLOCK_ARGUMENTS)
    return {it.name: it.default for it in known if it.default is not it.empty}


def _prefix_of(attend: Callable[..., torch.Tensor]) -> Prefix | None:
    """Reads what ComfyUI's `prefix_cached_attention` has bound; None of others."""
    # Calling it would join them with those of the image in new tensors.
    code = getattr(attend, "__code__", None)
    if code is None or not attend.__qualname__.startswith("prefix_cached_attention."):
        return None
    bound = dict(zip(code.co_freevars, attend.__closure__, strict=True))
    if not {"prefix_k", "prefix_v"} <= bound.keys():
        return None
    return Prefix(bound["prefix_k"].cell_contents, bound["prefix_v"].cell_contents)


class _Shared:
    """Keeps what ComfyUI gives every block of a pass, and the `Step` that is made of it once."""

    __slots__ = ("_form", "_given", "step")

    def __init__(self, arguments: dict[str, Any], text: torch.Tensor, image: torch.Tensor) -> None:
        matrices, mask, zero = self._given = tuple(map(arguments.get, SHARED))
        self._form = text.shape, image.shape, image.dtype
        zero_from = image.shape[1] if zero is None else zero
        tokens = Tokens(len(image), text.shape[1], image.shape[1], zero_from)
        self.step = Step(tokens, _rotary(matrices), _mask(mask, tokens, image.dtype))

    def holds(self, arguments: dict[str, Any], text: torch.Tensor, image: torch.Tensor) -> bool:
        matrices, mask, zero = self._given
        return (
            arguments["image_rotary_emb"] is matrices
            and arguments["encoder_hidden_states_mask"] is mask
            and arguments["timestep_zero_index"] == zero
            and (text.shape, image.shape, image.dtype) == self._form
        )


def _rotary(matrices: torch.Tensor) -> Rotary:
    """From ComfyUI's (batch, 1, joint, head_dim / 2, 2, 2) of [[cos, -sin], [sin, cos]]."""
    cos, sin = matrices[:, 0, :, :, 0, 0], matrices[:, 0, :, :, 1, 0]
    return Rotary(cos.contiguous(), sin.contiguous())


def _mask(
    text_mask: torch.Tensor | None, tokens: Tokens, dtype: torch.dtype
) -> torch.Tensor | None:
    """From what ComfyUI adds to the scores of the text tokens, (batch, text)."""
    if text_mask is None:
        return None
    mask = text_mask.new_zeros((tokens.batch, 1, 1, tokens.joint), dtype=dtype)
    mask[:, 0, 0, : tokens.text] = text_mask
    return mask
