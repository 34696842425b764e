"""wide-types: float64 arithmetic. Accelerators lack it, and CPUs run it at half the speed or less."""

from __future__ import annotations

from collections.abc import Iterator

import onnx

from ..finding import Finding, Graph, Rule
from ..wiring import label


def run(graph: Graph) -> Iterator[Finding]:
    double = onnx.TensorProto.DOUBLE
    doubles = [node for node in graph.model.graph.node if any(graph.kinds.get(name) == double for name in node.input)]
    if doubles:
        yield Finding(
            "wide-types",
            "warning",
            label(doubles[0]),
            f"{len(doubles)} nodes compute in float64 (first: {doubles[0].op_type})",
            "cast inputs and constants to float32 in the network: 1.0 / torch.tensor(…, dtype=torch.float32)",
        )


RULE = Rule("wide-types", "no float64 arithmetic", run)
