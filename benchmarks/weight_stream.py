"""A pass over the modulation weights of Qwen-Image, from a file through the pinned ring.

    python benchmarks/weight_stream.py               13.6 GB in /dev/shm, some minutes
    python benchmarks/weight_stream.py --file PATH   in a file of that name, from the page cache
    python benchmarks/weight_stream.py --file PATH --cold   first passes from its disk instead
    python benchmarks/weight_stream.py --gib 2       fewer layers

The file is made anew and removed at the end. A layer is used by a GEMM of 60 rows. "first" is a
pass over a mapping that no one has used yet, and pins its ring; "again" is the next one. Both are
seconds until the card has finished, and the factor is to what the bytes would take at the bandwidth
of pinned memory. "ring" is what the ring's threads bring to it where nothing is uploaded. The last
line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import package  # noqa: F401, by which the next imports find qwen_l40s
import torch
import torch.nn.functional as F

from qwen_l40s.optimizations.chunk_ring import ChunkRing
from qwen_l40s.optimizations.hardware import GIB, MIB
from qwen_l40s.optimizations.pinned_memory import (
    measure_pinned_bandwidth,
    pin_slots,
    release_pinned,
)
from qwen_l40s.optimizations.weight_stream import CHUNK_BYTES, RING_BYTES, THREADS, WeightStream

WIDTH, OUT = 3072, 6 * 3072
LAYER_BYTES = 2 * (OUT * WIDTH + OUT)
LAYERS = 120
ROWS = 60
THREAD_COUNTS = (1, 2, 4, 8, 12, 16)
CHUNKS = (4, 8, 16, 32)
RINGS = (32, 64, 128, 256, 512, 1024)

Layers = list[list[torch.Tensor]]


class Setting(NamedTuple):
    """What a pass is given; sizes in bytes."""

    threads: int = THREADS
    chunk: int = CHUNK_BYTES
    ring: int = RING_BYTES


def settings() -> list[Setting]:
    """The defaults, then each of them replaced, then larger chunks with more threads and smaller
    ones with smaller rings.
    """
    found = [Setting()]
    found += [Setting(threads=count) for count in THREAD_COUNTS[2:]]
    found += [Setting(chunk=chunk * MIB) for chunk in CHUNKS]
    found += [Setting(ring=ring * MIB) for ring in RINGS[1:]]
    found += [Setting(threads=count, chunk=16 * MIB) for count in THREAD_COUNTS[3:]]
    found += [Setting(chunk=4 * MIB, ring=ring * MIB) for ring in RINGS[:3]]
    return list(dict.fromkeys(found))


def write_layers(path: Path, layers: int) -> None:
    """Layers that differ: the same random values, which begin at another place in each."""
    values = torch.randn(LAYER_BYTES // 2).to(torch.bfloat16).view(torch.uint8).numpy().data
    with path.open("wb") as file:
        for layer in range(layers):
            begin = layer * 1024
            file.write(values[begin:])
            file.write(values[:begin])
        file.flush()
        os.fsync(file.fileno())  # what is not on the disk stays in the page cache


def drop_from_cache(path: Path) -> None:
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def map_layers(path: Path, layers: int, cold: bool = False) -> Layers:
    """The weight and the bias of each layer, in a mapping of their own.

    Nobody may hold an earlier mapping where it is cold: the page cache keeps what is mapped.
    """
    if cold:
        drop_from_cache(path)
    size = layers * LAYER_BYTES // 2
    mapped = torch.from_file(str(path), shared=False, size=size, dtype=torch.bfloat16)
    return [
        [layer[: OUT * WIDTH].view(OUT, WIDTH), layer[OUT * WIDTH :]]
        for layer in mapped.view(layers, -1)
    ]


def ring_speeds(
    path: Path, layers: int, cold: bool, slots: torch.Tensor, threads: int
) -> list[float]:
    """GB/s of a first and a second pass to the ring alone."""
    groups = map_layers(path, layers, cold)
    speeds = []
    for _ in range(2):
        ring = ChunkRing(groups, slots, lambda *_: lambda: None, layers, threads)
        begin = time.perf_counter()
        ring.start()
        try:
            for index in range(layers):
                ring.wait(index)
            speeds.append(layers * LAYER_BYTES / (time.perf_counter() - begin) / 1e9)
        finally:
            ring.stop()
    return speeds


def ring_rows(path: Path, layers: int, cold: bool) -> Iterator[dict]:
    """What threads bring to the ring, in GB/s."""
    slots = pin_slots(RING_BYTES, CHUNK_BYTES)
    if slots is None:
        print("# no memory can be pinned")
        return
    print(f"\n{'ring':18}{'first GB/s':>12}{'again GB/s':>12}")
    for threads in THREAD_COUNTS:
        first, again = ring_speeds(path, layers, cold, slots, threads)
        print(f"{f'  {threads} threads':18}{first:12.1f}{again:12.1f}")
        yield {"ring": threads, "first_gb_s": first, "again_gb_s": again}


def pass_figures(
    path: Path, layers: int, cold: bool, device: torch.device, setting: Setting
) -> dict:
    """A first and a second pass under a setting."""
    rows = torch.randn(ROWS, WIDTH, device=device).to(torch.bfloat16)
    F.linear(rows, rows.new_zeros(OUT, WIDTH), rows.new_zeros(OUT))  # loads the GEMM
    groups = map_layers(path, layers, cold)
    figures = {}
    for name in ("first", "again"):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        with WeightStream(
            groups,
            device,
            threads=setting.threads,
            chunk_bytes=setting.chunk,
            ring_bytes=setting.ring,
        ) as stream:
            for weight, bias in stream:
                F.linear(rows, weight, bias)
        torch.cuda.synchronize()
        figures[f"{name}_s"] = time.perf_counter() - begin
        figures[f"{name}_upload_s"] = stream.seconds
    return {**figures, "note": stream.note}


def pass_rows(
    path: Path, layers: int, device: torch.device, pinned: float, cold: bool
) -> Iterator[dict]:
    """Whole passes under each setting."""
    size = layers * LAYER_BYTES
    print(f"\n{'threads':>7}{'chunk MiB':>11}{'ring MiB':>10}", end="")
    print(f"{'first s':>10}{'again s':>10}{'GB/s':>8}{'first x':>10}{'again x':>9}")
    for setting in settings():
        release_pinned()
        found = pass_figures(path, layers, cold, device, setting)
        first, again = found["first_s"], found["again_s"]
        factors = first * pinned / size, again * pinned / size
        print(f"{setting.threads:7}{setting.chunk // MIB:11}{setting.ring // MIB:10}", end="")
        print(f"{first:10.3f}{again:10.3f}{size / again / 1e9:8.1f}", end="")
        print(f"{factors[0]:10.2f}{factors[1]:9.2f}  {found['note']}")
        row = {**setting._asdict(), **found}
        yield {**row, "first_factor": factors[0], "again_factor": factors[1]}


def wrong_layers(path: Path, layers: int, device: torch.device) -> int:
    """How many layers do not arrive as torch's own upload brings them."""
    wrong, groups = 0, map_layers(path, layers)
    with WeightStream(groups, device) as stream:
        for got, group in zip(stream, groups, strict=True):
            expected = [tensor.to(device) for tensor in group]
            wrong += not all(map(torch.equal, got, expected))
    return wrong


