"""What is fixed of the quantized formats: their largest value, and the cards that multiply them."""

from __future__ import annotations

# Largest magnitude of e4m3, and of int8 used symmetrically.
LARGEST = {"fp8": 448.0, "int8": 127.0}
# The oldest compute capability whose tensor cores multiply the format here.
OLDEST_CAPABILITY = {"fp8": (8, 9), "int8": (8, 0)}
