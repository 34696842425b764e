"""Interleaved benchmarks: every variant in a fresh process of its own, taking turns in random order.

Runtimes that share a process disturb each other (thread pools, allocators, caches), and a shared machine drifts by tens of
percent within minutes. So each variant is a worker process, a round gives each worker one short turn, and what is compared is
the ratio within a round. The interval is taken over rounds, because calls within a turn are not independent. Where a process
lands in memory can make it several percent faster or slower for its whole life, so all of them are launched anew a few times.

A worker reads one JSON request a line and answers with one JSON line:
    {"open": {...}}                        → {"load_ms", "baseline_bytes", "device", "inputs"}
    {"prepare": batch or null}             → {"call_ms"}           builds the feeds (null: the natural batch) and warms up
    {"turn": seconds, "warmup": n}         → {"ns": [latency of each call]}
    {"memory": true}                       → {"peak_bytes"}
    anything that fails                    → {"error": text}
"""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, Protocol

from .bundle import Bundle
from .errors import EdgekitError, OptionError
from .machine import busy_share, describe_machine, peak_resident_bytes, resident_bytes
from .statistics import Estimate, estimate, percentiles, quantile

_BUSY = 0.2  # with one of two cores taken, PyTorch on two threads measured 2.4, 5.9 and 16 ms instead of 0.8
# A pause before every turn. PyTorch on two threads, taking turns with two onnxruntime workers, measured 0.78–0.82 ms with it in
# three repeats and 0.9–3.8 ms (once 20 ms) without. Probably the others' thread pools still spin after their last call: with
# spinning off in onnxruntime the long tails went away too, but nothing further was tried.
_SETTLE_SECONDS = 0.005
# Calls of some milliseconds need as many to be themselves: onnxruntime's threads spin for 40 to 50 ms after their last call, on
# a core that the next one needs, and a process that has waited finds its memory outside the caches. In turns of one call after
# another ResNet-18 took 26 ms instead of 17, and its int8 10 instead of 5.
_WARM_MS = 50
_FEWEST_CALLS, _LONGEST_TURN = 5, 0.3  # in a turn, if they take no longer than so many seconds
_LONG_MS = 1000  # a call that takes longer has filled the caches again long before it ends: it needs no warm-up in its turn
DEFAULT_PAST = 32  # tokens a decoder has seen before the one that is timed
_FEWEST_ROUNDS = 7  # of a launch that is cut short: three launches give an interval of 21 ratios
TURN_SECONDS = 0.006  # many short turns: of three settings tried, 100 of 6 ms gave the tightest ratios


class Target(Protocol):
    """What a worker times."""

    device: str
    inputs: str  # the shapes it is timed on, e.g. "pixels[batch, 1, 8, 8]"

    def prepare(self, batch: int | None) -> Callable[[], object]:
        """The call to time at a batch size; None is the natural one."""


@dataclass(frozen=True)
class Variant:
    """Something to time: the module that runs it, and what that worker is told to open."""

    name: str
    module: str
    request: Mapping[str, Any]
    file_bytes: int | None = None
    python: str = sys.executable  # the interpreter of its process, where it needs another environment


@dataclass(frozen=True)
class Timing:
    """One variant at one batch size. Times are microseconds for one call."""

    variant: str
    batch: int
    latency: Estimate
    spread: float  # interquartile range of all calls
    calls: int
    rounds: int
    percentiles: dict[str, float]
    throughput: float  # samples a second at the median
    ratio: Estimate | None  # to the first variant, paired within rounds; None for the first itself


@dataclass(frozen=True)
class Footprint:
    """What a variant costs before its first answer. Memory and load time come from a fresh process."""

    variant: str
    device: str  # the one that was really used
    inputs: str  # the shapes it was timed on
    file_bytes: int | None
    load_ms: float
    cold_start_ms: float  # from starting the process to its first answer
    peak_bytes: int
    model_bytes: int  # peak minus what the process held before the model was opened


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
        if self.busy is None or self.busy < _BUSY:
            return None
        return f"others used {100 * self.busy:.0f} % of this machine; do not trust these latencies"

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
                    if seconds is not None and number >= _FEWEST_ROUNDS and time.perf_counter() - started > seconds:
                        break
                    for worker in shuffle.sample(workers, len(workers)):
                        turns[worker.variant.name, batch].append(worker.turn(turn_seconds))
                    done += 1
                    progress(done, launches * rounds * len(batches))
            launched.append([worker.footprint() for worker in workers])
        finally:
            for worker in workers:
                worker.close()
    first = variants[0].name
    timings = tuple(
        _timing(variant.name, batch, turns[variant.name, batch], None if variant.name == first else turns[first, batch])
        for batch in batches
        for variant in variants
    )
    footprints = tuple(_median_footprint(each) for each in zip(*launched, strict=True))
    return BenchReport(timings, footprints, threads, busy, describe_machine())


