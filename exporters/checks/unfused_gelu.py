"""unfused-gelu: Gelu written out with Erf, which onnxruntime fuses at load and other hosts may not, or Tanh, which none fuses.

x * 0.5 * (1 + erf(x / sqrt 2))                                  exact
x * 0.5 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))          with tanh
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx

from ..finding import Finding, Graph, Rule
from ..wiring import Wiring, label

_CUBE = 0.044715


def run(graph: Graph) -> Iterator[Finding]:
    wiring = graph.wiring
    for node in wiring.nodes:
        if node.op_type not in ("Erf", "Tanh") or not _adds_one(wiring, node):
            continue
        above = list(wiring.upstream(node.input[0], ("Mul", "Add", "Div", "Pow", "Cast"), steps=5))
        if node.op_type == "Erf":
            scaled = any(
                wiring.is_scalar(name, root) for item in above[:1] for name in item.input for root in (2**0.5, 0.5**0.5)
            )
        else:
            scaled = any(wiring.is_scalar(name, _CUBE, 1e-2) for item in above for name in item.input)
        if scaled:
            severity = "info" if node.op_type == "Erf" else "warning"
            reason = f"Gelu is written out with {node.op_type}, and hosts that do not fuse it run each node"
            fix = "run: edgekit optimize; or export with --opset 20 or later, which has Gelu"
            yield Finding("unfused-gelu", severity, label(node), reason, fix)


def _adds_one(wiring: Wiring, node: onnx.NodeProto) -> bool:
    return any(
        reader.op_type == "Add" and any(wiring.is_scalar(name, 1.0) for name in reader.input) for reader in wiring.read_by(node)
    )


RULE = Rule("unfused-gelu", "Gelu is one node", run)
