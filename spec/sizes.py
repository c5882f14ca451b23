"""Defines sizes that the executor keeps to and the planner counts with."""

from __future__ import annotations

from .formats import GIB, MIB

# Buffers are made for rows up to a multiple of this, so that prompts of other lengths fit.
ROWS_AT_ONCE = 256
# The rank of what LoRAs add beside a layer is padded to a multiple of this: to 16 bytes, as a
# kernel that is launched past Triton needs it, and with it a CUDA graph under cudaMallocAsync.
RANKS_AT_ONCE = 8
# Tokens of each item that a check compares at a time.
COMPARED_AT_ONCE = 512
# The tokens of a head in 8 bits are padded to a multiple of this, the longest step over keys.
HEAD_TOKENS_AT_ONCE = 128
# What the entries of one table of modulation may take; the oldest leave. 120 timesteps of the
# full-size model, or 60 of a batch of two.
MOST_TABLE_BYTES = 512 * MIB
# The pinned ring through which weights pass to the card, and what quantizing a file on load takes.
RING_BYTES, STAGING_BYTES = 128 * MIB, 2 * GIB
# So many replays repay a capture: where the card waits for the CPU, which a replay spares it,
# and where it does not, and gains what it computes of text and image side by side.
REPAID_BY = {True: 6, False: 12}
# Up to so many rows a graph computes text and image side by side, by whether weights are quantized:
# 768x768 has some 2500, 1024x1024 some 4300.
# A step with graphs took so much of one without (H200, CFG 4; 256, 512, 768 and 1024 pixels): bf16
# 0.80, 0.98, 1.02 and 1.01; int8 0.75, 0.90, 0.94 and 0.99; fp8 0.50, 0.84, 0.94 and 0.99.
MOST_GRAPH_ROWS = {False: 1536, True: 6144}
