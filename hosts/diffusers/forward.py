"""What diffusers passes to a block, as the executor takes it."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from diffusers.models.transformers.transformer_qwenimage import QwenDoubleStreamAttnProcessor2_0

from ...loaders.convert import is_finite
from ...machine.card import first_line
from ...optimizations.attention import aligned_mask
from ...optimizations.block import READ, BlockExecutor, Step, is_changed, misfit, token_layers
from ...optimizations.fused import Ops
from ...optimizations.modulation import Entry, ModulationTable, compute_entry
from ...optimizations.reference import Rotary, Tokens
from ...optimizations.self_check import Check
from .attention import HostAttention, TransformerAttention, backend_of
from .layers import DiffusersLayers, is_plain, kind_of, rounds

# What a block is called with beside its streams, from diffusers 0.36 to 0.42.
SHARED = (
    "temb",
    "image_rotary_emb",
    "encoder_hidden_states_mask",
    "joint_attention_kwargs",
    "modulate_index",
)
STREAMS = ("hidden_states", "encoder_hidden_states")
# diffusers 0.37 and 0.38 hand the joint mask on among the arguments of attention.
JOINT_MASK = "attention_mask"


class UnfitError(Exception):
    """Arguments that the executor does not know, or a block that it does not compute."""


def zero_from_of(index: torch.Tensor, image: torch.Tensor) -> int:
    """The first image token of timestep 0, from diffusers' index: (1 or batch, tokens), 0 for the
    tokens of the picture and 1 for those of reference images.
    """
    at_zero = index.cpu() != 0  # waits for the card once a pass, as the table's key does
    zero_from = int((~at_zero[0]).sum())
    expected = torch.arange(image.shape[1]) >= zero_from
    fits = at_zero.shape in ((1, image.shape[1]), image.shape[:2])
    if not fits or not (at_zero == expected).all():
        raise UnfitError("modulate_index is not the picture first and its references after it")
    return zero_from


def rotary_of(frequencies: Any, tokens: Tokens) -> Rotary:
    """From diffusers' complex rotations of image and text, each (tokens, head_dim / 2)."""
    try:
        image, text = frequencies
        fits = image.is_complex() and text.is_complex()
        lengths = len(image), len(text)
    except (TypeError, ValueError, AttributeError):
        fits, lengths = False, ()
    if not fits or lengths != (tokens.image, tokens.text):
        raise UnfitError("its rotary embedding is not the complex one of each token")
    joint = torch.cat([text, image]).unsqueeze(0)
    return Rotary(joint.real.contiguous(), joint.imag.contiguous())


def joint_mask_of(arguments: dict[str, Any], tokens: Tokens) -> torch.Tensor | None:
    """True where a key counts, (batch, 1, 1, joint), on the card; None without a mask."""
    more = dict(arguments.get("joint_attention_kwargs") or {})
    joint, text = more.pop(JOINT_MASK, None), arguments.get("encoder_hidden_states_mask")
    if more:
        raise UnfitError(f"attention is passed {', '.join(sorted(more))}, not known here")
    if joint is None:
        if text is None or text.dtype != torch.bool:
            return None  # diffusers 0.36 passes numbers on, which its attention does not read
        joint = torch.cat([text, text.new_ones((len(text), tokens.image))], dim=1)
    elif text is not None or joint.dtype != torch.bool:
        raise UnfitError("its attention has a mask of another form")
    if joint.numel() != tokens.batch * tokens.joint:
        raise UnfitError("its attention has a mask of another form")
    return joint.reshape(tokens.batch, 1, 1, tokens.joint)


# What the optimization knows of one diffusers transformer: which blocks fit, the check, the
# modulation table.
#
# Nothing in diffusers says that weights or modules have changed, so that all of it is looked at
# again: the modules in every forward pass, the weights behind the table as every run begins.

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


# One forward pass of diffusers' Qwen-Image whose blocks the executor runs.
#
# diffusers' own loop over the blocks stays, with ControlNet's residuals between them. For the
# length of one call each block's `forward` is replaced by one that takes the same arguments, or
# hands
# them to diffusers' own.

Streams = tuple[torch.Tensor, torch.Tensor]


class Shared(NamedTuple):
    """What the blocks of a pass have in common.

    Attributes:
        arguments: What it was made of, in the order of `SHARED`.
        step: As the executor takes it.
        entry: The modulation of every block.
    """

    arguments: tuple[Any, ...]
    step: Step
    entry: Entry


