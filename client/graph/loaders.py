"""Which jobs use the same models."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from .workflow import Graph, is_link

LOADS = re.compile("Load")
# Load3D, LoadImageMask, VHS_LoadVideo: what is painted on, which differs from job to job.
LOADS_DATA = re.compile(r"Load(3D|Audio|Image|Latent|Mask|TrainingDataset|Video)")


def loaders_key(graph: Graph) -> str:
    """A short hash of the models that a graph loads, equal in every process.

    Every node counts that loads models or LoRAs by the name of its class, with all its values, so
    jobs of one key share what a ComfyUI keeps loaded. Node ids, wires and titles do not count, nor
    do prompts, seeds, sizes and images.
    """
    loads = sorted(
        json.dumps(
            [
                node["class_type"],
                {name: value for name, value in node["inputs"].items() if not is_link(value)},
            ],
            sort_keys=True,
        )
        for node in _loaders(graph)
    )
    return hashlib.sha256("\n".join(loads).encode()).hexdigest()[:16]


def loaded_names(graph: Graph) -> set[str]:
    """The texts in the nodes that load models or LoRAs, among them the names of their files."""
    values = (value for node in _loaders(graph) for value in node["inputs"].values())
    return {value for value in values if isinstance(value, str)}


def _loaders(graph: Graph) -> Iterator[Mapping[str, Any]]:
    for node in graph.values():
        if LOADS.search(node["class_type"]) and not LOADS_DATA.search(node["class_type"]):
            yield node
