"""Scales that fit the weights of each block better than its range does, found without data.

Half-quadratic quantization (Badri & Shaji, 2023) minimises a norm of the weights' error that forgives outliers,

    Σ |w - (n(w) - z) · s|^p,   p < 2,   n(w) = clip(round(w / s) + z)

by taking turns: a part e of the error is given up, and the rest is fitted by least squares.

    e ← sign(r) · max(|r| - p |r|^(p-1) / β, 0),   r = w / s - (n - z)
    s ← s · Σ (n - z)(w / s - e) / Σ (n - z)²,   β ← κβ

The paper fits z and leaves s alone. Zero points are whole numbers here (blocks.py), and its step for z, the mean of r - e,
never reaches a half: it moved none in the 6378 blocks of a small GPT, and trying two on either side of each lowers the error
by 0.3 % only. So the scales are fitted, beginning at the whole range of the block and at a part of it. Of all turns each block
keeps its best.

Chosen by the divergence of that GPT's answers at 4 bit from the original's on text it was not trained on, in 1e-3 nats: to the
nearest of the range 8.1, p = 0.7 (the paper's, from the whole range alone) 6.5, 1.5 4.5, 1.75 and 2 (from three ranges) 5.0 and
4.9. Most of that is the output layer's. With that layer at 8 bit they are 1.2–1.5, fitted or not; there it helps to look at the
inputs (gptq.py: 0.26).
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from hashlib import blake2b

import numpy as np

from runtime.machine import available_cpus

from .blocks import Array, Grid

NORM = 1.5  # p, which the roots below are for
_BETA, _KAPPA = 10.0, 1.01
_TURNS = 10
_RANGES = (1.0, 0.9)  # of a block's whole range, to begin at
_AT_ONCE = 1 << 20  # weights
_REMEMBERED = 1024  # matrices; the scales of one are a hundredth of its bytes
_FITTED: dict[bytes, Array] = {}  # a search fits the same matrices for many of its candidates


def fitted(filled: Array, grid: Grid) -> Grid:
    """A grid at which the error of the weights `filled` (rows, blocks, size) is no larger than at `grid`."""
    digest = blake2b(f"{filled.shape} {grid.highest}".encode())
    for array in (filled, grid.scales, grid.zeros):
        digest.update(np.ascontiguousarray(array).data)
    key = digest.digest()
    if key not in _FITTED:
        rows = max(1, _AT_ONCE // filled[0].size)
        parts = [slice(start, start + rows) for start in range(0, len(filled), rows)]
        with ThreadPoolExecutor(available_cpus()) as threads:  # numpy lets the others go on
            scales = list(
                threads.map(lambda part: _fitted_scales(filled[part], grid.scales[part], grid.zeros[part], grid.highest), parts)
            )
        while len(_FITTED) >= _REMEMBERED:
            del _FITTED[next(iter(_FITTED))]
        _FITTED[key] = np.concatenate(scales)
    return replace(grid, scales=_FITTED[key].copy())


def _fitted_scales(filled: Array, scales: Array, zeros: Array, highest: int) -> Array:
    best, least = scales.copy(), np.full(scales.shape, np.inf, np.float32)
    lowest, highest_step = -zeros[..., None].astype(np.float32), (highest - zeros[..., None]).astype(np.float32)
    for part in _RANGES:
        scale = (scales * np.float32(part))[..., None]
        beta = _BETA
        for _ in range(_TURNS):
            steps = filled / scale
            rounded = np.clip(np.rint(steps), lowest, highest_step)  # n - z
            error = steps - rounded
            size = np.abs(error)
            root = np.sqrt(size)
            loss = (size * root).mean(axis=-1) * np.abs(scale[..., 0]) ** NORM
            better = loss < least
            least[better], best[better] = loss[better], scale[better, 0]
            given_up = np.maximum(size - NORM * root / np.float32(beta), 0) * np.sign(error)
            scale = _refitted(scale, rounded, steps - given_up)
            beta *= _KAPPA
    return best


def _refitted(scale: Array, rounded: Array, target: Array) -> Array:
    """The scale at which `rounded` comes nearest to `target`, which is in steps of `scale`; as it was where all are zero."""
    along = (rounded * target).sum(axis=-1, keepdims=True)
    square = (rounded * rounded).sum(axis=-1, keepdims=True)
    found: Array = np.where(along > 0, scale * along / np.maximum(square, 1), scale).astype(np.float32)
    return found
