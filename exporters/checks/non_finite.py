"""non-finite: NaN or infinite weights, which make every answer that touches them worthless."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx
from onnx import numpy_helper

from ..finding import Finding, Graph, Rule
from ..graph import graphs_of

_FLOATS = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.DOUBLE, onnx.TensorProto.BFLOAT16)


def run(graph: Graph) -> Iterator[Finding]:
    if not graph.complete:
        return
    for inner in graphs_of(graph.model):
        constants = [
            attribute.t
            for node in inner.node
            if node.op_type == "Constant"
            for attribute in node.attribute
            if attribute.name == "value"
        ]
        for tensor in (*inner.initializer, *constants):
            if tensor.data_type not in _FLOATS:
                continue
            values = numpy_helper.to_array(tensor).astype(np.float64)
            bad = int(np.isnan(values).sum()), int(np.isinf(values).sum())
            if bad[0]:
                yield Finding(
                    "non-finite",
                    "error",
                    tensor.name,
                    f"{bad[0]} of {values.size} weights are NaN",
                    "train again with a lower learning rate",
                )
            elif bad[1] and values.size > 1:  # a lone -inf is a mask, which is how attention writes one
                yield Finding(
                    "non-finite",
                    "error",
                    tensor.name,
                    f"{bad[1]} of {values.size} weights are infinite",
                    "train again with a lower learning rate",
                )


RULE = Rule("non-finite", "no NaN or infinite weights", run)
