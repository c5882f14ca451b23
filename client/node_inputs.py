"""The inputs that a node class has, read from a server's GET /object_info."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# Inputs whose list the server does not hold them to: their class checks by itself (ComfyUI 0.33).
UNLISTED = {
    ("CustomCombo", "choice"),
    ("LoadLatent", "latent"),
    ("ModelAttentionBackend", "attention"),
    ("SelectCLIPDevice", "device"),
    ("SelectModelDevice", "device"),
    ("SelectVAEDevice", "device"),
}


@dataclass(frozen=True)
class NodeInput:
    """One input.

    Attributes:
        kind: `INT`, `FLOAT`, `BOOLEAN`, `STRING`, `COMBO`, or the type of a socket.
        rules: what object_info says beside the type: `min`, `max`, `step`, `image_upload` ...
        choices: what a COMBO lists.
        closed: whether the server takes nothing but what is listed.
        required: the server refuses the node without it.
    """

    kind: str
    rules: Mapping[str, Any] = field(default_factory=dict)
    choices: tuple[Any, ...] = ()
    closed: bool = False
    required: bool = False

    @property
    def takes_image(self) -> bool:
        return bool(self.rules.get("image_upload"))


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
    return found


def is_link(value: Any) -> bool:
    """Whether an input is wired: ComfyUI takes every list for a link."""
    return isinstance(value, list)


def _add_groups(
    found: dict[str, NodeInput], groups: Mapping[str, Any], node: Mapping[str, Any], prefix: str
) -> None:
    for group in ("required", "optional"):
        for name, entry in (groups.get(group) or {}).items():
            kind = entry[0]
            rules = entry[1] if len(entry) > 1 and isinstance(entry[1], dict) else {}
            required = group == "required"
            if kind == "COMFY_DYNAMICCOMBO_V3":
                _add_dynamic_combo(found, rules, node, prefix + name)
            elif kind == "COMFY_AUTOGROW_V3":
                _add_growing(found, rules, node, prefix + name)
            elif kind == "COMBO" or isinstance(kind, list):
                listed = kind if isinstance(kind, list) else rules.get("options")
                closed = (
                    listed is not None
                    and "remote" not in rules
                    and not any(rule.endswith("_upload") for rule in rules)
                    and (node["class_type"], name) not in UNLISTED
                )
                found[prefix + name] = NodeInput(
                    "COMBO", rules, tuple(listed or ()), closed, required
                )
            else:
                found[prefix + name] = NodeInput(str(kind), rules, required=required)


def _add_dynamic_combo(
    found: dict[str, NodeInput], rules: Mapping[str, Any], node: Mapping[str, Any], name: str
) -> None:
    options = {option["key"]: option["inputs"] for option in rules.get("options", ())}
    # Not required: the server misses it only when the node runs.
    found[name] = NodeInput("COMBO", rules, tuple(options), closed=True)
    chosen = node["inputs"].get(name)
    if isinstance(chosen, str) and chosen in options:
        _add_groups(found, options[chosen], node, f"{name}.")


def _add_growing(
    found: dict[str, NodeInput], rules: Mapping[str, Any], node: Mapping[str, Any], name: str
) -> None:
    template = rules["template"]
    grown = template.get("names") or [
        f"{template['prefix']}{number}" for number in range(template["max"])
    ]
    for group, entries in template["input"].items():
        for entry in entries.values():
            for number, each in enumerate(grown):
                required = group == "required" and number < template["min"]
                one = {"required" if required else "optional": {each: entry}}
                _add_groups(found, one, node, f"{name}.")
