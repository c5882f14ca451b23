"""Runs Qwen-Image in ComfyUI: 1.x, and 2.1, which ComfyUI has since 0.37."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import comfy.ops
import torch
from comfy import utils
from comfy.ldm.modules import attention as comfy_attention

from ...caches import cached
from ...families.qwen_image_21 import QWEN_IMAGE_21
from ...optimizations.attention import attend_causal
from ...optimizations.blocks.attend import Segment
from ...optimizations.blocks.block import Step
from ...optimizations.blocks.host import (
    EXACT_TOLERANCE,
    ROUNDING_TOLERANCE,
    BlockInputs,
    PrefixedStream,
    Streams,
)
from ...optimizations.blocks.workspace import Prefix
from ...optimizations.modulation import Entry
from ...optimizations.nag import JointGuidance, PrefixGuidance
from ...optimizations.passes import RepeatPassError
from ...optimizations.reference import Guidance, Rotary, Tokens
from ...verdict import Verdict
from . import contract
from .sample.attention import SLOT, GuidedAttention
from .sample.forward import INPUT_PATCH, OTHER_ARGUMENTS, ComfyPass, rotary_of
from .sample.modulation import sample_of, switches, weak_identity
from .sample.off_card import plain_parts
from .sample.prefix import KeptPrefixes, PrefixParts, Rows, has_known_slot


def join_negative(
    transformer: Any, given: dict, negative: Any, guidance: Guidance, kept: dict
) -> dict[str, Any]:
    """Puts a negative prompt behind the prompt, at the same places of the rotation."""
    context, options, mask = map(given.get, ("context", "transformer_options", "attention_mask"))
    text = utils.repeat_to_batch_size(negative.text.to(context), len(context))
    joint = JointGuidance(guidance, context.shape[1], text.shape[1])
    if mask is not None or negative.mask is not None:
        mask = torch.cat([_mask(mask, context), _mask(negative.mask, text)], 1)
    slot = GuidedAttention(options.get(SLOT), lambda block: joint)
    patches = options.get("patches", {})
    post_input = *patches.get("post_input", ()), partial(_place_negative, text.shape[1])
    patches = {**patches, "post_input": list(post_input)}
    return {
        "context": torch.cat([context, text], 1),
        "attention_mask": mask,
        "transformer_options": {**options, SLOT: slot, "patches": patches},
    }


def _mask(mask: torch.Tensor | None, text: torch.Tensor) -> torch.Tensor:
    """Gives the mask as ComfyUI adds it to the scores, (batch, tokens)."""
    if mask is None:
        return text.new_zeros(text.shape[:2])
    mask = utils.repeat_to_batch_size(mask.to(text.device), len(text))
    if not mask.is_floating_point():
        mask = (mask.to(text.dtype) - 1) * torch.finfo(text.dtype).max
    return mask.to(text.dtype)


def _place_negative(tokens: int, given: dict[str, Any]) -> dict[str, Any]:
    ids = given["txt_ids"].clone()
    places = torch.arange(tokens, device=ids.device, dtype=ids.dtype)
    ids[:, -tokens:] = ids[:, :1] + places[:, None]
    return {**given, "txt_ids": ids}


# 2.1

CODE = QWEN_IMAGE_21.comfyui_code
# What ComfyUI's loop gives a block, by place.
BLOCK_ARGUMENTS = ("x", "mod", "pe", "attn_fn", "prefix_len", "transformer_options")
ARGUMENTS = set(BLOCK_ARGUMENTS)
FILLS = Verdict("the first step fills ComfyUI's prefix cache")
GUIDED = Verdict("a negative prompt guides attention")
NOT_READ = Verdict("ComfyUI's prefix cache is in system RAM or in 8 or 4 bits")
OTHER_MODEL = Verdict("this ComfyUI calls its Qwen-Image-2.1 in an unknown way")


@cached
def is_known() -> bool:
    return contract.is_known(
        (CODE, "QwenImage21Transformer2DModel._forward"),
        (CODE, "QwenImage21TransformerBlock.forward"),
        BLOCK_ARGUMENTS,
    )


class CausalCall(NamedTuple):
    """What a block's `attn_fn` has bound, where ComfyUI's `block_causal_attention` made it."""

    segments: tuple[Segment, ...]  # with the image's rows first
    cache: Any  # that is filled, or None
    block_index: int


class _Stream(NamedTuple):
    x: Any = None  # as ComfyUI's blocks have it
    turned: Any = None  # with the image's rows first


class PrefixedComfyPass(PrefixedStream, ComfyPass):
    """One call, whose blocks read ComfyUI's prefix cache, fill it, or run without it.

    Where they do not read it, text, references and image are rows of one stream in segments: a text
    segment is causal, an image's reads all up to its own end. The executor gets the rows of the
    image first, and those behind are modulated as at timestep 0.
    """

    names = BLOCK_ARGUMENTS
    streams, shared = ("x", "mod"), ("pe",)
    additions = ()
    masked = True

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.peers = ()  # other cards have no part in a pass
        self._guided = False
        self._fills = False  # ComfyUI's prefix cache
        self._shift = 0  # rows before those of the image, where both are given
        self._segments: tuple[Segment, ...] = ()  # of these rows
        self._given = self._result = _Stream()  # of a block that gets both
        self._reader: int | None = None  # block that gets this result, with nothing between
        self._next_reader: int | None = None
        self._host_result: Streams | None = None  # of a block that is compared
        self._put_later: Callable[[], None] | None = None  # its keys, where it passes
        self._parts: PrefixParts | None = None  # of what fills it
        self._in_parts = True  # whether rows up to the last reference are computed by themselves
        self._slot: Any = None  # of the prefix cache
        self._prefixes: Sequence[Prefix] | None = None

    def fallback(self) -> Verdict | None:
        return super().fallback() or (None if is_known() else OTHER_MODEL)

    def no_graphs(self) -> Verdict | None:
        # Where the cache is filled or moves, nobody knows what later blocks read.
        if self._fills:
            return FILLS
        if self._guided:
            return GUIDED
        if not self._shift and self.prefixes is None:
            return NOT_READ
        return super().no_graphs()

    def clean_up(self) -> None:
        super().clean_up()
        self._host_result = self._put_later = self._parts = None
        self._in_parts = False
        KeptPrefixes.of(self.owner.diffusion_model).clear()
        # It may hold NaN, and ComfyUI fails where the same prompt is looked up twice in turn.
        transformer = self.owner.diffusion_model
        if hasattr(transformer, "reset_prefix_cache"):
            transformer.reset_prefix_cache(transformer.prefix_cache_enabled)

    def inputs(
        self, block: torch.nn.Module, positional: tuple, arguments: dict[str, Any]
    ) -> BlockInputs | Verdict | None:
        if positional or arguments.keys() != ARGUMENTS:
            return OTHER_ARGUMENTS
        self._options, self._block = arguments["transformer_options"], block
        if self._options.get("patches", {}).get("attn1_patch"):  # of a wrapper inside of the call
            return INPUT_PATCH
        self._shift, call = 0, self._causal_call(arguments)
        if call is None:
            found = super().inputs(block, positional, arguments)
            if isinstance(found, BlockInputs):
                found = found._replace(step=self.guided(found.step))
            return found
        comfy.ops.run_every_op()
        (x, mod, pe), before = map(arguments.get, ("x", "mod", "pe")), arguments["prefix_len"]
        batch, rows, _ = x.shape
        self._fills = before == rows
        self._shift = 0 if self._fills else before
        if self._fills and (parts := self._parts_of(arguments, call)):
            return self._fill(parts, block, arguments, call)
        tokens = Tokens(batch, 0, rows, rows - before)
        make = partial(self.new_step, tokens, x, pe, call.segments)
        step = self.kept_step((pe,), (tokens, x.dtype, call.segments), make)
        if self._fills:
            step = step._replace(keep=partial(self._keep, call))
        patches, replaced = (self._options.get(it, {}) for it in ("patches", "patches_replace"))
        intercepted = bool(patches.get("single_block") or replaced.get("dit"))
        index = self._options["block_index"]
        goes_on = x is self._result.x and index == self._reader
        image = self._result.turned if goes_on else self._turned(x, -1)
        # A graph begins with rows that were turned here.
        self._given, self._segments = _Stream(x, None if goes_on else image), call.segments
        self._next_reader = None if intercepted else index + 1
        return BlockInputs(image[:, :0], image, mod, self.guided(step), intercepted)

    def _parts_of(self, given: dict[str, Any], call: CausalCall) -> PrefixParts | None:
        """Finds or makes the parts of the rows that fill the cache; None where they run as one."""
        segments, cache, block_index = call
        if isinstance(cache, _Kept):  # it is the first part
            return None
        x, parts = given["x"], self._parts
        if block_index and parts is not None:
            if x is not parts.handed or block_index != parts.following:
                raise RepeatPassError
            return parts
        self._parts = None
        cut = max((it.stop for it in segments if not it.causal), default=0)
        guided = isinstance(self._options.get(SLOT), GuidedAttention)
        fused = not any(self.prepared.unsupported)
        if block_index or guided or not (cut and fused and self._in_parts and self.attention):
            return None
        store = KeptPrefixes.of(self.owner.diffusion_model)
        if store.text is None:  # another pack calls the transformer
            return None
        zero = tuple(it[0] for it in given["mod"][:4])
        opening = [it for it in segments if it.causal and it.stop <= cut]
        projected = self._opened(x, opening, store.text)
        if projected is None:
            return None
        keeps = has_known_slot(cache)
        keeps = keeps and cache.dtype == "default" and cache.store_device == self.device
        rows = Rows(projected, given["pe"], zero, cut, self._settings() if keeps else None)
        kept = source = None
        if keeps:
            source, same = store.find(rows, len(self.blocks))
            whole = same == x.shape[1]
            kept = store.read(source, cache) if whole else store.begin(rows, cache, source)
        if source is not None:
            note = f"prompt: keys and values of {same} of {x.shape[1]} rows are an earlier prompt's"
            self.prepared.notes[note] = None
        self._parts = PrefixParts(x, rows, kept, source)
        return self._parts

    def _settings(self) -> Hashable:
        """Returns what keys and values depend on besides the rows."""
        # Not of those in system RAM: what a pass reads then is a copy, and their pages may have to
        # come from the disk.
        weights = (it for block in self.blocks for it in block.parameters())
        there = plain_parts(it for it in weights if it.device == self.device)
        # The check is another one where anything else of the blocks has changed since.
        known = self.state, self.prepared.check, weak_identity(self.attention)
        return *known, switches(), sample_of(there)

    def _opened(
        self, x: torch.Tensor, segments: list[Segment], text: torch.Tensor
    ) -> torch.Tensor | None:
        """Projects the text before the last reference by itself: a product of all rows gives other
        bits with another instruction. None where another pack makes something else of the text.
        """
        places = [row for it in segments for row in range(it.start, it.stop)]
        x, there = x.clone(), x[:, places]
        if places:
            found = self.owner.diffusion_model.txt_in(text[:, : len(places)])
            norm = partial(torch.linalg.vector_norm, dim=-1)
            most = ROUNDING_TOLERANCE if self.prepared.rounds else EXACT_TOLERANCE
            if found.shape != there.shape or (norm(found - there) > most * norm(there)).any():
                return None
            x[:, places] = found
        return x

    def _fill(
        self, parts: PrefixParts, block: torch.nn.Module, given: dict[str, Any], call: CausalCall
    ) -> BlockInputs | None:
        """Has a block compute the rows up to the last reference, where they are not kept, and gives
        the inputs of those behind; None where there are none to compute.
        """
        index, mod, options = call.block_index, given["mod"], given["transformer_options"]
        parts.following = index + 1
        parts.done = parts.whole
        if parts.whole:
            self._place(parts, call)
            return None
        cut = parts.cut
        if parts.source is not None:
            prefix = Prefix(*parts.source.blocks[index][:, :, :cut].unbind(1))
        else:
            first = _Kept()
            bound = _bound(given["attn_fn"], "block_causal_attention")["segments"]
            segments = [it for it in bound if it[1] <= cut]
            make = import_module(CODE).block_causal_attention
            attend = make(segments, options, first, index, cut)
            parts.first = block(parts.first, mod, parts.first_rotation, attend, cut, options)
            prefix = first.blocks[index]
        rows, rotation = parts.second, parts.second_rotation
        batch, count, _ = rows.shape
        keep = partial(self._keep_parts, parts, call)
        parts.done = not count
        if parts.done:
            keep(*prefix)
            return None
        tokens = Tokens(batch, 0, count, 0)
        behind = (Segment(0, count, 0, cut + count, True),)
        make = partial(self.new_step, tokens, rows, rotation, behind)
        step = self.kept_step((rotation,), (tokens, rows.dtype, behind), make)
        parts.runs = True
        return BlockInputs(rows[:, :0], rows, mod, step._replace(prefix=prefix, keep=keep), False)

    def _keep_parts(
        self, parts: PrefixParts, call: CausalCall, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        if parts.kept is None:
            self._keep(call, keys, values)
            return
        parts.kept.write(call.block_index, keys, values)
        self._place(parts, call)

    def _place(self, parts: PrefixParts, call: CausalCall) -> None:
        """Has ComfyUI's cache read what is kept; `put` would copy it."""
        slot, index, rows = call.cache.slot, call.block_index, parts.x.shape[1]
        slot["blocks"][index] = parts.kept.blocks[index][:, :, :rows]
        slot["params"][index] = None

    def run_block(
        self, block: torch.nn.Module, positional: tuple, arguments: dict[str, Any]
    ) -> Any:
        parts, x = self._parts, arguments.get("x")
        if parts is None or (x is not parts.given and x is not parts.handed):
            return super().run_block(block, positional, arguments)
        if not parts.done:  # ComfyUI's block would read rows that no block has written
            raise RepeatPassError
        parts.done = False
        return parts.handed

    def unchanged(
        self, index: int, positional: tuple, arguments: dict[str, Any], inputs: BlockInputs
    ) -> bool:
        if not self._shift:
            return super().unchanged(index, positional, arguments, inputs)
        x, mod, call = arguments.get("x"), arguments.get("mod"), self._causal_call(arguments)
        if positional or call is None or call.segments != self._segments:
            return False
        same = x is self._given.x and inputs.image is self._given.turned
        return same and mod is inputs.embedding

    def guided(self, step: Step) -> Step:
        step = super().guided(step)
        self._guided = step.guidance is not None
        if self._guided and self._shift:
            guidance: Any = step.guidance
            step = step._replace(guidance=guidance._replace(first=True))
        return step

    def _turned(self, x: torch.Tensor, way: int) -> torch.Tensor:
        """Has the image's rows first, or last again."""
        return x.roll(way * self._shift, 1) if self._shift else x

    def _keep(self, call: CausalCall, keys: torch.Tensor, values: torch.Tensor) -> None:
        put = partial(call.cache.put, call.block_index, torch.stack([keys, values], 1))
        if self._host_result is None:
            put()
        else:
            self._put_later = put

    def output(self, streams: Streams) -> torch.Tensor:
        if self._parts is not None and self._parts.runs:
            self._parts.second, self._parts.runs = streams[1], False
            return self._parts.handed
        # Those of ComfyUI's own block are there, and a later run, which compares none, has ours.
        if self._put_later and streams is not self._host_result:
            self._put_later()
        self._host_result = self._put_later = None
        if self._shift and streams[1] is self._given.turned:  # of blocks before a graph's last
            return self._given.x
        image = super().output(streams)
        found = self._turned(image, 1)
        if self._shift:
            self._result, self._reader = _Stream(found, image), self._next_reader
        return found

    def host_block(self, block: torch.nn.Module, arguments: dict[str, Any]) -> Streams:
        if isinstance(slot := self._options.get(SLOT), GuidedAttention):
            slot.again()
        text, image = super().host_block(block, arguments)
        self._host_result = text, self._turned(image, -1)
        return self._host_result

    def find_prefix(
        self, block: torch.nn.Module, positional: tuple, arguments: dict[str, Any]
    ) -> Prefix | Verdict:
        comfy.ops.run_every_op()
        return self.prefix_of(arguments) or OTHER_ARGUMENTS

    def prefix_of(self, arguments: dict[str, Any]) -> Prefix | None:
        """Reads what ComfyUI's `prefix_cached_attention` has bound; None of others."""
        # Calling it would join them with those of the image in new tensors.
        bound = _bound(arguments["attn_fn"], "prefix_cached_attention")
        if not {"prefix_k", "prefix_v"} <= bound.keys() or arguments["prefix_len"]:
            return None
        return Prefix(bound["prefix_k"], bound["prefix_v"])

    def _causal_call(self, arguments: dict[str, Any]) -> CausalCall | None:
        bound = _bound(arguments["attn_fn"], "block_causal_attention")
        before, rows = arguments["prefix_len"], arguments["x"].shape[1]
        known = {"segments", "cache", "block_index"} <= bound.keys()
        if not (known and before and (bound["cache"] is not None) == (before == rows)):
            return None
        image = rows - before
        places: list[Segment] = []
        for start, stop, mask in bound["segments"]:
            if start == before:
                places.insert(0, Segment(0, image, 0, rows, mask is not None))
            else:
                places.append(
                    Segment(start + image, stop + image, image, stop + image, mask is not None)
                )
        return CausalCall(tuple(places), bound["cache"], bound["block_index"])

    def host_attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        causal = mask is not None and mask.shape[2] > 1
        # With a mask torch's takes cuDNN, which plans each length. Others of ComfyUI's compute
        # something else: they add the mask's ones to the scores.
        torchs = comfy_attention.optimized_attention is comfy_attention.attention_pytorch
        if causal and torchs and self.attention:
            found = attend_causal(q, k, v)
            if found is not None:
                return found
        return super().host_attend(q, k, v, mask)

    def new_step(self, tokens: Tokens, image: torch.Tensor, *shared: Any) -> Step:
        pe, *segments = shared
        rotary = rotary_of(pe.transpose(1, 2))
        rotary = Rotary(*(self._turned(part, -1) for part in rotary))
        return Step(tokens, rotary, None, segments=segments[0] if segments else ())

    @property
    def prefixes(self) -> Sequence[Prefix] | None:
        """Of ComfyUI's prefix cache, where it lies on the card as it is read."""
        if self._shift:
            return None
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
        # A sampler may give all items one timestep.
        wide = [(zero, target.expand(batch, -1, -1)) for zero, target in embedding[:4]]
        return super().entry(wide, batch)

    def parts_of(self, embedding: Any) -> Sequence[torch.Tensor]:
        """Reads ComfyUI's (zero, target) of each; of the gates it gives tanh."""
        return [
            torch.cat([target, zero.expand_as(target)]).squeeze(1) for zero, target in embedding
        ]


