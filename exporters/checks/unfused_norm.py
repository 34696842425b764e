"""unfused-layernorm: mean, variance and scaling as separate nodes. onnxruntime fuses them at load; other hosts may not."""

from __future__ import annotations

from collections.abc import Iterator

import onnx

from ..finding import Finding, Graph, Rule
from ..wiring import Wiring, label


def run(graph: Graph) -> Iterator[Finding]:
    wiring = graph.wiring
    for node in wiring.nodes:
        kind = _kind(wiring, node) if node.op_type == "Sqrt" else None
        if kind:
            reason = f"{kind} is written out in elementary nodes, and hosts that do not fuse it run each of them"
            yield Finding("unfused-layernorm", "info", label(node), reason, "run: edgekit optimize")


def _kind(wiring: Wiring, root: onnx.NodeProto) -> str | None:
    """sqrt(mean(d * d) + epsilon) that something is divided by: LayerNorm if d = x - mean(x), RMSNorm if d = x."""
    added = _made_by(wiring, root.input[0], "Add")
    if added is None or not any(wiring.is_fixed(name) for name in added.input):
        return None
    mean = next((found for name in added.input if (found := _made_by(wiring, name, "ReduceMean"))), None)
    square = mean and (_made_by(wiring, mean.input[0], "Pow") or _made_by(wiring, mean.input[0], "Mul"))
    if not square or not any(reader.op_type in ("Div", "Reciprocal", "Mul") for reader in wiring.read_by(root)):
        return None
    squared = wiring.is_scalar(square.input[1], 2.0) if square.op_type == "Pow" else square.input[0] == square.input[1]
    if not squared:
        return None
    centred = _made_by(wiring, square.input[0], "Sub")
    return "LayerNorm" if centred is not None and _made_by(wiring, centred.input[1], "ReduceMean") else "RMSNorm"


def _made_by(wiring: Wiring, name: str, operator: str) -> onnx.NodeProto | None:
    node = wiring.maker(name)
    while node is not None and node.op_type in ("Cast", "Identity"):
        node = wiring.maker(node.input[0])
    return node if node is not None and node.op_type == operator else None


RULE = Rule("unfused-layernorm", "LayerNorm is one node", run)
