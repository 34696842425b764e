"""How fast quantized bundles are to their original, and what of that is this machine's noise.

All are timed interleaved, with the original taking part twice: the difference between two copies of the same bundle is noise,
and "slower" means slower than that.

A second thread speeds some short calls up and slows others down: that depends on the graph, and on how soon the machine's cores
hear of each other. So where the user names no number, short calls are timed on all cores and on one, and each bundle counts as
it is fastest. resnet-small on two threads of a shared machine, minutes apart: fp32 118 and 178 µs (on one thread 190 and 199),
int8 64 and 133 (on one 71 and 76).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from runtime.bench import DEFAULT_PAST, bench, bundle_variant
from runtime.bundle import DECODER, Bundle
from runtime.feeds import natural_batch
from runtime.machine import available_cpus, available_memory, give_back_memory
from runtime.statistics import Estimate

from .quantizers.scheme import HALVES, MIXED

NOISE_FLOOR = 1.02  # two equal bundles can measure up to this apart even when the control happens to agree better
NOISE_CEILING = 1.10  # a control further off than this says that nothing was measured, not that everything is allowed
_LAUNCHES = 3, 6  # the latter if the machine was disturbed
_LAUNCH_SECONDS = 2.0  # for each bundle; calls of 30 ms take all 35 rounds in it
_SHORT_US = 1000.0  # calls that may be faster on one thread
_SHORT_BYTES = 64 << 20  # whoever reads more takes longer
_CLEARLY = 0.97  # of its latency on as many threads as the original: to be told to run on another number
_SHARE_OF_MEMORY = 0.8  # of what is available, that the bundles of one race may take


@dataclass(frozen=True)
class Speed:
    """Candidate against original, and the original against a copy of itself."""

    ratio: Estimate
    noise: Estimate
    before_us: float
    after_us: float
    batch: int
    threads: int  # of the candidate
    threads_before: int  # of the original
    disturbed: float = 0.0  # share of the rounds that something slowed the machine in; they do not count


def thread_counts(bundle: Bundle, batch: int, asked: int | None) -> tuple[int, ...]:
    """Numbers of threads to choose from, first the one that `bundle` is fastest with: what was asked for, or measured."""
    every = available_cpus()
    if asked is not None or every == 1 or bundle.graph_bytes > _SHORT_BYTES:
        return (asked or every,)
    variants = [bundle_variant(bundle.root, name=str(count), threads=count, past=past_of(bundle)) for count in (every, 1)]
    seconds = _LAUNCH_SECONDS / 2
    report = bench(variants, batches=(batch,), threads=every, launches=_LAUNCHES[0], seconds=seconds)
    on_all, on_one = (report.timing(variant.name, batch) for variant in variants)
    if on_all.latency.median > _SHORT_US or on_one.ratio is None:
        return (every,)
    return (1, every) if on_one.ratio.median < 1.0 else (every, 1)


def measure_speed(before: Bundle, after: Bundle, batch: int, counts: Sequence[int]) -> Speed:
    (speed,) = measure_speeds(before, [after], batch, counts)
    return speed


def measure_speeds(before: Bundle, after: Sequence[Bundle], batch: int, counts: Sequence[int]) -> list[Speed]:
    """Interleaved timing of candidates, the original, and the original again as a control; of large ones in several races.

    The original runs on the first of `counts` threads, a candidate on the number that it is fastest with.
    """
    give_back_memory()  # of what was made and judged in this process: the race is in others
    return [speed for group in _that_fit(before, after, len(counts)) for speed in _race(before, group, batch, counts)]


def _that_fit(before: Bundle, after: Sequence[Bundle], times: int) -> list[list[Bundle]]:
    """Candidates in groups, as many at a time as memory holds so many `times` beside the original and its copy."""
    room = available_memory()
    groups: list[list[Bundle]] = [[]]
    left = limit = float("inf") if room is None else _SHARE_OF_MEMORY * room - 2 * before.graph_bytes
    for bundle in after:
        widened = before.graph_bytes if bundle.manifest.precision in (*HALVES, MIXED) else 0
        needed = times * (bundle.graph_bytes + widened)
        if groups[-1] and needed > left:
            groups.append([])
            left = limit
        groups[-1].append(bundle)
        left -= needed
    return groups


def _race(before: Bundle, after: Sequence[Bundle], batch: int, counts: Sequence[int]) -> list[Speed]:
    runners = [("original", before, counts[0]), ("control", before, counts[0])]
    runners += [(_name(number, count), bundle, count) for number, bundle in enumerate(after) for count in counts]
    variants = [bundle_variant(bundle.root, name=name, threads=count, past=past_of(bundle)) for name, bundle, count in runners]
    for launches in _LAUNCHES:
        seconds = _LAUNCH_SECONDS * len(variants)
        report = bench(variants, batches=(batch,), threads=counts[0], launches=launches, seconds=seconds)
        ratios = {name: ratio for name, _, _ in runners if (ratio := report.timing(name, batch).ratio) is not None}
        fastest = [_fastest({count: ratios[_name(number, count)] for count in counts}) for number, _ in enumerate(after)]
        noise = ratios["control"]
        if 1 / NOISE_CEILING < noise.median < NOISE_CEILING and not any(is_undecided(ratio) for _, ratio in fastest):
            break
    original = report.timing("original", batch)
    before_us = original.latency.median
    return [  # by the paired ratio: medians alone drift
        Speed(ratio, noise, before_us, before_us * ratio.median, batch, count, counts[0], original.disturbed_share)
        for count, ratio in fastest
    ]


def _name(number: int, count: int) -> str:
    return f"candidate {number} on {count}"


def _fastest(ratios: Mapping[int, Estimate]) -> tuple[int, Estimate]:
    """The number of threads to run on: the original's, unless another is clearly better."""
    usual, *others = ratios
    best = min(others, key=lambda count: ratios[count].median, default=usual)
    count = best if ratios[best].median < _CLEARLY * ratios[usual].median else usual
    return count, ratios[count]


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
