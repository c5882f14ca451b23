"""Makes both forms of a workflow: the page's (graph version 0.4) and that of POST /prompt. `tidy`
makes alike what ComfyUI's page saves for each user, and puts back titles and the first view's mark.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ...version import __version__
from .definitions import Definition, definitions, widgets
from .notes import published

COMFYUI = "0.33.0"
VERSION = 0.4
PACK = "comfyui-qwen-image-l40s"
NOTE = "MarkdownNote"
# What is kept of sockets, the view and frames, in the order of the files.
SOCKET = ("name", "label", "shape", "type", "widget", "link")
VIEW = ("ds", "frontendVersion")
FRAME = ("id", "title", "bounding", "color", "flags")

Graph = dict[str, Any]


def tidy(graph: Mapping[str, Any]) -> Graph:
    """Makes the whole file of what a page saved; raises ValueError for an unknown node or form."""
    if graph.get("version") != VERSION:
        raise ValueError(f"it is no graph of version {VERSION}: export it from ComfyUI's page")
    nodes = [_node(node) for node in graph["nodes"]]
    slots = {socket["link"]: slot for node in nodes for slot, socket in enumerate(node["inputs"])}
    links = [
        [link, origin, output, target, slots.get(link, slot), kind]
        for link, origin, output, target, slot, kind in sorted(graph["links"])
    ]
    return {
        "id": graph["id"],
        "revision": graph["revision"],
        "last_node_id": max((node["id"] for node in nodes), default=0),
        "last_link_id": max((link[0] for link in links), default=0),
        "nodes": nodes,
        "links": links,
        "groups": [
            _kept(frame, FRAME) | {"bounding": [round(each) for each in frame["bounding"]]}
            for frame in graph["groups"]
        ],
        "config": {},
        # web/qwen_l40s.js brings all of the graph into view once, and takes this mark away.
        "extra": {"qwen_l40s": {"fit": True}, **_kept(graph["extra"], VIEW)},
        "version": VERSION,
    }


def nodes_that_run(graph: Graph) -> Iterator[tuple[Graph, Definition]]:
    """Yields each node but the note, with what is known of it."""
    for node in graph["nodes"]:
        if node["type"] != NOTE:
            yield node, definitions()[node["type"]]


def note_of(graph: Graph) -> Graph:
    """Finds the note of a graph; raises ValueError where there is none, or more than one."""
    notes = [node for node in graph["nodes"] if node["type"] == NOTE]
    if len(notes) != 1:
        raise ValueError(f"it has {len(notes)} notes: keep one {NOTE}")
    return notes[0]


def api_form(graph: Graph, older: Graph) -> Graph:
    """Makes {node id: {class_type, inputs, _meta}} as the page's graphToPrompt, but for the ids: by
    their titles, nodes keep those of `older`, the API form so far; a new node gets its number.
    """
    kept = {node.get("_meta", {}).get("title"): id for id, node in older.items()}
    known = sorted(nodes_that_run(graph), key=lambda pair: pair[0]["id"])
    ids = {node["id"]: kept.get(node["title"], str(node["id"])) for node, _ in known}
    origins = {link: [ids[origin], output] for link, origin, output, *_ in graph["links"]}
    found = {}
    for node, definition in known:
        given = node.get("widgets_values_named", {}) | {
            socket["name"]: origins[socket["link"]]
            for socket in node["inputs"]
            if socket["link"] is not None
        }
        inputs = {each.name: given[each.name] for each in definition.inputs if each.name in given}
        meta = {"title": node["title"]} | ({"version": __version__} if definition.is_ours else {})
        meta |= _kept(node["properties"], ("models",))
        found[ids[node["id"]]] = {"class_type": node["type"], "inputs": inputs, "_meta": meta}
    return found


def _kept(entry: Mapping[str, Any], keys: tuple[str, ...]) -> Graph:
    return {key: entry[key] for key in keys if key in entry}


def _node(node: Mapping[str, Any]) -> Graph:
    if node["type"] == NOTE:
        names, title = {"text": "STRING"}, NOTE
    elif node["type"] in definitions():
        definition = definitions()[node["type"]]
        names, title = widgets(definition), definition.title
    else:
        raise ValueError(
            f"{node['type']} is not in tools/workflows/definitions.json: definitions.py says how a "
            "node gets there; subgraphs, reroutes and primitives do not"
        )
    given = node.get("widgets_values", ())
    if len(given) != len(names):
        called = node.get("title", title)
        raise ValueError(f"{called} has {len(given)} values for {', '.join(names)}")
    values = {
        name: float(value) if kind == "FLOAT" and type(value) is int else value
        for (name, kind), value in zip(names.items(), given, strict=True)
    }
    sockets = [
        _kept(each, SOCKET)
        for each in node.get("inputs", ())
        if "widget" not in each or each["link"] is not None
    ]
    named = {"widgets_values": [*values.values()], "widgets_values_named": values}
    return {
        **_kept(node, ("id", "type")),
        "pos": [round(each) for each in node["pos"]],
        "size": [round(each) for each in node["size"]],
        **_kept(node, ("flags", "order", "mode")),
        "inputs": sorted(sockets, key=lambda each: "widget" in each),
        "outputs": [
            {"name": each["name"], "type": each["type"], "links": each["links"] or None}
            for each in node.get("outputs", ())
        ],
        "title": node.get("title", title),
        "properties": {} if node["type"] == NOTE else _properties(node["type"], values.values()),
        **(named if values else {}),
        **({} if node["type"] == NOTE else _kept(node, ("color", "bgcolor"))),
    }


def _properties(class_type: str, values: Iterable[Any]) -> Graph:
    ours = definitions()[class_type].is_ours
    properties: Graph = {
        "cnr_id": PACK if ours else "comfy-core",
        "ver": __version__ if ours else COMFYUI,
        "Node name for S&R": class_type,
    }
    files = [published()[value] for value in values if value in published()]
    if files:
        properties["models"] = [file.link() for file in files]
    return properties
