"""unused: weights, inputs and nodes that no output depends on, and outputs that depend on no input."""

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
    yield from _idle_outputs(graph)


def _idle_outputs(graph: Graph) -> Iterator[Finding]:
    wiring, carried = graph.wiring, {state.output for state in graph.signature.states} if graph.signature else set()
    for value in graph.model.graph.output:
        source = wiring.maker(value.name)
        while source is not None and source.op_type == "Identity" and wiring.maker(source.input[0]) is not None:
            source = wiring.maker(source.input[0])
        origin = value.name if source is None else source.input[0] if source.op_type == "Identity" else ""
        fix = "drop it from what the network returns"
        if wiring.is_fixed(value.name):
            reason = "this output is the same constant on every run"
            yield Finding("unused", "warning", value.name, reason, f"{fix}; the application can keep it")
        elif origin in wiring.inputs and value.name not in carried:
            yield Finding("unused", "info", value.name, f"this output is a copy of the input {origin!r}", fix)


RULE = Rule("unused", "every weight, input, node and output is of use", run)
