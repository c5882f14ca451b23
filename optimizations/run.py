"""Follows an optimized model through a run, in ComfyUI or diffusers: which blocks run fused, the
check in the first step, what falls back and why, and the report. `passes.py` has one pass of it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ..errors import UnavailableError
from ..machine.links import link_between
from ..verdict import Verdict, first_line
from .attention import ChosenAttention
from .blocks.graphs import PassMemory
from .blocks.host import HostPass, PreparedModel
from .cards.team import CardPass, ShapeFigures, Team
from .inventory import is_changed
from .kernels import on_card
from .passes import ForwardPass, RepeatPassError
from .patches import switched

AS_ASKED = Verdict("as requested")
NO_PASS = Verdict("no forward pass ran")
PASSED_BY = Verdict("another extension runs the transformer with its own code")


class Later:
    """Reads numbers that the card is still computing, copied to the host without waiting."""

    def __init__(self, step: int, *numbers: torch.Tensor) -> None:
        self.step = step
        values = torch.stack([number.float() for number in numbers])
        self._event: torch.cuda.Event | None = None
        if values.is_cuda:
            self._values = torch.empty(values.shape, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._event = torch.cuda.current_stream(values.device).record_event()
        else:
            self._values = values.cpu()

    @property
    def ready(self) -> bool:
        return self._event is None or self._event.query()

    def read(self) -> list[float]:
        if self._event is not None:
            self._event.synchronize()
        return self._values.tolist()


class NotFiniteError(Exception):
    """Says that attention gave NaN in an earlier pass: the run starts again, with the host's."""


@dataclass
class _Model:
    # What is kept of one model: by its weights what is known in this run and was in the last one,
    # by card and stream what passes use again; its passes in this run, and which may be NaN.
    prepared: dict[Hashable, PreparedModel] = field(default_factory=dict)
    earlier: dict[Hashable, PreparedModel] = field(default_factory=dict)
    memories: dict[Hashable, PassMemory] = field(default_factory=dict)
    passes: int = 0
    doubts: list[Later] = field(default_factory=list)


