"""Reads workflow files in ComfyUI's API form: what people call their nodes, which inputs the nodes
have by GET /object_info, and which load the same models.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import re
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import SettingError
from ..files import read_bytes

OURS = "QwenL40S_"
Graph = Mapping[str, dict[str, Any]]  # {node id: {class_type, inputs, _meta?}}

LARGEST = 2**28  # bytes of an image that holds a workflow
PNG_START, PNG_END = b"\x89PNG\r\n\x1a\n", b"IEND\xaeB`\x82"
PNG_TEXTS = (b"tEXt", b"zTXt", b"iTXt", b"comf")  # the last of ComfyUI's SaveAnimatedPNG
LONGEST_TEXT = 2**26  # bytes of a text that a PNG holds compressed
KEY_LETTERS = 16
# What the names of a job's files on a server end with: the beginning of its key, and how often it
# ran before, for a server names a file that is lost again where nothing has changed.
JOB_ID = re.compile(r"_job-([0-9a-f]{12})(-[0-9]+)?(?=(\.[A-Za-z][A-Za-z0-9]{0,7})?$)")
# What nodes call the name of their files, as `plain` writes it: its beginning, or all of it.
PREFIX = re.compile(r"(\w*file(name)?)?prefix")
FILE_NAME = re.compile(r"\w*filename")
SUFFIX = re.compile(r"\.[A-Za-z][A-Za-z0-9]{0,7}$")
# Disks take 255 bytes, of which a node needs some for its number and suffix.
LONGEST_NAME = 200
# Output nodes whose text of that name is no file that they write.
READS = re.compile(r"load|preview|show|display|view", re.IGNORECASE)
# Types of inputs of nodes that save models, under the name that later workflows load.
MODELS = re.compile(r"(^|,)(MODEL|CLIP|CLIP_VISION|VAE|LORA_MODEL|CONTROL_NET)(,|$)")
JOIN = "StringConcatenate"  # of ComfyUI
# An input that no node has: ComfyUI runs the node again where its value changes.
FRESH = "qwen_l40s_job"
EXPORT = "export it on ComfyUI's page with File > Export (API)"
# Load3D, LoadImageMask, VHS_LoadVideo: what is drawn on, which differs from job to job.
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


def job_id(key: str) -> str:
    """Returns what the names of a job's files on a server hold."""
    return f"_job-{key[:12]}"


def with_job_id(
    graph: Graph, object_info: Mapping[str, Any], key: str, ran: int = 0, fresh: str = ""
) -> Graph:
    """Copies the graph with names for the files that its nodes save that no other job has, by its
    key and how often it ran. `fresh` makes ComfyUI run the output nodes, whatever it keeps.
    """
    own = job_id(key) + (f"-{ran}" if ran else "")
    joins: dict[str, dict[str, Any]] = {}
    values: dict[tuple[str, str], Any] = {}
    for node, described in graph.items():
        kind = described["class_type"]
        name = file_input(object_info, kind)
        rules = _inputs_of(object_info, kind, "optional").get(name or "", [])[1:]
        value = described["inputs"].get(name, rules[0].get("default") if rules else None)
        begins = name is not None and PREFIX.fullmatch(plain(name))
        if name and isinstance(value, str):
            values[node, name] = _own_name(value, own, suffixed=not begins)
        elif name and begins and source(graph, value) and JOIN in object_info:
            inputs = {"string_a": value, "string_b": own, "delimiter": ""}
            joins[f"{node}{own}"] = {"class_type": JOIN, "inputs": inputs}
            values[node, name] = [f"{node}{own}", 0]
        if fresh and (object_info.get(kind) or {}).get("output_node"):
            values[node, FRESH] = fresh + own
    return with_inputs({**graph, **joins}, values)


def _own_name(name: str, own: str, *, suffixed: bool) -> str:
    folder, slash, stem = JOB_ID.sub("", name).rpartition("/")
    end = "".join(SUFFIX.findall(stem)) if suffixed else ""
    stem, most = stem.removesuffix(end), LONGEST_NAME - len(own + end)
    if len(data := stem.encode("utf-8", "surrogatepass")) > most:
        stem = data[:most].decode("utf-8", "ignore")
    return f"{folder}{slash}{stem}{own}{end}"


