"""Workflow files in ComfyUI's API form: reading them, what people call their nodes, what inputs
these have by GET /object_info, and which load the same models.
"""

from __future__ import annotations

import hashlib
import json
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from PIL import Image

from ..errors import SettingError
from ..files import read_bytes

OURS = "QwenL40S_"
Graph = dict[str, dict[str, Any]]  # {node id: {class_type, inputs, _meta?}}

LARGEST = 2**28  # bytes of a picture that holds a workflow
PNG_START = b"\x89PNG\r\n\x1a\n"
KEY_LETTERS = 16
# What the names of a job's files on a server end with: the beginning of its key, and how often it
# ran before, for a server names a file that is lost again where nothing has changed.
JOB_ID = re.compile(r"_job-([0-9a-f]{12})(-[0-9]+)?$")
# Types of inputs of which nodes make files.
MEDIA = re.compile(r"(^|,)(IMAGE|VIDEO|AUDIO|MESH|SVG|FILE_3D\w*)(,|$)")
EXPORT = "export it on ComfyUI's page with File > Export (API)"
# Load3D, LoadImageMask, VHS_LoadVideo: what is painted on, which differs from job to job.
LOADS_DATA = re.compile(r"Load(3D|Audio|Image|Latent|Mask|TrainingDataset|Video)")
# Inputs whose list the server does not hold them to: their class checks by itself (ComfyUI 0.33).
UNLISTED = {
    ("CustomCombo", "choice"),
    ("LoadLatent", "latent"),
    ("ModelAttentionBackend", "attention"),
    ("SelectCLIPDevice", "device"),
    ("SelectModelDevice", "device"),
    ("SelectVAEDevice", "device"),
}


def with_inputs(graph: Graph, values: Mapping[tuple[str, str], Any]) -> Graph:
    """Copies the graph with other values by (node id, input); shares all other nodes."""
    copy = dict(graph)
    for (node, name), value in values.items():
        copy[node] = {**copy[node], "inputs": {**copy[node]["inputs"], name: value}}
    return copy


def renamed(graph: Graph, names: Mapping[str, str]) -> Graph:
    """Copies the graph with the names that a server gave to uploaded images."""
    given = {name: to for name, to in names.items() if name != to}
    values = {
        (node, key): given[value]
        for node, described in graph.items()
        for key, value in described["inputs"].items()
        if isinstance(value, str) and value in given
    }
    return with_inputs(graph, values)


def with_job_id(graph: Graph, object_info: Mapping[str, Any], key: str, ran: int = 0) -> Graph:
    """Copies the graph with names of its own, by the job's key and how often it ran before, for the
    files that its nodes save on a server.

    Two jobs never share one, in whatever folder servers write; nodes that save models keep theirs.
    """
    own = f"_job-{key[:12]}" + (f"-{ran}" if ran else "")
    prefixes = {
        (node, "filename_prefix"): JOB_ID.sub("", prefix) + own
        for node, described in graph.items()
        if isinstance(prefix := described["inputs"].get("filename_prefix"), str)
        and saves_media(object_info, described["class_type"])
    }
    return with_inputs(graph, prefixes)


def saves_media(object_info: Mapping[str, Any], kind: str) -> bool:
    """Whether nodes of a class save images, video, audio or 3-D under a prefix."""
    groups = (object_info.get(kind) or {}).get("input") or {}
    inputs = {**(groups.get("optional") or {}), **(groups.get("required") or {})}
    kinds = [described[0] for described in inputs.values()]
    media = any(isinstance(each, str) and MEDIA.search(each) for each in kinds)
    return media and "filename_prefix" in inputs


def always_names(graph: Graph, object_info: Mapping[str, Any]) -> str | None:
    """Names a node that saves media and tells the names of its files; None where there is none.

    Packs' nodes need tell none, nor do those that write data sets into a folder.
    """
    for node, described in graph.items():
        kind = described["class_type"]
        if saves_media(object_info, kind) and object_info[kind].get("output_node"):
            core = not str(object_info[kind].get("python_module")).startswith("custom_nodes.")
            if (core or kind.startswith(OURS)) and "folder_name" not in described["inputs"]:
                return called(graph, node)
    return None


def read_workflow(path: Path) -> Graph:
    """The graph of a workflow file.

    Args:
        path: a .json in API form, the body of a POST /prompt, or a PNG that ComfyUI saved.

    Returns:
        {node id: {class_type, inputs, _meta?}}; whatever else the file says of a node is left out.

    Raises:
        SettingError: the file is missing, or holds no workflow in API form.
    """
    try:
        data = read_bytes(path, LARGEST)
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        reason = getattr(error, "strerror", None) or error
        raise SettingError(
            f"cannot read the workflow ({reason}): give a file in API form.", path
        ) from error
    if data.startswith(PNG_START):
        return _graph(path, _prompt_of(path))
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise SettingError(
            f"this is neither UTF-8 text nor a PNG: give a workflow in API form, or {EXPORT}.", path
        ) from error
    return _graph(path, text)


