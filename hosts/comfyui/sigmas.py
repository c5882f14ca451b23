"""Computes the sigmas of a schedule for a MODEL and the size of its image."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ...errors import SettingError
from ...families.comfyui import kind_of
from ...families.registry import find_schedule
from ...planning.request import AUTO
from ...spec.transformer import PIXELS_PER_TOKEN_SIDE
from .contract import read_sizes, transformer_of, unsupported_model
from .estimate.request import latent_sizes
from .lora.few_steps import auto_schedule, few_steps

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher


def sigmas_for(
    model: ModelPatcher,
    name: str,
    steps: int = 0,
    width: int = 0,
    height: int = 0,
    latent: Mapping[str, Any] | None = None,
) -> tuple[list[float], str]:
    """Computes a schedule's sigmas, and says in a few lines what they are.

    Args:
        name: One of `families.registry.schedule_names`, or `AUTO` for that of the few-step LoRA or
            model that is loaded, else the official one.
        steps: 0 for the schedule's, or the model card's.
        width, height: In pixels; 0 for those that the model is trained for.
        latent: What is to be sampled, whose size wins.

    Raises:
        SettingError: The MODEL is not Qwen-Image, the schedule is another family's or has other
            steps, the size is none of the model's, or it generates layers.
    """
    if unsupported_model(model):
        raise SettingError(
            f"the MODEL is {type(model.model).__name__}, but these schedules are for Qwen-Image: "
            "connect Qwen-Image, or use BasicScheduler."
        )
    kind, transformer = kind_of(model.model), transformer_of(model)
    if name == AUTO:
        schedule, lines = auto_schedule(model)
        own = len(schedule.nodes)
        if own and steps not in (0, own):
            lines.append(
                f"steps is {steps}, but is not used: {schedule.name!r} always has {own} steps."
            )
            steps = 0
    else:
        schedule, loaded = find_schedule(name, kind.family), few_steps(model).chosen
        other = loaded and loaded.schedule
        same = other and other.source == schedule.source
        lines = [] if same else [loaded.words() if other else "", schedule.advice]
    shape, timestep_zero = read_sizes(kind.shape, transformer), kind.timestep_zero(transformer)
    member, _ = kind.family.member_of(shape, timestep_zero, 0)
    if member.layers:
        raise SettingError(
            f"the MODEL is {member.name}, whose schedule is unknown: use BasicScheduler."
        )
    if latent is not None:
        width, height = map(latent_sizes(latent).get, ("width", "height"))
    width, height = width or member.side, height or member.side
    count = schedule.steps(steps, member.steps)
    if width % member.size_step or height % member.size_step:
        rule = f"{member.name} needs sides in multiples of {member.size_step}"
        if latent is None:
            raise SettingError(f"{width}x{height}: {rule}: change width and height.")
        lines.append(f"{rule}, but the LATENT is {width}x{height}.")
    lines.insert(0, f"{schedule.name}: {count} steps at {width}x{height}, for {kind.family.title}.")
    sigmas = schedule.sigmas(count, width * height // PIXELS_PER_TOKEN_SIDE**2)
    return sigmas, "\n".join(filter(None, lines))
