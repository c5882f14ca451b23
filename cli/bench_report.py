"""Collects benchmark rows: each is printed and written as soon as it is there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..planning.work import Inputs
from .bench_chart import draw_chart
from .bench_table import baseline_of, heading, kernel_lines, line, waterfall
from .images import png_bytes, write_whole

Fields = dict[str, Any]
SIGNIFICANT = 5


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
        print(heading(conditions["what"]), flush=True)

    @property
    def failed(self) -> int:
        """How many rows failed."""
        return sum("error" in row for row in self.rows)

    def take(self, name: str, inputs: Inputs, fields: Fields) -> None:
        """Adds a row."""
        row = {"name": name, "size": inputs.size, "batch": inputs.batch, **fields}
        self.rows.append(row)
        print(line(self._conditions["what"], row, baseline_of(self.rows, row)), flush=True)
        if self._kernels and (lines := kernel_lines(row)):
            print("\n".join(lines), flush=True)
        self._write()

    def finish(self, chart: Path | None) -> None:
        """Prints the waterfall and, as the last line, everything as JSON; draws the chart."""
        if lines := waterfall(self.rows):
            print("\n".join(lines))
        if paths := _paths(self.rows):
            print(f"\n{paths}")
        if chart is not None:
            write_whole(chart, png_bytes(draw_chart(self.rows, self._conditions)))
        print(json.dumps(self._results()), flush=True)

    def _write(self) -> None:
        if self._path is not None:
            write_whole(self._path, json.dumps(self._results(), indent=1).encode() + b"\n")

    def _results(self) -> Fields:
        return _rounded({"conditions": self._conditions, "rows": self.rows})


def _paths(rows: list[Fields]) -> str:
    """What ran in our rows, of the first size."""
    told = {row["name"]: row["paths"] for row in reversed(rows) if "paths" in row}
    return "\n".join(f"{name}:\n{_indented(text)}" for name, text in reversed(told.items()))


def _indented(text: str) -> str:
    return "\n".join(f"  {part}" for part in text.splitlines())


def _rounded(value: Any) -> Any:
    """Floats to five digits, wherever they stand."""
    if isinstance(value, float):
        return float(f"{value:.{SIGNIFICANT}g}")
    if isinstance(value, dict):
        return {name: _rounded(entry) for name, entry in value.items()}
    return [_rounded(entry) for entry in value] if isinstance(value, (list, tuple)) else value
