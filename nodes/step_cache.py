"""The node that skips steps."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ..step_cache import CUSTOM, METHODS, MOST_IN_A_ROW, OFF, PRESETS, CacheSettings, cache_settings
from .common import CATEGORY, require_host

USUAL = CacheSettings()


class QwenL40SStepCache(io.ComfyNode):
    """Forecasts some of a sampler's steps from the steps before."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="QwenL40S_StepCache",
            display_name="Step Cache Qwen-Image",
            category=CATEGORY,
            description="Skips the model in steps that can be forecast from the steps before: the "
            "same picture sooner, with small differences. Off by default. For runs of 20 steps and "
            "more; runs of 10 or fewer, Lightning LoRAs and samplers that add noise compute every "
            "step. Place it anywhere before the sampler. Report Qwen-Image Run and ComfyUI's log "
            "say how far the forecasts were off.",
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
                        io.DynamicCombo.Option(OFF, []),
                        *(io.DynamicCombo.Option(name, []) for name in PRESETS),
                        io.DynamicCombo.Option(CUSTOM, _custom_inputs()),
                    ],
                    tooltip="off: every step calls the model. Of 50 steps faithful computes 34, "
                    "balanced 26, fast 20; of 20 steps 15, 14, 12. fast may change small text.",
                ),
            ],
            outputs=[io.Model.Output(tooltip="To the sampler.")],
        )

    @classmethod
    def execute(cls, model: io.Model.Type, cache: dict[str, Any]) -> io.NodeOutput:
        require_host()
        from ..hosts.comfyui.sample.step_cache import cache_steps

        given = dict(cache)
        name = given.pop("cache")
        settings = CacheSettings(**given) if name == CUSTOM else cache_settings(name)
        return io.NodeOutput(cache_steps(model, settings))


def _custom_inputs() -> list[io.Input]:
    def share(name: str, tooltip: str) -> io.Float.Input:
        default = getattr(USUAL, name)
        return io.Float.Input(name, default=default, min=0, max=1, step=0.01, tooltip=tooltip)

    return [
        share("budget", "Most steps that are skipped, as a share of those beyond the tenth."),
        share("head", "Share of the steps that are computed at the beginning."),
        share("tail", "Share of the steps that are computed at the end."),
        io.Int.Input(
            "longest",
            default=USUAL.longest,
            min=1,
            max=MOST_IN_A_ROW,
            tooltip="Most steps that are skipped in a row.",
        ),
        share("gain", "0 holds the last velocity, 1 extends its slope; 0.5 is best in most runs."),
        io.Combo.Input(
            "method",
            options=list(METHODS),
            default=USUAL.method,
            tooltip="schedule: the same steps in each run, chosen from the sigmas. adaptive: "
            "chosen in the run, by how much the first block's input changes.",
        ),
        io.Float.Input(
            "threshold",
            default=USUAL.threshold,
            min=0,
            max=10,
            step=0.01,
            tooltip="With adaptive: what the changes may add up to before a step is computed.",
        ),
        io.Boolean.Input(
            "audit",
            default=USUAL.audit,
            tooltip="Computes the skipped steps as well and logs how far each forecast is off. "
            "Saves no time.",
        ),
    ]
