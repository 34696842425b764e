"""What a graph of graphs is made of: weights that are kept once, nodes that name themselves, and other graphs copied in.

All weights and constants go to the outermost graph. What lies in a Loop's or an If's body sees them from there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import AttributeProto, GraphProto, NodeProto, TensorProto, helper, inliner, numpy_helper

from runtime.errors import OptionError
from runtime.signature import Dim

_DOMAINS = ("", "ai.onnx")
_LEAST_OPSET = 14  # since then axes are inputs, and a shape may have zeros


class Weights:
    """The initializers of the outermost graph; equal ones are kept once."""

    def __init__(self) -> None:
        self.tensors: list[TensorProto] = []
        self._names: dict[Any, str] = {}
        self._taken: set[str] = set()

    def add(self, tensor: TensorProto) -> str:
        """The name under which this tensor is kept."""
        key = (tensor.data_type, tuple(tensor.dims), _digest(tensor))
        if key not in self._names:
            name, number = tensor.name, 0
            while name in self._taken:
                number += 1
                name = f"{tensor.name}.{number}"
            kept = TensorProto()
            kept.CopyFrom(tensor)
            kept.name = name
            self.tensors.append(kept)
            self._taken.add(name)
            self._names[key] = name
        return self._names[key]

    def constant(self, value: Any, dtype: Any = np.int64) -> str:
        array: NDArray[Any] = np.asarray(value, dtype)
        return self.add(numpy_helper.from_array(array, f"constant.{array.dtype}.{array.ndim}"))


class Nodes:
    """Nodes in the making. nodes("Add", a, b) adds one and gives the name of what it computes.

    A number among the inputs stands for a constant: an int for int64, a float for float32.
    """

    def __init__(self, prefix: str, weights: Weights) -> None:
        self.prefix = prefix
        self.weights = weights
        self.nodes: list[NodeProto] = []

    def __call__(self, operator: str, *inputs: str | int | float | list[int], **attributes: Any) -> str:
        return self.several(operator, 1, *inputs, **attributes)[0]

    def several(self, operator: str, count: int, *inputs: str | int | float | list[int], **attributes: Any) -> tuple[str, ...]:
        name = f"{self.prefix}{operator}.{len(self.nodes)}"
        outputs = tuple(f"{name}.{number}" for number in range(count)) if count > 1 else (name,)
        names = [value if isinstance(value, str) else self._constant(value) for value in inputs]
        self.nodes.append(helper.make_node(operator, names, outputs, name=name, **attributes))
        return outputs

    def constant(self, value: Any, dtype: Any = np.int64) -> str:
        return self.weights.constant(value, dtype)

    def named(self, value: str, name: str) -> str:
        """The same value under a name of one's own."""
        self.nodes.append(helper.make_node("Identity", [value], [name], name=f"{self.prefix}{name}"))
        return name

    def size(self, value: str, axis: int) -> str:
        """One axis of a value, as a vector of one number."""
        return self("Gather", self("Shape", value), [axis])

    def column(self, value: str) -> str:
        """(n) → (n, 1)"""
        return self("Unsqueeze", value, [1])

    def flat(self, value: str) -> str:
        return self("Reshape", value, [-1])

    def part(self, value: str, start: int, end: int) -> str:
        """Columns start … end of (rows, columns)."""
        return self("Slice", value, [start], [end], [1])

    def filled(self, shape: str, value: Any, dtype: Any) -> str:
        """A tensor of this shape with one value everywhere."""
        return self("ConstantOfShape", shape, value=numpy_helper.from_array(np.array([value], dtype)))

    def range(self, count: str) -> str:
        """0 … count - 1, of a vector of one number."""
        return self("Range", 0, self("Squeeze", count), 1)

    def copy(self, model: onnx.ModelProto, given: Mapping[str, str], prefix: str) -> dict[str, str]:
        """The nodes of a model, which takes `given` (input → value) here; output → the value that it is."""
        names = dict(given) | {tensor.name: self.weights.add(tensor) for tensor in model.graph.initializer}
        names |= {
            node.output[0]: self.weights.add(value) for node in model.graph.node if (value := _value_of(node)) is not None
        }
        for node in model.graph.node:
            if _value_of(node) is None:
                self.nodes.append(_renamed(node, names, f"{self.prefix}{prefix}"))
        return {value.name: names.get(value.name, f"{self.prefix}{prefix}{value.name}") for value in model.graph.output}

    def _constant(self, value: int | float | list[int]) -> str:
        return self.constant(value, np.float32 if isinstance(value, float) else np.int64)


