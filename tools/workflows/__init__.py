"""Writes the shared workflows: `workflows/*.json` for the page, `workflows/api/*.json` for servers.

Both forms and the notes come from one description of each graph, so that they cannot differ. A test
writes them again and finds no difference.
"""

from __future__ import annotations

from .controlnet import controlnet
from .edit import edit_2511, edit_2511_lightning, edit_2511_three_references, inpaint, try_on
from .estimates import advise, estimate, estimate_generate_report, micro_report, save_quantized
from .graph import Workflow
from .layers import layered
from .qwen_image_21 import (
    micro_qwen_image_21,
    qwen_image_21,
    qwen_image_21_2048,
    qwen_image_21_edit,
    qwen_image_21_turbo,
)
from .text_to_image import (
    batch_of_8,
    lightning_4_steps,
    lightning_8_steps,
    lora,
    micro_text_to_image,
    text_to_image_2048,
    text_to_image_bf16,
    text_to_image_cached,
    text_to_image_fp8,
    text_to_image_int8,
)

MAKERS = (
    micro_text_to_image,
    text_to_image_bf16,
    text_to_image_cached,
    text_to_image_fp8,
    text_to_image_int8,
    lightning_4_steps,
    lightning_8_steps,
    edit_2511,
    edit_2511_lightning,
    edit_2511_three_references,
    try_on,
    inpaint,
    layered,
    lora,
    controlnet,
    batch_of_8,
    text_to_image_2048,
    qwen_image_21,
    qwen_image_21_2048,
    qwen_image_21_turbo,
    qwen_image_21_edit,
    micro_qwen_image_21,
    micro_report,
    estimate,
    estimate_generate_report,
    advise,
    save_quantized,
)


def workflows() -> list[Workflow]:
    """Every workflow, described anew."""
    return [make() for make in MAKERS]
