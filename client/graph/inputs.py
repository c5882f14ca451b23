"""The inputs of node classes, by GET /object_info, and typed texts as values of them."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...errors import SettingError

# Inputs whose list the server does not hold them to: their class checks by itself (ComfyUI 0.33).
UNLISTED = {
    ("CustomCombo", "choice"),
    ("LoadLatent", "latent"),
    ("ModelAttentionBackend", "attention"),
    ("SelectCLIPDevice", "device"),
    ("SelectModelDevice", "device"),
    ("SelectVAEDevice", "device"),
}
WHOLE = re.compile(r"[+-]?[0-9]+")
NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
RANGE = re.compile(r"([+-]?[0-9]+)\.\.([+-]?[0-9]+)")
# Python refuses to read longer numbers (4300 digits); the largest seed has 20.
DIGITS = 40
YES = ("true", "yes", "on", "1")
NO = ("false", "no", "off", "0")
SHOWN = 8


@dataclass(frozen=True)
class NodeInput:
    """One input.

    Attributes:
        kind: `INT`, `FLOAT`, `BOOLEAN`, `STRING`, `COMBO`, or the type of a socket.
        rules: what object_info says besides the type: `min`, `max`, `step`, `image_upload` ...
        choices: what a COMBO lists.
        closed: whether the server takes nothing but what is listed.
        opens: whether what it is set to decides which other inputs the node has.
    """

    kind: str
    rules: Mapping[str, Any] = field(default_factory=dict)
    choices: tuple[Any, ...] = ()
    closed: bool = False
    opens: bool = False

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


def number_range(text: str, spec: NodeInput, where: str) -> range | None:
    """The range that `1..8` means for a number; None for any other text or input.

    Raises:
        SettingError: it runs downwards.
    """
    match = RANGE.fullmatch(text.strip()) if spec.kind in ("INT", "FLOAT") else None
    if match is None:
        return None
    first, last = (_whole(side, where) for side in match.groups())
    if last < first:
        raise SettingError(
            f"{where} is {text.strip()!r}, and a range must go upwards: write {last}..{first}."
        )
    return range(first, last + 1)


def value_of(text: str, spec: NodeInput, where: str) -> Any:
    """The value that a text means for an input.

    Args:
        where: the input's address, for messages.

    Raises:
        SettingError: the text is no such value, or breaks the input's rules.
    """
    if spec.kind == "INT":
        return _in_steps(_in_bounds(_whole(text.strip(), where), spec, where), spec, where)
    if spec.kind == "FLOAT":
        return _in_bounds(_number(text.strip(), where), spec, where)
    if spec.kind == "BOOLEAN":
        return _yes_or_no(text.strip(), where)
    if spec.kind == "COMBO":
        return _choice(text, spec, where)
    if spec.kind == "STRING":
        return text
    raise SettingError(f"{where} takes a link of type {spec.kind}, which cannot be typed.")


def _in_bounds(value: Any, spec: NodeInput, where: str) -> Any:
    least, most = spec.rules.get("min"), spec.rules.get("max")
    if (least is None or least <= value) and (most is None or value <= most):
        return value
    between = f"from {least} to {most}"
    if least is None or most is None:
        between = f"{most} or less" if least is None else f"{least} or more"
    raise SettingError(f"{where} is {value} and must be {between}.")


def _in_steps(value: int, spec: NodeInput, where: str) -> int:
    """Holds the number to the step as the page's box does and the server does not."""
    least, most, step = (spec.rules.get(rule) for rule in ("min", "max", "step"))
    over = (value - (least or 0)) % step if isinstance(step, int) and step > 1 else 0
    if not over:
        return value
    near = [value - over, value - over + step]
    near = [each for each in near if most is None or each <= most]
    raise SettingError(
        f"{where} is {value} and goes in steps of {step}: take {' or '.join(map(str, near))}."
    )


def nearest(word: str, names: Iterable[str]) -> list[str]:
    """Sorts names, most alike first: as a whole, or in one of their parts between dots."""

    def likeness(name: str) -> float:
        # Long texts say nothing more and take quadratic time.
        parts = [part[:80].lower() for part in {name, *name.split(".")}]
        return max(difflib.SequenceMatcher(None, word[:80].lower(), part).ratio() for part in parts)

    return sorted(names, key=likeness, reverse=True)


def listed(names: Sequence[str], most: int = SHOWN) -> str:
    """Puts the first names into words, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def shortened(text: str, most: int = 60) -> str:
    """Quotes a text, cut where it is long."""
    return repr(text if len(text) <= most else f"{text[:most]}...")


def _whole(text: str, where: str) -> int:
    if not WHOLE.fullmatch(text) or len(text) > DIGITS:
        raise SettingError(
            f"{where} is {shortened(text)} and must be a whole number such as 8, or a range such "
            "as 1..8."
        )
    return int(text)


def _number(text: str, where: str) -> float:
    value = float(text) if NUMBER.fullmatch(text) else math.inf
    if math.isinf(value):
        raise SettingError(f"{where} is {shortened(text)} and must be a number such as 4.0.")
    return value


def _yes_or_no(text: str, where: str) -> bool:
    if text.lower() not in (*YES, *NO):
        raise SettingError(f"{where} is {shortened(text)} and must be true or false.")
    return text.lower() in YES


def _choice(text: str, spec: NodeInput, where: str) -> Any:
    # An empty list is a folder without models, of which `Checker` knows more to say.
    if not spec.closed or not spec.choices:
        return text
    for same in (str, lambda choice: str(choice).strip().casefold()):
        found = [choice for choice in spec.choices if same(choice) == same(text)]
        if len(found) == 1:
            return found[0]
    raise SettingError(
        f"{where} is {shortened(text)} and must be one of "
        f"{listed(nearest(text, map(str, spec.choices)))}."
    )
