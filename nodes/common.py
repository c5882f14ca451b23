"""Holds what nodes share: the check of ComfyUI, reports and charts, and inputs of a request."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from comfy_api.latest import io, ui
from PIL import Image

from ..errors import UnavailableError, restart_for
from ..hosts.comfyui.contract import unsupported_host
from ..hosts.comfyui.on_node import shown
from ..planning.estimate import Estimate
from ..planning.options import CHOICE_LABELS, LABELS, OLDER, Option, options

CATEGORY = "Qwen-Image Accelerator"


def schema(**about: Any) -> io.Schema:
    """Makes a node's schema in this pack's category, with the page's names of its inputs."""
    made = io.Schema(category=CATEGORY, **about)
    _label(made.inputs)
    return made


def _label(inputs: Iterable[io.Input]) -> None:
    for each in inputs:
        each.display_name = LABELS.get(each.id)
        options = getattr(each, "options", None) or ()
        if each.id in CHOICE_LABELS and options:
            given = {getattr(option, "key", option) for option in options}
            labels = {it: label for it, label in CHOICE_LABELS[each.id].items() if it in given}
            if "fp32" in given:  # of a VAE
                labels.pop("bf16", None)
            each.extra_dict = {**each.extra_dict, "labels": labels}
            for choice, label in labels.items():
                each.tooltip = re.sub(rf"\b{choice}:", f"{label}:", each.tooltip)
        for option in options:
            _label(getattr(option, "inputs", ()))


@contextmanager
def needs(*capabilities: str) -> Iterator[None]:
    """Refuses what this ComfyUI is too old for or lacks, before anything runs; decorates `execute`.

    Raises:
        UnavailableError: The sentence names what is missing; or the files of this package are
            others than when ComfyUI started.
    """
    if fallback := unsupported_host(capabilities):
        raise UnavailableError(str(fallback))
    try:
        yield
    except Exception as error:
        if restart := restart_for(error):
            raise restart from error
        raise


def model_and_report() -> list[io.Output]:
    return [
        io.Model.Output(tooltip="To the sampler."),
        io.String.Output(
            display_name="report",
            tooltip="What this node will do. Qwen-Image Run Report and ComfyUI's log show what a "
            "run did.",
        ),
    ]


def with_report(*outputs: object, report: str, summary: str | None = None) -> io.NodeOutput:
    """Returns the outputs and the report, with what the page shows on the node.

    ComfyUI sends a cached node's words again where its schema has `has_intermediate_output`.
    """
    return io.NodeOutput(*outputs, report, ui=shown(report, summary))


def with_picture(
    node: type[io.ComfyNode], picture: Image.Image, summary: str, report: str, *outputs: object
) -> io.NodeOutput:
    """Returns the chart as an IMAGE, the report and the outputs; the history has the first two,
    and the page shows the chart and the summary in the node.
    """
    image, picture_of_node = shown_picture(node, picture)
    return io.NodeOutput(image, report, *outputs, ui=picture_of_node | shown(report, summary))


def shown_picture(
    node: type[io.ComfyNode], picture: Image.Image
) -> tuple[torch.Tensor, dict[str, object]]:
    """Returns the chart as an IMAGE, and what makes the page show it in the node."""
    image = torch.from_numpy(np.asarray(picture.convert("RGB"), np.float32) / 255).unsqueeze(0)
    return image, ui.PreviewImage(image, cls=node).as_dict()


def setting_outputs() -> list[io.Output]:
    model, encoder = "Load Qwen-Image Model", "Load Qwen-Image Text Encoder"
    return [
        io.Combo.Output(
            display_name=name, tooltip=f"The plan's {name}: connect it to {name} of {node}."
        )
        for name, node in (
            ("precision", model),
            (LABELS["modulation"], model),
            (LABELS["placement"], encoder),
        )
    ]


def loader_settings(estimate: Estimate) -> tuple[str, str, str]:
    setting = estimate.option.setting
    return estimate.option.loads_as, setting.modulation, setting.placement


def request_inputs(
    *, rare: bool = False, added: bool = False, sockets: bool = True
) -> list[io.Input]:
    """Makes the inputs of the estimator's nodes that say what is to run.

    Args:
        rare, added: as of `Option`.
        sockets: whether the node has MODEL, CLIP, VAE and LATENT, which its tooltips then name.
    """
    return [_input(option, sockets) for option in options(rare=rare, added=added)]


class Choices(list):
    """Lists a widget's choices. Older names pass ComfyUI's check too; the node rewrites them."""

    older: tuple[str, ...] = ()

    def __contains__(self, value: object) -> bool:
        return super().__contains__(value) or value in self.older


def choice_input(name: str, choices: Iterable[str], **about: Any) -> io.Combo.Input:
    """Makes a choice whose older names the page and `qwen-l40s submit` find in GET /object_info.

    Its node has to accept all inputs, because ComfyUI drops those that are not declared.
    """
    options, older = Choices(choices), _older_names(name)
    options.older = tuple(older.get("older", ()))
    return io.Combo.Input(name, options=options, extra_dict=older, **about)


def _older_names(name: str) -> dict[str, Any]:
    older = OLDER.get(name)
    return {} if older is None else {"older_name": older.name, "older": dict(older.values)}


def _input(option: Option, sockets: bool) -> io.Input:
    tooltip = f"{option.help} {option.wired}" if sockets and option.wired else option.help
    about: dict[str, Any] = {"default": option.default, "tooltip": tooltip}
    if option.rare or option.added:
        about["optional"] = True
    if option.rare:
        about["advanced"] = True
    if option.choices:
        return choice_input(option.name, option.choices, **about)
    about["extra_dict"] = _older_names(option.name)
    kind = io.Float.Input if isinstance(option.default, float) else io.Int.Input
    return kind(option.name, min=option.least, max=option.most, step=option.step, **about)
