"""Several MatMuls of one input → one MatMul and a Split: the query, key and value projections of attention.

    x W₁ + b₁, x W₂ + b₂, …  →  Split(x [W₁ W₂ …] + [b₁ b₂ …])

One large product keeps the processor busier than several small ones, and reads x once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from .engine import Context, Rewrite, weight
from .nodes import array_of, either_way, is_op, used_once


@dataclass(frozen=True)
class Projection:
    product: ir.Node
    weight: ir.Value
    add: ir.Node | None  # of a bias, where each has one
    bias: ir.Value | None

    @property
    def output(self) -> ir.Value:
        return (self.add or self.product).outputs[0]


@dataclass(frozen=True)
class Projections:
    root: ir.Node
    x: ir.Value
    parts: tuple[Projection, ...]


def pattern(node: ir.Node) -> Projections | None:
    """Found at the first of the MatMuls that use x."""
    if not is_op(node, "MatMul"):
        return None
    x = node.inputs[0]
    users = [use.node for use in x.uses() if is_op(use.node, "MatMul") and use.node.graph is node.graph]
    parts = tuple(part for user in users if (part := _projection(user)) is not None)
    if len(parts) < 2 or parts[0].product is not node:
        return None
    return Projections(node, x, _in_order_of_use(parts))


def _in_order_of_use(parts: tuple[Projection, ...]) -> tuple[Projection, ...]:
    """As the one node that takes them all does, if there is one: attention can then take them unsplit."""
    places = []
    for part in parts:
        uses = part.output.uses()
        if len(uses) != 1:
            return parts
        places.append((uses[0].node, uses[0].idx))
    if len({node for node, _ in places}) > 1:
        return parts
    order = sorted(range(len(parts)), key=lambda place: places[place][1])
    return tuple(parts[place] for place in order)


def condition(found: Projections, context: Context) -> str | None:
    if len({part.weight for part in found.parts}) < len(found.parts) or any(
        len(part.weight.uses()) > 1 for part in found.parts
    ):
        return "a weight is shared with another node and would be stored twice"
    if len({array_of(part.weight).shape[0] for part in found.parts}) > 1:  # type: ignore[union-attr]
        return "the weights differ in height"
    if context.opset < 13:
        return f"Split takes its sizes as an input from opset 13 on, and this graph has opset {context.opset}"
    return None


def replacement(found: Projections, context: Context) -> Mapping[ir.Value, ir.Value]:
    matrices = [array_of(part.weight) for part in found.parts]
    together = weight("weight", np.concatenate(matrices, axis=1))  # type: ignore[arg-type]
    result = ir.node("MatMul", [found.x, together]).outputs[0]
    biased = all(part.bias is not None for part in found.parts)
    if biased:
        biases = weight("bias", np.concatenate([array_of(part.bias) for part in found.parts]))
        result = ir.node("Add", [result, biases]).outputs[0]
    sizes = weight("sizes", np.array([matrix.shape[1] for matrix in matrices], np.int64))  # type: ignore[union-attr]
    split = ir.node("Split", [result, sizes], {"axis": -1}, num_outputs=len(found.parts))
    old = [part.output if biased else part.product.outputs[0] for part in found.parts]
    return dict(zip(old, split.outputs, strict=True))


def _projection(product: ir.Node) -> Projection | None:
    matrix = array_of(product.inputs[1])
    if matrix is None or matrix.ndim != 2:
        return None
    output = product.outputs[0]
    user = output.uses()[0].node if used_once(output) else None
    for _, bias in either_way(user) if is_op(user, "Add") else ():
        array = array_of(bias)
        if array is not None and array.shape == (matrix.shape[1],):
            return Projection(product, product.inputs[1], user, bias)
    return Projection(product, product.inputs[1], None, None)


REWRITE = Rewrite("pack-projections", "products of one input become one product", pattern, condition, replacement)