def _prompt_of(path: Path) -> str:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a large picture
            with Image.open(path, formats=("PNG",)) as image:
                texts = image.info
    except Exception as error:  # a damaged file makes Pillow's readers fail in many ways
        raise SettingError(
            f"this PNG cannot be read ({error}): give one that ComfyUI saved, or a workflow in API "
            "form.",
            path,
        ) from error
    text = texts.get("prompt")
    if not isinstance(text, str):
        only = "only the UI form of a workflow" if "workflow" in texts else "no workflow"
        raise SettingError(
            f"this PNG holds {only}: give one that ComfyUI saved with its metadata, or open the "
            f"workflow and {EXPORT}.",
            path,
        )
    return text


def _graph(path: Path, text: str) -> Graph:
    if not text.strip():
        raise SettingError(f"this workflow file is empty: {EXPORT}.", path)
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SettingError(f"this is not JSON ({error}): {EXPORT} again.", path) from error
    if isinstance(data, dict):
        body = data.get("prompt")
        if isinstance(body, dict) and "class_type" not in body:  # else a node of that id
            data = body
    if not isinstance(data, dict) or not data:
        raise SettingError(f"this holds no nodes: give a workflow in API form, or {EXPORT}.", path)
    if isinstance(data.get("nodes"), list):
        sibling = path.parent / "api" / path.name
        other = f", or give {sibling}" if sibling.is_file() else ""
        raise SettingError(
            f"this is the UI form, and a server takes the API form: {EXPORT}{other}.", path
        )
    return {node: _node(path, node, described) for node, described in data.items()}


def _node(path: Path, node: str, described: Any) -> dict[str, Any]:
    kind = described.get("class_type") if isinstance(described, dict) else None
    if not isinstance(kind, str) or not kind:
        raise SettingError(
            f"node {node!r} has no class_type, as in a file saved where a node pack was missing: "
            f"install that pack, open the workflow and {EXPORT}.",
            path,
        )
    if not isinstance(described.get("inputs"), dict):
        raise SettingError(
            f"node {node!r} ({kind}) has no inputs, so the file is damaged: {EXPORT} again.", path
        )
    # Images of older servers say `is_changed` too, which would make equal graphs differ.
    return {key: described[key] for key in ("class_type", "inputs", "_meta") if key in described}


def is_link(value: Any) -> bool:
    """Whether an input is wired: ComfyUI takes every list for a link."""
    return isinstance(value, list)


def source(graph: Mapping[str, Any], value: Any) -> str | None:
    """Follows a link to its node; returns None for a value, and for a link to nowhere."""
    if is_link(value) and len(value) == 2 and isinstance(value[0], str) and value[0] in graph:
        return value[0]
    return None


