"""The VAE's Triton kernels in Triton's CPU interpreter, against their twins.

tests/unit/test_kernels.py runs this file in a process of its own: TRITON_INTERPRET=1 has to be set
before Triton is imported, and nothing can be compiled after that.
"""

import pytest
import torch
import triton  # noqa: F401, whose interpreter the package asks for

from qwen_l40s.optimizations.kernels import vae_pixels
from qwen_l40s.optimizations.vae import flat

LAST = torch.channels_last
# The interpreter casts to bf16 without rounding, and the twin rounds after each step.
CLOSE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 4e-2}
# Widths of 1.x and 2.1, and one that nothing divides.
WIDTHS = (96, 144, 384, 5)

# numpy: exp of what is far below zero.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")


def random(*shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(sum(shape))
    x = torch.randn(shape, generator=generator).to(dtype)
    return x.contiguous(memory_format=LAST) if x.ndim == 4 else x


def cut(x):
    return x[:, :, 1:-2, 2:-1]


def assert_close(found, known):
    most = CLOSE[known.dtype]
    torch.testing.assert_close(found.float(), known.float(), rtol=most, atol=most)


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
def test_norm_is_its_twin(dtype):
    for channels in WIDTHS:
        whole = random(2, channels, 9, 8, dtype=dtype)
        gamma, bias = random(channels, dtype=dtype), random(channels + 1, dtype=dtype)[1:]
        for x in (whole, cut(whole), whole[1:, :, :1, :1]):
            for silu in (True, False):
                found = vae_pixels.norm(x, gamma, silu=silu)
                assert found.is_contiguous(memory_format=LAST)
                assert_close(found, flat.norm(x, gamma, silu=silu))
        twin, again = whole.clone(), whole.clone()
        known = flat.norm(twin, gamma, bias, out=twin)
        assert vae_pixels.norm(again, gamma, bias, out=again) is again
        assert_close(again, known)


def test_norm_of_nothing_and_of_nan():
    x = random(1, 96, 2, 2)
    x[..., 0, 0], x[0, 5, 1, 1] = 0, torch.nan
    for of in (vae_pixels, flat):
        found = of.norm(x, torch.ones(96))
        assert (found[..., 0, 0] == 0).all()
        assert found[..., 1, 1].isnan().all()
        assert found[..., 0, 1].isfinite().all()


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
def test_add_is_its_twin(dtype):
    for channels in WIDTHS:
        bias, whole = random(channels, dtype=dtype), random(2, channels, 9, 8, dtype=dtype)
        other = cut(whole)
        for given in (other, None):
            x = random(*other.shape, dtype=dtype)
            known = flat.add(x.clone(), bias, given, torch.empty_like(x))
            assert_close(vae_pixels.add(x, bias, given, torch.empty_like(x)), known)
            assert_close(vae_pixels.add(x, bias, given, x), known)
        rows = random(1, channels, 6, 8, dtype=dtype)  # of a strip, with what it reads
        out, known = torch.zeros_like(whole), torch.zeros_like(whole)
        for of, to in ((vae_pixels, out), (flat, known)):
            of.add(rows[:, :, 2:5].clone(), bias, whole[1:, :, :3], to[1:, :, 4:7])
        assert_close(out, known)


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
def test_spread_is_its_twin(dtype):
    # What 2.1 adds has as many channels, or twice as many, and is the last of two frames or one.
    for channels, others, frames in ((16, 16, 2), (12, 24, 2), (12, 24, 1), (5, 0, 1)):
        parts, bias = random(2, 4 * channels, 6, 5, dtype=dtype), random(channels, dtype=dtype)
        other = cut(random(2, others, 8, 7, dtype=dtype)) if others else None
        for x, around in (
            (parts, other),
            (parts[:1, :, 1:5], None if other is None else other[:1, :, 1:4]),
        ):
            shape = (len(x), channels, 2 * x.shape[2] - 2, 8)
            known = flat.add(x, bias, around, random(*shape, dtype=dtype), frames)
            found = vae_pixels.add(x, bias, around, random(*shape, dtype=dtype), frames)
            assert_close(found, known)
