"""A small Qwen-Image-2.1."""

import comfy.sd
import torch

DIM, TEXT = 256, 96  # its text is of another width than that of the small 1.x


def random(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 0.5 / shape[-1] ** 0.5


def weights_21(blocks=2, fused=True, ratio=3):
    found = {
        "img_in.weight": random(DIM, 64),
        "txt_in.text_norm.weight": torch.zeros(TEXT),
        "txt_in.in_layer.weight": random(DIM, TEXT),
        "txt_in.out_layer.weight": random(DIM, DIM),
        "time_text_embed.timestep_embedder.linear_1.weight": random(DIM, 256),
        "time_text_embed.timestep_embedder.linear_2.weight": random(DIM, DIM),
        "modulation.1.weight": random(4 * DIM, DIM),
        "norm_out.linear.weight": random(DIM, DIM),
        "proj_out.weight": random(64, DIM),
    }
    for block in range(blocks):
        prefix = f"transformer_blocks.{block}"
        for name in ("to_q", "to_k", "to_v", "to_out.0"):
            found[f"{prefix}.attn.{name}.weight"] = random(DIM, DIM)
        for name in ("norm_q", "norm_k"):
            found[f"{prefix}.attn.{name}.weight"] = torch.ones(128)
        gates = ("gate_up",) if fused else ("gate_layer", "proj")
        whole = random(2 * ratio * DIM, DIM)
        for name, weight in zip(gates, whole.chunk(len(gates)), strict=True):
            found[f"{prefix}.img_mlp.{name}.weight"] = weight.clone()
        found[f"{prefix}.img_mlp.out.weight"] = random(DIM, ratio * DIM)
    return found


def model_21(fused=True, ratio=3):
    weights, options = weights_21(fused=fused, ratio=ratio), {"dtype": torch.float32}
    return comfy.sd.load_diffusion_model_state_dict(weights, model_options=options)


def strong_21(fused=True):
    """Its weights differ, and are larger: the image of the other hardly reads its text."""
    found = weights_21(fused=fused)
    for seed, (name, weight) in enumerate(found.items()):
        if weight.dim() == 2:
            generator = torch.Generator().manual_seed(seed)
            larger = 4 if "to_v" in name or "to_out" in name or "modulation" in name else 1
            new = torch.randn(weight.shape, generator=generator)
            found[name] = new * larger / weight.shape[1] ** 0.5
    return comfy.sd.load_diffusion_model_state_dict(found, model_options={"dtype": torch.float32})


def fun_control(model, until=0.0):
    """A clone with a ControlNet down to a sigma."""
    import comfy.model_patcher
    import comfy.ops
    from comfy.ldm.qwen_image21.model import QwenImage21FunControl
    from comfy_extras.nodes_model_patch import QwenImage21FunControlPatch

    control = QwenImage21FunControl(1, 129, 256, operations=comfy.ops.disable_weight_init)
    for i, weight in enumerate(control.parameters()):
        weight.copy_(random(*weight.shape) if weight.dim() > 1 else torch.full_like(weight, i % 2))
    cpu = torch.device("cpu")
    control = comfy.model_patcher.ModelPatcher(control, cpu, cpu)
    patch = QwenImage21FunControlPatch(control, None, None, 1.0, sigma_range=(2.0, until))
    patch.control = random(1, 129, 8, 8)  # which a VAE would make
    patched = model.clone()
    patch.register(patched)
    return patched
