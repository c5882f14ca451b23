"""Benchmark results as text: a line for each row, the waterfall, and the kernels of a row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .rows import BASELINE, FORWARD

Fields = dict[str, Any]
NAME_WIDTH, WIDTH = 38, 10
# (heading, field, digits)
COLUMNS = (
    ("ms", "ms", 3),
    ("p10", "ms_p10", 3),
    ("p90", "ms_p90", 3),
    ("x stock", "x_stock", 3),
    ("kernels", "kernel_ms", 3),
    ("/ kernels", "ms_over_kernels", 3),
    ("host", "host_ms", 3),
    ("TFLOP/s", "tflops", 1),
    ("GB/s", "gbs", 0),
    ("peak GiB", "peak_gib", 2),
    ("extra", "extra_gib", 2),
    ("error", "rel_error", 5),
    ("in blocks", "rel_error_blocks", 5),
)
STEPS = {row.name: row.step for row in FORWARD if row.step}
OF_OPS = ("ms", "ms_p10", "ms_p90", "tflops", "gbs")
OF_IMAGES = ("ms", "ms_p10", "ms_p90", "x_stock", "sample_ms", "decode_ms", "peak_gib", "rel_error")


def columns(what: str) -> tuple[tuple[str, str, int], ...]:
    """What a table of `ops`, `block`, `forward` or `image` shows."""
    every = (*COLUMNS[:4], ("sampling", "sample_ms", 0), ("decoding", "decode_ms", 1), *COLUMNS[4:])
    chosen = {"ops": OF_OPS, "image": OF_IMAGES}.get(what, [field for _, field, _ in COLUMNS])
    return tuple(column for column in every if column[1] in chosen)


def heading(what: str) -> str:
    """The columns' names; times are in milliseconds."""
    names = "".join(f"{name:>{WIDTH}}" for name, _, _ in columns(what))
    return f"{'':{NAME_WIDTH}}{'size':>13}{names}"


def line(what: str, row: Fields, baseline_ms: float | None) -> str:
    """One row; `baseline_ms` is stock ComfyUI's of the same size."""
    start = f"{row['name']:{NAME_WIDTH}}{place(row):>13}"
    for key, told in (("error", "failed"), ("left_out", "left out")):
        if key in row:
            return f"{start}  {told}: {row[key]}"
    shown = {**row, "x_stock": ratio(row, baseline_ms)}
    return start + "".join(_cell(shown.get(field), digits) for _, field, digits in columns(what))


def ratio(row: Fields, baseline_ms: float | None) -> float | None:
    """A row's time over stock ComfyUI's; None of what computes something else than it."""
    if not baseline_ms or "rel_error" not in row:
        return None
    return row["ms"] / baseline_ms


def place(row: Fields) -> str:
    """Size and batch: `1024x1024 b1`."""
    return f"{row['size']} b{row['batch']}"


def baseline_of(rows: Sequence[Fields], like: Fields) -> float | None:
    """Stock ComfyUI's milliseconds at the size of a row; None where it was not measured."""
    return next(
        (row["ms"] for row in rows if row["name"] == BASELINE and "ms" in row and same(row, like)),
        None,
    )


def same(row: Fields, other: Fields) -> bool:
    """Whether two rows are of one size."""
    return place(row) == place(other)


def waterfall(rows: Sequence[Fields]) -> list[str]:
    """One technique after the other, with what each gains; nothing without stock ComfyUI."""
    lines = []
    for size, here in by_place(rows).items():
        steps = [row for row in here if row["name"] in STEPS and "ms" in row]
        if len(steps) < 2 or steps[0]["name"] != BASELINE:
            continue
        lines += ["", f"{size:{NAME_WIDTH}}{'ms':>10}{'x stock':>10}{'gained':>10}"]
        exact = steps[0]["ms"]
        for row in steps:
            ms, label = row["ms"], step_label(row, steps)
            gained = "" if row is steps[0] else f"{(1 - ms / exact) * 100:+.1f} %"
            of_stock = ms / steps[0]["ms"]
            lines.append(f"  {label:{NAME_WIDTH - 2}}{ms:>10.2f}{of_stock:>10.3f}{gained:>10}")
            # fp8 and int8 both stand on what bf16 reached.
            exact = ms if "bf16" in row["name"] else exact
    return lines


def step_label(row: Fields, rows: Sequence[Fields]) -> str:
    """The technique that a row adds; its name where a step before it was not measured."""
    order = list(STEPS)
    before = order[: order.index(row["name"])]
    measured = {each["name"] for each in rows if "ms" in each and same(each, row)}
    # int8 does not stand on fp8.
    complete = measured.issuperset(name for name in before if "bf16" in name)
    return STEPS[row["name"]] if complete else row["name"]


def by_place(rows: Sequence[Fields]) -> dict[str, list[Fields]]:
    """The rows of each size, in the order in which they were measured."""
    found: dict[str, list[Fields]] = {}
    for row in rows:
        found.setdefault(place(row), []).append(row)
    return found


def kernel_lines(row: Fields) -> list[str]:
    """Where one call spent its time."""
    lines = []
    groups = {name: ms for name, ms in row.get("kernel_groups_ms", {}).items() if ms > 0}
    if groups:
        lines.append("    " + " | ".join(f"{name} {ms:.2f}" for name, ms in groups.items()))
    for kernel in row.get("kernels", ()):
        name = kernel["name"] if len(kernel["name"]) <= 88 else f"{kernel['name'][:85]}..."
        lines.append(
            f"    {kernel['ms']:9.3f} ms {kernel['count']:5} x  {kernel['group']:14} {name}"
        )
    return lines


def _cell(value: float | None, digits: int) -> str:
    if value is None:
        return " " * WIDTH
    # Times of whole passes need no thousandths.
    return f"{value:>{WIDTH}.{min(digits, 2) if abs(value) >= 10 else digits}f}"
