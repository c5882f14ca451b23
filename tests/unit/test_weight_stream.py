"""Weights through a ring of host memory: the ring's threads, then whole passes on a card."""

import ctypes
import gc
import queue
import threading
import time
import weakref

import pytest

torch = pytest.importorskip("torch")

from qwen_l40s import SettingError, UnavailableError
from qwen_l40s.machine.card import GIB, MIB
from qwen_l40s.optimizations import stream as chunk_ring
from qwen_l40s.optimizations import stream as pinned_memory
from qwen_l40s.optimizations import stream as stream_pass
from qwen_l40s.optimizations import stream as weight_stream
from qwen_l40s.optimizations.stream import (
    ALIGNMENT,
    CHUNK_BYTES,
    LEAST_BYTES,
    RING_BYTES,
    ChunkRing,
    WeightStream,
    allocate_staging,
    cut,
    lay_out,
    measure_pinned_bandwidth,
    pin_slots,
    release_pinned,
    reserve_ring,
)

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
DTYPES = (
    *(torch.bfloat16, torch.float8_e4m3fn, torch.float32, torch.int8, torch.bool, torch.float16),
    *(torch.float8_e5m2, torch.float64, torch.uint8),
)
REAL_EMPTY = torch.empty


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


def odd_groups():
    """What else a group may be."""
    base = random(64, 48, dtype=torch.float32)
    return [
        [],
        [random(0, 5, dtype=torch.bfloat16)],
        [random(dtype=torch.float64), random(0), random(3), random(513)],
        [base.t(), base[::2, 1:7], base[:1].expand(9, 48)],
        [torch.nn.Parameter(torch.randn(40, 41))],
        [],
    ]


def bits(tensor):
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)


def same(got, expected):
    """The same bits, of NaNs too."""
    forms = [(tensor.dtype, tensor.shape) for tensor in (got, expected)]
    return forms[0] == forms[1] and torch.equal(bits(got), bits(expected))


def ring_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("chunk ring")]


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    assert ring_threads() == []