def value_info(name: str, dtype: str, shape: Iterable[Dim | None]) -> onnx.ValueInfoProto:
    """A dimension of None is not known, and may be another one at every turn of a Loop."""
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), list(shape))


def prepared(model: onnx.ModelProto) -> onnx.ModelProto:
    """Ready to be copied in: nothing is called by name."""
    return inliner.inline_local_functions(model) if model.functions else model


def joined_opsets(models: Iterable[onnx.ModelProto]) -> list[onnx.OperatorSetIdProto]:
    """What all of the models are written in; they cannot be in one graph otherwise."""
    versions: dict[str, int] = {}
    for model in models:
        for item in model.opset_import:
            domain = "" if item.domain in _DOMAINS else item.domain
            if versions.setdefault(domain, item.version) != item.version:
                raise OptionError(
                    f"the graphs of this bundle are written in opsets {versions[domain]} and {item.version} of "
                    f"{domain or 'ai.onnx'}, and one graph has one; export it again with one --opset"
                )
    if versions[""] < _LEAST_OPSET:
        raise OptionError(
            f"the graphs of this bundle are written in opset {versions['']}, and a loop needs {_LEAST_OPSET} or more; "
            f"export it again with --opset {_LEAST_OPSET} or more"
        )
    return [helper.make_opsetid(domain, version) for domain, version in versions.items()]


def _digest(tensor: TensorProto) -> bytes:
    if tensor.raw_data:
        return hashlib.sha256(tensor.raw_data).digest()
    nameless = TensorProto()
    nameless.CopyFrom(tensor)
    nameless.ClearField("name")
    return hashlib.sha256(nameless.SerializeToString(deterministic=True)).digest()


def _value_of(node: NodeProto) -> TensorProto | None:
    """The tensor of a Constant, which is kept with the weights: it may be a weight, and be there twice."""
    if node.op_type != "Constant" or node.domain not in _DOMAINS or node.attribute[0].name != "value":
        return None
    tensor = TensorProto()
    tensor.CopyFrom(node.attribute[0].t)
    tensor.name = tensor.name or node.output[0]
    return tensor


def _renamed(node: NodeProto, names: Mapping[str, str], prefix: str) -> NodeProto:
    """The node with every value under its new name: that of `names`, or its own behind the prefix."""

    def new(name: str) -> str:
        return names.get(name, prefix + name) if name else name

    copied = NodeProto()
    copied.CopyFrom(node)
    copied.name = prefix + node.name
    copied.input[:] = map(new, node.input)
    copied.output[:] = map(new, node.output)
    for attribute in copied.attribute:
        for graph in (
            (attribute.g, *attribute.graphs) if attribute.type in (AttributeProto.GRAPH, AttributeProto.GRAPHS) else ()
        ):
            _rename_inside(graph, names, prefix)
    return copied


def _rename_inside(graph: GraphProto, names: Mapping[str, str], prefix: str) -> None:
    nodes = [_renamed(node, names, prefix) for node in graph.node]
    del graph.node[:], graph.value_info[:]
    graph.node.extend(nodes)
    for value in (*graph.input, *graph.output, *graph.initializer):
        value.name = names.get(value.name, prefix + value.name)
