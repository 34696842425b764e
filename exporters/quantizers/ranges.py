"""Ranges of activations from their distributions: how much of the far ends to give up for finer steps everywhere else.

minmax      all that was seen.
percentile  the middle p percent of the values.
mse         the range at which the expected square error is least, of steps Δ = (b - a) / 255 and of values beyond the ends:
                n · Δ² / 12 + Σ_{x < a} (x - a)² + Σ_{x > b} (x - b)²,   n: values within that are not exactly zero
entropy     the range at which the quantized distribution q tells most of the original p: the least Σ p log(p / q). In p, what
            lies beyond is at the ends; in q, what lies within is spread evenly over the occupied bins of each of 256 steps.
            (Migacz, "8-bit inference with TensorRT", 2017)

For the last two, ranges of the form [max(low, -t), min(high, t)] are tried: whichever side reaches farther is cut first.
A range always has zero in it, which then is a step of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import ceil
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.errors import DataError

from ..calibration import BINS, Activations

MINMAX, PERCENTILE, ENTROPY, MSE = "minmax", "percentile", "entropy", "mse"
METHODS = (MINMAX, PERCENTILE, ENTROPY, MSE)
_STEPS = 256
_CUTS = 128  # of the farther end that are tried
_UNSEEN = 1e-4  # of a count: what q gives to a bin that p has and q does not

Range = tuple[float, float]
Array = NDArray[Any]


def ranges_of(found: Mapping[str, Activations], method: str, percentile: float) -> dict[str, Range]:
    """Of each tensor, by its activations (counted, unless the method is minmax)."""
    if method == MINMAX:
        return {name: _with_zero(item.low, item.high) for name, item in found.items()}
    least = ceil(1 / (1 - percentile / 100)) if method == PERCENTILE else BINS
    for name, item in found.items():
        _refuse_too_few(name, item, method, least)
    finders: dict[str, Callable[[Activations], Range]] = {
        PERCENTILE: lambda item: percentile_range(item, percentile),
        ENTROPY: entropy_range,
        MSE: mse_range,
    }
    return {name: _with_zero(*finders[method](item)) for name, item in found.items()}


def _refuse_too_few(name: str, item: Activations, method: str, least: int) -> None:
    if item.values < least:
        needed = ceil(least * item.samples / item.values)
        raise DataError(
            f"ranges={method} needs {needed} calibration samples and there are {item.samples}: {name!r} has {item.values} "
            f"values in them, and {least} are needed to tell its far ends; pass more with --data, or use --set ranges={MINMAX}"
        )


def percentile_range(item: Activations, percent: float) -> Range:
    """Where the lower and the upper half of what is left out begin, evenly within a bin."""
    counts, edges = _counts(item), _edges(item)
    share = np.concatenate([[0.0], np.cumsum(counts)]) / counts.sum()
    tail = (1 - percent / 100) / 2
    low = float(np.interp(tail, share, edges))
    high = float(np.interp(tail, 1 - share[::-1], edges[::-1]))
    return low, high


def mse_range(item: Activations) -> Range:
    counts, edges = _counts(item), _edges(item)
    centres = (edges[:-1] + edges[1:]) / 2
    rounded = counts.sum() - item.zeros

    def error(low: float, high: float) -> float:
        beyond = np.maximum(low - centres, 0) + np.maximum(centres - high, 0)
        cut = counts[beyond > 0].sum()
        step = (max(high, 0.0) - min(low, 0.0)) / (_STEPS - 1)
        return float(max(0, rounded - cut) * step**2 / 12 + (counts * beyond**2).sum())

    return _best(item, error)


def entropy_range(item: Activations) -> Range:
    counts, edges = _counts(item), _edges(item)

    def divergence(low: float, high: float) -> float:
        first = max(0, int(np.searchsorted(edges, low, "right")) - 1)
        last = min(BINS, int(np.searchsorted(edges, high, "left")))
        within = counts[first:last].astype(np.float64)
        if len(within) < _STEPS:
            return float("inf")  # a bin for each step: nothing would be told apart any more
        clipped = within.copy()
        clipped[0] += counts[:first].sum()
        clipped[-1] += counts[last:].sum()
        return _divergence(clipped, _spread(within))

    return _best(item, divergence)


def _best(item: Activations, cost: Callable[[float, float], float]) -> Range:
    """Of the cuts that are tried the one of the least cost; of equals the widest."""
    farthest = max(abs(item.low), abs(item.high))
    cuts = [farthest * place / _CUTS for place in range(_CUTS, 0, -1)]
    tried = [(max(item.low, -cut), min(item.high, cut)) for cut in cuts]
    tried = [(low, high) for low, high in tried if low < high] or [(item.low, item.high)]
    return min(tried, key=lambda ends: cost(*ends))


def _spread(counts: Array) -> Array:
    """Each step's count, evenly over those of its bins that have any."""
    step = np.arange(len(counts)) * _STEPS // len(counts)
    occupied = counts > 0
    total = np.bincount(step, weights=counts, minlength=_STEPS)
    bins = np.bincount(step, weights=occupied, minlength=_STEPS)
    even: Array = np.where(occupied, total[step] / np.maximum(bins[step], 1), 0.0)
    return even


def _divergence(p: Array, q: Array) -> float:
    occupied = p > 0
    q = np.maximum(q[occupied], _UNSEEN)
    p = p[occupied] / p.sum()
    return float((p * np.log(p / (q / q.sum()))).sum())


def _counts(item: Activations) -> NDArray[np.int64]:
    assert item.counts is not None
    return item.counts


def _edges(item: Activations) -> Array:
    return np.linspace(item.low, item.high, BINS + 1)


def _with_zero(low: float, high: float) -> Range:
    return min(low, 0.0), max(high, 0.0)