class Engine:
    """Uploads as a card's copy stream does: later, one after the other, from the slot itself."""

    def __init__(self, groups, buffers, chunk_bytes, slots, pause=0.0):
        largest = max(lay_out(tensors).bytes for tensors in groups)
        with torch.inference_mode(False):
            self.slots = torch.zeros(slots, chunk_bytes, dtype=torch.uint8)
            self.buffers = [torch.zeros(largest, dtype=torch.uint8) for _ in range(buffers)]
        self.groups, self.pause = groups, pause
        self.ready = [threading.Event() for _ in groups]
        self.entered = 0
        self._queue = queue.Queue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def upload(self, chunk, slot, last):
        done = threading.Event()
        self._queue.put((chunk, slot, last, done))
        return done.wait

    def _run(self):
        while (item := self._queue.get()) is not None:
            chunk, slot, last, done = item
            time.sleep(self.pause)
            buffer = self.buffers[chunk.group % len(self.buffers)]
            buffer[chunk.offset : chunk.offset + chunk.bytes] = self.slots[slot, : chunk.bytes]
            done.set()
            if last:
                self.ready[chunk.group].set()

    def stop(self):
        self._queue.put(None)
        self._thread.join()

    def enter(self):
        self.entered += 1

    def ring(self, threads):
        buffers = len(self.buffers)
        return ChunkRing(self.groups, self.slots, self.upload, buffers, threads, self.enter)

    def tensors(self, index):
        tensors, buffer = self.groups[index], self.buffers[index % len(self.buffers)]
        return [
            buffer[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for tensor, offset in zip(tensors, lay_out(tensors).offsets, strict=True)
        ]


# ---------------------------------------------------------------------------------- layout, chunks


def test_tensors_are_aligned_and_chunks_cover_them_once():
    for groups in (layers(5), odd_groups()):
        for chunk_bytes in (1, 100, 511, 512, 5000, MIB):
            found = [torch.zeros(lay_out(tensors).bytes, dtype=torch.uint8) for tensors in groups]
            written = [torch.zeros_like(buffer, dtype=torch.int32) for buffer in found]
            ends = [0] * len(groups)
            for chunk in cut(groups, chunk_bytes):
                assert chunk.offset == ends[chunk.group]
                assert 0 < chunk.bytes <= chunk_bytes
                ends[chunk.group] += chunk.bytes
                for piece in chunk.pieces:
                    assert piece.offset + piece.bytes <= chunk.bytes
                    begin = chunk.offset + piece.offset
                    source = bits(piece.tensor)[piece.start : piece.start + piece.bytes]
                    found[chunk.group][begin : begin + piece.bytes] = source
                    written[chunk.group][begin : begin + piece.bytes] += 1
            for tensors, buffer, times in zip(groups, found, written, strict=True):
                offsets = lay_out(tensors).offsets
                assert all(offset % ALIGNMENT == 0 for offset in offsets)
                assert times.sum() == sum(tensor.nbytes for tensor in tensors)
                for tensor, offset in zip(tensors, offsets, strict=True):
                    assert torch.equal(buffer[offset : offset + tensor.nbytes], bits(tensor))
            assert ends == [lay_out(tensors).bytes for tensors in groups]


def test_a_tensor_that_is_not_contiguous_is_copied_in_its_turn_only():
    groups = [[random(8, 9).t()], [random(8, 9).t()]]
    chunks = cut(groups, 50)
    first = next(chunks)
    assert first.pieces[0].tensor.is_contiguous()
    assert [chunk.group for chunk in chunks] == [0, 1, 1]
    assert next(cut([[tensor := random(9)]], 50)).pieces[0].tensor is tensor


# --------------------------------------------------------------------------------------- ring


@pytest.mark.parametrize("buffers", (1, 3))
@pytest.mark.parametrize(("slots", "threads"), [(1, 1), (2, 8), (3, 2), (40, 8)])
@pytest.mark.parametrize(("upload_pause", "use_pause"), [(0, 0), (0.0005, 0), (0, 0.002)])
def test_values_survive_every_reuse(slots, threads, buffers, upload_pause, use_pause):
    groups = layers(12) + odd_groups() + layers(3)
    engine = Engine(groups, buffers, 700, slots, upload_pause)
    ring = engine.ring(threads)
    ring.start()
    try:
        for index, tensors in enumerate(groups):
            ring.wait(index)
            assert lay_out(tensors).bytes == 0 or engine.ready[index].wait(30)
            time.sleep(use_pause)  # in which nothing of the next groups may come here
            assert all(map(same, engine.tensors(index), tensors))
            ring.release()
    finally:
        ring.stop()
        engine.stop()
    assert engine.entered == min(slots, threads)


def test_stopping_waits_for_what_is_being_copied(monkeypatch):
    move, copying, proceed = ctypes.memmove, threading.Event(), threading.Event()
    finished = []

    def slow(*at):
        copying.set()
        assert proceed.wait(30)
        finished.append(1)
        return move(*at)

    monkeypatch.setattr(chunk_ring.ctypes, "memmove", slow)
    engine = Engine(layers(6), 2, 700, 4)
    ring = engine.ring(3)
    ring.start()
    assert copying.wait(30)
    threading.Timer(0.05, proceed.set).start()
    ring.stop()
    assert ring_threads() == []
    assert 1 <= len(finished) <= 3 * 2  # a chunk of two pieces each, at most
    engine.stop()


def test_mapped_files_and_inference_tensors(tmp_path):
    file = tmp_path / "weights"
    file.write_bytes(bits(random(5001)).numpy().tobytes())
    mapped = torch.from_file(str(file), shared=False, size=5001, dtype=torch.uint8)
    with torch.inference_mode():
        groups = [[mapped, random(99, dtype=torch.float16).clone()], [random(7, 5).t() + 0]]
        engine = Engine(groups, 2, 512, 3)
        ring = engine.ring(2)
        ring.start()
        try:
            for index, tensors in enumerate(groups):
                ring.wait(index)
                assert engine.ready[index].wait(30)
                assert all(map(same, engine.tensors(index), tensors))
        finally:
            ring.stop()
            engine.stop()


@pytest.mark.parametrize("taken", (0, 1, 4))
@pytest.mark.parametrize("slots", (2, 40))
def test_stopping_early_ends_threads_that_wait(taken, slots):
    groups = layers(30)
    engine = Engine(groups, 2, 700, slots)
    ring = engine.ring(4)
    ring.start()
    for index in range(taken):
        ring.wait(index)
        ring.release()
    time.sleep(0.02)  # the threads wait for the next release now
    assert len(ring_threads()) == min(slots, 4)
    ring.stop()
    assert ring_threads() == []
    ring.stop()
    engine.stop()
    with pytest.raises(RuntimeError, match="stopped before"):
        ring.wait(29)
    assert not engine.ready[taken + 2].is_set()


def test_a_ring_that_never_started_stops():
    Engine([[]], 1, 10, 1).ring(3).stop()


def test_who_waits_is_woken_by_a_stop_elsewhere():
    groups = layers(4)
    ring = Engine(groups, 1, 700, 4).ring(2)
    ring.start()
    timer = threading.Timer(0.05, ring.stop)
    timer.start()
    with pytest.raises(RuntimeError, match="stopped before"):
        ring.wait(1)  # which needs group 0 to be released
    timer.join()


@pytest.mark.parametrize("fails", ("copy", "upload", "prepare", "contiguous"))
def test_what_a_thread_fails_with_reaches_the_consumer(fails, monkeypatch):
    groups = layers(6)
    engine = Engine(groups, 2, 700, 4)
    calls = []

    def fail(*_):
        calls.append(1)
        if len(calls) > 1:
            raise MemoryError("as if")
        return lambda: None

    if fails == "copy":
        move = ctypes.memmove
        monkeypatch.setattr(chunk_ring.ctypes, "memmove", lambda *at: (fail(), move(*at)))
    elif fails == "contiguous":

        class Failing:
            nbytes = 40

            def contiguous(self):
                raise MemoryError("as if")

        groups[3] = [Failing()]
    elif fails == "upload":
        engine.upload = fail
    else:
        engine.enter = fail
    ring = engine.ring(3)
    ring.start()
    try:
        with pytest.raises(MemoryError, match="as if"):
            for index in range(6):
                ring.wait(index)
                ring.release()
        with pytest.raises(MemoryError, match="as if"):
            ring.wait(5)
    finally:
        ring.stop()
        engine.stop()


def test_threads_that_cannot_start(monkeypatch):
    ring = Engine(layers(2), 1, 700, 4).ring(3)
    start = threading.Thread.start
    started = []

    def refuse(thread):
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="can't start"):
        ring.start()
    ring.stop()


