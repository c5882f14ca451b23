"""Recognizes the VAE of Qwen-Image, in native and in diffusers names, and the tiny VAEs that stand
in for it.
"""

from __future__ import annotations

from .identity import Identity, Tensors, known, size

LATENT_CHANNELS = 16


def vae(tensors: Tensors) -> Identity | None:
    """The causal 3-D VAE that Qwen-Image shares with Wan 2.1; RGBA in Qwen-Image-Layered."""
    if "decoder.middle.0.residual.0.gamma" in tensors:
        if any(name.startswith("decoder.upsamples.0.upsamples.") for name in tensors):
            return None  # Wan 2.2
        style, names = (
            "native (ComfyUI, Wan) names",
            ("encoder.conv1", "decoder.conv1", "decoder.head.2"),
        )
        dim = size(tensors, "decoder.head.0.gamma")
    elif "decoder.mid_block.resnets.0.norm1.gamma" in tensors:
        if any(".upsampler." in name for name in tensors):
            return None  # Wan 2.2 and Qwen-Image-2.1
        style, names = "diffusers names", ("encoder.conv_in", "decoder.conv_in", "decoder.conv_out")
        dim = size(tensors, "decoder.norm_out.gamma")
    else:
        return None
    encoder_in, decoder_in, decoder_out = (f"{name}.weight" for name in names)
    channels = size(tensors, decoder_out)
    shared = (
        "RGBA, as Qwen-Image-Layered has it"
        if channels == 4
        else "the tensors are those of Wan 2.1's VAE too"
    )
    return Identity(
        family="Qwen-Image VAE",
        role="vae",
        variant=f"{shared}, {style}",
        dims=known(
            dim=dim,
            latent_channels=size(tensors, decoder_in, 1),
            image_channels=size(tensors, encoder_in, 1) or channels,
        ),
        folder="vae",
    )


def qwen_image_21_vae(tensors: Tensors) -> Identity | None:
    """The VAE of Qwen-Image-2.1: 64 latent channels, plain 2-D convolutions, RMS norms."""
    decoder_in = tensors.get("decoder.conv_in.weight")
    if "decoder.mid_block.resnets.0.norm1.gamma" not in tensors or decoder_in is None:
        return None
    if len(decoder_in.shape) != 4 or decoder_in.shape[1] != 64:
        return None
    return Identity(
        family="Qwen-Image-2.1 VAE",
        role="vae",
        variant="diffusers names",
        dims=known(latent_channels=64, image_channels=size(tensors, "decoder.conv_out.weight")),
        folder="vae",
        cannot_run=(
            "the VAE of Qwen-Image-2.1 has 64 latent channels and Qwen-Image has 16: get the VAE "
            "that came with Qwen-Image.",
        ),
    )


def tiny_vae(tensors: Tensors) -> Identity | None:
    """TAEHV (a list with memory blocks) and TAESD (a list, or diffusers' `AutoencoderTiny`)."""
    if "decoder.22.bias" in tensors and size(tensors, "decoder.1.weight", 1):
        kind, channels = "TAEHV", size(tensors, "decoder.1.weight", 1)
    elif "decoder.layers.0.weight" in tensors and "decoder.layers.2.conv.0.weight" in tensors:
        kind, channels = "TAESD in diffusers names", size(tensors, "decoder.layers.0.weight", 1)
    elif "decoder.3.conv.0.weight" in tensors and size(tensors, "decoder.1.weight", 1):
        kind, channels = "TAESD", size(tensors, "decoder.1.weight", 1)
    else:
        return None
    fits = channels == LATENT_CHANNELS
    return Identity(
        family="tiny VAE" if fits else "not Qwen-Image: looks like a tiny VAE of another model",
        role="tiny_vae",
        variant=f"{kind}, 16 latent channels: Qwen-Image's and Wan 2.1's look like others here"
        if fits
        else kind,
        dims=known(latent_channels=channels),
        folder="vae_approx",
    )