class ForwardPass:
    """The blocks of one call of the transformer.

    Args:
        prepared: What is known of them.
        ops: The kernels.
        attention: The attention.
        call: What the transformer was called with.
        begin: Called with the first block's arguments, before their modulation is read.
        across_borders: Whether nothing but the loop itself stands between two blocks.

    Attributes:
        layers: The layers that ran.
        fused: How many blocks the executor ran.
        others: Why diffusers' own ran, and how many.
    """

    def __init__(
        self,
        prepared: Prepared,
        ops: Ops,
        attention: TransformerAttention,
        call: Call,
        begin: Callable[[Call, dict[str, Any]], None],
        across_borders: bool,
    ) -> None:
        self._prepared = prepared
        self._ops = ops
        self._call = call
        self._begin = begin
        self._across_borders = across_borders
        self._processor = processor_of(prepared.blocks[0])
        self._host_attention = HostAttention(self._processor)
        self._attention = attention
        self.layers = DiffusersLayers()
        attend = attention.for_pass(self._processor, self._host_attention)
        self._executor = BlockExecutor(self.layers, ops, attend)
        self._shared: Shared | None = None
        self.fused = 0
        self.others: Counter[str] = Counter()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Puts the executor into the blocks, and takes it out again."""
        blocks = self._prepared.blocks
        try:
            for index, block in enumerate(blocks):
                # Not through Module.__setattr__, which costs as much as a launch.
                block.__dict__["forward"] = _Bound(self, index, block)
            yield
        finally:
            for block in blocks:
                block.__dict__.pop("forward", None)

    def run(self, index: int, block: torch.nn.Module, arguments: dict[str, Any]) -> Streams:
        """One block; arguments and result are those of diffusers' block."""
        try:
            self._require(block, arguments["hidden_states"].dtype)
            shared = self._read(arguments)
            check = self._prepared.check  # the first block of a run may have renewed it
            if check.failed:
                raise UnfitError(check.failed)
        except UnfitError as reason:
            self.others[str(reason)] += 1
            return host_forward(block, arguments)
        image, text = (arguments[name] for name in STREAMS)
        step, halves = shared.step, shared.entry.of(index)
        following = self._following(index, image.dtype, shared)
        operands = block, text, image, step, halves, following
        masked = step.mask is not None
        self.fused += 1
        if self.fused > 1 or not check.wanted(step.tokens, masked):
            return self._executor.run(*operands)
        expected = host_forward(block, arguments)
        try:
            result = self._executor.run(*operands)
            if not all(map(is_finite, result)) and self._attention.may_be_wrong:
                # Is it the attention or another kernel?
                host = BlockExecutor(DiffusersLayers(), self._ops, self._host_attention.attend)
                result = host.run(*operands)
                if all(map(is_finite, result)):
                    self._attention.give_up()
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception as error:  # compilers, drivers and packages raise anything
            check.fail(f"the fused block raised {first_line(error)}")
        else:
            if check.passes((text, image), result, expected, step.tokens, masked):
                return result
        self.fused -= 1
        self.others[check.failed] += 1
        return expected

    def _require(self, block: torch.nn.Module, dtype: torch.dtype) -> None:
        reason = self._prepared.misfit(block, dtype)
        if not reason and backend_of(processor_of(block)) != backend_of(self._processor):
            reason = "its attention backend is not that of the first block"
        if reason:
            raise UnfitError(reason)

    def _following(
        self, index: int, dtype: torch.dtype, shared: Shared
    ) -> tuple[torch.nn.Module, Any] | None:
        """The next block and its modulation, where the executor runs it right after this one."""
        blocks = self._prepared.blocks
        if not self._across_borders or index + 1 == len(blocks):
            return None
        try:
            self._require(blocks[index + 1], dtype)
        except UnfitError:
            return None
        return blocks[index + 1], shared.entry.of(index + 1)[0]

    def _read(self, arguments: dict[str, Any]) -> Shared:
        """What a block's arguments say; read once, and again where one has been exchanged."""
        given = tuple(arguments.get(name) for name in SHARED)
        shared = self._shared
        if shared is None or any(
            ours is not theirs for ours, theirs in zip(shared.arguments, given, strict=True)
        ):
            if arguments.keys() - {*SHARED, *STREAMS}:
                unknown = ", ".join(sorted(arguments.keys() - {*SHARED, *STREAMS}))
                raise UnfitError(f"its argument {unknown} is not known here")
            shared = Shared(given, *self._understand(arguments))
            self._shared = shared
        return shared

    def _understand(self, arguments: dict[str, Any]) -> tuple[Step, Entry]:
        image, text = (arguments[name] for name in STREAMS)
        embedding, index = arguments["temb"], arguments.get("modulate_index")
        batch = len(image)
        if len(text) != batch or image.dtype != text.dtype:
            raise UnfitError("text and image differ in batch or dtype")
        rows = batch if index is None else 2 * batch
        if embedding.dim() != 2 or len(embedding) != rows:
            raise UnfitError(f"{len(embedding)} timestep embeddings where {rows} belong")
        zero_from = image.shape[1] if index is None else zero_from_of(index, image)
        tokens = Tokens(batch, text.shape[1], image.shape[1], zero_from)
        rotary = rotary_of(arguments.get("image_rotary_emb"), tokens)
        mask = joint_mask_of(arguments, tokens)
        self._host_attention.mask = mask
        if mask is not None:
            scores = torch.zeros(mask.shape, dtype=image.dtype, device=image.device)
            mask = aligned_mask(scores.masked_fill_(~mask, float("-inf")))
        if self._shared is None:
            self._begin(self._call, arguments)
        return Step(tokens, rotary, mask), self._prepared.entry(embedding, batch)


class _Bound:
    """The `forward` of one block during one call."""

    __slots__ = ("_block", "_index", "_pass")

    def __init__(self, forward_pass: ForwardPass, index: int, block: torch.nn.Module) -> None:
        self._pass, self._index, self._block = forward_pass, index, block

    def __call__(self, *positional: Any, **arguments: Any) -> Streams:
        if positional or not all(name in arguments for name in STREAMS):
            return type(self._block).forward(self._block, *positional, **arguments)
        return self._pass.run(self._index, self._block, arguments)


def host_forward(block: torch.nn.Module, arguments: dict[str, Any]) -> Streams:
    """The block's own forward: text and image."""
    return type(block).forward(block, **arguments)
