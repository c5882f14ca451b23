"""Benchmark results: rows as they come, then a waterfall, a chart and one line of JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..charts import canvas
from ..cli.output import png_bytes, write_whole
from .inputs import Inputs
from .rows import BASELINE, FORWARD

if TYPE_CHECKING:
    from PIL import Image

Fields = dict[str, Any]
SIGNIFICANT = 5
NAME_WIDTH, WIDTH = 38, 10
# (heading, field, digits)
COLUMNS = (
    ("ms", "ms", 3),
    ("p10", "ms_p10", 3),
    ("p90", "ms_p90", 3),
    ("x stock", "x_stock", 3),
    ("first", "first_ms", 0),
    ("text", "encode_ms", 1),
    ("sampling", "sample_ms", 0),
    ("decoding", "decode_ms", 1),
    ("file", "save_ms", 1),
    ("rest", "rest_ms", 1),
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
OF_OPS = ("ms", "ms_p10", "ms_p90", "tflops", "gbs")
OF_IMAGES = ("ms", "ms_p10", "ms_p90", "x_stock", "sample_ms", "decode_ms", "peak_gib", "rel_error")
ONLY_IMAGES = ("first_ms", "encode_ms", "sample_ms", "decode_ms", "save_ms", "rest_ms")
OF_PROMPTS = ("ms", "ms_p10", "ms_p90", "x_stock", *ONLY_IMAGES)
STEPS = {row.name: row.step for row in FORWARD if row.step}

# Of the chart, in pixels.
BAR, GAP = 22, 8
LABEL_WIDTH, VALUE_WIDTH = 380, 190
OURS, COMFYUI, OTHERS = canvas.GOOD, "#9aa5b1", "#6b8fb5"


class Report:
    """The results of one run.

    Args:
        conditions: what they were measured under.
        path: a JSON file that holds the rows so far; None for none.
        kernels: whether each row's kernels are printed.
    """

    def __init__(self, conditions: Fields, path: Path | None, kernels: bool) -> None:
        self.rows: list[Fields] = []
        self._conditions, self._path, self._kernels = conditions, path, kernels
        names = "".join(f"{name:>{WIDTH}}" for name, _, _ in _columns(conditions["what"]))
        print(f"{'':{NAME_WIDTH}}{'size':>13}{names}", flush=True)

    @property
    def failed(self) -> int:
        """How many rows failed."""
        return sum("error" in row for row in self.rows)

    def take(self, name: str, inputs: Inputs, fields: Fields) -> None:
        """Adds a row."""
        row = {"name": name, "size": inputs.size, "batch": inputs.batch, **fields}
        self.rows.append(row)
        here = by_size(self.rows)[size_of(row)]
        print(line(self._conditions["what"], row, baseline_ms(here)), flush=True)
        if self._kernels and (lines := kernel_lines(row)):
            print("\n".join(lines), flush=True)
        if self._path is not None:
            write_whole(self._path, json.dumps(self._results(), indent=1).encode() + b"\n")

    def finish(self, chart: Path | None) -> None:
        """Prints the waterfall and, as the last line, everything as JSON; draws the chart."""
        if lines := waterfall(self.rows):
            print("\n".join(lines))
        paths = {row["name"]: row["paths"] for row in reversed(self.rows) if "paths" in row}
        if paths:
            print()
        for name, text in reversed(paths.items()):
            print("\n  ".join((f"{name}:", *text.splitlines())))
        if chart is not None:
            write_whole(chart, png_bytes(draw_chart(self.rows, self._conditions)))
        print(json.dumps(self._results()), flush=True)

    def _results(self) -> Fields:
        return _rounded({"conditions": self._conditions, "rows": self.rows})


def _rounded(value: Any) -> Any:
    """Floats to five digits, wherever they stand."""
    if isinstance(value, float):
        return float(f"{value:.{SIGNIFICANT}g}")
    if isinstance(value, dict):
        return {name: _rounded(entry) for name, entry in value.items()}
    return [_rounded(entry) for entry in value] if isinstance(value, (list, tuple)) else value


def _columns(what: str) -> list[tuple[str, str, int]]:
    chosen = {"ops": OF_OPS, "image": OF_IMAGES, "prompt": OF_PROMPTS}.get(what)
    return [
        column
        for column in COLUMNS
        if (column[1] in chosen if chosen else column[1] not in ONLY_IMAGES)
    ]


def line(what: str, row: Fields, baseline: float | None) -> str:
    """One row of the table.

    Args:
        baseline: stock ComfyUI's milliseconds at the same size.
    """
    start = f"{row['name']:{NAME_WIDTH}}{size_of(row):>13}"
    for key, text in (("error", "failed"), ("left_out", "left out")):
        if key in row:
            return f"{start}  {text}: {row[key]}"
    shown = {**row, "x_stock": ratio(row, baseline)}
    return start + "".join(_cell(shown.get(field), digits) for _, field, digits in _columns(what))


def _cell(value: float | None, digits: int) -> str:
    if value is None:
        return " " * WIDTH
    # Times of whole passes need no thousandths.
    return f"{value:>{WIDTH}.{min(digits, 2) if abs(value) >= 10 else digits}f}"


def size_of(row: Fields) -> str:
    """Size and batch: `1024x1024 b1`."""
    return f"{row['size']} b{row['batch']}"


def by_size(rows: Sequence[Fields]) -> dict[str, list[Fields]]:
    """The rows of each size, in the order in which they were measured."""
    found: dict[str, list[Fields]] = {}
    for row in rows:
        found.setdefault(size_of(row), []).append(row)
    return found


def baseline_ms(here: Sequence[Fields]) -> float | None:
    """Stock ComfyUI's milliseconds among the rows of one size; None where it was not measured."""
    return next((row["ms"] for row in here if row["name"] == BASELINE and "ms" in row), None)


