"""recomputed-memory: a decoder that computes anew at every step what depends on the encoder alone.

Typical are the keys and values of cross-attention: they follow from the encoder's memory, which no step changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..finding import BundleRule, Finding, Graph
from ..wiring import label

_HEAVY = {"MatMul", "Gemm", "Conv", "ConvTranspose", "LSTM", "GRU", "RNN", "MatMulInteger", "MatMulNBits", "Einsum"}


def run(graphs: Sequence[Graph]) -> Iterator[Finding]:
    for graph in graphs:
        if graph.signature is None or not graph.signature.states:
            continue  # runs once, so nothing is computed anew
        carried = {state.input for state in graph.signature.states}
        made = {
            spec.name: other.name
            for other in graphs
            if other is not graph and other.signature
            for spec in other.signature.outputs
        }
        lasting = {spec.name for spec in graph.signature.inputs if spec.name in made and spec.name not in carried}
        same_every_step = set(lasting)
        for node in graph.model.graph.node:
            varying = [name for name in node.input if name and not graph.wiring.is_fixed(name)]
            if not varying or not all(name in same_every_step for name in varying):
                continue
            same_every_step.update(node.output)
            if node.op_type in _HEAVY:
                source = next(name for name in lasting if _reaches(graph, varying[0], name))
                yield Finding(
                    "recomputed-memory",
                    "warning",
                    label(node),
                    f"every step computes this from {source!r} alone, which {made[source]!r} made once",
                    f"compute it in {made[source]!r} and hand the result over as an input",
                    graph.name,
                )


def _reaches(graph: Graph, name: str, source: str) -> bool:
    """Whether `name` is `source` or is computed from it."""
    pending, seen = [name], set()
    while pending:
        item = pending.pop()
        if item == source:
            return True
        node = graph.wiring.maker(item)
        if node is not None and item not in seen:
            seen.add(item)
            pending += list(node.input)
    return False


RULE = BundleRule("recomputed-memory", "no step computes anew what the encoder could hand over", run)
