"""Computes schedules of sigmas: the official one of any size, and those of few-step models."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ..errors import SettingError

# The scheduler's configuration of Qwen/Qwen-Image, and Qwen/Qwen-Image-2.1 has the same: mu grows
# with the tokens, along a line through these two points and past them.
FEW_TOKENS, MANY_TOKENS = 256, 8192
BASE_SHIFT, MAX_SHIFT = 0.5, 0.9
LAST = 0.02  # sigma of the last step

# Sources: files that programs read; of Viggle and Pruna, as the card states.
HUB = "https://huggingface.co/Qwen/"
PAI = (
    "https://huggingface.co/alibaba-pai/Qwen-Image-2.1-Fun-Acc-LoRAs/blob"
    "/f7545234760e1847cd8e89e52bd951cb0b7e327f/models/pdd_config.json"
)
VIGGLE = "https://huggingface.co/Viggle/Qwen-Image-2.1-viggle-turbo"
VIGGLE_LORA = "Viggle's turbo LoRA of Qwen-Image-2.1, in lora_mode bypass at strength 1"
# Renamed to P-Q-Image-2.1, whose v0.2 of 6 steps is published without sigmas that are known here.
PRUNA = "https://huggingface.co/PrunaAI/Pruna-Qwen-Image-2.1"
PRUNA_NAMES = "pruna|^p_q(wen)?_image_2_1"
LIGHTNING = (  # of all versions, Edit, 2509, 2511 and 2512 too
    "https://github.com/ModelTC/Qwen-Image-Lightning/blob/25d1e9935ba97e1f60503f8c000201e08b1fe8f4"
    "/generate_with_diffusers.py"
)
# The second are models that it is merged into.
LIGHTNING_NAMES = r"lightning|^qwen_image_(edit_)?25\d\d_fp8_e4m3fn_scaled_"
LIGHTNING_21 = "https://huggingface.co/lightx2v/Qwen-Image-2.1-Lightning"
# Names that many files have: the name of the folder says what the file is.
GENERIC = {"pytorch_lora_weights", "diffusion_pytorch_model", "model", "transformer"}
STEPS = re.compile(r"(?<!\d)([1-9]|1[0-6])_?steps?(?![a-z\d])")  # more are not few


def official_sigmas(steps: int, tokens: int = 4096) -> list[float]:
    """Computes diffusers' sigmas for Qwen-Image: shifted by the size, the last stretched to 0.02.

    Source: `QwenImagePipeline.__call__` and `FlowMatchEulerDiscreteScheduler.set_timesteps` with
    the scheduler's configuration of Qwen/Qwen-Image; `QwenImage21Pipeline` has the same.

    Args:
        tokens: of the image, 16x16 pixels each; 4096 are 1024x1024.
    """
    if steps == 1:
        return [1.0, 0.0]
    even = (1 - i * (1 - 1 / steps) / (steps - 1) for i in range(steps))
    shifted = _shifted(even, shift_of(tokens))
    stretch = (1 - shifted[-1]) / (1 - LAST)
    return [*(1 - (1 - s) / stretch for s in shifted), 0.0]


def shift_of(tokens: int) -> float:
    """Returns exp(mu) of a size: 2.00 at 1024x1024, 3.72 at 2048x2048."""
    slope = (MAX_SHIFT - BASE_SHIFT) * (tokens - FEW_TOKENS) / (MANY_TOKENS - FEW_TOKENS)
    return math.exp(BASE_SHIFT + slope)


def _shifted(sigmas: Iterable[float], shift: float) -> list[float]:
    return [shift / (shift + 1 / s - 1) for s in sigmas]


@dataclass(frozen=True)
class Schedule:
    name: str
    source: str
    nodes: tuple[float, ...] = ()  # sigmas before the shift, without the last 0; empty: any number
    shift: float | None = None  # at every size; None grows with the size, as `shift_of` says
    # What has to be loaded for it, in words; empty for every model of the family. It is published
    # for CFG 1 and, of a LoRA, for strength 1.
    trained: str = ""
    # What the names of its published files have, in the form of `plain_name`; empty for a second
    # schedule of the same files.
    named: str = ""
    # What its LoRA changes outside the blocks, layers in order; a pattern. Empty where other LoRAs
    # change the same.
    outside: str = ""
    ranks: tuple[int, ...] = ()  # of its LoRA's layers, at least; empty where they do not tell it

    def steps(self, asked: int | None, usual: int) -> int:
        """Returns its steps, else `asked`, else `usual`; raises SettingError for other steps."""
        own = len(self.nodes)
        if own and asked not in (None, 0, own):
            raise SettingError(
                f"steps is {asked}, but the schedule {self.name!r} has {own} steps: leave steps "
                f"out, or choose {OFFICIAL.name!r}, which takes any number."
            )
        return own or asked or usual

    @property
    def advice(self) -> str:
        """Says what has to be loaded for it, which nothing tells; empty where nothing has."""
        if not self.trained:
            return ""
        return (
            f"The schedule {self.name!r} is only for {self.trained}. The file does not show "
            "whether it is that one. With another model, the schedule damages the image: choose "
            f"{OFFICIAL.name!r} there."
        )

    def sigmas(self, steps: int, tokens: int) -> list[float]:
        """Computes the sigmas, one more than `steps` gave; tokens as of `official_sigmas`."""
        if not self.nodes:
            return official_sigmas(steps, tokens)
        shift = shift_of(tokens) if self.shift is None else self.shift
        return [*_shifted(self.nodes, shift), 0.0]


def plain_name(path: Path) -> str:
    """Returns a file's name in small letters without its ending, with `_` between its words."""
    name = re.sub(r"\.(safetensors|gguf)$", "", path.name.lower())
    return plain_name(path.parent) if name in GENERIC else re.sub(r"[^a-z0-9]+", "_", name)


