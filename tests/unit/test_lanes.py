"""Lanes between cards: contents and order in any order that streams may take, and lost copies."""

import random
from functools import partial

import pytest

torch = pytest.importorskip("torch")

from faulty_copies import Late, Vanishing

from qwen_l40s.errors import UnavailableError
from qwen_l40s.machine import copies, lanes
from qwen_l40s.machine.copies import CardOperations, CpuOperations, Route
from qwen_l40s.machine.lanes import Lane

CPU = torch.device("cpu")
CARDS = [torch.device("cpu", index) for index in range(2)]
DTYPES = torch.bfloat16, torch.int8, torch.float32, torch.float8_e4m3fn


@pytest.fixture(params=[True, False], ids=["peer", "host"])
def peer(request, monkeypatch):
    """Pieces are small, so that a copy takes more of them than there are buffers."""
    monkeypatch.setattr(copies, "LEAST_PIECE", 64)
    monkeypatch.setattr(copies, "BUFFER_BYTES", 256)
    return request.param


def bits(size, seed):
    return torch.randint(
        256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )


# ---------------------------------------------------------------------------------- on a CPU


def test_values_arrive_as_they_are(peer):
    lane = Lane(CPU, CPU, peer)
    for seed, size in enumerate((0, 8, 64, 72, 1024, 4096, 8 * 997)):
        sources = [bits(size, seed).view(dtype) for dtype in DTYPES]
        targets = [torch.empty_like(source) for source in sources]
        lane.copy(zip(sources, targets, strict=True))
        lane.arrive()
        lane.departed()
        for source, target in zip(sources, targets, strict=True):
            assert torch.equal(source.view(torch.uint8), target.view(torch.uint8))
    assert not lane.missed()


def test_pairs_of_other_sizes_are_refused(peer):
    with pytest.raises(ValueError, match="8 bytes do not fit 4"):
        Lane(CPU, CPU, peer).copy([(bits(8, 0), bits(4, 0))])


def test_lost_and_late_copies_are_missed(peer, monkeypatch):
    monkeypatch.setattr(lanes, "KEPT", 8)
    source, target = bits(16, 0), bits(16, 1)
    for fault in (Vanishing, Late):
        for good in (0, 1, 3, 7, 8, 21):  # past the place where numbers begin again
            operations = fault(10**9)
            lane = Lane(CPU, CPU, peer, operations)
            for _ in range(good):
                lane.copy([(source, target)])
            assert not lane.missed()
            operations.start = operations.copies
            lane.copy([(source, target)])
            operations.start = 10**9
            for _ in range(good):
                lane.copy([(source, target)])
            assert lane.missed() and not lane.missed(), (fault, good)


def test_many_copies_before_anybody_asks(peer, monkeypatch):
    monkeypatch.setattr(lanes, "KEPT", 8)
    for lost in (None, 0, 5, 30):
        operations = Vanishing(10**9)
        lane = Lane(CPU, CPU, peer, operations)
        for copy in range(50):
            operations.start = 0 if copy == lost else 10**9
            lane.copy([(bits(4, copy), bits(4, 0))])
        assert lane.missed() == (lost is not None)
        assert not lane.missed()


def test_without_pinned_memory():
    def refuse(*shape, **about):
        raise RuntimeError("CUDA error: out of memory")

    operations = CpuOperations()
    operations.pinned = CardOperations().pinned
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", refuse)
        with pytest.raises(UnavailableError, match="8 MiB of host memory cannot be pinned"):
            Route(CPU, CPU, False, operations)


# ------------------------------------------------------------------------------- simulated streams


class Queue:
    """A stream: what is queued, and marks that it waits for."""

    def __init__(self, streams):
        self.streams, self.work = streams, []

    def wait_event(self, event):
        self.work.append(event.mark)

    def synchronize(self):
        while self.work and self.streams.step():
            pass

    def step(self):
        """Whether the first of its work could run."""
        if not self.work or (isinstance(self.work[0], list) and not self.work[0]):
            return False
        first = self.work.pop(0)
        if not isinstance(first, list):
            first()
        return True


class Mark:
    """An event; whoever waits for it waits for what was recorded by then."""

    def __init__(self, streams):
        self.streams, self.mark = streams, [True]

    def record(self, queue):
        self.mark = mark = []
        queue.work.append(partial(mark.append, True))

    def synchronize(self):
        while not self.mark:
            assert self.streams.step()


