"""The node that skips steps."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ..errors import SettingError
from ..planning.options import CHOICE_LABELS
from ..planning.step_cache import (
    CHOICES,
    CUSTOM,
    MOST_IN_A_ROW,
    PRESETS,
    CacheSettings,
    cache_settings,
    computed_steps,
)
from .common import needs, schema

USUAL = CacheSettings()


class QwenL40SStepCache(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="QwenL40S_StepCache",
            display_name="Qwen-Image Step Cache",
            description="Calls the transformer in some of the sampler's steps and forecasts the "
            "others: nearly the same image, sooner. Use it for runs of 20 steps and "
            "more. Runs of 10 steps or fewer, and samplers that add noise, compute "
            "every step. The image changes slightly; Qwen-Image Run Report and the log "
            "show the error of the forecasts. Off by default.",
            search_aliases=[
                "teacache",
                "easycache",
                "lazycache",
                "magcache",
                "taylorseer",
                "cache-dit",
                "first block cache",
                "wavespeed",
                "skip steps",
                "faster",
            ],
            inputs=[
                io.Model.Input("model", tooltip="From any loader, LoRA loader or Optimize node."),
                io.DynamicCombo.Input(
                    "cache",
                    options=[
                        *(io.DynamicCombo.Option(name, []) for name in CHOICES),
                        io.DynamicCombo.Option(CUSTOM, _custom_inputs()),
                    ],
                    tooltip=f"Steps that call the transformer: {_counts(50)} of 50; {_counts(20)} "
                    "of 20. off: every step, as without this node. speed may change small text.",
                ),
            ],
            outputs=[io.Model.Output(tooltip="To the sampler.")],
        )

    @classmethod
    @needs("models", "layers", "runs", "step cache")
    def execute(cls, model: io.Model.Type, cache: dict[str, Any] | None = None) -> io.NodeOutput:
        from ..hosts.comfyui.sample.step_cache import cache_steps

        if cache is None:  # ComfyUI drops a choice that it does not know
            choices = ", ".join((*CHOICES, CUSTOM))
            raise SettingError(f"cache is missing or unknown: choose {choices}.")
        given = {**cache}
        name = given.pop("cache")
        settings = CacheSettings(**given) if name == CUSTOM else cache_settings(name)
        return io.NodeOutput(cache_steps(model, settings))


def _counts(steps: int) -> str:
    labels = CHOICE_LABELS["cache"]
    counts = {labels.get(name, name): computed_steps(steps, name) for name in PRESETS}
    return ", ".join(f"{name} {count}" for name, count in counts.items())


def _custom_inputs() -> list[io.Input]:
    def share(name: str, tooltip: str) -> io.Float.Input:
        default = getattr(USUAL, name)
        return io.Float.Input(name, default=default, min=0, max=1, step=0.01, tooltip=tooltip)

    return [
        share("budget", "The share of the steps after the tenth to skip: 0.6 skips 24 of 50."),
        share("head", "The share of steps at the beginning that are always computed."),
        share("tail", "The share of steps at the end that are always computed."),
        io.Int.Input(
            "longest",
            default=USUAL.longest,
            min=1,
            max=MOST_IN_A_ROW,
            tooltip="How many steps to skip in a row at most.",
        ),
        share(
            "gain",
            "How a forecast continues from the last two computed steps: 0 repeats the last one, 1 "
            "continues their change in full.",
        ),
    ]
