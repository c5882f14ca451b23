"""e4m3 and e5m2 values through the bits of float16, because torch converts fp8 one value at a time
on the CPU: 0.3 G values/s a thread, and 3 this way.

The exponent and mantissa of e4m3 are bits 13 to 7 of the float16 number that is 2^-8 of its value,
subnormal numbers included; an e5m2 byte is the upper half of a float16 number. Only e4m3's NaN
(0x7F, 0xFF) has no such image.
"""

from __future__ import annotations

import torch


def e5m2_as_half(values: torch.Tensor) -> torch.Tensor:
    """Returns float8_e5m2 values as float16, exactly, with NaN and infinity."""
    return values.view(torch.uint8).to(torch.int16).bitwise_left_shift_(8).view(torch.float16)


def e4m3_as_float(values: torch.Tensor) -> torch.Tensor:
    """Returns float8_e4m3fn values as float32, exactly, with NaN."""
    if values.device.type != "cpu" or _holds_nan(values):
        return values.float()
    bits = values.view(torch.int8).to(torch.int16).bitwise_left_shift_(7)
    # The sign was extended into bit 14 too.
    return bits.bitwise_and_(~0x4000).view(torch.float16).float().mul_(2.0**8)


def _holds_nan(values: torch.Tensor) -> bool:
    if not values.numel():
        return False
    # NaN is the largest byte, read as signed or as unsigned: no temporary of the tensor's size.
    signed, unsigned = values.view(torch.int8).max(), values.view(torch.uint8).max()
    return bool((signed == 0x7F) | (unsigned == 0xFF))
