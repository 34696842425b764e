"""int8-static for networks on tokens: matrix products, convolutions and embeddings, and nothing between them.

onnxruntime's own quantizer also takes what lies between (sums, masks, softmax, attention), which on such networks costs
exactness and breaks graphs with fused operators. Here a product's input is quantized where it is multiplied,

    x → QuantizeLinear → DequantizeLinear → MatMul → y,   weight → DequantizeLinear → MatMul

which onnxruntime makes one integer product of (MatMulIntegerToFloat) and any other host computes as it stands. A Gemm is a
product and a sum. Rows of an embedding are taken from int8 and scaled, each row by its own scale with `per_channel`. A scale of
activations is fixed, so that the answer for a text does not depend on what else is in the batch.

An output layer tied to its embedding is stored once: the int8 table is read by rows, and turned when the graph is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from ..graph import copy_of, drop_unread_weights
from ..tensors import array_of
from . import int8_static
from .integer_biases import with_integer_biases
from .products import why_not_convolution
from .ranges import Range
from .saturation import FULL, REDUCED, Array, activation_numbers, quantize_weight
from .scheme import Request, Shapes, none
from .static_settings import NEVER, StaticSettings, by_channel, flat_products, observed, ranges_for, reduced_products
from .weights import digest_of, prepare, rows_of
from .weights import why_not as why_not_blocks

_OPERATORS = ("MatMul", "Gemm", "Conv", "Gather")
_LARGEST = 1 << 30  # a bias, in steps of both scales: 32 bits hold it


def why_not(node: onnx.NodeProto, shapes: Shapes) -> str | None:
    if node.op_type == "Conv":
        return why_not_convolution(node, shapes)
    return why_not_blocks(node, shapes, divisible=False)


def apply(request: Request) -> onnx.ModelProto:
    nodes = [node for node in request.model.graph.node if node.name in request.nodes]
    products = [node for node in nodes if node.op_type != "Gather"]
    tensors = [node.input[0] for node in products] + [node.output[0] for node in products if node.op_type == "Conv"]
    found = observed(request, tensors, products)
    ranges = ranges_for(request.settings, found)
    per_channel = by_channel(request, usual=True)
    reduced = reduced_products(request, products, found, ranges, lambda node: per_channel)
    writer = _Writer(request, ranges, reduced, per_channel)
    model = copy_of(request.model)
    written: list[onnx.NodeProto] = []
    for node in model.graph.node:
        written += writer.written(node) if node.name in request.nodes else [node]
    del model.graph.node[:]
    model.graph.node.extend(written)
    known = {tensor.name for tensor in model.graph.initializer}
    model.graph.initializer.extend(
        numpy_helper.from_array(array, name) for name, array in writer.weights.items() if name not in known
    )
    with_integer_biases(model, flat_products(products, found))
    drop_unread_weights(model)
    return model


class _Writer:
    """Makes the quantized form of a node, and collects the constants that these read."""

    def __init__(self, request: Request, ranges: Mapping[str, Range], reduced: frozenset[str], per_channel: bool) -> None:
        self._request, self._ranges, self._reduced, self._by_channel = request, ranges, reduced, per_channel
        self._settings: StaticSettings = request.settings
        self._tensors = {tensor.name: tensor for tensor in request.model.graph.initializer}
        self._made: set[str] = set()  # tensors that are already written
        self.weights: dict[str, Array] = {}

    def written(self, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        write = {"Gather": self._gather, "Conv": self._convolution}.get(node.op_type, self._product)
        nodes = write(node)
        for number, made in enumerate(nodes):
            made.name = f"{node.name}.{number}"
        main = "MatMul" if node.op_type == "Gemm" else node.op_type
        next(made for made in nodes if made.op_type == main).name = node.name
        return nodes

    def _product(self, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        x, weight, *rest = node.input
        bias = rest[0] if rest and rest[0] else None
        output = node.output[0] if bias is None else f"{node.output[0]}.product"
        rows = rows_of(node, self._array(weight))  # (outputs, inputs)
        tied = bool(self._request.tied) and digest_of(rows) in self._request.tied
        name = (
            f"{weight}.{node.name}" if node.op_type == "Gemm" else weight
        )  # two may transpose or scale one weight differently
        nodes = self._activation(x)
        if tied:
            kept = self._keep(f"{name}.rows", rows, self._tied_largest(), 0)
            nodes += self._turned(kept, f"{name}.columns")
        else:
            largest = REDUCED if node.name in self._reduced else FULL
            name = f"{name}.{largest}"
            self._keep(f"{name}.columns", np.ascontiguousarray(rows.T), largest, 1)
        scales = f"{name}.rows" if tied else f"{name}.columns"
        nodes += self._dequantized(f"{name}.columns", scales, f"{name}.multiplied", 1)
        nodes.append(helper.make_node("MatMul", [f"{x}.dequantized", f"{name}.multiplied"], [output]))
        if bias is not None:
            nodes.append(helper.make_node("Add", [output, bias], [node.output[0]]))
        return nodes

    def _convolution(self, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        """With its result quantized too: onnxruntime has no integer convolution that gives floats."""
        x, weight, *rest = node.input
        y, result = node.output[0], f"{node.output[0]}.convolution"
        added = self._array(rest[0]) if rest and rest[0] else np.zeros(1, np.float32)
        nodes = self._activation(x)
        step = self.weights[f"{x}.scale"]
        kept = f"{weight}.{node.name}"  # another may read the weight and add another bias
        self._keep(
            kept, self._array(weight), REDUCED if node.name in self._reduced else FULL, 0, np.abs(added) / step / _LARGEST
        )
        nodes += self._dequantized(kept, kept, f"{kept}.multiplied", 0)
        inputs = [f"{x}.dequantized", f"{kept}.multiplied"]
        if rest and rest[0]:
            bias, scale = f"{node.name}.bias", step * self.weights[f"{kept}.scale"]
            self.weights |= {bias: np.rint(added / scale).astype(np.int32), f"{bias}.scale": scale}
            axis = {"axis": 0} if scale.ndim else {}
            nodes.append(helper.make_node("DequantizeLinear", [bias, f"{bias}.scale"], [f"{bias}.added"], **axis))
            inputs.append(f"{bias}.added")
        made = helper.make_node("Conv", inputs, [result])
        made.attribute.extend(node.attribute)
        return [*nodes, made, *self._activation(y, read=result, result=y)]

    def _gather(self, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        name, indices = node.input
        table = self._array(name)
        tied = bool(self._request.tied) and digest_of(table) in self._request.tied
        kept = self._keep(f"{name}.rows", table, self._tied_largest() if tied else FULL, 0)
        taken, output = f"{node.output[0]}.numbers", node.output[0]
        nodes = [helper.make_node("Gather", [kept, indices], [taken])]
        if not self._by_channel:
            return [*nodes, *self._dequantized(taken, kept, output, 0)]
        self.weights[f"{kept}.column"] = self.weights[f"{kept}.scale"].reshape(-1, 1)
        return [
            *nodes,
            helper.make_node("Cast", [taken], [f"{taken}.float"], to=TensorProto.FLOAT),
            helper.make_node("Gather", [f"{kept}.column", indices], [f"{taken}.scale"]),
            helper.make_node("Mul", [f"{taken}.float", f"{taken}.scale"], [output]),
        ]

    def _activation(self, x: str, *, read: str | None = None, result: str | None = None) -> list[onnx.NodeProto]:
        """`x` there and back through eight bits, once for all that read it."""
        result = result or f"{x}.dequantized"
        if result in self._made:
            return []
        self._made.add(result)
        scale, zero = activation_numbers(*self._ranges[x])
        signed = self._settings.types == "s8s8"
        self.weights[f"{x}.scale"] = np.asarray(scale)
        self.weights[f"{x}.zero"] = np.array(zero - 128, np.int8) if signed else np.array(zero, np.uint8)
        numbers = [f"{x}.scale", f"{x}.zero"]
        return [
            helper.make_node("QuantizeLinear", [read or x, *numbers], [f"{x}.quantized"]),
            helper.make_node("DequantizeLinear", [f"{x}.quantized", *numbers], [result]),
        ]

    def _turned(self, numbers: str, result: str) -> list[onnx.NodeProto]:
        if result in self._made:
            return []
        self._made.add(result)
        return [helper.make_node("Transpose", [numbers], [result], perm=[1, 0])]

    def _dequantized(self, numbers: str, scales: str, result: str, axis: int) -> list[onnx.NodeProto]:
        if result in self._made:
            return []
        self._made.add(result)
        by_axis = {"axis": axis} if self.weights[f"{scales}.scale"].ndim else {}
        return [helper.make_node("DequantizeLinear", [numbers, f"{scales}.scale", f"{scales}.zero"], [result], **by_axis)]

    def _keep(self, name: str, weight: Array, largest: int, axis: int, least: Array | float = 0) -> str:
        numbers, scales = quantize_weight(weight, largest, axis if self._by_channel else None, least)
        self.weights |= {name: numbers, f"{name}.scale": scales, f"{name}.zero": np.zeros(scales.shape, np.int8)}
        return name

    def _tied_largest(self) -> int:
        """A table that several graphs may share must be the same bytes in all of them."""
        return FULL if self._settings.reduce_range == NEVER else REDUCED

    def _array(self, name: str) -> Array:
        return array_of(self._tensors[name])


ON_TOKENS = replace(
    int8_static.SCHEME,
    description="int8 weights and activations of products, ranges calibrated on texts and what is written after them",
    operators=_OPERATORS,
    apply=apply,
    prepare=prepare,
    why_not=why_not,
    leaves=none,
    takes_text=True,
)
