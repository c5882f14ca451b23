"""The rotation of ConvRot weights: every group of a row's values is multiplied by a Hadamard
matrix, which spreads outliers before they are rounded to int8.

The matrix is comfy-kitchen's: the Kronecker power of a symmetric 4 x 4 matrix with rows of equal
sum, divided by the square root of its size. It is its own inverse.
"""

from __future__ import annotations

import torch

DEFAULT_GROUP = 256
_FOUR = ((1, 1, 1, -1), (1, 1, -1, 1), (1, -1, 1, 1), (-1, 1, 1, 1))


def is_group_size(size: object, columns: int) -> bool:
    """Whether rows of so many columns can be rotated in groups of `size`, a power of 4."""
    if type(size) is not int or size < 4 or columns % size:
        return False
    return size & (size - 1) == 0 and size.bit_length() % 2 == 1


def rotate(weight: torch.Tensor, size: int) -> torch.Tensor:
    """Rotates a weight [N, K] of a floating dtype in groups of `size`; twice gives it back."""
    four = torch.tensor(_FOUR, dtype=weight.dtype, device=weight.device)
    matrix = four
    while len(matrix) < size:
        matrix = torch.kron(matrix, four)
    grouped = weight.reshape(-1, weight.shape[1] // size, size)
    return (grouped @ (matrix / size**0.5)).reshape(weight.shape)
