"""Weights through pinned buffers: the order of copies on a simulated card, then on a true one."""

import gc

import pytest

torch = pytest.importorskip("torch")

from torch.utils._python_dispatch import TorchDispatchMode

from qwen_l40s.optimizations.stream import ALIGNMENT, WeightStream, _layout

CUDA = torch.device("cuda")
DTYPES = (
    *(torch.bfloat16, torch.float8_e4m3fn, torch.float32, torch.int8, torch.bool, torch.float16),
    *(torch.float8_e5m2, torch.float64, torch.uint8),
)
SMALL = {"pinned_bytes": 3000, "chunk_bytes": 1000}


def random(*shape, dtype=torch.uint8, seed=0):
    """Any bits, NaNs among them; bool has two."""
    generator = torch.Generator().manual_seed(seed)
    most = 2 if dtype is torch.bool else 256
    size = torch.Size(shape).numel() * dtype.itemsize
    bits = torch.randint(most, (size,), generator=generator, dtype=torch.uint8)
    return bits.view(dtype).view(shape)


def layers(count, rows=37, columns=53):
    """A weight and a bias of another dtype each, of sizes that nothing divides."""
    return [
        [
            random(rows + i, columns, dtype=DTYPES[i % len(DTYPES)], seed=i),
            random(rows + i, dtype=DTYPES[(i + 3) % len(DTYPES)], seed=-i),
        ]
        for i in range(count)
    ]


def odd_layers():
    """What else a layer may be."""
    base = random(64, 48, dtype=torch.float32)
    return [
        [],
        [random(0, 5, dtype=torch.bfloat16)],
        [random(dtype=torch.float64), random(0), random(3), random(513)],
        [base.t(), base[::2, 1:7], base[:1].expand(9, 48)],
        [torch.nn.Parameter(torch.randn(40, 41))],
        [],
    ]


def same(got, expected):
    """The same bits, of NaNs too."""
    forms = [(tensor.dtype, tensor.shape) for tensor in (got, expected)]
    bits = [x.detach().cpu().contiguous().view(-1).view(torch.uint8) for x in (got, expected)]
    return forms[0] == forms[1] and torch.equal(*bits)


def check_pass(groups, stream, pause=0):
    """Reads each layer on the card, and only then lets the host look at what was read."""
    read = []
    for tensors in stream:
        if pause:
            torch.cuda._sleep(pause)
        read.append([tensor.clone() for tensor in tensors])
    torch.cuda.synchronize()
    assert len(read) == len(groups)
    for got, expected in zip(read, groups, strict=True):
        assert all(map(same, got, expected))
        assert all(tensor.is_cuda for tensor in got)


# ------------------------------------------------------------------------------- a simulated card


class Queue:
    """A CUDA stream: what is queued runs when it has to, or at once where that is asked for."""

    def __init__(self, device=None, eager=False):
        self.work, self.eager = [], eager

    def put(self, work):
        self.work.append(work)
        if self.eager:
            self.run()

    def run(self, until=None):
        while self.work and not (until and until.done):
            self.work.pop(0)()

    def wait_event(self, event):
        self.put(event.synchronize)

    def wait_stream(self, other):
        event = Mark()
        event.record(other)
        self.wait_event(event)


class Mark:
    """A CUDA event."""

    def __init__(self):
        self.done, self.queue = True, None

    def record(self, queue):
        self.done, self.queue = False, queue
        queue.put(lambda: setattr(self, "done", True))

    def synchronize(self):
        if not self.done:
            self.queue.run(self)


class Later(TorchDispatchMode):
    """Queues copies that do not block."""

    def __init__(self, queue):
        super().__init__()
        self.queue = queue

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        later = function is torch.ops.aten.copy_.default and (*args, False)[2]
        if not later:
            return function(*args, **(kwargs or {}))
        self.queue.put(lambda: function(*args[:2]))
        return args[0]


