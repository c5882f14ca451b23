"""A pass whose rows several cards share, against the same pass on one: cards are the CPU here."""

from dataclasses import replace
from itertools import permutations, product

import pytest
import torch

pytest.importorskip("diffusers")

from faulty_copies import CpuOperations, Vanishing, between_cards
from test_block import DIM, HEAD_DIM, HEADS, MIXES, Case, attend, random
from test_passes import Attention, Chain, Graph, Host, Model, with_graphs

from qwen_l40s.errors import UnavailableError
from qwen_l40s.families.qwen_image import FULL_SIZE
from qwen_l40s.machine.links import Link, link_between
from qwen_l40s.machine.links import Route as CardRoute
from qwen_l40s.optimizations import fused, run
from qwen_l40s.optimizations.blocks import graphs as blocks_graphs
from qwen_l40s.optimizations.blocks.block import BlockExecutor, Step
from qwen_l40s.optimizations.blocks.graphs import Given, GraphFigures, PassMemory, Work
from qwen_l40s.optimizations.blocks.products import streams_of
from qwen_l40s.optimizations.blocks.workspace import Workspace
from qwen_l40s.optimizations.cards import team
from qwen_l40s.optimizations.cards.parts import ShareCard
from qwen_l40s.optimizations.cards.split import Split, shares_of
from qwen_l40s.optimizations.linear import choose_gemm
from qwen_l40s.optimizations.modulation import compute_entry
from qwen_l40s.optimizations.reference import Rotary, Tokens
from qwen_l40s.planning import bytes as planning
from qwen_l40s.planning.request import Parts, RunRequest, Setting
from qwen_l40s.planning.split_cost import KEYS, ROWS
from qwen_l40s.verdict import Verdict

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
# Tokens, and image tokens of each card.
SHAPES = {
    "one item": (Tokens(1, 5, 40, 40), (18, 22)),
    "rows that nothing divides": (Tokens(1, 7, 37, 37), (1, 36)),
    "references at timestep 0 on both cards": (Tokens(1, 5, 40, 12), (18, 22)),
    "references on the second card alone": (Tokens(1, 5, 40, 30), (18, 22)),
    "two items": (Tokens(2, 3, 20, 20), (8, 12)),
    "three items with references": (Tokens(3, 4, 20, 9), (11, 9)),
    "three cards": (Tokens(2, 3, 31, 17), (7, 11, 13)),
}
PASS = Tokens(1, 3, 2000, 2000)
QUANTIZED = ("all int8", "all rotated", "all fp8")


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


class Route:
    """A copy is there at once; `waiting` are the cards that have not waited for the last one."""

    def __init__(self):
        self.copies, self.bytes, self.finished, self.waiting = 0, 0, 0, set()

    def copy(self, pairs):
        self.copies += 1
        self.waiting = {"source", "target"}
        for source, target in pairs:
            assert source.is_contiguous() and target.is_contiguous()
            assert (source.shape, source.dtype) == (target.shape, target.dtype)
            self.bytes += source.nbytes
            target.copy_(source)

    def arrive(self):
        self.waiting.discard("target")

    def departed(self):
        self.waiting.discard("source")

    def finish(self):
        self.finished += 1


def split(chain, shares, additions=(), early=False, attend=attend):
    routes = {pair: Route() for pair in permutations(range(len(shares)), 2)}
    cards = []
    for _ in shares:
        space = Workspace(fused.TORCH)
        executor = BlockExecutor(chain.layers, fused.TORCH, attend, space, {})
        cards.append(ShareCard(executor, space, chain.blocks, CPU))
    return Split(cards, shares, routes, additions, early), routes


def given(chain, case):
    entry = compute_entry(chain.blocks, case.temb, case.step.tokens.batch)
    return Given(case.text, case.image, case.step, entry)


def both_ways(mix, shape, exchange, *, masked=False, blocks=3, early=False):
    tokens, images = SHAPES[shape]
    chain, case = Chain(*[MIXES.get(mix, {})] * blocks), Case(tokens, masked=masked)
    entry = compute_entry(chain.blocks, case.temb, tokens.batch)
    executor = BlockExecutor(chain.layers, fused.TORCH, attend, Workspace(fused.TORCH), {})
    alone, streams = [], (case.text, case.image)
    for index, block in enumerate(chain.blocks):
        streams = executor.run(block, *streams, case.step, entry.of(index))
        alone.append(streams)
    shares = shares_of(tokens, images, exchange)
    over, routes = split(chain, shares, early=early and tokens.batch == 1)
    before = case.text.clone(), case.image.clone()
    ours = over.run(given(chain, case), blocks)
    assert not any(route.waiting for route in routes.values())
    assert torch.equal(case.text, before[0]) and torch.equal(case.image, before[1])
    return ours, alone[-1], routes


