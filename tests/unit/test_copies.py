"""Copies between cards: contents and order in any order that streams may take."""

import random
from functools import partial

import pytest

torch = pytest.importorskip("torch")

from faulty_copies import CpuOperations

from qwen_l40s.errors import UnavailableError
from qwen_l40s.machine import links
from qwen_l40s.machine.links import CardOperations, Route

CPU = torch.device("cpu")
CARDS = [torch.device("cpu", index) for index in range(2)]
DTYPES = torch.bfloat16, torch.int8, torch.float32, torch.float8_e4m3fn


@pytest.fixture(params=[True, False], ids=["peer", "host"])
def peer(request, monkeypatch):
    """Pieces are small, so that a copy takes more of them than there are buffers."""
    monkeypatch.setattr(links, "LEAST_PIECE", 64)
    monkeypatch.setattr(links, "BUFFER_BYTES", 256)
    return request.param


def bits(size, seed):
    return torch.randint(
        256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )


# ---------------------------------------------------------------------------------- on a CPU


def test_values_arrive_as_they_are(peer):
    route = Route(CPU, CPU, peer, CpuOperations())
    for seed, size in enumerate((0, 8, 64, 72, 1024, 4096, 8 * 997)):
        sources = [bits(size, seed).view(dtype) for dtype in DTYPES]
        targets = [torch.empty_like(source) for source in sources]
        route.copy(zip(sources, targets, strict=True))
        route.arrive()
        route.departed()
        for source, target in zip(sources, targets, strict=True):
            assert torch.equal(source.view(torch.uint8), target.view(torch.uint8))


def test_pairs_of_other_sizes_are_refused(peer):
    with pytest.raises(ValueError, match="8 bytes do not fit 4"):
        Route(CPU, CPU, peer, CpuOperations()).copy([(bits(8, 0), bits(4, 0))])


def test_without_pinned_memory():
    def refuse(*shape, **about):
        raise RuntimeError("CUDA error: out of memory")

    operations = CpuOperations()
    operations.pinned = CardOperations().pinned
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", refuse)
        with pytest.raises(UnavailableError, match="8 MiB of system RAM cannot be pinned"):
            Route(CPU, CPU, False, operations)


# ------------------------------------------------------------------------------- simulated streams


class Queue:
    """A stream: what is queued, and marks that it waits for."""

    def __init__(self, streams):
        self.streams, self.work = streams, []

    def wait_event(self, event):
        assert event.capture in (None, self.streams.capture)
        self.work.append(event.mark)

    def synchronize(self):
        while self.work and self.streams.step():
            pass

    def step(self):
        if not self.work or (isinstance(self.work[0], list) and not self.work[0]):
            return False
        first = self.work.pop(0)
        if not isinstance(first, list):
            first()
        return True


class Mark:
    """An event; whoever waits for it waits for what was recorded by then."""

    def __init__(self, streams):
        self.streams, self.mark, self.capture = streams, [True], None

    def record(self, queue):
        self.mark, self.capture = [], self.streams.capture
        queue.work.append(partial(self.mark.append, True))

    def synchronize(self):
        while not self.mark:
            assert self.streams.step()


class Streams(CpuOperations):
    """Two cards whose streams advance in the order that `choose` picks, no sooner than asked."""

    capture = 0  # which of all; a graph's streams wait for its own events alone

    def __init__(self, choose):
        self.choose, self.home = choose, {card: Queue(self) for card in CARDS}
        self.queues = list(self.home.values())

    def current(self, device):
        return self.home[device]

    def stream(self, device):
        self.queues.append(Queue(self))
        return self.queues[-1]

    def event(self, timed=False):
        return Mark(self)

    def copy(self, target, source, size, stream):
        stream.work.append(partial(super().copy, target, source, size, stream))

    def step(self):
        return any(queue.step() for queue in self.choose(self.queues))


def orders():
    """Ways in which two cards may take turns: one stream as far as it can, or any."""
    yield list
    yield lambda queues: queues[::-1]
    for seed in range(20):
        chance = random.Random(seed)
        yield lambda queues, chance=chance: chance.sample(queues, len(queues))


def test_contents_hold_in_every_order(peer):
    for choose in orders():
        streams = Streams(choose)
        route = Route(*CARDS, peer, streams)
        home, away = (streams.home[card].work for card in CARDS)
        source, target, read = bits(2000, 0), bits(2000, 1), []
        pairs = [(source[:700], target[:700]), (source[700:], target[700:])]
        values = [bits(2000, 10 + turn) for turn in range(9)]
        for value in values:
            home.append(partial(source.copy_, value))
            route.copy(pairs)
            route.arrive()
            away.append(lambda read=read, target=target: read.append(target.clone()))
            away.append(target.zero_)  # a target that is yet in use is not written
            route.departed()
            home.append(source.zero_)
        while streams.step():
            pass
        assert all(map(torch.equal, read, values)) and len(read) == len(values)


class Recorded:
    """What two cards were given between two points, to run again, as a CUDA graph does."""

    def __init__(self, streams, route, pairs):
        self.streams = streams
        assert not any(queue.work for queue in streams.queues)
        streams.capture += 1
        route.make_events()
        for pair in pairs:
            route.copy([pair])
        route.arrive()
        streams.capture += 1
        self.work = [list(queue.work) for queue in streams.queues]
        for queue in streams.queues:
            queue.work.clear()

    def replay(self):
        for queue, work in zip(self.streams.queues, self.work, strict=True):
            for item in work:
                if isinstance(item, partial) and item.args == (True,):
                    item.func.__self__.clear()  # nothing has come past this mark
            queue.work = list(work)
        homes = list(self.streams.home.values())
        while any(queue.work for queue in homes):
            assert self.streams.step()
        # Whoever waits for both cards waits for all copies.
        assert not any(queue.work for queue in self.streams.queues)


def test_replayed_copies_arrive_each_time(peer):
    for choose in orders():
        streams = Streams(choose)
        route = Route(*CARDS, peer, streams)
        sources, targets = ([bits(600, 9 * way + n) for n in range(4)] for way in range(2))
        pairs = list(zip(sources, targets, strict=True))
        route.copy(pairs[:1])  # no graph waits for what was before
        while streams.step():
            pass
        assert route.captured is route.captured is not route
        graphs = [Recorded(streams, route.captured, pairs) for _ in range(2)]
        for turn in range(4):
            for source in sources:
                source.copy_(bits(600, 100 + turn))
            graphs[turn % 2].replay()
            assert all(map(torch.equal, sources, targets))


def test_a_copy_waits_for_both_cards_and_nobody_for_it(peer):
    streams = Streams(list)
    route = Route(*CARDS, peer, streams)
    source, target = bits(100, 0), bits(100, 1)
    for card in range(2):
        ready = []
        streams.home[CARDS[card]].work.append(ready)  # which nobody records
        route.copy([(source, target)])
        while streams.step():
            pass
        assert not torch.equal(source, target)
        assert streams.home[CARDS[1 - card]].work == []  # it has gone past the copy
        ready.append(True)
        while streams.step():
            pass
        assert torch.equal(source, target)
        target.zero_()
