"""int8-static: weights and activations in int8, with ranges calibrated on samples (QDQ form).

Weights are symmetric int8, per output channel where there are convolutions; activations are asymmetric uint8, or int8 with
`types=s8s8`. A graph of matrix products alone takes one scale a tensor: LeNet's measured 0.99 of fp32's latency against 1.01
with one a channel (one run, intervals that touch). Matrix products hand on float32: what follows them is usually an activation
function that would only have to convert back (measured: 6 % faster).

Weights take seven of their eight bits (see saturation.py): the answers are then the same on every CPU. With
`reduce_range=auto` they do where, by the samples, eight bits could saturate; other data could still reach further, so that it
is not the default.

A first convolution of few colours and outputs stays in float32, where it is faster (thin.py).

Networks on tokens: static_text.py.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import onnx

from ..graph import drop_unread_weights
from ..weights import loaded
from .integer_biases import with_integer_biases
from .products import why_not_in_steps, with_vector_biases
from .quiet import quiet
from .ranges import Range
from .scheme import Request, Scheme
from .static_settings import (
    StaticSettings,
    by_channel,
    flat_products,
    observed,
    output_axis,
    ranges_for,
    reduced_products,
)
from .thin import outputs_of_thin, thin_convolutions

_OPERATORS = ("MatMul", "Gemm", "Conv")
_JOINING = ("Add", "Concat")  # of branches: in int8 where all of them are


def apply(request: Request) -> onnx.ModelProto:
    settings: StaticSettings = request.settings
    request = replace(request, model=loaded(request.model))
    per_channel = by_channel(request, usual="Conv" in request.operators)
    products = [node for node in request.model.graph.node if node.name in request.nodes]
    found = observed(request, _quantized_tensors(request, per_channel), products)
    ranges = ranges_for(settings, found)
    reduced = reduced_products(request, products, found, ranges, lambda node: per_channel)
    in_seven_bits = {node.input[1] for node in products if node.name in reduced}  # another product may read the same
    full = [node for node in products if node.input[1] not in in_seven_bits]
    model = with_integer_biases(_converted(request, per_channel, ranges, full).model.model, flat_products(products, found))
    drop_unread_weights(model)
    return model


def _quantized_tensors(request: Request, per_channel: bool) -> list[str]:
    """The activations that onnxruntime's quantizer will quantize, found by letting it, with ranges that mean nothing."""
    graph = request.model.graph
    weights = {tensor.name for tensor in graph.initializer}
    computed = {value.name for value in graph.input} | {name for node in graph.node for name in node.output}
    tried = _converted(request, per_channel, {}, ())
    # It also copies a bias that two convolutions share: such a name is not of this graph.
    return [name for name in tried.quantized_value_map if name in computed - weights]


def _converted(request: Request, per_channel: bool, ranges: Mapping[str, Range], full: Any) -> Any:
    """onnxruntime's quantizer, done. Weights of `full` products have all their eight bits."""
    from onnxruntime.quantization import CalibrationMethod, QuantType
    from onnxruntime.quantization.calibrate import TensorsData
    from onnxruntime.quantization.qdq_quantizer import QDQQuantizer
    from onnxruntime.quantization.registry import QDQRegistry

    model = onnx.shape_inference.infer_shapes(request.model)
    # It looks up ranges also of tensors that it then does not quantize, such as a convolution's before its ReLU.
    known = dict.fromkeys(_float_tensors(model), (0.0, 1.0)) | dict(ranges)
    tensors = TensorsData(
        CalibrationMethod.MinMax, {name: (np.float32(low), np.float32(high)) for name, (low, high) in known.items()}
    )
    # Unless operators were chosen, those between convolutions (pooling, norms, sums, …) stay in int8 as well.
    operators = list(request.operators) if request.narrowed else sorted({*QDQRegistry, *request.operators, *_JOINING})
    weighted = {node.name for node in request.model.graph.node if node.op_type in _OPERATORS}
    away = _away_from_convolutions(request, operators)
    weights = {node.input[1] for node in request.model.graph.node if node.name in request.nodes}
    sharing = {  # a transposed convolution, say: the axis of the scales is the products'
        node.name for node in request.model.graph.node if node.name not in request.nodes and weights & set(node.input)
    }
    left = (weighted - set(request.nodes)) | {node.name for node in away} | sharing
    overrides = {node.input[1]: [_full_range(node, per_channel)] for node in full}
    with quiet():
        quantizer = QDQQuantizer(
            model,
            per_channel=per_channel,
            reduce_range=True,
            weight_qType=QuantType.QInt8,
            activation_qType=QuantType.QInt8 if request.settings.types == "s8s8" else QuantType.QUInt8,
            tensors_range=tensors,
            nodes_to_quantize=[],
            nodes_to_exclude=sorted(left),
            op_types_to_quantize=operators,
            extra_options={"OpTypesToExcludeOutputQuantization": ["Gemm", "MatMul"], "TensorQuantOverrides": overrides},
        )
        quantizer.quantize_model()
    return quantizer


def _away_from_convolutions(request: Request, operators: Collection[str]) -> list[onnx.NodeProto]:
    """The operators between products that read nothing in int8, or of whose branches one is not: a norm after a convolution in
    float32, where only some products are quantized, would be converted to int8 for itself alone.

    What a quantized convolution reads, the graph's inputs apart, is in int8 for others too, and what a thin convolution gives
    may be joined to what is: a DenseNet hands it on to the end of a block."""
    graph = request.model.graph
    of_thin = outputs_of_thin(request.model)
    read = {node.input[0] for node in graph.node if node.op_type == "Conv" and node.name in request.nodes}
    in_int8 = read - {value.name for value in graph.input}  # tensors
    away = []
    for node in graph.node:
        if node.name in request.nodes:
            in_int8.update(node.output if node.op_type == "Conv" else ())
        elif node.op_type in operators and node.op_type not in _OPERATORS:
            branches = set(node.input)
            if branches & in_int8 and (node.op_type not in _JOINING or branches <= in_int8 | of_thin):
                in_int8.update(node.output)
            else:
                away.append(node)
    return away


def _full_range(node: onnx.NodeProto, per_channel: bool) -> dict[str, Any]:
    from onnxruntime.quantization import QuantType

    choice: dict[str, Any] = {"quant_type": QuantType.QInt8, "reduce_range": False, "symmetric": True}
    return choice | ({"axis": output_axis(node)} if per_channel else {})


def _float_tensors(model: onnx.ModelProto) -> list[str]:
    values = (*model.graph.input, *model.graph.value_info, *model.graph.output)
    weights = {tensor.name for tensor in model.graph.initializer}
    floats = {value.name for value in values if value.type.tensor_type.elem_type == onnx.TensorProto.FLOAT}
    return sorted(floats - weights)


SCHEME = Scheme(
    name="int8-static",
    description="int8 weights and activations, ranges calibrated on training data",
    operators=_OPERATORS,
    needs_calibration=True,
    apply=apply,
    prepare=with_vector_biases,
    why_not=why_not_in_steps,
    leaves=thin_convolutions,
    settings=StaticSettings(),
    opset=10,
)
