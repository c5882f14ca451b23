"""Writes the generated lines of a workflow's note, below the headings `FILES` and `TAKES`: its
files, and what it takes of GPUs.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ...charts.figures import duration, tenths
from ...charts.text import step_cache_lines
from ...errors import DoesNotFitError
from ...families.registry import member_of_file
from ...machine.store import known_cards
from ...planning.bytes import weight_bytes
from ...planning.card_list import BUNDLED
from ...planning.estimate import estimate
from ...planning.request import AUTO, Loras, Parts, RunRequest
from ...planning.step_cache import OFF
from ...spec.formats import GIB, format_gib

# The table of published files is where a file's address, size and folder are written by hand.
TABLE = Path(__file__).resolve().parents[2] / "docs" / "models.md"
ROW = re.compile(r"^\| \d+ \| \[(.+)\]\((.+)\) \| (.+) \| `models/(.+)` \|$", re.M)
FILES, TAKES = "**Files**", "**What it takes**"
LINK = re.compile(r"\[(.+?)\]\(.+?\)")
BELOW = 46  # from a node to the next one, whose title is 30 high
SAMPLERS = ("KSampler", "SamplerCustom")
RANK = re.compile(r"-r(\d+)\.")  # of a LoRA, in its file's name
# {GB of a class of cards: a slow one of it}
CARDS = {
    8: "RTX 4060",
    12: "RTX 3060 12GB",
    16: "RTX 4060 Ti 16GB",
    24: "RTX 3090",
    48: "L40S",
}

Graph = Mapping[str, Mapping[str, Any]]


class ModelFile(NamedTuple):
    name: str
    url: str
    size: str  # as the table says it
    directory: str  # under ComfyUI's `models`

    def link(self) -> dict[str, str]:
        """Returns what the page's dialog of missing models reads."""
        return {"name": self.name, "url": self.url, "directory": self.directory}


@functools.cache
def published() -> dict[str, ModelFile]:
    """Reads {name: file} from the table in docs/models.md, in its order."""
    rows = ROW.findall(TABLE.read_text(encoding="utf-8"))
    return {row[0]: ModelFile(*row) for row in rows}


def written(text: str, graph: Graph) -> str:
    """Puts into a note what follows from its workflow; raises ValueError for its headings."""
    named = [link["name"] for node in graph.values() for link in node["_meta"].get("models", ())]
    request = run_request(graph)
    lines = ""
    for file in map(published().__getitem__, named):
        size = f", {file.size}" if file.size.endswith("GiB") else ""
        lines += f"\n- [{file.name}]({file.url}){size} → `models/{file.directory}`"
    for heading, below in (
        (FILES, lines and f"\n{lines}"),
        (TAKES, takes(request) if request else ""),
    ):
        if (heading in text) != bool(below):
            must = "needs" if below else "has nothing to say below"
            raise ValueError(f"its note {must} the heading {heading}")
        section = re.compile(rf"{re.escape(heading)}.*?(?=^\*\*|\Z)", re.M | re.S)
        said = f"{heading}{below}\n\n"
        text = section.sub(lambda _, said=said: said, text)  # type: ignore[misc]
    return text.rstrip() + "\n"


def place(graph: Mapping[str, Any], note: dict[str, Any]) -> None:
    """Gives a note the height of its text, and moves what stands below it out of its way."""
    (x, y), (width, _) = note["pos"], note["size"]
    note["size"] = [width, _height(note["widgets_values"][0], width)]
    below = [node for node in graph["nodes"] if node["pos"][0] < x + width and node is not note]
    top = min((node["pos"][1] for node in below), default=0)
    for node in below:
        node["pos"][1] += y + note["size"][1] + BELOW - top


def _height(text: str, width: int) -> int:
    """Adds up lines 16 units high, with letters 5.2 wide, and gaps of 6, as the page draws them."""
    height = 76
    for line in LINK.sub(r"\1", text).replace("**", "").strip().splitlines():
        item = line.startswith("- ")
        height += 16 * math.ceil(len(line) * 5.2 / (width - (56 if item else 24)))
        height += 6 * (item or not line)
    return height


