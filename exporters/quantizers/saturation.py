"""Products that give other answers on CPUs with AVX2 and without VNNI.

There vpmaddubsw multiplies unsigned 8-bit activations u by signed 8-bit weights w and adds each two neighbours in 16 bits:

    u[k] · w[k, c] + u[k + 1] · w[k + 1, c],   k even, cut off at -32768 and 32767

Full 8-bit numbers reach 2 · 255 · 127 = 64770. Whether those of a product get beyond 16 bits is bounded by the largest u that
calibration saw at each place k; what was not seen may be a little larger (HEADROOM), and nothing is above 255. Signed
activations are shifted to unsigned ones before they are multiplied, so that the same holds of them. Weights of seven bits
(-64 … 64) stay within 16 bits whatever the activations are: 2 · 255 · 64 = 32640.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

EXACT = ("avx512_vnni", "avx_vnni", "amx_int8", "asimd")  # with one of these sums have 32 bits from the start
HEADROOM = 1.1
FULL, REDUCED = 127, 64  # the largest weight in eight bits, and in seven
_LOWEST, _HIGHEST = -(1 << 15), (1 << 15) - 1
_COLUMNS = 1024  # at once

Array = NDArray[Any]


def quantize_weight(weight: Array, largest: int, axis: int | None, least: Array | float = 0) -> tuple[Array, Array]:
    """int8 numbers of -largest … largest and their scales of at `least` so much: one, or one for each place of `axis`."""
    others = None if axis is None else tuple(set(range(weight.ndim)) - {axis})
    needed = np.abs(weight).max(axis=others) / largest
    scales = np.asarray(np.maximum(needed, least if needed.ndim else np.max(least)), np.float32)
    scales = np.where(scales == 0, np.float32(1), scales)
    wide = scales if others is None else np.expand_dims(scales, others)
    return np.clip(np.rint(weight / wide), -largest, largest).astype(np.int8), scales


def activation_numbers(low: float, high: float) -> tuple[np.float32, int]:
    """Scale and zero point of unsigned activations in a range that has zero in it."""
    scale = np.float32((high - low) / 255) or np.float32(1)
    return scale, int(np.clip(np.rint(-low / scale), 0, 255))


def can_saturate(numbers: Array, highest: Array, ends: tuple[float, float]) -> bool:
    """Whether a product by int8 `numbers` (inputs, outputs) can get beyond 16 bits, by the `highest` (inputs,) seen."""
    lowest_sum, highest_sum = pair_sums(numbers, largest_numbers(highest, ends))
    return lowest_sum < _LOWEST or highest_sum > _HIGHEST


def largest_numbers(highest: Array, ends: tuple[float, float]) -> Array:
    """The largest unsigned number that is expected at each place, its zero point included: padding is zero."""
    scale, zero = activation_numbers(*ends)
    seen = np.maximum(np.rint(highest / scale) + zero, zero)
    return np.clip(np.ceil(seen * HEADROOM), 0, 255).astype(np.int32)


def pair_sums(numbers: Array, largest: Array) -> tuple[int, int]:
    """The least and the greatest sum of two neighbouring products with activations from 0 to `largest`."""
    if len(numbers) % 2:
        numbers = np.concatenate([numbers, np.zeros_like(numbers[:1])])
        largest = np.concatenate([largest, [0]])
    least, greatest = 0, 0
    for start in range(0, numbers.shape[1], _COLUMNS):
        products = numbers[:, start : start + _COLUMNS].astype(np.int32) * largest[:, None]
        below, above = np.minimum(products, 0), np.maximum(products, 0)
        least = min(least, int((below[0::2] + below[1::2]).min()))
        greatest = max(greatest, int((above[0::2] + above[1::2]).max()))
    return least, greatest


def kernel_rows(numbers: Array, channels: Array) -> tuple[Array, Array]:
    """A convolution as the product that kernels make of it: weights (outputs, inputs, …) → (…, inputs; outputs), and what was
    seen of each channel, repeated to match. Groups share the largest of theirs."""
    outputs, inputs = numbers.shape[:2]
    rows = np.moveaxis(numbers, (0, 1), (-1, -2)).reshape(-1, outputs)
    seen = channels.reshape(-1, inputs).max(axis=0)
    return rows, np.tile(seen, len(rows) // inputs)
