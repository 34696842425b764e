"""How fast quantized bundles are to their original, and what of that is this machine's noise.

All are timed interleaved, with the original taking part twice: the difference between two copies of the same bundle is noise,
and "slower" means slower than that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from runtime.bench import DEFAULT_PAST, bench, bundle_variant
from runtime.bundle import DECODER, Bundle
from runtime.feeds import natural_batch
from runtime.machine import available_memory, give_back_memory
from runtime.statistics import Estimate

from .quantizers.scheme import HALVES, MIXED

NOISE_FLOOR = 1.02  # two equal bundles can measure up to this apart even when the control happens to agree better
NOISE_CEILING = 1.10  # a control further off than this says that nothing was measured, not that everything is allowed
_LAUNCHES = 3, 6  # the latter if the machine was disturbed
_LAUNCH_SECONDS = 2.0  # for each bundle; calls of 30 ms take all 35 rounds in it
_SHARE_OF_MEMORY = 0.8  # of what is available, that the bundles of one race may take


@dataclass(frozen=True)
class Speed:
    """Candidate against original, and the original against a copy of itself."""

    ratio: Estimate
    noise: Estimate
    before_us: float
    after_us: float
    batch: int
    threads: int


def measure_speed(before: Bundle, after: Bundle, batch: int, threads: int) -> Speed:
    (speed,) = measure_speeds(before, [after], batch, threads)
    return speed


def measure_speeds(before: Bundle, after: Sequence[Bundle], batch: int, threads: int) -> list[Speed]:
    """Interleaved timing of candidates, the original, and the original again as a control; of large ones in several races."""
    give_back_memory()  # of what was made and judged in this process: the race is in others
    return [speed for group in _that_fit(before, after) for speed in _race(before, group, batch, threads)]


def _that_fit(before: Bundle, after: Sequence[Bundle]) -> list[list[Bundle]]:
    """Candidates in groups, as many at a time as memory holds beside the original and its copy."""
    room = available_memory()
    groups: list[list[Bundle]] = [[]]
    left = limit = float("inf") if room is None else _SHARE_OF_MEMORY * room - 2 * before.graph_bytes
    for bundle in after:
        widened = before.graph_bytes if bundle.manifest.precision in (*HALVES, MIXED) else 0
        needed = bundle.graph_bytes + widened
        if groups[-1] and needed > left:
            groups.append([])
            left = limit
        groups[-1].append(bundle)
        left -= needed
    return groups


def _race(before: Bundle, after: Sequence[Bundle], batch: int, threads: int) -> list[Speed]:
    names = [f"candidate {number}" for number, _ in enumerate(after)]
    bundles = [("original", before), ("control", before), *zip(names, after, strict=True)]
    variants = [bundle_variant(bundle.root, name=name, threads=threads, past=past_of(bundle)) for name, bundle in bundles]
    for launches in _LAUNCHES:
        seconds = _LAUNCH_SECONDS * len(variants)
        report = bench(variants, batches=(batch,), threads=threads, launches=launches, seconds=seconds)
        noise, *ratios = (ratio for name in ("control", *names) if (ratio := report.timing(name, batch).ratio) is not None)
        if 1 / NOISE_CEILING < noise.median < NOISE_CEILING and not any(map(is_undecided, ratios)):
            break
    before_us = report.timing("original", batch).latency.median
    return [  # by the paired ratio: medians alone drift
        Speed(ratio, noise, before_us, before_us * ratio.median, batch, threads) for ratio in ratios
    ]


def past_of(bundle: Bundle) -> int:
    """Tokens before the step that is timed: the usual number, or as many as leave a position."""
    longest = (bundle.manifest.generation or {}).get("longest")
    return DEFAULT_PAST if longest is None else min(DEFAULT_PAST, longest - 1)


def is_undecided(ratio: Estimate) -> bool:
    """Whether it looks slower than by noise, and the interval is too wide to say so."""
    return ratio.median > NOISE_CEILING and (ratio.low or ratio.median) <= NOISE_CEILING


def timed_batch(bundle: Bundle) -> int:
    """The natural batch of the graph that is timed: the only one, or the decoder."""
    return natural_batch(bundle.graph(None if len(bundle.manifest.graphs) == 1 else DECODER)[1].signature)
