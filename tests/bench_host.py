"""How much of a decoding step is not spent in onnxruntime's kernels.

    python -m tests.bench_host BUNDLE --beams 1

Two shares of a step, both of the time that `generate` takes:
outside run      what is not inside onnxruntime's own call (run or run_with_iobinding): Python, numpy, bindings. Measured with a
                 clock around each call, so nothing is disturbed.
outside kernels  that, and what the call spends between its kernels. Their time is taken from an onnxruntime profile of a
                 generation right after the one that is timed: the profiler slows the call itself, and hardly its kernels.
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

_REPEATS = 7


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


def kernel_seconds_of_steps(events: Sequence[dict[str, Any]], generations: int, tokens: int) -> list[float]:
    """From a session's profile of so many equal generations: the time of the kernels in each, without its first token's."""
    runs = sorted((event["ts"], event["dur"]) for event in events if event["name"] == "model_run")
    each = len(runs) // generations
    if each < tokens - 1:  # a form that only reads prompts
        return [0.0] * generations
    kernels = [event for event in events if event.get("cat") == "Node" and event["name"].endswith("_kernel_time")]
    found = []
    for number in range(generations):
        steps = runs[number * each : (number + 1) * each][-(tokens - 1) :]
        start, end = steps[0][0], steps[-1][0] + steps[-1][1]
        found.append(sum(event["dur"] for event in kernels if start <= event["ts"] <= end) / 1e6)
    return found


def measure(bundle: Path, job: Job) -> dict[str, float]:
    """A model with a profiler and one without take turns: a busy machine slows both."""
    many = job.beams > 1
    with clock_around_runs() as clock, tempfile.TemporaryDirectory() as folder:
        with profiled_sessions(folder) as sessions:
            profiled = _loaded(bundle, job, many)
        model = _loaded(bundle, job, many)
        pairs = []
        for _ in range(_REPEATS):
            pairs.append(_timed(model, job, clock, job.new_tokens) - _timed(model, job, clock, 1))
            _generate(profiled, job)
        kernels = [0.0] * _REPEATS
        for session in sessions:
            events = json.loads(Path(session.end_profiling()).read_text())
            found = kernel_seconds_of_steps(events, _REPEATS + 1, job.new_tokens)[1:]  # without the warm-up
            kernels = [before + seconds for before, seconds in zip(kernels, found, strict=True)]
    return {
        "step_ms": median(step.whole for step in pairs) * 1000 / (job.new_tokens - 1),
        "outside_run": median(1 - step.inside / step.whole for step in pairs),
        "outside_kernels": median(1 - seconds / step.whole for seconds, step in zip(kernels, pairs, strict=True)),
    }


def _loaded(bundle: Path, job: Job, many: bool) -> Any:
    """A model that has generated once, with sessions of its own, the one that ranks tokens included."""
    import runtime
    from runtime.generation import ranking

    ranking._session.cache_clear()
    model = runtime.load(bundle, device="cpu", threads=THREADS, many_rows=many)
    _generate(model, job)
    return model


def _generate(model: Any, job: Job, tokens: int | None = None) -> None:
    count = tokens or job.new_tokens
    model.generate(job.prompts().tolist(), max_new_tokens=count, min_new_tokens=count, beams=job.beams)


def _timed(model: Any, job: Job, clock: Clock, tokens: int) -> Seconds:
    clock.seconds = 0.0
    started = time.perf_counter()
    _generate(model, job, tokens)
    return Seconds(time.perf_counter() - started, clock.seconds)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--beams", type=int, default=1)
    arguments = parser.parse_args()
    job = Job("A", batch=1, prompt=32, new_tokens=128, beams=arguments.beams)
    print(json.dumps(measure(arguments.bundle, job)))


if __name__ == "__main__":
    main()
