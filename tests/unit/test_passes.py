"""What lasts from pass to pass: buffers, prepared launches, CUDA graphs. No card: a graph is played
by what it would have captured.
"""

import gc
import itertools
import weakref
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("diffusers")

from diffusers.models.transformers.transformer_qwenimage import QwenImageTransformerBlock
from test_block import DIM, LAYERS, MIXES, Case, Layers, attend, new_block, random

from qwen_l40s.caches import forget
from qwen_l40s.optimizations import fused, run
from qwen_l40s.optimizations import passes as passes_module
from qwen_l40s.optimizations.attention import AttentionRequest, ChosenAttention
from qwen_l40s.optimizations.blocks import graphs, workspace
from qwen_l40s.optimizations.blocks.block import BlockExecutor
from qwen_l40s.optimizations.blocks.block_form import (
    part_of,
)
from qwen_l40s.optimizations.blocks.graphs import (
    MOST_GRAPHS,
    Given,
    GraphFigures,
    PassMemory,
    Seen,
    Work,
)
from qwen_l40s.optimizations.blocks.host import BlockInputs, DoubleStream
from qwen_l40s.optimizations.blocks.products import Share
from qwen_l40s.optimizations.blocks.workspace import Workspace
from qwen_l40s.optimizations.inventory import Inventory
from qwen_l40s.optimizations.modulation import compute_entry
from qwen_l40s.optimizations.reference import Tokens
from qwen_l40s.spec.sizes import REPAID_BY
from qwen_l40s.verdict import Verdict

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL, OTHER = Tokens(1, 3, 10, 10), Tokens(2, 5, 9, 9)
MIDDLE, LARGE = Tokens(1, 3, 200, 200), Tokens(1, 40, 280, 280)
# Its rows are quantized for the first layers alone: a buffer of a quarter of the width.
NARROW = {"image q": "int8", "image k": "int8", "image v": "int8"}


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


class Chain:
    """Blocks with layers of several kinds, run as a pass of one shape.

    Args:
        kinds: Of each block, as of `test_block.Layers`.
        place: What blocks are moved to.
    """

    def __init__(self, *kinds, place=torch.float32):
        self.blocks = [new_block(seed).to(place) for seed in range(len(kinds))]
        self.layers = Layers(self.blocks[0], kinds[0])
        for block, mix in zip(self.blocks[1:], kinds[1:], strict=True):
            more = Layers(block, mix)
            self.layers.kinds |= more.kinds
            self.layers.weights |= more.weights

    def run(self, tokens, space=None):
        """Text and image after all blocks, in a workspace; in one of each block's own for None."""
        case = Case(tokens)
        entry, streams = (
            compute_entry(self.blocks, case.temb, tokens.batch),
            (case.text, case.image),
        )
        executor = BlockExecutor(self.layers, fused.TORCH, attend, space) if space else None
        for index, block in enumerate(self.blocks):
            following = None
            if executor and index + 1 < len(self.blocks):
                following = self.blocks[index + 1], entry.of(index + 1)[0]
            runs = executor or BlockExecutor(self.layers, fused.TORCH, attend)
            streams = runs.run(block, *streams, case.step, entry.of(index), following)
        return streams


def assert_same(ours, theirs):
    for mine, their in zip(ours, theirs, strict=True):
        assert torch.equal(mine, their)


# --- the workspace


@pytest.mark.parametrize("mix", ["all int8", "fp8 text, int8 image", "opaque inner of fp8"])
def test_a_workspace_gives_the_bits_of_a_fresh_one_for_every_shape_in_turn(mix):
    chain, space = Chain(MIXES[mix], {}, MIXES[mix]), Workspace(fused.TORCH)
    for tokens in (SMALL, OTHER, LARGE, SMALL, LARGE, OTHER):
        assert_same(chain.run(tokens, space), chain.run(tokens))


def test_a_larger_buffer_in_the_middle_of_a_pass_voids_what_was_prepared():
    chain, space = Chain(NARROW, MIXES["all int8"], NARROW), Workspace(fused.TORCH)
    assert_same(chain.run(MIDDLE, space), chain.run(MIDDLE))
    assert space.changes == 1  # the second block's hidden rows are wider

    def program():
        look = BlockExecutor(chain.layers, fused.TORCH, attend, space).look
        x = random(MIDDLE.rows, DIM)
        return space.program(look(chain.blocks[0], x).form, Share.all(MIDDLE), x)

    before = program()
    assert program() is before
    chain.run(LARGE, space)
    assert space.changes > 1
    assert program() is not before
    assert_same(chain.run(MIDDLE, space), chain.run(MIDDLE))