def run_request(graph: Graph) -> RunRequest | None:
    """Tells what a workflow in API form runs; None where it samples no published model."""
    nodes = {node["class_type"]: node["inputs"] for node in graph.values()}
    sampler = next((nodes[name] for name in SAMPLERS if name in nodes), None)
    load = nodes.get("QwenL40S_Load", {})
    model = load.get("model")
    if sampler is None or model not in published():
        return None
    family = member_of_file(model)
    classes = [node["class_type"] for node in graph.values()]
    encoder = load["text_encoder"]
    control = nodes.get("ControlNetLoader", {}).get("control_net_name")
    control_gib = float(published()[control].size.removesuffix(" GiB")) if control else 0
    precision, parts = load["precision"], Parts()
    if stored := _eight_bits(model):  # one byte a weight throughout, modulation included
        bf16 = weight_bytes(family.transformer, "bf16")
        sizes: dict[str, Any] = {"transformer_bytes": bf16.total // 2}
        sizes["modulation_bytes"] = bf16.modulation // 2
        cast = stored == "fp8" and "scaled" not in model
        parts = Parts(**sizes, kept=stored if precision == AUTO else "", cast=cast)
        precision = stored if precision == AUTO else precision
    return RunRequest(
        family=family.name,
        precision=precision,
        **_size(nodes),
        steps=(nodes.get("QwenL40S_Sigmas") or sampler)["steps"],
        cfg="off" if sampler["cfg"] == 1 else "two passes",
        references=classes.count("LoadImage") if family.most_references else 0,
        nag_tokens=RunRequest.text_tokens if "QwenL40S_NAG" in nodes else 0,
        layers=nodes.get("EmptyQwenImageLayeredLatentImage", {}).get("layers", 0),
        text_encoder=_eight_bits(encoder) or "bf16",
        loras=_loras(nodes.get("QwenL40S_LoadLora"), classes.count("QwenL40S_LoadLora")),
        controlnet_bytes=round(control_gib * GIB),
        cache=nodes.get("QwenL40S_StepCache", {}).get("cache", OFF),
        parts=parts,
    )


def _eight_bits(file: str) -> str | None:
    return next((form for form in ("fp8", "int8") if form in file), None)


def _loras(load: Mapping[str, Any] | None, count: int) -> Loras:
    if load is None:
        return Loras()
    rank = RANK.search(load["lora"])
    known = {"rank": int(rank[1])} if rank else {}
    return Loras(count, mode=load["lora_mode"], **known)


def _size(nodes: Graph) -> dict[str, Any]:
    """Takes it from the latents; else from ComfyUI's example.png, which is square."""
    empty = nodes.get("EmptySD3LatentImage", {})
    if isinstance(empty.get("width"), int):
        names = {"width": "width", "height": "height", "batch": "batch_size"}
        return {name: empty[key] for name, key in names.items()}
    if "ImageScaleToTotalPixels" in nodes:
        scale = nodes["ImageScaleToTotalPixels"]
        step = scale["resolution_steps"]
        side = round(math.sqrt(scale["megapixels"] * 2**20) / step) * step
    elif "ImageScaleToMaxDimension" in nodes:
        side = nodes["ImageScaleToMaxDimension"]["largest_size"]
    else:  # FluxKontextImageScale makes a megapixel of it
        side = nodes.get("TextEncodeQwenImage21", {}).get("resolution", 1024)
    return {"width": side, "height": side}


def takes(request: RunRequest) -> str:
    """Says time and memory, a line for each of `CARDS`, as `qwen-l40s estimate` does."""
    many = f"{request.batch} of " if request.batch > 1 else ""
    title = f" ({many}{request.width}x{request.height}, {request.steps} steps, predicted)\n\n"
    rows = []
    for size, name in CARDS.items():
        about = f"{size} GB ({name.removesuffix(f' {size}GB')})"
        try:
            found = estimate(request, known_cards(BUNDLED)[name])
        except DoesNotFitError:
            rows.append(f"{about} · does not fit")
            continue
        option = found.option
        memory = f"{tenths(option.peak_bytes)} of {format_gib(option.usable_bytes)} VRAM"
        if moved := option.moved_bytes:
            memory = f"{format_gib(moved)} offloaded"
        whole = found.image_seconds.times(request.batch)
        rows.append(f"{about} · {duration(whole)} · {memory}")
    return title + "\n\n".join(["\\\n".join(rows), *step_cache_lines(found)])
