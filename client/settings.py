"""Reads `--set KEY=VALUE`, and makes one graph for each combination of values."""

from __future__ import annotations

import difflib
import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PureWindowsPath
from types import MappingProxyType
from typing import Any

from ..errors import SettingError
from .workflow import (
    Graph,
    NodeInput,
    called,
    input_called,
    is_link,
    node_inputs,
    nodes_called,
    other_names,
    plain,
    shortened,
    source,
    title,
    with_inputs,
)

TYPED = ("INT", "FLOAT", "BOOLEAN", "STRING", "COMBO")
# How many choices, and how many of a graph's inputs, a message lists.
LISTED, SHOWN = 8, 16
LONGEST_KEY = 300
# Another seed of a graph of 13 nodes takes 1.2 KB of this machine's memory, so these take 1.2 GB.
MAX_JOBS = 1_000_000
WHOLE = re.compile(r"[+-]?[0-9]+")
NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
RANGE = re.compile(r"([+-]?[0-9]+)\.\.([+-]?[0-9]+)")
# Python refuses to read longer numbers (4300 digits); the largest seed has 20.
DIGITS = 40
YES = ("true", "yes", "on", "1")
NO = ("false", "no", "off", "0")
LINE_END = re.compile(r"\r\n|\r|\n")

Place = tuple[str, str]  # node id, input name


@dataclass(frozen=True)
class InputTarget:
    """The input that a key means, its address for messages, and its older or newer name."""

    node: str
    input: str
    spec: NodeInput
    where: str
    other: str = ""


def find_input(graph: Graph, key: str, object_info: Mapping[str, Any]) -> InputTarget:
    """Returns the input that a person means by a key. `node.input` comes first. Then a node counts,
    with its input of the same name, its only text or its only unwired input. Then an input's name
    counts that one node alone has unwired. Raises SettingError, which lists inputs.
    """
    if len(key) > LONGEST_KEY:  # whose every dot may end a title
        raise SettingError(
            f"there is no input {shortened(key)}: a key names a node, an input or both."
        )
    inputs = _Inputs(graph, object_info)
    found = inputs.at(key) or inputs.of_node(key) or inputs.named(key)
    if not found:
        raise SettingError(inputs.not_there(key))
    if len(found) > 1:
        raise SettingError(
            f"{key!r} names several inputs: write one of {listed(inputs.called(found), SHOWN)}."
        )
    [(node, name)] = found
    where = input_called(graph, node, name)
    value = graph[node]["inputs"].get(name)
    if is_link(value):
        raise SettingError(f"{where} cannot be set: {inputs.fed_by(value)}.")
    return InputTarget(node, name, inputs.spec(node, name), where, inputs.other(node, name))


class _Inputs:
    def __init__(self, graph: Graph, object_info: Mapping[str, Any]) -> None:
        self.graph = graph
        self.known = {node: node_inputs(object_info, graph[node]) for node in graph}

    def spec(self, node: str, name: str) -> NodeInput:
        """Asks the server's list, else the type of the present value."""
        spec = (self.known[node] or {}).get(name)
        value = self.graph[node]["inputs"].get(name)
        if spec and (spec.kind in TYPED or value is None):
            return spec
        kinds = {bool: "BOOLEAN", int: "INT", float: "FLOAT"}
        return NodeInput(kinds.get(type(value), "STRING"))

    def other(self, node: str, name: str) -> str:
        return other_names(self.known[node] or {}).get(name, "")

    def unwired(self, nodes: Iterable[str]) -> list[Place]:
        """Leaves out values that the node's class does not know."""
        return [
            (node, name)
            for node in nodes
            for name, value in self.graph[node]["inputs"].items()
            if not isinstance(value, list | dict)
            and ((known := self.known[node]) is None or name in known)
        ]

    def called(self, places: Iterable[Place]) -> list[str]:
        return [input_called(self.graph, *place) for place in places]

    def at(self, key: str) -> list[Place]:
        """Finds what `node.input` means; the file may leave that input out."""
        found = []
        for node, name in self._split(key):
            there = {**self.graph[node]["inputs"], **(self.known[node] or {})}
            same = [each for each in there if plain(each) == plain(name)]
            found += [(node, each) for each in ([name] if name in there else same)]
        return found

    def _split(self, key: str) -> list[Place]:
        """Splits at each dot: titles and inputs may hold dots themselves."""
        return [
            (node, key[dot.end() :])
            for dot in re.finditer(r"\.", key)
            for node in nodes_called(self.graph, key[: dot.start()])
        ]

    def of_node(self, key: str) -> list[Place]:
        """Finds inputs of a node's id or title; none of several beside inputs so named."""
        nodes = nodes_called(self.graph, key)
        found = [place for node in nodes for place in self._main_inputs(node, key)]
        if len(nodes) == 1 and len(found) > 1 and self._unwired_named(key):
            return []
        return found

    def _main_inputs(self, node: str, key: str) -> list[Place]:
        places = self.unwired([node])
        same = [place for place in places if plain(place[1]) == plain(key)]
        texts = [place for place in places if self.spec(*place).kind == "STRING"]
        return next((some for some in (same, texts) if len(some) == 1), places)

    def named(self, key: str) -> list[Place]:
        """Takes a wired input only where all of that name are."""
        wired = [
            (node, name)
            for node, described in self.graph.items()
            for name, value in described["inputs"].items()
            if is_link(value) and plain(name) == plain(key)
        ]
        return self._unwired_named(key) or wired[:1]

    def _unwired_named(self, key: str) -> list[Place]:
        places = self.unwired(self.graph)
        others = [(node, self.other(node, name)) for node, name in places]
        same = (
            [place for place in some if plain(place[1]) == plain(key)] for some in (places, others)
        )
        return next(filter(None, same), [])

    def fed_by(self, link: list[Any]) -> str:
        feeder = source(self.graph, link)
        if feeder is None:
            return "the input is connected to a missing node"
        names = self.called(self.unwired([feeder]))
        instead = f", so set {listed(names)} instead" if names else ""
        return f"{called(self.graph, feeder)} is connected to it{instead}"

    def not_there(self, key: str) -> str:
        owners = nodes_called(self.graph, key) or [node for node, _ in self._split(key)]
        names = self.called(self.unwired(owners or self.graph))
        if names:
            names = nearest(key, names)
            return f"there is no input {key!r}: choose one of {listed(names, SHOWN)}."
        owner = called(self.graph, owners[0]) if owners else "the workflow"
        return f"{owner} has no input to set."


