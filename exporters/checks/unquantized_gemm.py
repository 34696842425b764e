"""unquantized-gemm: large products that stayed, or would stay, in float when the model is quantized, and why.

Quantizers look for MatMul and Gemm with a weight that is a plain initializer. What they cannot handle they pass over in
silence, and the file is as large as before.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx

from ..finding import Finding, Graph, Rule
from ..wiring import Wiring, attribute, label

_QUANTIZED = {"DequantizeLinear", "MatMulInteger", "ConvInteger", "QLinearMatMul", "QLinearConv", "QGemm"}
_QUANTIZED |= {
    "MatMulNBits",
    "MatMulBnb4",
    "MatMulIntegerToFloat",
    "DynamicQuantizeMatMul",
    "DynamicQuantizeLSTM",
    "QAttention",
}
_LARGE = 1024  # weights: below that there is nothing to gain
_FLOATS = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16, onnx.TensorProto.DOUBLE)


def run(graph: Graph) -> Iterator[Finding]:
    wiring = graph.wiring
    present = {node.op_type for node in wiring.nodes}
    quantized = present & _QUANTIZED
    for node in wiring.nodes:
        if node.op_type not in ("MatMul", "Gemm") or len(node.input) < 2:
            continue
        if _is_computed(wiring, node):
            reason = f"the weight of this {node.op_type} is computed from constants, so that no quantizer touches it"
            yield Finding("unquantized-gemm", "warning", label(node), reason, "run: edgekit optimize, and quantize the result")
        elif quantized and _is_large_float(wiring, node):
            cause, fix = _cause(node, "MatMulNBits" in quantized)
            reason = f"a float {node.op_type} with {_count(wiring, node):,} weights in a quantized model{cause}"
            yield Finding("unquantized-gemm", "warning" if cause else "info", label(node), reason, fix)


def _is_computed(wiring: Wiring, node: onnx.NodeProto) -> bool:
    maker = wiring.maker(node.input[1])
    return node.input[1] in wiring.derived and maker is not None and maker.op_type not in ("Constant", "DequantizeLinear")


def _is_large_float(wiring: Wiring, node: onnx.NodeProto) -> bool:
    weight = wiring.constants.get(node.input[1])
    return weight is not None and weight.data_type in _FLOATS and _count(wiring, node) >= _LARGE


def _count(wiring: Wiring, node: onnx.NodeProto) -> int:
    count = 1
    for size in wiring.constants[node.input[1]].dims:
        count *= size
    return count


def _cause(node: onnx.NodeProto, by_blocks: bool) -> tuple[str, str]:
    """Why it was passed over, and what helps; an empty cause if it may have been left in float on purpose."""
    odd = {
        "transA": attribute(node, "transA", 0) != 0,
        "alpha": attribute(node, "alpha", 1.0) != 1.0,
        "beta": attribute(node, "beta", 1.0) != 1.0,
    }
    if node.op_type == "Gemm" and any(odd.values()):
        names = ", ".join(name for name, is_odd in odd.items() if is_odd)
        return f": quantizers refuse its {names}", "scale inside the weights, and export again"
    if node.op_type == "Gemm" and by_blocks:
        return ": 4-bit quantizers know MatMul only", "write it as x @ w + b, and quantize again"
    return "", "nothing to do if it was left out on purpose; else quantize again without --only"


RULE = Rule("unquantized-gemm", "no large product that quantizers have to pass over", run)
