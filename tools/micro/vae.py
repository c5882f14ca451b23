"""The micro VAE's part of training: what it loses on painted scenes, and its latents' statistics.

Images have one frame, so only the last time tap of each causal convolution ever sees one; training
runs that tap as an ordinary 2-D convolution, and the taps that no image reaches are zeros.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLQwenImage21, ModelMixin
from diffusers.models.autoencoders.autoencoder_kl_qwenimage import QwenImageCausalConv3d

from ...micro.scene import SEEN_PAIRS, random_scene
from .painter import encode_scenes, paint

KL_WEIGHT = 3e-4
EDGE_RAMP = 0.3  # of the steps, until edges count in full: from the start they hold colours back
# Most steps see crops: a quarter of the work, and edges at their real scale. The last share sees
# whole images.
CROP, WHOLE_SHARE = 128, 0.1
SCENES = 50_000


@torch.no_grad()
def initialize(vae: ModelMixin) -> None:
    """Sets weights that keep a signal's variance through each convolution, and no bias.

    PyTorch's default shrinks it about 3 times a layer here (and counts the time taps that no image
    reaches): the flat colour of an image then drowns in the biases, and 2000 steps did not bring it
    back.
    """
    for module in vae.modules():
        if isinstance(module, torch.nn.Conv2d | torch.nn.Conv3d):
            seen = module.in_channels * math.prod(module.kernel_size[-2:])
            module.weight.normal_(0, seen**-0.5)
            module.bias.zero_()
            if isinstance(module, QwenImageCausalConv3d):
                module.weight[:, :, :-1] = 0


@contextmanager
def image_convolutions() -> Iterator[None]:
    """Runs every causal 3-D convolution as the 2-D convolution that it is for one frame."""
    stock = QwenImageCausalConv3d.forward

    def forward(
        self: QwenImageCausalConv3d, x: torch.Tensor, cache_x: torch.Tensor | None = None
    ) -> torch.Tensor:
        if x.shape[2] != 1 or cache_x is not None:
            return stock(self, x, cache_x)
        padding = (self._padding[2], self._padding[0])
        weight, stride = self.weight[:, :, -1], self.stride[1:]
        return F.conv2d(x[:, :, 0], weight, self.bias, stride, padding)[:, :, None]

    QwenImageCausalConv3d.forward = forward
    try:
        yield
    finally:
        QwenImageCausalConv3d.forward = stock


def latent_statistics(vae: ModelMixin, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and standard deviation of the latents that both hosts assume, each (1, z, 1, 1, 1)."""
    both = torch.tensor([vae.config.latents_mean, vae.config.latents_std], device=device)
    mean, std = both.view(2, 1, -1, 1, 1, 1)
    return mean, std


def to_images(vae: ModelMixin, painted: torch.Tensor) -> torch.Tensor:
    """Painted scenes (N, 3, H, W) in 0..255 as the VAE takes them; a fourth channel is opaque."""
    images = painted / 127.5 - 1
    opaque = images.new_ones(1).expand(
        len(images), vae.encoder.conv_in.in_channels - 3, *images.shape[2:]
    )
    return torch.cat([images, opaque], 1)


def encode(vae: ModelMixin, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalized posterior of images (N, channels, H, W) from -1 to 1.

    Returns:
        Mean and log-variance, each (N, 16, 1, H/8, W/8), or (N, 64, 1, H/16, W/16) of 2.1.
    """
    mean, std = latent_statistics(vae, images.device)
    moments = vae.quant_conv(vae.encoder(images[:, :, None])).float()
    mu, log_variance = moments.chunk(2, dim=1)
    return (mu - mean) / std, log_variance.clamp(-30, 20) - 2 * std.log()


def decode(vae: ModelMixin, latents: torch.Tensor) -> torch.Tensor:
    """Images as `encode` takes them, from normalized latents."""
    mean, std = latent_statistics(vae, latents.device)
    first = {"first_chunk": True} if isinstance(vae, AutoencoderKLQwenImage21) else {}
    return vae.decoder(vae.post_quant_conv(latents * std + mean), **first)[:, :, 0].float()


def vae_loss(
    vae: ModelMixin,
    batch: int,
    generator: torch.Generator,
    *,
    decoder_only: bool = False,
    latent_noise: float = 0.0,
    crop: int = CROP,
) -> Callable[[float], torch.Tensor]:
    """The loss of a step by how much of the stage is done: pixels (L1 and L2), edges (L1), a small
    KL towards the hosts' latent statistics.

    Args:
        batch: images a step, 256 x 256, of which most steps see a crop.
        decoder_only: leaves the encoder alone, and so the latents that a transformer has learned.
        latent_noise: the largest deviation of the noise on the decoder's latents beyond their own:
            a transformer's latents are not the encoder's either.
    """
    rng, device = random.Random(generator.initial_seed()), generator.device
    scenes = encode_scenes([random_scene(rng, SEEN_PAIRS) for _ in range(SCENES)]).to(device)

    def loss(done: float) -> torch.Tensor:
        rows = torch.randint(len(scenes), (batch,), device=device, generator=generator)
        pixels = paint(scenes[rows], generator=generator)
        if done < 1 - WHOLE_SHARE:
            top, left = (rng.randrange(0, pixels.shape[2] - crop, 8) for _ in range(2))
            pixels = pixels[:, :, top : top + crop, left : left + crop]
        target = to_images(vae, pixels)
        with torch.autocast(device.type, torch.bfloat16):
            with torch.set_grad_enabled(not decoder_only):
                mu, log_variance = encode(vae, target)
            noise = torch.randn(mu.shape, device=device, generator=generator)
            more = torch.rand(len(mu), 1, 1, 1, 1, device=device, generator=generator)
            variance = log_variance.exp() + (latent_noise * more) ** 2
            image = decode(vae, mu + noise * variance.sqrt())
        kl = 0.5 * (mu**2 + log_variance.exp() - 1 - log_variance).mean()
        edge = sum((image.diff(dim=d) - target.diff(dim=d)).abs().mean() for d in (2, 3))
        edge = edge * (1.0 if decoder_only else min(1.0, done / EDGE_RAMP))
        return F.l1_loss(image, target) + 2 * F.mse_loss(image, target) + edge + KL_WEIGHT * kl

    return loss


@torch.no_grad()
def fit_statistics(vae: ModelMixin, images: torch.Tensor) -> None:
    """Gives the latents mean 0 and deviation 1 after the normalization that the hosts hard-code.

    A scale and a shift per channel go into the 1 x 1 convolutions around the latent; the decoder
    undoes them, so images stay the same.
    """
    mean, std = latent_statistics(vae, images.device)
    mu = torch.cat([encode(vae, chunk)[0] for chunk in images.split(128)])
    shift, scale = mu.mean((0, 2, 3, 4)), mu.std((0, 2, 3, 4))
    mean, std, channels = mean.flatten(), std.flatten(), len(shift)
    # New latent z' = a z + b in the config's units, chosen so that (z' - mean) / std has mean 0 and
    # deviation 1.
    a = 1 / scale
    b = mean - a * (mean + std * shift)
    quant, post = vae.quant_conv, vae.post_quant_conv
    quant.weight[:channels] *= a.view(-1, *[1] * (quant.weight.ndim - 1))
    quant.bias[:channels] = quant.bias[:channels] * a + b
    quant.bias[channels:] += 2 * a.log()
    post.bias -= (post.weight.flatten(1) * (b / a)).sum(1)
    post.weight /= a.view(1, -1, *[1] * (post.weight.ndim - 2))
