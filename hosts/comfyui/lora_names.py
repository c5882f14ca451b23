"""Brings the tensor names of a LoRA for Qwen-Image into a form that ComfyUI maps.

ComfyUI 0.33 maps, for Qwen-Image, bare names (`transformer_blocks.`), `transformer.`,
`diffusion_model.`, `lora_unet_` and `lycoris_`, and takes `.lora_A.default.weight` only under
`default`. PEFT, DiffSynth-Studio, OneTrainer and ai-toolkit also write names that it skips with a
line in the log.
"""

from __future__ import annotations

import re

# What trainers put before a module's name, in any combination.
_WRAPPERS = (
    "base_model.model.",
    "model.diffusion_model.",
    "diffusion_model.",
    "pipe.dit.",
    "dit.",
    "transformer.",
    "_orig_mod.",
)
# Names with "_" for ".", which only the list of the model's own modules can undo.
_FLAT = ("lora_transformer_", "lycoris_")
# PEFT writes the adapter's own name into the middle.
_ADAPTER = re.compile(r"\.lora_([AB])\.[^.]+\.weight$")


def normalize_name(name: str) -> str:
    """The same tensor's name as ComfyUI maps it; a normalized name stays as it is.

    Example:
        base_model.model.transformer_blocks.0.attn.to_q.lora_A.default.weight
        becomes transformer_blocks.0.attn.to_q.lora_A.weight
    """
    simpler = _ADAPTER.sub(r".lora_\1.weight", name)
    for prefix in _WRAPPERS:
        simpler = simpler.removeprefix(prefix)
    for prefix in _FLAT:
        if simpler.startswith(prefix):
            simpler = f"lora_unet_{simpler.removeprefix(prefix)}"
    return name if simpler == name else normalize_name(simpler)
