"""Copies that go wrong without an error, as between two cards with an IOMMU or ACS."""

import ctypes

from qwen_l40s.machine.copies import CpuOperations


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
    """Leaves out the last byte."""

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
