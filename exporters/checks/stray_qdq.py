"""stray-qdq: QuantizeLinear and DequantizeLinear that cost precision or time and let nothing run in integers."""

from __future__ import annotations

from collections.abc import Iterator

import onnx

from ..finding import Finding, Graph, Rule
from ..wiring import Wiring, label, same_value

# Operators that onnxruntime runs on 8-bit values when they stand between DequantizeLinear and QuantizeLinear.
_INTEGER = {"Add", "ArgMax", "AveragePool", "Clip", "Concat", "Conv", "ConvTranspose", "DepthToSpace", "Flatten", "Gather"}
_INTEGER |= {"Gemm", "GlobalAveragePool", "LeakyRelu", "MatMul", "MaxPool", "Mul", "Pad", "ReduceMean", "Relu", "Reshape"}
_INTEGER |= {"Resize", "Sigmoid", "Slice", "Softmax", "Split", "Squeeze", "Transpose", "Unsqueeze", "Where"}


def run(graph: Graph) -> Iterator[Finding]:
    wiring = graph.wiring
    for node in wiring.nodes:
        source = wiring.maker(node.input[0]) if node.input else None
        if node.op_type == "QuantizeLinear" and source is not None and source.op_type == "DequantizeLinear":
            if _same_scale(wiring, source, node):
                reason, fix = "values are dequantized and quantized again with the same scale", "remove the pair"
                yield Finding("stray-qdq", "warning", label(node), reason, f"{fix}: it has no effect but its time")
            else:
                reason = "values are dequantized and quantized again with another scale, and lose precision twice"
                fix = "give the tensor one scale: calibrate again from the fp32 bundle with edgekit quantize"
                yield Finding("stray-qdq", "warning", label(node), reason, fix)
        elif node.op_type == "DequantizeLinear" and source is not None and source.op_type == "QuantizeLinear":
            above, below = wiring.maker(source.input[0]), wiring.read_by(node)
            if not below or any(reader.op_type in _INTEGER or reader.op_type == "QuantizeLinear" for reader in below):
                continue
            if above is None or above.op_type not in _INTEGER:
                names = ", ".join(sorted({reader.op_type for reader in below}))
                reason = f"values are rounded to integers and back for {names}, which computes in float all the same"
                yield Finding("stray-qdq", "warning", label(source), reason, "leave this tensor in float when quantizing")


def _same_scale(wiring: Wiring, one: onnx.NodeProto, other: onnx.NodeProto) -> bool:
    pairs = [(*(node.input[index] if index < len(node.input) else "" for node in (one, other)),) for index in (1, 2)]
    return all(same_value(wiring, *pair) for pair in pairs)


RULE = Rule("stray-qdq", "no quantize and dequantize pair without an integer operator", run)
