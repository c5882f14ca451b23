"""Runs one forward pass of an optimized model, in ComfyUI or diffusers. For one call of the
transformer each block's `forward` is replaced: by one that runs the executor, replays a graph of
all blocks, or hands its arguments to the host's block. What others do between two blocks or around
one stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..planning.split_cost import Exchange
from ..spec.sizes import MOST_GRAPH_ROWS
from ..verdict import Verdict, first_line
from .attention import Attention, AttentionRequest, ChosenAttention
from .blocks.block import BlockExecutor
from .blocks.block_form import heads_of
from .blocks.graphs import FIRST, LAST_PART, Given, Inputs, PassGraph, Seen, Work
from .blocks.host import BlockInputs, Streams, is_finite
from .cards.team import CardPass, Team
from .modulation import Entry, Halves, compute_entry
from .patches import patched

INTERCEPTED = Verdict("another node reads or changes the values between two blocks")
NOT_OURS = Verdict("attention is not computed by this package")
MEASURES = Verdict("attention measures its error in this forward pass")
THEMSELVES = Verdict("some layers run their own code, as with a LoKr as a bypass")
RAN_OUT = Verdict("memory ran out while they ran")
NOT_ALL = Verdict("some blocks are not fused")


class ForwardPass:
    """The blocks of one call of a transformer, on the card of the host's call."""

    def __init__(
        self, card: CardPass, fall_back: Callable[[Verdict, int], None], team: Team | None
    ) -> None:
        self._card, self._fall_back, self._team = card, fall_back, team
        self._host, self._prepared = card.host, card.host.prepared
        self._executor: BlockExecutor | None = None
        self._code = self._prepared.code(card.host)
        self._asked: tuple[ChosenAttention, bool, bool] | None = None
        self._chosen: Attention | None = None
        self._embedding: Any = None
        self._entry: Entry | None = None
        # What the first block got and the last one gives, once all were computed at the first call.
        self._finished: tuple[BlockInputs, Streams] | None = None
        self._looked = False  # at the functions that the host's blocks call
        self._changed: Verdict | None = None  # what another extension has changed
        self._seen: Seen | None = None  # its shape, where it finds out whether the card waits
        self._event: torch.cuda.Event | None = None
        self._first: int | None = None  # block that ran fused
        # The attention with so many keys, 0 for none. That of prompts, of references and with
        # guidance is never lossy.
        self._unmeasured_keys = self._lossy_keys = 0
        self._fills_prefix = False  # the block that runs
        self.fused = 0  # how many blocks the executor ran

    @contextmanager
    def installed(self) -> Iterator[None]:
        bound = [_BoundForward(self, *it) for it in enumerate(self._host.blocks)]
        try:
            # Not through Module.__setattr__, which costs as much as a launch.
            with patched([(it.block.__dict__, "forward", it) for it in bound]):
                yield
        finally:
            del self._executor  # which holds this pass, and with it the model, in a circle

    def run(
        self, index: int, block: torch.nn.Module, positional: tuple, arguments: dict[str, Any]
    ) -> Any:
        """Runs one block; arguments and result are those of the host's block."""
        host = self._host
        if positional and host.names:
            arguments = {**dict(zip(host.names, positional, strict=False)), **arguments}
            positional = positional[len(host.names) :]
        if self._finished is not None:
            return host.output(self._finished_block(index, positional, arguments))
        prepared = self._prepared
        refusal = self._look(index) or prepared.unsupported[index] or prepared.check.failed
        # What a block has failed at may be rows that the host has it compute before these.
        inputs = refusal or host.inputs(block, positional, arguments)
        inputs = refusal or prepared.check.failed or inputs
        if inputs is None or isinstance(inputs, Verdict):
            if inputs is not None:
                self._fall_back(inputs, 1)
            return host.run_block(block, positional, arguments)
        with host.lasting():
            return host.output(self._run_fused(index, block, arguments, inputs))

    def _run_fused(
        self, index: int, block: torch.nn.Module, arguments: dict[str, Any], inputs: BlockInputs
    ) -> Streams:
        text, image, embedding, step, intercepted = inputs
        check, unsupported = self._prepared.check, self._prepared.unsupported
        if self._executor is None:
            self._executor = self._card.executor(self._attend)
        fills_prefix = self._fills_prefix = step.keep is not None
        counted = int(not fills_prefix)  # the host calls the block again, for the image
        hidden = step.guidance.negative if step.guidance else 0
        keys = 0 if fills_prefix else step.before + step.tokens.joint - hidden
        self._lossy_keys = 0 if step.guidance else keys
        if self._entry is None:
            self._embedding, self._entry = embedding, self._host.entry(embedding, step.tokens.batch)
        # A second call of the transformer in one pass may have another embedding.
        if index == 0 and embedding is self._embedding:
            given = Given(text, image, step, self._entry)
            if self._team and self._share(block, given, arguments, intercepted):
                return text, image
            if self._replay(given, intercepted):
                return text, image
        halves = self._halves(index, block, embedding, step.tokens.batch)
        following = None
        direct = not intercepted and not self._host.additions
        if direct and index + 1 < len(unsupported) and not unsupported[index + 1]:
            following = self._host.blocks[index + 1], self._entry.of(index + 1).attention
        self.fused += counted
        self._unmeasured_keys = keys
        self._first = index if self._first is None else self._first
        compares = index == self._first and check.wanted(step)
        if compares:
            self._free_buffers()
            expected = self._host.host_block(block, arguments)
        operands = block, text, image, step, halves, following
        try:
            if compares:
                result = self._compared(expected, *operands)
            else:
                result = self._executor.run(*operands)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # compilers, drivers and packages raise anything
            if isinstance(error, RuntimeError) and self._host.failed(error):
                raise
            check.fail(f"the fused block raised {first_line(error)}")
            if not compares:  # half of the streams may be written
                raise RepeatPassError from error
        else:
            if self._seen is not None:
                self._note_wait(index)
            if not check.failed:
                return result
        self.fused -= counted
        self._fall_back(check.failed, counted)
        return expected

    def _look(self, index: int) -> Verdict | None:
        if self._changed is None:
            # Each block looks at its own, also where a graph has run it: before a replay, a look at
            # all of them would keep the card waiting for 0.5 ms.
            replaced = None if self._looked else self._code.replaced()
            self._looked = True
            self._changed = replaced or self._code.changed_in(index)
            if self._changed is not None:
                self._prepared.exchanged = True
                self._card.memory.release()  # graphs of the blocks as they were
        return self._changed

    def _free_buffers(self) -> None:
        """Frees the buffers: the host's block takes more room than ours."""
        self._card.memory.free_buffers()
        self._executor = self._card.executor(self._attend)

    def _compared(self, expected: Streams, *operands: Any) -> Streams:
        """Compares a block; where it gives NaN, once more with the host's attention."""
        _, text, image, step, *_ = operands
        check, attention = self._prepared.check, self._host.attention
        result = self._executor.run(*operands)
        if check.passes((text, image), result, expected, step) or attention is None:
            return result
        if not all(map(is_finite, result)):
            alone = lambda *it, lse=False: None if lse else self._host.host_attend(*it)  # noqa: E731
            executor = self._card.executor(alone)
            result, check.failed = executor.run(*operands), None
            if all(map(is_finite, result)):
                attention.give_up()
                self._executor = executor
            check.passes((text, image), result, expected, step)
        return result

    def _attend(self, *given: torch.Tensor | None, lse: bool = False) -> Any:
        attention, (q, k, v, mask) = self._host.attention, given
        if attention is None or (mask is not None and mask.shape[2] > 1):
            return None if lse else self._host.host_attend(q, k, v, mask)
        chosen = self._choice(attention, k.shape[1], AttentionRequest.of, k, mask)
        if lse:
            return attention.with_lse(chosen, q, k, v, mask)
        out = chosen(q, k, v, mask)
        if k.shape[1] == self._unmeasured_keys:
            attention.look(q, k, v, mask, out)
            self._unmeasured_keys = 0  # a negative prompt of the same length is no other block
        return out

    def _choice(
        self, attention: ChosenAttention, keys: int, request: Callable, *given: Any
    ) -> Attention:
        exact = keys != self._lossy_keys
        asked = attention, self._fills_prefix, exact
        if asked != self._asked:
            self._asked = asked
            self._chosen = attention.choose(request(*given), self._fills_prefix, exact)
        return self._chosen

    def _share(
        self, block: torch.nn.Module, given: Given, arguments: dict[str, Any], intercepted: bool
    ) -> bool:
        """Has several cards compute all blocks; whether they did."""
        figures, host = self._prepared.split, self._host
        refusal = self._why_one_by_one(intercepted) or self._team.refusal
        if refusal:
            figures.refuse(refusal)
            return False
        try:
            plan = self._team.plan(self._executor, given)
            if isinstance(plan, Verdict):
                figures.refuse(plan)
                return False
            compared = not figures.check.wanted(given.step)
            work = lambda: self._team.work(plan, self._key(given))  # noqa: E731
            graph = self._graph(work, given, compared, intercepted)
            if not (graph or compared) and not self._compare_shared(block, given, arguments, plan):
                return False
            split = self._team.split(plan, given.step)
            figures.gain = self._team.gain(split, given)
            plan = self._team.plan(self._executor, given)  # which a small gain has changed
            if isinstance(plan, Verdict):
                figures.refuse(plan)
                return False
            if graph is not None:
                result = graph.replay(given)
            else:
                after = self._note_wait if self._seen else None
                result = split.run(given, len(host.blocks), after)
        except torch.OutOfMemoryError:
            self._team.release()
            figures.refuse(Verdict("a GPU ran out of memory", final=True))
        except Exception as error:  # compilers, drivers and packages raise anything
            self._end_sharing(Verdict(f"several GPUs raised {first_line(error)}", final=True))
        else:
            figures.passes += 1
            figures.plan = plan
            self._finish(given, result, graph)
            return True
        self._seen = None
        return False

    def _compare_shared(
        self, block: torch.nn.Module, given: Given, arguments: dict[str, Any], plan: Exchange
    ) -> bool:
        figures, (text, image, step, _) = self._prepared.split, given
        self._free_buffers()
        expected = self._host.host_block(block, arguments)
        split = self._team.split(plan, step)
        result = split.run(given, 1)
        if figures.check.passes((text, image), result, expected, step):
            return True
        self._end_sharing(figures.check.failed)
        return False

    def _end_sharing(self, error: Verdict) -> None:
        self._prepared.split.refuse(self._team.find_damage() or error)

    def _why_one_by_one(self, intercepted: bool) -> Verdict | None:
        attention = self._host.attention
        if intercepted or self._prepared.exchanged:
            return INTERCEPTED
        if attention is None:
            return NOT_OURS
        return MEASURES if attention.measuring else None

    def _replay(self, given: Given, intercepted: bool) -> bool:
        """Has a CUDA graph compute all blocks; whether it did.

        What a graph of an earlier run computes was compared then, with the same weights.
        """
        compared = not self._prepared.check.wanted(given.step)
        graph = self._graph(lambda: self._work(given), given, compared, intercepted)
        if graph is None:
            return False
        self._finish(given, graph.replay(given), graph)
        return True

    def _work(self, given: Given) -> Work:
        executor, blocks, prefixes = self._executor, self._host.blocks, self._host.prefixes
        beside = given.step.tokens.rows <= MOST_GRAPH_ROWS[self._prepared.quantized]

        def launch(inputs: Inputs, stream: torch.cuda.Stream) -> None:
            more = stream if beside else None
            executor.run_all(blocks, inputs.x, inputs.step, inputs.entry, more, prefixes)

        key, parts = self._key(given), [(executor, blocks)]
        return Work(key, self._card.placement, parts, beside, lambda: launch, borrowed=prefixes)

    def _key(self, given: Given) -> tuple[Any, ...]:
        """Returns what two passes have in common that one graph can compute."""
        text, _, step, entry = given
        heads, tokens = heads_of(self._host.blocks[0]), step.tokens
        joint = step.before + tokens.joint
        size = tokens.batch, heads, text.shape[-1] // heads, joint, step.mask is not None
        request = text.device, text.dtype, *size
        chosen = self._choice(self._host.attention, joint, AttentionRequest, *request)
        cos, prefix = step.rotary.cos, step.prefix and step.prefix.keys.data_ptr()
        mask = None if step.mask is None else (step.mask.shape, step.mask.stride())
        form = tokens, text.dtype, cos.shape, cos.dtype, mask, prefix, step.before, step.segments
        shapes = entry.image.shape, entry.text.shape
        return (*form, step.guidance, *shapes, entry.image.dtype, chosen)

    def _graph(
        self, work_of: Callable[[], Work], given: Given, compared: bool, intercepted: bool
    ) -> PassGraph | None:
        """Returns the graph of this pass; None where kernels are launched one by one."""
        if not given.text.is_cuda:
            return None
        verdicts, host, memory = self._prepared.verdicts, self._host, self._card.memory
        refusal = self._why_no_graph(intercepted)
        if refusal or self._card.placement is None:  # never over weights that may move
            verdicts.add("graphs", refusal)
            return None
        work = work_of()
        seen = memory.seen(work.key)
        seen.passes += 1
        graph = memory.graph(work)
        if graph is not None:
            return graph
        if not compared:
            verdicts.add("graphs", FIRST)
            return None
        if host.in_turns and seen.waited is not None:
            seen.waited = True
        refusal = seen.not_worth(host.steps, work.beside)
        if not all(executor.replayable(blocks) for executor, blocks in work.parts):
            refusal = THEMSELVES
        if not refusal:
            with host.lasting(capturing=True):
                found = memory.capture(work, given, self._prepared.graphs)
            if isinstance(found, PassGraph):
                return found
            refusal = found
            if found != FIRST:  # which the next pass is not
                seen.refusal = found
        verdicts.add("graphs", refusal)
        if all(executor.prepared(blocks) for executor, blocks in work.parts):
            self._seen = seen
        return None

    def _finish(self, given: Given, result: Streams, graph: PassGraph | None) -> None:
        inputs = BlockInputs(given.text, given.image, self._embedding, given.step, False)
        self._finished = inputs, result
        self.fused += len(self._host.blocks)
        self._prepared.graphs.replayed += graph is not None

    def _why_no_graph(self, intercepted: bool) -> Verdict | None:
        if self._card.placement is None:
            return self._host.layers.moving
        if refusal := self._why_one_by_one(intercepted or bool(self._host.additions)):
            return refusal
        if self._prepared.dropped > 1:  # once, it may have been the check's
            return RAN_OUT
        return NOT_ALL if any(self._prepared.unsupported) else self._host.no_graphs()

    def _finished_block(self, index: int, positional: tuple, arguments: dict[str, Any]) -> Streams:
        inputs, result = self._finished
        unchanged = self._host.unchanged(index, positional, arguments, inputs)
        if not unchanged or self._code.changed_in(index):
            raise RepeatPassError
        return result if index + 1 == len(self._host.blocks) else (inputs.text, inputs.image)

    def _note_wait(self, index: int) -> None:
        """Finds out whether the card waits for the CPU, once a block was launched."""
        blocks = len(self._host.blocks)
        if index + 1 == blocks - max(1, blocks // LAST_PART):
            self._event = torch.cuda.Event()
            self._event.record()
        elif index + 1 == blocks and self._event is not None:
            self._seen.waited = self._event.query()

    def _halves(
        self, index: int, block: torch.nn.Module, embedding: torch.Tensor, batch: int
    ) -> Halves:
        if embedding is not self._embedding:  # another extension has changed it for this block
            return compute_entry((block,), embedding, batch).of(0)
        return self._entry.of(index)


class RepeatPassError(Exception):
    """Somebody changed blocks, or what they are given, after a graph had computed their results, or
    a kernel raised in the middle of a pass.
    """


class _BoundForward:
    __slots__ = ("_index", "_pass", "block")

    def __init__(self, forward_pass: ForwardPass, index: int, block: torch.nn.Module) -> None:
        self._pass: ForwardPass | None = forward_pass
        self._index, self.block = index, block

    def leave(self) -> None:
        """Runs the host's from here on, for an extension that has wrapped this one."""
        self._pass = None

    def __call__(self, *positional: Any, **arguments: Any) -> Any:
        if self._pass is None:
            return type(self.block).forward(self.block, *positional, **arguments)
        return self._pass.run(self._index, self.block, positional, arguments)
