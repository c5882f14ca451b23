"""Whether a card's tensor cores multiply 4-bit numbers faster than 8-bit ones.

NVIDIA's data sheet gives an L40S one rate for both. Triton has no product of 4-bit numbers, so the
loop consists of the instructions themselves, on numbers that stay in registers.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from .timing import MixPart, run_mix

# {format: (products in a sum of the instruction, its operands)}
INSTRUCTIONS = {"int8": (32, "s8"), "int4": (64, "s4")}
ROWS, COLUMNS = 16, 8
# Sums of a thread that hide the latency of an instruction, and warps that fill a card.
SUMS, WARPS, PROGRAMS_EACH, ROUNDS = 8, 4, 4, 4096


@triton.jit(do_not_specialize=["rounds"])
def _mma_kernel(out_ptr, rounds, instruction: tl.constexpr, size: tl.constexpr):
    """Runs one instruction for each of a thread's elements, again and again."""
    place = tl.arange(0, size)
    x, y = place * 0x01020408, place * 0x10305070
    a, b, c, d = place, place, place, place
    for _ in range(rounds):
        a, b, c, d = tl.inline_asm_elementwise(
            instruction,
            "=r,=r,=r,=r,r,r,r,r,r,r",
            [x, y, a, b, c, d],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
    tl.store(out_ptr + tl.program_id(0) * size + place, a + b + c + d)


def instruction_of(name: str) -> str:
    """Writes the PTX of a key of `INSTRUCTIONS`, with the operands of `_mma_kernel`."""
    depth, operand = INSTRUCTIONS[name]
    shape = f"m{ROWS}n{COLUMNS}k{depth}"
    return (
        f"mma.sync.aligned.{shape}.row.col.s32.{operand}.{operand}.s32 "
        "{$0, $1, $2, $3}, {$4, $5, $4, $5}, {$4, $5}, {$6, $7, $8, $9};"
    )


def instruction_rates(device: torch.device, seconds: float) -> dict[str, float]:
    """Measures {"int8", "int4": operations a second} of a card of sm_80 or newer."""
    programs = PROGRAMS_EACH * torch.cuda.get_device_properties(device).multi_processor_count
    size = 32 * WARPS * SUMS
    out = torch.empty(programs * size, dtype=torch.int32, device=device)
    parts = []
    for name, (depth, _) in INSTRUCTIONS.items():
        run = partial(
            _mma_kernel[(programs,)], out, ROUNDS, instruction_of(name), size, num_warps=WARPS
        )
        operations = 2 * ROWS * COLUMNS * depth * SUMS * WARPS * programs * ROUNDS
        parts.append(MixPart(name, run, operations))
    sums = run_mix(parts, device, seconds)
    return {name: sums[name].rate for name in INSTRUCTIONS}
