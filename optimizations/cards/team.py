"""Decides which cards share a forward pass, in which way, and whether that gains anything."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cached_property

import torch

from ...families.protocol import StepTokens
from ...machine.links import Link, Route
from ...planning.split_cost import LEAST_GAIN, BlockSeconds, Exchange, SplitCost, row_bytes
from ...verdict import Verdict
from ..attention import Attention, AttentionRequest, ChosenAttention
from ..blocks.attend import Attend
from ..blocks.block import BlockExecutor, Step
from ..blocks.block_form import PLACES
from ..blocks.graphs import Given, Inputs, PassMemory, Work, recent
from ..blocks.host import HostPass
from ..blocks.products import Share
from ..kernels import on_card
from .parts import ShareCard
from .split import Split, shares_of

TRIED = 3  # blocks, to find out
TEXT_PLACES = tuple(place for place, stream in enumerate(PLACES) if stream == "text")
AHEAD = 20_000_000  # cycles of a card, about 10 ms

NOT_MEASURED = Verdict(
    "the speed of the link between the GPUs is unknown, because too little VRAM was free to "
    "measure it"
)
TOO_SMALL = Verdict("the image has fewer tokens than there are GPUs")


@dataclass
class CardPass:
    host: HostPass  # its pass; the first is the one that the host has called
    memory: PassMemory  # that no other pass uses meanwhile
    held: ExitStack  # what lasts until the pass ends

    @cached_property
    def placement(self) -> Hashable | None:
        """Tells where the weights are, held from the first time that somebody asks; None where they
        may move.

        The first block that runs fused asks: held weights make no room for what the host allocates
        before, and ComfyUI logs a warning for each page of them.
        """
        with on_card(self.host.device):
            token = self.held.enter_context(self.host.layers.hold(self.host.blocks))
        # A graph is of the layers' forms, too.
        return None if token is None else (token, *self.host.prepared.read)

    def executor(self, attend: Attend) -> BlockExecutor:
        known, workspace = self.host.prepared.known(self.placement), self.memory.workspace
        return BlockExecutor(self.host.layers, self.host.prepared.ops, attend, workspace, known)

    def refusal(self) -> Verdict | None:
        """Says why it takes no share; None where it does."""
        if self.placement is None:
            return Verdict(f"{self.host.device}: {self.host.layers.moving}")
        found = next(filter(None, self.host.prepared.unsupported), None)
        where = f"{self.host.device}: some blocks are not fused"
        return found and Verdict(f"{where}: {found}")

    def card(self, attention: ChosenAttention) -> ShareCard:
        """Makes what computes its share, with attention that is chosen once in a pass."""
        found: list[Attention] = []

        def attend(q: torch.Tensor, *operands: torch.Tensor | None) -> torch.Tensor:
            k, _, mask = operands  # there may be more of them than queries
            if not found:
                found.append(attention.choose(AttentionRequest.of(k, mask)))
            return found[0](q, *operands)

        # Cards share no guided pass, for which alone `lse` is.
        executor = self.executor(attend)  # type: ignore[arg-type]
        return ShareCard(executor, self.memory.workspace, self.host.blocks, self.host.device)


@dataclass
class ShapeFigures:
    """What is known of the passes of one shape on so many cards."""

    alone: float = 0.0  # milliseconds of a block on one card, measured
    plan: Exchange | Verdict | None = None  # how a pass is split, or why it is not
    gain: float | None = None  # how many times as fast as one card they are, measured


class Timed:
    """Measures the milliseconds between two points of a card's current stream."""

    def __enter__(self) -> None:
        self._start = self._point()

    def __exit__(self, *_: object) -> None:
        self._stop = self._point()

    def _point(self) -> torch.cuda.Event:
        point = torch.cuda.Event(enable_timing=True)
        point.record()
        return point

    def read(self) -> float:
        self._stop.synchronize()
        return self._start.elapsed_time(self._stop)


