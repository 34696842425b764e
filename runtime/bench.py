"""Interleaved benchmarks: every variant in a fresh process of its own, taking turns in random order.

Runtimes that share a process disturb each other (thread pools, allocators, caches), and a shared machine drifts by tens of
percent within minutes. So each variant is a worker process, a round gives each worker one short turn, and what is compared is
the ratio within a round. Rounds in which the first variant was slow are left out: whatever slowed it, perhaps on another
machine of the same host, does not slow all variants alike (decision 0019).

The interval is taken over rounds, because calls within a turn are not independent. Where a process lands in memory can make it
several percent faster or slower for its whole life, so all of them are launched anew a few times.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from .bench_worker import Footprint, Variant, Worker, one_round
from .bundle import Bundle
from .errors import OptionError
from .machine import busy_share, describe_machine
from .statistics import FEWEST, Estimate, estimate, percentiles, quantile, undisturbed

_BUSY = 0.2  # with one of two cores taken, PyTorch on two threads measured 2.4, 5.9 and 16 ms instead of 0.8
DEFAULT_PAST = 32  # tokens a decoder has seen before the one that is timed
_DISTURBED = 0.1  # of the rounds; fewer are to be expected
TURN_SECONDS = 0.006  # many short turns: of three settings tried, 100 of 6 ms gave the tightest ratios


@dataclass(frozen=True)
class Timing:
    """One variant at one batch size. Times are microseconds for one call."""

    variant: str
    batch: int
    latency: Estimate
    spread: float  # interquartile range of all calls
    calls: int
    rounds: int  # that median and ratio are of
    disturbed: int  # rounds left out of these, because the first variant was slow in them
    percentiles: dict[str, float]
    throughput: float  # samples a second at the median
    ratio: Estimate | None  # to the first variant, paired within rounds; None for the first itself

    @property
    def disturbed_share(self) -> float:
        return self.disturbed / (self.rounds + self.disturbed)


@dataclass(frozen=True)
class BenchReport:
    timings: tuple[Timing, ...]
    footprints: tuple[Footprint, ...]
    threads: int
    busy: float | None  # share of all cores that other processes used when it began
    machine: dict[str, Any] = field(default_factory=dict)

    @property
    def warning(self) -> str | None:
        """Why these figures should not be trusted, if they should not."""
        if self.busy is not None and self.busy >= _BUSY:
            return f"others used {100 * self.busy:.0f} % of this machine; do not trust these latencies"
        share = max((timing.disturbed_share for timing in self.timings), default=0.0)
        if share < _DISTURBED:
            return None
        return f"something slowed this machine in {100 * share:.0f} % of the rounds; medians and ratios are of the others"

    def timing(self, variant: str, batch: int) -> Timing:
        return next(timing for timing in self.timings if (timing.variant, timing.batch) == (variant, batch))

    def footprint(self, variant: str) -> Footprint:
        return next(footprint for footprint in self.footprints if footprint.variant == variant)

    def to_json(self) -> dict[str, Any]:
        return {
            "threads": self.threads,
            "busy": self.busy,
            "warning": self.warning,
            "machine": self.machine,
            "footprints": [vars(footprint) for footprint in self.footprints],
            "timings": [
                vars(timing) | {"latency": vars(timing.latency), "ratio": timing.ratio and vars(timing.ratio)}
                for timing in self.timings
            ],
        }


def bundle_variant(
    path: str | Path,
    *,
    name: str | None = None,
    device: str = "cpu",
    threads: int,
    graph: str | None = None,
    past: int = DEFAULT_PAST,
) -> Variant:
    """A bundle's only graph, or its decoder, or the graph that is named."""
    bundle = Bundle.open(path)
    if graph is not None:
        bundle.graph(graph)  # refuse an unknown one now
    request = {"path": str(Path(path).absolute()), "device": device, "threads": threads, "graph": graph, "past": past}
    return Variant(name or Path(path).name.removesuffix(".bundle"), "runtime", request, bundle.graph_bytes)


def bench(
    variants: Sequence[Variant],
    *,
    batches: Sequence[int] = (1,),
    threads: int,
    rounds: int = 35,
    launches: int = 3,
    turn_seconds: float = TURN_SECONDS,
    seconds: float | None = None,
    seed: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> BenchReport:
    """Time `variants` against each other in `launches` x `rounds` turns each; ratios are to the first one.

    Without batches nothing is timed: each is only opened and run once. After `seconds` a launch ends with the rounds it has, if
    they are seven or more: calls that take long vary less.
    """
    if not variants or min(rounds, launches, threads, *batches) < 1:
        raise OptionError("a benchmark needs at least one variant, and batches, rounds, launches and threads of 1 or more")
    if len({variant.name for variant in variants}) != len(variants):
        raise OptionError("two variants have the same name; give each its own")
    busy = busy_share()
    shuffle = random.Random(seed)
    turns: dict[tuple[str, int], list[list[int]]] = {(variant.name, batch): [] for variant in variants for batch in batches}
    launched: list[list[Footprint]] = []
    done = 0
    for _ in range(launches):
        workers: list[Worker] = []
        try:
            for variant in variants:
                workers.append(Worker(variant))
            for batch in batches:
                for worker in workers:
                    worker.prepare(batch)
                started = time.perf_counter()
                for number in range(rounds):
                    if seconds is not None and number >= FEWEST and time.perf_counter() - started > seconds:
                        break
                    for name, turn in one_round(shuffle.sample(workers, len(workers)), turn_seconds).items():
                        turns[name, batch].append(turn)
                    done += 1
                    progress(done, launches * rounds * len(batches))
            launched.append([worker.footprint() for worker in workers])
        finally:
            for worker in workers:
                worker.close()
    first = variants[0].name
    timings = tuple(
        _timing(variant.name, batch, turns[variant.name, batch], turns[first, batch], is_first=variant.name == first)
        for batch in batches
        for variant in variants
    )
    footprints = tuple(_median_footprint(each) for each in zip(*launched, strict=True))
    return BenchReport(timings, footprints, threads, busy, describe_machine())


def _timing(variant: str, batch: int, turns: list[list[int]], baseline: list[list[int]], *, is_first: bool) -> Timing:
    calls = [nanoseconds / 1000 for turn in turns for nanoseconds in turn]
    firsts = [quantile(turn, 0.5) / 1000 for turn in baseline]
    quiet = undisturbed(firsts)
    pairs = zip((quantile(turn, 0.5) / 1000 for turn in turns), firsts, quiet, strict=True)
    kept = [(mine, theirs) for mine, theirs, is_quiet in pairs if is_quiet or sum(quiet) < FEWEST]
    latency = estimate([mine for mine, _ in kept])
    ratio = None if is_first else estimate([mine / theirs for mine, theirs in kept])
    return Timing(
        variant=variant,
        batch=batch,
        latency=latency,
        spread=quantile(calls, 0.75) - quantile(calls, 0.25),
        calls=len(calls),
        rounds=len(kept),
        disturbed=len(turns) - len(kept),
        percentiles=percentiles(calls),
        throughput=batch * 1e6 / latency.median,
        ratio=ratio,
    )


def _median_footprint(launches: Sequence[Footprint]) -> Footprint:
    return replace(
        launches[0],
        load_ms=quantile([item.load_ms for item in launches], 0.5),
        cold_start_ms=quantile([item.cold_start_ms for item in launches], 0.5),
        peak_bytes=max(item.peak_bytes for item in launches),
        model_bytes=max(item.model_bytes for item in launches),
    )
