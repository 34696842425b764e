"""The few statistics a latency report needs, without assuming a distribution."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_PERCENTILES = (90.0, 95.0, 99.0, 99.9)
_MIN_TAIL = 10  # samples that must lie beyond a percentile before it is worth printing


FEWEST = 7  # times that an interval can be told from
_DISTURBED = 1.1


@dataclass(frozen=True)
class Estimate:
    """A median with its 95 % confidence interval; `low` and `high` are None with fewer than six samples."""

    median: float
    low: float | None
    high: float | None

    def __str__(self) -> str:
        return f"{self.median:.3g}" if self.low is None else f"{self.median:.3g} [{self.low:.3g}, {self.high:.3g}]"


def median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return float(ordered[middle]) if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def estimate(values: Sequence[float]) -> Estimate:
    """The median and the order-statistic interval that covers it in 95 % of experiments (normal approximation)."""
    ordered, count = sorted(values), len(values)
    rank = math.floor((count - 1.96 * math.sqrt(count)) / 2)
    if count < 6 or rank < 0:
        return Estimate(median(ordered), None, None)
    return Estimate(median(ordered), float(ordered[rank]), float(ordered[count - 1 - rank]))


def undisturbed(values: Sequence[float], known: Sequence[float] = ()) -> list[bool]:
    """Which of these times are within a tenth of what the fastest tenth of all takes, the `known` ones included."""
    limit = _DISTURBED * quantile([*values, *known], 0.1)
    return [value <= limit for value in values]


def quantile(values: Sequence[float], fraction: float) -> float:
    ordered = sorted(values)
    position = fraction * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return float(ordered[below] + (ordered[above] - ordered[below]) * (position - below))


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Only the percentiles that enough samples stand behind: p99 needs 1000 of them."""
    return {
        f"p{level:g}": quantile(values, level / 100)
        for level in _PERCENTILES
        if len(values) * (1 - level / 100) >= _MIN_TAIL - 1e-9
    }
