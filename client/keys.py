"""Which input of a graph the key of a `--set` means."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import SettingError
from .graph import Graph
from .node_inputs import NodeInput, is_link, node_inputs
from .titles import called, input_called, nodes_called, plain
from .values import listed, nearest

TYPED = ("INT", "FLOAT", "BOOLEAN", "STRING", "COMBO")
# How many of a graph's inputs a message lists.
SHOWN = 16

Place = tuple[str, str]  # node id, input name


@dataclass(frozen=True)
class Target:
    """The input that a key means."""

    node: str
    input: str
    spec: NodeInput
    where: str


def find_input(graph: Graph, key: str, object_info: Mapping[str, Any]) -> Target:
    """The input that a person means by a key.

    In this order, so that `prompt` is the node called Prompt even where another node has an input
    of that name:

    1. `node.input`, the node by its id or its title.
    2. A node by its id or its title: its input of the same name, else its only text, else its only
       input that is not wired.
    3. An input's name, where one node alone has it unwired.

    Raises:
        SettingError: the key means several inputs, which are listed; or none, and those that are
            there are listed, the most alike first; or one that is wired.
    """
    inputs = _Inputs(graph, object_info)
    found = inputs.at(key) or inputs.of_node(key) or inputs.named(key)
    if not found:
        raise SettingError(inputs.not_there(key))
    if len(found) > 1:
        raise SettingError(
            f"{key!r} means several inputs: write one of "
            f"{listed([input_called(graph, *place) for place in found], SHOWN)}."
        )
    [(node, name)] = found
    where = input_called(graph, node, name)
    value = graph[node]["inputs"].get(name)
    if is_link(value):
        raise SettingError(f"{where} cannot be set: {inputs.fed_by(value)}.")
    return Target(node, name, inputs.spec(node, name), where)


class _Inputs:
    """A graph's inputs, with what the server says of them."""

    def __init__(self, graph: Graph, object_info: Mapping[str, Any]) -> None:
        self.graph = graph
        self.known = {node: node_inputs(object_info, graph[node]) for node in graph}

    def spec(self, node: str, name: str) -> NodeInput:
        """What the server says of the input, else what its present value tells."""
        spec = (self.known[node] or {}).get(name)
        value = self.graph[node]["inputs"].get(name)
        if spec and (spec.kind in TYPED or value is None):
            return spec
        kinds = {bool: "BOOLEAN", int: "INT", float: "FLOAT"}
        return NodeInput(kinds.get(type(value), "STRING"))

    def unwired(self, node: str) -> list[str]:
        """The inputs that hold a value, without those that the node's class does not have."""
        known = self.known[node]
        return [
            name
            for name, value in self.graph[node]["inputs"].items()
            if not isinstance(value, list | dict) and (known is None or name in known)
        ]

    def at(self, key: str) -> list[Place]:
        """The inputs that `node.input` means; one that the file leaves out may be among them."""
        found = []
        for place, letter in enumerate(key):  # titles and inputs may hold dots themselves
            if letter != ".":
                continue
            name = key[place + 1 :]
            for node in nodes_called(self.graph, key[:place]):
                there = {**self.graph[node]["inputs"], **(self.known[node] or {})}
                same = [each for each in there if plain(each) == plain(name)]
                found += [(node, each) for each in ([name] if name in there else same)]
        return found

    def of_node(self, key: str) -> list[Place]:
        """The inputs that a node's id or title means; none where that is one node with several, and
        there are inputs of that name.
        """
        nodes = nodes_called(self.graph, key)
        found = [(node, name) for node in nodes for name in self._main_inputs(node, key)]
        if len(nodes) == 1 and len(found) > 1 and self._unwired_by_name(key):
            return []
        return found

    def _main_inputs(self, node: str, key: str) -> list[str]:
        names = self.unwired(node)
        same = [name for name in names if plain(name) == plain(key)]
        texts = [name for name in names if self.spec(node, name).kind == "STRING"]
        return next((some for some in (same, texts, names) if len(some) == 1), names)

    def named(self, key: str) -> list[Place]:
        """The inputs of that name; the wired ones only where all are."""
        wired = [
            (node, name)
            for node, described in self.graph.items()
            for name, value in described["inputs"].items()
            if is_link(value) and plain(name) == plain(key)
        ]
        return self._unwired_by_name(key) or wired[:1]

    def _unwired_by_name(self, key: str) -> list[Place]:
        return [
            (node, name)
            for node in self.graph
            for name in self.unwired(node)
            if plain(name) == plain(key)
        ]

    def fed_by(self, link: list[Any]) -> str:
        """Which node a wired input gets its value from."""
        source = link[0] if link else None
        if not isinstance(source, str) or source not in self.graph:
            return "it is wired to a node that is not there"
        names = [input_called(self.graph, source, name) for name in self.unwired(source)]
        instead = f", so set {listed(names)} instead" if names else ""
        return f"{called(self.graph, source)} feeds it{instead}"

    def not_there(self, key: str) -> str:
        """The sentence for a key that means nothing."""
        owners = nodes_called(self.graph, key) or [
            node
            for place, letter in enumerate(key)
            if letter == "."
            for node in nodes_called(self.graph, key[:place])
        ]
        names = [
            input_called(self.graph, node, name)
            for node in owners or self.graph
            for name in self.unwired(node)
        ]
        if not names:
            owner = called(self.graph, owners[0]) if owners else "the workflow"
            return f"{owner} has no input that can be set."
        return (
            f"there is no input {key!r} to set: take one of {listed(nearest(key, names), SHOWN)}."
        )