# --------------------------------------------------------------------------------- without a card


def test_on_the_cpu_tensors_are_given_themselves():
    groups = [*layers(3), []]
    with WeightStream(groups, CPU) as stream:
        for _ in range(2):
            walked = iter(stream)
            assert next(walked)[0] is groups[0][0]
            assert stream.seconds is None
            rest = list(walked)
            assert all(a is b for a, b in zip(rest[0], groups[1], strict=True))
            assert (len(rest), rest[-1]) == (3, [])
    assert (stream.bytes, stream.seconds, stream.pinned, stream.note) == (0, 0.0, False, "")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ring_bytes": GIB + 1}, "use 1.0 GiB at most"),
        ({"ring_bytes": 0}, "out of range"),
        ({"chunk_bytes": 0}, "do not fit"),
        ({"chunk_bytes": 64 * MIB, "ring_bytes": 32 * MIB}, "do not fit a ring of 33554432 bytes"),
        ({"threads": 0}, "at least one thread"),
        ({"ahead": -1}, "-1 groups ahead"),
    ],
)
def test_settings_out_of_range(settings, message):
    with pytest.raises(SettingError, match=message):
        WeightStream([], CPU, **settings)
    WeightStream([], CPU, ring_bytes=GIB, chunk_bytes=GIB, threads=1, ahead=0)


def test_devices_that_are_none():
    with pytest.raises(SettingError, match="to mps: use a CUDA card or the CPU"):
        WeightStream([], torch.device("mps"))
    with pytest.raises(SettingError, match="a tensor on meta cannot"):
        WeightStream([[torch.empty(3, device="meta")]], CPU)
    with pytest.raises(SettingError, match="nothing is uploaded to cpu"):
        measure_pinned_bandwidth(CPU)


