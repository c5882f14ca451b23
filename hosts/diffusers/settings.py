"""The settings of one generation, checked before anything heavy is imported or loaded."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...errors import SettingError
from ...step_cache import OFF, cache_settings

OFFLOADS = ("auto", "none", "model")
SIZE_STEP = 16  # 8 from the VAE times 2 from the transformer's patches
MAX_SEED = 2**63 - 1


@dataclass(frozen=True, kw_only=True)
class GenerateSettings:
    """The settings of one generation.

    Attributes:
        width, height: pixels, divisible by 16.
        cfg: classifier-free guidance scale; at most 1 switches it off and halves the work.
        seed: image i of the batch starts from the noise of `seed + i`.
        cache: the step cache, one of `step_cache.CHOICES`.

    Raises:
        SettingError: a value breaks its rule.
    """

    prompt: str
    negative_prompt: str = " "
    width: int
    height: int
    steps: int = 20
    cfg: float = 4.0
    seed: int = 0
    batch: int = 1
    cache: str = OFF

    def __post_init__(self) -> None:
        _check_text("prompt", self.prompt)
        _check_text("negative_prompt", self.negative_prompt)
        _check_size("width", self.width)
        _check_size("height", self.height)
        _check_count("steps", self.steps)
        _check_count("batch", self.batch)
        if not isinstance(self.seed, int) or not 0 <= self.seed <= MAX_SEED:
            raise SettingError(
                f"seed must be a whole number from 0 to 2**63 - 1, got {self.seed!r}."
            )
        if not isinstance(self.cfg, int | float) or not math.isfinite(self.cfg) or self.cfg < 0:
            raise SettingError(
                f"cfg must be a finite number of at least 0, got {self.cfg!r}: use 4.0, or 1 to "
                "switch guidance off."
            )
        cache_settings(self.cache)


def _check_text(name: str, value: str) -> None:
    if not isinstance(value, str):
        raise SettingError(f"{name} must be one string, got {value!r}.")
    try:
        value.encode()
    except UnicodeEncodeError:
        # A terminal that is not UTF-8 hands over lone surrogates, which the tokenizer cannot take.
        raise SettingError(
            f"{name} is not valid Unicode, got {value!r}: type it in UTF-8."
        ) from None


def _check_size(name: str, value: int) -> None:
    if isinstance(value, int) and value >= SIZE_STEP and value % SIZE_STEP == 0:
        return
    rule = f"{name} must be a whole number of pixels divisible by {SIZE_STEP}, at least {SIZE_STEP}"
    nearest = (
        max(SIZE_STEP, SIZE_STEP * round(value / SIZE_STEP)) if isinstance(value, int) else 1024
    )
    raise SettingError(f"{rule}, got {value!r}: use {nearest}.")


def _check_count(name: str, value: int) -> None:
    if not isinstance(value, int) or value < 1:
        raise SettingError(
            f"{name} must be a whole number of at least 1, got {value!r}: use 1 or more."
        )