def meta(node: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns what the page saved of a node besides its inputs."""
    found = node.get("_meta")
    return found if isinstance(found, dict) else {}


def title(graph: Mapping[str, Any], node: str) -> str:
    """The node's title on the page, such as `Prompt`; its class where the file names none, and its
    id where the graph has no such node, as a server may tell of one.
    """
    if node not in graph:
        return node
    text = meta(graph[node]).get("title")
    return text.strip() if isinstance(text, str) and text.strip() else graph[node]["class_type"]


def called(graph: Mapping[str, Any], node: str) -> str:
    """Names the node in a message: `'Prompt' (CLIPTextEncode, id positive)`."""
    if node not in graph:
        return node
    kind = graph[node]["class_type"]
    text = title(graph, node)
    return f"{kind} (id {node})" if text == kind else f"{text!r} ({kind}, id {node})"


def shortened(text: str, most: int = 60) -> str:
    """Quotes a text, cut where it is long."""
    return repr(text if len(text) <= most else f"{text[:most]}...")


def plain(name: str) -> str:
    """Takes from a name what need not be typed right: case, spaces, dashes and underscores."""
    return re.sub(r"[\s_-]+", "", name).casefold()


def nodes_called(graph: Graph, name: str) -> list[str]:
    """The ids of the nodes that a person means by `name`.

    An id written exactly is that node alone. Else every node whose title or id is `name` but for
    case, spaces, dashes and underscores. Else `prompt` and `negative prompt` are the nodes whose
    text reaches a sampler.
    """
    if name in graph:
        return [name]
    wanted = plain(name)
    if not wanted:
        return []
    found = [node for node in graph if wanted in (plain(title(graph, node)), plain(node))]
    return found or _prompts(graph, wanted)


def _prompts(graph: Graph, wanted: str) -> list[str]:
    positive = _texts_at(graph, "positive")
    if wanted == "negativeprompt":
        # With ConditioningZeroOut the text of the positive prompt is all that leads there.
        return [node for node in _texts_at(graph, "negative") if node not in positive]
    return positive if wanted in ("prompt", "positiveprompt") else []


def _texts_at(graph: Graph, name: str) -> list[str]:
    found: set[str] = set()
    seen: set[str] = set()
    waiting = [node["inputs"][name] for node in graph.values() if name in node["inputs"]]
    while waiting:
        node = source(graph, waiting.pop())
        if node is None or node in seen:
            continue
        seen.add(node)
        inputs = graph[node]["inputs"]
        if inputs.keys() & {"text", "prompt"}:
            found.add(node)
        else:  # such as a ControlNet, which both prompts pass
            waiting += [inputs[name]] if name in inputs else inputs.values()
    return [node for node in graph if node in found]


def input_called(graph: Graph, node: str, name: str) -> str:
    """What to type for this node's input: `Prompt.text`, or `6.text` where the title is not the
    node's alone.
    """
    text = title(graph, node)
    return f"{text if nodes_called(graph, text) == [node] else node}.{name}"


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
    """Returns the texts in the nodes that load models or LoRAs, among them names of files."""
    values = (value for node in _loaders(graph) for value in node["inputs"].values())
    return {value for value in values if isinstance(value, str)}


def _loaders(graph: Graph) -> Iterator[Mapping[str, Any]]:
    for node in graph.values():
        if "Load" in node["class_type"] and not LOADS_DATA.search(node["class_type"]):
            yield node


@dataclass(frozen=True)
class NodeInput:
    """One input.

    Attributes:
        kind: `INT`, `FLOAT`, `BOOLEAN`, `STRING`, `COMBO`, or the type of a socket.
        rules: what object_info says besides the type: `min`, `max`, `step`, `image_upload` ...
        closed: whether the server takes nothing but what is listed in `choices`.
        opens: whether what it is set to decides which other inputs the node has.
    """

    kind: str
    rules: Mapping[str, Any] = field(default_factory=dict)
    choices: tuple[Any, ...] = ()
    closed: bool = False
    opens: bool = False


def node_inputs(
    object_info: Mapping[str, Any], node: Mapping[str, Any]
) -> dict[str, NodeInput] | None:
    """The inputs that a node of a graph can have, by name; None for a class the server lacks.

    Those that come with what is chosen (`resize_type.width`) or wired (`images.image0`) are among
    them under their whole names.
    """
    described = object_info.get(node["class_type"])
    if described is None:
        return None
    found: dict[str, NodeInput] = {}
    _add_groups(found, described.get("input") or {}, node, "")
    for name, spec in list(found.items()):
        # Our nodes tell what an input and its values were called before, and take both.
        if "older_name" in spec.rules:
            choices = (*spec.choices, *spec.rules.get("older", ()))
            found[name] = replace(spec, choices=choices)
            found.setdefault(spec.rules["older_name"], found[name])
    return found


def other_names(known: Mapping[str, NodeInput]) -> dict[str, str]:
    """Returns {name: the other one of the same input}, of inputs that have an older name."""
    older = {name: spec.rules.get("older_name", name) for name, spec in known.items()}
    found = {name: other for name, other in older.items() if other != name}
    return found | {other: name for name, other in found.items()}


def _add_groups(
    found: dict[str, NodeInput], groups: Mapping[str, Any], node: Mapping[str, Any], prefix: str
) -> None:
    for group in ("required", "optional"):
        for name, (kind, *more) in (groups.get(group) or {}).items():
            rules = more[0] if more and isinstance(more[0], dict) else {}
            if kind == "COMFY_DYNAMICCOMBO_V3":
                _add_dynamic_combo(found, rules, node, prefix + name)
            elif kind == "COMFY_AUTOGROW_V3":
                _add_growing(found, rules["template"], node, f"{prefix}{name}.")
            else:
                choices = kind if isinstance(kind, list) else rules.get("options")
                combo = isinstance(kind, list) or kind == "COMBO"
                closed = (
                    combo
                    and choices is not None
                    and "remote" not in rules
                    and not any(rule.endswith("_upload") for rule in rules)
                    and (node["class_type"], name) not in UNLISTED
                )
                found[prefix + name] = NodeInput(
                    "COMBO" if combo else str(kind),
                    rules,
                    tuple(choices or ()) if combo else (),
                    closed,
                )


def _add_dynamic_combo(
    found: dict[str, NodeInput], rules: Mapping[str, Any], node: Mapping[str, Any], name: str
) -> None:
    options = {option["key"]: option["inputs"] for option in rules.get("options", ())}
    found[name] = NodeInput("COMBO", rules, tuple(options), closed=True, opens=True)
    chosen = node["inputs"].get(name)
    if isinstance(chosen, str) and chosen in options:
        _add_groups(found, options[chosen], node, f"{name}.")


def _add_growing(
    found: dict[str, NodeInput], template: Mapping[str, Any], node: Mapping[str, Any], prefix: str
) -> None:
    grown = template.get("names") or [
        f"{template['prefix']}{number}" for number in range(template["max"])
    ]
    for entries in template["input"].values():
        for entry in entries.values():
            _add_groups(found, {"optional": dict.fromkeys(grown, entry)}, node, prefix)


def key_of(graph: Mapping[str, Any]) -> str:
    """Hashes what a graph computes, whatever its nodes are titled."""
    bare = {node: (content["class_type"], content["inputs"]) for node, content in graph.items()}
    text = json.dumps(bare, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:KEY_LETTERS]