@dataclass(frozen=True, slots=True)
class Variation:
    """A graph, and what was chosen for it: {key as typed: value}, in the order of the settings."""

    graph: Graph
    chosen: dict[str, Any]


def parse_settings(
    texts: Sequence[str], graph: Graph = MappingProxyType({})
) -> dict[str, tuple[str, ...]]:
    """Reads {key: its values as typed} of `seed=7`, `seed=1..8`, and `prompt=@file` with a value on
    each line; `@@x` is a text that begins with @. A title or id in a key may hold `=`. Raises
    SettingError.
    """
    settings: dict[str, tuple[str, ...]] = {}
    titles = {plain(name) for node in graph for name in (title(graph, node), node) if "=" in name}
    for text in texts:
        end = _key_end(text, titles)
        key, equals, value = text[:end].strip(), text[end : end + 1], text[end + 1 :]
        if not equals or not key:
            raise SettingError(
                f"--set {shortened(text)} must be KEY=VALUE, such as seed=7, seed=1..8 or "
                "prompt=@prompts.txt."
            )
        # A terminal's bytes that are not UTF-8 arrive as lone surrogates.
        if any("\ud800" <= letter <= "\udfff" for letter in text):
            raise SettingError(
                f"--set {shortened(text)} is not UTF-8: type the setting in a UTF-8 terminal."
            )
        if key in settings:
            raise SettingError(
                f"--set {key} is given twice: give it once. For several values, use a range such "
                f"as {key}=1..8 or a file such as {key}=@values.txt."
            )
        settings[key] = _values(key, value)
    return settings


def _key_end(text: str, titles: set[str]) -> int:
    """Finds the first `=`, or the first one behind a title that holds one."""
    for end in re.finditer("=", text[:LONGEST_KEY]) if titles else ():
        key = text[: end.start()]
        owners = [key, *(key[: dot.start()] for dot in re.finditer(r"\.", key))]
        if any(plain(owner) in titles for owner in owners):
            return end.start()
    return f"{text}=".index("=")


