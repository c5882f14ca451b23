"""Links between cards: faults that a verification finds, what is kept of it, and what is said."""

import json
from itertools import islice
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from faulty_copies import FAULTS
from test_lanes import Mark, Streams, orders

from qwen_l40s.cli import doctor
from qwen_l40s.errors import UnavailableError
from qwen_l40s.machine import copies, links, store
from qwen_l40s.machine.card import InstalledCard, InstalledCards, State
from qwen_l40s.machine.copies import CpuOperations
from qwen_l40s.machine.links import NO_ACCESS, NO_MEMORY, SIZES, Speed, Verdict
from qwen_l40s.spec.formats import MIB

CPU = torch.device("cpu")
CARDS = [torch.device("cuda", index) for index in range(3)]
GOOD = Verdict("", False, (Speed(24, 20), Speed(23, 19)), (Speed(12, 10), Speed(11, 9)))
BAD = Verdict("7 of 200 peer copies arrived damaged", True, None, GOOD.host)


@pytest.fixture(autouse=True)
def small_copies(monkeypatch):
    monkeypatch.setattr(links, "LEAST_BYTES", SIZES[0])


def small(operations):
    """With room for copies up to 64 KB."""
    operations.free = lambda device: MIB // 4
    return operations


# ------------------------------------------------------------------------------------ verification


def test_copies_that_arrive_are_measured():
    found = links.examine(CPU, CPU, small(CpuOperations()))
    assert (found.reason, found.damaged) == ("", False)
    assert all(speed > 0 for way in (*found.direct, *found.host) for speed in way)


