"""Is one graph slower than another? Two sessions in this process, taking turns.

`runtime.bench` measures bundles in processes of their own and is what to quote. This is its light sister, for deciding on one
pass of many: the same turns, pauses and paired ratios, with the sessions made anew a few times, because where a session lands
in memory makes it a few percent faster or slower for its whole life.

There are two clocks. "cpu" is the processor time of one thread, "wall" is time as a user meets it, on all threads. On two cores
with a load of 3, one and the same GPT against itself gave ratios of 0.98 to 1.01 by the first and 0.95 to 1.10 by the second.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import onnx

from runtime.session import Session
from runtime.signature import GraphSignature
from runtime.statistics import Estimate, estimate, median

from .parity import Arrays
from .weights import for_session

_LAUNCHES = (3, 8)  # at least, and at most while an interval is wide
_WIDE = 0.1
_ROUNDS = 10  # for each launch
_LONG_CALL = 0.02  # seconds; such calls vary little, so that
_FEW_ROUNDS = 3  # of them tell as much
_ENOUGH_SECONDS = 10.0  # after which a large graph is not launched anew
_TURN_SECONDS = 0.006
_SETTLE_SECONDS = 0.005  # lets the other session's thread pool stop spinning
# Of 21 measurements of a graph against itself by the cpu clock no interval began above 1.00, and none ended below 0.995.
NOISE = 0.03
GAIN = 0.01

Clock = Literal["cpu", "wall"]


@dataclass(frozen=True)
class Pace:
    """Latency of a graph before and after a change, in microseconds, at one set of sizes."""

    sizes: str
    before: Estimate
    after: Estimate
    ratio: Estimate  # after / before, paired within rounds

    @property
    def slower(self) -> bool:
        return (self.ratio.low or 0.0) > 1.0 + NOISE

    @property
    def faster(self) -> bool:
        return self.ratio.high is not None and self.ratio.high < 1.0 - GAIN


Workload = Sequence[tuple[Mapping[str, int], Arrays]]


def compare_pace(
    before: onnx.ModelProto,
    after: onnx.ModelProto,
    signature: GraphSignature,
    workload: Workload,
    *,
    clock: Clock,
    after_signature: GraphSignature | None = None,
) -> tuple[Pace, ...]:
    """Time both graphs on every set of inputs of `workload`."""
    if not workload:
        return ()
    with tempfile.TemporaryDirectory(prefix="edgekit-") as folder:
        sides = (
            (for_session(before, Path(folder) / "before"), signature),
            (for_session(after, Path(folder) / "after"), after_signature or signature),
        )
        samples = _launches(sides, workload, clock)
    return tuple(
        Pace(
            ", ".join(f"{axis}={size}" for axis, size in sizes.items()) or "fixed sizes",
            estimate([first for first, _ in pairs]),
            estimate([second for _, second in pairs]),
            estimate([second / first for first, second in pairs]),
        )
        for (sizes, _), pairs in zip(workload, samples, strict=True)
    )


def _launches(
    sides: Sequence[tuple[bytes | Path, GraphSignature]], workload: Workload, clock: Clock
) -> list[list[tuple[float, float]]]:
    """Times of both sides, in pairs, on every set of inputs."""
    samples: list[list[tuple[float, float]]] = [[] for _ in workload]
    threads = 1 if clock == "cpu" else None
    started = time.perf_counter()
    for launch in range(_LAUNCHES[1]):
        late = launch > 1 and time.perf_counter() - started > _ENOUGH_SECONDS
        if late or (launch >= _LAUNCHES[0] and not any(_is_wide(pairs) for pairs in samples)):
            break
        made = {side: _session(*sides[side], threads) for side in ((0, 1) if launch % 2 == 0 else (1, 0))}
        for index, (_, feeds) in enumerate(workload):
            samples[index] += _rounds(made[0], made[1], feeds, clock)
        made.clear()  # before others are made: they are as large as the graphs
    return samples


def _session(data: bytes | Path, signature: GraphSignature, threads: int | None) -> Session:
    return Session(data, signature, device="cpu", threads=threads, log_level=4)


def _is_wide(pairs: list[tuple[float, float]]) -> bool:
    ratio = estimate([second / first for first, second in pairs])
    return ratio.low is None or ratio.high is None or ratio.high - ratio.low > _WIDE


def _rounds(before: Session, after: Session, feeds: Arrays, clock: Clock) -> list[tuple[float, float]]:
    for session in (before, after):
        session.run(feeds)
    started = time.perf_counter()
    before.run_unchecked(feeds)
    long = time.perf_counter() - started > _LONG_CALL
    pairs = []
    for number in range(_FEW_ROUNDS if long else _ROUNDS):
        if number % 2 == 0:
            first = _turn(before, feeds, clock)
            pairs.append((first, _turn(after, feeds, clock)))
        else:
            second = _turn(after, feeds, clock)
            pairs.append((_turn(before, feeds, clock), second))
    return pairs


def _turn(session: Session, feeds: Mapping[str, Any], clock: Clock) -> float:
    """Median microseconds of the calls that fit into a turn."""
    now = time.thread_time_ns if clock == "cpu" else time.perf_counter_ns
    if clock == "wall":
        time.sleep(_SETTLE_SECONDS)
    session.run_unchecked(feeds)
    calls: list[float] = []
    end = time.perf_counter() + _TURN_SECONDS
    while not calls or time.perf_counter() < end:
        start = now()
        session.run_unchecked(feeds)
        calls.append((now() - start) / 1000)
    return median(calls)