class _Kept:
    """Takes what ComfyUI's blocks put into its prefix cache."""

    def __init__(self) -> None:
        self.blocks: dict[int, Prefix] = {}

    def put(self, index: int, both: torch.Tensor) -> None:
        self.blocks[index] = Prefix(*both.unbind(1))


def keep_negative(
    transformer: Any, given: dict, negative: Any, guidance: Guidance, kept: dict
) -> dict[str, Any]:
    """Has the image read keys and values of a negative prompt, which are computed once in a run.
    Where ComfyUI keeps none, because hooks may change the weights, they are computed in each pass.
    """
    x, context, options = map(given.get, ("x", "context", "transformer_options"))
    form = x.shape[-2:], x.dtype, x.device
    if form not in kept or not getattr(transformer, "prefix_cache_enabled", False):
        kept[form] = _prefix_of(transformer, x, negative, options)
    blocks, image = kept[form].blocks, x.shape[-2:].numel()
    references = sum(it.shape[-2:].numel() for it in given.get("ref_latents") or ())
    whole = context.shape[1] + references + image

    def of(block: int) -> PrefixGuidance:
        keys, values = (utils.repeat_to_batch_size(part, len(x)) for part in blocks[block])
        return PrefixGuidance(guidance, keys, values, image, whole)

    return {"transformer_options": {**options, SLOT: GuidedAttention(options.get(SLOT), of)}}


