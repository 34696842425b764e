"""unread-outputs: what one graph of a bundle computes for the others, and none of them takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..finding import BundleRule, Finding, Graph


def run(graphs: Sequence[Graph]) -> Iterator[Finding]:
    for graph in graphs:
        if graph.signature is None or graph.signature.states:
            continue
        taken = {spec.name for other in graphs if other is not graph and other.signature for spec in other.signature.inputs}
        outputs = [spec.name for spec in graph.signature.outputs]
        if not any(name in taken for name in outputs):
            continue  # it computes for its caller, not for another graph
        for name in outputs:
            if name not in taken:
                fix = "drop it from what the graph returns, unless the application reads it"
                reason = "no other graph takes this output, and it is computed on every run"
                yield Finding("unread-outputs", "info", name, reason, fix, graph.name)


RULE = BundleRule("unread-outputs", "what one graph hands over, another takes", run)
