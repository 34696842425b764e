"""What a graph costs, estimated at stated sizes: parameters, FLOPs, activation memory, cache.

Shapes are inferred at those sizes; where inference does not know one, the graph is run with every tensor in view.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from math import prod
from typing import Any

import onnx
from numpy.typing import NDArray

from runtime.errors import FeedError
from runtime.feeds import example_feeds
from runtime.signature import Dim, GraphSignature

from .finding import Graph
from .flops import Shape, flops_of
from .graph import copy_of, graphs_of
from .observe import observe
from .wiring import attribute

_GUESSED = (1, 8, 32, 224)  # sizes tried for every axis where no golden tells one
_ALIASES = {"Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity"}  # hand on the memory they read
_INDICES = (onnx.TensorProto.INT64, onnx.TensorProto.BOOL, onnx.TensorProto.STRING)


@dataclass(frozen=True)
class Figures:
    sizes: Mapping[str, int]  # what FLOPs and memory are stated at
    parameters: int  # elements of weights; shapes and indices are not counted
    weight_bytes: int
    flops: int | None
    peak_activation_bytes: int | None  # inputs, results and outputs that live at once, before any reuse in place
    kv_cache_bytes_per_token: int | None  # of one row of the batch; None if there is no cache
    state_bytes_per_row: int | None  # carried from step to step whatever the length; None if there is no such state
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class _Seen:
    """Shapes and bytes of tensors at some sizes."""

    shapes: dict[str, Shape]
    sizes: dict[str, int]  # bytes
    values: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # of single integers, where the graph was run


def figures_of(graph: Graph) -> Figures:
    tensors = [tensor for inner in graphs_of(graph.model) for tensor in _weights(inner)]
    signature = graph.signature
    cache = state = None
    notes: list[str] = []
    sizes: Mapping[str, int] = {}
    flops = peak = None
    if signature is not None:
        sizes, seen = _shapes(graph, signature)
        cache, state = _carried(signature, sizes)
        if seen is None:
            notes.append("shapes are not known, so FLOPs and memory are not")
        else:
            flops = _flops(graph, seen, notes)
            in_place = {state.output: state.input for state in signature.states if state.filled is not None}
            peak = _peak(graph.model.graph, seen, graph.wiring.derived, in_place)
    if any(len(node.attribute) and any(item.HasField("g") for item in node.attribute) for node in graph.model.graph.node):
        notes.append("what Loop, If and Scan do inside is counted once, and its memory is not")
    parameters = sum(_elements(tensor) for tensor in tensors if tensor.data_type not in _INDICES) + _packed(graph)
    weight_bytes = sum(_bytes(tensor.data_type, tuple(tensor.dims)) for tensor in tensors)
    return Figures(dict(sizes), parameters, weight_bytes, flops, peak, cache, state, tuple(notes))


def _weights(graph: onnx.GraphProto) -> list[onnx.TensorProto]:
    values = [item.t for node in graph.node if node.op_type == "Constant" for item in node.attribute if item.name == "value"]
    return [*graph.initializer, *values]


def _elements(tensor: onnx.TensorProto) -> int:
    return prod(tensor.dims)


def _packed(graph: Graph) -> int:
    """4-bit weights are stored several to a byte: the elements that counting bytes misses."""
    missed = 0
    for node in graph.wiring.nodes:
        if node.op_type == "MatMulNBits" and (tensor := graph.wiring.constants.get(node.input[1])) is not None:
            missed += attribute(node, "K") * attribute(node, "N") - _elements(tensor)
    return missed


def _bytes(kind: int, shape: Shape) -> int:
    bits = {onnx.TensorProto.INT4: 4, onnx.TensorProto.UINT4: 4, onnx.TensorProto.STRING: 0, 0: 0}.get(kind)
    if bits is None:
        bits = 8 * onnx.helper.tensor_dtype_to_np_dtype(kind).itemsize
    return (prod(shape) * bits + 7) // 8


def _size(dim: Dim, sizes: Mapping[str, int]) -> int:
    """A dimension is a number, a name, or a sum of such."""
    if isinstance(dim, int):
        return dim
    return sum(int(term) if term.isdigit() else sizes.get(term, 1) for term in dim.split(" + "))


def _carried(signature: GraphSignature, sizes: Mapping[str, int]) -> tuple[int | None, int | None]:
    """Bytes of a row that each token adds to caches, and bytes of a row that are there whatever the length."""
    specs = {spec.name: spec for spec in signature.inputs}
    per_token: list[int] = []
    per_row: list[int] = []
    for state in signature.states:
        spec = specs[state.input]
        kept = [_size(dim, sizes) for axis, dim in enumerate(spec.shape) if axis not in (state.batch_axis, state.length_axis)]
        width = 2 if spec.dtype == "bfloat16" else onnx.helper.tensor_dtype_to_np_dtype(_kind(spec.dtype)).itemsize
        (per_row if state.length_axis is None else per_token).append(prod(kept) * width)
    return sum(per_token) if per_token else None, sum(per_row) if per_row else None


def _kind(dtype: str) -> int:
    return onnx.TensorProto.DataType.Value({"float32": "FLOAT", "float64": "DOUBLE"}.get(dtype, dtype.upper()))


def _shapes(graph: Graph, signature: GraphSignature) -> tuple[Mapping[str, int], _Seen | None]:
    axes = signature.dynamic_axes
    tries = [dict(graph.sizes)] if graph.sizes is not None else [dict.fromkeys(axes, size) for size in _GUESSED]
    for sizes in tries if axes else [dict(graph.sizes or {})]:
        if (seen := _inferred(graph, signature, sizes) or _observed_at(graph, signature, sizes)) is not None:
            return sizes, seen
    return tries[0], None


def _observed_at(graph: Graph, signature: GraphSignature, sizes: Mapping[str, int]) -> _Seen | None:
    try:
        feeds = dict(graph.feeds) if graph.feeds is not None else example_feeds(signature, sizes)
    except FeedError:  # a type that numpy has no values of
        return None
    return _observed(graph, feeds)


def _inferred(graph: Graph, signature: GraphSignature, sizes: Mapping[str, int]) -> _Seen | None:
    """By shape inference; None unless it knows every tensor of the main graph."""
    model = copy_of(graph.model)
    del model.graph.value_info[:]
    specs = {spec.name: spec for spec in signature.inputs}
    for value in model.graph.input:
        if value.name in specs:
            for dim, known in zip(value.type.tensor_type.shape.dim, specs[value.name].shape, strict=False):
                dim.dim_value = _size(known, sizes)
    for value in model.graph.output:
        value.type.tensor_type.ClearField("shape")
    try:
        model = onnx.shape_inference.infer_shapes(model, data_prop=True)
    except Exception:
        return None
    seen = _Seen({}, {})
    for inner in graphs_of(model):
        for value in (*inner.input, *inner.value_info, *inner.output):
            _add(seen, value)
    if any(name and name not in seen.shapes for node in model.graph.node for name in node.output if node.op_type != "Constant"):
        return None
    return _with_weights(graph, seen)


def _add(seen: _Seen, value: onnx.ValueInfoProto) -> None:
    tensor = value.type.tensor_type
    if tensor.HasField("shape") and all(dim.HasField("dim_value") for dim in tensor.shape.dim):
        shape = tuple(int(dim.dim_value) for dim in tensor.shape.dim)
        if all(size >= 0 for size in shape):
            seen.shapes[value.name] = shape
            seen.sizes[value.name] = _bytes(tensor.elem_type, shape)


def _observed(graph: Graph, feeds: Mapping[str, NDArray[Any]]) -> _Seen | None:
    """By running it; None if it fails."""
    if not graph.complete:
        return None
    seen = observe(graph.model, feeds)
    if seen.failed is not None or not seen.tensors:
        return None
    shapes = {name: item.shape for name, item in seen.tensors.items()}
    sizes = {name: _bytes(_kind(item.dtype), item.shape) for name, item in seen.tensors.items()}
    values = {name: item.values for name, item in seen.tensors.items() if item.values is not None and len(item.values) == 1}
    return _with_weights(graph, _Seen(shapes, sizes, values))


def _with_weights(graph: Graph, seen: _Seen) -> _Seen:
    """With the shapes of weights, and those that inner graphs declare: neither inference nor a run tells what is in a loop."""
    inside = _Seen({}, {})
    for inner in list(graphs_of(graph.model))[1:]:
        for value in (*inner.input, *inner.value_info, *inner.output):
            _add(inside, value)
    weights = {name: tuple(tensor.dims) for name, tensor in graph.wiring.constants.items()}
    return _Seen(inside.shapes | seen.shapes | weights, seen.sizes, seen.values)


def _flops(graph: Graph, seen: _Seen, notes: list[str]) -> int:
    counts = [flops_of(node, seen.shapes, seen.values) for node in graph.wiring.nodes]
    if unknown := sum(count is None for count in counts):
        notes.append(f"{unknown} nodes are left out of the FLOPs: their shapes are not known")
    return sum(count or 0 for count in counts)


def _peak(graph: onnx.GraphProto, seen: _Seen, derived: frozenset[str], in_place: Mapping[str, str]) -> int:
    """Most bytes that live at once: a tensor lives from the node that makes it to the last one that reads it.

    What is `derived` from weights alone (a dequantized weight) is computed at load and counts as a weight. Outputs of
    `in_place` are the memory of an input: a cache that is updated where it lies.
    """
    weights = {tensor.name for tensor in graph.initializer} | derived
    owner: dict[str, str] = dict(in_place)  # tensor → the tensor whose memory it shares
    last: dict[str, int] = {}
    ends = len(graph.node)
    for index, node in enumerate(graph.node):
        if node.op_type in _ALIASES and node.input[0] not in weights:
            owner[node.output[0]] = owner.get(node.input[0], node.input[0])
        for name in _reads(node):
            last[owner.get(name, name)] = index
    for value in (*graph.input, *graph.output):  # the caller holds these throughout
        last[owner.get(value.name, value.name)] = ends
    live = {value.name: seen.sizes.get(value.name, 0) for value in graph.input if value.name not in weights}
    peak = sum(live.values())
    for index, node in enumerate(graph.node):
        made = (name for name in node.output if name and name not in weights and owner.get(name, name) == name)
        live |= {name: seen.sizes.get(name, 0) for name in made}
        peak = max(peak, sum(live.values()))
        live = {name: size for name, size in live.items() if last.get(name, index) > index}
    return peak


def _reads(node: onnx.NodeProto) -> set[str]:
    """What a node reads, also from inside its inner graphs."""
    names = {name for name in node.input if name}
    for item in node.attribute:
        for inner in (item.g, *item.graphs):
            for below in inner.node:
                names |= _reads(below)
    return names