def test_prompts_of_many_lengths_take_what_the_longest_takes():
    chain, spaces = Chain(MIXES["all int8"]), [Workspace(fused.TORCH) for _ in range(2)]
    for text in (*range(1, 20), 300, *range(280, 300)):
        chain.run(Tokens(1, text, 10, 10), spaces[0])
    chain.run(Tokens(1, 300, 10, 10), spaces[1])
    assert spaces[0].bytes == spaces[1].bytes
    assert len(spaces[0]._shapes) == workspace.MOST_SHAPES
    # A row of q, k and v or of hidden ones, of a branch, and of quantized ones with their scale.
    assert spaces[1].bytes == 512 * (4 * DIM * 4 + DIM * 4 + 4 * DIM + 4)


def test_a_workspace_that_inference_mode_made_serves_outside_of_it():
    chain, space = Chain(MIXES["all int8"], {}), Workspace(fused.TORCH)
    with torch.inference_mode():
        inside = chain.run(SMALL, space)
    assert_same(chain.run(SMALL, space), inside)
    chain.run(OTHER, space)


def test_buffers_go_at_once_and_nothing_holds_the_streams_of_a_pass():
    """Without Python's collector, which may come when the card is full."""
    chain, space = Chain(MIXES["all int8"], {}), Workspace(fused.TORCH)
    gc.collect()
    gc.disable()
    try:
        streams = weakref.ref(chain.run(SMALL, space)[0].untyped_storage())
        assert streams() is None
        buffers = [weakref.ref(buffer) for buffer in space._buffers.values()]
        assert buffers and all(buffer() is not None for buffer in buffers)
        del space
        assert not any(buffer() is not None for buffer in buffers)
    finally:
        gc.enable()


# --- launches


class Kernel:
    """As Triton's JITFunction, and the CompiledKernel that it gives."""

    function, packed_metadata = "function", "metadata"

    def __init__(self):
        self.compiled, self.called, self.launched = [], [], []

    def warmup(self, *arguments, grid, **options):
        self.compiled.append((grid, arguments, options))
        return self

    def __getitem__(self, grid):
        return lambda *arguments, **options: self.called.append((grid, arguments, options))

    def run(self, *arguments):
        self.launched.append(arguments)


