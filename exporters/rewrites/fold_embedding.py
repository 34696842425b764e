"""A product of rows of a small table → rows of the table's product.

    E[tokens] W + b  →  (E W + b)[tokens]

Only where that takes no more room: if the table has at most as many rows as the product has inputs. An alphabet's embedding
does, and a step of a decoder is spared the product.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from .engine import Context, Rewrite, weight
from .nodes import array_of, attribute, either_way, is_op, made_by, used_once


@dataclass(frozen=True)
class EmbeddedProduct:
    root: ir.Node  # the product, or the sum with its bias
    gather: ir.Node
    matrix: ir.Value
    bias: ir.Value | None


def pattern(node: ir.Node) -> EmbeddedProduct | None:
    """Found at the product."""
    if not is_op(node, "MatMul"):
        return None
    gather = made_by(node.inputs[0], "Gather")
    table = None if gather is None else array_of(gather.inputs[0])
    matrix = array_of(node.inputs[1])
    if gather is None or table is None or matrix is None or table.ndim != 2 or matrix.ndim != 2:
        return None
    if attribute(gather, "axis", 0) != 0:
        return None
    output = node.outputs[0]
    user = output.uses()[0].node if used_once(output) else None
    for _, bias in either_way(user) if user is not None and is_op(user, "Add") else ():
        array = array_of(bias)
        if array is not None and array.shape == (matrix.shape[1],):
            return EmbeddedProduct(user, gather, node.inputs[1], bias)
    return EmbeddedProduct(node, gather, node.inputs[1], None)


def condition(found: EmbeddedProduct, context: Context) -> str | None:
    rows = len(array_of(found.gather.inputs[0]))  # type: ignore[arg-type]
    inputs = len(array_of(found.matrix))  # type: ignore[arg-type]
    if rows > inputs:
        return f"the table has {rows} rows and the product {inputs} inputs, so that it would grow"
    if len(found.matrix.uses()) > 1:
        return "the weight is used elsewhere too"
    return None


def replacement(found: EmbeddedProduct, context: Context) -> Mapping[ir.Value, ir.Value]:
    table, matrix = (array_of(value) for value in (found.gather.inputs[0], found.matrix))
    assert table is not None
    assert matrix is not None
    products = table.astype(np.float64) @ matrix
    if found.bias is not None:
        products = products + array_of(found.bias)
    gathered = ir.node("Gather", [weight("table", products.astype(matrix.dtype)), found.gather.inputs[1]], {"axis": 0})
    return {found.root.outputs[0]: gathered.outputs[0]}


REWRITE = Rewrite(
    "fold-embedding", "a product of a small table's rows becomes a table of products", pattern, condition, replacement
)
