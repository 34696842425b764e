"""Which of the candidates that were measured is the best: the fastest within the budget, of equally fast ones the smallest.

With `for_size` it is the smallest, of equally small ones the fastest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isfinite

from runtime.statistics import Estimate

from .candidates import Candidate, Measured
from .quantize import Budget
from .race import NOISE_CEILING

Tried = tuple[Candidate, Measured]

EQUALLY_FAST = 1.03  # a race cannot tell these apart
EQUALLY_SMALL = 1.005


@dataclass(frozen=True)
class Preference:
    budget: Budget
    allowed: float  # drop of quality

    def is_good(self, found: Measured) -> bool:
        return found.problem is None and found.drop <= self.allowed

    def may_fit(self, found: Measured, original_us: float | None = None) -> bool:
        """Whether it is within the budget as far as a quick race can tell, which is wrong by up to a machine's noise."""
        if not self.is_good(found) or (self.budget.max_bytes is not None and found.bytes > self.budget.max_bytes):
            return False
        return (found.ratio.low or found.ratio.median) <= self._slowest(original_us) * NOISE_CEILING

    def _slowest(self, original_us: float | None) -> float:
        """The largest ratio to the original's latency that is allowed."""
        ratios = [float("inf") if self.budget.for_size else 1.0]
        if self.budget.max_ratio is not None:
            ratios.append(self.budget.max_ratio)
        if self.budget.max_us is not None and original_us is not None:
            ratios.append(self.budget.max_us / original_us)
        return min(ratios)

    def ranked(self, tried: Sequence[Tried]) -> list[Tried]:
        """The best first. A mix gives way to a scheme alone that is as small and cannot be told from it in speed, nor from the
        fastest; and to one that is faster by what it looks, even if noise may have done that. Where only size matters, to the
        former alone."""
        ordered = self._by_size(tried) if self.budget.for_size else self._by_speed_and_size(tried)
        if ordered and not is_alone(ordered[0][0]):
            mix = ordered[0][1]
            alone = [item for item in (ordered if self.budget.for_size else self._leading(ordered)) if is_alone(item[0])]
            rivals = [item for item in alone if _is_no_worse(item[1], mix)]
            if not self.budget.for_size:
                rivals += [item for item in alone if item[1].ratio.median * EQUALLY_FAST < mix.ratio.median]
            if rivals:
                return [rivals[0], *(item for item in ordered if item is not rivals[0])]
        return ordered

    def _by_size(self, tried: Sequence[Tried]) -> list[Tried]:
        smallest = min((found.bytes for _, found in tried), default=1)
        return sorted(
            tried, key=lambda item: (item[1].bytes if item[1].bytes > smallest * EQUALLY_SMALL else 0, *_by_speed(item))
        )

    def _by_speed_and_size(self, tried: Sequence[Tried]) -> list[Tried]:
        leading = self._leading(tried)
        others = [item for item in tried if item not in leading]
        return [*self._by_size(leading), *sorted(others, key=_by_speed)]

    def _leading(self, tried: Sequence[Tried]) -> list[Tried]:
        """Those that cannot be told from the fastest."""
        fastest = min((found.ratio for _, found in tried), key=lambda ratio: ratio.median, default=None)
        return [item for item in tried if fastest is not None and _is_as_fast(item[1].ratio, fastest)]

    def miss(self, found: Measured, original_us: float | None = None) -> float:
        """How far it is outside the budget, all its sides added up."""
        if not isfinite(found.drop):
            return inf
        misses = [max(0.0, found.drop - self.allowed) / max(self.allowed, 0.1)]
        if self.budget.max_bytes is not None:
            misses.append(max(0.0, found.bytes / self.budget.max_bytes - 1))
        misses.append(max(0.0, found.ratio.median / self._slowest(original_us) - 1))
        return sum(misses)


def _by_speed(item: Tried) -> tuple[float, float]:
    return (item[1].ratio.median, item[1].drop)


def _is_as_fast(ratio: Estimate, fastest: Estimate) -> bool:
    """On a quiet machine within 3 %; on a disturbed one, whose intervals are wide, as far as they overlap, up to its noise."""
    overlap = (ratio.low or ratio.median) <= (fastest.high or fastest.median)
    return ratio.median <= fastest.median * (NOISE_CEILING if overlap else EQUALLY_FAST)


def _is_no_worse(one: Measured, other: Measured) -> bool:
    """As small, and as fast as far as their intervals tell."""
    return one.bytes <= other.bytes * EQUALLY_SMALL and (one.ratio.low or one.ratio.median) <= (
        other.ratio.high or other.ratio.median
    )


def is_alone(candidate: Candidate) -> bool:
    """One scheme on all that it can take, as `--scheme NAME` would make it."""
    return len(candidate.parts) == 1 and candidate.parts[0].nodes is None