class Optimization:
    """Holds the state of one optimized model, over its runs and forward passes.

    Each run finds out anew what is known of a model, in its first forward pass, when patches are in
    place. The result is kept for each model and each set of patches: ComfyUI's clones can carry
    other LoRAs, and each of several cards has its own model. What takes long is taken over from the
    last run, where nothing has changed since.
    """

    host = "the host's"
    in_run = False  # of a host that starts a run again after a `NotFiniteError`

    def __init__(self, attention: ChosenAttention | None, blocks: bool = True) -> None:
        self.attention = attention
        self._blocks = blocks
        self._models: WeakKeyDictionary[Any, _Model] = WeakKeyDictionary()
        self._last: PreparedModel | None = None
        self._of_cards: dict[Hashable, ShapeFigures] = {}
        self._failed: Verdict | None = None
        self._passed_by = False
        self._logged: set[str] = set()

    @property
    def lossy_attention(self) -> bool:
        """Whether attention differs from exact attention by more than rounding."""
        return self.attention is not None and self.attention.lossy

    def start_run(self) -> None:
        """Forgets what was known in the last run; its report stays until the next pass."""
        self.confirm()
        # What was compared with the host's attention says nothing of this package's.
        gave_up = self.attention is not None and self.attention.fallback
        for model in self._known():
            model.earlier, model.prepared = {} if gave_up else model.prepared, {}
            model.passes = 0
        if self.attention is not None:
            self.attention.start_run()
        for memory in self._kept():
            memory.start_run()

    def confirm(self) -> None:
        """Waits for what tells NaN; a host calls it at the end of a run."""
        self._settle([doubt for model in self._known() for doubt in list(model.doubts)])

    def end_run(self) -> None:
        """Lets go of weights, and of buffers that no graph needs."""
        if self._last is not None:  # the report outlives the model, whose modules the others hold
            self._last = copy.copy(self._last)
            self._last.let_go()
        for model in self._known():
            model.doubts = []
            for prepared in list(model.prepared.values()):
                prepared.known(None)
        for memory in self._kept():
            memory.free_buffers()

    def release(self, owner: Any) -> None:
        model = self._of(owner)
        for prepared in list(model.prepared.values()):
            prepared.let_go()
        memories, model.memories = model.memories, {}
        for memory in memories.values():
            memory.release()
        for memory in self._kept():  # graphs over this card and another
            memory.drop_void()

    def run_pass(self, host: HostPass, call: Callable[[], Any]) -> Any:
        """Makes one call of the transformer, by `call`.

        Where attention gives NaN, the pass or the run is made once more, with the host's: waiting
        for what each pass gives would leave the card without work.

        Raises:
            NotFiniteError: An earlier pass of a run that starts again gave NaN.
        """
        self._passed_by = False
        model = self._of(host.owner)
        ready = [doubt for doubt in model.doubts if doubt.ready]
        model.doubts = [doubt for doubt in model.doubts if doubt not in ready]
        self._settle(ready)
        model.passes += 1
        output = self._run_once(host, call)
        attention = host.attention
        if attention is None or not attention.used or not (model.passes == 1 or attention.lossy):
            return output
        found = output if isinstance(output, torch.Tensor) else output[0]
        doubt = Later(model.passes, host.latents.isfinite().all() & ~found.isfinite().all())
        if self.in_run and not doubt.ready:
            model.doubts.append(doubt)
            return output
        if not any(doubt.read()):
            return output
        attention.give_up()
        host.clean_up()
        return self._run_once(host, call)

    def _settle(self, doubts: list[Later]) -> None:
        if any(any(doubt.read()) for doubt in doubts):
            for model in self._known():
                model.doubts = []
            self.attention.give_up()
            raise NotFiniteError

    def pass_by(self, owner: Any) -> None:
        """Says that the host called a model and no pass of this run has been made of it."""
        if self._blocks and not self._passed_by and not self._of(owner).passes:
            self._passed_by = True
            PASSED_BY.log(f"{self.host} blocks run")

    @property
    def not_fused(self) -> Verdict | None:
        """Why the last run had no fused block; None where it had one."""
        if not self._blocks:
            return AS_ASKED
        if self._passed_by or self._last is None:
            return PASSED_BY
        return None if self._last.fused else next(iter(self._last.verdicts.of("blocks")), NO_PASS)

    def outcome(self) -> str:
        """Says in one line how many blocks of the last run were fused, and why others were not."""
        if why := self.not_fused:
            return f"{self.host} blocks ran: {why}"
        fused, others = self._last.fused, self._last.verdicts.of("blocks")
        rest = f"; {self.host} code for the rest: {next(iter(others))}" if others else ""
        return f"{fused} of {fused + others.total()} blocks fused{rest}"

    def report(self) -> str:
        """Says which path every part took, a line each."""
        if not self._blocks:
            lines = [f"blocks: {self.host} code, {AS_ASKED}"]
        elif self._passed_by:
            lines = [f"blocks: {self.host} code: {PASSED_BY}"]
        elif self._last is None:
            lines = [f"blocks: fused; the first step compares one with {self.host} code"]
        else:
            lines = self._last.lines(self.host)
        return "\n".join([*lines, *self.attention_lines()])

    def attention_lines(self) -> list[str]:
        if self.attention is None:
            return [f"attention: {self.host} code, or another node's"]
        return self.attention.lines()

    def _run_once(self, host: HostPass, call: Callable[[], Any]) -> Any:
        if host.attention is not None:
            host.attention.start_blocks(len(host.blocks))
        if not self._blocks:
            return call()
        prepared = self._last = self._prepare(host)
        prepared.passes += 1
        fallback = self._failed or _whole_pass_fallback(host)
        if fallback:
            self._fall_back(host, fallback, len(host.blocks))
            return call()
        try:
            return self._run_fused(host, call)
        except RepeatPassError:
            prepared.exchanged = True
        except torch.OutOfMemoryError:
            if self._drop_graphs(host.owner):
                prepared.dropped += 1
            elif host.layers.moving or _holds(host):
                raise
        except RuntimeError as error:
            self._failed = host.failed(error)
            if self._failed is None:
                raise
            self._fall_back(host, self._failed, len(host.blocks))
        host.clean_up()
        if self._failed:
            return call()
        return self._run_fused(host, call)

    def _fall_back(self, host: HostPass, fallback: Verdict, blocks: int) -> None:
        host.prepared.verdicts.add("blocks", fallback, blocks)
        if fallback.fact not in self._logged:
            self._logged.add(fallback.fact)
            fallback.log(f"{self.host} blocks run")

    def _run_fused(self, host: HostPass, call: Callable[[], Any]) -> Any:
        with on_card(host.device), ExitStack() as stack:
            card = CardPass(host, stack.enter_context(self._memory(host)), stack)
            team = self._team(card) if host.peers else None
            forward_pass = ForwardPass(card, partial(self._fall_back, host), team)
            with forward_pass.installed():
                output = call()
        host.prepared.fused += forward_pass.fused
        return output

    def _team(self, first: CardPass) -> Team | None:
        figures, held = first.host.prepared.split, first.held
        if figures.refusal:
            figures.refuse(figures.refusal)
            return None
        members = [first]
        for peer in first.host.peers:
            with on_card(peer.device):
                prepared = self._prepare(peer)
                fallback = _whole_pass_fallback(peer) or prepared.code(peer).changed()
                if fallback:
                    figures.refuse(Verdict(f"{peer.device}: {fallback}"))
                    return None
                members.append(CardPass(peer, held.enter_context(self._memory(peer)), held))
        devices = [member.host.device for member in members]
        try:
            links = {
                (one, other): link_between(devices[one], devices[other])
                for one, other in combinations(range(len(members)), 2)
            }
            return Team(members, links, self._of_cards)
        except UnavailableError as error:
            figures.refuse(Verdict(first_line(error), final=True))
            return None

    @contextmanager
    def _memory(self, host: HostPass) -> Iterator[PassMemory]:
        # Of the current stream: the next pass there may use it.
        key: Hashable = host.device
        if host.device.type == "cuda":
            key = host.device, torch.cuda.current_stream(host.device).cuda_stream
        memories, ops = self._of(host.owner).memories, host.prepared.ops
        memory = memories.get(key)
        if memory is None or memory.workspace.ops != ops:
            memory = memories[key] = PassMemory(ops)
        if memory.taken:  # by another thread
            yield PassMemory(ops)
            return
        memory.taken = True
        try:
            yield memory
        finally:
            memory.taken = False

    def _drop_graphs(self, owner: Any) -> bool:
        memories = list(self._of(owner).memories.values())
        found = [it for it in memories if it.has_graphs and not it.taken]
        for memory in found:
            memory.release()
        return bool(found)

    def _prepare(self, host: HostPass) -> PreparedModel:
        model = self._of(host.owner)
        if not model.prepared:
            host.modulation.start_run()
        found = model.prepared.get(host.state)
        if found is None or not found.is_of(host.blocks):
            if found is not None:  # another extension has exchanged a block
                self.release(host.owner)
            earlier = model.earlier.pop(host.state, None)
            found = PreparedModel(host, self.lossy_attention, earlier)
            model.prepared[host.state] = found
        host.prepared = found
        return found

    def _of(self, owner: Any) -> _Model:
        found = self._models.get(owner)
        return self._models.setdefault(owner, _Model()) if found is None else found

    def _known(self) -> list[_Model]:
        # Threads of other cards add some: what keyrefs() gives is copied in one go.
        owners = [ref() for ref in self._models.keyrefs()]
        return [self._models[owner] for owner in owners if owner is not None]

    def _kept(self) -> list[PassMemory]:
        return [memory for model in self._known() for memory in list(model.memories.values())]


