"""How much of a decoding step is not spent in onnxruntime's kernels.

    python -m tests.bench_host BUNDLE --beams 1

Two shares of a step, both of the time that `generate` takes:
outside run      what is not inside onnxruntime's own call (run or run_with_iobinding): Python, numpy, bindings. Measured with a
                 clock around each call, so nothing is disturbed.
outside kernels  that, and what onnxruntime itself needs for every node beside its kernel: the number of nodes times what a node
                 with nothing to do takes. (Its profiler cannot tell: it adds several microseconds to each kernel.)
The prompt's own run is left out by taking the difference of many tokens and one.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import onnxruntime as ort
from onnx import TensorProto, helper

from runtime.session import Session
from runtime.signature import GraphSignature, TensorSpec

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


def nodes_of_a_step(bundle: Path, job: Job) -> int:
    """How many kernels run for one token, the ranking's included: from an onnxruntime profile."""
    with tempfile.TemporaryDirectory() as folder:
        with profiled_sessions(folder) as sessions:
            _loaded(bundle, job)
        nodes = 0
        for session in sessions:
            events = json.loads(Path(session.end_profiling()).read_text())
            runs = sorted(event["ts"] for event in events if event["name"] == "model_run")
            kernels = [event["ts"] for event in events if event["name"].endswith("_kernel_time")]
            if len(runs) >= job.new_tokens - 1:  # not a form that only reads the prompt
                nodes += sum(time >= runs[-1] for time in kernels)
    return nodes


def seconds_of_a_node() -> float:
    """What onnxruntime takes for a node that has nothing to do: the slope over chains of one-element additions."""
    few, many = 10, 210
    runs = {count: _chain(count) for count in (few, many)}
    best = {count: min(_seconds(run) for _ in range(300)) for count, run in runs.items()}
    return (best[many] - best[few]) / (many - few)


def _chain(count: int) -> Callable[[], None]:
    nodes = [helper.make_node("Add", [f"x{at}", "x0"], [f"x{at + 1}"]) for at in range(count)]
    value = helper.make_tensor_value_info("x0", TensorProto.FLOAT, [1])
    result = helper.make_tensor_value_info(f"x{count}", TensorProto.FLOAT, [1])
    graph = helper.make_graph(nodes, "chain", [value], [result])
    model = helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 13)])
    spec = TensorSpec("x0", "float32", (1,))
    signature = GraphSignature((spec,), (TensorSpec(f"x{count}", "float32", (1,)),))
    session = Session(model.SerializeToString(), signature, device="cpu", threads=THREADS, spins=False)
    return session.bind({"x0": np.ones(1, np.float32)})


def _seconds(run: Callable[[], None]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def measure(bundle: Path, job: Job) -> dict[str, float]:
    between = nodes_of_a_step(bundle, job) * seconds_of_a_node()
    with clock_around_runs() as clock:
        model = _loaded(bundle, job)
        pairs = [_timed(model, job, clock, job.new_tokens) - _timed(model, job, clock, 1) for _ in range(_REPEATS)]
    step = median(pair.whole for pair in pairs) / (job.new_tokens - 1)
    outside_run = median(1 - pair.inside / pair.whole for pair in pairs)
    return {"step_ms": step * 1000, "outside_run": outside_run, "outside_kernels": outside_run + between / step}


def _loaded(bundle: Path, job: Job) -> Any:
    """A model that has generated once, with sessions of its own, the one that ranks tokens included."""
    import runtime
    from runtime.generation import ranking

    ranking._session.cache_clear()
    model = runtime.load(bundle, device="cpu", threads=THREADS, many_rows=job.beams > 1)
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
