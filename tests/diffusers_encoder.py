"""Diffusers' VAE encoder in the pieces that a plan runs, of which the package has the decoder's."""

from qwen_l40s.hosts.diffusers.sample import _head, _middle, vae_shape
from qwen_l40s.optimizations.vae.tiles import Stages, stage


def _layer(block):
    if not hasattr(block, "avg_shortcut"):
        return block
    halving = [block.downsampler] if block.downsampler else []
    return stage((*block.resnets, *halving), block.avg_shortcut)


def encoder_stages(vae):
    encoder = vae.encoder
    head = _head(encoder)
    return Stages(
        "encode",
        vae_shape(vae),
        end=lambda hidden: vae.quant_conv(head(hidden)).chunk(2, dim=1)[0],
        middle=_middle(encoder.mid_block),
        outer=(encoder.conv_in, *map(_layer, encoder.down_blocks)),
    )