def _holds(host: HostPass) -> bool:
    with host.layers.hold(host.blocks) as placement:
        return placement is not None


def _whole_pass_fallback(host: HostPass) -> Verdict | None:
    prepared = host.prepared
    if isinstance(prepared.ops, Verdict):
        return prepared.ops
    if prepared.check.failed:
        return prepared.check.failed
    if torch.is_grad_enabled():
        recorded = "gradients are recorded, which the kernels do not support"
        return Verdict(recorded, remedy="use torch.no_grad()")
    if found := host.fallback():
        return found
    if prepared.unknown:
        return prepared.unknown
    if any(map(is_changed, host.blocks)):
        return Verdict("another extension has changed the blocks, as offloading and caching do")
    return None


@contextmanager
def flags_for_a_run(tf32: bool, cudnn_benchmark: bool) -> Iterator[None]:
    """Sets what is asked for and puts back what was there; False leaves a switch alone."""
    switches = _tf32() if tf32 else []
    if cudnn_benchmark:
        switches.append((torch.backends.cudnn, "benchmark", True))
    with switched(switches):
        yield


def _tf32() -> list[tuple[object, str, object]]:
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    older: list[Any] = [(matmul, "allow_tf32", True), (cudnn, "allow_tf32", True)]
    try:
        for switch, name, _ in older:
            getattr(switch, name)
    except RuntimeError:  # somebody uses torch's newer switches, and torch takes one kind only
        return [(matmul, "fp32_precision", "tf32"), (cudnn.conv, "fp32_precision", "tf32")]  # type: ignore[attr-defined]
    return older
