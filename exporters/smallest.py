"""Where two graphs that should be equal first differ: the smallest subgraph that shows it.

A pass keeps the names of the values it does not do away with. So the values that both graphs have are computed in both, on
the same inputs, and the first that differs, in the order of computation, is made wrong by the nodes between it and the values
that still agree.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from runtime.errors import EdgekitError
from runtime.signature import GraphSignature, TensorSpec
from runtime.verify import max_error

from .graph import copy_of
from .parity import Arrays
from .weights import open_model

_LONGEST = 12  # nodes named before the rest is counted


def smallest_difference(before: onnx.ModelProto, after: onnx.ModelProto, inputs: Arrays, *, relative: float) -> str | None:
    """E.g. "Div_3, Erf_4, Mul_5 → Gelu_1"; None if no place stands out. `relative` is the error that passes, as a share."""
    shared = _makers(before).keys() & _makers(after).keys()
    try:
        first, second = (_values(model, inputs, shared) for model in (before, after))
    except EdgekitError:
        return None
    agreeing: set[str] = set()
    for node in after.graph.node:
        for name in node.output:
            if name not in shared:
                continue
            if _differs(first[name], second[name], relative):
                return f"{_nodes_behind(before, name, agreeing)} → {_nodes_behind(after, name, agreeing)}"
            agreeing.add(name)
    return None


def _makers(model: onnx.ModelProto) -> dict[str, onnx.NodeProto]:
    return {name: node for node in model.graph.node for name in node.output if name}


def _values(model: onnx.ModelProto, inputs: Arrays, names: set[str]) -> dict[str, NDArray[Any]]:
    """The named values inside the graph, as its outputs."""
    model = copy_of(model)
    present = {value.name for value in model.graph.output}
    model.graph.output.extend(onnx.helper.make_empty_tensor_value_info(name) for name in sorted(names - present))
    specs = tuple(TensorSpec(name, "float32", ()) for name in sorted(names))  # only the names are read
    session = open_model(model, GraphSignature((), specs), optimization="none")
    return session.run_unchecked(inputs)


def _differs(first: NDArray[Any], second: NDArray[Any], relative: float) -> bool:
    if first.shape != second.shape or first.dtype != second.dtype:
        return True
    if first.dtype.kind != "f":
        return not np.array_equal(first, second)
    finite = np.abs(first[np.isfinite(first)])
    return (
        max_error(first, second) > relative * float(finite.max(initial=0.0)) or np.isnan(first).any() != np.isnan(second).any()
    )


def _nodes_behind(model: onnx.ModelProto, name: str, known: set[str]) -> str:
    """The nodes from the values that agree to the one that does not, in order."""
    makers, wanted, waiting = _makers(model), set(), [name]
    while waiting:
        value = waiting.pop()
        node = makers.get(value)
        if node is None or value in known or node.output[0] in wanted:
            continue
        wanted.add(node.output[0])
        waiting += node.input
    names = [node.name or f"{node.op_type}({node.output[0]})" for node in model.graph.node if node.output[0] in wanted]
    return ", ".join(names[:_LONGEST]) + (f" and {len(names) - _LONGEST} more" if len(names) > _LONGEST else "")
