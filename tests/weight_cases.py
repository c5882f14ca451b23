"""Weights that are hard to round, and what one kernel has to make of them, on any device."""

import torch

from qwen_l40s.loaders.quantize import quantize_rows, row_format
from qwen_l40s.loaders.rounding import round_weight

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Held in three parts of 1024, 4096 and 256, in one that is full, and in one that is masked.
WIDTHS = (3072, 12288, 768, 64, 3584, 123, 1)


def hard_rows(columns, format, dtype):
    """Zeros, rows below and at the least scale, subnormal, uneven, near the largest, and ties; the
    last four hold what is no number.
    """
    rows = torch.randn(12, columns, generator=torch.Generator().manual_seed(columns))
    rows[0] = 0
    rows[1] *= 1e-38
    rows[2] *= 1e-28
    rows[3, 1:] = 0
    rows[3, 0] = 1e-45
    rows[4] *= torch.logspace(-12, 0, columns)
    rows[5] *= 2.0**125
    if format == "int8":
        held = torch.arange(128.0)
    else:
        held = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    ties = torch.cat([held, (held[1:] + held[:-1]) / 2])
    ties = torch.cat([ties.flip(0), -ties]).repeat(columns // 100 + 1)[: 2 * columns]
    rows[6:8] = ties.view(2, columns)
    rows[6:8, 0] = held[-1]  # the scale is 1
    rows[8, 0] = rows[9, columns // 2] = torch.nan
    rows[10, -1], rows[11, 0] = torch.inf, -torch.inf
    return rows.to(dtype)


def check_rounding(columns, format, dtype, device):
    """The same bits as on the processor, rotated and not."""
    weight = hard_rows(columns, format, dtype)
    for rotation in {0, row_format(format, columns).rotation}:
        found = round_weight(weight.to(device), format, rotation=rotation)
        expected = quantize_rows(weight, format, rotation=rotation)
        finite = expected[1].isfinite().flatten()
        assert 7 <= finite.sum() <= 8
        for one, other in zip(found, expected, strict=True):
            assert (one.dtype, one.shape) == (other.dtype, other.shape)
            one, other = (x.cpu()[finite].view(torch.uint8) for x in (one, other))
            assert torch.equal(one, other), (columns, dtype, rotation)
        assert torch.equal(found[1].cpu().isfinite().flatten(), finite)