@pytest.fixture
def launcher(monkeypatch):
    pytest.importorskip("triton")
    from qwen_l40s.optimizations.kernels import launch

    active = SimpleNamespace(get_current_stream=lambda device: f"stream of {device}")
    monkeypatch.setattr(launch, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(launch, "not_direct", lambda: "")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    return launch


def test_a_prepared_launch_passes_addresses_in_the_kernels_order(launcher):
    kernel, (x, y, fixed) = Kernel(), (torch.zeros(64) for _ in range(3))
    made = launcher.Launch(kernel, 5, (x, None), (fixed, 7, None), {"width": 64}, num_warps=2)
    prepared = made.prepared()
    options = {"width": 64, "num_warps": 2}
    assert kernel.compiled == [((5,), (x, None, fixed, 7, None), options)]
    prepared(y, None)
    head = 5, 1, 1, "stream of 3", "function", "metadata", None, None, None
    assert kernel.launched == [(*head, y.data_ptr(), None, fixed.data_ptr(), 7, None, 64)]
    unaligned = torch.zeros(64)[1:]
    prepared(unaligned, None)
    assert len(kernel.launched) == 1
    ((grid, arguments, found),) = kernel.called
    assert (grid, found) == ((5,), options)
    assert arguments[0] is unaligned and arguments[2] is fixed
    # What it was made with may leave the card.
    held, storage = launcher.Launch(kernel, 5, (x,), (), {}).prepared(), weakref.ref(x)
    kernel.compiled.clear()
    del x, made, prepared
    assert held is not None and storage() is None


def test_a_launch_that_is_not_aligned_or_not_known_goes_through_triton(launcher, monkeypatch):
    kernel, x = Kernel(), torch.zeros(64)
    launcher.Launch(kernel, 5, (x,), (x[1:],), {}).prepared()(x)
    monkeypatch.setattr(launcher, "not_direct", lambda: "another launcher")
    launcher.Launch(kernel, 5, (x,), (x,), {}).prepared()(x)
    assert (len(kernel.called), kernel.compiled, kernel.launched) == (2, [], [])


# --- when a graph is worth its capture


SOON, LATER = REPAID_BY[True], REPAID_BY[False]  # passes that repay a capture
BESIDE, ALONE = True, False  # whether text and image are computed side by side


@pytest.mark.parametrize(
    ("seen", "steps", "beside", "expected"),
    [
        (Seen(passes=1), 99, BESIDE, graphs.FIRST),
        (Seen(passes=2), 99, BESIDE, graphs.FIRST),  # nobody has looked yet
        (Seen(passes=2, waited=True, runs=1), 99, BESIDE, None),
        (Seen(passes=3, waited=True), 2 + SOON, ALONE, None),
        (Seen(passes=3, waited=True), 1 + SOON, BESIDE, graphs.FEW),
        (Seen(passes=3, waited=False), 2 + LATER, BESIDE, None),
        (Seen(passes=3, waited=False), 1 + LATER, BESIDE, graphs.FEW),
        (Seen(passes=3, waited=False), 99, ALONE, graphs.CARD),
        # The next run of as many steps repays it too.
        (Seen(passes=SOON, waited=True, runs=1), SOON, BESIDE, None),
        (Seen(passes=SOON, waited=True), SOON, BESIDE, graphs.FEW),
        # As many again as there were.
        (Seen(passes=SOON, waited=True), None, BESIDE, None),
        (Seen(passes=SOON - 1, waited=True), None, BESIDE, graphs.FEW),
        (Seen(passes=SOON - 1, waited=True, runs=1), None, BESIDE, None),
        (Seen(passes=9, waited=True, refusal=Verdict("no room")), 99, BESIDE, Verdict("no room")),
    ],
)
def test_when_a_capture_is_worth_it(seen, steps, beside, expected):
    assert seen.not_worth(steps, beside) == expected


# --- graphs


class Graph:
    """torch's, which runs again what was captured."""

    made = ()  # by the test that runs

    def __init__(self, work, pool, others):
        # torch refuses a pool whose graphs are all gone.
        used = [graph.work is not None for graph in Graph.made if graph.pool == pool]
        assert any(used) or not used
        self.work, self.pool = work, pool
        work(None)
        Graph.made.append(self)

    def replay(self):
        self.work(None)

    def reset(self):
        self.work = None


def with_graphs(monkeypatch):
    """Graphs without a card; each run waits for the processor."""
    monkeypatch.setattr(Graph, "made", [])
    monkeypatch.setattr(
        graphs, "capture", lambda work, device, pool, others: Graph(work, pool, others)
    )
    pools = itertools.count()
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, next(pools)))
    event = SimpleNamespace(record=lambda: None, query=lambda: True)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)


@pytest.fixture
def graphs_here(monkeypatch):
    with_graphs(monkeypatch)


class Captures:
    """A memory whose graphs double what they read."""

    def __init__(self):
        self.memory, self.figures = PassMemory(fused.TORCH), GraphFigures()
        self.cards = ()

    def launch(self, inputs, beside):
        inputs.x.mul_(2)

    def work(self, key, weights="here"):
        return Work(key, weights, [], True, lambda: self.launch, self.cards)

    def capture(self, key, weights="here", tokens=SMALL):
        case = Case(tokens)
        entry = compute_entry([new_block()], case.temb, tokens.batch)
        work = self.work(key, weights)
        given = Given(case.text, case.image, case.step, entry)
        return self.memory.capture(work, given, self.figures)

    def graph(self, key, weights="here"):
        return self.memory.graph(self.work(key, weights))

    @property
    def kept(self):
        return [graph.work is not None for graph in Graph.made]


