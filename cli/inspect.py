"""`qwen-l40s inspect PATH`: what a checkpoint is, from its header alone."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping

from ..charts.figures import file_size
from ..files import escaped, print_text
from ..loaders.checkpoint import Checkpoint, CheckpointPart, inspect_checkpoint
from ..loaders.quantization import PACKED, STORAGE_ONLY


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Says what a safetensors or GGUF file, a sharded set or a diffusers folder is and where "
        "it belongs. Reads headers only. Exit code 1 if its parts contradict each other."
    )
    parser.add_argument(
        "path", metavar="PATH", help="a .safetensors or .gguf file, a shard index or a folder"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, not a table")


def run(args: argparse.Namespace) -> int:
    checkpoint = inspect_checkpoint(args.path)
    if args.json:
        print(json.dumps(checkpoint.as_dict()))
    else:
        _print_table(checkpoint)
    return 1 if checkpoint.errors else 0


def _print_table(checkpoint: Checkpoint) -> None:
    rows = [("path", str(checkpoint.path)), ("kind", checkpoint.kind)]
    if checkpoint.pipeline:
        rows.append(("pipeline", checkpoint.pipeline))
    rows.append(("on disk", file_size(checkpoint.file_bytes)))
    _print_rows(rows)
    inside = checkpoint.kind == "diffusers folder"
    for part in checkpoint.parts:
        print()
        found = ((f"  {name}", text) for name, text in _part_rows(part, inside))
        _print_rows([(part.name, part.family), *found])


def _part_rows(part: CheckpointPart, inside: bool) -> Iterator[tuple[str, str]]:
    if part.variant:
        yield "variant", part.variant
    if part.hint:
        yield "hint", part.hint
    if part.dims:
        yield "dims", ", ".join(f"{name} {value}" for name, value in part.dims.items())
    if part.blocks is not None:
        yield "blocks", str(part.blocks)
    yield "parameters", f"{_count(part.parameters)} in {part.tensors} tensors"
    if part.dtypes:
        yield (
            "dtypes",
            ", ".join(
                f"{dtype} {file_size(entry['bytes'])} ({entry['tensors']})"
                for dtype, entry in part.dtypes.items()
            ),
        )
    quantization = part.quantization
    yield "quantized", _counts(quantization.formats) or "no"
    if quantization.formats:
        if PACKED & quantization.formats.keys() and not part.cannot_run:
            yield "loads as", "int8 ConvRot, decoded value for value"
        if STORAGE_ONLY & quantization.formats.keys() and not part.cannot_run:
            yield "loads as", "bf16, because e5m2 only stores weights"
        yield "scales", _counts(quantization.granularity)
        yield from _list("layers", quantization.quantized)
        yield from _list("kept", quantization.kept)
    if part.attention:
        yield "attention", _counts(part.attention)
    if part.folder:
        yield "belongs in", part.folder if inside else f"ComfyUI/models/{part.folder}/"
    if part.licence:
        yield "licence", part.licence
    for sentence in part.cannot_run:
        yield "cannot run", sentence
    for sentence in part.errors:
        yield "error", sentence


def _print_rows(rows: list[tuple[str, str]]) -> None:
    # Names of files and tensors come from strangers: one with a line break stays in its row.
    for name, text in rows:
        print_text(f"{name:<15} {escaped(text)}")


def _list(title: str, counts: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    for place, (name, count) in enumerate(counts.items()):
        yield "" if place else title, f"{name} ({count})"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} ({count})" for name, count in counts.items())


def _count(number: int) -> str:
    for unit, suffix in ((10**9, " B"), (10**6, " M"), (10**3, " k")):
        if number >= unit:
            return f"{number / unit:.3f}{suffix}"
    return str(number)
