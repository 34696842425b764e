"""unused: weights, inputs and nodes that no output depends on."""

from __future__ import annotations

from collections.abc import Iterator

from ..finding import Finding, Graph, Rule
from ..graph import graphs_of


def run(graph: Graph) -> Iterator[Finding]:
    used = {name for inner in graphs_of(graph.model) for node in inner.node for name in node.input}
    used |= {item.name for inner in graphs_of(graph.model) for item in inner.output}
    main = graph.model.graph
    for tensor in main.initializer:
        if tensor.name not in used:
            size = len(tensor.raw_data) or tensor.ByteSize()
            yield Finding(
                "unused", "warning", tensor.name, f"no node reads this weight ({size:,} bytes)", "run: edgekit optimize"
            )
    weights = {tensor.name for tensor in main.initializer}
    for value in main.input:
        if value.name not in used and value.name not in weights:
            yield Finding(
                "unused",
                "warning",
                value.name,
                "no node reads this input, yet every caller must supply it",
                "drop it from the network's forward",
            )
    for node in main.node:
        if node.output and not any(name in used for name in node.output):
            yield Finding(
                "unused", "warning", node.name or node.op_type, "nothing reads what this node computes", "run: edgekit optimize"
            )


RULE = Rule("unused", "every weight, input and node is used", run)
