"""`make bench-export`: how long export takes, proof included, against torch.onnx.export alone. Prints a ratio for each network.

    python -m tests.bench_export [NAME …] [--rounds N]

Both are done in turns in one process, after one export to load the libraries. torch.onnx.export gets the same modules, examples
and dynamic axes, and once for each graph.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from architectures.catalog import CATALOG
from exporters.export import export
from exporters.source import find_source
from exporters.trace import DEFAULT_OPSET, trace

LIMIT = 6_000_000  # parameters: the small networks


def seconds(action: object) -> float:
    started = time.perf_counter()
    action()  # type: ignore[operator]
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    names = arguments.names or [name for name, item in CATALOG.items() if item.parameters() < LIMIT]
    with tempfile.TemporaryDirectory() as folder:
        export(find_source("linear"), Path(folder) / "first.bundle")
        for name in names:
            network = find_source(name)
            plain, ours = [], []
            for number in range(arguments.rounds):
                target = Path(folder) / f"{name}-{number}.bundle"
                plain.append(seconds(lambda n=network: [trace(graph, n.name, opset=DEFAULT_OPSET) for graph in n.graphs]))
                ours.append(seconds(lambda n=network, t=target: export(n, t)))
            ratio = statistics.median(mine / theirs for mine, theirs in zip(ours, plain, strict=True))
            print(
                f"{name:22} torch {statistics.median(plain):6.2f} s  ours {statistics.median(ours):6.2f} s  ratio {ratio:.2f}"
            )


if __name__ == "__main__":
    main()