def assert_close(ours, expected, rtol=1e-5, atol=1e-4):
    for mine, theirs in zip(ours, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=rtol, atol=atol)


@pytest.mark.parametrize(
    ("mix", "shape"),
    [
        *product(("plain", "all int8"), SHAPES),
        *product(("all rotated", "all fp8", "all packed"), ("one item", "three cards")),
    ],
)
@pytest.mark.parametrize(
    ("exchange", "early"), [(KEYS, False), (ROWS, False), (ROWS, True)], ids=str
)
def test_the_shares_together_are_the_pass(mix, exchange, early, shape):
    ours, alone, routes = both_ways(mix, shape, exchange, early=early)
    each = 2 if exchange == KEYS else 1  # of three blocks
    pieces = 2 if early and SHAPES[shape][0].batch == 1 else 0  # of two
    assert all(it.copies == 1 + 3 * each + pieces for way, it in routes.items() if 0 in way)
    assert_close(ours, alone)


@pytest.mark.parametrize("exchange", [KEYS, ROWS])
def test_with_a_mask(exchange):
    ours, alone, _ = both_ways("all int8", "one item", exchange, masked=True)
    assert_close(ours, alone, 1e-3, 1e-3)


@pytest.mark.parametrize("mix", ["all int8", "all rotated"])
def test_keys_and_values_of_integer_products_are_the_same_bits(mix):
    tokens, images = SHAPES["references at timestep 0 on both cards"]
    chain, case = Chain(MIXES[mix]), Case(tokens)
    entry, heads = compute_entry(chain.blocks, case.temb, 1), []

    def recorded(q, k, v, mask):
        heads.append((k.clone(), v.clone()))
        return attend(q, k, v, mask)

    executor = BlockExecutor(chain.layers, fused.TORCH, recorded, Workspace(fused.TORCH), {})
    executor.run(chain.blocks[0], case.text, case.image, case.step, entry.of(0))
    over, _ = split(chain, shares_of(tokens, images, ROWS), attend=recorded)
    over.run(given(chain, case), 1)
    alone, *others = heads
    assert len(others) == 2
    for ours in others:
        assert all(map(torch.equal, ours, alone))


@pytest.mark.parametrize("mix", ["opaque among fp8", "dense text, fp8 image", "all opaque"])
def test_layers_of_any_kind_exchange_keys(mix):
    ours, alone, _ = both_ways(mix, "two items", KEYS)
    assert_close(ours, alone)


def test_what_is_sent_is_what_was_counted():
    tokens, images = SHAPES["one item"]
    rows = tokens.text + images[0], images[1]
    for exchange, a_row in ((KEYS, 2 * 4 * DIM), (ROWS, DIM + 4)):
        _, _, routes = both_ways("all int8", "one item", exchange, blocks=3)
        _, _, fewer = both_ways("all int8", "one item", exchange, blocks=2)
        for (source, _), route in routes.items():
            a_block = route.bytes - fewer[source, 1 - source].bytes
            gap = -tokens.text % 4 * 4 if exchange == ROWS and not source else 0
            own = 6 * DIM * 4 if not source else 0  # the modulation of one more block
            assert a_block == rows[source] * a_row + gap + own


@pytest.mark.parametrize("exchange", [KEYS, ROWS])
@pytest.mark.parametrize("mix", ["plain", "all int8"])
def test_the_second_card_holds_no_more_than_is_counted_of_one(mix, exchange, monkeypatch):
    monkeypatch.setattr(planning, "BF16", 4)  # numbers are fp32 here
    narrow = replace(FULL_SIZE, blocks=2, dim=DIM, heads=HEADS, head_dim=HEAD_DIM)
    request = RunRequest(
        width=512, height=512, cfg="off", text_tokens=256, parts=Parts(transformer=narrow)
    )
    tokens, images = Tokens(1, 256, 1024, 1024), (256, 768)
    chain, case = Chain(*[MIXES.get(mix, {})] * 2), Case(tokens)
    over, _ = split(chain, shares_of(tokens, images, exchange))
    over.run(given(chain, case), 2)
    counted = planning.buffer_bytes(request, Setting("bf16" if mix == "plain" else "int8"))
    assert 0 < over._cards[1].workspace.bytes <= counted


