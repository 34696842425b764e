"""The same graph with its inputs and weights moved by one rounding step: how much its answer moves is how exact it can be.

An original in ONNX has no float64 twin to be compared with. Another summation order, another kernel or a fused node changes
every product by about one rounding of its factors; so the factors are changed by that much, and the answers compared.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import onnx
from onnx import TensorProto, numpy_helper

from runtime.signature import GraphSignature

from .graph import copy_of, graphs_of
from .loading import open_original
from .parity import EPSILON, Arrays, Reference, nudged

HOW = "the answer when inputs and weights are disturbed by one float32 rounding step"


def disturbed_reference(path: Path, model: onnx.ModelProto, signature: GraphSignature, whole: Collection[str]) -> Reference:
    """The disturbed graph as a function. Inputs named in `whole` hold whole numbers, such as indices, and stay as they are."""
    session = open_original(path, disturbed(model), signature)

    def run(inputs: Arrays) -> Arrays:
        return session.run({name: array if name in whole else nudged(array, EPSILON) for name, array in inputs.items()})

    return run


def disturbed(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy with every float32 matrix and kernel moved. Vectors and scalars stay: some are sizes, scales or thresholds."""
    copied = copy_of(model)
    for graph in graphs_of(copied):
        constants = [attribute.t for node in graph.node if node.op_type == "Constant" for attribute in node.attribute]
        for tensor in (*graph.initializer, *constants):
            if tensor.data_type == TensorProto.FLOAT and len(tensor.dims) > 1:
                tensor.CopyFrom(numpy_helper.from_array(nudged(numpy_helper.to_array(tensor), EPSILON), tensor.name))
    return copied
