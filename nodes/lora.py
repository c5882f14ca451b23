"""The LoRA node: ComfyUI's own protocol, with a count of what was applied."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import folder_paths
from comfy_api.latest import io

from ..errors import QwenL40SError, SettingError
from ..hosts.comfyui.load.choose import path_of
from ..loaders.header import fingerprint
from ..planning.request import LORA_MODES
from .common import needs, schema, with_report


def _path(name: str) -> Path:
    found = path_of(name, ("loras",))
    if found is None:
        raise SettingError(
            f"{name!r} is not in models/loras: put the file there and press R to refresh."
        )
    return found


class QwenL40SLoadLora(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="QwenL40S_LoadLora",
            display_name="Load Qwen-Image LoRA",
            description="Applies a LoRA to a bf16, fp8 or int8 MODEL and reports how many of its "
            "keys were applied. Use it instead of Load LoRA: it reads all common key "
            "formats and keeps int8 and fp8 weights unrounded. A merge costs no time; "
            "a bypass makes steps longer.",
            search_aliases=[
                "load lora",
                "lora loader",
                "lora loader model only",
                "power lora loader",
                "lora stack",
                "lightning lora",
                "lycoris",
                "lokr",
            ],
            has_intermediate_output=True,
            inputs=[
                io.Model.Input("model", tooltip="From any loader. LoRA loaders can be chained."),
                io.Combo.Input(
                    "lora",
                    options=folder_paths.get_filename_list("loras"),
                    tooltip="A file in models/loras.",
                ),
                io.Float.Input(
                    "strength",
                    default=1.0,
                    min=-10.0,
                    max=10.0,
                    step=0.05,
                    tooltip="1: as trained. 0: off. Negative values reverse it.",
                ),
                io.Combo.Input(
                    "lora_mode",
                    options=list(LORA_MODES),
                    default=LORA_MODES[0],
                    optional=True,
                    tooltip="auto: bypass on int8 and fp8 weights, and on bf16 if a merge would "
                    "round away over 20% of the LoRA; else merge. merge: added to the "
                    "weights, which are rounded; steps take no longer. bypass: computed in "
                    "bf16 in each step; accurate, but slower.",
                ),
            ],
            outputs=[
                io.Model.Output(
                    tooltip="To another LoRA loader, Qwen-Image Optimize or the sampler."
                ),
                io.String.Output("report", tooltip="Keys applied, and the loss of a merge."),
            ],
        )

    @classmethod
    def validate_inputs(cls, lora: str | None = None) -> bool | str:
        if not isinstance(lora, str):  # a linked input is known only when it runs
            return True
        try:
            with needs("models", "layers", "LoRA"):
                from ..hosts.comfyui.lora.apply import inspect_lora

                inspect_lora(_path(lora))
        except QwenL40SError as error:
            return str(error)
        return True

    @classmethod
    def fingerprint_inputs(cls, lora: str, **settings: Any) -> Any:
        # A linked input is known only when it runs.
        return fingerprint((_path(lora),)) if isinstance(lora, str) else None

    @classmethod
    @needs("models", "layers", "LoRA")
    def execute(
        cls,
        model: io.Model.Type,
        lora: str,
        strength: float,
        lora_mode: str = LORA_MODES[0],
    ) -> io.NodeOutput:
        from ..hosts.comfyui.lora.apply import apply_lora

        patched, report = apply_lora(model, _path(lora), strength, how=lora_mode)
        return with_report(patched, report=report.text(), summary=report.summary())