def test_an_error_waits_for_the_copies():
    tokens, images = SHAPES["one item"]
    chain, case = Chain({}), Case(tokens)

    def fail(*_):
        raise RuntimeError("no such attention")

    over, routes = split(chain, shares_of(tokens, images, KEYS), attend=fail)
    with pytest.raises(RuntimeError, match="no such attention"):
        over.run(given(chain, case), 1)
    assert all(route.copies and route.finished for route in routes.values())


# --- a pass


class PassHost(Host):
    attention = Attention("auto")

    def __init__(self, model, peers=(), additions=(), intercepted=False, weights="here"):
        super().__init__(model, weights=weights)
        self.peers, self.additions, self.intercepted = peers, additions, intercepted

    def no_graphs(self):
        return Verdict("there is no card")

    def host_attend(self, *operands):
        return attend(*operands)

    def inputs(self, block, positional, arguments):
        return super().inputs(block, positional, arguments)._replace(intercepted=self.intercepted)


class Known(Link):
    gbps = None

    def _measure(self):
        return ()


class Passes:
    def __init__(self, monkeypatch, gbps=250.0, mix="all int8", operations=None):
        self.link = Known(CPU, CPU, operations or CpuOperations())
        self.link.gbps = gbps
        monkeypatch.setattr(run, "link_between", lambda *_: self.link)
        # Of a block of so few rows nothing can be gained.
        monkeypatch.setattr(team.Team, "_alone", lambda *_: 2.0)
        monkeypatch.setattr(team.Team, "_of_text", lambda *_: 0.1)
        monkeypatch.setattr(team.Team, "_together", lambda *_: 1.0)
        kinds = [MIXES.get(mix, {})] * 3
        self.model, self.other = Model(*kinds), Model(*kinds)
        self.optimization = run.Optimization(None)
        self.optimization.start_run()

    def __call__(self, tokens=PASS, weights="here", additions=(), **how):
        case = Case(tokens)
        host = PassHost(self.model, [PassHost(self.other, weights=weights)], additions, **how)

        def between(index, image):  # as ComfyUI adds what ControlNets give
            if 0 < index <= len(additions):
                image[:, : additions[index - 1].shape[1]] += additions[index - 1]
            return image

        case.image = case.image.clone()
        return self.optimization.run_pass(host, lambda: self.model(case, between))

    def expected(self, tokens=PASS, additions=()):
        case = Case(tokens)
        text, image = case.text, case.image
        for index, block in enumerate(self.model.blocks):
            halves = compute_entry((block,), case.temb, tokens.batch).of(0)
            executor = BlockExecutor(self.model.chain.layers, fused.TORCH, attend)
            text, image = executor.run(block, text, image, case.step, halves)
            if index < len(additions) and index + 1 < len(self.model.blocks):
                image = image.clone()
                image[:, : additions[index].shape[1]] += additions[index]
        return text, image

    def gives_the_same(self, *args, additions=(), **how):
        ours = self(*args, additions=additions, **how)
        assert_close(ours, self.expected(additions=additions))

    @property
    def figures(self):
        return self.optimization._last.split

    @property
    def reasons(self):
        return list(map(str, self.optimization._last.verdicts.of("cards")))


@pytest.mark.parametrize(("gbps", "exchange"), [(0.5, "normalized rows"), (250.0, "keys and")])
def test_a_pass_is_shared_and_says_so(monkeypatch, gbps, exchange):
    passes = Passes(monkeypatch, gbps)
    for _ in range(3):
        passes.gives_the_same()
    report = passes.optimization.report()
    assert "blocks: fused, 9 of 9 in 3 forward passes" in report
    assert "GPUs: 2 share 3 forward passes, image tokens " in report
    assert "2.00x as fast as one GPU, measured" in report
    assert f"they exchange {exchange}" in report
    assert not passes.reasons
    passes.gives_the_same(additions=[random(1, 1700, DIM, seed=8), random(1, 13, DIM, seed=9)])
    assert passes.figures.passes == 4


