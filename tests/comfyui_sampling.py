"""Runs in ComfyUI's own Python: samples the micro model that this package loaded.

    python comfyui_sampling.py COMFYUI REFERENCE.safetensors

Prints one JSON object: relative differences from what diffusers made of the same noise, sigmas and
text embeddings.
"""

import json

import comfyui_boot

(REFERENCE,) = comfyui_boot.ARGUMENTS
comfyui_boot.start("--cpu")

import comfy.model_management
import comfy.sample
import comfy.samplers
import torch
from comfy_extras.nodes_cfg import CFGNorm
from safetensors.torch import load_file

from qwen_l40s.hosts.comfyui.load.transformer import load_model
from qwen_l40s.hosts.comfyui.sample.guidance import token_norms
from qwen_l40s.nodes.guidance import QwenL40SCFGNorm


def difference(found: torch.Tensor, known: torch.Tensor) -> float:
    return float((found - known).norm() / known.norm())


@torch.inference_mode()
def main() -> None:
    torch.set_num_threads(1)
    known = load_file(REFERENCE)
    model, _ = load_model(comfyui_boot.ROOT / "models" / "micro")
    comfy.model_management.load_models_gpu([model])
    velocity = model.model.diffusion_model(
        known["noise"], known["sigma"], known["positive"], transformer_options={}
    )

    def sample(patched, cfg):
        latents = comfy.sample.sample_custom(
            patched,
            known["noise"],
            cfg,
            comfy.samplers.sampler_object("euler"),
            known["sigmas"],
            [[known["positive"], {}]],
            [[known["negative"], {}]],
            torch.zeros_like(known["noise"]),
            disable_pbar=True,
        )
        return model.model.process_latent_in(latents)

    odd = torch.randn(2, 16, 1, 5, 7, generator=torch.Generator().manual_seed(1))
    tokens = torch.nn.functional.pad(odd, (0, 1, 0, 1)).unfold(3, 2, 2).unfold(4, 2, 2)
    norms = tokens.square().sum(dim=(1, -1, -2)).sqrt()[:, None]
    spread = norms.repeat_interleave(2, -1).repeat_interleave(2, -2)[..., :5, :7]

    normed = CFGNorm.execute(model, 1.0, pre_cfg=True).result[0]
    exact = QwenL40SCFGNorm.execute(model).result[0]
    print(
        json.dumps(
            {
                "token norms at odd sides": difference(token_norms(odd), spread),
                "velocity": difference(velocity, known["velocity"]),
                "cfg 1": difference(sample(model, 1.0), known["cfg 1"]),
                "cfg 4, our CFGNorm": difference(sample(exact, 4.0), known["cfg 4"]),
                "cfg 4, ComfyUI's CFGNorm": difference(sample(normed, 4.0), known["cfg 4"]),
                "cfg 4, not rescaled": difference(sample(model, 4.0), known["cfg 4"]),
            }
        )
    )


main()