def measure(path: Path, layers: int, device: torch.device, cold: bool) -> dict:
    pinned = measure_pinned_bandwidth(device)
    print(f"\npinned memory to the card: {pinned / 1e9:.1f} GB/s")
    least = layers * LAYER_BYTES / pinned
    print(f"{layers} layers, {layers * LAYER_BYTES / 1e9:.2f} GB: {least:.3f} s at that bandwidth")
    rows = [*ring_rows(path, layers, cold), *pass_rows(path, layers, device, pinned, cold)]
    for row in rows:
        row |= {name: float(f"{x:.4g}") for name, x in row.items() if isinstance(x, float)}
    wrong = wrong_layers(path, layers, device)
    print(f"\nlayers that arrived wrong: {wrong}")
    sizes = {"layers": layers, "bytes": layers * LAYER_BYTES, "pinned_gb_s": pinned / 1e9}
    return {**sizes, "cold": cold, "wrong_layers": wrong, "rows": rows}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    size = LAYERS * LAYER_BYTES / GIB
    parser.add_argument(
        "--gib", type=float, default=size, help=f"of weights; {size:.2f} if left out"
    )
    parser.add_argument("--file", type=Path, default=Path("/dev/shm/weight_stream.bin"))
    parser.add_argument(
        "--cold", action="store_true", help="drop the file from the page cache before first passes"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the last line there too")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("torch sees no CUDA card: this benchmark measures one", file=sys.stderr)
        return 2
    layers = max(1, round(arguments.gib * GIB / LAYER_BYTES))
    path = arguments.file
    if path.exists():
        print(f"{path} exists: name a file that can be made and removed", file=sys.stderr)
        return 2
    if shutil.disk_usage(path.parent).free < layers * LAYER_BYTES:
        print(f"{path.parent} lacks room: use fewer --gib or another --file", file=sys.stderr)
        return 2
    device = torch.device("cuda", torch.cuda.current_device())
    about = {"card": torch.cuda.get_device_name(device), "torch": torch.__version__}
    about |= {"cpus": os.cpu_count(), "file": str(path)}
    print(f"# {about}")
    try:
        write_layers(path, layers)
        with torch.inference_mode():
            found = measure(path, layers, device, arguments.cold)
    finally:
        path.unlink(missing_ok=True)
    line = json.dumps({**about, **found})
    if arguments.json is not None:
        arguments.json.write_text(line + "\n", encoding="utf-8")
    print(line)
    return 1 if found["wrong_layers"] else 0


if __name__ == "__main__":
    sys.exit(main())
