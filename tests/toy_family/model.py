"""Its classes, as ComfyUI would have them."""

from __future__ import annotations

import comfy.conds
import comfy.latent_formats
import comfy.model_base
import comfy.model_detection
import comfy.supported_models
import comfy.supported_models_base
import torch
from comfy.ldm.flux.layers import EmbedND, timestep_embedding
from comfy.ldm.flux.math import apply_rope1
from comfy.ldm.modules.attention import optimized_attention_masked
from einops import rearrange
from torch import nn


class Attention(nn.Module):
    def __init__(self, dim, heads, operations, **where):
        super().__init__()
        self.heads = heads
        self.qkv = operations.Linear(dim, 3 * dim, bias=False, **where)
        self.out = operations.Linear(dim, dim, bias=False, **where)
        self.query_norm = operations.RMSNorm(dim // heads, eps=1e-6, **where)
        self.key_norm = operations.RMSNorm(dim // heads, eps=1e-6, **where)

    def forward(self, x, rotation, transformer_options):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q = apply_rope1(self.query_norm(q), rotation)
        k = apply_rope1(self.key_norm(k), rotation)
        options = {"skip_reshape": True, "transformer_options": transformer_options}
        return self.out(optimized_attention_masked(q, k, v, self.heads, None, **options))


class FeedForward(nn.Module):
    def __init__(self, dim, ratio, operations, **where):
        super().__init__()
        self.gate_up = operations.Linear(dim, 2 * ratio * dim, bias=False, **where)
        self.down = operations.Linear(ratio * dim, dim, bias=False, **where)

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(nn.functional.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, dim, heads, ratio, operations, **where):
        super().__init__()
        norm = {"elementwise_affine": False, "eps": 1e-6, **where}
        self.before_attention = operations.LayerNorm(dim, **norm)
        self.before_mlp = operations.LayerNorm(dim, **norm)
        self.attention = Attention(dim, heads, operations, **where)
        self.feed_forward = FeedForward(dim, ratio, operations, **where)

    def forward(self, x, words, modulation, rotation, transformer_options):
        shift, scale, gate, shift2, scale2, gate2 = modulation.unsqueeze(1).chunk(6, -1)
        h = self.before_attention(x) * (1 + scale) + shift
        x = x + gate * self.attention(h, rotation, transformer_options)
        return x + gate2 * self.feed_forward(self.before_mlp(x) * (1 + scale2) + shift2)


class ToyTransformer(nn.Module):
    def __init__(
        self, in_channels, out_channels, num_layers, dim, heads, text_dim, ratio,
        axes=(8, 12, 12), image_model=None, dtype=None, device=None, operations=None,
    ):  # fmt: skip
        super().__init__()
        self.dtype = dtype
        where = {"dtype": dtype, "device": device}
        self.rotate = EmbedND(dim=dim // heads, theta=10000, axes_dim=list(axes))
        self.patch = operations.Linear(in_channels, dim, bias=False, **where)
        self.caption = operations.Linear(text_dim, dim, bias=False, **where)
        first, last = (operations.Linear(n, dim, bias=False, **where) for n in (256, dim))
        self.time = nn.Sequential(first, nn.SiLU(), last)
        self.modulation = operations.Linear(dim, 6 * dim, bias=False, **where)
        blocks = (Block(dim, heads, ratio, operations, **where) for _ in range(num_layers))
        self.layers = nn.ModuleList(blocks)
        self.unpatch = operations.Linear(dim, out_channels, bias=False, **where)

    def forward(self, x, timestep, context, transformer_options=None, **kwargs):
        return self._forward(x, timestep, context, transformer_options or {})

    def _forward(self, x, timestep, context, transformer_options):
        frames = x.shape[2]
        tokens = rearrange(x, "b c t (h p) (w q) -> b (t h w) (c p q)", p=2, q=2)
        words, height, width = context.shape[1], x.shape[-2] // 2, x.shape[-1] // 2
        places = torch.zeros(frames, height, width, 3, device=x.device)
        places[..., 0] = words
        places[..., 1] = torch.arange(height, device=x.device)[:, None]
        places[..., 2] = torch.arange(width, device=x.device)
        text = torch.arange(words, device=x.device)[:, None].expand(-1, 3)
        ids = torch.cat([text, places.flatten(0, 2)]).expand(len(x), -1, -1)
        rotation = self.rotate(ids).to(x.dtype)
        embedding = self.time(timestep_embedding(timestep, 256).to(x.dtype))
        modulation = self.modulation(nn.functional.silu(embedding))
        rows = torch.cat([self.caption(context), self.patch(tokens)], 1)
        for block in self.layers:
            rows = block(rows, words, modulation, rotation, transformer_options)
        out = self.unpatch(rows[:, words:])
        sizes = {"t": frames, "h": height, "p": 2, "q": 2}
        return rearrange(out, "b (t h w) (c p q) -> b c t (h p) (w q)", **sizes)


class ToyImage(comfy.model_base.BaseModel):
    def __init__(self, model_config, model_type=comfy.model_base.ModelType.FLUX, device=None):
        super().__init__(model_config, model_type, device=device, unet_model=ToyTransformer)

    def extra_conds(self, **kwargs):
        found = super().extra_conds(**kwargs)
        found["c_crossattn"] = comfy.conds.CONDRegular(kwargs["cross_attn"])
        return found


class ToyConfig(comfy.supported_models_base.BASE):
    unet_config = {"image_model": "toy_image"}  # noqa: RUF012, as ComfyUI has it
    unet_extra_config = {}  # noqa: RUF012
    sampling_settings = {"multiplier": 1.0, "shift": 1.0}  # noqa: RUF012
    memory_usage_factor = 1.8
    latent_format = comfy.latent_formats.Wan21
    supported_inference_dtypes = [torch.bfloat16, torch.float32]  # noqa: RUF012

    def get_model(self, state_dict, prefix="", device=None):
        return ToyImage(self, device=device)


def detect(own):
    """ComfyUI's `detect_unet_config`, which knows one more."""

    def detect_unet_config(state_dict, key_prefix, metadata=None):
        name = f"{key_prefix}layers.0.attention.query_norm.weight"
        if name not in state_dict or f"{key_prefix}patch.weight" not in state_dict:
            return own(state_dict, key_prefix, metadata)
        dim, channels = state_dict[f"{key_prefix}patch.weight"].shape
        gate_up = state_dict[f"{key_prefix}layers.0.feed_forward.gate_up.weight"]
        count = comfy.model_detection.count_blocks(list(state_dict), f"{key_prefix}layers." + "{}.")
        return {
            "image_model": "toy_image",
            "in_channels": channels,
            "out_channels": len(state_dict[f"{key_prefix}unpatch.weight"]),
            "num_layers": count,
            "dim": dim,
            "heads": dim // len(state_dict[name]),
            "text_dim": state_dict[f"{key_prefix}caption.weight"].shape[1],
            "ratio": len(gate_up) // 2 // dim,
        }

    return detect_unet_config
