"""Weights in blocks: a few bits each, with one scale and one zero point for every block along the input axis.

    weight = (number - zero) · scale,   0 ≤ number < 2^bits

What the numbers of a block stand for is its grid. The plain one spreads the block's range [min(w, 0), max(w, 0)] over all
numbers; a symmetric one has its zero in the middle, which then need not be stored. Other grids: hqq.py; another way than to the
nearest number: gptq.py.

The layout is that of onnxruntime's MatMulNBits, with the outputs first: row n holds the weights of output n, block after block,
two 4-bit numbers in a byte, the earlier one in its lower half. A table of embeddings, whose rows are words, has the same layout
(GatherBlockQuantized), so that an output layer tied to its embedding is stored once.

Chosen by measuring on the matrices of a GPT-2 small, one row: blocks of 128 are 1.24–1.31 times faster than of 32 at 8 bit and
1.22–1.29 times at 4 bit (a whole step 1.21 times; blocks of 64, 1.09 times). Zero points cost nothing measurable and lower the
error of a product, on weights with outliers from 0.0108 to 0.0086 at 8 bit and from 0.192 to 0.145 at 4 bit, about what
symmetric blocks of 32 have (0.131). Zero points are whole numbers: onnxruntime takes fractions too, at 4 bit only, and is
80–150 times slower with them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

SIZES = (256, 128, 64, 32, 16)  # of a block, as onnxruntime has them
_CHOSEN = 128  # the largest that is taken without being asked for

Array = NDArray[Any]


@dataclass(frozen=True)
class Grid:
    """What the numbers of each block stand for."""

    bits: int
    symmetric: bool
    scales: Array  # float32 (rows, blocks); those of symmetric blocks may be negative
    zeros: Array  # uint8 (rows, blocks)

    @property
    def highest(self) -> int:
        return (1 << self.bits) - 1


@dataclass(frozen=True)
class Blocks:
    bits: int
    size: int  # weights in a block
    numbers: Array  # uint8 (rows, blocks, bytes of a block)
    scales: Array  # float32 (rows, blocks)
    zeros: Array | None  # uint8 (rows, blocks), at 4 bit two in a byte; None: all in the middle


def block_size(width: int, wanted: int = 0) -> int:
    """The largest block up to the wanted one that divides `width`, so that no padding is stored; the smallest if none does."""
    return next((size for size in SIZES if size <= (wanted or _CHOSEN) and width % size == 0), SIZES[-1])


def filled_up(rows: Array, size: int) -> Array:
    """(rows, width) → float32 (rows, blocks, size), the last block filled up with zeros."""
    count, width = rows.shape
    return np.pad(np.ascontiguousarray(rows, np.float32), ((0, 0), (0, -width % size))).reshape(count, -1, size)


def range_grid(filled: Array, bits: int, *, symmetric: bool = False) -> Grid:
    """The grid that reaches over all weights of each block of `filled` (rows, blocks, size)."""
    highest = (1 << bits) - 1
    low, high = np.minimum(filled.min(axis=-1), 0), np.maximum(filled.max(axis=-1), 0)
    if symmetric:  # there is one number more below zero than above: the farther end goes there
        middle = 1 << (bits - 1)
        scales = (np.where(np.abs(high) > np.abs(low), high, low) / np.float32(-middle)).astype(np.float32)
        scales[scales == 0] = 1
        return Grid(bits, True, scales, np.full(scales.shape, middle, np.uint8))
    scales = ((high - low) / highest).astype(np.float32)
    scales[scales == 0] = 1  # a block of zeros
    return Grid(bits, False, scales, np.clip(np.rint(-low / scales), 0, highest).astype(np.uint8))


def nearest(filled: Array, grid: Grid) -> Array:
    """The number that comes nearest to each weight, uint8 (rows, blocks, size)."""
    numbers = filled / grid.scales[..., None]
    np.rint(numbers, out=numbers)
    numbers += grid.zeros[..., None]
    np.clip(numbers, 0, grid.highest, out=numbers)
    return numbers.astype(np.uint8)


def values(numbers: Array, grid: Grid) -> Array:
    """The weights that the numbers (rows, blocks, size) stand for."""
    result: Array = (numbers.astype(np.float32) - grid.zeros[..., None]) * grid.scales[..., None]
    return result


def stored(numbers: Array, grid: Grid) -> Blocks:
    zeros = None if grid.symmetric else grid.zeros
    size = numbers.shape[-1]
    if grid.bits == 4:
        numbers, zeros = _halved(numbers), None if zeros is None else _halved(zeros)
    return Blocks(grid.bits, size, numbers, grid.scales, zeros)


def pack(rows: Array, bits: int, size: int, *, symmetric: bool = False) -> Blocks:
    """`rows` (rows, width) float32, each weight to the nearest number of the plain grid."""
    filled = filled_up(rows, size)
    grid = range_grid(filled, bits, symmetric=symmetric)
    return stored(nearest(filled, grid), grid)


def unpack(blocks: Blocks, width: int) -> Array:
    """The weights (rows, width) that the numbers stand for."""
    numbers = _doubled(blocks.numbers) if blocks.bits == 4 else blocks.numbers
    weights = values(numbers, Grid(blocks.bits, blocks.zeros is None, blocks.scales, zeros_of(blocks)))
    return weights.reshape(len(weights), -1)[:, :width]


def zeros_of(blocks: Blocks) -> Array:
    """The zero point of each block, uint8 (rows, blocks)."""
    if blocks.zeros is None:
        return np.full(blocks.scales.shape, 1 << (blocks.bits - 1), np.uint8)
    return _doubled(blocks.zeros)[:, : blocks.scales.shape[1]] if blocks.bits == 4 else blocks.zeros


def _halved(numbers: Array) -> Array:
    """Two numbers below 16 in each byte; an odd one out is joined by zero."""
    if numbers.shape[-1] % 2:
        numbers = np.concatenate([numbers, np.zeros_like(numbers[..., :1])], axis=-1)
    return np.ascontiguousarray(numbers[..., 0::2] | (numbers[..., 1::2] << 4))


def _doubled(numbers: Array) -> Array:
    pairs = np.stack([numbers & 15, numbers >> 4], axis=-1)
    return pairs.reshape(*numbers.shape[:-1], -1)
