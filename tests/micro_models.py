"""Qwen-Image-2.1 as small as its micro model, with random weights, in diffusers' classes."""

import math
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import ModelMixin
from transformers import PreTrainedModel

from qwen_l40s.hosts.diffusers.load import load_pipeline
from qwen_l40s.loaders.source import bundled_micro_folder

USER = "<|im_start|>user\n"
SYSTEM_21 = "<|im_start|>system\nComprehend and analyze the provided prompt.<|im_end|>\n"
FOLDER = bundled_micro_folder("2.1")


@dataclass
class MicroModel:
    """Holds the parts with random weights."""

    transformer: ModelMixin
    text_encoder: PreTrainedModel

    def save(self, folder: Path) -> None:
        """Writes them in bf16, and all else as in the bundled folder."""
        shutil.copytree(FOLDER, folder, ignore=shutil.ignore_patterns("*.md"), dirs_exist_ok=True)
        for name, part in vars(self).items():
            part.bfloat16().save_pretrained(folder / name)


def build_21(seed: int = 0) -> MicroModel:
    """Builds a model in fp32 on the CPU, the same for the same seed."""
    bundled = load_pipeline(FOLDER, device="cpu", precision="fp32")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        transformer = type(bundled.transformer).from_config(bundled.transformer.config)
        return MicroModel(transformer, type(bundled.text_encoder)(bundled.text_encoder.config))


def hidden_states(language_model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Returns those before the last norm, as the pipeline does; padding stands behind."""
    handle = language_model.norm.register_forward_hook(lambda _, args, __: args[0])
    try:
        return language_model(input_ids=ids, use_cache=False).last_hidden_state
    finally:
        handle.remove()


def velocity(
    transformer: torch.nn.Module,
    noisy: torch.Tensor,
    sigma: torch.Tensor,
    features: torch.Tensor,
    mask: torch.Tensor,
) -> torch.Tensor:
    """Calls the transformer for square images of one sequence with their text."""
    tokens = noisy.shape[1]
    side = math.isqrt(tokens)
    # One slot of the text encoder stands for 2 x 2 tokens.
    slots = torch.cat([torch.zeros_like(mask), mask.new_ones(len(mask), tokens // 4)], 1)
    out = transformer(
        hidden_states=noisy,
        encoder_hidden_states=features,
        encoder_hidden_states_mask=mask,
        timestep=sigma,
        img_shapes=[[(1, side, side)]] * len(noisy),
        img_mask=slots,
        return_dict=False,
    )[0]
    return out[:, -tokens:]