def test_three_graphs_stay_and_the_least_recently_used_goes(graphs_here):
    captures = Captures()
    memory = captures.memory
    for key in range(MOST_GRAPHS):
        assert captures.graph(key) is None
        captures.capture(key)
    assert captures.graph(0) is not None
    captures.capture("one more")
    assert captures.kept == [True, False, True, True]
    assert [captures.graph(key) is None for key in (0, 1, 2)] == [False, True, False]
    assert captures.figures.captured == MOST_GRAPHS + 1
    assert captures.graph(0, "elsewhere") is None  # and it is gone
    assert captures.kept == [False, False, True, True]
    memory.release()
    assert not any(captures.kept)
    assert memory.workspace.bytes == 0


def test_a_capture_makes_no_buffer(graphs_here):
    """As after a run whose buffers were too large to be kept."""
    captures, asked = Captures(), []
    workspace = captures.memory.workspace

    def launch(inputs, beside):
        asked[:] = "branch", inputs.x.shape, inputs.x[:0]
        workspace.take(*asked)

    captures.launch = launch
    assert captures.capture("pass") == graphs.FIRST and not Graph.made
    workspace.take(*asked)
    assert isinstance(captures.capture("pass"), graphs.PassGraph)


def test_graphs_of_buffers_that_were_exchanged_are_dropped(graphs_here):
    captures = Captures()
    captures.capture("small")
    memory = captures.memory
    memory.free_buffers()
    assert memory.workspace.bytes and captures.graph("small") is not None
    # Its own input is larger: what it would replay was captured in a buffer that is gone.
    assert captures.capture("large", tokens=LARGE) == graphs.FIRST
    assert captures.graph("small") is None
    assert not any(captures.kept)
    memory.free_buffers()
    assert memory.workspace.bytes == 0
    captures.capture("small")  # in another pool
    assert memory.has_graphs


def test_a_graph_over_two_cards_is_in_the_memory_of_both(graphs_here, monkeypatch):
    monkeypatch.setattr(graphs, "pool_on", lambda card: object())
    captures, other = Captures(), PassMemory(fused.TORCH)
    captures.cards = [(torch.device("cpu", 1), other)]
    case = Case(SMALL)

    def used(inputs, beside):
        other.workspace.take("rows", (SMALL.rows, DIM), case.text[:0])

    captures.launch = used
    captures.capture("both")
    other.free_buffers()
    assert other.workspace.bytes  # what the graph reads stays
    assert captures.graph("both") is not None
    other.workspace.take("rows", (LARGE.rows * 9, DIM), case.text[:0])
    assert captures.graph("both") is None
    for memory in (other, captures.memory):  # a model leaves one of the cards
        captures.capture("both")
        memory.release()
        assert captures.graph("both") is None
        assert not any(captures.kept)
        assert not (other.has_graphs and next(iter(other._graphs.values())).void is False)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("full"), "too little VRAM is free for a graph"),
        (RuntimeError("no capture\nof this"), "capturing a graph failed: no capture"),
        (ValueError("cannot be accessed from Triton"), "failed: cannot be accessed from Triton"),
    ],
)
def test_a_capture_that_fails_says_why(graphs_here, error, expected):
    captures = Captures()

    def fails(*operands):
        raise error

    captures.launch = fails
    assert expected in str(captures.capture("key"))
    assert captures.graph("key") is None
    assert captures.figures.captured == 0


def test_what_a_capture_that_fails_has_made_is_freed_before_it_ends(monkeypatch):
    """Outside, cudaMallocAsync frees it with an error in a destructor, which ends the process."""
    stream = SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda it: nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(graphs, "_streams_of", lambda device: [stream, stream])
    monkeypatch.setattr(graphs, "_begin", lambda *given: None)
    made, alive = [], []
    monkeypatch.setattr(graphs, "_end", lambda *given: alive.extend(it() for it in made))

    def attend(*given):
        made.append(weakref.ref(mixed := random(1, SMALL.joint, DIM)))
        return mixed

    def full(*given):
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(workspace.Program, "middle", full)
    chain, case = Chain({}), Case(SMALL)
    executor = BlockExecutor(chain.layers, fused.TORCH, attend)
    entry, x = compute_entry(chain.blocks, case.temb, 1), random(SMALL.rows, DIM)

    def work(beside):
        held = attend()
        executor.run_all(chain.blocks, x, case.step, entry)
        return held

    with pytest.raises(torch.OutOfMemoryError):
        graphs.capture(work, torch.device("cuda", 0), (0, 0), {})
    assert alive == [None, None]


# --- a pass


class OnCard(torch.Tensor):
    is_cuda = True