class Streams(CpuOperations):
    """Two cards whose streams advance in the order that `choose` picks, no sooner than asked."""

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
        """Advances one of the streams that can; whether there was one."""
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
        lane = Lane(*CARDS, peer, streams)
        home, away = (streams.home[card].work for card in CARDS)
        source, target, read = bits(2000, 0), bits(2000, 1), []
        pairs = [(source[:700], target[:700]), (source[700:], target[700:])]
        values = [bits(2000, 10 + turn) for turn in range(9)]
        for value in values:
            home.append(partial(source.copy_, value))
            lane.copy(pairs)
            lane.arrive()
            away.append(lambda read=read, target=target: read.append(target.clone()))
            away.append(target.zero_)  # a target that is yet in use is not written
            lane.departed()
            home.append(source.zero_)
        assert not lane.missed()
        while streams.step():
            pass
        assert all(map(torch.equal, read, values)) and len(read) == len(values)


class Recorded:
    """What two cards were given between two points, to run again, as a CUDA graph does."""

    def __init__(self, streams, lane, pairs):
        self.streams = streams
        assert not any(queue.work for queue in streams.queues)
        lane.begin_capture()
        for pair in pairs:
            lane.copy([pair])
            lane.arrive()
            lane.departed()
        self.missed = lane.end_capture()
        self.work = [list(queue.work) for queue in streams.queues]
        for queue in streams.queues:
            queue.work.clear()

    def replay(self, left_out=None):
        """Once more, without one of the operations on the lane's streams."""
        for queue, work in zip(self.streams.queues, self.work, strict=True):
            for item in work:
                if isinstance(item, partial) and item.args == (True,):
                    item.func.__self__.clear()  # nothing has come past this mark
            queue.work = [item for item in work if item is not left_out]
        while self.streams.step():
            pass
        assert not any(queue.work for queue in self.streams.queues)


def test_replayed_copies_are_checked_each_time(peer):
    for choose in [*orders()][:6]:
        streams = Streams(choose)
        lane = Lane(*CARDS, peer, streams).captured
        sources, targets = ([bits(600, 9 * way + n) for n in range(4)] for way in range(2))
        graph = Recorded(streams, lane, list(zip(sources, targets, strict=True)))
        first = lane._addresses[1]
        numbers = range(first, first + lane._numbers.nbytes)
        sent = [
            item
            for work in graph.work
            for item in work
            if isinstance(item, partial) and len(item.args) == 4 and item.args[1] in numbers
        ]
        assert len(sent) == len(sources)
        for turn in range(3):
            for source in sources:
                source.copy_(bits(600, 100 + turn))
            graph.replay()
            assert all(map(torch.equal, sources, targets)) and not graph.missed()
            for lost in sent if peer else ():  # host memory loses nothing
                graph.replay(left_out=lost)
                assert graph.missed()


def test_a_copy_waits_for_both_cards_and_nobody_for_it(peer):
    streams = Streams(list)
    lane = Lane(*CARDS, peer, streams)
    source, target = bits(100, 0), bits(100, 1)
    for card in range(2):
        ready = []
        streams.home[CARDS[card]].work.append(ready)  # which nobody records
        lane.copy([(source, target)])
        while streams.step():
            pass
        assert not torch.equal(source, target)
        assert streams.home[CARDS[1 - card]].work == []  # it has gone past the copy
        ready.append(True)
        while streams.step():
            pass
        assert torch.equal(source, target)
        target.zero_()


def test_asking_waits_for_no_later_work(peer):
    streams = Streams(list)
    lane = Lane(*CARDS, peer, streams)
    pair = bits(100, 0), bits(100, 1)
    lane.copy([pair])
    lane.arrive()
    for card in CARDS:
        streams.home[card].work.append([])  # for ever
    assert not lane.missed()


def test_a_late_copy_is_missed_on_streams_too(peer):
    """Its last byte comes when the card has long gone on."""

    class Slow(Streams):
        def copy(self, target, source, size, stream):
            other = stream if size != 4 else self.slow
            super().copy(target, source, size, other)

    streams = Slow(list)
    streams.slow = Queue(streams)  # advances when nobody waits any more
    lane = Lane(*CARDS, peer, streams)
    pair = bits(100, 0), bits(100, 1)
    lane.copy([pair])
    lane.arrive()
    assert lane.missed()
