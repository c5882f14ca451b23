"""Reads system RAM and disk in bytes: what there is, and what full-size Qwen-Image needs."""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import sys
from collections.abc import Iterable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from ..files import user_path
from ..spec.formats import GB, GIB
from .card import Capability, State

CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")  # hierarchy:controllers:path a line (man 7 cgroups)
# bf16: two bytes for each parameter of the transformer, the text encoder and the VAE.
BF16_PARTS = int((20.430 + 8.29 + 0.127) * 2 * GB)
# The disks a rented card should come with, in GB (10**9) as they are sold: one for the system and
# packages, one for weights, their download cache and images.
SYSTEM_DISK = 40 * GB
MODEL_DISK = 80 * GB
# The smallest complete set in ComfyUI's templates: transformer and text encoder in fp8, VAE, LoRA.
FP8_SET = 32 * GB


def check_memory() -> Capability:
    """Checks system RAM: the machine's, or what a container may take of it."""
    total = total_memory()
    if total is None:
        unknown, remedy = "its size is unknown", "pip install psutil"
        return State.LIMITED.of("system RAM", unknown, remedy)
    source = "the container's limit" if total == cgroup_limit() else "the machine's"
    reason = f"{total / GIB:.1f} GiB, {source}"
    if total >= BF16_PARTS:
        return State.USABLE.of("system RAM", reason)
    reason += f": less than the full model in bf16 ({BF16_PARTS / GIB:.1f} GiB)"
    remedy = "use int8 or fp8 files; `qwen-l40s estimate` counts what they need"
    return State.LIMITED.of("system RAM", reason, remedy)


def total_memory() -> int | None:
    """Asks for the system RAM in bytes, or what a container may take of it; None where unknown."""
    physical = physical_memory()
    return physical and min(physical, cgroup_limit() or physical)


def physical_memory() -> int | None:
    """Asks for the machine's memory in bytes; None where neither the system nor psutil tells."""
    if sys.platform != "win32":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if find_spec("psutil"):
        import psutil

        return psutil.virtual_memory().total
    return None


def cgroup_limit() -> int | None:
    """Finds the least limit on this process's control groups in bytes; None without one."""
    try:
        lines = MEMBERSHIP.read_text().splitlines()
    except OSError:  # not Linux
        return None
    limits = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # version 2
            base, file = CGROUPS, "memory.max"
        elif "memory" in controllers.split(","):  # version 1
            base, file = CGROUPS / "memory", "memory.limit_in_bytes"
        else:
            continue
        group = base / path.lstrip("/")
        # A limit on a group binds the groups inside it. A container mounts only part of the path.
        limits += _limits(
            folder / file for folder in (group, *group.parents) if folder.is_relative_to(base)
        )
    return min(limits, default=None)


def available_memory() -> int:
    """Asks for the system RAM in bytes that can be had now: the machine's, or what a container's
    limit leaves. psutil reports the memory of the machine, inside a container too.
    """
    import psutil

    available = psutil.virtual_memory().available
    left = cgroup_available()
    return available if left is None else min(available, left)


def cgroup_available() -> int | None:
    """Asks for the bytes that a container's limit (cgroup version 2) leaves; None without one."""
    try:
        limit = int((CGROUPS / "memory.max").read_text())
    except (OSError, ValueError):  # no such file, or the word "max"
        return None
    used = int((CGROUPS / "memory.current").read_text())
    stat = dict(line.split() for line in (CGROUPS / "memory.stat").read_text().splitlines())
    # Page cache counts as used, and the kernel gives it back on demand, recently read or not.
    return limit - used + int(stat["inactive_file"]) + int(stat["active_file"])


class MappedPages:
    """The pages of mapped files, which stay in the system's cache when they are given back."""

    def __init__(self, files: Iterable[Path]) -> None:
        names = {str(file.resolve()) for file in files}
        self._ranges: list[tuple[int, int]] = []
        with suppress(OSError), open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
            for line in maps:  # address perms offset dev inode path (man 5 proc)
                addresses, *_, path = line.rstrip("\n").split(maxsplit=5)
                if path in names:
                    start, end = addresses.split("-")
                    self._ranges.append((int(start, 16), int(end, 16)))

    def give_back(self, address: int, count: int) -> None:
        """Gives back the whole pages of `count` bytes from an address on."""
        page = mmap.PAGESIZE
        first, last = -(-address // page) * page, (address + count) // page * page
        if first < last and any(start <= first and last <= end for start, end in self._ranges):
            size = ctypes.c_size_t(last - first)
            ctypes.CDLL(None).madvise(ctypes.c_void_p(first), size, mmap.MADV_DONTNEED)


def _limits(files: Iterable[Path]) -> list[int]:
    found = []
    for file in files:
        try:
            text = file.read_text().strip()
        except OSError:
            continue
        # Version 2 writes "max" for no limit, version 1 a number beyond any machine.
        if text.isdigit():
            found.append(int(text))
    return found


def check_system_disk() -> Capability:
    """Checks the disk that Python's packages lie on by its whole size: they are already in it."""
    total = shutil.disk_usage(sys.prefix).total
    reason = (
        f"{total / GIB:.0f} GiB in total, {SYSTEM_DISK / GIB:.0f} GiB recommended, at {sys.prefix}"
    )
    if total >= SYSTEM_DISK:
        return State.USABLE.of("system disk", reason)
    return State.LIMITED.of("system disk", reason, "rent a machine with a larger container disk")


def check_model_disk(folder: Path, more: Iterable[Path] = ()) -> Capability:
    """Checks what is free and what is already there of the disk of models, against `MODEL_DISK`."""
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    there = sum(map(qwen_bytes, {folder, *more}))
    reason = f"{free / GIB:.0f} GiB free and {there / GIB:.0f} GiB of Qwen files"
    advised = f"{MODEL_DISK / GIB:.0f} GiB recommended, at {folder}"
    if free + there >= MODEL_DISK:
        return State.USABLE.of("model disk", f"{reason}, {advised}")
    if free + there >= FP8_SET:
        state, room = State.LIMITED, f"room for the fp8 files only ({FP8_SET / GIB:.0f} GiB)"
    else:
        state, room = State.NOT_USABLE, "too little for the fp8 files"
    remedy = "free disk space, or name a folder on a larger disk with --models"
    return state.of("model disk", f"{reason}: {room}; {advised}", remedy)


def qwen_bytes(folder: Path) -> int:
    """Sums up the files whose path below `folder` has "qwen" in it; links are not followed."""
    total = 0
    for base, _, names in os.walk(folder):
        for name in names:
            file = Path(base, name)
            if "qwen" in str(file.relative_to(folder)).lower() and not file.is_symlink():
                total += file.stat().st_size
    return total


def hugging_face_cache() -> Path:
    if find_spec("huggingface_hub") is None:
        return user_path("~/.cache/huggingface/hub")
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE)
