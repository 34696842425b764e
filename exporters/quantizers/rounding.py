"""How weights become numbers: the settings of int8-weights and int4-weights, and what they do to one matrix.

nearest  each weight goes to the nearest number of its block's range
hqq      the blocks' scales are fitted to their weights first (hqq.py); no samples are needed
gptq     weights make up for each other's errors on the inputs of the calibration samples (gptq.py)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from runtime.errors import OptionError

from . import gptq, hqq
from . import recurrent as layers
from .blocks import SIZES, Array, Blocks, Grid, block_size, filled_up, nearest, range_grid, stored
from .rows import quantize_columns

NEAREST, HQQ, GPTQ = "nearest", "hqq", "gptq"
SAME, EIGHT = "same", "8"
COLUMN_BITS = 7  # of the form for many rows, -64 … 63: see rows.py


@dataclass(frozen=True)
class WeightSettings:
    block: int = 0  # the most weights in a block, as far as it divides the width; 0: 128
    symmetric: bool = False  # no zero points
    rounding: str = NEAREST
    head: str = SAME  # bits of the output layer, and of the embedding if it is tied to it
    recurrence: str = layers.AUTO  # what RNN, GRU and LSTM compute in: see recurrent.py

    def __post_init__(self) -> None:
        if self.block not in (0, *SIZES):
            sizes = ", ".join(map(str, reversed(SIZES)))
            raise OptionError(
                f"setting 'block' is {self.block}, expected the size of a block that onnxruntime has: {sizes}, or 0 to have it "
                "chosen; e.g. --set block=32"
            )
        if self.rounding not in (NEAREST, HQQ, GPTQ):
            raise OptionError(
                f"setting 'rounding' is {self.rounding!r}, expected {NEAREST}, {HQQ} or {GPTQ}; e.g. --set rounding={HQQ}"
            )
        if self.head not in (SAME, EIGHT):
            raise OptionError(
                f"setting 'head' is {self.head!r}, expected {SAME}, or {EIGHT} for an output layer of 8 bits; "
                f"e.g. --set head={EIGHT}"
            )
        if self.recurrence not in (layers.AUTO, layers.INT8, layers.FLOAT32):
            raise OptionError(
                f"setting 'recurrence' is {self.recurrence!r}, expected {layers.INT8} or {layers.FLOAT32}, or {layers.AUTO} to "
                f"have it chosen by size; e.g. --set recurrence={layers.INT8}"
            )


def rounded(rows: Array, bits: int, settings: WeightSettings, moments: Array | None = None) -> Blocks:
    """`rows` (outputs, inputs) in blocks. `moments` of the inputs are for gptq; without them it does as hqq."""
    filled = filled_up(rows, block_size(rows.shape[1], settings.block))
    grid, numbers = _rounded(rows, filled, range_grid(filled, bits, symmetric=settings.symmetric), settings, moments)
    return stored(numbers, grid)


def rounded_columns(matrix: Array, settings: WeightSettings, moments: Array | None = None) -> tuple[Array, Array]:
    """`matrix` (inputs, outputs) in the form of rows.py: int8 of the same shape, and the scale of each output."""
    if settings.rounding == NEAREST:
        return quantize_columns(matrix)
    rows = matrix.T
    filled = filled_up(rows, rows.shape[1])
    grid, numbers = _rounded(rows, filled, range_grid(filled, COLUMN_BITS, symmetric=True), settings, moments)
    middle = 1 << (COLUMN_BITS - 1)
    return np.ascontiguousarray((numbers[:, 0].astype(np.int16) - middle).astype(np.int8).T), grid.scales[:, 0]


def _rounded(rows: Array, filled: Array, grid: Grid, settings: WeightSettings, moments: Array | None) -> tuple[Grid, Array]:
    if moments is not None:  # on grids that were fitted first it comes out no better
        return grid, gptq.compensated(rows, moments, grid, filled.shape[-1])
    if settings.rounding != NEAREST:
        grid = hqq.fitted(filled, grid)
    return grid, nearest(filled, grid)
