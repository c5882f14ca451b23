"""Links between cards: faults that a verification finds, what is copied then, and what is said."""

import re
from itertools import islice
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from faulty_copies import FAULTS, CpuOperations, between_cards
from test_copies import Mark, Streams, orders

from qwen_l40s.cli import doctor
from qwen_l40s.errors import UnavailableError
from qwen_l40s.machine import links
from qwen_l40s.machine.card import InstalledCard, InstalledCards, State
from qwen_l40s.machine.links import DAMAGED, NO_ACCESS, NO_MEMORY, Link

CARDS = [torch.device("cpu", index) for index in range(3)]
PEER, HOST = (20, 19), (10, 9)


@pytest.fixture(autouse=True)
def small_copies(monkeypatch):
    monkeypatch.setattr(links, "PATTERN_BYTES", 4096)
    monkeypatch.setattr(links, "MEASURED_BYTES", 4096)


def verified(operations):
    link = Link(*CARDS[:2], operations)
    link.verify()
    return link


def arrives(link):
    """Whether what the link's routes copy arrives, both ways."""
    for source in link.cards:
        sent, target = torch.arange(100), torch.zeros(100, dtype=torch.int64)
        link.route(source).copy([(sent, target)])
        if not torch.equal(sent, target):
            return False
    return True


# ------------------------------------------------------------------------------------ verification


def test_copies_that_arrive_go_from_card_to_card():
    link = verified(CpuOperations())
    assert (link.peer, link.reason, link.damaged, link.warning) == (True, "", False, "")
    there, back = map(link.route, link.cards)
    assert there.peer and (there.source, there.target) == (back.target, back.source) == link.cards
    assert link.gbps > 0 and arrives(link)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("runs", [0, 2])  # before
def test_a_link_that_loses_copies_goes_through_host_memory(fault, runs):
    for good in 0, 1:  # copies that arrive: the way there, and back
        operations = between_cards(fault)(10**9)
        link = Link(*CARDS[:2], operations)
        for _ in range(runs):
            link.verify()
            assert link.peer
        operations.start = operations.copies + good
        link.verify()
        assert (link.damaged, link.reason, link.peer) == (True, DAMAGED, False), good
        assert not link.route(CARDS[0]).peer and arrives(link) and link.gbps > 0
        operations.start = 10**9
        link.verify()
        assert not link.peer  # one that fails sometimes is not tried again


def test_a_pattern_is_compared_once_it_is_said_to_have_come():
    """What is filled and compared here is so at once; copies begin when somebody waits."""
    for choose in islice(orders(), 3):
        streams = Streams(choose)
        for queue in streams.home.values():
            queue.wait_event = lambda event: event.synchronize()
        streams.event = lambda timed=False, streams=streams: Timed(streams)
        assert verified(streams).peer


class Timed(Mark):
    def record(self, queue):
        super().record(queue)
        if queue in self.streams.home.values():
            queue.step()

    def elapsed_time(self, end):
        return 1.0


def test_nothing_is_verified_without_access_or_memory(monkeypatch):
    closed = CpuOperations()
    closed.can_access = lambda source, target: False
    link = verified(closed)
    assert (link.peer, link.reason, link.damaged) == (False, NO_ACCESS, False)
    assert link.gbps > 0 and arrives(link)

    def refuse(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "arange", refuse)
        patch.setattr(torch, "zeros", refuse)
        link = verified(CpuOperations())
        assert (link.reason, link.damaged, link.gbps) == (NO_MEMORY, False, 0)
    link.verify()  # there is room now
    assert link.peer and link.gbps > 0


def test_without_pinned_memory():
    def refuse(size):
        raise UnavailableError("no host memory")

    operations = CpuOperations()
    operations.pinned = refuse
    link = verified(operations)
    assert link.peer and link.gbps > 0
    operations.copy = lambda *_: None
    link.verify()
    assert link.warning and link.gbps == 0
    with pytest.raises(UnavailableError, match="no host memory"):
        link.route(CARDS[0])


# ------------------------------------------------------------------------------- in a process


@pytest.fixture
def machine(monkeypatch):
    """Three cards of which `lost` loses copies; `tried` lists the pairs that are verified."""
    known = SimpleNamespace(tried=[], lost=(), error=None, reason="")

    class Found(Link):
        def verify(self):
            known.tried.append(tuple(card.index for card in self.cards))
            if known.error:
                raise known.error
            self.damaged = known.tried[-1] == known.lost
            self.reason = DAMAGED if self.damaged else known.reason
            self._speeds[self.peer] = PEER if self.peer else HOST

    monkeypatch.setattr(links, "Link", Found)
    monkeypatch.setattr(links, "_links", {})
    return known


def test_a_pair_is_verified_once_until_somebody_asks_again(machine):
    one, other, third = (torch.device("cuda", index) for index in range(3))
    link = links.link_between(other, one)
    assert links.link_between(one, other) is link and link.cards == (one, other)
    assert (link.gbps, machine.tried) == (19, [(0, 1)])
    links.link_between(third, one)
    assert links.link_between(other, one, again=True) is link
    assert machine.tried == [(0, 1), (0, 2), (0, 1)]
    machine.lost = 0, 1
    assert not links.link_between(one, other, again=True).peer
    assert (link.gbps, len(machine.tried)) == (9, 4)


def test_a_card_that_does_not_answer_is_asked_again(machine):
    pair = torch.device("cuda", 0), torch.device("cuda", 1)
    machine.error = RuntimeError("CUDA error: unspecified launch failure")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="unspecified"):
            links.link_between(*pair)
    machine.error = None
    assert links.link_between(*pair).peer


# ------------------------------------------------------------------------------------ what is said


def test_a_machine_that_loses_copies_is_told(machine):
    machine.lost = 0, 1
    link = links.link_between(torch.device("cuda", 1), torch.device("cuda", 0))
    assert all(it in link.warning for it in ("cuda:0 and cuda:1", "`iommu=pt`", "ACS"))


def checks_of(count):
    cards = (InstalledCard("L40S", (8, 9), 2**35, uuid) for uuid in "abc"[:count])
    return list(doctor._link_checks(InstalledCards(tuple(cards))))


def test_doctor_has_a_line_for_each_pair(machine, monkeypatch):
    assert checks_of(0) == checks_of(1) == machine.tried == []
    (good,) = checks_of(2)
    assert (good.name, good.state, good.why.remedy) == ("GPUs 0 and 1", State.USABLE, "")
    assert re.findall(r"\d+\.0", good.why.fact) == ["20.0", "19.0"]
    machine.lost = 0, 2
    _, bad, _ = checks_of(3)
    assert (bad.name, bad.state) == ("GPUs 0 and 2", State.LIMITED)
    assert "`iommu=pt`" in bad.why.remedy and re.findall(r"\d+\.0", bad.why.fact) == ["10.0", "9.0"]


# ---------------------------------------------------------------------------------- on true cards


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="torch sees no second card")
def test_two_cards(monkeypatch):
    monkeypatch.undo()
    link = Link(torch.device("cuda", 0), torch.device("cuda", 1))
    link.verify()
    assert not link.damaged and (link.peer or link.reason == NO_ACCESS)
    assert link.gbps > 0 and isinstance(link._operations, links.CardOperations)
    link.damaged, link.reason = True, DAMAGED
    link.verify()
    assert link.gbps > 0