def _timing(variant: str, batch: int, turns: list[list[int]], baseline: list[list[int]] | None) -> Timing:
    calls = [nanoseconds / 1000 for turn in turns for nanoseconds in turn]
    medians = [quantile(turn, 0.5) / 1000 for turn in turns]
    latency = estimate(medians)
    ratio = None
    if baseline is not None:
        ratio = estimate([mine / quantile(theirs, 0.5) * 1000 for mine, theirs in zip(medians, baseline, strict=True)])
    return Timing(
        variant=variant,
        batch=batch,
        latency=latency,
        spread=quantile(calls, 0.75) - quantile(calls, 0.25),
        calls=len(calls),
        rounds=len(medians),
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


class Worker:
    """The parent's side of one worker process: opened and warmed up at the natural batch when it is made."""

    def __init__(self, variant: Variant) -> None:
        self.variant = variant
        home = str(Path(__file__).resolve().parent.parent)
        path = os.pathsep.join(filter(None, [home, os.environ.get("PYTHONPATH")]))
        started = time.perf_counter()
        self._process = subprocess.Popen(
            [variant.python, "-P", "-m", variant.module, "bench-worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": path},
        )
        try:
            self._opened = self._ask({"open": dict(variant.request)})
            self.prepare(None)
        except BaseException:
            self.close()
            raise
        self._cold_start_ms = (time.perf_counter() - started) * 1000

    def prepare(self, batch: int | None) -> None:
        call_ms = self._ask({"prepare": batch})["call_ms"]
        self._warmup = 0 if call_ms > _LONG_MS else 3 if call_ms <= 5 else math.ceil(_WARM_MS / call_ms)

    def turn(self, seconds: float) -> list[int]:
        time.sleep(_SETTLE_SECONDS)
        samples: list[int] = self._ask({"turn": seconds, "warmup": self._warmup})["ns"]
        return samples

    def footprint(self) -> Footprint:
        peak = self._ask({"memory": True})["peak_bytes"]
        return Footprint(
            variant=self.variant.name,
            device=self._opened["device"],
            inputs=self._opened["inputs"],
            file_bytes=self.variant.file_bytes,
            load_ms=self._opened["load_ms"],
            cold_start_ms=self._cold_start_ms,
            peak_bytes=peak,
            model_bytes=max(0, peak - self._opened["baseline_bytes"]),
        )

    def close(self) -> None:
        for stream in (self._process.stdin, self._process.stdout):
            try:
                if stream:
                    stream.close()
            except OSError:
                pass
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _ask(self, request: Mapping[str, Any]) -> Any:
        assert self._process.stdin
        assert self._process.stdout
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            code = self._process.wait()
            raise EdgekitError(f"the benchmark process of {self.variant.name!r} died with exit code {code}")
        try:
            answer = json.loads(line)
        except ValueError:
            raise EdgekitError(
                f"the benchmark process of {self.variant.name!r} answered {line[:80]!r}, expected JSON"
            ) from None
        if "error" in answer:
            raise EdgekitError(f"cannot benchmark {self.variant.name!r}: {answer['error']}")
        return answer


def serve(open_target: Callable[[dict[str, Any]], Target]) -> None:
    """The worker's side: answer requests on stdin until it closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which closes our stdin
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints goes to stderr, not into the protocol
    session = _Turns(open_target)
    for line in sys.stdin:
        try:
            answer = session.answer(json.loads(line))
        except EdgekitError as error:
            answer = {"error": str(error)}
        except Exception as error:  # the parent must hear of it, whatever it was
            answer = {"error": f"{type(error).__name__}: {error}"}
        _reply(answers, answer)


def _reply(stream: IO[str], answer: Mapping[str, Any]) -> None:
    try:
        stream.write(json.dumps(answer) + "\n")
        stream.flush()
    except BrokenPipeError:  # the parent is gone
        raise SystemExit(0) from None


class _Turns:
    def __init__(self, open_target: Callable[[dict[str, Any]], Target]) -> None:
        self._open_target = open_target
        self._target: Target | None = None
        self._call: Callable[[], object] | None = None

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        if "open" in request:
            baseline = resident_bytes()
            started = time.perf_counter()
            self._target = self._open_target(request["open"])
            elapsed = (time.perf_counter() - started) * 1000
            return {
                "load_ms": elapsed,
                "baseline_bytes": baseline,
                "device": self._target.device,
                "inputs": self._target.inputs,
            }
        if "prepare" in request:
            assert self._target
            self._call = self._target.prepare(request["prepare"])
            self._call()
            return {"call_ms": self._timed() / 1e6}
        if "turn" in request:
            assert self._call
            for _ in range(request["warmup"]):
                self._call()
            started = time.perf_counter()
            samples = [self._timed()]
            while (spent := time.perf_counter() - started) < request["turn"] or (
                len(samples) < _FEWEST_CALLS and spent < _LONGEST_TURN
            ):
                samples.append(self._timed())
            return {"ns": samples}
        return {"peak_bytes": peak_resident_bytes()}

    def _timed(self) -> int:
        assert self._call
        started = time.perf_counter_ns()
        self._call()
        return time.perf_counter_ns() - started
