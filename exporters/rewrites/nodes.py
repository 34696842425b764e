"""Reading a graph: what a value is worth, who makes it, who uses it. Patterns are written with these."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import onnx_ir as ir
from numpy.typing import NDArray

CONTRIB = "com.microsoft"  # onnxruntime's own operators
STANDARD = ("", "ai.onnx")
Known = dict[ir.Value, int | None]  # of one question: paths that part and meet at every sum are many, values are few


def array_of(value: ir.Value | None) -> NDArray[Any] | None:
    """The value if the graph fixes it (a weight or a Constant), else None."""
    if value is None or value.is_graph_input():
        return None
    tensor = ir.convenience.get_const_tensor(value)
    return None if tensor is None else tensor.numpy()


def scalar_of(value: ir.Value | None) -> float | None:
    """The number that a constant of one element holds."""
    array = array_of(value)
    return float(array.reshape(-1)[0]) if array is not None and array.size == 1 else None


def is_scalar(value: ir.Value | None, expected: float, *, relative: float = 1e-4) -> bool:
    """Whether a constant is `expected` as far as float32 text goes; exporters write √2 with four to eight digits."""
    number = scalar_of(value)
    return number is not None and abs(number - expected) <= relative * abs(expected)


def is_op(node: ir.Node | None, *operators: str, domains: Sequence[str] = STANDARD) -> bool:
    return node is not None and node.op_type in operators and node.domain in domains


def made_by(value: ir.Value | None, *operators: str, domains: Sequence[str] = STANDARD) -> ir.Node | None:
    """The node that computes `value`, if it is one of `operators`."""
    node = None if value is None else value.producer()
    return node if is_op(node, *operators, domains=domains) else None


def attribute(node: ir.Node, name: str, default: Any) -> Any:
    found = node.attributes.get(name)
    return default if found is None else found.value


def used_once(value: ir.Value) -> bool:
    return len(value.uses()) == 1 and not value.is_graph_output()


def rank(value: ir.Value, known: Known | None = None) -> int | None:
    """The number of axes, from the graph or, after operators whose shapes nobody infers, from what made the value."""
    if value.shape is not None:
        return len(value.shape)
    known = {} if known is None else known
    if value not in known:
        known[value] = _rank_of_made(value, known)
    return known[value]


def _rank_of_made(value: ir.Value, known: Known) -> int | None:
    node = value.producer()
    if node is None or not (node.outputs[0] is value or node.op_type == "SkipLayerNormalization"):
        return None
    if node.domain == CONTRIB and node.op_type.endswith("Attention"):
        return 3
    if is_op(node, "MatMul"):
        matrix = array_of(node.inputs[1])
        return rank(node.inputs[0], known) if matrix is not None and matrix.ndim == 2 else None
    return _largest(lambda item: rank(item, known), _alike(node))


def size(value: ir.Value, axis: int, known: Known | None = None) -> int | None:
    """A size that the graph fixes; None if it varies or is not known."""
    if value.shape is None and axis == -1:
        known = {} if known is None else known
        if value not in known:
            known[value] = _width(value, known)
        return known[value]
    if value.shape is None or not -len(value.shape) <= axis < len(value.shape):
        return None
    dim = value.shape[axis]
    return dim if isinstance(dim, int) else None


def _width(value: ir.Value, known: Known) -> int | None:
    """The size of the last axis as what made the value tells it."""
    node = value.producer()
    if node is None or not (node.outputs[0] is value or node.op_type == "SkipLayerNormalization"):
        return None
    if is_op(node, "MatMul"):
        matrix = array_of(node.inputs[1])
        return int(matrix.shape[1]) if matrix is not None and matrix.ndim == 2 else None
    if node.domain == CONTRIB and node.op_type.endswith("Attention"):
        return size(node.inputs[0], -1, known)
    return _largest(lambda item: size(item, -1, known), _alike(node))


def _alike(node: ir.Node) -> list[ir.Value]:
    """The inputs that what a node gives has the shape of, up to broadcasting."""
    if is_op(node, "Add", "Mul", "Sub", "Div"):
        return list(node.inputs)
    if is_op(node, "LayerNormalization", "Gelu", "Relu", "Tanh") or (
        node.domain == CONTRIB and node.op_type in ("SkipLayerNormalization", "BiasGelu", "FastGelu", "Gelu")
    ):
        return [node.inputs[0]]
    return []


def _largest(measure: Callable[[ir.Value], int | None], values: Sequence[ir.Value]) -> int | None:
    """The largest of a measure, if it is known of every value."""
    measures = [measure(value) for value in values]
    known = [number for number in measures if number is not None]
    return max(known) if known and len(known) == len(measures) else None


def is_last_axis(axis: int, value: ir.Value) -> bool:
    return axis == -1 or axis + 1 == rank(value)


def either_way(node: ir.Node) -> Iterator[tuple[ir.Value, ir.Value]]:
    """The two inputs of an Add or Mul in both orders."""
    if len(node.inputs) == 2 and None not in node.inputs:
        first, second = node.inputs
        yield first, second
        yield second, first


def factors_of(value: ir.Value, depth: int = 4) -> tuple[list[ir.Value], list[ir.Node]]:
    """A product taken apart into what is multiplied, and the Mul nodes that do it; a product used elsewhere stays whole."""
    node = made_by(value, "Mul")
    if node is None or depth == 0:
        return [value], []
    factors: list[ir.Value] = []
    nodes = [node]
    for item in node.inputs:
        inner, more = factors_of(item, depth - 1) if used_once(item) else ([item], [])
        factors += inner
        nodes += more
    return factors, nodes


def reduced_axes(node: ir.Node) -> list[int] | None:
    """The axes of a Reduce node, which are an attribute before opset 18 and an input after; None if not fixed."""
    if "axes" in node.attributes:
        return list(attribute(node, "axes", []))
    axes = array_of(node.inputs[1]) if len(node.inputs) > 1 else None
    return None if axes is None else [int(axis) for axis in axes.reshape(-1)]


def depends_on(values: Sequence[ir.Value | None], nodes: Sequence[ir.Node]) -> bool:
    """Whether computing `values` needs one of `nodes`."""
    sought = set(nodes)
    waiting = [value.producer() for value in values if value is not None]
    seen: set[ir.Node] = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        if node in sought:
            return True
        seen.add(node)
        waiting += [value.producer() for value in node.inputs if value is not None]
    return False


def name_of(node: ir.Node) -> str:
    return node.name or f"{node.op_type}({node.outputs[0].name})"
