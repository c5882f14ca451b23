"""Copies that go wrong without an error, as between two cards with an IOMMU or ACS."""

import ctypes

from qwen_l40s.machine.copies import CpuOperations


class Vanishing(CpuOperations):
    """Copies nothing from the `start`th copy on."""

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
    """Leaves out the last byte, as it does with whatever follows a page."""

    def lose(self, target, source, size):
        ctypes.memmove(target, source, size - 1)


class Late(Vanishing):
    """Copies what it has read as the next copy begins."""

    def __init__(self, start=0):
        super().__init__(start)
        self.waiting = None

    def copy(self, target, source, size, stream):
        if self.waiting:
            ctypes.memmove(*self.waiting)
            self.waiting = None
        super().copy(target, source, size, stream)

    def lose(self, target, source, size):
        self.waiting = target, ctypes.string_at(source, size), size
