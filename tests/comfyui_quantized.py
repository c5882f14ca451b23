"""Runs in ComfyUI's own Python: its official loading of files that this package quantized.

    python comfyui_quantized.py COMFYUI INT8 FP8 CONFIG.json INPUTS OUT

INT8, FP8, INPUTS and OUT are safetensors files. CONFIG holds the transformer's sizes. INPUTS holds
`matrix`, float32. OUT receives every quantized weight of INT8 as ComfyUI dequantizes it, and what
comfy-kitchen makes of the matrix. Prints one JSON object: what loading logged, the names that found
no place, and the error that loading FP8 raised.
"""

import json
import logging
from pathlib import Path

import comfyui_boot

INT8, FP8, CONFIG, INPUTS, OUT = comfyui_boot.ARGUMENTS
comfyui_boot.start("--cpu")

import comfy.model_management
import comfy.model_patcher
import comfy.supported_models
import comfy.utils
import torch
from comfy.quant_ops import QuantizedTensor
from comfy_kitchen.backends.eager import quantization as kitchen
from safetensors.torch import load_file, save_file

GROUP = 16


class Warnings(logging.Handler):
    """Collects what is logged at warning level or above: ComfyUI only logs a tensor it lacks."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def load(path: Path) -> tuple[torch.nn.Module, list[str]]:
    """The steps of `comfy.sd.load_diffusion_model_state_dict`, with sizes from CONFIG: it detects
    only the real model's.
    """
    sd, metadata = comfy.utils.load_torch_file(str(path), return_metadata=True)
    sd, metadata = comfy.utils.convert_old_quants(sd, "", metadata=metadata)
    sizes = json.loads(CONFIG.read_text(encoding="utf-8"))
    names = "in_channels num_layers attention_head_dim num_attention_heads joint_attention_dim"
    config = comfy.supported_models.QwenImage(
        {
            "image_model": "qwen_image",
            **{name: sizes[name] for name in (*names.split(), "axes_dims_rope")},
        }
    )
    config.quant_config = comfy.utils.detect_layer_quantization(sd, "")
    device = torch.device("cpu")
    cast = comfy.model_management.unet_manual_cast(None, device, config.supported_inference_dtypes)
    config.set_inference_dtype(torch.bfloat16, cast)
    model = config.get_model(sd, "")
    patcher = comfy.model_patcher.CoreModelPatcher(model, load_device=device, offload_device=device)
    model.load_model_weights(sd, "", assign=patcher.is_dynamic())
    return model.diffusion_model, list(sd)


@torch.inference_mode()
def main() -> None:
    warnings = Warnings()
    logging.getLogger().addHandler(warnings)
    model, left_over = load(INT8)
    weights = {
        f"{name}.weight": module.weight.dequantize()
        for name, module in model.named_modules()
        if isinstance(getattr(module, "weight", None), QuantizedTensor)
    }
    matrix = load_file(INPUTS)["matrix"]
    values, scale = kitchen.quantize_int8_rowwise(matrix)
    rotated = kitchen.rotate_int8_convrot_weight(matrix, GROUP)
    save_file({**weights, "values": values, "scale": scale, "rotated": rotated}, OUT)
    loaded = list(warnings.texts)
    try:
        load(FP8)
        refusal = None
    except Exception as error:
        refusal = f"{type(error).__name__}: {error}"
    print(json.dumps({"warnings": loaded, "left_over": left_over, "fp8": refusal}))


if __name__ == "__main__":
    main()