def file_input(object_info: Mapping[str, Any], kind: str) -> str | None:
    """Names the input by which nodes of a class name the files that they save; None for none."""
    inputs = _inputs_of(object_info, kind)
    if "filename_prefix" in inputs:
        return "filename_prefix"
    if not (object_info.get(kind) or {}).get("output_node") or READS.search(kind):
        return None
    texts = [name for name, described in inputs.items() if described[0] == "STRING"]
    names = [name for name in texts if PREFIX.fullmatch(plain(name))]
    if not _saves_models(inputs):
        names += [name for name in texts if FILE_NAME.fullmatch(plain(name))]
    return next(iter(names), None)


def _inputs_of(object_info: Mapping[str, Any], kind: str, *groups: str) -> dict[str, Any]:
    there = (object_info.get(kind) or {}).get("input") or {}
    found = [there.get(group) or {} for group in groups or ("optional", "required")]
    return {name: described for each in found for name, described in each.items()}


def _saves_models(inputs: Mapping[str, Any]) -> bool:
    kinds = [described[0] for described in inputs.values()]
    return any(isinstance(kind, str) and MODELS.search(kind) for kind in kinds)


def always_names(graph: Graph, object_info: Mapping[str, Any]) -> str | None:
    """Names a node of ComfyUI or ours that saves images and tells their names, or None."""
    for node, described in graph.items():
        kind = described["class_type"]
        inputs = _inputs_of(object_info, kind)
        if file_input(object_info, kind) and object_info[kind].get("output_node"):
            core = not str(object_info[kind].get("python_module")).startswith("custom_nodes.")
            known = (core or kind.startswith(OURS)) and not _saves_models(inputs)
            if known and "folder_name" not in inputs:
                return called(graph, node)
    return None


def read_workflow(path: Path) -> Graph:
    """Returns the graph of a .json in API form, as `graph_of` takes it, or of a PNG that ComfyUI
    saved: {node id: {class_type, inputs, _meta?}}. Raises SettingError.
    """
    try:
        data = read_bytes(path, LARGEST)
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        reason = getattr(error, "strerror", None) or error
        raise SettingError(
            f"cannot read the workflow ({reason}): give a file in API form.", path
        ) from error
    try:
        text = _prompt_of(path, data) if data.startswith(PNG_START) else data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise SettingError(
            f"the workflow is neither UTF-8 text nor a PNG: give a file in API form, or {EXPORT}.",
            path,
        ) from error
    if not text.strip():
        raise SettingError(f"the workflow file is empty: {EXPORT}.", path)
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SettingError(f"the workflow is not JSON ({error}): {EXPORT} again.", path) from error
    return graph_of(found, path)


def _prompt_of(path: Path, data: bytes) -> str:
    texts = png_texts(io.BytesIO(data))
    if "prompt" not in texts:
        if PNG_END not in data:
            raise SettingError(
                "this PNG is cut off: give one that ComfyUI saved, or a workflow in API form.",
                path,
            )
        only = "only the UI form of a workflow" if "workflow" in texts else "no workflow"
        raise SettingError(
            f"this PNG holds {only}: give one that ComfyUI saved with its metadata, or open the "
            f"workflow and {EXPORT}.",
            path,
        )
    return texts["prompt"]


def png_texts(file: BinaryIO) -> dict[str, str]:
    """Reads the texts of a PNG before and after the pixels, as far as they can be read."""
    texts = {}
    file.seek(len(PNG_START))
    while len(head := file.read(8)) == 8:
        length, kind = struct.unpack(">I4s", head)
        if kind not in PNG_TEXTS or length > LARGEST:
            file.seek(length + 4, io.SEEK_CUR)
            continue
        data = file.read(length + 4)
        if len(data) < length:
            break
        name, _, text = data[:length].partition(b"\0")
        packed = kind == b"zTXt" or (kind == b"iTXt" and text[:1] == b"\1")
        if kind == b"iTXt":  # two numbers, then language and translated name
            text = text[2:].split(b"\0", 2)[-1]
        elif packed:
            text = text[1:]
        inflate = zlib.decompressobj()
        with contextlib.suppress(zlib.error):
            text = inflate.decompress(text, LONGEST_TEXT) if packed else text
            if packed and not inflate.eof:
                continue
            try:
                texts[name.decode("latin-1")] = text.decode("utf-8")
            except UnicodeDecodeError:
                texts[name.decode("latin-1")] = text.decode("latin-1")
    return texts