def test_an_error_says_which_link_was_to_blame(monkeypatch):
    """The first step's block is not the host's own; the next run goes through host memory."""
    passes = Passes(monkeypatch, operations=between_cards(Vanishing)())
    for _ in range(2):
        passes.gives_the_same()
    assert passes.reasons == ["copies between cpu and cpu lose data"]
    passes.optimization.start_run()
    passes.gives_the_same()
    assert passes.figures.passes == 1 and not passes.reasons
    assert not passes.link.peer

    def fail(*_):
        raise RuntimeError("an illegal memory access")

    passes = Passes(monkeypatch)
    monkeypatch.setattr(Split, "run", fail)
    monkeypatch.setattr(Known, "verify", fail)  # of the same card
    passes.gives_the_same()
    assert passes.reasons == ["several GPUs raised an illegal memory access"]


def test_without_pinned_memory_a_lossy_link_is_not_used(monkeypatch):
    def refuse(size):
        raise UnavailableError("8 MiB of system RAM cannot be pinned")

    operations = Vanishing()
    operations.pinned = refuse
    passes = Passes(monkeypatch, operations=operations)
    passes.link.verify()
    passes.gives_the_same()
    passes.gives_the_same()
    assert passes.reasons == ["8 MiB of system RAM cannot be pinned"]


def test_the_second_card_runs_out_of_memory(monkeypatch):
    passes = Passes(monkeypatch)
    passes.gives_the_same()
    released = []
    monkeypatch.setattr(team.Team, "release", lambda self: released.append(self))

    def tensors(layer, like):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(passes.other.chain.layers, "tensors", tensors)
    passes.optimization.start_run()
    passes.gives_the_same()
    assert released
    assert passes.reasons == ["a GPU ran out of memory"]


def test_another_model_on_the_second_card_is_found(monkeypatch):
    passes = Passes(monkeypatch, mix="dense")
    with torch.no_grad():
        for parameter in passes.other.parameters():
            parameter.mul_(-3)
    passes.gives_the_same()
    (reason,) = passes.reasons
    assert "relative to what the block adds" in reason
    passes = Passes(monkeypatch)
    passes.other.chain = type(passes.other.chain)(*[MIXES["all fp8"]] * 3)
    passes.other.chain.blocks = list(passes.other.blocks)
    passes.gives_the_same()
    (reason,) = passes.reasons
    assert reason.endswith("its layers differ from those of the first GPU")


@pytest.mark.parametrize("exchange", [KEYS, ROWS])
def test_one_graph_computes_the_shares_of_all_cards(monkeypatch, exchange):
    with_graphs(monkeypatch)
    monkeypatch.setattr(PassHost, "no_graphs", lambda self: None)
    monkeypatch.setattr(blocks_graphs, "pool_on", lambda card: None)
    lossy = between_cards(Vanishing)(10**9)
    passes = Passes(monkeypatch, 250.0 if exchange == KEYS else 0.5, operations=lossy)
    for _ in range(6):
        passes.gives_the_same()
    report = passes.optimization.report()
    assert "GPUs: 2 share 6 forward passes" in report
    assert "CUDA graphs: 4 forward passes replayed one, 1 captured" in report
    (graph,) = Graph.made
    lossy.start = lossy.copies
    passes.link.verify()  # as the next run does
    passes.optimization.start_run()
    passes.gives_the_same()
    assert passes.figures.passes == 1 and not passes.optimization._last.graphs.replayed
    passes.optimization.release(passes.other)  # whose card the graph runs on, too
    assert graph.work is None


def test_passes_on_one_card_say_why(monkeypatch):
    passes = Passes(monkeypatch)
    passes.gives_the_same(weights=None)
    assert passes.reasons.pop().endswith("it moves")
    passes.optimization._last.verdicts.of("cards").clear()
    passes.gives_the_same(intercepted=True)
    assert passes.reasons == ["another node reads or changes the values between two blocks"]
    passes.optimization._last.verdicts.of("cards").clear()
    passes(Tokens(1, 5, 1, 1))
    assert passes.reasons == ["the image has fewer tokens than there are GPUs"]
    monkeypatch.setattr(PassHost, "attention", None)
    passes.optimization._last.verdicts.of("cards").clear()
    passes()
    assert passes.reasons == ["attention is not computed by this package"]