class Model(torch.nn.Module):
    def __init__(self, *mixes):
        super().__init__()
        self.chain = Chain(*mixes)
        self.blocks = torch.nn.ModuleList(self.chain.blocks)

    def forward(self, case, between=lambda index, image: image):
        text, image = (part.as_subclass(OnCard) for part in (case.text, case.image))
        for index, block in enumerate(self.blocks):
            image = between(index, image)
            text, image = block(
                hidden_states=image, encoder_hidden_states=text, temb=case.temb, step=case.step
            )
        return text, image


class Attention(ChosenAttention):
    used = False

    def choose(self, request, *_):
        assert isinstance(request, AttentionRequest)
        return attend


class Host(DoubleStream):
    peers = additions = ()
    in_turns = False
    state, dtype, device, attention = None, torch.float32, torch.device("cpu"), Attention("auto")
    modulation = SimpleNamespace(start_run=lambda: None, lines=lambda: [])

    def __init__(self, model, steps=20, weights="here"):
        self.owner, self.blocks, self.steps = model, tuple(model.blocks), steps
        self.layers, self.weights = model.chain.layers, weights
        self.layers.hold, self.layers.moving = self.hold, Verdict("it moves")
        self.layers.rounds = lambda layer: False
        self.latents = torch.zeros(1)

    @contextmanager
    def hold(self, blocks):
        yield self.weights

    def fallback(self):
        return None

    def inputs(self, block, positional, arguments):
        text, image = arguments["encoder_hidden_states"], arguments["hidden_states"]
        return BlockInputs(text, image, arguments["temb"], arguments["step"], False)

    def entry(self, embedding, batch):
        return compute_entry(self.blocks, embedding, batch)

    def host_block(self, block, arguments):
        text, image = arguments["encoder_hidden_states"], arguments["hidden_states"]
        halves = compute_entry((block,), arguments["temb"], len(text)).of(0)
        executor = BlockExecutor(self.layers, fused.TORCH, attend)
        return executor.run(block, text, image, arguments["step"], halves)


class Passes:
    def __init__(self, *mixes):
        self.model, self.optimization = Model(*mixes), run.Optimization(None)
        self.optimization.start_run()

    def __call__(self, tokens=SMALL, weights="here", between=None, seed=0):
        case = Case(tokens)
        case.image = random(*case.image.shape, seed=100 + seed)
        call = [case] if between is None else [case, between]
        return self.optimization.run_pass(
            Host(self.model, weights=weights), lambda: self.model(*call)
        )

    def expected(self, tokens=SMALL, seed=0):
        """The same, block by block and each in a workspace of its own."""
        case = Case(tokens)
        text, image = case.text, random(*case.image.shape, seed=100 + seed)
        for block in self.model.blocks:
            halves = compute_entry((block,), case.temb, tokens.batch).of(0)
            executor = BlockExecutor(self.model.chain.layers, fused.TORCH, attend)
            text, image = executor.run(block, text, image, case.step, halves)
        return text, image

    @property
    def figures(self):
        return self.optimization._last.graphs

    @property
    def reasons(self):
        return self.optimization._last.verdicts.of("graphs")


@pytest.mark.parametrize("mix", ["all int8", "all dense"])
def test_a_graph_gives_what_launching_gives(graphs_here, mix):
    passes = Passes(*[MIXES.get(mix, {})] * 3)
    for seed in range(5):
        for tokens in (SMALL, OTHER):
            found = passes(tokens, seed=seed)
            assert_same(found, passes.expected(tokens, seed))
    # The first one is compared, the second one is watched.
    assert (passes.figures.captured, passes.figures.replayed) == (2, 6)
    assert passes.reasons == {graphs.FIRST: 4}
    passes.optimization.end_run()
    passes.optimization.start_run()
    for seed in range(3):
        assert_same(passes(SMALL, seed=seed), passes.expected(SMALL, seed))
    assert (passes.figures.captured, passes.figures.replayed) == (0, 3)
    assert "checked in an earlier run" in passes.optimization.report()
    # Weights that have moved are read where they are.
    assert_same(passes(weights="elsewhere"), passes.expected())
    assert_same(passes(weights=None), passes.expected())
    assert passes.reasons[Verdict("it moves")] == 1
    passes.optimization.release(passes.model)
    assert not any(graph.work for graph in Graph.made)


