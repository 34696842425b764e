"""How much memory calibration takes: int8-static on a network of BERT-base's size with 512 sequences of 128 tokens.

    python -m tests.bench_calibration [--name bert-base] [--sequences 512] [--length 128] [--ranges entropy]

The network, with fresh weights, is traced in one process, and quantized in another one, whose peak of resident memory is
printed. Measured on two cores: see docs/guide-quantize.md.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from .helpers import ROOT, environment

LIMIT = 3 << 30  # bytes


def trace_network(name: str, path: Path) -> None:
    from exporters.source import find_source
    from exporters.trace import DEFAULT_OPSET, model_of, trace

    source = find_source(name)
    graph = source.graphs[0]
    onnx.save(model_of(trace(graph, source.name, opset=DEFAULT_OPSET), graph, path.parent), str(path))


def calibrate(path: Path, sequences: int, length: int, ranges: str) -> None:
    """As `edgekit quantize` does it, without what comes before and after."""
    from architectures.settings import apply_settings
    from exporters.quantizers.scheme import Request, decide, quantizable
    from exporters.quantizers.static_text import ON_TOKENS
    from exporters.rollouts import _TOKENS_AT_ONCE
    from runtime.machine import peak_resident_bytes

    model = ON_TOKENS.prepare(quantizable(onnx.load(path)))
    chosen = [decision for decision in decide(ON_TOKENS, model, (), ()) if decision.quantized]
    vocabulary = max(tensor.dims[0] for tensor in model.graph.initializer if len(tensor.dims) == 2)
    at_once = max(1, _TOKENS_AT_ONCE // length)
    before, started = peak_resident_bytes(), time.perf_counter()

    def samples() -> Iterator[dict[str, np.ndarray[Any, Any]]]:
        random = np.random.default_rng(0)
        for start in range(0, sequences, at_once):
            tokens = random.integers(1, vocabulary, (min(at_once, sequences - start), length))
            yield {
                value.name: tokens if number == 0 else np.zeros_like(tokens) for number, value in enumerate(model.graph.input)
            }

    request = Request(
        model=model,
        nodes=tuple(decision.node for decision in chosen),
        operators=tuple(sorted({decision.operator for decision in chosen})),
        narrowed=False,
        calibration=samples,
        settings=apply_settings(ON_TOKENS.settings, {"ranges": ranges}),
        progress=lambda line: print(line, file=sys.stderr, flush=True),
    )
    ON_TOKENS.apply(request)
    seconds, peak = time.perf_counter() - started, peak_resident_bytes()
    print(
        f"{len(chosen)} nodes, {sequences} sequences of {length} tokens, ranges={ranges}: {seconds:.0f} s, "
        f"peak {peak / 2**30:.2f} GiB resident (with the network loaded, before: {before / 2**30:.2f})"
    )
    sys.exit(0 if peak < LIMIT else f"more than {LIMIT / 2**30:.0f} GiB")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--name", default="bert-base")
    parser.add_argument("--sequences", type=int, default=512)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--ranges", default="entropy")
    parser.add_argument("--trace", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--calibrate", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.trace:
        trace_network(arguments.name, arguments.trace)
    elif arguments.calibrate:
        calibrate(arguments.calibrate, arguments.sequences, arguments.length, arguments.ranges)
    else:
        with tempfile.TemporaryDirectory() as folder:
            for step in ("--trace", "--calibrate"):
                command = [sys.executable, "-m", "tests.bench_calibration", *sys.argv[1:], step, f"{folder}/network.onnx"]
                subprocess.run(command, cwd=ROOT, env=environment(), check=True)


if __name__ == "__main__":
    main()
