"""Weights stored in 16 bits and computed with in float32: half the size at the same speed, on any CPU.

A weight becomes a 16-bit one behind a Cast, which onnxruntime computes once, when it loads the graph. float16 keeps eleven bits
of a number between 6e-5 and 65504, bfloat16 eight bits of any.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from ..graph import copy_of
from ..tensors import array_of

_FEWEST_WEIGHTS = 256  # below that the Cast takes more bytes than it saves
_NUMBERS = {"fp16": TensorProto.FLOAT16, "bf16": TensorProto.BFLOAT16}
_LARGEST = {"fp16": 65504.0, "bf16": 3.38e38}


def store(model: onnx.ModelProto, nodes: tuple[str, ...], kind: str) -> onnx.ModelProto:
    """A copy of `model` in which the float32 weights of `nodes` are stored as `kind`; others that read them, read those too."""
    model = copy_of(model)
    graph = model.graph
    read = {name for node in graph.node if node.name in nodes for name in node.input}
    casts, kept = [], []
    for tensor in graph.initializer:
        array = array_of(tensor) if tensor.name in read and tensor.data_type == TensorProto.FLOAT else None
        if array is None or array.size < _FEWEST_WEIGHTS or not np.abs(array).max() <= _LARGEST[kind]:
            kept.append(tensor)
            continue
        stored = f"{tensor.name}.{kind}"
        raw = array.astype(np.float16) if kind == "fp16" else bfloat16_bits(array)
        kept.append(TensorProto(name=stored, data_type=_NUMBERS[kind], dims=array.shape, raw_data=raw.tobytes()))
        casts.append(helper.make_node("Cast", [stored], [tensor.name], name=f"{stored}.Cast", to=TensorProto.FLOAT))
    nodes_after = [*casts, *graph.node]
    del graph.initializer[:]
    del graph.node[:]
    graph.initializer.extend(kept)
    graph.node.extend(nodes_after)
    return model


def bfloat16_bits(array: NDArray[Any]) -> NDArray[np.uint16]:
    """The upper half of each float32, rounded to nearest, of equals to even."""
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
    rounded = bits + 0x7FFF + ((bits >> 16) & 1)
    return np.asarray(rounded >> 16, np.uint16)