def test_a_small_gain_is_left_alone(monkeypatch):
    passes = Passes(monkeypatch)
    monkeypatch.setattr(team.Team, "_together", lambda *_: 2.0 / 1.1)
    passes.gives_the_same()
    passes.gives_the_same()
    assert passes.reasons == ["several are 1.10x as fast as one, but 1.25x is needed"]
    monkeypatch.undo()
    passes = Passes(monkeypatch, gbps=0.001)
    passes.gives_the_same()
    (reason,) = passes.reasons
    assert reason.startswith("2 GPUs would be 0.0")
    passes = Passes(monkeypatch, gbps=0.0)
    passes.gives_the_same()
    assert passes.reasons[0].startswith("the speed of the link between the GPUs is unknown")


# --- two cards


@pytest.mark.cuda
def test_what_a_card_does_between_two_points_is_timed():
    timed = team.Timed()
    with timed:
        torch.cuda._sleep(team.AHEAD)
    assert 1 < timed.read() < 1000


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("exchange", "early"), [(KEYS, False), (ROWS, False), (ROWS, True)], ids=str
)
@pytest.mark.parametrize("mix", ["plain", "all int8", "all rotated", "all fp8"])
def test_on_two_cards(mix, exchange, early):
    """One card is both, where it is alone: then no graph is captured."""
    count = torch.cuda.device_count()
    devices = [torch.device("cuda", index % count) for index in range(2)]
    tokens, blocks, half = Tokens(1, 77, 1500, 900), 4, torch.bfloat16
    case = Case(tokens, dtype=half)
    text, image, temb = (it.to(devices[0]) for it in (case.text, case.image, case.temb))
    rotary = Rotary(*(it.to(devices[0]) for it in case.step.rotary))
    step, heads = Step(tokens, rotary, None), []

    recording = True

    def recorded(q, k, v, mask):
        if recording:  # which no graph can
            heads.append((k.cpu(), v.cpu()))
        return attend(q, k, v, mask)

    cards, memories = [], []
    for device in devices:
        with torch.cuda.device(device):
            chain = Chain(*[MIXES.get(mix, {})] * blocks, place=half)
            for layer, parts in chain.layers.weights.items():
                chain.layers.weights[layer] = tuple(part.to(device) for part in parts)
            for block in chain.blocks:
                block.to(device)
            chain.layers.gemms = {it: choose_gemm(it, device) for it in ("int8", "fp8")}
            ops = fused.choose_ops(device)
            memories.append(PassMemory(ops))
            space = memories[-1].workspace
            executor = BlockExecutor(chain.layers, ops, recorded, space, {})
            cards.append(ShareCard(executor, space, chain.blocks, device))
    entry = compute_entry(cards[0].blocks, temb, 1)
    x = torch.cat([part.reshape(-1, DIM) for part in (text, image)])
    alone = BlockExecutor(
        cards[0].executor._layers, fused.choose_ops(devices[0]), recorded, None, {}
    )
    alone.run_all(cards[0].blocks, x, step, entry)
    peer = count == 1 or link_between(*devices).peer
    routes = {(0, 1): CardRoute(*devices, peer), (1, 0): CardRoute(*devices[::-1], peer)}
    over = Split(cards, shares_of(tokens, (711, 789), exchange), routes, (), early)
    call = Given(text, image, step, entry)
    for _ in range(3):
        del heads[blocks:]
        ours = over.run(call, blocks)
        for mine, theirs in zip(ours, streams_of(x, tokens), strict=True):
            assert (mine - theirs).norm() <= 0.01 * theirs.norm()
        if mix in ("all int8", "all rotated"):  # of the first block, whose rows are the same
            assert all(map(torch.equal, heads[blocks], heads[0]))
            assert all(map(torch.equal, heads[blocks + 1], heads[0]))
    if count == 1:
        return
    recording = False
    inner = Split(cards, over._shares, {k: it.captured for k, it in routes.items()}, (), early)

    def launch(inputs, _):
        inner.capture(inputs)

    work = Work("pass", "here", [], False, lambda: launch, [(devices[1], memories[1])])
    graph = memories[0].capture(work, call, GraphFigures())
    assert not isinstance(graph, str), graph
    for _ in range(3):
        assert all(map(torch.equal, graph.replay(call), ours))
    graph.reset()
