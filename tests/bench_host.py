"""How much of a decoding step is not spent in onnxruntime's kernels.

    python -m tests.bench_host BUNDLE --beams 1

Two shares of a step, both of the time that `generate` takes:
outside run      what is not inside onnxruntime's own call (run or run_with_iobinding): Python, numpy, bindings. Measured with a
                 clock around each call, so nothing is disturbed.
outside kernels  that, and what the call spends between its kernels. The kernels' share of a call is taken from an onnxruntime
                 profile, in a second pass: the profiler slows the call itself, and hardly its kernels.
The prompt's own run is left out by taking the difference of many tokens and one.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import onnxruntime as ort

from .bench_peer_models import THREADS
from .bench_peers import Job

_REPEATS = 5


@dataclass(frozen=True)
class Seconds:
    """Of one generation."""

    whole: float
    inside: float  # onnxruntime's calls

    def __sub__(self, other: Seconds) -> Seconds:
        return Seconds(self.whole - other.whole, self.inside - other.inside)


class Clock:
    """Adds up the time inside every onnxruntime call of this process."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def around(self, function: Any) -> Any:
        def timed(*arguments: Any, **named: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*arguments, **named)
            finally:
                self.seconds += time.perf_counter() - started

        return timed


@contextmanager
def clock_around_runs() -> Iterator[Clock]:
    clock, originals = Clock(), {name: getattr(ort.InferenceSession, name) for name in ("run", "run_with_iobinding")}
    for name, function in originals.items():
        setattr(ort.InferenceSession, name, clock.around(function))
    try:
        yield clock
    finally:
        for name, function in originals.items():
            setattr(ort.InferenceSession, name, function)


@contextmanager
def profiled_sessions(folder: str) -> Iterator[list[ort.InferenceSession]]:
    """Sessions made within write a profile to `folder`; `end_profiling` of each gives its path."""
    made: list[ort.InferenceSession] = []
    original = ort.InferenceSession.__init__

    def create(self: ort.InferenceSession, source: Any, options: ort.SessionOptions, **named: Any) -> None:
        options.enable_profiling = True
        options.profile_file_prefix = str(Path(folder) / f"session-{len(made)}")
        original(self, source, options, **named)
        made.append(self)

    ort.InferenceSession.__init__ = create
    try:
        yield made
    finally:
        ort.InferenceSession.__init__ = original


def kernel_and_call_seconds(events: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """From a profile: its kernels' time, and the calls' that ran them."""
    kernels = sum(event["dur"] for event in events if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"))
    calls = sum(event["dur"] for event in events if event["name"] == "model_run")
    return kernels / 1e6, calls / 1e6


def measure(bundle: Path, job: Job) -> dict[str, float]:
    import runtime

    with clock_around_runs() as clock:
        model = runtime.load(bundle, device="cpu", threads=THREADS)
        _generate(model, job)  # warm-up
        pairs = [_timed(model, job, clock, job.new_tokens) - _timed(model, job, clock, 1) for _ in range(_REPEATS)]
    outside_run = median(1 - step.inside / step.whole for step in pairs)
    milliseconds = median(step.whole for step in pairs) * 1000 / (job.new_tokens - 1)
    share = _kernel_share(bundle, job)
    return {"step_ms": milliseconds, "outside_run": outside_run, "outside_kernels": 1 - share * (1 - outside_run)}


def _generate(model: Any, job: Job, tokens: int | None = None) -> None:
    count = tokens or job.new_tokens
    model.generate(job.prompts().tolist(), max_new_tokens=count, min_new_tokens=count, beams=job.beams)


def _timed(model: Any, job: Job, clock: Clock, tokens: int) -> Seconds:
    clock.seconds = 0.0
    started = time.perf_counter()
    _generate(model, job, tokens)
    return Seconds(time.perf_counter() - started, clock.seconds)


def _kernel_share(bundle: Path, job: Job) -> float:
    """Kernel time over the time of the calls, from the profile of one generation."""
    import runtime

    with tempfile.TemporaryDirectory() as folder:
        with profiled_sessions(folder) as sessions:
            model = runtime.load(bundle, device="cpu", threads=THREADS)
        _generate(model, job)
        events = [event for session in sessions for event in json.loads(Path(session.end_profiling()).read_text())]
    kernels, calls = kernel_and_call_seconds(events)
    return kernels / calls


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--beams", type=int, default=1)
    arguments = parser.parse_args()
    job = Job("A", batch=1, prompt=32, new_tokens=128, beams=arguments.beams)
    print(json.dumps(measure(arguments.bundle, job)))


if __name__ == "__main__":
    main()
