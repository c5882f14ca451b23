"""The schedules of sigmas: the official one of any size, and those that few-step models know."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import SettingError

# The scheduler's configuration of Qwen/Qwen-Image, and Qwen/Qwen-Image-2.1 has the same: mu grows
# with the tokens, along a line through these two points and past them.
FEW_TOKENS, MANY_TOKENS = 256, 8192
BASE_SHIFT, MAX_SHIFT = 0.5, 0.9
LAST = 0.02  # sigma of the last step

HUB = "https://huggingface.co/"
VIGGLE = f"{HUB}Viggle/Qwen-Image-2.1-viggle-turbo"
VIGGLE_LORA = "Viggle's turbo LoRA of Qwen-Image-2.1, in lora_mode bypass at strength 1"
PRUNA = f"{HUB}PrunaAI/Pruna-Qwen-Image-2.1"
LIGHTNING = (
    "https://github.com/ModelTC/Qwen-Image-Lightning/blob/342260e8f5468d2f24d084ce04f55e101007118b"
    "/generate_with_diffusers.py"
)


def official_sigmas(steps: int, tokens: int = 4096) -> list[float]:
    """Computes diffusers' sigmas for Qwen-Image: shifted by the size, the last stretched to 0.02.

    Source: `QwenImagePipeline.__call__` and `FlowMatchEulerDiscreteScheduler.set_timesteps` with
    the scheduler's configuration of Qwen/Qwen-Image; `QwenImage21Pipeline` has the same.

    Args:
        tokens: of the image, 16x16 pixels each; 4096 are 1024x1024.
    """
    if steps == 1:
        return [1.0, 0.0]
    shift = shift_of(tokens)
    even = (1 - i * (1 - 1 / steps) / (steps - 1) for i in range(steps))
    shifted = _shifted(even, shift)
    stretch = (1 - shifted[-1]) / (1 - LAST)
    return [*(1 - (1 - s) / stretch for s in shifted), 0.0]


def shift_of(tokens: int) -> float:
    """Returns exp(mu) of a size: 2.00 at 1024x1024, 3.72 at 2048x2048."""
    slope = (MAX_SHIFT - BASE_SHIFT) * (tokens - FEW_TOKENS) / (MANY_TOKENS - FEW_TOKENS)
    return math.exp(BASE_SHIFT + slope)


def _shifted(sigmas: Sequence[float], shift: float) -> list[float]:
    return [shift / (shift + 1 / s - 1) for s in sigmas]


@dataclass(frozen=True)
class Schedule:
    """Describes a schedule of sigmas.

    Attributes:
        name: As nodes and command take it.
        source: Where its sigmas are published.
        as_the_card_states: Whether that is a model card, and no file that a program reads.
        nodes: Its sigmas before they are shifted, without the last 0; empty for any number.
        shift: At every size; None grows with the size, as `shift_of` says.
        trained: What has to be loaded for it, in words; empty for every model of the family.
    """

    name: str
    source: str
    as_the_card_states: bool = False
    nodes: tuple[float, ...] = ()
    shift: float | None = None
    trained: str = ""

    def steps(self, asked: int | None, usual: int) -> int:
        """Returns the number of steps.

        Args:
            asked: None or 0 for its own.
            usual: Of the model card, where it has any number.

        Raises:
            SettingError: it has other steps than those that are asked for.
        """
        own = len(self.nodes)
        if own and asked not in (None, 0, own):
            raise SettingError(
                f"steps is {asked}, and the schedule {self.name!r} has {own} steps: leave steps "
                f"out, or choose {OFFICIAL.name!r}, which has any number."
            )
        return own or asked or usual

    @property
    def advice(self) -> str:
        """Says what has to be loaded for it, which nothing tells; empty where nothing has."""
        if not self.trained:
            return ""
        return (
            f"The schedule {self.name!r} is for {self.trained}, which cannot be told from the "
            f"model: on another one the picture is spoilt, so choose {OFFICIAL.name!r} there."
        )

    def sigmas(self, steps: int, tokens: int) -> list[float]:
        """Computes the sigmas, one more than there are steps, from 1 down to 0.

        Args:
            steps: that `steps` gave.
            tokens: as of `official_sigmas`.
        """
        if not self.nodes:
            return official_sigmas(steps, tokens)
        shift = shift_of(tokens) if self.shift is None else self.shift
        return [*_shifted(self.nodes, shift), 0.0]


OFFICIAL = Schedule(
    "official", f"{HUB}Qwen/Qwen-Image-2.1/blob/main/scheduler/scheduler_config.json"
)
OF_QWEN_IMAGE = tuple(
    Schedule(
        f"lightning {steps}",
        LIGHTNING,
        nodes=tuple(1 - i / steps for i in range(steps)),
        shift=3.0,
        trained=f"a Lightning LoRA of {steps} steps",
    )
    for steps in (4, 8)
)
OF_QWEN_IMAGE_21 = (
    Schedule(
        "turbo 8",
        f"{HUB}Qwen/Qwen-Image-2.1-Turbo/blob/main/model_index.json",
        nodes=(1.0, 0.978453, 0.95418, 0.926626, 0.89508, 0.845148, 0.704534, 0.414568),
        shift=1.0,
        trained="Qwen-Image-2.1-Turbo, whose weights no header tells from the base model's",
    ),
    Schedule(
        "viggle 6",
        VIGGLE,
        as_the_card_states=True,
        nodes=(1.0, 0.9375, 0.875, 0.75, 0.5, 0.25),
        trained=VIGGLE_LORA,
    ),
    Schedule(
        "viggle 9",
        VIGGLE,
        as_the_card_states=True,
        nodes=(1.0, 0.9583, 0.9167, 0.875, 0.75, 0.5, 0.25, 1 / 6, 1 / 12),
        trained=f"{VIGGLE_LORA}, v0.3, in the first 7 steps, and no LoRA in the last 2",
    ),
    Schedule(
        "pruna 8",
        PRUNA,
        as_the_card_states=True,
        nodes=(1.0, 14 / 15, 6 / 7, 10 / 13, 2 / 3, 6 / 11, 0.4, 2 / 9),
        shift=1.0,
        trained="Pruna's LoRA of 8 steps",
    ),
    Schedule(
        "pruna 5",
        PRUNA,
        as_the_card_states=True,
        nodes=(1.0, 0.94, 6 / 7, 2 / 3, 0.4),
        shift=1.0,
        trained="Pruna's LoRA of 5 steps",
    ),
    Schedule(
        "pai 4",
        f"{HUB}alibaba-pai/Qwen-Image-2.1-Fun-Acc-LoRAs/blob/f7545234760e1847cd8e89e52bd951cb0b7e327f"
        "/models/pdd_config.json",
        nodes=(1.0, 0.9169867038726807, 0.7861579060554504, 0.5494909882545471),
        shift=1.0,
        trained="alibaba-pai's Fun-Acc LoRA of 4 steps, whose four output layers its own nodes run",
    ),
)
