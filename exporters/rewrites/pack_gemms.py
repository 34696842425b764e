"""Several Gemms of one input → one Gemm and a Split: what a recurrent decoder's state is multiplied by at every step.

x W₁ᵀ + b₁, x W₂ᵀ + b₂, …  →  Split(x [W₁; W₂; …]ᵀ + [b₁; b₂; …])
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from .engine import Context, Rewrite, weight
from .nodes import array_of, attribute, is_op


@dataclass(frozen=True)
class Gemms:
    root: ir.Node
    x: ir.Value
    parts: tuple[ir.Node, ...]


def pattern(node: ir.Node) -> Gemms | None:
    """Found at the first of the Gemms that use x."""
    x = node.inputs[0] if is_op(node, "Gemm") else None
    if x is None:
        return None
    users = [use.node for use in x.uses() if use.idx == 0 and is_op(use.node, "Gemm") and use.node.graph is node.graph]
    return Gemms(node, x, tuple(users)) if len(users) > 1 and users[0] is node else None


def condition(found: Gemms, context: Context) -> str | None:
    for gemm in found.parts:
        if attribute(gemm, "transA", 0) or attribute(gemm, "alpha", 1.0) != 1.0 or attribute(gemm, "beta", 1.0) != 1.0:
            return "a Gemm scales or transposes its input"
        if array_of(gemm.inputs[1]) is None or _bias(gemm) is None:
            return "a weight is computed at run time"
        if len(gemm.inputs[1].uses()) > 1:
            return "a weight is shared with another node and would be stored twice"
    if context.opset < 13:
        return f"Split takes its sizes as an input from opset 13 on, and this graph has opset {context.opset}"
    return None


def replacement(found: Gemms, context: Context) -> Mapping[ir.Value, ir.Value]:
    rows = [_rows(gemm) for gemm in found.parts]
    biases = [np.broadcast_to(_bias(gemm), len(part)) for gemm, part in zip(found.parts, rows, strict=True)]  # type: ignore
    given = [found.x, weight("weight", np.concatenate(rows)), weight("bias", np.concatenate(biases))]
    product = ir.node("Gemm", given, {"transB": 1}).outputs[0]
    sizes = weight("sizes", np.array([len(part) for part in rows], np.int64))
    split = ir.node("Split", [product, sizes], {"axis": -1}, num_outputs=len(rows))
    return dict(zip((gemm.outputs[0] for gemm in found.parts), split.outputs, strict=True))


def _rows(gemm: ir.Node) -> NDArray[Any]:
    """(outputs, inputs)"""
    matrix = array_of(gemm.inputs[1])
    assert matrix is not None
    return matrix if attribute(gemm, "transB", 0) else matrix.T


def _bias(gemm: ir.Node) -> NDArray[Any] | None:
    """A vector of the outputs, or one number for all; None if it is neither or not constant."""
    if len(gemm.inputs) < 3 or gemm.inputs[2] is None:
        return np.zeros(1, np.float32)
    bias = array_of(gemm.inputs[2])
    return bias if bias is not None and bias.shape in ((), (1,), (len(_rows(gemm)),)) else None


REWRITE = Rewrite("pack-gemms", "Gemms of one input become one Gemm", pattern, condition, replacement)