def refuse_above(most, asked, error=RuntimeError):
    """An allocator that has `most` bytes for all that is held at a time."""
    held = []

    def empty(shape, **_):
        size = torch.Size((shape,) if isinstance(shape, int) else shape).numel()
        asked.append(size)
        if sum(found.nbytes for ref in held if (found := ref()) is not None) + size > most:
            raise error("as if")
        tensor = REAL_EMPTY(shape, dtype=torch.uint8)
        held.append(weakref.ref(tensor))
        return tensor

    return empty


@pytest.mark.parametrize(
    ("most", "shape"), [(GIB, (8, 8)), (100, (8, 8)), (20, (2, 8)), (7, (1, 4)), (3, None)]
)
def test_pinned_memory_that_is_refused_is_halved(most, shape, monkeypatch):
    monkeypatch.setattr(pinned_memory, "LEAST_BYTES", 4)
    asked = []
    monkeypatch.setattr(pinned_memory, "_bytes", refuse_above(most, asked))
    slots = pin_slots(64, 8)
    assert (None if slots is None else slots.shape) == shape
    assert asked == [64, 32, 16, 8, 4][: len(asked)]
    assert len(asked) == {GIB: 1, 100: 1, 20: 3, 7: 5, 3: 5}[most]


def test_a_small_ring_is_not_tried_smaller(monkeypatch):
    asked = []
    monkeypatch.setattr(pinned_memory, "_bytes", refuse_above(0, asked))
    assert pin_slots(LEAST_BYTES - 1, 100) is None
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("most", "sizes"),
    [
        (GIB, [RING_BYTES]),
        (RING_BYTES // 2, [RING_BYTES, RING_BYTES // 2]),
        (0, [RING_BYTES, RING_BYTES // 2, LEAST_BYTES]),
    ],
)
def test_a_reserved_ring_is_left_to_torch(most, sizes, monkeypatch):
    asked, pinned = [], []
    allocate = refuse_above(most, asked)

    def empty(shape, pin_memory):
        assert pin_memory
        assert shape[1] == CHUNK_BYTES
        pinned.append(weakref.ref(tensor := allocate(shape)))
        return tensor

    monkeypatch.setattr(pinned_memory, "_bytes", empty)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert reserve_ring() == (most > 0)
    assert asked == sizes
    assert [found() for found in pinned] == [None] * (most > 0)


def test_without_a_card_no_ring_is_reserved(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(weight_stream, "pin_slots", lambda *_: pytest.fail("something was pinned"))
    assert reserve_ring() is False


@pytest.mark.parametrize(("most", "count"), [(300, 3), (299, 1), (100, 1)])
def test_staging_that_does_not_fit_is_one_buffer(most, count, monkeypatch):
    empty = refuse_above(most, [], torch.cuda.OutOfMemoryError)
    monkeypatch.setattr(torch, "empty", empty)
    assert len(allocate_staging(100, 3, CPU)) == count


def test_staging_without_room_for_one_group(monkeypatch):
    asked = []
    monkeypatch.setattr(torch, "empty", refuse_above(99, asked, torch.cuda.OutOfMemoryError))
    with pytest.raises(torch.cuda.OutOfMemoryError):
        allocate_staging(100, 3, CPU)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        allocate_staging(100, 1, CPU)
    assert asked == [100, 100, 100]


def test_staging_can_be_written_to_outside_inference_mode():
    with torch.inference_mode():
        (buffer,) = allocate_staging(8, 1, CPU)
    buffer.fill_(3)
    assert not buffer.is_inference()


def test_pinned_memory_is_given_back_where_torch_can(monkeypatch):
    calls = []
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: calls.append(1), raising=False)
    assert release_pinned()
    assert calls == [1]
    monkeypatch.delattr(torch._C, "_host_emptyCache")
    assert not release_pinned()


# --------------------------------------------------------------------------------------- on a card

on_card = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA card")
# Rings so small that every slot and buffer is used many times.
SMALL = {"ring_bytes": 64 * 1024, "chunk_bytes": 5000}


def check_pass(groups, stream, pause=0):
    """Reads each group on the card, and only then lets the host look at what was read."""
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


@pytest.mark.cuda
@on_card
@pytest.mark.parametrize("ahead", (0, 2))
@pytest.mark.parametrize("threads", (1, 8))
@pytest.mark.parametrize("inference", (False, True))
def test_values_on_the_card(ahead, threads, inference):
    with torch.inference_mode(inference):
        groups = layers(40) + odd_groups() + layers(7)
        with WeightStream(groups, CUDA, **SMALL, threads=threads, ahead=ahead) as stream:
            for _ in range(2):
                check_pass(groups, stream)
                assert stream.seconds > 0
    assert stream.pinned
    assert stream.note == ""
    assert stream.bytes == sum(tensor.nbytes for tensors in groups for tensor in tensors)


@pytest.mark.cuda
@on_card
@pytest.mark.parametrize("other_stream", (False, True))
def test_a_consumer_that_is_slower_than_the_link(other_stream):
    groups = layers(30, 200, 300)
    with torch.cuda.stream(torch.cuda.Stream() if other_stream else None):
        check_pass(groups, WeightStream(groups, CUDA), pause=2_000_000)
        check_pass(groups, WeightStream(groups, CUDA, **SMALL), pause=2_000_000)


@pytest.mark.cuda
@on_card
def test_a_link_that_is_slower_than_the_consumer():
    groups = layers(12, 3000, 3001)
    check_pass(groups, WeightStream(groups, CUDA, ring_bytes=8 * MIB, chunk_bytes=MIB))


@pytest.mark.cuda
@on_card
def test_staging_that_queued_work_still_reads():
    """The allocator gives memory again that kernels in the queue have yet to read."""
    groups = layers(4, 1000, 1000)
    size = max(lay_out(tensors).bytes for tensors in groups)
    old = torch.full((size,), 7, dtype=torch.uint8, device=CUDA)
    torch.cuda._sleep(200_000_000)
    read = old.clone()
    del old
    check_pass(groups, WeightStream(groups, CUDA, ahead=0))
    assert (read == 7).all()


@pytest.mark.cuda
@on_card
def test_what_lies_on_the_card_is_given_itself():
    there = torch.ones(5, device=CUDA)
    groups = [[random(9), there, random(3)], [there]]
    with WeightStream(groups, CUDA) as stream:
        for index, tensors in enumerate(stream):
            assert any(tensor is there for tensor in tensors)
            assert all(map(same, tensors, groups[index]))
    assert stream.bytes == 12


@pytest.mark.cuda
@on_card
@pytest.mark.parametrize("error", (torch.cuda.OutOfMemoryError, KeyboardInterrupt))
def test_a_consumer_that_fails(error):
    groups = layers(20, 500, 500)
    gc.collect()
    before = torch.cuda.memory_allocated()
    try:
        with WeightStream(groups, CUDA) as stream:
            for index, _ in enumerate(stream):
                if index == 5:
                    raise error("as if")
        pytest.fail("the error was swallowed")
    except error:
        assert ring_threads() == []
        assert stream.seconds is None
        del _
        assert torch.cuda.memory_allocated() <= before
    check_pass(groups, stream)


@pytest.mark.cuda
@on_card
def test_an_iterator_that_is_dropped_ends_its_pass():
    groups = layers(20)
    walked = iter(WeightStream(groups, CUDA, **SMALL))
    next(walked)
    assert ring_threads() != []
    del walked
    assert ring_threads() == []


@pytest.mark.cuda
@on_card
def test_an_iterator_of_a_pass_that_was_closed():
    stream = WeightStream(layers(20), CUDA, **SMALL)
    walked = iter(stream)
    next(walked)
    stream.close()
    with pytest.raises(RuntimeError, match="closed before"):
        next(walked)
    second = iter(stream)
    next(second)
    check_pass(layers(20), stream)
    with pytest.raises(RuntimeError, match="closed before"):
        next(second)


@pytest.mark.cuda
@on_card
def test_without_pinned_memory(monkeypatch):
    monkeypatch.setattr(stream_pass, "pin_slots", lambda *_: None)
    groups = layers(20) + odd_groups()
    stream = WeightStream(groups, CUDA)
    check_pass(groups, stream, pause=1_000_000)
    assert not stream.pinned
    assert "No host memory could be pinned" in stream.note
    assert stream.seconds > 0


@pytest.mark.cuda
@on_card
def test_with_less_pinned_memory(monkeypatch):
    empty = pinned_memory._bytes

    def refuse(shape, **where):
        if torch.Size(shape).numel() > 64 * MIB:
            raise RuntimeError("as if")
        return empty(shape, **where)

    monkeypatch.setattr(pinned_memory, "_bytes", refuse)
    groups = layers(20)
    stream = WeightStream(groups, CUDA)
    check_pass(groups, stream)
    assert stream.pinned
    assert stream.note == "Only 64 MiB of host memory could be pinned, not 128."


@pytest.mark.cuda
@on_card
def test_with_one_staging_buffer(monkeypatch):
    calls = []

    card = torch.device("cuda", torch.cuda.current_device())

    def refuse(*args, **settings):
        if settings.get("device") == card:
            calls.append(1)
            if len(calls) == 2:
                raise torch.cuda.OutOfMemoryError("as if")
        return REAL_EMPTY(*args, **settings)

    groups = layers(20)
    monkeypatch.setattr(torch, "empty", refuse)
    stream = WeightStream(groups, CUDA)
    check_pass(groups, stream, pause=1_000_000)
    assert len(calls) == 3
    assert "room for one group only" in stream.note


@pytest.mark.cuda
@on_card
def test_without_room_on_the_card(monkeypatch):
    def refuse(*_):
        raise torch.cuda.OutOfMemoryError("as if")

    monkeypatch.setattr(stream_pass, "allocate_staging", refuse)
    with pytest.raises(torch.cuda.OutOfMemoryError), WeightStream(layers(3), CUDA) as stream:
        next(iter(stream))


@pytest.mark.cuda
@on_card
def test_the_ring_is_pinned_once_and_can_be_given_back():
    if not hasattr(torch.cuda, "host_memory_stats"):
        pytest.skip("this torch does not tell what it has pinned")
    groups = layers(20)
    check_pass(groups, WeightStream(groups, CUDA))
    pinned = torch.cuda.host_memory_stats()["num_host_alloc"]
    check_pass(groups, WeightStream(groups, CUDA))
    assert torch.cuda.host_memory_stats()["num_host_alloc"] == pinned
    assert release_pinned()
    assert torch.cuda.host_memory_stats()["allocated_bytes.current"] < RING_BYTES


@pytest.mark.cuda
@on_card
def test_a_first_pass_finds_the_ring_that_was_reserved():
    if not hasattr(torch.cuda, "host_memory_stats"):
        pytest.skip("this torch does not tell what it has pinned")
    release_pinned()
    assert reserve_ring()
    pinned = torch.cuda.host_memory_stats()["num_host_alloc"]
    groups = layers(20)
    check_pass(groups, WeightStream(groups, CUDA))
    assert torch.cuda.host_memory_stats()["num_host_alloc"] == pinned


@pytest.mark.cuda
@on_card
def test_a_copy_that_fails_during_a_pass(monkeypatch):
    groups = layers(20)
    gc.collect()
    before = torch.cuda.memory_allocated()
    with WeightStream(groups, CUDA, **SMALL) as stream:
        walked = iter(stream)
        next(walked)

        def fail(*_):
            raise MemoryError("as if")

        monkeypatch.setattr(chunk_ring.ctypes, "memmove", fail)
        with pytest.raises(MemoryError, match="as if"):
            list(walked)
    assert ring_threads() == []
    del walked
    assert torch.cuda.memory_allocated() <= before


@pytest.mark.cuda
@on_card
def test_pinned_bandwidth(monkeypatch):
    assert measure_pinned_bandwidth(CUDA, 16 * MIB) > 0

    def refuse(*_, **__):
        raise RuntimeError("as if")

    monkeypatch.setattr(pinned_memory, "_bytes", refuse)
    with pytest.raises(UnavailableError, match="16 MiB of host memory cannot be pinned"):
        measure_pinned_bandwidth(CUDA, 16 * MIB)