def steps_in(name: str) -> int | None:
    """Reads how many steps a plain name says; None where it says none."""
    found = STEPS.search(name)
    return int(found[1]) if found else None


def schedule_of_file(name: str, schedules: Iterable[Schedule]) -> Schedule | None:
    """Returns the schedule of a file that its repository or Comfy-Org published, or None."""
    count = steps_in(name)
    named = (it for it in schedules if it.named and re.search(it.named, name))
    found = [it for it in named if count in (None, len(it.nodes))]
    return found[0] if len(found) == 1 else None


def schedule_of_lora(outside: str, rank: int, schedules: Iterable[Schedule]) -> Schedule | None:
    """Returns the schedule of a LoRA by the layers that it alone changes outside the blocks, in
    order with commas, and its smallest rank; None of others.
    """
    told = (it for it in schedules if it.outside and re.fullmatch(it.outside, outside))
    return next((it for it in told if rank in (it.ranks or (rank,))), None)


OFFICIAL = Schedule("official", f"{HUB}Qwen-Image-2.1/blob/main/scheduler/scheduler_config.json")
OF_QWEN_IMAGE = tuple(
    Schedule(
        f"lightning {n}", LIGHTNING, nodes, 3.0, f"a Lightning LoRA of {n} steps", LIGHTNING_NAMES
    )
    for n, nodes in ((4, (1.0, 0.75, 0.5, 0.25)), (8, tuple(1 - i / 8 for i in range(8))))
)
OF_QWEN_IMAGE_21 = (
    Schedule(
        "lightning 4",
        LIGHTNING_21,
        (1.0, 0.75, 0.5, 0.25),
        None,
        "lightx2v's Lightning LoRA of Qwen-Image-2.1",
        "lightning",
    ),
    Schedule(
        "turbo 8",
        f"{HUB}Qwen-Image-2.1-Turbo/blob/main/model_index.json",
        (1.0, 0.978453, 0.95418, 0.926626, 0.89508, 0.845148, 0.704534, 0.414568),
        1.0,
        "Qwen-Image-2.1-Turbo",
        "^(?!.*(viggle|wuli)).*2_1_turbo(_|$)",
        # Comfy-Org's LoRA alone has the difference of this norm, as a whole tensor.
        outside=r".*\btxt_in\.text_norm\b.*",
    ),
    Schedule(
        "viggle 6",
        VIGGLE,
        (1.0, 0.9375, 0.875, 0.75, 0.5, 0.25),
        None,
        VIGGLE_LORA,
        "viggle",
        # Of v0.2 to v0.3; v0.1, which has 4 steps, has the rank 64.
        "modulation.1,time_text_embed.timestep_embedder.linear_1,"
        "time_text_embed.timestep_embedder.linear_2",
        (128, 256),
    ),
    Schedule(
        "viggle 9",
        VIGGLE,
        (1.0, 0.9583, 0.9167, 0.875, 0.75, 0.5, 0.25, 1 / 6, 1 / 12),
        None,
        f"{VIGGLE_LORA}, v0.3, in the first 7 steps, and no LoRA in the last 2",
    ),
    Schedule(
        "pruna 8",
        PRUNA,
        (1.0, 14 / 15, 6 / 7, 10 / 13, 2 / 3, 6 / 11, 0.4, 2 / 9),
        1.0,
        "Pruna's LoRA of 8 steps",
        PRUNA_NAMES,
    ),
    Schedule(
        "pruna 5",
        PRUNA,
        (1.0, 0.94, 6 / 7, 2 / 3, 0.4),
        1.0,
        "Pruna's LoRA of 5 steps",
        PRUNA_NAMES,
    ),
    Schedule(
        "pai 4",
        PAI,
        (1.0, 0.9169867038726807, 0.7861579060554504, 0.5494909882545471),
        1.0,
        "alibaba-pai's Fun-Acc LoRA of 4 steps, whose four output layers its own nodes run",
    ),
)