def _prefix_of(transformer: Any, x: torch.Tensor, negative: Any, options: dict) -> _Kept:
    """Computes text and references as ComfyUI's forward does in the first step of a prompt."""
    code = import_module(CODE)
    text, options = negative.text.to(x), {**options}
    references = [utils.repeat_to_batch_size(it.to(x), len(text)) for it in negative.references]
    given = utils.repeat_to_batch_size(x, len(text)), text, references, list(negative.slots)
    rows, pe, segments = transformer.build_sequence(*given)
    before = rows.shape[1] - x.shape[-2:].numel()
    rows, pe = rows[:, :before], pe[:, :before]
    embedding = transformer.time_text_embed(x.new_zeros(2), x.dtype)
    scale1, gate1, scale2, gate2 = transformer.modulation(embedding).chunk(4, -1)
    parts = (code._split_rows(it) for it in (scale1, gate1.tanh(), scale2, gate2.tanh()))
    mod, found = (*parts, torch.zeros_like(scale1[:1, None])), _Kept()
    for index, block in enumerate(transformer.transformer_blocks):
        options["block_index"] = index
        attend = code.block_causal_attention(segments[:-1], options, found, index, before)
        rows = block(rows, mod, pe, attend, before, options)
    return found


def _bound(attend: Any, maker: str) -> dict[str, Any]:
    """Reads what a function of ComfyUI has bound in the one that it gives; nothing of others."""
    code = getattr(attend, "__code__", None)
    if code is None or not attend.__qualname__.startswith(f"{maker}."):
        return {}
    cells = (cell.cell_contents for cell in attend.__closure__)
    return dict(zip(code.co_freevars, cells, strict=True))
