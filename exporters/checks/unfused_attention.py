"""unfused-attention: MatMul, Softmax and MatMul as separate nodes, with the whole score matrix in memory between them.

No optimizer of onnxruntime fuses attention that torch exported, so what is in the file is what the device runs.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx

from ..finding import Finding, Graph, Rule
from ..wiring import Wiring, label

_QUANTIZED = ("QuantizeLinear", "DequantizeLinear")
_SCORES = ("Add", "Sub", "Mul", "Div", "Where", "Cast", "Reshape", "Expand", "Max", "Min", "Clip", "Identity", *_QUANTIZED)
_WEIGHTS = ("Mul", "Where", "Cast", "Reshape", "Dropout", "IsNaN", "Not", "Identity", "Transpose", *_QUANTIZED)
_STEPS = 12  # nodes between the products: scale, mask, and a pair of quantizers after each


def run(graph: Graph) -> Iterator[Finding]:
    wiring = graph.wiring
    for node in wiring.nodes:
        if node.op_type != "Softmax":
            continue
        scores = any(_of_two_activations(wiring, above) for above in wiring.upstream(node.input[0], _SCORES, _STEPS))
        mixed = any(_of_two_activations(wiring, below) for below in wiring.downstream(node, _WEIGHTS, _STEPS))
        if scores and mixed:
            reason = "attention is separate MatMul, Softmax and MatMul nodes, which no host fuses at load"
            fix = "run: edgekit optimize; or export for onnxruntime: --profile onnxruntime"
            yield Finding("unfused-attention", "warning", label(node), reason, fix)


def _of_two_activations(wiring: Wiring, node: onnx.NodeProto) -> bool:
    """A product of queries and keys, or of weights and values; a layer multiplies by something fixed instead."""
    return node.op_type in ("MatMul", "FusedMatMul") and not any(wiring.is_fixed(name) for name in node.input[:2])


RULE = Rule("unfused-attention", "attention is one node", run)
