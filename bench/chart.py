"""Benchmark results as a picture: a bar for each row, one panel for each size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .rows import BASELINE
from .table import STEPS, by_place, ratio, step_label

if TYPE_CHECKING:
    from PIL import Image, ImageDraw, ImageFont

Fields = dict[str, Any]
WIDTH = 1280  # pixels
MARGIN = 32
BAR, GAP = 22, 8
TITLE, LABEL = 20, 15  # font sizes
LABEL_WIDTH = 380
VALUE_WIDTH = 190
INK, FAINT, GRID = "#1f2933", "#616e7c", "#e4e7eb"
OURS, COMFYUI, OTHERS = "#0b7a5b", "#9aa5b1", "#6b8fb5"


def draw_chart(rows: Sequence[Fields], conditions: Mapping[str, Any]) -> Image.Image:
    """Draws the rows that have a time: the waterfall first, then what it is compared with.

    Args:
        rows: as results hold them.
        conditions: card, software and sizes, for the line under the title.
    """
    from PIL import Image, ImageDraw

    panels = {place: (_ordered(here), _baseline(here)) for place, here in by_place(rows).items()}
    panels = {place: panel for place, panel in panels.items() if panel[0]}
    count = sum(len(bars) for bars, _ in panels.values())
    height = 2 * MARGIN + 70 + len(panels) * 64 + count * (BAR + GAP)
    image = Image.new("RGB", (WIDTH, height), "white")
    draw = ImageDraw.Draw(image)
    draw.text((MARGIN, MARGIN), _title(conditions), fill=INK, font=_font(TITLE))
    draw.text((MARGIN, MARGIN + 30), _subtitle(conditions), fill=FAINT, font=_font(LABEL))
    y = MARGIN + 70
    for place, (bars, baseline) in panels.items():
        y = _panel(draw, y, place, bars, baseline)
    return image


def _panel(
    draw: ImageDraw.ImageDraw, y: int, place: str, bars: Sequence[Fields], baseline: float | None
) -> int:
    """Draws one size at `y`; returns where the next begins."""
    draw.text((MARGIN, y + 8), place, fill=INK, font=_font(LABEL + 2))
    y += 40
    left = MARGIN + LABEL_WIDTH
    longest = max(row["ms"] for row in bars)
    scale = (WIDTH - MARGIN - VALUE_WIDTH - left) / longest if longest > 0 else 0
    bottom = y + len(bars) * (BAR + GAP)
    draw.line((left, y - 4, left, bottom), fill=GRID, width=2)
    if baseline:
        x = left + round(baseline * scale)
        draw.line((x, y - 4, x, bottom), fill=GRID, width=2)
    for row in bars:
        font = _font(LABEL)
        label = _shortened(_label(row, bars), font)
        middle = y + BAR // 2
        draw.text((left - 12, middle), label, fill=INK, font=font, anchor="rm")
        end = left + max(1, round(row["ms"] * scale))
        draw.rectangle((left, y, end, y + BAR), fill=_colour(row["name"]))
        _whiskers(draw, row, left, scale, middle)
        beyond = left + round(max(row["ms"], row.get("ms_p90") or 0.0) * scale)
        draw.text((beyond + 10, middle), _value(row, baseline), fill=INK, font=font, anchor="lm")
        y += BAR + GAP
    return y + 24


def _label(row: Fields, rows: Sequence[Fields]) -> str:
    name = row["name"]
    label = step_label(row, rows) if name in STEPS else name
    return label if label == name or name == BASELINE else f"{label}  ({name})"


def _whiskers(draw: ImageDraw.ImageDraw, row: Fields, left: int, scale: float, middle: int) -> None:
    """The spread of the samples, from p10 to p90."""
    low, high = row.get("ms_p10"), row.get("ms_p90")
    if low is None or high is None:
        return
    ends = [left + round(value * scale) for value in (low, high)]
    draw.line((ends[0], middle, ends[1], middle), fill=INK, width=1)
    for x in ends:
        draw.line((x, middle - 4, x, middle + 4), fill=INK, width=1)


def _ordered(rows: Sequence[Fields]) -> list[Fields]:
    timed = [row for row in rows if row.get("ms", 0) > 0]
    return [row for row in timed if row["name"] in STEPS] + [
        row for row in timed if row["name"] not in STEPS
    ]


def _baseline(rows: Sequence[Fields]) -> float | None:
    return next((row["ms"] for row in rows if row["name"] == BASELINE and "ms" in row), None)


def _value(row: Fields, baseline: float | None) -> str:
    ms = f"{row['ms']:.1f} ms" if row["ms"] >= 10 else f"{row['ms']:.3f} ms"
    of_stock = ratio(row, baseline)
    return ms if of_stock is None or row["name"] == BASELINE else f"{ms}   x {of_stock:.2f}"


def _colour(name: str) -> str:
    if name.startswith(("ours", "gemm")) or " ours " in name:
        return OURS
    return COMFYUI if name.lower().startswith("comfy") else OTHERS


def _title(conditions: Mapping[str, Any]) -> str:
    return f"qwen-l40s bench {conditions.get('what', '')}: {conditions.get('card', '')}"


def _subtitle(conditions: Mapping[str, Any]) -> str:
    software = [f"{name} {found}" for name, found in conditions.get("software", {}).items()]
    layers = f"{conditions['layers']} blocks, " if conditions.get("layers") else ""
    return f"milliseconds, median, p10 to p90; {layers}random weights; {', '.join(software[:3])}"


def _shortened(text: str, font: ImageFont.FreeTypeFont) -> str:
    while text and font.getlength(text) > LABEL_WIDTH - 12:
        text = f"{text[:-2]}…" if text.endswith("…") else f"{text[:-1]}…"
    return text


def _font(size: int) -> ImageFont.FreeTypeFont:
    from PIL import ImageFont

    return ImageFont.load_default(size)
