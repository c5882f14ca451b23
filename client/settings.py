"""What `--set` changes in a workflow: one graph for each combination of values."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import SettingError
from .graph import Graph, with_inputs
from .keys import Target, find_input
from .values import number_range, shortened, value_of

# What ComfyUI's history holds: it forgets the oldest jobs beyond.
MAX_JOBS = 10_000
LINE_END = re.compile(r"\r\n|\r|\n")


@dataclass(frozen=True)
class Setting:
    """One `--set`, not yet fitted to an input: `1..8` is a range or a text by the input's type.

    Attributes:
        key: as typed.
        values: the text, or the lines of a file.
    """

    key: str
    values: tuple[str, ...]


@dataclass(frozen=True)
class Variation:
    """A graph, and what was chosen for it.

    Attributes:
        chosen: key as typed -> value, in the order of the settings.
    """

    graph: Graph
    chosen: dict[str, Any]


def parse_settings(texts: Sequence[str]) -> list[Setting]:
    """Reads `KEY=VALUE` texts: `seed=7`, `seed=1..8`, `prompt=@file` with a value on each line.

    `@@x` is a text that begins with @.

    Raises:
        SettingError: a text has no key or no `=`, a key comes twice, or a file cannot be read.
    """
    settings: list[Setting] = []
    for text in texts:
        key, equals, value = text.partition("=")
        key = key.strip()
        if not equals or not key:
            raise SettingError(
                f"--set {shortened(text)} must be KEY=VALUE, such as seed=7, seed=1..8 or "
                "prompt=@prompts.txt."
            )
        if not _is_unicode(text):
            raise SettingError(
                f"--set {shortened(text)} is not UTF-8: type it in a UTF-8 terminal."
            )
        if any(setting.key == key for setting in settings):
            raise SettingError(
                f"--set {key} is given twice: give it once, with a range such as {key}=1..8 or a "
                f"file such as {key}=@values.txt for several values."
            )
        settings.append(Setting(key, _values(key, value)))
    return settings


def variations(
    graph: Graph, settings: Iterable[Setting], object_info: Mapping[str, Any]
) -> list[Variation]:
    """A graph for each combination of the settings' values; the last setting varies fastest.

    Args:
        object_info: of GET /object_info, which says what types the inputs have.

    Raises:
        SettingError: a key means no input or several, two mean the same one, a value does not fit
            its input, or there would be more than `MAX_JOBS` graphs.
    """
    axes: list[tuple[str, Target, list[range | tuple[str, ...]]]] = []
    for setting in settings:
        target = find_input(graph, setting.key, object_info)
        for key, other, _ in axes:
            if (other.node, other.input) == (target.node, target.input):
                raise SettingError(
                    f"--set {key} and --set {setting.key} both mean {target.where}: give one."
                )
        axes.append((setting.key, target, [_axis(value, target) for value in setting.values]))
    _check_count([(key, sum(map(_count, parts))) for key, _, parts in axes])
    keys = [key for key, _, _ in axes]
    places = [(target.node, target.input) for _, target, _ in axes]
    values = [_converted(target, parts) for _, target, parts in axes]
    return [
        Variation(
            with_inputs(graph, dict(zip(places, row, strict=True))),
            dict(zip(keys, row, strict=True)),
        )
        for row in itertools.product(*values)
    ]


def _values(key: str, value: str) -> tuple[str, ...]:
    if value.startswith("@@"):
        return (value[1:],)
    if not value.startswith("@"):
        return (value,)
    name = value[1:]
    where = f"the file {name!r} of --set {key}"
    try:
        text = Path(name).expanduser().read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise SettingError(f"{where} is not UTF-8: save it as UTF-8.") from error
    except (OSError, RuntimeError, ValueError) as error:  # no such user, a zero byte
        reason = getattr(error, "strerror", None) or error
        raise SettingError(
            f"cannot read {where} ({reason}): give a text file, or {key}=@{value} for a text that "
            "begins with @."
        ) from error
    lines = tuple(line for line in LINE_END.split(text) if line.strip())
    if not lines:
        raise SettingError(f"{where} has no line with text: write one value on each line.")
    return lines


def _is_unicode(text: str) -> bool:
    # A terminal's bytes that are not UTF-8 arrive as lone surrogates.
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


def _axis(text: str, target: Target) -> range | tuple[str, ...]:
    found = number_range(text, target.spec, target.where)
    return (text,) if found is None else found


def _count(part: range | tuple[str, ...]) -> int:
    # len() fails beyond 2**63.
    return part.stop - part.start if isinstance(part, range) else len(part)


def _check_count(counts: Sequence[tuple[str, int]]) -> None:
    total = math.prod(count for _, count in counts)
    if total > MAX_JOBS:
        product = " x ".join(f"{count:,} ({key})" for key, count in counts if count > 1)
        raise SettingError(
            f"--set asks for {total:,} jobs, {product}, and one call may queue {MAX_JOBS:,}, which "
            "is what a server remembers: split it into several calls."
        )


def _converted(target: Target, parts: Iterable[range | tuple[str, ...]]) -> list[Any]:
    texts = [str(value) for part in parts for value in part]
    return [value_of(text, target.spec, target.where) for text in texts]