def graph_of(data: Any, path: Path | None = None) -> Graph:
    """Returns the graph in JSON of a file, `path`, or of a program. It may lie in the body of a
    POST /prompt or of another service, or in a history. Raises SettingError.
    """
    dicts = list(_dicts(data))
    graphs = [each for each in dicts if _is_graph(each)]
    # A body may hold both forms.
    if any(isinstance(each.get("nodes"), list) for each in (dicts[:1] if graphs else dicts)):
        sibling = path and path.parent / "api" / path.name
        other = f", or give {sibling}" if sibling and sibling.is_file() else ""
        raise SettingError(
            f"this workflow is in UI form, and a server needs the API form: {EXPORT}{other}.", path
        )
    if not graphs:
        raise SettingError(
            (f"the workflow has no nodes: give a workflow in API form, or {EXPORT}."), path
        )
    if any(each != graphs[0] for each in graphs):
        raise SettingError(f"the file has {len(graphs)} workflows: give a file with one.", path)
    return {node: _node(path, graphs[0], node) for node in graphs[0]}


def _dicts(data: Any, depth: int = 5) -> Iterator[dict[str, Any]]:
    """Yields the objects of some JSON, and of JSON in its texts, but not those in a graph."""
    if isinstance(data, str) and data.lstrip().startswith("{"):
        with contextlib.suppress(ValueError, RecursionError):
            data = json.loads(data)
    if isinstance(data, dict):
        yield data
    if isinstance(data, dict | list) and depth and not _is_graph(data):
        for part in data.values() if isinstance(data, dict) else data:
            yield from _dicts(part, depth - 1)


def _is_graph(data: Any) -> bool:
    """Returns whether a value of an object is a node, at least a damaged one."""
    nodes = data.values() if isinstance(data, dict) else ()
    return any(
        isinstance(node, dict)
        and ("class_type" in node or ("inputs" in node and node.keys() <= {"inputs", "_meta"}))
        for node in nodes
    )


def _node(path: Path | None, graph: Mapping[str, Any], node: str) -> dict[str, Any]:
    described = graph[node]
    kind = described.get("class_type") if isinstance(described, dict) else None
    if not isinstance(kind, str) or not kind:
        raise SettingError(
            f"node {node!r} has no class_type, as when a file is saved without a node pack: "
            f"install that pack, open the workflow and {EXPORT}.",
            path,
        )
    if not isinstance(described.get("inputs"), dict):
        raise SettingError(
            f"node {node!r} ({kind}) has no inputs: the file is damaged. {EXPORT} again.", path
        )
    # Images of older servers say `is_changed` too, which would make equal graphs differ.
    found = {key: described[key] for key in ("class_type", "inputs", "_meta") if key in described}
    found["inputs"] = {name: _linked(graph, it) for name, it in described["inputs"].items()}
    return found


def _linked(graph: Mapping[str, Any], value: Any) -> Any:
    match value:
        case [int(node), socket] if str(node) in graph:  # as a program may write an id
            return [str(node), socket]
    return value


def is_link(value: Any) -> bool:
    """Returns whether an input is wired: ComfyUI takes every list for a link."""
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
    """Returns a node's title on the page, else its class; its id where the graph lacks it."""
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
    return repr(text if len(text) <= most else f"{text[:most]}...")


def plain(name: str) -> str:
    """Takes from a name what need not be typed right: case, spaces, dashes and underscores."""
    return re.sub(r"[\s_-]+", "", name).casefold()


def nodes_called(graph: Graph, name: str) -> list[str]:
    """Returns the ids of the nodes that a person means by `name`: an id written exactly, else every
    node of that title or id. Case, spaces, dashes and underscores do not count. `prompt` and
    `negative prompt` are texts that reach a sampler.
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
    """Returns what to type for an input: `Prompt.text`, or `6.text` where titles repeat."""
    text = title(graph, node)
    return f"{text if nodes_called(graph, text) == [node] else node}.{name}"


def loaders_key(graph: Graph) -> str:
    """Returns a short hash of the models that a graph loads. It counts all values of nodes whose
    class name says that they load, so jobs of one key share loaded models.
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
    kind: str  # `INT`, `FLOAT`, `BOOLEAN`, `STRING`, `COMBO`, or the type of a socket
    rules: Mapping[str, Any] = field(default_factory=dict)
    choices: tuple[Any, ...] = ()
    closed: bool = False  # whether the server takes nothing but what is listed in `choices`
    opens: bool = False  # whether what it is set to decides which other inputs the node has


def node_inputs(
    object_info: Mapping[str, Any], node: Mapping[str, Any]
) -> dict[str, NodeInput] | None:
    """Returns the inputs that a node can have, by name; None for a class the server lacks.

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
