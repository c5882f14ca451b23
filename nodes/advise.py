"""The node that finds the cheapest card for a load of images."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ..charts.text import advise_summary, advise_text
from ..errors import QwenL40SError, UnavailableError
from ..hosts.comfyui.estimate.cards import own_files_changed_at
from ..machine.store import known_cards, load_calibration
from ..planning.advise import EXAMPLE, advise, read_prices
from ..planning.options import request_settings, todays
from .common import (
    loader_settings,
    needs,
    request_inputs,
    schema,
    setting_outputs,
    with_picture,
)


class QwenL40SAdviseGPU(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="QwenL40S_AdviseGPU",
            display_name="Qwen-Image GPU Cost Comparison",
            description="Ranks rented GPUs by the cost of an image at your load, each GPU with its "
            "best settings. Use it before you rent a GPU. Needs no GPU and no model.",
            search_aliases=[
                "gpu cost",
                "cheapest gpu",
                "cost per image",
                "rent gpu",
                "cloud gpu price",
                "which gpu",
                "crossover",
            ],
            is_output_node=True,
            inputs=[
                io.Float.Input(
                    "images_per_hour",
                    default=100.0,
                    min=0.01,
                    max=1e9,
                    step=1.0,
                    tooltip="Your load, around the clock. A rented GPU costs the same when idle.",
                ),
                *request_inputs(sockets=False),
                io.String.Input(
                    "prices",
                    default="",
                    multiline=True,
                    optional=True,
                    advanced=True,
                    tooltip=f"Your own prices in USD an hour, one GPU a line: {EXAMPLE}. Other "
                    "GPUs take the list's price; the report shows its date.",
                ),
                *request_inputs(added=True, sockets=False),
            ],
            outputs=[
                io.Image.Output(
                    display_name="chart",
                    tooltip="The cheapest GPU at three loads, and USD an image on the six cheapest "
                    "GPUs at your load.",
                ),
                io.String.Output(
                    display_name="report",
                    tooltip="The ranking at your load, with the settings of each GPU.",
                ),
                *setting_outputs(),
            ],
        )

    @classmethod
    def validate_inputs(cls, prices: str = "") -> bool | str:
        if prices is None:  # a linked input is known only when it runs
            return True
        try:
            read_prices(prices, known_cards())
        except QwenL40SError as error:
            return str(error)
        return True

    @classmethod
    def fingerprint_inputs(cls, **inputs: Any) -> Any:
        return own_files_changed_at()

    @classmethod
    @needs()
    def execute(cls, images_per_hour: float, prices: str = "", **settings: Any) -> io.NodeOutput:
        from ..charts.picture import cost_chart
        from ..hosts.comfyui.estimate.request import request_from

        request = request_from(request_settings(**todays(settings))).request
        cards = known_cards()
        own_prices = read_prices(prices, cards)
        found = advise(images_per_hour, request, cards.values(), own_prices, load_calibration)
        if not found.paid:
            raise UnavailableError(
                "no GPU with a price above 0 fits this run: choose a smaller size or batch, leave "
                "settings on auto, or enter a price above 0."
            )
        chart = cost_chart(found)
        summary = "\n".join(advise_summary(found))
        loads = loader_settings(found.fitting[0].found)
        report = advise_text(found)
        return with_picture(cls, chart, summary, report, *loads)
