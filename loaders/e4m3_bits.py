"""e4m3 and e5m2 values through the bits of float16, because torch converts fp8 one value at a time
on the CPU: 0.3 G values/s a thread, and 3 this way.

The exponent and mantissa of e4m3 are bits 13 to 7 of the float16 number that is 2^-8 of its value,
subnormal numbers included; an e5m2 byte is the upper half of a float16 number. Only e4m3's NaN
(0x7F, 0xFF) has no such image: it reads as 480, the number that would come next.
"""

from __future__ import annotations

import torch

E4M3_TO_HALF = 2.0**-8
NAN_AS_HALF = 480 * E4M3_TO_HALF
LARGEST = 0x7E  # 448


def holds_nan(values: torch.Tensor) -> bool:
    """Whether float8_e4m3fn values hold a NaN; e4m3 has no infinity."""
    if not values.numel():
        return False
    # NaN is the largest byte, read as signed or as unsigned: no temporary of the tensor's size.
    signed, unsigned = values.view(torch.int8).max(), values.view(torch.uint8).max()
    return bool((signed == 0x7F) | (unsigned == 0xFF))


def e4m3_as_half(values: torch.Tensor) -> torch.Tensor:
    """Returns float8_e4m3fn values times 2^-8 as float16, exactly; NaN becomes 480 * 2^-8."""
    bits = values.view(torch.int8).to(torch.int16).bitwise_left_shift_(7)
    # The sign was extended into bit 14 too.
    return bits.bitwise_and_(~0x4000).view(torch.float16)


def half_as_e4m3(halves: torch.Tensor) -> torch.Tensor:
    """The inverse of `e4m3_as_half`, for float16 numbers that are 2^-8 of an e4m3 value."""
    bits = halves.view(torch.int16)
    signs = (bits >> 8).bitwise_and_(0x80)
    return (
        ((bits >> 7).bitwise_and_(0x7F))
        .bitwise_or_(signs)
        .to(torch.uint8)
        .view(torch.float8_e4m3fn)
    )


def e5m2_as_half(values: torch.Tensor) -> torch.Tensor:
    """Returns float8_e5m2 values as float16, exactly, with NaN and infinity."""
    return values.view(torch.uint8).to(torch.int16).bitwise_left_shift_(8).view(torch.float16)


def e4m3_as_float(values: torch.Tensor) -> torch.Tensor:
    """Returns float8_e4m3fn values as float32, exactly, with NaN."""
    if values.device.type != "cpu" or holds_nan(values):
        return values.float()
    return e4m3_as_half(values).float().mul_(1 / E4M3_TO_HALF)
