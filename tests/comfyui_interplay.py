"""Runs in ComfyUI's own Python: our loaded MODEL under what ComfyUI does to models.

    python comfyui_interplay.py COMFYUI FOLDER cpu|card|dynamic

LoRAs merged into quantized weights, torch.compile, deep copies, partial loading, two cards; on the
processor, on a card, and on a card with dynamic VRAM. Prints one JSON object {check: figure}.
"""

import json

import comfyui_boot

FOLDER, MODE = comfyui_boot.ARGUMENTS[0], str(comfyui_boot.ARGUMENTS[1])
comfyui_boot.start_on(MODE)

import comfy.model_management
import comfy.model_patcher
import comfy.sample
import comfy.sd
import narrow_transformer as narrow
import torch
from comfy_api.torch_helpers import set_torch_compile_wrapper

from qwen_l40s.hosts.comfyui.load.transformer import load_model

WEIGHTS = narrow.weights()
PATH = narrow.write(FOLDER / "bf16.safetensors", WEIGHTS)


def lora() -> dict[str, torch.Tensor]:
    """Rank 4 on every layer that is quantized."""
    generator = torch.Generator().manual_seed(1)
    found = {}
    for layer in narrow.layers(WEIGHTS):
        rows, columns = WEIGHTS[f"{layer}.weight"].shape
        found[f"{layer}.lora_down.weight"] = torch.randn(4, columns, generator=generator) / 10
        found[f"{layer}.lora_up.weight"] = torch.randn(rows, 4, generator=generator) / 10
    return found


def sample(model: comfy.model_patcher.ModelPatcher, cfg: float = 1.0) -> torch.Tensor:
    """Two Euler steps at 64 x 64 from fixed noise; prompts of different lengths never batch."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(1, 16, 1, 8, 8, generator=generator)
    positive = torch.randn(1, 20, narrow.SHAPE.joint_dim, generator=generator)
    negative = torch.randn(1, 7, narrow.SHAPE.joint_dim, generator=generator)
    steps = (2, cfg, "euler", "simple", [[positive, {}]], [[negative, {}]])
    latent = torch.zeros_like(noise)
    return comfy.sample.sample(model, noise, *steps, latent, disable_pbar=True, seed=0).float()


def difference(found: torch.Tensor, known: torch.Tensor) -> float:
    return float((found - known).norm() / known.norm())


def with_lora(model: comfy.model_patcher.ModelPatcher) -> comfy.model_patcher.ModelPatcher:
    return comfy.sd.load_lora_for_models(model, None, lora(), 1.0, 0)[0]


def compiled(model: comfy.model_patcher.ModelPatcher) -> comfy.model_patcher.ModelPatcher:
    """One block through torch.compile; on a processor the graph alone, without a C++ compiler."""
    clone = model.clone(disable_dynamic=True)
    key = "diffusion_model.transformer_blocks.1"
    backend = "eager" if MODE == "cpu" else "inductor"
    set_torch_compile_wrapper(clone, backend=backend, keys=[key])
    return clone


def partly_loaded(form: str) -> float:
    """One forward with most weights left in host memory, against all on the card."""
    device = comfy.model_management.get_torch_device()
    noise = torch.ones(1, 16, 1, 8, 8, device=device, dtype=torch.bfloat16)
    text = torch.ones(1, 7, narrow.SHAPE.joint_dim, device=device, dtype=torch.bfloat16)
    outputs = []
    for budget in (400_000, 10**9):
        comfy.model_management.unload_all_models()
        model = load_model(PATH, form)[0]
        model.load(device, lowvram_model_memory=budget)
        places = {str(weight.device) for weight in model.model.diffusion_model.parameters()}
        assert ("cpu" in places) == (budget == 400_000), places
        sigma = torch.full((1,), 0.7, device=device)
        outputs.append(model.model.apply_model(noise, sigma, c_crossattn=text))
        model.detach()
    return difference(*outputs)


def on_two_cards(model: comfy.model_patcher.ModelPatcher) -> float:
    from comfy_extras.nodes_multigpu import MultiGPUCFGSplitNode

    split = MultiGPUCFGSplitNode.execute(model, 2).result[0]
    return difference(sample(split, 2.5), sample(model, 2.5))


@torch.inference_mode()
def main() -> None:
    torch.set_num_threads(1)
    sample(load_model(PATH, "bf16")[0])  # a card's first products may differ in the last bit
    bf16 = load_model(PATH, "bf16")[0]
    plain, patched = sample(bf16), sample(with_lora(bf16))
    figures = {"effect of the LoRA": difference(patched, plain)}
    for form in ("int8", "fp8"):
        model = load_model(PATH, form)[0]
        own = sample(model)
        figures[f"{form}: against bf16"] = difference(own, plain)
        figures[f"{form}: LoRA against bf16 with it"] = difference(
            sample(with_lora(model)), patched
        )
        figures[f"{form}: without the LoRA again"] = difference(sample(model), own)
        figures[f"{form}: compiled"] = difference(sample(compiled(model)), own)
        figures[f"{form}: deep copy"] = difference(sample(model.clone(force_deepcopy=True)), own)
        if MODE == "card":
            figures[f"{form}: partly loaded"] = partly_loaded(form)
        if torch.cuda.device_count() > 1:
            figures[f"{form}: on two cards"] = on_two_cards(model)
    print(json.dumps(figures))


main()
