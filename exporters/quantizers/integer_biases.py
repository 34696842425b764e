"""Biases of quantized products in 32-bit integers, where onnxruntime would else multiply in float32.

When it loads a graph, onnxruntime joins a product of two axes and the bias after it to a Gemm, and it has an integer form of a
Gemm only if the bias is quantized too: in steps of the activations' scale times the weights', as it is added to their products.
With a bias in float32 all weights are converted back at every call: a row times 1152 x 768 took 3130 µs, with one in integers
46 µs (onnxruntime 1.31, one thread). A product of three axes is not joined, and its bias is left as it is.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from ..wiring import Wiring

_LARGEST = 1 << 31


def with_integer_biases(model: onnx.ModelProto, flat: Collection[str]) -> onnx.ModelProto:
    """The model, in which what is added to those of the `flat` MatMul nodes that are quantized is so too. Biases that
    nobody reads any more are left in it."""
    wiring = Wiring.of(model)
    made = []
    for product in wiring.nodes:
        readers = wiring.read_by(product)
        if product.op_type != "MatMul" or product.name not in flat or len(readers) != 1 or readers[0].op_type != "Add":
            continue
        (added,) = readers
        place = 1 - list(added.input).index(product.output[0])
        bias, scales = wiring.value(added.input[place]), [_scale_of(wiring, name) for name in product.input]
        if bias is None or bias.ndim != 1 or bias.size == 1 or any(scale is None for scale in scales):
            continue
        scale = np.asarray(scales[0] * scales[1])
        numbers = np.rint(bias / scale.astype(np.float64))
        if np.abs(numbers).max() < _LARGEST:
            name = f"{product.name}.bias"
            weights = {name: numbers.astype(np.int32), f"{name}.scale": scale}
            model.graph.initializer.extend(numpy_helper.from_array(array, key) for key, array in weights.items())
            axis = {"axis": 0} if scale.ndim else {}
            made.append(helper.make_node("DequantizeLinear", [*weights], [f"{name}.added"], f"{name}.dequantized", **axis))
            added.input[place] = f"{name}.added"
    if made:
        nodes = [*made, *model.graph.node]
        del model.graph.node[:]
        model.graph.node.extend(nodes)
    return model


def _scale_of(wiring: Wiring, name: str) -> Any:
    maker = wiring.maker(name)
    return None if maker is None or maker.op_type != "DequantizeLinear" else wiring.value(maker.input[1])
