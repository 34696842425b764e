"""stray-transposes: Transposes that change nothing, or that could be merged with the one before."""

from __future__ import annotations

from collections.abc import Iterator

import onnx

from ..finding import Finding, Graph, Rule
from ..wiring import attribute, label

_FIX = "run: edgekit optimize; or drop one of the two transpose(…) in the network"


def run(graph: Graph) -> Iterator[Finding]:
    for node in graph.wiring.nodes:
        if node.op_type != "Transpose":
            continue
        order = _order(node)
        if order and order == sorted(order):
            yield Finding("stray-transposes", "warning", label(node), f"a Transpose by {order} moves nothing", _FIX)
            continue
        first = graph.wiring.maker(node.input[0])
        if first is None or first.op_type != "Transpose":
            continue
        before = _order(first)
        undone = [before[axis] for axis in order] == sorted(order) if before and order else not before and not order
        if undone:
            reason = f"a Transpose that undoes the one before it ({label(first)})"
            yield Finding("stray-transposes", "warning", label(node), reason, _FIX)
        elif len(graph.wiring.read_by(first)) == 1 and first.output[0] not in graph.wiring.outputs:
            reason = f"a Transpose right after another ({label(first)}): one would do"
            yield Finding("stray-transposes", "info", label(node), reason, _FIX)


def _order(node: onnx.NodeProto) -> list[int]:
    """Empty if it is not given: then all axes are reversed."""
    return list(attribute(node, "perm", []))


RULE = Rule("stray-transposes", "no Transpose that changes nothing or is undone", run)
