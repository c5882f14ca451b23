"""Writes what the note of a workflow says by itself: its files, what it takes of an L40S.

Both follow from the workflow: `--write` puts them below the headings **Files** and **What it
takes**, and leaves all other words of a note alone.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from ...charts.figures import duration, tenths
from ...charts.words import changes, step_cache_lines
from ...families.registry import member_of_file
from ...machine.store import known_cards
from ...planning.bytes import weight_bytes
from ...planning.cards import BUNDLED, Card, find_card
from ...planning.estimate import Estimate, estimate
from ...planning.request import AUTO, Loras, Parts, RunRequest
from ...spec.formats import GIB, format_gib
from ...step_cache import OFF

# The table of published files is where a file's address, size and folder are written by hand.
TABLE = Path(__file__).resolve().parents[2] / "docs" / "models.md"
ROW = re.compile(r"^\| \d+ \| \[(.+)\]\((.+)\) \| (.+) \| `models/(.+)` \|$", re.M)
FILES, TAKES = "**Files**", "**What it takes**"
SAMPLERS = ("KSampler", "SamplerCustom")
RANK = re.compile(r"-r(\d+)\.")  # of a LoRA, in its file's name
# Other sizes whose time a note says too.
ALSO = {"try_on": ((480, 720),)}

Graph = Mapping[str, Mapping[str, Any]]


class ModelFile(NamedTuple):
    """Describes a published file.

    Attributes:
        size: As the table says it.
        directory: Under ComfyUI's `models`.
    """

    name: str
    url: str
    size: str
    directory: str

    def link(self) -> dict[str, str]:
        """Returns what the page's dialog of missing models reads."""
        return {"name": self.name, "url": self.url, "directory": self.directory}


@functools.cache
def published() -> dict[str, ModelFile]:
    """Reads {name: file} from the table in docs/models.md, in its order."""
    rows = ROW.findall(TABLE.read_text(encoding="utf-8"))
    return {row[0]: ModelFile(*row) for row in rows}


def written(text: str, name: str, graph: Graph) -> str:
    """Puts into a note what follows from its workflow.

    Args:
        name: Of the workflow.
        graph: In API form.

    Raises:
        ValueError: a heading is missing, or stands there for nothing; or the workflow runs what
            cannot be estimated.
    """
    named = [link["name"] for node in graph.values() for link in node["_meta"].get("models", ())]
    request = run_request(graph)
    also = [replace(request, width=size[0], height=size[1]) for size in ALSO.get(name, ())]
    for heading, below in (
        (FILES, "\n".join(_line(published()[file]) for file in named)),
        (TAKES, takes(request, also) if request else ""),
    ):
        if (heading in text) != bool(below):
            must = "needs" if below else "has nothing to say below"
            raise ValueError(f"its note {must} the heading {heading}")
        section = re.compile(rf"{re.escape(heading)}.*?(?=^\*\*|\Z)", re.M | re.S)
        said = f"{heading}\n\n{below}\n\n"
        text = section.sub(lambda _, said=said: said, text)
    return text.rstrip() + "\n"


def _line(file: ModelFile) -> str:
    size = f", {file.size}" if file.size.endswith("GiB") else ""
    return f"- [{file.name}]({file.url}){size}\n  in `models/{file.directory}`"


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
    parts = Parts()
    if "fp8" in model:  # one byte a weight throughout, modulation included
        bf16 = weight_bytes(family.transformer, "bf16")
        parts = Parts(transformer_bytes=bf16.total // 2, modulation_bytes=bf16.modulation // 2)
    return RunRequest(
        family=family.name,
        precision=load["precision"],
        **_size(nodes),
        steps=(nodes.get("QwenL40S_Sigmas") or sampler)["steps"],
        cfg="off" if sampler["cfg"] == 1 else "two passes",
        references=classes.count("LoadImage") if family.most_references else 0,
        nag_tokens=RunRequest.text_tokens if "QwenL40S_NAG" in nodes else 0,
        layers=nodes.get("EmptyQwenImageLayeredLatentImage", {}).get("layers", 0),
        text_encoder=next((each for each in ("fp8", "int8") if each in encoder), AUTO),
        loras=_loras(nodes.get("QwenL40S_LoadLora"), classes.count("QwenL40S_LoadLora")),
        controlnet_bytes=round(control_gib * GIB),
        cache=nodes.get("QwenL40S_StepCache", {}).get("cache", OFF),
        parts=parts,
    )


def _loras(load: Mapping[str, Any] | None, count: int) -> Loras:
    if load is None:
        return Loras()
    rank = RANK.search(load["lora"])
    known = {"rank": int(rank[1])} if rank else {}
    return Loras(count, mode=load["lora_mode"], **known)


def _size(nodes: Graph) -> dict[str, int]:
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


def takes(request: RunRequest, also: Sequence[RunRequest] = ()) -> str:
    """Says memory and time on an L40S as `qwen-l40s estimate` does.

    Args:
        also: Other sizes, of which the time is said.
    """
    found = estimate(request, _l40s())
    option = found.option
    peak, usable = tenths(option.peak_bytes), format_gib(option.usable_bytes)
    fits = "tight, not measured" if found.tight else f"it {found.verdict}"
    sentences = [f"On an L40S, predicted: {peak} of {usable}: {fits}."]
    if found.safer:
        spare = format_gib(found.safer.headroom_bytes)
        # As the loader names it, which loads nothing but Qwen-Image's text encoder.
        setting = changes(option.setting, found.safer.setting)
        setting = setting.replace("text_encoder_placement", "placement")
        sentences.append(f"Safer: {setting} in **Load Qwen-Image**, with {spare} to spare.")
    if option.setting.modulation == "off card":
        sentences.append(
            "The modulation weights (a third of the transformer, which see only the timestep) stay "
            "in host memory."
        )
    if option.setting.text_encoder_place == "drop after encoding":
        sentences.append("The text encoder leaves the card after encoding.")
    if option.tiles > 1:
        sentences.append(f"The VAE decodes in {option.tiles} tiles.")
    sentences += [
        _time(request, found),
        *(_time(other, estimate(other, _l40s())) for other in also),
    ]
    sentences += step_cache_lines(found)
    return " ".join(sentences)


def _time(request: RunRequest, found: Estimate) -> str:
    size = f"{request.width}x{request.height} in {request.steps} steps"
    if request.batch > 1:
        whole = duration(found.image_seconds.times(request.batch))
        return f"{request.batch} images of {size}: {whole}."
    return f"An image of {size}: {duration(found.image_seconds)}."


@functools.cache
def _l40s() -> Card:
    # The list that comes with the package: a list of the user's own decides no file.
    return find_card("L40S", known_cards(BUNDLED))
