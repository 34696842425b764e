"""Which products and convolutions have a quantized form at all, whatever the scheme."""

from __future__ import annotations

from math import prod

import numpy as np
import onnx
from onnx import numpy_helper

from ..tensors import array_of
from ..wiring import Wiring, attribute
from .scheme import Shapes


def why_not_product(node: onnx.NodeProto, shapes: Shapes, *, scaled: bool = True) -> str | None:
    """Of a MatMul or Gemm; with `scaled` its weight may be multiplied by an alpha."""
    if len(shapes.get(node.input[1], ())) != 2:
        return "only products by a constant matrix on the right have a quantized form"
    if node.op_type != "Gemm":
        return None
    if attribute(node, "transA", 0) or attribute(node, "beta", 1.0) != 1.0:
        return "a Gemm that transposes its input or scales its bias has no quantized form"
    if not scaled and attribute(node, "alpha", 1.0) != 1.0:
        return "a Gemm that scales its product has no quantized form"
    return None


def why_not_convolution(node: onnx.NodeProto, shapes: Shapes) -> str | None:
    if node.input[1] not in shapes:
        return "only convolutions with constant weights have a quantized form"
    return _why_not_bias(node, shapes)


def why_not_in_steps(node: onnx.NodeProto, shapes: Shapes) -> str | None:
    """Where the bias is counted in the steps of input and weight, as by int8-static."""
    if node.op_type == "Conv":
        return why_not_convolution(node, shapes)
    return why_not_product(node, shapes) or _why_not_bias(node, shapes)


def _why_not_bias(node: onnx.NodeProto, shapes: Shapes) -> str | None:
    bias = node.input[2] if len(node.input) > 2 else ""
    if not bias or len(shapes.get(bias, ())) == 1:
        return None
    return "its bias is not a constant with one value for each output"


def with_vector_biases(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model, in which a constant bias of a Gemm that is the same for all rows has one value for each output."""
    wiring = Wiring.of(model)
    known = {tensor.name for tensor in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type != "Gemm" or len(node.input) < 3 or not {node.input[1], node.input[2]} <= known:
            continue
        matrix, bias = wiring.constants[node.input[1]], wiring.constants[node.input[2]]
        outputs = matrix.dims[0 if attribute(node, "transB", 0) else 1]
        same_for_all_rows = list(bias.dims[:-1]) in ([], [1]) and prod(bias.dims) in (1, outputs)
        if list(bias.dims) == [outputs] or not same_for_all_rows:
            continue
        name = f"{node.name}.bias.vector"
        values = np.broadcast_to(array_of(bias).reshape(-1), (outputs,))
        model.graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(values), name))
        node.input[2] = name
    return model