def ratio(row: Fields, baseline: float | None) -> float | None:
    """A row's time over stock ComfyUI's; None of a row that computes something else."""
    return row["ms"] / baseline if baseline and "rel_error" in row else None


def waterfall(rows: Sequence[Fields]) -> list[str]:
    """One technique after the other, with what each gains; nothing without stock ComfyUI."""
    lines = []
    for size, here in by_size(rows).items():
        steps = [row for row in here if row["name"] in STEPS and "ms" in row]
        if len(steps) < 2 or steps[0]["name"] != BASELINE:
            continue
        lines += ["", f"{size:{NAME_WIDTH}}{'ms':>10}{'x stock':>10}{'gained':>10}"]
        exact = stock = steps[0]["ms"]
        for row in steps:
            ms, label = row["ms"], step_label(row, steps)
            gained = "" if row is steps[0] else f"{(1 - ms / exact) * 100:+.1f} %"
            lines.append(f"  {label:{NAME_WIDTH - 2}}{ms:>10.2f}{ms / stock:>10.3f}{gained:>10}")
            # fp8 and int8 both stand on what bf16 reached.
            exact = ms if "bf16" in row["name"] else exact
    return lines


def step_label(row: Fields, here: Sequence[Fields]) -> str:
    """The technique that a row adds; its name where a step before it was not measured.

    Args:
        here: rows of the same size.
    """
    if row["name"] not in STEPS:
        return row["name"]
    order = list(STEPS)
    measured = {each["name"] for each in here if "ms" in each}
    # int8 does not stand on fp8.
    before = [name for name in order[: order.index(row["name"])] if "bf16" in name]
    return STEPS[row["name"]] if measured.issuperset(before) else row["name"]


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


def draw_chart(rows: Sequence[Fields], conditions: Mapping[str, Any]) -> Image.Image:
    """A bar for each row that has a time, one panel for each size, the waterfall first.

    Args:
        rows: as results hold them.
        conditions: card, software and sizes, for the lines at the top.
    """
    panels = {}
    for size, here in by_size(rows).items():
        timed = [row for row in here if row.get("ms", 0) > 0]
        if timed:
            panels[size] = sorted(timed, key=lambda row: row["name"] not in STEPS)
    count = sum(map(len, panels.values()))
    page = canvas.Page(300 + len(panels) * 80 + count * (BAR + GAP))
    page.paragraph(
        f"qwen-l40s bench {conditions.get('what', '')}: {conditions.get('card', '')}", canvas.TITLE
    )
    software = [f"{name} {found}" for name, found in conditions.get("software", {}).items()]
    layers = f"{conditions['layers']} blocks, " if conditions.get("layers") else ""
    page.paragraph(
        f"milliseconds, median, p10 to p90; {layers}random weights; {', '.join(software[:3])}",
        canvas.SMALL,
        canvas.FAINT,
    )
    for size, bars in panels.items():
        page.y += 12
        page.paragraph(size)
        _panel(page, bars)
    return page.finish()


def _panel(page: canvas.Page, bars: Sequence[Fields]) -> None:
    """Bars with the samples' spread, from p10 to p90, and stock ComfyUI's time as a line."""
    left, top, baseline = canvas.MARGIN + LABEL_WIDTH, page.y + 8, baseline_ms(bars)
    longest = max(row["ms"] for row in bars)
    scale = (canvas.WIDTH - canvas.MARGIN - VALUE_WIDTH - left) / longest
    bottom = top + len(bars) * (BAR + GAP)
    for ms in (0, baseline or 0):
        x = left + ms * scale
        page.draw.line((x, top - 4, x, bottom), fill=canvas.GRID, width=2)
    y = top
    for row in bars:
        middle = y + BAR // 2
        label = canvas.wrapped(_bar_label(row, bars), canvas.SMALL, LABEL_WIDTH - 12)[0]
        page.text((left - 12, middle), label, size=canvas.SMALL, anchor="rm")
        end = left + max(1, round(row["ms"] * scale))
        page.draw.rectangle((left, y, end, y + BAR), fill=_colour(row["name"]))
        low, high = (left + round(row.get(key, row["ms"]) * scale) for key in ("ms_p10", "ms_p90"))
        for ink, width in ((canvas.DARK, 3), (canvas.INK, 1)):  # over the bar, and beyond it
            page.draw.line((low, middle, high, middle), fill=ink, width=width)
            for x in {low, high}:
                page.draw.line((x, middle - 4, x, middle + 4), fill=ink, width=width)
        value = f"{row['ms']:.1f} ms" if row["ms"] >= 10 else f"{row['ms']:.3f} ms"
        if row["name"] != BASELINE and (of_stock := ratio(row, baseline)) is not None:
            value += f"   x {of_stock:.2f}"
        page.text((max(end, high) + 10, middle), value, size=canvas.SMALL)
        y += BAR + GAP
    page.y = y + 8


def _bar_label(row: Fields, here: Sequence[Fields]) -> str:
    label, name = step_label(row, here), row["name"]
    return label if name in (label, BASELINE) else f"{label}  ({name})"


def _colour(name: str) -> str:
    if name.startswith(("ours", "gemm")) or " ours " in name:
        return OURS
    return COMFYUI if name.lower().startswith("comfy") else OTHERS