@pytest.fixture
def card(monkeypatch):
    """The consumer's stream of a card whose uploads run as early, or as late, as they may."""
    empty, home = torch.empty, Queue()

    def set_up(eager):
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: Queue(eager=eager))
        return home

    def on_host(*shape, device=None, pin_memory=False, **about):
        return empty(*shape, **about).fill_(7)

    monkeypatch.setattr(torch, "empty", on_host)
    monkeypatch.setattr(torch.cuda, "Event", Mark)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: home)
    monkeypatch.setattr(torch.cuda, "stream", Later)
    return set_up


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("inference", [False, True])
def test_values_survive_every_reuse_of_the_buffers(card, eager, inference):
    home, read = card(eager), []
    with torch.inference_mode(inference):
        groups = layers(12) + odd_layers() + layers(5)
        stream = WeightStream(groups, CUDA, **SMALL)
        for _ in range(2):
            read.clear()
            for tensors in stream:
                found = [None] * len(tensors)
                for index, tensor in enumerate(tensors):
                    home.put(
                        lambda found=found, index=index, tensor=tensor: found.__setitem__(
                            index, tensor.clone()
                        )
                    )
                read.append(found)
            home.run()
            for got, expected in zip(read, groups, strict=True):
                assert all(map(same, got, expected))
    assert stream.bytes == sum(tensor.nbytes for tensors in groups for tensor in tensors)
    assert stream.note == ""


def test_a_pass_that_is_left_waits_for_its_uploads(card):
    home = card(eager=False)
    walked = iter(WeightStream(layers(5), CUDA, **SMALL))
    (weight, bias), expected = next(walked), layers(5)[0]
    walked.close()
    home.run()
    assert same(weight, expected[0]) and same(bias, expected[1])


def test_without_pinned_memory(card, monkeypatch):
    home, empty = card(eager=False), torch.empty

    def refuse(*shape, pin_memory=False, **about):
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory")
        return empty(*shape, **about)

    monkeypatch.setattr(torch, "empty", refuse)
    stream, expected = WeightStream(layers(3), CUDA, **SMALL), layers(3)
    for tensors, known in zip(stream, expected, strict=True):
        home.run()
        assert all(map(same, tensors, known))
    assert stream.note == "No system RAM could be pinned, so uploads are slower."


def test_what_lies_on_the_device_is_given_itself(device):
    there = torch.ones(5, device=device)
    groups = [[random(9), there, random(3)], [there], *odd_layers()]
    stream = WeightStream(groups, device)
    for tensors, expected in zip(stream, groups, strict=True):
        for tensor, known in zip(tensors, expected, strict=True):
            assert same(tensor, known) and (tensor is known) == (known.device == there.device)
    waiting = [known for group in groups for known in group if known.device != there.device]
    assert stream.bytes == sum(known.nbytes for known in waiting)


def test_tensors_of_a_layer_are_aligned_and_do_not_overlap():
    for group in filter(None, layers(9) + odd_layers()):
        *starts, size = _layout(group)
        assert all(start % ALIGNMENT == 0 for start in starts)
        ends = [start + tensor.nbytes for start, tensor in zip(starts, group, strict=True)]
        assert all(end <= start for end, start in zip(ends, [*starts[1:], size], strict=True))


# ---------------------------------------------------------------------------------- on a true card


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("inference", "other_stream", "pause"),
    [(False, False, 0), (True, False, 0), (False, True, 2_000_000)],
)
def test_values_on_the_card(inference, other_stream, pause):
    with (
        torch.inference_mode(inference),
        torch.cuda.stream(torch.cuda.Stream() if other_stream else None),
    ):
        groups = layers(40) + odd_layers() + layers(7, 900, 1100)
        for about in (SMALL, {}):
            stream = WeightStream(groups, CUDA, **about)
            check_pass(groups, stream, pause)
            assert stream.note == ""


@pytest.mark.cuda
def test_memory_that_queued_work_still_reads():
    """The allocator gives memory again that kernels in the queue have yet to read."""
    groups = layers(4, 1000, 1000)
    size = 2 * max(_layout(tensors)[-1] for tensors in groups)
    old = torch.full((size,), 7, dtype=torch.uint8, device=CUDA)
    torch.cuda._sleep(200_000_000)
    read = old.clone()
    del old
    check_pass(groups, WeightStream(groups, CUDA))
    assert (read == 7).all()


@pytest.mark.cuda
def test_a_consumer_that_fails_leaves_nothing_on_the_card():
    gc.collect()
    before = torch.cuda.memory_allocated()
    walked = iter(WeightStream(layers(20, 500, 500), CUDA))
    next(walked)
    assert torch.cuda.memory_allocated() > before
    del walked
    assert torch.cuda.memory_allocated() <= before