def test_what_is_known_of_a_model_lasts_over_passes_outside_a_run(graphs_here):
    passes = Passes({}, {})
    passes.optimization = run.Optimization(None)
    for _ in range(3):
        passes()
    assert "6 of 6 in 3 forward passes" in passes.optimization.report()


def test_a_pass_runs_with_the_models_card_as_the_current_one(graphs_here, monkeypatch):
    card, current, found = torch.device("cuda", 1), [torch.device("cuda", 0)], []

    @contextmanager
    def made_current(device):
        current.append(device)
        yield
        current.pop()

    monkeypatch.setattr(Host, "device", card)
    monkeypatch.setattr("qwen_l40s.optimizations.blocks.host.choose_ops", lambda _: fused.TORCH)
    monkeypatch.setattr(torch.cuda, "device", made_current)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=0))
    Passes({}, {})(between=lambda index, image: found.append(current[-1]) or image)
    assert found == [card] * 2
    assert len(current) == 1


def test_a_longer_prompt_beside_a_shorter_one_gets_a_graph_too(graphs_here):
    passes = Passes({}, {})
    for seed in range(6):
        for tokens in (SMALL, LARGE):
            assert_same(passes(tokens, seed=seed), passes.expected(tokens, seed))
    # The third pass of the long one takes a larger buffer, which voids the short one's graph.
    assert (passes.figures.captured, passes.figures.replayed) == (3, 7)


def test_layers_that_run_themselves_are_called_in_every_pass(graphs_here):
    passes = Passes(MIXES["opaque among fp8"], {}, {})
    for seed in range(5):
        assert_same(passes(seed=seed), passes.expected(seed=seed))
    assert passes.figures.captured == 0
    assert passes_module.THEMSELVES in passes.reasons


def test_graphs_make_room_for_the_hosts_block_where_the_card_is_full(graphs_here, monkeypatch):
    passes = Passes({}, {})
    for _ in range(4):
        passes()
    passes.optimization.end_run()
    passes.optimization.start_run()
    of_host, asked = Host.host_block, []

    def host_block(self, block, arguments):
        asked.append([graph.work is not None for graph in Graph.made])
        if any(asked[-1]):
            raise torch.OutOfMemoryError("full")
        return of_host(self, block, arguments)

    monkeypatch.setattr(Host, "host_block", host_block)
    assert_same(passes(OTHER), passes.expected(OTHER))
    assert asked == [[True], [False]]
    assert_same(passes(OTHER), passes.expected(OTHER))

    def full(self, block, arguments):
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(Host, "host_block", full)
    with pytest.raises(torch.OutOfMemoryError):
        passes(LARGE)


def test_what_is_exchanged_between_two_blocks_is_heeded(graphs_here):
    passes = Passes({}, {}, {})
    for _ in range(5):
        passes()
    assert passes.figures.replayed == 3
    calls = []

    def between(index, image):
        calls.append(index)
        return image + 1 if index == 2 else image

    found = passes(between=between)
    assert calls == [0, 1, 2] * 2  # what a graph has computed was void
    case = Case(SMALL)
    text, image = case.text, random(*case.image.shape, seed=100)
    for index, block in enumerate(passes.model.blocks):
        halves = compute_entry((block,), case.temb, 1).of(0)
        executor = BlockExecutor(passes.model.chain.layers, fused.TORCH, attend)
        text, image = executor.run(block, text, between(index, image), case.step, halves)
    assert_same(found, (text, image))
    calls.clear()
    passes(between=between)
    assert calls == [0, 1, 2]  # no graph from then on
    assert passes_module.INTERCEPTED in passes.reasons


class OwnBlock(QwenImageTransformerBlock):
    """A block whose own forward takes what these passes give, and heeds its `attn`."""

    def forward(self, hidden_states, encoder_hidden_states, temb, step):
        halves = compute_entry((self,), temb, len(hidden_states)).of(0)
        executor = BlockExecutor(Layers(self), fused.TORCH, attend)
        text, image = executor.run(self, encoder_hidden_states, hidden_states, step, halves)
        return text, image + ("forward" in self.attn.__dict__)


