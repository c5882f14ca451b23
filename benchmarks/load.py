"""How long a transformer takes from a file onto the card: uncached, page-cached, from a RAM disk.

    python benchmarks/load.py --folder FOLDER [--ram-disk FOLDER] --json FILE [--blocks 60]

Writes random weights of so many blocks into the folders, in bf16 and in int8, and loads each with
this package's loader, modulation on the card, so that every byte is read. Files are taken out of
the page cache, or read into it, before; how much of them it holds is measured. Needs ComfyUI.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import shutil
import time
from pathlib import Path
from typing import Any

import package  # noqa: F401, by which the next imports find qwen_l40s
import torch
from memory_cases import TEXT_WIDTH
from memory_weights import write

from qwen_l40s.hosts.comfyui.library import import_comfyui

WHAT = ("bf16", "int8")
SOURCES = ("disk", "page cache", "ram disk")
BLOCK = 2**24
CARD = torch.device("cuda")


def cached_share(path: Path) -> float:
    """The part of a file that the page cache holds."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mincore.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p
    size = path.stat().st_size
    pages = -(-size // mmap.PAGESIZE)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), size) as mapped:
        start = ctypes.c_char.from_buffer(mapped)
        found = ctypes.create_string_buffer(pages)
        failed = libc.mincore(ctypes.addressof(start), size, found)
        del start
    if failed:
        raise OSError(ctypes.get_errno(), "mincore failed")
    return sum(page & 1 for page in found.raw[:pages]) / pages


def forget(path: Path) -> None:
    """Takes a file out of the page cache."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read(path: Path) -> float:
    """Reads a file with one thread, which puts it into the page cache; returns the seconds."""
    begin = time.perf_counter()
    with path.open("rb", buffering=0) as file:
        while file.read(BLOCK):
            pass
    return time.perf_counter() - begin


def make(folder: Path, blocks: int) -> dict[str, Path]:
    """The files, written where they are missing."""
    from qwen_l40s.loaders.quantized_file import write_quantized
    from qwen_l40s.loaders.quantized_plan import plan_quantized
    from qwen_l40s.loaders.transformer_tensors import expected_tensors
    from qwen_l40s.planning.memory import TransformerShape

    paths = {what: folder / f"random_{blocks}_blocks_{what}.safetensors" for what in WHAT}
    shape = TransformerShape(blocks, 3072, 24, 128, TEXT_WIDTH, 64, 64)
    write(paths["bf16"], expected_tensors(shape))
    if not paths["int8"].exists():
        write_quantized(plan_quantized(paths["bf16"], "int8", ()), paths["int8"], device=CARD)
    return paths


@torch.inference_mode()  # as execution.py runs every prompt
def load(path: Path) -> dict[str, float]:
    """Loads a file and moves it to the card."""
    import comfy.model_management

    from qwen_l40s.hosts.comfyui.model import load_model

    begin = time.perf_counter()
    patcher, _ = load_model(path, "as stored", (), "on card")
    loaded = time.perf_counter()
    comfy.model_management.load_models_gpu([patcher])
    torch.cuda.synchronize()
    done = time.perf_counter()
    comfy.model_management.unload_all_models()
    del patcher
    torch.cuda.empty_cache()
    return {"load_seconds": loaded - begin, "to_card_seconds": done - loaded}


def measure(what: str, source: str, path: Path) -> dict[str, Any]:
    """One load."""
    seconds = None
    if source == "disk":
        forget(path)
        seconds = read(path)
        forget(path)
    elif source == "page cache":
        read(path)
    share = cached_share(path)
    size = path.stat().st_size
    row = {"what": what, "source": source, "bytes": size, "cached_share": share, **load(path)}
    if seconds:
        row["disk_bytes_per_second"] = size / seconds
    print(json.dumps(row), flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--ram-disk", type=Path)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--blocks", type=int, default=60)
    args = parser.parse_args()
    import_comfyui(cpu=False, keep_on_card=False)
    files = make(args.folder, args.blocks)
    first = files["bf16"]
    read(first)
    load(first)  # the first load of a process also starts CUDA's libraries
    rows = []
    for what, path in files.items():
        for source in SOURCES:
            if source == "ram disk":
                if not args.ram_disk:
                    continue
                path = Path(shutil.copy(path, args.ram_disk))
            rows.append(measure(what, source, path))
            args.json.write_text(json.dumps({"loads": rows}, indent=1) + "\n", encoding="utf-8")
        if args.ram_disk:
            path.unlink()


if __name__ == "__main__":
    main()