def test_every_fault_is_found_whenever_it_begins():
    total = 2 * len(links._plan(SIZES[3]))
    for fault in FAULTS:
        for start in (0, 1, total // 3, total - 2):
            found = links.examine(CPU, CPU, small(fault(start)))
            assert found.damaged and found.direct is None, (fault, start)
            assert f" of {total} peer copies arrived damaged, the smallest of" in found.reason


def test_sizes_grow_to_256_mb_or_to_what_is_free(monkeypatch):
    monkeypatch.setattr(links, "LEAST_BYTES", 16 * MIB)
    operations = CpuOperations()

    class Side:
        def __init__(self, device, size, operations):
            self.size = size
            if size > operations.whole:
                raise torch.OutOfMemoryError("CUDA out of memory")

    def size(*free, whole=2**40):
        operations.whole, sizes = whole, iter(free)
        operations.free = lambda device: next(sizes)
        return links._take(operations, CARDS[:2])[0].size

    monkeypatch.setattr(links, "_Side", Side)
    assert (SIZES[0], SIZES[-1]) == (1024, 256 * MIB)
    assert size(80 << 30, 40 << 30) == 256 * MIB
    assert size(80 << 30, 600 * MIB) == size(80 << 30, 80 << 30, whole=255 * MIB) == 64 * MIB
    for free, whole in ((2048, 2**40), (80 << 30, 15 * MIB)):
        with pytest.raises(torch.OutOfMemoryError):
            size(80 << 30, free, whole=whole)
    for known in SIZES:
        assert set(links._plan(known)) == {size for size in SIZES if size <= known}


def test_cards_compute_with_every_copy_that_is_verified(monkeypatch):
    queued, copied = [], []
    load = SimpleNamespace(queue=lambda count: queued.append(count), finish=queued.clear)

    class Counting(CpuOperations):
        def copy(self, target, source, size, stream):
            copied.append((len(queued), min(queued, default=0)))
            super().copy(target, source, size, stream)

        def load(self, device):
            return load

    links.examine(CPU, CPU, small(Counting()))
    plan = len(links._plan(SIZES[3]))
    assert [count for count, _ in copied[: 2 * plan]] == [2 * (i // 2 + 1) for i in range(2 * plan)]
    assert all(least > 0 for _, least in copied[: 2 * plan])
    assert not any(count for count, _ in copied[2 * plan :])  # nor where copies are timed


def test_copies_are_compared_once_they_are_said_to_be_done():
    """What is filled and compared here is so at once; copies begin when somebody waits."""
    for choose in islice(orders(), 3):
        streams = small(Streams(choose))
        for queue in streams.home.values():
            queue.wait_event = lambda event: event.synchronize()
        streams.event = lambda timed=False, streams=streams: Timed(streams)
        found = links.examine(*streams.home, streams)
        assert (found.reason, found.damaged) == ("", False)


class Timed(Mark):
    def record(self, queue):
        super().record(queue)
        if queue in self.streams.home.values():
            queue.step()

    def elapsed_time(self, end):
        return 1.0


def test_nothing_is_verified_without_access_or_memory():
    closed, full, short = (small(CpuOperations()) for _ in range(3))
    closed.can_access = lambda source, target: False
    found = links.examine(CPU, CPU, closed)
    assert (found.reason, found.damaged, found.direct) == (NO_ACCESS, False, None)
    assert found.host

    full.free = lambda device: 0
    short.load = lambda device: (_ for _ in ()).throw(torch.OutOfMemoryError("CUDA out of memory"))
    for operations in (full, short):
        found = links.examine(CPU, CPU, operations)
        assert found == Verdict(NO_MEMORY, False, None, None)


def test_peer_copies_need_no_pinned_memory():
    def refuse(size):
        raise UnavailableError("no host memory")

    operations = small(CpuOperations())
    operations.pinned = refuse
    found = links.examine(CPU, CPU, operations)
    assert found.direct and found.host is None


# ------------------------------------------------------------------------------- what is kept of it


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Three cards; `tried` lists the pairs that are verified, with `verdict`."""
    known = SimpleNamespace(boot="b1", verdict=GOOD, tried=[], file=tmp_path / "links.json")
    known.uuids = {CARDS[0]: "ff", CARDS[1]: "aa", CARDS[2]: "cc"}

    def examine(first, second):
        known.tried.append((first, second))
        return known.verdict

    def restart():
        links._known.clear()
        known.tried.clear()

    known.restart = restart
    monkeypatch.setenv("QWEN_L40S_CACHE", str(tmp_path))
    monkeypatch.setattr(links, "_known", {})
    monkeypatch.setattr(links, "examine", examine)
    monkeypatch.setattr(links, "_boot", lambda: known.boot)
    monkeypatch.setattr(links, "_uuid", lambda card: known.uuids[card])
    monkeypatch.setattr(store, "_logged", set())
    return known


def test_a_pair_is_verified_once_a_boot(machine):
    one, other = CARDS[:2]
    there, back = links.link_between(one, other), links.link_between(other, one)
    assert machine.tried == [(one, other)]
    assert there.peer and (there.gbps, there.host.both) == (20, 10)
    assert back.peer and (back.gbps, back.host.both, back.direct.alone) == (19, 9, 23)
    assert there.warning == there.reason == ""

    machine.restart()
    assert links.link_between(other, one) == back and links.link_between(one, other) == there
    assert machine.tried == []
    links.link_between(one, CARDS[2])
    assert machine.tried == [(one, CARDS[2])]

    machine.restart()  # CUDA may count the same cards in another order
    machine.uuids[one], machine.uuids[other] = machine.uuids[other], machine.uuids[one]
    assert links.link_between(other, one).direct == there.direct and machine.tried == []

    machine.restart()
    machine.boot, machine.verdict = "b2", BAD
    assert not links.link_between(one, other).peer
    assert machine.tried == [(one, other)]
    assert len(json.loads(machine.file.read_text())["measured"]) == 2


def test_a_damaged_file_is_as_good_as_none(machine):
    links.link_between(*CARDS[:2])
    whole = json.loads(machine.file.read_text())
    (key,) = whole["measured"]

    def entry(**fields):
        return json.dumps({"version": 1, "measured": {key: {**whole["measured"][key], **fields}}})

    for text in (
        *("", "{", "[]", "null", '{"version": 1, "measured": []}', '{"version": 2}', "\0"),
        *(entry(reason=value) for value in (None, 3, "lost", [])),
        *(entry(damaged=value) for value in (None, 1, "no")),
        *(entry(direct=value) for value in (None, 3, [], [[1, 2]], [[1, 2], [3, 0]], [[1], [2]])),
        *(entry(host=value) for value in (7, {}, [[1, 2, 3], [1, 2]], [["x", 1], [1, 1]])),
        entry(direct=[[1, float("nan")], [1, 1]]),
        entry(boot=None),
    ):
        machine.file.write_text(text)
        machine.restart()
        assert links.link_between(*CARDS[:2]).gbps == 20
        assert len(machine.tried) == 1, text
        assert json.loads(machine.file.read_text()) == whole, text  # and written anew


def test_what_cannot_be_kept_is_asked_again(machine):
    def tried():
        machine.restart()
        links.link_between(*CARDS[:2])
        return len(machine.tried)

    machine.verdict = Verdict(NO_MEMORY, False, None, None)
    assert tried() == 1 and not machine.file.exists()
    links.link_between(*CARDS[:2])
    assert len(machine.tried) == 2  # memory may be free by now
    machine.verdict = GOOD
    for unknown in ({"boot": ""}, {"boot": "b1", "uuids": dict.fromkeys(CARDS, "")}):
        vars(machine).update(unknown)
        assert tried() == 1 and not machine.file.exists()
        links.link_between(*CARDS[:2])
        assert len(machine.tried) == 1  # this process knows it


def test_a_folder_that_cannot_be_written(machine, monkeypatch, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("QWEN_L40S_CACHE", str(tmp_path / "file"))
    assert links.link_between(*CARDS[:2]).peer
    assert "links between cards are verified again" in caplog.text


# ------------------------------------------------------------------------------------ what is said


def test_a_machine_that_loses_copies_is_told(machine):
    machine.verdict = BAD
    link = links.link_between(CARDS[1], CARDS[0])
    assert (link.peer, link.gbps, link.host.both) == (False, 9, 9)
    assert link.warning == (
        "Copies between cuda:0 and cuda:1 lose data on this machine (IOMMU or ACS): ComfyUI's own "
        "copies between these cards would be wrong too. This package copies through host memory. "
        "Boot with `iommu=pt`, or turn ACS off in the BIOS."
    )


def test_doctor_has_a_line_for_each_pair(machine):
    cards = [InstalledCard("L40S", (8, 9), 2**35, uuid) for uuid in "abc"]
    for count in range(2):
        assert list(doctor._link_checks(InstalledCards(tuple(cards[:count])))) == []
    assert machine.tried == []

    (good,) = doctor._link_checks(InstalledCards(tuple(cards[:2])))
    assert (good.name, good.state, good.remedy) == ("cards 0 and 1", State.USABLE, "")
    assert good.reason == (
        "peer copies arrive whole; "
        "peer 0 to 1 24.0, 1 to 0 23.0, both at once 20.0 and 19.0 GB/s; "
        "through host memory 0 to 1 12.0, 1 to 0 11.0, both at once 10.0 and 9.0 GB/s"
    )
    machine.verdict = BAD
    _, bad, _ = doctor._link_checks(InstalledCards(tuple(cards)))
    assert (bad.name, bad.state) == ("cards 0 and 2", State.LIMITED)
    assert bad.remedy == "boot with `iommu=pt`, or turn ACS off in the BIOS"
    assert bad.reason == (
        "7 of 200 peer copies arrived damaged; ComfyUI's own copies between these cards would be "
        "wrong too; this package copies through host memory; "
        "through host memory 0 to 2 12.0, 2 to 0 11.0, both at once 10.0 and 9.0 GB/s"
    )


def test_doctor_goes_on_where_cards_do_not_answer(machine, monkeypatch):
    cards = InstalledCards(tuple(InstalledCard("L40S", (8, 9), 2**35, uuid) for uuid in "ab"))
    machine.verdict = Verdict(NO_MEMORY, False, None, None)
    (found,) = doctor._link_checks(cards)
    assert found.reason == (
        "copies go through host memory: too little card memory is free to verify peer copies"
    )
    assert found.remedy == "end other programs on the cards"

    def fail(first, second):
        raise RuntimeError("CUDA error: an illegal memory access\nmore")

    monkeypatch.setattr(links, "examine", fail)
    (found,) = doctor._link_checks(cards)
    assert (found.state, found.reason) == (
        State.NOT_USABLE,
        "CUDA error: an illegal memory access",
    )


# ---------------------------------------------------------------------------------- on true cards


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="torch sees no second card")
def test_two_cards():
    found = links.examine(*CARDS[:2])
    assert found.host and not found.damaged
    assert found.direct or found.reason == NO_ACCESS
    assert copies.operations_on(CARDS[0]).__class__ is copies.CardOperations