def changed_passes():
    """Passes that replay a graph, and the `attn` of their second block."""
    passes = Passes({}, {}, {})
    for block in passes.model.blocks:
        block.__class__ = OwnBlock
    for _ in range(5):
        passes()
    assert passes.figures.replayed == 3
    return passes, passes.model.blocks[1].attn


def plainly(passes):
    case = Case(SMALL)
    text, image = case.text, random(*case.image.shape, seed=100)
    for block in passes.model.blocks:
        text, image = block(image, text, case.temb, case.step)
    return text, image


def test_a_replay_ends_where_another_extension_has_changed_a_block(graphs_here):
    passes, attn = changed_passes()
    unchanged = plainly(passes)
    attn.forward = lambda *arguments: None
    found = passes()
    assert_same(found, plainly(passes))
    assert not torch.equal(found[1], unchanged[1])
    lines = passes.optimization.report()
    assert "code, 2 of 18: another extension has changed attn of block 1" in lines
    (memory,) = passes.optimization._kept()
    assert not memory.has_graphs  # it was captured of the blocks as they were
    del attn.forward
    assert_same(passes(), unchanged)
    assert passes.figures.captured == 1


def test_a_block_that_is_changed_between_two_others_is_heeded(graphs_here):
    passes, attn = changed_passes()
    calls = []

    def between(index, image):
        calls.append(index)
        if index == 1:
            attn.forward = lambda *arguments: None
        return image

    found = passes(between=between)
    assert calls == [0, 1, 0, 1, 2]
    assert_same(found, plainly(passes))


def test_a_wrapper_that_stays_on_a_block_outlives_the_pass_that_it_wrapped(graphs_here):
    passes, _ = changed_passes()
    block = passes.model.blocks[2]

    def between(index, image):
        if index == 1 and "theirs" not in block.__dict__:
            own = block.forward
            block.theirs = block.forward = lambda *given, **named: own(*given, **named)
        return image

    unchanged = plainly(passes)
    assert_same(passes(between=between), unchanged)
    assert block.forward is block.theirs
    assert_same(passes(), unchanged)
    assert "another extension has changed the blocks" in passes.optimization.report()


CHANGES = {
    "attn": lambda block: setattr(block.attn, "forward", print),
    "img_norm2": lambda block: block.img_norm2.register_forward_hook(print),
    "attn.norm_added_k": lambda block: block.attn.norm_added_k.register_forward_pre_hook(print),
    "img_mlp": lambda block: setattr(block.img_mlp, "forward", print),
    "txt_mlp.net.0": lambda block: setattr(block.txt_mlp.net[0], "forward", print),
    "img_mlp.net.1": lambda block: block.img_mlp.net[1].register_forward_hook(print),
    "attn.to_q": lambda block: setattr(block.attn.to_q, "forward", print),
    "attn.to_v": lambda block: setattr(block.attn, "to_v", torch.nn.Linear(1, 1)),
    "attn ": lambda block: setattr(block, "attn", torch.nn.Linear(1, 1)),
    "img_mlp.net.1 ": lambda block: block.img_mlp.net.__setitem__(1, torch.nn.ReLU()),
    "txt_mlp": lambda block: setattr(block.txt_mlp, "__class__", torch.nn.Sequential),
    "the class": lambda block: setattr(block, "__class__", torch.nn.Sequential),
    "its hooks": lambda block: block.register_forward_hook(print),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_changed_in_a_block_is_named(name):
    blocks = dict(enumerate(new_block() for _ in range(3)))
    layers = [part_of(block, name) for block in blocks.values() for name in LAYERS.values()]
    code = Inventory(blocks, (), layers)
    assert code.changed() is None
    CHANGES[name](blocks[1])
    expected = f"another extension has changed {name.strip()} of block 1"
    assert str(code.changed()) == str(code.changed_in(1)) == expected
    assert code.changed_in(0) is code.changed_in(2) is None


def test_a_function_of_a_class_that_is_replaced_is_named(monkeypatch):
    blocks, kind = dict(enumerate(new_block() for _ in range(2))), type(new_block().attn)
    code = Inventory(blocks)
    monkeypatch.setattr(kind, "forward", lambda self: None)
    assert str(code.changed()) == f"another extension has changed {kind.__name__}.forward"
    # So is one that was replaced before this package was imported.
    forget()
    assert Inventory(blocks).changed()
    monkeypatch.undo()
    forget()
    assert Inventory(blocks).changed() is None