class Team:
    """The cards of one pass.

    Raises:
        UnavailableError: Copies have to go through system RAM, and none can be pinned.
    """

    def __init__(
        self,
        members: Sequence[CardPass],
        links: dict[tuple[int, int], Link],
        known: dict[Hashable, ShapeFigures],
    ) -> None:
        self._members, self._links, self._known = members, links, known
        self._gbps = min(link.gbps for link in links.values())
        self._routes = {
            (source, target): link.route(members[source].host.device)
            for pair, link in links.items()
            for source, target in (pair, pair[::-1])
        }
        self._figures = ShapeFigures()  # of the last plan
        # why they cannot share it; None where they can
        self.refusal = next(filter(None, (member.refusal() for member in members)), None)
        changed = [it for it in members if it.host.prepared.kinds != members[0].host.prepared.kinds]
        if changed and not self.refusal:  # as a LoRA of another node that knows one model alone
            device = changed[0].host.device
            self.refusal = Verdict(f"{device}: its layers differ from those of the first GPU")

    def plan(self, executor: BlockExecutor, given: Given) -> Exchange | Verdict:
        """Says how a pass is split, or why it is not; measures some blocks on one card, once."""
        if not self._gbps:
            return NOT_MEASURED
        text, _, step, _ = given
        if step.tokens.image < len(self._members):
            return TOO_SMALL
        first = self._members[0]
        sent = first.host.prepared.split.sent
        if sent is None:
            known = [executor.look(block, text) for block in first.host.blocks]
            rows = all(it.form.sends_rows and it.operands is not None for it in known)
            sent = rows, all(it.form.layers[0].format is not None for it in known)
            first.host.prepared.split.sent = sent
        sends, quantized = sent
        kinds = frozenset(first.host.prepared.kinds.items())
        shape = step.tokens, step.mask is None, text.dtype, kinds, self._gbps
        key = *shape, len(self._members), sent
        figures = self._figures = recent(self._known, key, ShapeFigures)
        if figures.plan is None:
            width, tokens = text.shape[2], step.tokens
            counted = StepTokens(tokens.text, tokens.image, items=tokens.batch)
            figures.alone = self._alone(executor, given)
            block = BlockSeconds.shared(
                figures.alone / 1000,
                counted,
                width,
                quantized=first.host.prepared.quantized,
                text=self._of_text(executor, given) / 1000,
            )
            cost = SplitCost(
                counted,
                width,
                block,
                row_bytes(width, quantized=quantized) if sends else None,
                len(self._members),
                self._gbps * 1e9,
                len(first.host.blocks),
            )
            figures.plan = cost.best if cost.pays else Verdict(cost.words)
        return figures.plan

    def work(self, plan: Exchange, key: tuple[Hashable, ...]) -> Work:
        """Says what a CUDA graph over all cards computes of a pass."""

        def launch() -> Callable[[Inputs, torch.cuda.Stream], None]:
            routes = {pair: route.captured for pair, route in self._routes.items()}
            return lambda inputs, _: self.split(plan, inputs.step, routes).capture(inputs)

        placement = tuple(member.placement for member in self._members)
        others = [(member.host.device, member.memory) for member in self._members[1:]]
        parts = [(card.executor, card.blocks) for card in self._cards()]
        peer = tuple(route.peer for route in self._routes.values())
        return Work((plan, peer, *key), placement, parts, False, launch, others)

    def _cards(self) -> list[ShareCard]:
        attention = self._members[0].host.attention
        return [member.card(attention) for member in self._members]

    def split(
        self, plan: Exchange, step: Step, routes: dict[tuple[int, int], Route] | None = None
    ) -> Split:
        """Makes what runs a pass, or with the `routes` of a capture what is captured."""
        shares = shares_of(step.tokens, plan.image_rows, plan.name)
        additions = self._members[0].host.additions
        return Split(self._cards(), shares, routes or self._routes, additions, plan.early)

    def find_damage(self) -> Verdict | None:
        """Verifies the links after an error; which of them lose data, None where none does."""
        links = self._links.values()
        with suppress(RuntimeError):  # of a card that has failed, as its own error says
            for link in links:
                link.verify()
        pairs = ["{} and {}".format(*link.cards) for link in links if link.damaged]
        lost = f"copies between {', '.join(pairs)} lose data"
        return Verdict(lost, final=True) if pairs else None

    def gain(self, split: Split, given: Given) -> float:
        """Measures how many times as fast as one card they are, by a few blocks; once for a shape.

        Where that is too little, `plan` says so from then on.
        """
        figures = self._figures
        if figures.gain is None:
            figures.gain = figures.alone / self._together(split, given)
            if figures.gain < LEAST_GAIN:
                figures.plan = Verdict(
                    f"several are {figures.gain:.2f}x as fast as one, but {LEAST_GAIN}x is needed"
                )
        return figures.gain

    def _alone(self, executor: BlockExecutor, given: Given) -> float:
        text, image, step, entry = given
        first = self._members[:1]
        blocks = first[0].host.blocks[:TRIED]
        x = torch.cat([it.reshape(-1, it.shape[-1]) for it in (text, image)])

        def run(timed: Timed) -> None:
            with timed:
                executor.run_all(blocks, x, step, entry)

        return self._twice(first, run) / len(blocks)

    def _of_text(self, executor: BlockExecutor, given: Given) -> float:
        """Measures the text's products in one of these blocks, of whatever is in buffers, in ms.

        Few rows take longer than their operations say: in int8 about 270 us of a block of 1,700 us
        with 200 rows of 4,296, by operations 72 us (H100, a profile).
        """
        text, _, step, _ = given
        first = self._members[:1]
        share, workspace = Share.all(step.tokens), first[0].memory.workspace
        blocks = first[0].host.blocks[:TRIED]
        rows = text.new_empty((step.tokens.rows, text.shape[2]))
        known = [executor.look(block, rows) for block in blocks]
        programs = [workspace.program(it.form, share, rows) for it in known]

        def run(timed: Timed) -> None:
            with timed:
                for program, it in zip(programs, known, strict=True):
                    program.mix(program.heads.q.flatten(2))
                    executor.multiply(program, it, TEXT_PLACES)

        return self._twice(first, run) / len(blocks)

    def _together(self, split: Split, given: Given) -> float:
        blocks = min(TRIED, len(self._members[0].host.blocks))
        return self._twice(self._members, lambda it: split.run(given, blocks, timed=it)) / blocks

    def _twice(self, members: Sequence[CardPass], launch: Callable[[Timed], object]) -> float:
        """Measures what is launched, in ms: the second time, as the first compiles. Cards wait
        until some of it is launched, as a graph launches it.
        """
        host, timed = members[0].host, Timed()
        for _ in range(2):
            if host.device.type == "cuda" and not (host.additions or host.no_graphs()):
                for member in members:
                    with torch.cuda.device(member.host.device):
                        torch.cuda._sleep(AHEAD)
            launch(timed)
        return timed.read()

    def release(self) -> None:
        """Frees what other cards than the first keep for passes."""
        for member in self._members[1:]:
            member.memory.release()
