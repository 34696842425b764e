"""Rounding that lets later weights make up for the error of earlier ones (Frantar et al., "GPTQ", 2023).

A product's output error on its inputs X, for the weights w of one output and their rounded form q, is

    |X(w - q)|² = (w - q)ᵀ H (w - q),   H = XᵀX

Weights are rounded one after the other. After each, those not yet rounded move to where they make the error least:

    w[j] ← w[j] - (w[i] - q[i]) / U[i, i] · U[i, j],   j > i,   H⁻¹ = UᵀU with U upper triangular

Inputs with the most weight in H come first, while most of the others can still make up for them. The grids (blocks.py) are
those of the original weights, so that an input's block is known whenever its turn comes. H is damped by a hundredth of its mean
diagonal, which keeps it invertible and the weights from following chance in the samples.
"""

from __future__ import annotations

import numpy as np

from .blocks import Array, Grid

_DAMPING = 0.01
_AT_ONCE = 128  # inputs whose errors reach the weights after them in one product


def compensated(rows: Array, moments: Array, grid: Grid, size: int) -> Array:
    """The numbers uint8 (rows, blocks, size) of `rows` (rows, width), by H = `moments` (width, width) of the inputs."""
    count, width = rows.shape
    order = np.argsort(-np.diag(moments), kind="stable")
    factor = _factor(moments[np.ix_(order, order)])
    left = np.ascontiguousarray(rows.T[order], np.float32)  # (width, rows): the weights of an input side by side
    scales, zeros = np.ascontiguousarray(grid.scales.T), np.ascontiguousarray(grid.zeros.T).astype(np.float32)
    numbers = np.repeat(grid.zeros.T, size, axis=0)  # what fills the last block up stands for zero
    for start in range(0, width, _AT_ONCE):
        end = min(width, start + _AT_ONCE)
        errors = np.empty((end - start, count), np.float32)
        for place in range(start, end):
            scale, zero = scales[order[place] // size], zeros[order[place] // size]
            number = np.clip(np.rint(left[place] / scale) + zero, 0, grid.highest)
            numbers[order[place]] = number
            error = errors[place - start] = (left[place] - (number - zero) * scale) / factor[place, place]
            left[place + 1 : end] -= factor[place, place + 1 : end, None] * error
        left[end:] -= factor[start:end, end:].T @ errors
    return np.ascontiguousarray(numbers.T).reshape(count, -1, size)


def _factor(moments: Array) -> Array:
    """U, upper triangular, with (H + damping)⁻¹ = UᵀU.

    Cholesky from the last row up gives H = RRᵀ with R upper triangular, and U = R⁻¹.
    """
    damped = moments.astype(np.float64)
    damped[np.diag_indices_from(damped)] += _DAMPING * damped.trace() / len(damped) or 1.0  # inputs that are all zero
    upper = np.linalg.cholesky(damped[::-1, ::-1])[::-1, ::-1]
    factor: Array = np.linalg.inv(upper).astype(np.float32)
    return factor
