"""int8-dynamic: weights in int8, activations quantized on the fly by their own range. No calibration data.

Good for matrix products. Convolutions in this form are several times slower than float32 on CPUs; the gate finds that out.
An LSTM becomes onnxruntime's own quantized one, twice as fast as in float32; it has none of a GRU or an RNN: see recurrent.py.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
from onnx import numpy_helper

from ..tensors import array_of
from ..weights import loaded
from ..wiring import Wiring, attribute
from .products import why_not_product
from .quiet import quiet
from .scheme import REDUCED_RANGE, Request, Scheme, Shapes
from .weights import EIGHT_BIT

_TAKEN_APART = ("GRU", "RNN")
_PRODUCTS = ("MatMul", "Gemm")


def why_not(node: onnx.NodeProto, shapes: Shapes) -> str | None:
    if node.op_type in _PRODUCTS:
        return why_not_product(node, shapes, scaled=False)
    return EIGHT_BIT.why_not(node, shapes) if node.op_type in _TAKEN_APART else None


def how(node: onnx.NodeProto, shapes: Shapes, settings: Any) -> str:
    return EIGHT_BIT.how(node, shapes, settings) if node.op_type in _TAKEN_APART else "chosen"


def apply(request: Request) -> onnx.ModelProto:
    recurrent = {node.name for node in request.model.graph.node if node.op_type in _TAKEN_APART}
    apart, others = (tuple(name for name in request.nodes if (name in recurrent) == wanted) for wanted in (True, False))
    model = _by_onnxruntime(replace(request, nodes=others)) if others else request.model
    if not apart:
        return model
    return EIGHT_BIT.apply(replace(request, model=model, nodes=apart, settings=EIGHT_BIT.settings, many_rows=True))


def _by_onnxruntime(request: Request) -> onnx.ModelProto:
    from onnxruntime.quantization import QuantType, quantize_dynamic

    # Gemm is first split into MatMul and Add, and the product keeps the name with a suffix.
    nodes = [*request.nodes, *(f"{name}_MatMul" for name in request.nodes)]
    with tempfile.TemporaryDirectory() as folder, quiet():
        target = Path(folder) / "quantized.onnx"
        quantize_dynamic(
            _with_own_weights(loaded(request.model)),
            target,
            op_types_to_quantize=[*(name for name in request.operators if name not in _TAKEN_APART), "MatMul"],
            nodes_to_quantize=nodes,
            weight_type=QuantType.QInt8,
            per_channel=True,
            reduce_range=REDUCED_RANGE,
        )
        made = onnx.load(target)
    left = {f"{node.name}_MatMul": node.name for node in request.model.graph.node if node.name not in request.nodes}
    for node in made.graph.node:
        node.name = left.get(node.name, node.name)  # another scheme may want it, by the name it had
    return made


def _with_own_weights(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy for every Gemm whose weight others read: onnxruntime's quantizer transposes weights of Gemms where they lie."""
    wiring = Wiring.of(model)
    for node in model.graph.node:
        weight = node.input[1] if node.op_type == "Gemm" else ""
        if weight not in wiring.constants or not attribute(node, "transB", 0):
            continue
        if len(wiring.readers[weight]) > 1 or list(node.input).count(weight) > 1 or weight in wiring.outputs:
            node.input[1] = f"{weight}.of.{node.name}"
            model.graph.initializer.append(numpy_helper.from_array(array_of(wiring.constants[weight]), node.input[1]))
    return model


SCHEME = Scheme(
    name="int8-dynamic",
    description="int8 weights, activations quantized as they come; no calibration",
    operators=(*_PRODUCTS, "Conv", "Gather", "LSTM", *_TAKEN_APART),
    needs_calibration=False,
    apply=apply,
    why_not=why_not,
    how=how,
)