def variations(
    graph: Graph, settings: Mapping[str, Sequence[str]], object_info: Mapping[str, Any]
) -> list[Variation]:
    """Returns a graph for each combination of values; the last setting varies fastest.

    The graphs share every node that no setting changes.

    Raises:
        SettingError: a key means no input or several, two mean the same one, a value does not fit
            its input, or there would be more than `MAX_JOBS` graphs.
    """
    targets: dict[str, InputTarget] = {}
    axes: list[list[list[str] | range]] = []
    for key, texts in settings.items():
        target = find_input(graph, key, object_info)
        for earlier, other in targets.items():
            if other.node == target.node and other.input in (target.input, target.other):
                raise SettingError(
                    f"--set {earlier} and --set {key} both set {target.where}: give one of them."
                )
        targets[key] = target
        axes.append([number_range(text, target.spec, target.where) or [text] for text in texts])
    counts = {
        # len() fails beyond 2**63.
        key: sum(part.stop - part.start if isinstance(part, range) else 1 for part in axis)
        for key, axis in zip(targets, axes, strict=True)
    }
    total = math.prod(counts.values())
    if total > MAX_JOBS:
        product = " x ".join(f"{count:,} ({key})" for key, count in counts.items() if count > 1)
        raise SettingError(
            f"--set asks for {total:,} jobs, {product}, but one run takes at most {MAX_JOBS:,}: "
            "split the jobs into several runs."
        )
    values = [
        [value_of(str(each), target.spec, target.where) for part in axis for each in part]
        for target, axis in zip(targets.values(), axes, strict=True)
    ]
    for node, unset in {(target.node, target.other) for target in targets.values()}:
        inputs = {name: value for name, value in graph[node]["inputs"].items() if name != unset}
        graph = {**graph, node: {**graph[node], "inputs": inputs}}
    places = [(target.node, target.input) for target in targets.values()]
    return [
        Variation(
            with_inputs(graph, dict(zip(places, row, strict=True))),
            dict(zip(targets, row, strict=True)),
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
        raise SettingError(f"{where} is not UTF-8: save the file as UTF-8.") from error
    except (OSError, RuntimeError, ValueError) as error:  # no such user, a zero byte
        reason = getattr(error, "strerror", None) or error
        raise SettingError(
            f"cannot read {where} ({reason}): give a text file. For a text that begins with @, "
            f"write {key}=@{value}."
        ) from error
    lines = tuple(line for line in LINE_END.split(text) if line.strip())
    if not lines:
        raise SettingError(f"{where} has no text: write one value on each line.")
    return lines


def number_range(text: str, spec: NodeInput, where: str) -> range | None:
    """Returns the range of `1..8` for a number, else None; raises SettingError for `8..1`."""
    match = RANGE.fullmatch(text.strip()) if spec.kind in ("INT", "FLOAT") else None
    if match is None:
        return None
    first, last = (_whole(side, where) for side in match.groups())
    if last < first:
        raise SettingError(
            f"{where} is {text.strip()!r}, but a range goes upwards: write {last}..{first}."
        )
    return range(first, last + 1)


def value_of(text: str, spec: NodeInput, where: str) -> Any:
    """Returns the value of a text for the input `where`, or raises SettingError."""
    if spec.kind == "INT":
        return _in_steps(_in_bounds(_whole(text.strip(), where), spec, where), spec, where)
    if spec.kind == "FLOAT":
        text = text.strip()  # of more than `float` strips
        value = float(text) if NUMBER.fullmatch(text) else math.inf
        if math.isinf(value):
            said = shortened(text)
            raise SettingError(f"{where} is {said}, which is not a number: give one such as 4.0.")
        return _in_bounds(value, spec, where)
    if spec.kind == "BOOLEAN":
        word = text.strip().lower()
        if word not in (*YES, *NO):
            raise SettingError(f"{where} is {shortened(text.strip())}: give true or false.")
        return word in YES
    if spec.kind == "COMBO":
        return _choice(text, spec, where)
    if spec.kind == "STRING":
        return text
    raise SettingError(
        f"{where} takes a connection of type {spec.kind}, which --set cannot give: wire it in the "
        "workflow."
    )


def _in_bounds(value: Any, spec: NodeInput, where: str) -> Any:
    least, most = spec.rules.get("min"), spec.rules.get("max")
    if (least is None or least <= value) and (most is None or value <= most):
        return value
    between = f"from {least} to {most}"
    if least is None or most is None:
        between = f"of {most} or less" if least is None else f"of {least} or more"
    raise SettingError(f"{where} is {value}: give a number {between}.")


def _in_steps(value: int, spec: NodeInput, where: str) -> int:
    """Holds the number to the step as the page's box does and the server does not."""
    step: Any
    least, most, step = (spec.rules.get(rule) for rule in ("min", "max", "step"))
    over = (value - (least or 0)) % step if isinstance(step, int) and step > 1 else 0
    if not over:
        return value
    near = [value - over, value - over + step]
    near = [each for each in near if most is None or each <= most]
    raise SettingError(
        f"{where} is {value}, but goes in steps of {step}: use {' or '.join(map(str, near))}."
    )


def nearest(word: str, names: Iterable[str]) -> list[str]:
    """Sorts names, most alike first: as a whole, or in one of their parts between dots."""

    def likeness(name: str) -> float:
        # Long texts say nothing more and take quadratic time.
        parts = [part[:80].lower() for part in {name, *name.split(".")}]
        return max(difflib.SequenceMatcher(None, word[:80].lower(), part).ratio() for part in parts)

    return sorted(names, key=likeness, reverse=True)


def listed(names: Sequence[str], most: int = LISTED) -> str:
    """Puts the first names into words, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _whole(text: str, where: str) -> int:
    if not WHOLE.fullmatch(text) or len(text) > DIGITS:
        raise SettingError(
            f"{where} is {shortened(text)}, which is not a whole number: give one such as 8, or a "
            "range such as 1..8."
        )
    return int(text)


def _choice(text: str, spec: NodeInput, where: str) -> Any:
    # An empty list is a folder without models, of which `Checker` knows more to say.
    if not spec.closed or not spec.choices:
        return text
    for same in (str, lambda choice: PureWindowsPath(str(choice).strip().casefold())):
        found = [choice for choice in spec.choices if same(choice) == same(text)]
        if len(found) == 1:
            return found[0]
    raise SettingError(
        f"{where} is {shortened(text)}, which is not a choice: use "
        f"{listed(nearest(text, map(str, spec.choices)))}."
    )
