"""Copies where cards are the processor, and some that go wrong without an error, as between two
cards with an IOMMU or ACS.
"""

import ctypes

import torch


class Now:
    def record(self, stream):
        pass

    def wait_event(self, event):
        pass

    def synchronize(self):
        pass

    def elapsed_time(self, end):
        return 1.0


class CpuOperations:
    """As `copies.CardOperations`, in host memory: a copy is done when it returns."""

    def current(self, device):
        return NOW

    def stream(self, device):
        return NOW

    def event(self, timed=False):
        return NOW

    def pinned(self, size):
        return torch.empty(size, dtype=torch.uint8)

    def copy(self, target, source, size, stream):
        ctypes.memmove(target, source, size)

    def can_access(self, source, target):
        return True

    def allow(self, source, target):
        pass


NOW = Now()


class Vanishing(CpuOperations):
    """Copies nothing, from the `start`th copy on."""

    def __init__(self, start=0):
        self.start, self.copies = start, 0

    def copy(self, target, source, size, stream):
        self.copies += 1
        if self.copies > self.start:
            self.lose(target, source, size)
        else:
            super().copy(target, source, size, stream)

    def lose(self, target, source, size):
        pass


class Partial(Vanishing):
    def lose(self, target, source, size):
        ctypes.memmove(target, source, size - 1)


class Late(Vanishing):
    """Writes what a copy has read only when two others have begun."""

    def __init__(self, start=0):
        super().__init__(start)
        self.waiting = []

    def copy(self, target, source, size, stream):
        if len(self.waiting) > 1:
            ctypes.memmove(*self.waiting.pop(0))
        super().copy(target, source, size, stream)

    def lose(self, target, source, size):
        self.waiting.append((target, ctypes.string_at(source, size), size))


FAULTS = Vanishing, Partial, Late


def stand_in_cards(monkeypatch):
    """Has "cpu", "cpu:1" and so on, whose tensors are the CPU's, copy to each other as cards do."""
    from qwen_l40s.machine import links

    monkeypatch.setattr(links, "CardOperations", CpuOperations)
    monkeypatch.setattr(links, "_links", {})
    monkeypatch.setattr(links, "MEASURED_BYTES", 4096)


def split_always(monkeypatch):
    """Has every pass split among cards that can be, whatever it gains here."""
    from qwen_l40s.optimizations.cards import team

    monkeypatch.setattr(team.SplitCost, "pays", True)
    monkeypatch.setattr(team.Team, "_alone", lambda *_: 100.0)
    monkeypatch.setattr(team.Team, "_of_text", lambda *_: 5.0)
    monkeypatch.setattr(team.Team, "_together", lambda *_: 50.0)


def between_cards(fault):
    """With copies through pinned host memory that lose nothing."""

    class Faulty(fault):
        pins = False

        def pinned(self, size):
            self.pins = True
            return super().pinned(size)

        def copy(self, target, source, size, stream):
            if self.pins:
                CpuOperations.copy(self, target, source, size, stream)
            else:
                super().copy(target, source, size, stream)

    return Faulty
