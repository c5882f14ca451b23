"""Diffusers' VAE encoder in the pieces that a plan runs, of which the package has the decoder's."""

import torch

from qwen_l40s.hosts.diffusers.sample import vae_shape
from qwen_l40s.optimizations.vae.tiles import Middle, Stages, stage


def _layer(block):
    if not hasattr(block, "avg_shortcut"):
        return block
    halving = [block.downsampler] if block.downsampler else []
    return stage((*block.resnets, *halving), block.avg_shortcut)


def encoder_stages(vae):
    encoder, middle = vae.encoder, vae.encoder.mid_block
    head = torch.nn.Sequential(encoder.norm_out, encoder.nonlinearity, encoder.conv_out)
    return Stages(
        "encode",
        vae_shape(vae),
        end=lambda hidden: vae.quant_conv(head(hidden)).chunk(2, dim=1)[0],
        middle=Middle.of(middle.resnets[0], middle.attentions[0], middle.resnets[1]),
        outer=(encoder.conv_in, *map(_layer, encoder.down_blocks)),
    )
